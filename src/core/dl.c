/* SPDX-License-Identifier: Apache-2.0 */
#include "dl.h"

#include "fault.h"
#include "headrace.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

int hr__dl_load(const char *const *names, const struct hr__dl_symbol *symbols, size_t n_symbols, void *table,
		char *reason, size_t reason_bytes)
{
	void *library = NULL;

	for (size_t i = 0; names[i] && !library; i++)
		library = HR__FAULT("dlopen") ? NULL : dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
	if (!library) {
		const char *why = dlerror();

		snprintf(reason, reason_bytes, "%s", why ? why : "the library could not be opened");
		return HR_E_UNSUPPORTED;
	}
	for (size_t i = 0; i < n_symbols; i++) {
		/* Copied as bytes: ISO C has no cast from an object pointer to a function pointer. */
		void *address = HR__FAULT("dlsym") ? NULL : dlsym(library, symbols[i].name);

		memcpy((char *)table + symbols[i].offset, &address, sizeof(address));
		if (!address && symbols[i].required) {
			snprintf(reason, reason_bytes, "%s has no symbol %s: the driver is too old", names[0],
				 symbols[i].name);
			return HR_E_UNSUPPORTED;
		}
	}
	return 0;
}
