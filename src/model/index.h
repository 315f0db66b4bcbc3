/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The index of a sharded checkpoint ("model.safetensors.index.json"): bytes to a checked table of which tensor is in
 * which file. A convention of its own beside the format, and hostile input just as much: a file name in it is never a
 * path. No I/O.
 */
#ifndef HR_MODEL_INDEX_H
#define HR_MODEL_INDEX_H

#include "model/names.h"

#include "core/hash.h"

#define HR__INDEX_MAX_BYTES UINT64_C(100000000)

struct hr__index_entry {
	const char *name; /* in the index's text or arena; may hold NUL */
	uint64_t hash;
	uint32_t name_len;
	uint32_t shard;
	uint32_t at; /* where in the index the name stands */
};

struct hr__index {
	const char **shards; /* distinct file names, in the order of their bytes */
	uint32_t n_shards;   /* at least 1 */
	struct hr__index_entry *entries;
	size_t n_entries; /* at least 1 */
	struct hr__names names;
	uint64_t total_size; /* what the index says, for a warning */
	bool has_total_size;
	void *arena;
	const uint8_t *json;
	size_t json_bytes;
};

/* The index points into `json`, which must live as long as it does. Errors have stage "index" and positions in the
 * file, but no path: the caller adds it with hr__error_locate(). `out` is empty after a failure. HR_E_UTF8,
 * HR_E_JSON, HR_E_TYPE, HR_E_FIELD, HR_E_DUPLICATE (of keys beside the tensors), HR_E_PATH, HR_E_LIMIT, HR_E_INDEX. */
int hr__index_parse(const struct hr__hash_key *key, const uint8_t *json, size_t json_bytes, struct hr__index *out);
/* The other half, for which the shards need not wait: the table of names. HR_E_DUPLICATE (a tensor is listed twice),
 * HR_E_NOMEM; then the index is good for nothing but to be freed. */
int hr__index_make_table(const struct hr__hash_key *key, struct hr__index *index);
void hr__index_free(struct hr__index *index);

/* The entry of a name, or NULL. Threads: any, once the table is made. */
const struct hr__index_entry *hr__index_find(const struct hr__index *index, uint64_t hash, const char *name,
					     size_t name_len);

/* Starts to bring in what the look-ups of two hashes will need, the second of them sooner. */
static inline void hr__index_expect(const struct hr__index *index, uint64_t hash, uint64_t sooner)
{
	size_t at = hr__names_first(&index->names, sooner);
	uint32_t number;

	hr__names_expect(&index->names, hash);
	if (hr__names_next(&index->names, sooner, &at, &number))
		__builtin_prefetch(&index->entries[number]);
}

#endif
