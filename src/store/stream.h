/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A file on its way into the store: read once, hashed while it is written, and as far as helpers have time flushed and
 * read back behind that, in a fixed amount of memory.
 */
#ifndef HR_STORE_STREAM_H
#define HR_STORE_STREAM_H

#include "block.h"
#include "model/source.h"

struct hr__stream {
	const struct hr__source *source;
	struct hr__region *region; /* NULL: hashed only */
	uint64_t to;               /* where in the region */
	uint64_t head_bytes;       /* the first so many have a SHA-256 of their own */
	uint32_t block_log2;       /* digest blocks */
	unsigned n_helpers;        /* threads beside the caller's; 0 is allowed */
	uint64_t flush_bytes;      /* flush after so many and read them back; whole MiB * 4; 0: neither */
	/* Called by the caller's thread with the bytes that are done since; non-zero: HR_E_CANCELLED. NULL: nobody. */
	int (*progress)(void *ctx, uint64_t bytes);
	void *ctx;
	/* Out. */
	uint8_t sha256[32], head_sha256[32];
	uint32_t *digests;  /* in: room for all of them */
	uint64_t read_back; /* so many bytes from the first on were, after a flush; whole pieces of 4 MiB, or all */
	bool is_flush_lost; /* a flush failed: of nothing that was written before is it known where it is */
};

/* Pads the last 4096 bytes written with zeros. HR_E_IO, HR_E_SHORT, HR_E_NOMEM, HR_E_CANCELLED,
 * HR_E_REGION_CHANGED, HR_E_DIGEST (it was read back and is something else). Whether the source has changed
 * meanwhile is the caller's to ask. */
int hr__stream_run(struct hr__stream *stream);

#endif
