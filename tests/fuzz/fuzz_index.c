/* SPDX-License-Identifier: Apache-2.0 */
/* Any bytes as an index file. What is accepted names plain files only. */
#include "fuzz.h"

#include "model/index.h"

static const struct hr__hash_key key = {1, 2};

static void check_accepted(const struct hr__index *index)
{
	fuzz_check(index->n_shards >= 1 && index->n_entries >= index->n_shards);
	for (uint32_t i = 0; i < index->n_shards; i++) {
		const char *name = index->shards[i];
		size_t length = strlen(name);

		fuzz_check(length >= 12 && length <= 255 && strcmp(name + length - 12, ".safetensors") == 0);
		fuzz_check(!strchr(name, '/') && !strchr(name, '\\') && strcmp(name, "..") != 0 && name[1] != ':');
		fuzz_check(i == 0 || strcmp(index->shards[i - 1], name) < 0);
	}
	for (size_t i = 0; i < index->n_entries; i++) {
		const struct hr__index_entry *entry = &index->entries[i];

		fuzz_check(entry->shard < index->n_shards);
		fuzz_check(hr__index_find(index, entry->hash, entry->name, entry->name_len) == entry);
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n)
{
	struct hr__index index = {.n_entries = 0};
	uint8_t *json;
	int rc;

	if (n < FUZZ_PREFIX)
		return 0;
	n -= FUZZ_PREFIX;
	json = fuzz_copy(bytes + FUZZ_PREFIX, n);
	fuzz_arm(bytes);
	rc = hr__index_parse(&key, json, n, &index);
	if (!rc)
		rc = hr__index_make_table(&key, &index);
	if (fuzz_fired())
		fuzz_check(rc == HR_E_NOMEM);
	if (rc)
		fuzz_check_error(rc, "index", n);
	else
		check_accepted(&index);
	hr__index_free(&index);
	free(json);
	return 0;
}
