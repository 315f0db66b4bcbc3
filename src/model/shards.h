/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reading the shards of a model: each is opened, its header read and checked. Of many shards several are read at once,
 * on threads that end before the call does; what comes out is the same as if they had been read one after the other.
 */
#ifndef HR_MODEL_SHARDS_H
#define HR_MODEL_SHARDS_H

#include "model/mapping.h"
#include "model/source.h"

#include "core/hash.h"
#include "format/header.h"

#define HR__MAX_SHARDS 65536
/* All headers of a model together; a hundred times what a checkpoint of 100,000 tensors has. */
#define HR__MAX_MODEL_HEADER_BYTES (UINT64_C(1) << 30)

struct hr__shard {
	struct hr__source source;
	struct hr__header header;
	struct hr__mapping mapping;
	uint64_t data_offset;
	uint64_t first; /* number of its first tensor */
	uint64_t count; /* of its tensors that are the model's */
};

/* Where shards come from. */
struct hr__shard_origin {
	/* Opens shard `number`, on any thread and in no order. 0, or the code of the thread's last error, with nothing
	 * left open. */
	int (*open)(void *ctx, uint32_t number, struct hr__source *source);
	/* What else must be done and needs no shard, by the calling thread; NULL = nothing. If it fails, its error
	 * counts. */
	int (*meanwhile)(void *ctx);
	void *ctx;
};

/* How many threads help with `n` shards: none with few, which are done before threads are there. */
unsigned hr__shards_helpers(uint32_t n);

/* Fills `shards`, which has room for `n` (at least 1). Stops at the first of them, in their order, that is not good:
 * gives its error, as this thread's last, and sets *n_good to its number; the rest are closed. Errors: those of `from`;
 * those of the header, with the source's path; HR_E_IO, HR_E_SHORT, HR_E_CHANGED, HR_E_LIMIT. */
int hr__shards_read(const struct hr__hash_key *key, const struct hr__shard_origin *from, struct hr__shard *shards,
		    uint32_t n, uint32_t *n_good);
void hr__shard_close(struct hr__shard *shard);

#endif
