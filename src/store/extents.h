/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Space: which parts of the data area are taken. There is no map of it on the region: it is made anew from what the
 * two roots name. Ranges are collected, sorted once, and then gaps are handed out, first or last fit.
 */
#ifndef HR_STORE_EXTENTS_H
#define HR_STORE_EXTENTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct hr__range {
	uint64_t off, len;
};

struct hr__space {
	uint64_t begin, end; /* the data area */
	struct hr__range *used;
	size_t n, room;
};

int hr__space_reserve(struct hr__space *space, size_t n); /* room for so many; HR_E_NOMEM */
int hr__space_add(struct hr__space *space, uint64_t off, uint64_t len);
/* Sorts. False if two ranges share a byte: *at is where. */
bool hr__space_sort(struct hr__space *space, uint64_t *at);
/* Sorts and merges ranges that touch or overlap. */
void hr__space_merge(struct hr__space *space);
/* A gap of `len` bytes from the low end or the high one, which is then taken; merged spaces only. HR_E_NOSPACE,
 * HR_E_FRAGMENTED, HR_E_NOMEM. */
int hr__space_take(struct hr__space *space, uint64_t len, bool from_end, uint64_t *off);
/* Free bytes in all and in the largest gap; merged spaces only. */
void hr__space_free_bytes(const struct hr__space *space, uint64_t *total, uint64_t *largest);
/* How many pieces of `len` bytes could be taken. */
size_t hr__space_n_fits(const struct hr__space *space, uint64_t len);
void hr__space_free(struct hr__space *space);

#endif
