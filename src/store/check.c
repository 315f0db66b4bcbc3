/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Looking a store over. The look itself only reads: labels, roots, both copies of the manifest, the footer of every
 * object and, if asked for, all bytes. Repairs are what a writer does anyway (mirrors of the newest root), a commit
 * that changes nothing but brings a new manifest, and rewriting a lost copy of the label; then the store is looked
 * over again, and what is not found any more was repaired.
 */
#include "check.h"

#include "copy_out.h"
#include "core/arith.h"
#include "core/error.h"
#include "core/mem.h"
#include "store.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* ---- telling ---- */

static void report(struct hr__check *check, bool is_bad, const char *format, ...) __attribute__((format(printf, 3, 4)));

static void report(struct hr__check *check, bool is_bad, const char *format, ...)
{
	char sentence[1024];
	va_list args;

	check->info.n_bad += is_bad;
	if (!check->opts.report)
		return;
	va_start(args, format);
	vsnprintf(sentence, sizeof(sentence), format, args);
	va_end(args);
	check->opts.report(check->opts.report_ctx, is_bad, sentence);
}

/* What the last call said is damage; other failures end the check. */
static int report_damage(struct hr__check *check, int code)
{
	if (code == HR_E_NOMEM || code == HR_E_CANCELLED || code == HR_E_OPTS || code == HR_E_REGION_CHANGED)
		return code;
	report(check, true, "%s", hr_error_last()->message);
	return 0;
}

static int tell(void *ctx, uint64_t bytes)
{
	struct hr__check *check = ctx;

	check->progress.done_bytes += bytes;
	return check->opts.progress ? check->opts.progress(check->opts.progress_ctx, &check->progress) : 0;
}

/* ---- label and roots ---- */

static const char *state_text(enum hr__record_state state)
{
	switch (state) {
	case HR__RECORD_GOOD:
		return "sound";
	case HR__RECORD_NONE:
		return "not there";
	case HR__RECORD_DAMAGED:
		return "damaged";
	case HR__RECORD_VERSION:
		return "of another format";
	default:
		return "of another place, store or time";
	}
}

static int look_at_labels(struct hr__check *check)
{
	struct hr__region *region = check->region;
	struct hr__label label;
	void *record;
	int code = hr__region_memory(HR__RECORD_BYTES, &record);

	for (unsigned copy = 0; copy < 2 && !code; copy++) {
		uint64_t off = hr__label_off(check->label.region_len, copy);
		enum hr__record_state state = HR__RECORD_DAMAGED;

		code = hr__region_read(region, off, record, HR__RECORD_BYTES, "the label");
		if (!code)
			state = hr__label_decode(record, off, &label);
		else
			code = report_damage(check, code);
		if (state != HR__RECORD_GOOD)
			report(check, true, "the label's copy at %" PRIu64 " is %s", off, state_text(state));
		check->label_is_good[copy] = state == HR__RECORD_GOOD;
	}
	hr__region_memory_free(record, HR__RECORD_BYTES);
	return code;
}

static void look_at_mirrors(struct hr__check *check)
{
	const struct hr__roots *roots = &check->roots;

	for (unsigned slot = 0; slot < 2; slot++)
		for (unsigned copy = 0; copy < 2; copy++) {
			uint64_t off = hr__root_off(check->label.region_len, slot, copy);
			enum hr__record_state state = roots->states[slot][copy];

			if (state == HR__RECORD_GOOD)
				continue;
			/* The other root may be torn or was never written: the next commit goes there. */
			if (slot == roots->newest)
				report(check, true, "the newest root's copy at %" PRIu64 " is %s", off,
				       state_text(state));
			else if (roots->roots[slot].generation || state != HR__RECORD_NONE)
				report(check, false,
				       "the older root's copy at %" PRIu64
				       " is %s, as after an interrupted commit; the next one writes it anew",
				       off, state_text(state));
		}
}

/* ---- manifests ---- */

/* Either copy by itself: readers need one, and a check says if there is one only. */
static int look_at_bodies(struct hr__check *check)
{
	const struct hr__root *newest = &check->roots.roots[check->roots.newest];
	int code = 0;

	for (int copy = 0; copy < 2 && !code; copy++) {
		bool is_right = false;

		code = hr__body_check(check->region, newest, copy, &is_right);
		if (is_right)
			continue;
		if (code == HR_E_IO)
			code = 0;
		report(check, true, "the manifest's copy at %" PRIu64 " is damaged", newest->body_off[copy]);
		check->body_is_damaged = true;
	}
	return code;
}

/* ---- objects ---- */

static int look_at_object(struct hr__check *check, const struct hr__object *object)
{
	uint32_t *digests = NULL;
	uint64_t n;
	int code;

	check->info.n_objects++;
	if (check->opts.flags & HR_CHECK_DIGESTS) {
		code = hr__object_copy(&(struct hr__copy){.region = check->region,
							  .store_uuid = check->label.uuid,
							  .object = object,
							  .fd = -1,
							  .progress = tell,
							  .ctx = check});
		if (!code)
			check->info.checked_bytes += object->payload_len;
	} else {
		code = hr__digests_read(check->region, check->label.uuid, object, &digests, &n);
		hr__free(digests);
	}
	return code ? report_damage(check, code) : 0;
}

static void name_users(struct hr__check *check, const struct hr__manifest *manifest, uint32_t object)
{
	for (uint32_t m = 0; m < manifest->models.n; m++) {
		struct hr__model_record model;

		hr__manifest_model(manifest, m, &model);
		for (uint32_t i = 0; i < model.n_members; i++) {
			struct hr__member member;

			hr__manifest_member(manifest, model.first_member + i, &member);
			if (member.object == object)
				report(check, false, "that object is %.*s of the model %.*s", (int)member.name_len,
				       member.name, (int)model.name_len, model.name);
		}
	}
}

static int look_at_objects(struct hr__check *check, const struct hr__manifest *manifest)
{
	int code = 0;

	for (uint32_t i = 0; i < manifest->objects.n; i++) {
		struct hr__object object;

		hr__manifest_object(manifest, i, &object);
		check->progress.total_bytes += object.payload_len;
	}
	check->progress.total_files = manifest->objects.n;
	for (uint32_t i = 0; i < manifest->objects.n && !code; i++) {
		uint32_t before = check->info.n_bad;
		struct hr__object object;

		hr__manifest_object(manifest, i, &object);
		code = look_at_object(check, &object);
		if (check->info.n_bad > before)
			name_users(check, manifest, i);
		check->progress.done_files++;
	}
	return code;
}

static int look_at_generation(struct hr__check *check)
{
	const struct hr__root *newest = &check->roots.roots[check->roots.newest];
	struct hr__manifest manifest;
	int code = look_at_bodies(check);

	if (code)
		return code;
	code = hr__manifest_read(check->region, &check->label, newest, &manifest);
	if (code)
		return report_damage(check, code);
	check->info.generation = newest->generation;
	code = look_at_objects(check, &manifest);
	hr__manifest_free(&manifest);
	return code;
}

int hr__check_look(struct hr__check *check)
{
	int code = hr__label_read(check->region, &check->label);

	if (code) {
		check->label = (struct hr__label){.data_off = HR__GUARD_BYTES};
		return code == HR_E_NOT_A_STORE ? code : report_damage(check, code);
	}
	code = look_at_labels(check);
	if (!code && hr__label_identify(check->region, &check->label))
		report(check, false, "%s", hr_error_last()->message);
	if (code)
		return code;
	code = hr__roots_read(check->region, &check->label, &check->roots);
	if (code)
		return report_damage(check, code);
	look_at_mirrors(check);
	return look_at_generation(check);
}

/* ---- repairing ---- */

static int mend_labels(hr_store *store)
{
	struct hr__region *region = store->now->region;
	struct hr__label found;
	void *record;
	int code = hr__region_memory(HR__RECORD_BYTES, &record);

	for (unsigned copy = 0; copy < 2 && !code; copy++) {
		uint64_t off = hr__label_off(store->now->label.region_len, copy);

		if (!hr__region_read(region, off, record, HR__RECORD_BYTES, "the label") &&
		    hr__label_decode(record, off, &found) == HR__RECORD_GOOD)
			continue;
		hr__label_encode(&store->now->label, off, record);
		code = hr__region_write(region, off, record, HR__RECORD_BYTES, "the label");
	}
	hr__region_memory_free(record, HR__RECORD_BYTES);
	return code ? code : hr__region_flush(region);
}

/* Readers of the generation that is gone back behind would be told nothing if its space were used again. */
static int check_readers(const hr_store *store)
{
	struct hr__region *region = store->now->region;
	const struct hr__where at = {.stage = "check", .path = region->path, .offset = HR_NO_OFFSET};
	uint64_t lowest;
	int error = region->ops->lowest_lock(region, HR__LOCK_LEASE(store->now->root.generation + 1),
					     HR__LOCK_LEASE(HR__MAX_GENERATION - 1), &lowest);

	if (error)
		return hr__fail_errno(&at, error, "ask for readers of");
	if (lowest != UINT64_MAX)
		return hr__fail_at(&at, HR_E_BUSY,
				   "%s is read at generation %" PRIu64
				   ", which would be gone back behind; end its readers first",
				   region->path, lowest - HR__LOCK_LEASE(0));
	return 0;
}

/* A commit that changes nothing: a new manifest, in new places, under a new root. */
static int commit_again(hr_store *store, bool gives_up_all)
{
	struct hr__draft draft;
	int code = hr__draft_from(&store->now->manifest, &draft);

	if (code)
		return code;
	code = hr__store_commit(store,
				&(struct hr__commit){.draft = &draft,
						     .floor_gen = gives_up_all ? hr__store_next_generation(store) : 0,
						     .first_fresh = UINT32_MAX});
	hr__draft_free(&draft);
	return code;
}

static int repair(struct hr__check *check, struct hr__region *region)
{
	bool go_back = check->opts.flags & HR_CHECK_ROLLBACK;
	hr_store *store;
	int code = hr__store_open_on(region, &(struct hr__snapshot_want){.is_moved = true, .step_back = go_back},
				     &store);
	bool is_back;

	if (code)
		return code == HR_E_CORRUPT || code == HR_E_DIVERGED ? 0 : code; /* the next look tells */
	is_back = store->now->slot != store->now->roots.newest;
	code = hr__store_begin(store);
	if (code)
		goto out;
	if (is_back)
		code = check_readers(store);
	if (!code && (check->opts.flags & HR_CHECK_REPAIR))
		code = mend_labels(store);
	if (!code && (is_back || (check->body_is_damaged && (check->opts.flags & HR_CHECK_REPAIR))))
		code = commit_again(store, is_back);
	hr__store_end(store);
out:
	hr_store_close(store);
	return code;
}

/* ---- from the outside ---- */

int hr__check_repair(struct hr__check *check, struct hr__region *writable)
{
	uint32_t before = check->info.n_bad;
	int code = repair(check, writable);

	if (code)
		return code;
	check->info = (struct hr_store_check_info){.size = sizeof(check->info)};
	check->progress.done_bytes = 0;
	check->progress.total_bytes = 0;
	check->progress.done_files = 0;
	check->body_is_damaged = false;
	code = hr__check_look(check);
	check->info.n_repaired = before > check->info.n_bad ? before - check->info.n_bad : 0;
	return code;
}

static int start(struct hr__check *check, const char *path, const struct hr_store_check_opts *given)
{
	const uint32_t known = HR_CHECK_DIGESTS | HR_CHECK_REPAIR | HR_CHECK_ROLLBACK | HR_CHECK_SALVAGE;
	int code = hr__opts_copy(&check->opts, sizeof(check->opts), given, "hr_store_check_opts");

	if (!code && (check->opts.flags & ~known))
		code = hr__fail(HR_E_OPTS, "hr_store_check_opts.flags has bits that this version does not know");
	if (!code && (!path || !path[0]))
		code = hr__fail(HR_E_OPTS, "the path of the store is empty");
	check->info.size = sizeof(check->info);
	check->progress = (struct hr_store_progress){.size = sizeof(check->progress), .step = "reading", .file = ""};
	return code ? code : hr__region_open(path, false, &check->region);
}

int hr_store_check(const char *path, const struct hr_store_check_opts *given, struct hr_store_check_info *out)
{
	struct hr__check check = {.region = NULL};
	struct hr__region *writable;
	int code = start(&check, path, given);

	if (code)
		return code;
	code = hr__check_look(&check);
	if (!code && (check.opts.flags & (HR_CHECK_REPAIR | HR_CHECK_ROLLBACK)) && check.info.n_bad) {
		code = hr__region_open(path, true, &writable);
		if (!code)
			code = hr__check_repair(&check, writable);
	}
	if ((!code || code == HR_E_NOT_A_STORE) && (check.opts.flags & HR_CHECK_SALVAGE))
		code = hr__check_salvage(&check);
	hr__region_close(check.region);
	return code || !out ? code : hr__out_copy(out, &check.info, sizeof(check.info), "hr_store_check_info");
}
