/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Removing a model, and getting space back. Removing is one commit without the model's record. Reclaiming is up to
 * three: one that lets go of objects that nobody has and raises the floor; one more, so that the root before it does
 * not name them either; and one that takes what is free now off the list.
 */
#include "store.h"

#include "core/arith.h"
#include "core/error.h"
#include "core/mem.h"

#include <string.h>

static int find(const hr_store *store, const char *model, uint32_t *number)
{
	const struct hr__where at = {.stage = "store", .path = store->now->region->path, .offset = HR_NO_OFFSET};

	if (!model || !hr__manifest_find_model(&store->now->manifest, model, strlen(model), number))
		return hr__fail_at(&at, HR_E_NOTFOUND,
				   "%s has no model of the name %s; \"headrace store ls\" lists them", at.path,
				   model ? model : "");
	return 0;
}

static int commit(hr_store *store, struct hr__draft *draft, uint64_t floor)
{
	return hr__store_commit(store,
				&(struct hr__commit){.draft = draft, .floor_gen = floor, .first_fresh = UINT32_MAX});
}

int hr_store_remove(hr_store *store, const char *model)
{
	struct hr__draft draft = {.n_objects = 0};
	uint32_t number = 0;
	uint64_t floor = 0;
	int code = hr__store_begin(store);

	if (code)
		return code;
	code = find(store, model, &number);
	if (!code)
		code = hr__draft_from(&store->now->manifest, &draft);
	for (uint32_t i = 0; i < draft.n_models && !code; i++)
		if (strcmp(draft.models[i].name, model) == 0) {
			code = hr__draft_drop_model(&draft, i, store->now->root.generation);
			break;
		}
	if (!code)
		code = hr__store_floor_if_tight(store, &floor);
	if (!code)
		code = commit(store, &draft, floor);
	hr__draft_free(&draft);
	hr__store_end(store);
	return code;
}

/* ---- reclaim ---- */

static int drop_unbound(hr_store *store, struct hr__draft *draft)
{
	uint8_t *unbound = hr__calloc(draft->n_objects, 1);
	int code = HR_E_NOMEM;

	if (unbound) {
		hr__draft_unbound(draft, unbound);
		code = hr__draft_drop_objects(draft, unbound, store->now->root.generation);
	}
	hr__free(unbound);
	return code;
}

/* One commit with the highest floor that readers allow. */
static int raise_floor(hr_store *store, bool is_first)
{
	struct hr__draft draft;
	uint64_t floor;
	int code = hr__draft_from(&store->now->manifest, &draft);

	if (code)
		return code;
	if (is_first)
		code = drop_unbound(store, &draft);
	if (!code)
		code = hr__store_floor(store, hr__store_next_generation(store), &floor);
	if (!code)
		code = commit(store, &draft, floor);
	hr__draft_free(&draft);
	return code;
}

static void count_held(const hr_store *store, struct hr_store_reclaim_info *info)
{
	for (uint32_t i = 0; i < store->now->manifest.retired.n; i++) {
		struct hr__retired retired;

		hr__manifest_retired(&store->now->manifest, i, &retired);
		if (retired.last_gen >= store->lowest_lease)
			info->held_bytes += retired.len;
	}
	if (info->held_bytes)
		info->held_generation = store->lowest_lease;
}

int hr_store_reclaim(hr_store *store, struct hr_store_reclaim_info *out)
{
	struct hr_store_reclaim_info info = {.size = sizeof(info)};
	uint64_t before, after, largest;
	int code = hr__store_begin(store);

	if (code)
		return code;
	code = hr__store_survey(store);
	hr__space_free_bytes(&store->space, &before, &largest);
	for (int i = 0; i < 3 && !code; i++)
		code = raise_floor(store, i == 0);
	hr__space_free_bytes(&store->space, &after, &largest);
	info.freed_bytes = after > before ? after - before : 0;
	info.generation = store->now->root.generation;
	count_held(store, &info);
	hr__store_end(store);
	return code || !out ? code : hr__out_copy(out, &info, sizeof(info), "hr_store_reclaim_info");
}
