/* SPDX-License-Identifier: Apache-2.0 */
/* Copying an object's bytes out of the region, with everything checked on the way. */
#ifndef HR_STORE_COPY_OUT_H
#define HR_STORE_COPY_OUT_H

#include "manifest.h"

struct hr__copy {
	struct hr__region *region;
	const uint8_t *store_uuid; /* NULL: without its digests, by SHA-256 alone */
	const struct hr__object *object;
	const char *path; /* of the file that is written */
	int fd;           /* of it; -1: only checked */
	int (*progress)(void *ctx, uint64_t bytes);
	void *ctx;
};

/* Into `fd`. HR_E_DIGEST, HR_E_CORRUPT, HR_E_IO, HR_E_CANCELLED. */
int hr__object_copy(const struct hr__copy *copy);
/* Into a new file at `path`, which is taken away again if anything is wrong. HR_E_EXISTS. */
int hr__object_copy_to(struct hr__copy *copy);

#endif
