/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Groups: which tensors, and where each lies in the group's memory. Members lie in the model's order, since that is the
 * order in the file: where sizes are multiples of 256, as those of layers are, neighbours are then copied in one go.
 */
#include "cache.h"

#include "core/arith.h"
#include "core/mem.h"

#include <stdlib.h>

#define MEMBER_ALIGN 256

static _Atomic uint64_t last_id;

static int compare_members(const void *a, const void *b)
{
	const struct hr__member *x = a, *y = b;

	return x->tensor < y->tensor ? -1 : x->tensor > y->tensor;
}

/* Gives each member its place; the members are in the model's order. */
static int lay_out(hr_group *group, const struct hr__member *sorted)
{
	uint64_t at = 0;

	for (size_t i = 0; i < group->n; i++) {
		struct hr__extent extent;
		uint64_t rounded;

		if (i > 0 && sorted[i].tensor == sorted[i - 1].tensor)
			return hr__fail(HR_E_DUPLICATE, "tensor number %" PRIu64 " is given twice for one group",
					sorted[i].tensor);
		hr__model_extent(group->model, sorted[i].tensor, &extent);
		group->members[sorted[i].at].at = at;
		if (!hr__add_u64(extent.bytes, MEMBER_ALIGN - 1, &rounded) ||
		    !hr__add_u64(at, hr__round_down(rounded, MEMBER_ALIGN), &rounded))
			return hr__fail(HR_E_OVERFLOW, "the tensors of a group are more than 2^64 bytes together");
		group->bytes = at + extent.bytes;
		group->payload += extent.bytes;
		at = rounded;
	}
	return 0;
}

static int take_members(hr_group *group, const uint64_t *tensors)
{
	struct hr__member *sorted = hr__calloc(group->n, sizeof(*sorted));
	int rc = 0;

	group->members = hr__calloc(group->n, sizeof(*group->members));
	if (!sorted || !group->members) {
		hr__free(sorted);
		return HR_E_NOMEM;
	}
	for (size_t i = 0; i < group->n && !rc; i++) {
		if (tensors[i] >= hr_model_n_tensors(group->model))
			rc = hr__fail(HR_E_OPTS, "tensor number %" PRIu64 " is out of range: the model has %" PRIu64,
				      tensors[i], hr_model_n_tensors(group->model));
		group->members[i].tensor = tensors[i];
		sorted[i] = (struct hr__member){tensors[i], i};
	}
	if (!rc) {
		qsort(sorted, group->n, sizeof(*sorted), compare_members);
		rc = lay_out(group, sorted);
	}
	hr__free(sorted);
	return rc;
}

int hr_group_new(hr_model *model, const uint64_t *tensors, size_t n_tensors, hr_group **out)
{
	hr_group *group;
	int rc;

	if (!out || !model || !tensors)
		return hr__fail(HR_E_OPTS, "hr_group_new: %s is NULL",
				!out     ? "the result"
				: !model ? "the model"
					 : "tensors");
	*out = NULL;
	if (n_tensors == 0)
		return hr__fail(HR_E_OPTS, "a group needs at least one tensor");
	group = hr__calloc(1, sizeof(*group));
	if (!group)
		return HR_E_NOMEM;
	group->model = hr_model_acquire(model);
	group->n = n_tensors;
	group->count = 1;
	group->id = atomic_fetch_add(&last_id, 1) + 1;
	rc = take_members(group, tensors);
	if (rc) {
		hr_group_release(group);
		return rc;
	}
	*out = group;
	return 0;
}

hr_group *hr_group_acquire(hr_group *group)
{
	atomic_fetch_add(&group->count, 1);
	return group;
}

void hr_group_release(hr_group *group)
{
	if (!group || atomic_fetch_sub(&group->count, 1) > 1)
		return;
	hr_model_close(group->model);
	hr__free(group->members);
	hr__free(group);
}

uint64_t hr_group_bytes(const hr_group *group)
{
	return group->bytes;
}

uint64_t hr_group_id(const hr_group *group)
{
	return group->id;
}

size_t hr_group_n_tensors(const hr_group *group)
{
	return group->n;
}

int hr_group_tensor(const hr_group *group, size_t i, uint64_t *tensor, uint64_t *offset)
{
	if (!group || !tensor || !offset || i >= group->n)
		return hr__fail(HR_E_OPTS, "hr_group_tensor: there is no tensor %zu in the group", i);
	*tensor = group->members[i].tensor;
	*offset = group->members[i].at;
	return 0;
}
