/* SPDX-License-Identifier: Apache-2.0 */
/* How tests find the controls of a look-alike library: by name, at run time. */
#ifndef HR_TESTS_FAKE_FIND_H
#define HR_TESTS_FAKE_FIND_H

#include <dlfcn.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

/* Fills the first `n` function pointers of a struct of controls, in the order below, with PREFIX_set and so on. False:
 * the library is not there, or is the real one. */
static inline bool fake_find(const char *library_name, const char *prefix, void *out, size_t n)
{
	static const char *const names[] = {"set", "arm", "errors", "calls", "live", "reset", "drain", "store"};
	void *library = dlopen(library_name, RTLD_NOW | RTLD_LOCAL);

	memset(out, 0, n * sizeof(void *));
	for (size_t i = 0; library && i < n; i++) {
		char symbol[64];
		void *address;

		snprintf(symbol, sizeof(symbol), "%s_%s", prefix, names[i]);
		address = dlsym(library, symbol);
		if (!address)
			return false;
		memcpy((char *)out + i * sizeof(address), &address, sizeof(address));
	}
	return library != NULL;
}

#endif
