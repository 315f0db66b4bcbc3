/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A table from names to numbers that owns neither: it holds, for each name, 32 bits of its keyed hash and its number,
 * 8 bytes in all. The caller walks the candidates with the right hash bits and compares the names themselves:
 *
 *     for (size_t at = hr__names_first(&table, hash); hr__names_next(&table, hash, &at, &number);)
 *             if (same_name(number))
 *                     return number;
 *
 * Sized once; it must not get more names than it was made for.
 */
#ifndef HR_MODEL_NAMES_H
#define HR_MODEL_NAMES_H

#include "core/mem.h"

#include "headrace.h"

#include <stdbool.h>

struct hr__names {
	uint64_t *slots; /* hash bits << 32 | number + 1; 0 = empty */
	size_t mask;
};

/* `n` below 2^31. HR_E_NOMEM. */
static inline int hr__names_new(struct hr__names *table, size_t n)
{
	size_t size = 16;

	while (size < n + n / 3)
		size *= 2;
	table->slots = hr__calloc(size, sizeof(*table->slots));
	table->mask = size - 1;
	return table->slots ? 0 : HR_E_NOMEM;
}

static inline void hr__names_free(struct hr__names *table)
{
	hr__free(table->slots);
	table->slots = NULL;
}

/* Says that `hash` will be looked up soon: big tables do not fit into the caches. */
static inline void hr__names_expect(const struct hr__names *table, uint64_t hash)
{
	__builtin_prefetch(&table->slots[hash & table->mask]);
}

static inline size_t hr__names_first(const struct hr__names *table, uint64_t hash)
{
	return hash & table->mask;
}

/* Gives the next candidate; false past the last one. Ends, since a quarter of the slots is empty. */
static inline bool hr__names_next(const struct hr__names *table, uint64_t hash, size_t *at, uint32_t *number)
{
	for (;;) {
		uint64_t slot = table->slots[*at];

		if (slot == 0)
			return false;
		*at = (*at + 1) & table->mask;
		if (slot >> 32 == hash >> 32) {
			*number = (uint32_t)slot - 1;
			return true;
		}
	}
}

static inline void hr__names_add(struct hr__names *table, uint64_t hash, uint32_t number)
{
	size_t at = hash & table->mask;

	while (table->slots[at])
		at = (at + 1) & table->mask;
	table->slots[at] = (hash >> 32) << 32 | (number + UINT64_C(1));
}

#endif
