/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Ranges in one array, sorted by where they begin. Ten thousands of objects at most, so that a walk costs less than any
 * I/O that follows it; sorting is a heap sort, which needs no memory and has no bad case that a hostile manifest could
 * be made for.
 */
#include "extents.h"

#include "core/arith.h"
#include "core/error.h"
#include "core/mem.h"

#include <string.h>

int hr__space_reserve(struct hr__space *space, size_t n)
{
	struct hr__range *bigger;

	if (n <= space->room)
		return 0;
	bigger = hr__realloc(space->used, n, sizeof(*bigger));
	if (!bigger)
		return HR_E_NOMEM;
	space->used = bigger;
	space->room = n;
	return 0;
}

int hr__space_add(struct hr__space *space, uint64_t off, uint64_t len)
{
	if (space->n == space->room) {
		int code = hr__space_reserve(space, space->room ? space->room * 2 : 64);

		if (code)
			return code;
	}
	space->used[space->n] = (struct hr__range){off, len};
	space->n++;
	return 0;
}

static void sift_down(struct hr__range *heap, size_t root, size_t n)
{
	struct hr__range moved = heap[root];

	for (;;) {
		size_t child = 2 * root + 1;

		if (child >= n)
			break;
		if (child + 1 < n && heap[child + 1].off > heap[child].off)
			child++;
		if (heap[child].off <= moved.off)
			break;
		heap[root] = heap[child];
		root = child;
	}
	heap[root] = moved;
}

static bool is_sorted(const struct hr__space *space)
{
	for (size_t i = 1; i < space->n; i++)
		if (space->used[i - 1].off > space->used[i].off)
			return false;
	return true;
}

static void sort(struct hr__space *space)
{
	if (is_sorted(space))
		return;
	for (size_t i = space->n / 2; i > 0; i--)
		sift_down(space->used, i - 1, space->n);
	for (size_t n = space->n; n > 1; n--) {
		struct hr__range last = space->used[n - 1];

		space->used[n - 1] = space->used[0];
		space->used[0] = last;
		sift_down(space->used, 0, n - 1);
	}
}

bool hr__space_sort(struct hr__space *space, uint64_t *at)
{
	sort(space);
	for (size_t i = 1; i < space->n; i++) {
		*at = space->used[i].off;
		if (space->used[i - 1].off + space->used[i - 1].len > *at)
			return false;
	}
	return true;
}

void hr__space_merge(struct hr__space *space)
{
	size_t n = 0;

	sort(space);
	for (size_t i = 0; i < space->n; i++) {
		struct hr__range *last = n ? &space->used[n - 1] : NULL, next = space->used[i];

		if (last && next.off <= last->off + last->len) {
			last->len = hr__max_u64(last->off + last->len, next.off + next.len) - last->off;
			continue;
		}
		space->used[n] = next;
		n++;
	}
	space->n = n;
}

/* The gap before range i; the one behind the last for i == n. */
static struct hr__range gap_before(const struct hr__space *space, size_t i)
{
	uint64_t begin = i ? space->used[i - 1].off + space->used[i - 1].len : space->begin;
	uint64_t end = i < space->n ? space->used[i].off : space->end;

	return (struct hr__range){begin, end > begin ? end - begin : 0};
}

void hr__space_free_bytes(const struct hr__space *space, uint64_t *total, uint64_t *largest)
{
	*total = 0;
	*largest = 0;
	for (size_t i = 0; i <= space->n; i++) {
		uint64_t gap = gap_before(space, i).len;

		*total += gap;
		*largest = hr__max_u64(*largest, gap);
	}
}

size_t hr__space_n_fits(const struct hr__space *space, uint64_t len)
{
	size_t n = 0;

	for (size_t i = 0; i <= space->n; i++)
		n += (size_t)(gap_before(space, i).len / len);
	return n;
}

static int fail_full(const struct hr__space *space, uint64_t len)
{
	uint64_t total, largest;

	hr__space_free_bytes(space, &total, &largest);
	if (total < len)
		return hr__fail(HR_E_NOSPACE,
				"the store is full: %" PRIu64 " bytes are needed and %" PRIu64
				" are free; remove a model and reclaim, or make a larger store",
				len, total);
	return hr__fail(HR_E_FRAGMENTED,
			"the store has %" PRIu64 " bytes free, but the largest gap has %" PRIu64 " and %" PRIu64
			" are needed in one piece; remove a model beside a gap and reclaim",
			total, largest, len);
}

int hr__space_take(struct hr__space *space, uint64_t len, bool from_end, uint64_t *off)
{
	for (size_t k = 0; k <= space->n; k++) {
		struct hr__range gap = gap_before(space, from_end ? space->n - k : k);
		int code;

		if (gap.len < len)
			continue;
		*off = from_end ? gap.off + gap.len - len : gap.off;
		code = hr__space_add(space, *off, len);
		if (!code)
			hr__space_merge(space);
		return code;
	}
	return fail_full(space, len);
}

void hr__space_free(struct hr__space *space)
{
	hr__free(space->used);
	memset(space, 0, sizeof(*space));
}
