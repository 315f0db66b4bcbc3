/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The handle: opening, closing, and what can be asked of a store. A writer holds the region's writer lock as long as
 * it is open, puts torn mirrors of the newest root right, and knows what the other root names, since that may not be
 * written to.
 */
#include "store.h"

#include "core/arith.h"
#include "core/error.h"
#include "core/mem.h"

#include <errno.h>
#include <string.h>

/* ---- opening ---- */

int hr__store_lock_writer(struct hr__region *region)
{
	const struct hr__where at = {.stage = "open", .path = region->path, .offset = HR_NO_OFFSET};
	int error = region->ops->lock(region, HR__OS_LOCK_ALONE, HR__LOCK_WRITER);

	if (error == EAGAIN)
		return hr__fail_at(&at, HR_E_LOCKED, "%s is being written to by another process; wait for it to end",
				   region->path);
	return error ? hr__fail_errno(&at, error, "lock") : 0;
}

/* Rewrites mirrors of the newest root that are missing, torn or old; never the other root. */
static int mend_mirrors(hr_store *store)
{
	struct hr__snapshot *now = store->now;
	bool is_mended = false;
	void *record;
	int code = hr__region_memory(HR__RECORD_BYTES, &record);

	for (unsigned copy = 0; copy < 2 && !code; copy++) {
		uint64_t off = hr__root_off(now->label.region_len, now->slot, copy);

		if (now->roots.states[now->slot][copy] == HR__RECORD_GOOD)
			continue;
		hr__root_encode(&now->root, now->label.uuid, off, record);
		code = hr__region_write(now->region, off, record, HR__RECORD_BYTES, "a root");
		is_mended = true;
	}
	hr__region_memory_free(record, HR__RECORD_BYTES);
	return code || !is_mended ? code : hr__region_flush(now->region);
}

static int open_writer(hr_store *store)
{
	struct hr__snapshot *now = store->now;
	const struct hr__root *other = &now->roots.roots[!now->slot];
	int code = 0, error;

	if (now->label.no_write)
		return hr__fail_at(
			&(struct hr__where){.stage = "open", .path = now->region->path, .offset = HR_NO_OFFSET},
			HR_E_STORE_VERSION,
			"%s has a feature that this version of headrace can read beside, but not write; use a newer one",
			now->region->path);
	error = hr__os_random(store->writer_id, sizeof(store->writer_id));
	if (error)
		return hr__fail_errno(&(struct hr__where){.stage = "open", .offset = HR_NO_OFFSET}, error,
				      "get random bytes");
	if (now->slot == now->roots.newest)
		code = mend_mirrors(store);
	if (!code && other->generation) {
		code = hr__manifest_read(now->region, &now->label, other, &store->other);
		if (code == HR_E_CORRUPT)
			code = 0; /* it cannot be gone back to, so there is nothing to keep */
	}
	return code ? code : hr__store_survey(store);
}

static int start(hr_store *store)
{
	pthread_mutex_init(&store->lock, NULL);
	pthread_mutex_init(&store->writing, NULL);
	store->fork_mark = hr__os_fork_mark_new();
	return store->fork_mark ? 0 : hr__fail_nomem(hr__os_page_bytes());
}

int hr__store_open_on(struct hr__region *region, const struct hr__snapshot_want *given, hr_store **out)
{
	struct hr__snapshot_want want = *given;
	hr_store *store = hr__calloc(1, sizeof(*store));
	int code = store ? start(store) : HR_E_NOMEM;

	*out = NULL;
	if (!code && region->is_writable)
		code = hr__store_lock_writer(region);
	if (code) {
		hr__region_close(region);
		hr_store_close(store);
		return code;
	}
	store->is_writable = region->is_writable;
	want.without_lease = region->is_writable; /* nobody takes space away from the only writer */
	code = hr__snapshot_open_on(region, &want, &store->now);
	if (!code && store->is_writable)
		code = open_writer(store);
	if (code)
		hr_store_close(store);
	else
		*out = store;
	return code;
}

int hr_store_open(const char *path, const struct hr_store_opts *given, hr_store **out)
{
	struct hr__region *region;
	struct hr_store_opts opts;
	int code;

	if (!out)
		return hr__fail(HR_E_OPTS, "hr_store_open() has no place for the store (out is NULL)");
	*out = NULL;
	code = hr__opts_copy(&opts, sizeof(opts), given, "hr_store_opts");
	if (code)
		return code;
	if (!path || !path[0])
		return hr__fail(HR_E_OPTS, "the path of the store is empty");
	if (opts.flags & ~(HR_STORE_WRITE | HR_STORE_MOVED))
		return hr__fail(HR_E_OPTS,
				"hr_store_opts.flags is 0x%x, which has bits that this version does not know",
				(unsigned)opts.flags);
	if (opts.generation && (opts.flags & HR_STORE_WRITE))
		return hr__fail(HR_E_OPTS, "only the newest generation of a store can be written to");
	code = hr__region_open(path, opts.flags & HR_STORE_WRITE, &region);
	return code ? code
		    : hr__store_open_on(region,
					&(struct hr__snapshot_want){.generation = opts.generation,
								    .is_moved = opts.flags & HR_STORE_MOVED},
					out);
}

void hr_store_close(hr_store *store)
{
	if (!store)
		return;
	hr__manifest_free(&store->other);
	hr__space_free(&store->space);
	hr__free(store->users);
	hr__free(store->pending);
	hr__snapshot_release(store->now);
	hr__os_fork_mark_free(store->fork_mark);
	pthread_mutex_destroy(&store->lock);
	pthread_mutex_destroy(&store->writing);
	hr__free(store);
}

/* ---- writing ---- */

static struct hr__where here(const hr_store *store)
{
	return (struct hr__where){.stage = "store", .path = store->now->region->path, .offset = HR_NO_OFFSET};
}

int hr__store_check_usable(const hr_store *store)
{
	if (!store)
		return hr__fail(HR_E_OPTS, "the store is NULL");
	return *store->fork_mark
		       ? 0
		       : hr__fail(HR_E_FORKED, "the store was opened by the parent process; open it again here");
}

int hr__store_begin(hr_store *store)
{
	int code = hr__store_check_usable(store);
	struct hr__where at;

	if (code)
		return code;
	at = here(store);
	if (!store->is_writable)
		return hr__fail_at(&at, HR_E_OPTS, "%s was opened for reading; open it with HR_STORE_WRITE", at.path);
	pthread_mutex_lock(&store->writing);
	store->n_pending = 0;
	if (!store->poisoned_by)
		return 0;
	pthread_mutex_unlock(&store->writing);
	return hr__fail_at(&at, HR_E_POISONED,
			   "writing generation %" PRIu64 " of %s failed earlier; close the store and open it again",
			   store->poisoned_by, at.path);
}

void hr__store_end(hr_store *store)
{
	pthread_mutex_unlock(&store->writing);
}

/* ---- asking ---- */

static const char *kind_name(uint32_t kind)
{
	static const char *const names[] = {"?", "nvme", "scsi", "virtio", "dm", "loop", "file", "other"};

	return names[kind < sizeof(names) / sizeof(names[0]) ? kind : 0];
}

/* The table of users, made when it is first asked for. Under lock. */
static int count_users(hr_store *store)
{
	const struct hr__manifest *manifest = &store->now->manifest;
	uint32_t *users;

	if (store->users && store->users_of == manifest->generation)
		return 0;
	users = hr__calloc(manifest->objects.n, sizeof(*users));
	if (!users)
		return HR_E_NOMEM;
	for (uint32_t i = 0; i < manifest->members.n; i++) {
		struct hr__member member;

		hr__manifest_member(manifest, i, &member);
		users[member.object]++;
	}
	hr__free(store->users);
	store->users = users;
	store->users_of = manifest->generation;
	return 0;
}

static void count_unbound(const hr_store *store, struct hr_store_info *out)
{
	for (uint32_t i = 0; i < store->now->manifest.objects.n; i++) {
		struct hr__object object;

		if (store->users[i])
			continue;
		hr__manifest_object(&store->now->manifest, i, &object);
		out->n_unbound++;
		out->unbound_bytes += object.ext_len;
	}
}

/* As a reader sees it: what the newest generation neither names nor waits for. */
static int count_space(const struct hr__snapshot *now, struct hr_store_info *out)
{
	struct hr__space space = {.begin = now->label.data_off, .end = now->root.data_end};
	int code = 0;

	for (uint32_t i = 0; i < now->manifest.objects.n && !code; i++) {
		struct hr__object object;

		hr__manifest_object(&now->manifest, i, &object);
		code = hr__space_add(&space, object.ext_off, object.ext_len);
	}
	for (uint32_t i = 0; i < now->manifest.retired.n && !code; i++) {
		struct hr__retired retired;

		hr__manifest_retired(&now->manifest, i, &retired);
		out->retired_bytes += retired.len;
		code = hr__space_add(&space, retired.off, retired.len);
	}
	for (int copy = 0; copy < 2 && !code; copy++)
		code = hr__space_add(&space, now->root.body_off[copy],
				     hr__round_up(now->root.body_len, HR__EXTENT_ALIGN));
	if (!code)
		hr__space_merge(&space);
	hr__space_free_bytes(&space, &out->free_bytes, &out->largest_free_bytes);
	hr__space_free(&space);
	return code;
}

static int fill_info(hr_store *store, struct hr_store_info *out)
{
	const struct hr__snapshot *now = store->now;
	const struct hr__label *label = &now->label;

	memcpy(out->name, label->name, sizeof(label->name));
	memcpy(out->uuid, label->uuid, 16);
	memcpy(out->kind, kind_name(label->ident.kind), strlen(kind_name(label->ident.kind)));
	memcpy(out->wwid, label->ident.wwid, sizeof(label->ident.wwid));
	memcpy(out->body_sha256, now->root.body_sha256, 32);
	out->generation = now->root.generation;
	out->floor_generation = now->root.floor_gen;
	out->region_bytes = label->region_len;
	out->data_bytes = now->root.data_end - label->data_off;
	out->live_bytes = now->root.live_bytes;
	out->manifest_bytes = now->root.body_len;
	out->init_time_ns = label->init_time_ns;
	out->commit_time_ns = now->root.commit_time_ns;
	out->lba_bytes = label->lba_bytes;
	out->n_models = now->manifest.models.n;
	out->n_objects = now->manifest.objects.n;
	out->is_leased = now->is_leased;
	count_unbound(store, out);
	return count_space(now, out);
}

int hr_store_stats(hr_store *store, struct hr_store_info *out)
{
	struct hr_store_info info = {.size = sizeof(info)};
	int code = hr__store_check_usable(store);

	if (code)
		return code;
	pthread_mutex_lock(&store->lock);
	code = count_users(store);
	if (!code)
		code = fill_info(store, &info);
	pthread_mutex_unlock(&store->lock);
	return code ? code : hr__out_copy(out, &info, sizeof(info), "hr_store_info");
}

static void fill_model(const struct hr__manifest *manifest, uint32_t number, struct hr_store_model_info *out)
{
	struct hr__model_record model;

	hr__manifest_model(manifest, number, &model);
	*out = (struct hr_store_model_info){.size = sizeof(*out),
					    .name = model.name,
					    .name_len = model.name_len,
					    .provenance = model.provenance,
					    .provenance_len = model.provenance_len,
					    .created_generation = model.created_gen,
					    .n_files = model.n_members};
	memcpy(out->uuid, model.uuid, 16);
	for (uint32_t i = 0; i < model.n_members; i++) {
		struct hr__member member;
		struct hr__object object;

		hr__manifest_member(manifest, model.first_member + i, &member);
		hr__manifest_object(manifest, member.object, &object);
		out->bytes += object.payload_len;
		out->n_shards += object.kind == HR__OBJECT_SHARD;
	}
}

int hr_store_model(hr_store *store, uint32_t model, struct hr_store_model_info *out)
{
	struct hr_store_model_info info;
	int code = hr__store_check_usable(store);

	if (code)
		return code;
	pthread_mutex_lock(&store->lock);
	if (model < store->now->manifest.models.n)
		fill_model(&store->now->manifest, model, &info);
	else
		code = hr__fail(HR_E_OPTS, "there is no model %" PRIu32 ": the store has %" PRIu32, model,
				store->now->manifest.models.n);
	pthread_mutex_unlock(&store->lock);
	return code ? code : hr__out_copy(out, &info, sizeof(info), "hr_store_model_info");
}

int hr_store_find(hr_store *store, const char *name, uint32_t *model)
{
	int code = hr__store_check_usable(store);

	if (!code && (!name || !model))
		code = hr__fail(HR_E_OPTS, "hr_store_find() needs a name and a place for the number");
	if (code)
		return code;
	pthread_mutex_lock(&store->lock);
	if (!hr__manifest_find_model(&store->now->manifest, name, strlen(name), model)) {
		const struct hr__where at = here(store);

		code = hr__fail_at(&at, HR_E_NOTFOUND,
				   "%s has no model of the name %s; \"headrace store ls\" lists them", at.path, name);
	}
	pthread_mutex_unlock(&store->lock);
	return code;
}

int hr_store_file(hr_store *store, uint32_t model, uint32_t file, struct hr_store_file_info *out)
{
	struct hr_store_file_info info = {.size = sizeof(info)};
	struct hr__model_record record = {.n_members = 0};
	int code = hr__store_check_usable(store);

	if (code)
		return code;
	pthread_mutex_lock(&store->lock);
	if (model < store->now->manifest.models.n)
		hr__manifest_model(&store->now->manifest, model, &record);
	if (file < record.n_members) {
		struct hr__member member;

		hr__manifest_member(&store->now->manifest, record.first_member + file, &member);
		info.name = member.name;
		info.name_len = member.name_len;
		info.object = member.object;
	} else {
		code = hr__fail(HR_E_OPTS, "there is no file %" PRIu32 " of model %" PRIu32, file, model);
	}
	pthread_mutex_unlock(&store->lock);
	return code ? code : hr__out_copy(out, &info, sizeof(info), "hr_store_file_info");
}

static void fill_object(const hr_store *store, uint32_t number, struct hr_store_object_info *out)
{
	struct hr__object object;

	hr__manifest_object(&store->now->manifest, number, &object);
	*out = (struct hr_store_object_info){.size = sizeof(*out),
					     .bytes = object.payload_len,
					     .offset = object.ext_off + object.payload_off,
					     .extent_offset = object.ext_off,
					     .extent_bytes = object.ext_len,
					     .header_bytes = object.header_len,
					     .created_generation = object.created_gen,
					     .n_tensors = object.n_tensors,
					     .n_users = store->users[number],
					     .digest_block_bytes = UINT32_C(1) << object.block_log2,
					     .is_shard = object.kind == HR__OBJECT_SHARD};
	memcpy(out->uuid, object.uuid, 16);
	memcpy(out->sha256, object.payload_sha256, 32);
	memcpy(out->header_sha256, object.header_sha256, 32);
}

int hr_store_object(hr_store *store, uint32_t object, struct hr_store_object_info *out)
{
	struct hr_store_object_info info;
	int code = hr__store_check_usable(store);

	if (code)
		return code;
	pthread_mutex_lock(&store->lock);
	code = count_users(store);
	if (!code && object < store->now->manifest.objects.n)
		fill_object(store, object, &info);
	else if (!code)
		code = hr__fail(HR_E_OPTS, "there is no object %" PRIu32 ": the store has %" PRIu32, object,
				store->now->manifest.objects.n);
	pthread_mutex_unlock(&store->lock);
	return code ? code : hr__out_copy(out, &info, sizeof(info), "hr_store_object_info");
}
