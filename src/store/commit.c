/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One commit, in the order that everything else rests on:
 *
 *   write both copies of the manifest; flush (with them, what was written of objects); read back; look whether region
 *   and roots are what they were; write the root that is not in use, both mirrors; flush; read them back.
 *
 * Until the root is written nothing is visible, and an error leaves the store as it was. From then on an error means
 * that nobody knows: the handle is poisoned, and opening the store again decides. A flush that failed is never tried
 * again on the same handle, since the system reports a lost write only once.
 */
#include "store.h"

#include "core/arith.h"
#include "core/error.h"
#include "core/hash.h"
#include "core/mem.h"
#include "mutant.h"
#include "readback.h"

#include <errno.h>
#include <string.h>

#define PIECE_BYTES (UINT64_C(4) << 20)

#ifdef HR_TEST
unsigned hr__store_mutants;
#endif

struct commit {
	hr_store *store;
	const struct hr__commit *order;
	struct hr__region *region;
	struct hr__root root;
	unsigned slot;
	uint8_t *body;
	size_t bytes, whole; /* of the body, and in whole extents */
	struct hr__manifest manifest;
};

static struct hr__where here(const struct commit *commit)
{
	return (struct hr__where){.stage = "commit", .path = commit->region->path, .offset = HR_NO_OFFSET};
}

/* ---- the new manifest ---- */

/* What was given up for good is not listed any more; the manifest in use becomes what waits to be. */
static int settle_retired(struct commit *commit)
{
	struct hr__draft *draft = commit->order->draft;
	const struct hr__root *before = &commit->store->now->root;
	uint64_t body = hr__round_up(before->body_len, HR__EXTENT_ALIGN);
	uint32_t n = 0;
	int code = 0;

	for (uint32_t i = 0; i < draft->n_retired; i++) {
		if (hr__store_is_reusable(commit->store, &draft->retired[i]))
			continue;
		draft->retired[n] = draft->retired[i];
		n++;
	}
	draft->n_retired = n;
	if (HR__MUTANT(HR__MUTANT_BODY_IN_PLACE))
		return 0;
	for (int copy = 0; copy < 2 && !code; copy++)
		code = hr__draft_retire(draft, before->body_off[copy], body, before->generation);
	return code;
}

static int place_body(struct commit *commit)
{
	struct hr__space *space = &commit->store->space;
	int code;

	if (HR__MUTANT(HR__MUTANT_BODY_IN_PLACE)) {
		memcpy(commit->root.body_off, commit->store->now->root.body_off, sizeof(commit->root.body_off));
		return 0;
	}
	/* The two copies at opposite ends, so that one bad patch cannot have both. */
	code = hr__space_take(space, commit->whole, false, &commit->root.body_off[0]);
	return code ? code : hr__space_take(space, commit->whole, true, &commit->root.body_off[1]);
}

static int prepare(struct commit *commit)
{
	const struct hr__snapshot *now = commit->store->now;
	struct hr__draft *draft = commit->order->draft;
	struct hr__root *root = &commit->root;
	int code;

	*root = (struct hr__root){.generation = hr__store_next_generation(commit->store),
				  .floor_gen = hr__max_u64(now->root.floor_gen, commit->order->floor_gen),
				  .data_end = now->root.data_end,
				  .n_objects = draft->n_objects,
				  .n_models = draft->n_models,
				  .commit_time_ns = hr__os_date_ns()};
	memcpy(root->writer_id, commit->store->writer_id, 16);
	for (uint32_t i = 0; i < draft->n_objects; i++)
		root->live_bytes += draft->objects[i].ext_len;
	commit->slot = HR__MUTANT(HR__MUTANT_ONE_ROOT) ? now->slot : !now->slot;
	if (root->generation > HR__MAX_GENERATION)
		return hr__fail(HR_E_LIMIT,
				"the store has had %" PRIu64 " generations, which is as many as it can have",
				HR__MAX_GENERATION);
	code = settle_retired(commit);
	if (!code)
		code = hr__draft_build(draft, &now->label, root->generation, &commit->body, &commit->bytes);
	if (code)
		return code;
	commit->whole = (size_t)hr__round_up(commit->bytes, HR__EXTENT_ALIGN);
	root->body_len = commit->bytes;
	hr__sha256_of(commit->body, commit->bytes, root->body_sha256);
	return place_body(commit);
}

/* A manifest that readers would refuse must not be written: this looks with their eyes. */
static int look_again(struct commit *commit)
{
	int code = hr__manifest_parse(commit->body, commit->bytes, &commit->store->now->label, &commit->root,
				      &commit->manifest);

	commit->manifest.room = commit->whole;
	return HR__MUTANT(HR__MUTANT_REUSE_EARLY | HR__MUTANT_BODY_IN_PLACE) ? 0 : code;
}

/* ---- reading back ---- */

struct verify {
	struct hr__region *region;
	const struct hr__object *object;
	const uint32_t *digests;
	uint8_t *memory;
	hr__sha256 *sha; /* of the header */
	uint64_t left;   /* of it */
};

/* One piece that begins at a digest block; `off` counts in the payload. */
static int verify_piece(struct verify *verify, uint64_t off, uint64_t bytes)
{
	const struct hr__object *object = verify->object;
	uint64_t at = object->ext_off + object->payload_off + off;
	size_t head = (size_t)hr__min_u64(bytes, verify->left);
	struct hr__read_back back = {.region = verify->region,
				     .at = at,
				     .bytes = bytes,
				     .digests = verify->digests + (off >> object->block_log2),
				     .block_log2 = object->block_log2,
				     .memory = verify->memory};
	int error = hr__read_back(&back);

	if (error == EBADMSG)
		return hr__fail_read_back(&back, object->ext_off);
	if (error)
		return hr__region_fail(verify->region, error, at, "read", "an object");
	verify->left -= head;
	return head ? hr__sha256_update(verify->sha, verify->memory, head) : 0;
}

static int verify_header(struct verify *verify)
{
	uint8_t sha256[32];
	int code;

	if (verify->object->kind != HR__OBJECT_SHARD)
		return 0;
	code = hr__sha256_final(verify->sha, sha256);
	if (!code && memcmp(sha256, verify->object->header_sha256, 32) != 0)
		code = hr__fail_at(&(struct hr__where){.stage = "verify",
						       .path = verify->region->path,
						       .offset = verify->object->ext_off},
				   HR_E_DIGEST, "%s: the header of the object at %" PRIu64 " does not have its SHA-256",
				   verify->region->path, verify->object->ext_off);
	return code;
}

int hr__object_verify(struct hr__region *region, const uint8_t store_uuid[16], const struct hr__object *object,
		      uint64_t checked, int (*progress)(void *ctx, uint64_t bytes), void *ctx)
{
	struct verify verify = {.region = region, .object = object};
	uint32_t *digests = NULL;
	size_t room = (size_t)hr__round_up(hr__min_u64(PIECE_BYTES, object->payload_len + 1), HR__RECORD_BYTES);
	void *memory = NULL;
	uint64_t n;
	int code = hr__digests_read(region, store_uuid, object, &digests, &n);

	if (!code)
		code = hr__region_memory(room, &memory);
	if (!code)
		code = hr__sha256_new(&verify.sha);
	verify.digests = digests;
	verify.memory = memory;
	verify.left = object->kind == HR__OBJECT_SHARD ? 8 + object->header_len : 0;
	for (uint64_t off = verify.left ? 0 : checked; off < object->payload_len && !code;) {
		uint64_t bytes = hr__min_u64(PIECE_BYTES, object->payload_len - off);

		code = verify_piece(&verify, off, bytes);
		/* A header that is looked at once more is no progress. */
		if (!code && off + bytes > checked && progress &&
		    progress(ctx, off + bytes - hr__max_u64(off, checked)))
			code = hr__fail(HR_E_CANCELLED, "cancelled by the caller");
		off = verify.left ? off + bytes : hr__max_u64(off + bytes, checked);
	}
	if (!code)
		code = verify_header(&verify);
	hr__sha256_free(verify.sha);
	hr__region_memory_free(memory, room);
	hr__free(digests);
	return code;
}

static int read_back_body(struct commit *commit)
{
	struct hr__where at = here(commit);
	void *memory;
	int code = hr__region_memory(commit->whole, &memory);

	for (int copy = 0; copy < 2 && !code; copy++) {
		at.offset = commit->root.body_off[copy];
		code = hr__region_read(commit->region, at.offset, memory, commit->whole, "the manifest");
		if (!code && memcmp(memory, commit->body, commit->whole) != 0)
			code = hr__fail_at(&at, HR_E_DIGEST,
					   "%s does not give back the manifest that was written at %" PRIu64
					   "; memory, cable or device is at fault",
					   commit->region->path, at.offset);
	}
	hr__region_memory_free(memory, commit->whole);
	return code;
}

static int read_back(struct commit *commit)
{
	const struct hr__draft *draft = commit->order->draft;
	int code = read_back_body(commit);

	for (uint32_t i = commit->order->first_fresh; i < draft->n_objects && !code; i++)
		code = hr__object_verify(commit->region, commit->store->now->label.uuid, &draft->objects[i],
					 commit->order->checked ? commit->order->checked[i - commit->order->first_fresh]
								: 0,
					 commit->order->progress, commit->order->ctx);
	return code;
}

/* ---- the switch ---- */

/* The region is the one that was opened, and nobody else has made a commit. */
static int still_ours(struct commit *commit)
{
	const struct hr__snapshot *now = commit->store->now;
	const struct hr__where at = here(commit);
	struct hr__label label;
	struct hr__roots roots;
	int code = hr__region_check(commit->region);

	if (!code)
		code = hr__label_read(commit->region, &label);
	if (!code && memcmp(label.uuid, now->label.uuid, 16) != 0)
		code = hr__fail_at(&at, HR_E_REGION_CHANGED, "%s holds another store now; nothing was committed",
				   commit->region->path);
	if (!code)
		code = hr__roots_read(commit->region, &now->label, &roots);
	if (!code && memcmp(&roots.roots[now->slot], &now->root, sizeof(now->root)) != 0)
		code = hr__fail_at(&at, HR_E_REGION_CHANGED,
				   "%s was at generation %" PRIu64 " and is at %" PRIu64
				   ": somebody else writes to it; nothing was committed",
				   commit->region->path, now->root.generation,
				   hr__max_u64(roots.roots[0].generation, roots.roots[1].generation));
	return code;
}

static int write_root(struct commit *commit, void *record)
{
	const struct hr__label *label = &commit->store->now->label;
	unsigned n_copies = HR__MUTANT(HR__MUTANT_ONE_ROOT) ? 1 : 2;
	int code = 0;

	for (unsigned copy = 0; copy < n_copies && !code; copy++) {
		uint64_t off = hr__root_off(label->region_len, commit->slot, copy);

		hr__root_encode(&commit->root, label->uuid, off, record);
		code = hr__region_write(commit->region, off, record, HR__RECORD_BYTES, "a root");
	}
	if (!code && !HR__MUTANT(HR__MUTANT_NO_FLUSH_AFTER_ROOT))
		code = hr__region_flush(commit->region);
	return code;
}

static int check_root(struct commit *commit, void *record)
{
	const struct hr__label *label = &commit->store->now->label;
	const struct hr__where at = here(commit);
	unsigned n_copies = HR__MUTANT(HR__MUTANT_ONE_ROOT) ? 1 : 2;
	int code = 0;

	for (unsigned copy = 0; copy < n_copies && !code; copy++) {
		uint64_t off = hr__root_off(label->region_len, commit->slot, copy);
		struct hr__root found;

		code = hr__region_read(commit->region, off, record, HR__RECORD_BYTES, "a root");
		if (!code && (hr__root_decode(record, label, off, &found) != HR__RECORD_GOOD ||
			      memcmp(&found, &commit->root, sizeof(found)) != 0))
			code = hr__fail_at(&at, HR_E_DIGEST,
					   "%s does not give back the root that was written at %" PRIu64,
					   commit->region->path, off);
	}
	return code;
}

static int fail_unknown(struct commit *commit)
{
	struct hr__where at = here(commit);
	struct hr__error_record cause;

	hr__error_save(&cause);
	at.system = cause.error.system;
	return hr__fail_at(&at, HR_E_COMMIT_UNKNOWN,
			   "%s: whether generation %" PRIu64
			   " was recorded is not known (%.400s); open the store again, that decides",
			   commit->region->path, commit->root.generation, cause.message);
}

static int switch_root(struct commit *commit)
{
	void *record;
	int code = hr__region_memory(HR__RECORD_BYTES, &record);

	if (code)
		return code;
	code = write_root(commit, record);
	if (!code)
		code = check_root(commit, record);
	hr__region_memory_free(record, HR__RECORD_BYTES);
	if (code) {
		commit->store->poisoned_by = commit->root.generation;
		code = fail_unknown(commit);
	}
	return code;
}

/* The new generation is the store's, in this handle too. */
static int adopt(struct commit *commit)
{
	hr_store *store = commit->store;
	struct hr__snapshot *now = store->now;

	hr__manifest_free(&store->other);
	pthread_mutex_lock(&store->lock);
	store->other = now->manifest;
	now->manifest = commit->manifest;
	now->roots.roots[commit->slot] = commit->root;
	now->roots.newest = commit->slot;
	now->root = commit->root;
	now->slot = commit->slot;
	pthread_mutex_unlock(&store->lock);
	/* It is committed all the same; what may be written to next is not known then. */
	if (hr__store_survey(store))
		store->poisoned_by = commit->root.generation;
	return 0;
}

int hr__store_commit(hr_store *store, const struct hr__commit *order)
{
	struct commit commit = {.store = store, .order = order, .region = store->now->region};
	struct hr__error_record why;
	int code = prepare(&commit);

	if (!code)
		code = look_again(&commit);
	for (int copy = 0; copy < 2 && !code; copy++)
		code = hr__region_write(commit.region, commit.root.body_off[copy], commit.body, commit.whole,
					"the manifest");
	if (!code && !HR__MUTANT(HR__MUTANT_NO_FLUSH_BEFORE_ROOT)) {
		code = hr__region_flush(commit.region);
		if (code)
			store->poisoned_by = commit.root.generation;
	}
	if (!code)
		code = read_back(&commit);
	if (!code)
		code = still_ours(&commit);
	if (!code)
		code = switch_root(&commit);
	if (!code)
		return adopt(&commit);
	hr__region_memory_free(commit.body, commit.whole);
	hr__error_save(&why);
	if (!store->poisoned_by)
		hr__store_survey(store); /* what was taken for the manifest is free again */
	return hr__error_restore(&why);
}
