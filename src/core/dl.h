/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Libraries opened at run time. A table of symbols is walked once; each row says where in a struct of function
 * pointers the address goes, which name to look for (suffix included: "cuMemAlloc_v2" and "cuMemAlloc" are two
 * functions) and whether the library is of use without it. Libraries are never closed again: drivers do not like it.
 */
#ifndef HR_CORE_DL_H
#define HR_CORE_DL_H

#include <stddef.h>

struct hr__dl_symbol {
	size_t offset; /* of the function pointer in the table */
	const char *name;
	int required;
};

/* Opens `library` and fills `table`. `names` is NULL-terminated: the first that opens is used. On failure writes a
 * sentence into `reason` and returns HR_E_UNSUPPORTED (does not touch the thread's last error). */
int hr__dl_load(const char *const *names, const struct hr__dl_symbol *symbols, size_t n_symbols, void *table,
		char *reason, size_t reason_bytes);

#endif
