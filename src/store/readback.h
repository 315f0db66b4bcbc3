/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Comparing what a region gives back with the CRC-32C that was taken of it on the way in.
 */
#ifndef HR_STORE_READBACK_H
#define HR_STORE_READBACK_H

#include "block.h"

struct hr__read_back {
	struct hr__region *region;
	uint64_t at, bytes;      /* of a payload in the region; they begin at a digest block */
	const uint32_t *digests; /* of them */
	uint32_t block_log2;
	void *memory; /* room for them in whole records */
	/* Out, of the first block that differs. */
	uint64_t bad_at;
	uint32_t expected, found;
};

/* 0, an errno, or EBADMSG: it is something else. Makes no error record. */
int hr__read_back(struct hr__read_back *back);

/* Says so: HR_E_DIGEST. The object begins at `object_at`. */
int hr__fail_read_back(const struct hr__read_back *back, uint64_t object_at);

#endif
