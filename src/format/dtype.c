/* SPDX-License-Identifier: Apache-2.0 */
/* The dtypes of safetensors 0.8: names and sizes, from the one list in the public header. */
#include "dtype.h"

#include <string.h>

static const struct {
	const char *name;
	size_t length;
	uint32_t bits;
} dtypes[] = {{NULL, 0, 0},
#define HR__ROW(name, number, bits) [number] = {#name, sizeof(#name) - 1, bits},
	      HR_DTYPES(HR__ROW)
#undef HR__ROW
};

#define N_DTYPES (sizeof(dtypes) / sizeof(dtypes[0]))

uint32_t hr__dtype_find(const char *name, size_t length)
{
	for (uint32_t d = 1; d < N_DTYPES; d++)
		if (dtypes[d].length == length && memcmp(dtypes[d].name, name, length) == 0)
			return d;
	return 0;
}

const char *hr_dtype_name(uint32_t dtype)
{
	return dtype > 0 && dtype < N_DTYPES ? dtypes[dtype].name : "?";
}

uint32_t hr_dtype_bits(uint32_t dtype)
{
	return dtype < N_DTYPES ? dtypes[dtype].bits : 0;
}
