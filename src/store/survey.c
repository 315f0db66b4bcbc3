/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What may be written to. Taken is whatever either root names: objects, both copies of its manifest, and its retired
 * extents, but for those that a durable root has given up and no reader holds. Since both roots count, even a step
 * back to the older one finds its objects whole.
 *
 * The order of giving up: a commit raises the floor, a flush makes that durable, and only then are the leases looked
 * at. A reader does it the other way round (snapshot.c), so one of the two notices the other.
 */
#include "store.h"

#include "core/arith.h"
#include "core/error.h"
#include "core/mem.h"
#include "mutant.h"

#include <string.h>

static struct hr__root *newest(const hr_store *store)
{
	return &store->now->roots.roots[store->now->slot];
}

uint64_t hr__store_next_generation(const hr_store *store)
{
	const struct hr__roots *roots = &store->now->roots;

	return hr__max_u64(roots->roots[0].generation, roots->roots[1].generation) + 1;
}

/* The lowest generation that a reader holds; UINT64_MAX = none. Where locks cannot be asked for, none may be given
 * up. */
static int ask_leases(hr_store *store)
{
	struct hr__region *region = store->now->region;
	uint64_t byte;
	int error = region->ops->lowest_lock(region, HR__LOCK_LEASE(0), HR__LOCK_LEASE(HR__MAX_GENERATION - 1), &byte);

	if (error)
		return hr__fail_errno(
			&(struct hr__where){.stage = "store", .path = region->path, .offset = HR_NO_OFFSET}, error,
			"ask for readers of");
	store->lowest_lease = byte == UINT64_MAX ? UINT64_MAX : byte - HR__LOCK_LEASE(0);
	return 0;
}

bool hr__store_is_reusable(const hr_store *store, const struct hr__retired *retired)
{
	if (HR__MUTANT(HR__MUTANT_REUSE_EARLY))
		return true;
	if (retired->last_gen >= newest(store)->floor_gen)
		return false;
	return retired->last_gen < store->lowest_lease || HR__MUTANT(HR__MUTANT_IGNORE_LEASES);
}

int hr__store_floor(hr_store *store, uint64_t generation, uint64_t *floor)
{
	int code = ask_leases(store);

	if (HR__MUTANT(HR__MUTANT_IGNORE_LEASES))
		store->lowest_lease = UINT64_MAX;
	*floor = hr__max_u64(newest(store)->floor_gen, hr__min_u64(generation, store->lowest_lease));
	return code;
}

static int take_manifest(hr_store *store, const struct hr__manifest *manifest, const struct hr__root *root)
{
	uint64_t body = hr__round_up(root->body_len, HR__EXTENT_ALIGN);
	int code = 0;

	for (uint32_t i = 0; i < manifest->objects.n && !code; i++) {
		struct hr__object object;

		hr__manifest_object(manifest, i, &object);
		code = hr__space_add(&store->space, object.ext_off, object.ext_len);
	}
	for (uint32_t i = 0; i < manifest->retired.n && !code; i++) {
		struct hr__retired retired;

		hr__manifest_retired(manifest, i, &retired);
		if (!hr__store_is_reusable(store, &retired))
			code = hr__space_add(&store->space, retired.off, retired.len);
	}
	for (int copy = 0; copy < 2 && !code; copy++)
		code = hr__space_add(&store->space, root->body_off[copy], body);
	return code;
}

int hr__store_survey(hr_store *store)
{
	const struct hr__snapshot *now = store->now;
	int code = ask_leases(store);

	store->space.n = 0;
	store->space.begin = now->label.data_off;
	store->space.end = now->root.data_end;
	if (!code)
		code = take_manifest(store, &now->manifest, &now->root);
	if (!code && store->other.body && !HR__MUTANT(HR__MUTANT_REUSE_EARLY))
		code = take_manifest(store, &store->other, &now->roots.roots[!now->slot]);
	for (size_t i = 0; i < store->n_pending && !code; i++)
		code = hr__space_add(&store->space, store->pending[i].off, store->pending[i].len);
	/* Where the region has grown, what were its last records stay where they are. */
	if (!code && now->root.data_end > now->label.region_len - HR__GUARD_BYTES)
		code = hr__space_add(&store->space, now->label.region_len - HR__GUARD_BYTES, HR__GUARD_BYTES);
	if (!code)
		hr__space_merge(&store->space);
	return code;
}

/* ---- for work that takes several commits ---- */

int hr__store_take(hr_store *store, uint64_t len, uint64_t *off)
{
	if (store->n_pending == store->room_pending) {
		size_t room = store->room_pending ? store->room_pending * 2 : 64;
		struct hr__range *bigger = hr__realloc(store->pending, room, sizeof(*bigger));

		if (!bigger)
			return HR_E_NOMEM;
		store->pending = bigger;
		store->room_pending = room;
	}
	*off = 0;
	if (hr__space_take(&store->space, len, false, off))
		return hr_error_last()->code;
	store->pending[store->n_pending] = (struct hr__range){*off, len};
	store->n_pending++;
	return 0;
}

/* What a manifest may have grown to after `n_new` more files. */
static uint64_t body_bytes(const hr_store *store, uint32_t n_new)
{
	const uint64_t per_file = sizeof(struct hr__disk_object) + sizeof(struct hr__disk_member) + 256;

	return hr__round_up(store->now->root.body_len + n_new * per_file + 4096, HR__EXTENT_ALIGN);
}

int hr__store_has_spare(const hr_store *store, uint32_t n_new, unsigned n_bodies)
{
	uint64_t body = body_bytes(store, n_new), total, largest;

	if (hr__space_n_fits(&store->space, body) >= n_bodies)
		return 0;
	hr__space_free_bytes(&store->space, &total, &largest);
	return hr__fail(HR_E_NOSPACE,
			"the store is full: beside what is to be written, %u pieces of %" PRIu64
			" bytes must stay free for manifests, and %" PRIu64 " bytes would be left",
			n_bodies, body, total);
}

int hr__store_floor_if_tight(hr_store *store, uint64_t *floor)
{
	*floor = 0;
	if (hr__space_n_fits(&store->space, body_bytes(store, 0)) >= (size_t)2 * HR__SPARE_BODIES)
		return 0;
	return hr__store_floor(store, hr__store_next_generation(store), floor);
}
