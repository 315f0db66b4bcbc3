/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Opening a generation. A reader first takes its lease on a generation and then looks again whether that generation is
 * still kept: a writer first raises the floor and then looks for leases. So whichever comes first, the other sees it.
 *
 * The newest root counts, and its manifest must be right: it was durable before the root was written, so if it is not,
 * something is broken and nobody steps back in silence.
 */
#include "snapshot.h"

#include "core/arith.h"
#include "core/error.h"
#include "core/hash.h"
#include "core/mem.h"

#include <errno.h>
#include <string.h>

#define MAX_TRIES 64

static struct hr__where here(const struct hr__snapshot *snapshot)
{
	return (struct hr__where){.stage = "store", .path = snapshot->region->path, .offset = HR_NO_OFFSET};
}

static int fail_generation(const struct hr__snapshot *snapshot, uint64_t wanted)
{
	const struct hr__root *newest = &snapshot->roots.roots[snapshot->roots.newest];
	const struct hr__where at = here(snapshot);

	if (wanted > newest->generation)
		return hr__fail_at(&at, HR_E_NOTFOUND, "%s has no generation %" PRIu64 " yet; its newest is %" PRIu64,
				   snapshot->region->path, wanted, newest->generation);
	return hr__fail_at(&at, HR_E_STALE,
			   "%s no longer keeps generation %" PRIu64 "; its newest is %" PRIu64
			   ", and those before %" PRIu64 " were given up",
			   snapshot->region->path, wanted, newest->generation, newest->floor_gen);
}

/* The slot of the generation that is wanted; false if no root has it or it was given up. */
static bool choose(const struct hr__roots *roots, uint64_t wanted, unsigned *slot)
{
	const struct hr__root *newest = &roots->roots[roots->newest];

	for (*slot = 0; *slot < 2; (*slot)++)
		if (roots->roots[*slot].generation == (wanted ? wanted : newest->generation))
			return roots->roots[*slot].generation >= newest->floor_gen;
	return false;
}

static int lock_lease(struct hr__snapshot *snapshot, uint64_t generation, enum hr__os_lock kind)
{
	return snapshot->region->ops->lock(snapshot->region, kind, HR__LOCK_LEASE(generation));
}

/* Pick, lock, look again. */
static int hold_generation(struct hr__snapshot *snapshot, const struct hr__snapshot_want *want)
{
	const struct hr__where at = here(snapshot);

	for (int i = 0; i < MAX_TRIES; i++) {
		uint64_t generation;
		int code = hr__roots_read(snapshot->region, &snapshot->label, &snapshot->roots);

		if (code)
			return code;
		if (!choose(&snapshot->roots, want->generation, &snapshot->slot))
			return fail_generation(snapshot, want->generation);
		snapshot->root = snapshot->roots.roots[snapshot->slot];
		if (want->without_lease)
			return 0;
		generation = snapshot->root.generation;
		/* Without a lock, say in a container with a device node of its own, hr__snapshot_check() has to do. */
		snapshot->is_leased = lock_lease(snapshot, generation, HR__OS_LOCK_SHARED) == 0;
		code = hr__roots_read(snapshot->region, &snapshot->label, &snapshot->roots);
		if (code)
			return code;
		if (choose(&snapshot->roots, generation, &snapshot->slot) &&
		    memcmp(&snapshot->roots.roots[snapshot->slot], &snapshot->root, sizeof(snapshot->root)) == 0)
			return 0;
		if (snapshot->is_leased)
			lock_lease(snapshot, generation, HR__OS_UNLOCK);
		snapshot->is_leased = false;
	}
	return hr__fail_at(&at, HR_E_BUSY, "%s changes faster than it can be opened; try again",
			   snapshot->region->path);
}

/* What a reader saw must survive a power cut: it may be in the device's cache only. */
static int make_durable(struct hr__snapshot *snapshot)
{
	const struct hr__where at = here(snapshot);
	int error = snapshot->region->ops->flush(snapshot->region);

	if (error == 0 || error == EINVAL || error == EROFS || error == EBADF || error == ENOTSUP)
		return 0; /* it cannot be asked for here */
	return hr__fail_errno(&at, error, "flush");
}

static int read_manifest(struct hr__snapshot *snapshot, const struct hr__snapshot_want *want)
{
	const struct hr__root *other = &snapshot->roots.roots[!snapshot->slot];
	int code = hr__manifest_read(snapshot->region, &snapshot->label, &snapshot->root, &snapshot->manifest);

	if (code != HR_E_CORRUPT || !want->step_back || !other->generation)
		return code;
	snapshot->slot = !snapshot->slot;
	snapshot->root = *other;
	return hr__manifest_read(snapshot->region, &snapshot->label, &snapshot->root, &snapshot->manifest);
}

static int open_on(struct hr__snapshot *snapshot, const struct hr__snapshot_want *want)
{
	int code = hr__label_read(snapshot->region, &snapshot->label);

	if (!code && !want->is_moved)
		code = hr__label_identify(snapshot->region, &snapshot->label);
	if (!code)
		code = hold_generation(snapshot, want);
	if (!code)
		code = make_durable(snapshot);
	if (!code)
		code = read_manifest(snapshot, want);
	return code;
}

int hr__snapshot_open_on(struct hr__region *region, const struct hr__snapshot_want *want, struct hr__snapshot **out)
{
	struct hr__snapshot *snapshot = hr__calloc(1, sizeof(*snapshot));
	int code;

	*out = NULL;
	if (!snapshot) {
		hr__region_close(region);
		return HR_E_NOMEM;
	}
	snapshot->region = region;
	atomic_init(&snapshot->refs, 1);
	code = open_on(snapshot, want);
	if (code)
		hr__snapshot_release(snapshot);
	else
		*out = snapshot;
	return code;
}

int hr__snapshot_open(const char *path, const struct hr__snapshot_want *want, struct hr__snapshot **out)
{
	struct hr__region *region;
	int code;

	*out = NULL;
	code = want->open_region ? want->open_region(want->region_ctx, &region) : hr__region_open(path, false, &region);
	return code ? code : hr__snapshot_open_on(region, want, out);
}

struct hr__snapshot *hr__snapshot_acquire(struct hr__snapshot *snapshot)
{
	atomic_fetch_add(&snapshot->refs, 1);
	return snapshot;
}

void hr__snapshot_release(struct hr__snapshot *snapshot)
{
	if (!snapshot || atomic_fetch_sub(&snapshot->refs, 1) != 1)
		return;
	hr__manifest_free(&snapshot->manifest);
	hr__region_close(snapshot->region); /* and with its description the lease */
	hr__free(snapshot);
}

/* ---- later ---- */

static int check_label(struct hr__snapshot *snapshot)
{
	const struct hr__where at = here(snapshot);
	struct hr__label now;
	int code = hr__label_read(snapshot->region, &now);

	if (code == HR_E_NOT_A_STORE || (!code && memcmp(now.uuid, snapshot->label.uuid, 16) != 0))
		return hr__fail_at(&at, HR_E_REGION_CHANGED,
				   "%s held a store and holds another one, or none, now; open the model again",
				   snapshot->region->path);
	return code;
}

int hr__snapshot_check(struct hr__snapshot *snapshot)
{
	const struct hr__where at = here(snapshot);
	const struct hr__root *newest;
	struct hr__roots roots;
	int code = hr__region_check(snapshot->region);

	if (!code)
		code = check_label(snapshot);
	if (!code)
		code = hr__roots_read(snapshot->region, &snapshot->label, &roots);
	if (code)
		return code;
	newest = &roots.roots[roots.newest];
	if (newest->generation < snapshot->root.generation)
		return hr__fail_at(&at, HR_E_REGION_CHANGED,
				   "%s was at generation %" PRIu64 " and is back at %" PRIu64
				   ": an older copy of the store has taken its place; open the model again",
				   snapshot->region->path, snapshot->root.generation, newest->generation);
	if (newest->floor_gen > snapshot->root.generation)
		return hr__fail_at(&at, HR_E_STALE,
				   "%s gave up generation %" PRIu64
				   " while it was read, and its space may have been used again; open the model again",
				   snapshot->region->path, snapshot->root.generation);
	return 0;
}

/* ---- digests ---- */

static int fail_footer(const struct hr__region *region, const struct hr__object *object, const char *what)
{
	return hr__fail_at(
		&(struct hr__where){
			.stage = "store", .path = region->path, .offset = object->ext_off + object->meta_off},
		HR_E_CORRUPT, "%s: the footer of the object at %" PRIu64 " %s; remove its model and import it again",
		region->path, object->ext_off, what);
}

static bool footer_agrees(const struct hr__object *footer, const struct hr__object *object)
{
	return memcmp(footer->uuid, object->uuid, 16) == 0 && footer->ext_off == object->ext_off &&
	       footer->ext_len == object->ext_len && footer->payload_off == object->payload_off &&
	       footer->payload_len == object->payload_len && footer->header_len == object->header_len &&
	       footer->meta_off == object->meta_off && footer->meta_len == object->meta_len &&
	       footer->kind == object->kind && footer->block_log2 == object->block_log2 &&
	       memcmp(footer->payload_sha256, object->payload_sha256, 32) == 0 &&
	       memcmp(footer->header_sha256, object->header_sha256, 32) == 0;
}

static int read_meta(struct hr__region *region, const uint8_t store_uuid[16], const struct hr__object *object,
		     uint8_t *meta, size_t whole)
{
	struct hr__object footer;
	uint8_t sha256[32];
	int code = hr__region_read(region, object->ext_off + object->meta_off, meta, whole, "an object's footer");

	if (code)
		return code;
	hr__sha256_of(meta, (size_t)object->meta_len, sha256);
	if (memcmp(sha256, object->meta_sha256, 32) != 0)
		return fail_footer(region, object, "or its digests are damaged");
	if (hr__footer_decode(meta, store_uuid, &footer) != HR__RECORD_GOOD || !footer_agrees(&footer, object))
		return fail_footer(region, object, "is not what the manifest says");
	return 0;
}

int hr__digests_read(struct hr__region *region, const uint8_t store_uuid[16], const struct hr__object *object,
		     uint32_t **digests, uint64_t *n_digests)
{
	size_t whole = (size_t)hr__round_up(object->meta_len, HR__RECORD_BYTES);
	uint32_t *copy = NULL;
	void *meta;
	int code = hr__region_memory(whole, &meta);

	*digests = NULL;
	*n_digests = hr__object_n_blocks(object);
	if (code)
		return code;
	code = read_meta(region, store_uuid, object, meta, whole);
	if (!code) {
		copy = hr__malloc((size_t)*n_digests * sizeof(*copy));
		code = copy ? 0 : HR_E_NOMEM;
	}
	for (uint64_t i = 0; i < *n_digests && !code; i++) {
		memcpy(&copy[i], (const uint8_t *)meta + HR__RECORD_BYTES + 4 * i, 4);
		copy[i] = hr__le32(copy[i]);
	}
	hr__region_memory_free(meta, whole);
	*digests = copy;
	return code;
}

int hr__snapshot_digests(struct hr__snapshot *snapshot, const struct hr__object *object, uint32_t **digests,
			 uint64_t *n_digests)
{
	return hr__digests_read(snapshot->region, snapshot->label.uuid, object, digests, n_digests);
}
