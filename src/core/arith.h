/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Checked arithmetic on sizes. Sizes that come from a file are added and multiplied only with these;
 * each says whether the result fits and leaves *out alone where it does not.
 */
#ifndef HR_CORE_ARITH_H
#define HR_CORE_ARITH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

static inline bool hr__add_u64(uint64_t a, uint64_t b, uint64_t *out)
{
	return !__builtin_add_overflow(a, b, out);
}

static inline bool hr__mul_u64(uint64_t a, uint64_t b, uint64_t *out)
{
	return !__builtin_mul_overflow(a, b, out);
}

static inline bool hr__add_size(size_t a, size_t b, size_t *out)
{
	return !__builtin_add_overflow(a, b, out);
}

static inline bool hr__mul_size(size_t a, size_t b, size_t *out)
{
	return !__builtin_mul_overflow(a, b, out);
}

/* `align` is a power of two in both; the caller knows that rounding up cannot wrap. */
static inline uint64_t hr__round_down(uint64_t value, uint64_t align)
{
	return value & ~(align - 1);
}

static inline uint64_t hr__round_up(uint64_t value, uint64_t align)
{
	return (value + align - 1) & ~(align - 1);
}

static inline uint64_t hr__min_u64(uint64_t a, uint64_t b)
{
	return a < b ? a : b;
}

static inline uint64_t hr__max_u64(uint64_t a, uint64_t b)
{
	return a > b ? a : b;
}

#endif
