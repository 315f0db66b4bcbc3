/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Parses an index in one pass. Names of tensors stay in the text (which the caller keeps), but for those with escapes;
 * names of shards are copied once each. Duplicates are looked for at the end, when the number of names is known and
 * their table can be made in the right size.
 *
 * What is not "weight_map" is advice at most: "metadata" gives a total_size for a warning, everything else is skipped,
 * but a key that occurs twice is refused wherever we look.
 */
#include "index.h"

#include "core/arith.h"
#include "core/error.h"
#include "format/header.h"
#include "format/json.h"
#include "model/build.h"

#include <stdlib.h>
#include <string.h>

#define MAX_FILE_NAME 255
/* Members of the top level or of "metadata", and bytes of their keys: real ones have a handful. */
#define MAX_SIDE_KEYS      64
#define MAX_SIDE_KEY_BYTES 256

struct parser {
	struct hr__json json;
	const struct hr__hash_key *key;
	struct hr__index *index;
	size_t entries_room, shards_room, arena_used, json_bytes;
	struct hr__names shard_names;
	uint32_t last_shard;               /* the next tensor is most likely in it as well ... */
	struct hr__json_string last_value; /* ... and then its name is spelled the same */
	bool has_weight_map;
};

/* Keys seen in one object, by their hashes: two that agree in 64 keyed bits are the same. */
struct seen {
	uint64_t hashes[MAX_SIDE_KEYS];
	size_t n;
};

static int see_key(const struct parser *p, struct seen *seen, const struct hr__json_string *key)
{
	char text[MAX_SIDE_KEY_BYTES];
	uint64_t hash;

	if (key->bytes > sizeof(text) || seen->n == MAX_SIDE_KEYS)
		return hr__json_fail(&p->json, key->raw, HR_E_LIMIT,
				     "an index may have at most %d keys beside its tensors, of at most %d bytes each",
				     MAX_SIDE_KEYS, MAX_SIDE_KEY_BYTES);
	hr__json_decode(key, text);
	hash = hr__hash(p->key, text, key->bytes);
	for (size_t i = 0; i < seen->n; i++)
		if (seen->hashes[i] == hash)
			return hr__json_fail(&p->json, key->raw, HR_E_DUPLICATE, "a key occurs twice");
	seen->hashes[seen->n++] = hash;
	return 0;
}

/* ---- shards ---- */

/* One component, and the name of a safetensors file: it can only mean a file beside the index. */
static const char *what_is_wrong(const char *name, size_t length)
{
	static const char suffix[] = ".safetensors";
	const size_t suffix_length = sizeof(suffix) - 1;

	for (size_t i = 0; i < length; i++) {
		unsigned char c = (unsigned char)name[i];

		if (c == '/' || c == '\\')
			return "it must be in the same directory as the index";
		if (c < 0x20 || c == 0x7f)
			return "it has a control byte";
	}
	if (length > 1 && name[1] == ':')
		return "it begins like a drive letter";
	if (length < suffix_length || memcmp(name + length - suffix_length, suffix, suffix_length) != 0)
		return "it does not end in \".safetensors\"";
	return NULL;
}

static int check_file_name(const struct parser *p, const struct hr__json_string *value, const char *name)
{
	const char *wrong = what_is_wrong(name, value->bytes);
	char escaped[300];

	if (!wrong)
		return 0;
	hr__escape(escaped, sizeof(escaped), name, value->bytes);
	return hr__json_fail(&p->json, value->raw, HR_E_PATH, "\"%s\" is no name for a shard: %s", escaped, wrong);
}

static int add_shard(struct parser *p, const struct hr__json_string *value, const char *name, uint64_t hash)
{
	struct hr__index *index = p->index;
	int code = check_file_name(p, value, name);

	if (code)
		return code;
	if (index->n_shards == HR__MAX_SHARDS)
		return hr__json_fail(&p->json, value->raw, HR_E_LIMIT, "an index may name at most %d files",
				     HR__MAX_SHARDS);
	if (index->n_shards == p->shards_room) {
		size_t room = p->shards_room ? p->shards_room * 2 : 16;
		const char **bigger = hr__realloc(index->shards, room, sizeof(*bigger));

		if (!bigger)
			return HR_E_NOMEM;
		index->shards = bigger;
		p->shards_room = room;
	}
	index->shards[index->n_shards] = hr__strndup(name, value->bytes);
	if (!index->shards[index->n_shards])
		return HR_E_NOMEM;
	hr__names_add(&p->shard_names, hash, index->n_shards);
	p->last_shard = index->n_shards++;
	return 0;
}

static bool is_shard(const struct hr__index *index, uint32_t shard, const char *name, size_t length)
{
	return strlen(index->shards[shard]) == length && memcmp(index->shards[shard], name, length) == 0;
}

/* The number of the shard that a value names, in order of first occurrence so far. */
static int read_shard(struct parser *p)
{
	struct hr__json_string value;
	char text[MAX_FILE_NAME];
	uint32_t number;
	uint64_t hash;
	int code = hr__json_string(&p->json, "a shard's name", &value);

	if (code)
		return code;
	if (value.raw_bytes == p->last_value.raw_bytes && p->index->n_shards &&
	    memcmp(value.raw, p->last_value.raw, value.raw_bytes) == 0)
		return 0;
	if (value.bytes > MAX_FILE_NAME)
		return hr__json_fail(&p->json, value.raw, HR_E_PATH, "a shard's name has %zu bytes; the limit is %d",
				     value.bytes, MAX_FILE_NAME);
	p->last_value = value;
	hr__json_decode(&value, text);
	hash = hr__hash(p->key, text, value.bytes);
	for (size_t at = hr__names_first(&p->shard_names, hash); hr__names_next(&p->shard_names, hash, &at, &number);) {
		if (is_shard(p->index, number, text, value.bytes)) {
			p->last_shard = number;
			return 0;
		}
	}
	return add_shard(p, &value, text, hash);
}

struct shard_order {
	const char *name;
	uint32_t before;
};

static int compare_shards(const void *a, const void *b)
{
	return strcmp(((const struct shard_order *)a)->name, ((const struct shard_order *)b)->name);
}

/* Shards are numbered by name, so that a model's numbering does not depend on the order of its index. */
static int sort_shards(struct hr__index *index)
{
	struct shard_order *order = hr__malloc(index->n_shards * sizeof(*order));
	uint32_t *now = hr__malloc(index->n_shards * sizeof(*now));
	int code = order && now ? 0 : HR_E_NOMEM;

	if (code)
		goto out;
	for (uint32_t s = 0; s < index->n_shards; s++)
		order[s] = (struct shard_order){index->shards[s], s};
	qsort(order, index->n_shards, sizeof(*order), compare_shards);
	for (uint32_t s = 0; s < index->n_shards; s++) {
		index->shards[s] = order[s].name;
		now[order[s].before] = s;
	}
	for (size_t i = 0; i < index->n_entries; i++)
		index->entries[i].shard = now[index->entries[i].shard];
out:
	hr__free(order);
	hr__free(now);
	return code;
}

/* ---- tensors ---- */

static int entries_reserve(struct parser *p)
{
	size_t room = p->entries_room ? p->entries_room * 2 : p->json_bytes / 100 + 16;
	struct hr__index_entry *bigger;

	if (p->index->n_entries < p->entries_room)
		return 0;
	bigger = hr__realloc(p->index->entries, room, sizeof(*bigger));
	if (!bigger)
		return HR_E_NOMEM;
	p->index->entries = bigger;
	p->entries_room = room;
	return 0;
}

/* The decoded name: in the text if it stands there as it is, else in the arena, which has room for all. */
static const char *keep_name(struct parser *p, const struct hr__json_string *name)
{
	char *copy;

	if (name->bytes == name->raw_bytes)
		return (const char *)name->raw;
	if (!p->index->arena)
		p->index->arena = hr__malloc(p->json_bytes);
	if (!p->index->arena)
		return NULL;
	copy = (char *)p->index->arena + p->arena_used;
	hr__json_decode(name, copy);
	p->arena_used += name->bytes;
	return copy;
}

static int read_entry(struct parser *p, const struct hr__json_string *name)
{
	struct hr__index_entry *entry;
	int code;

	if (name->bytes > HR__MAX_NAME_BYTES)
		return hr__json_fail(&p->json, name->raw, HR_E_LIMIT, "a tensor's name has %zu bytes; the limit is %d",
				     name->bytes, HR__MAX_NAME_BYTES);
	code = entries_reserve(p);
	if (code)
		return code;
	entry = &p->index->entries[p->index->n_entries];
	entry->name = keep_name(p, name);
	if (!entry->name)
		return HR_E_NOMEM;
	entry->name_len = (uint32_t)name->bytes;
	entry->at = (uint32_t)(name->raw - p->json.start);
	code = read_shard(p);
	entry->shard = p->last_shard;
	p->index->n_entries += !code;
	return code;
}

static int read_weight_map(struct parser *p)
{
	struct hr__json_string name;
	bool more = true;
	int code = hr__json_open(&p->json, HR__JSON_OBJECT, "weight_map");

	p->has_weight_map = true;
	while (!code && more) {
		code = hr__json_member(&p->json, &name, &more);
		if (!code && more)
			code = read_entry(p, &name);
	}
	return code;
}

const struct hr__index_entry *hr__index_find(const struct hr__index *index, uint64_t hash, const char *name,
					     size_t name_len)
{
	uint32_t number;

	for (size_t at = hr__names_first(&index->names, hash); hr__names_next(&index->names, hash, &at, &number);) {
		const struct hr__index_entry *entry = &index->entries[number];

		if (entry->hash == hash && entry->name_len == name_len && memcmp(entry->name, name, name_len) == 0)
			return entry;
	}
	return NULL;
}

static int fail_listed_twice(const struct hr__index *index, const struct hr__index_entry *entry)
{
	struct hr__json json;
	char name[128];

	hr__json_start(&json, index->json, index->json_bytes, 0, "index");
	hr__escape(name, sizeof(name), entry->name, entry->name_len);
	return hr__json_fail(&json, json.start + entry->at, HR_E_DUPLICATE, "tensor \"%s\" is listed twice", name);
}

int hr__index_make_table(const struct hr__hash_key *key, struct hr__index *index)
{
	enum { AHEAD = 8 };
	size_t n = index->n_entries;
	int code = hr__names_new(&index->names, n);

	for (size_t i = 0; i < n + AHEAD && !code; i++) {
		struct hr__index_entry *entry;

		if (i < n) {
			entry = &index->entries[i];
			entry->hash = hr__hash(key, entry->name, entry->name_len);
			hr__names_expect(&index->names, entry->hash);
		}
		if (i < AHEAD)
			continue;
		entry = &index->entries[i - AHEAD];
		if (hr__index_find(index, entry->hash, entry->name, entry->name_len))
			return fail_listed_twice(index, entry);
		hr__names_add(&index->names, entry->hash, (uint32_t)(i - AHEAD));
	}
	return code;
}

/* ---- the rest ---- */

/* A whole number is taken; whatever else stands there says nothing. */
static int read_total_size(struct parser *p)
{
	const uint8_t *from = p->json.start + hr__json_next_position(&p->json);
	uint64_t value = 0;
	bool is_whole = true;
	int code = hr__json_skip(&p->json);

	for (; !code && is_whole && from < p->json.at; from++)
		is_whole = *from >= '0' && *from <= '9' && hr__mul_u64(value, 10, &value) &&
			   hr__add_u64(value, (uint64_t)(*from - '0'), &value);
	p->index->has_total_size = !code && is_whole;
	p->index->total_size = value;
	return code;
}

static int read_metadata(struct parser *p)
{
	const uint8_t *at = p->json.start + hr__json_next_position(&p->json);
	struct hr__json_string key;
	struct seen seen = {.n = 0};
	bool more = true;
	int code;

	if (at == p->json.end || *at != '{')
		return hr__json_skip(&p->json);
	code = hr__json_open(&p->json, HR__JSON_OBJECT, "metadata");
	while (!code && more) {
		code = hr__json_member(&p->json, &key, &more);
		if (code || !more)
			break;
		code = see_key(p, &seen, &key);
		if (!code)
			code = hr__json_is(&key, "total_size") ? read_total_size(p) : hr__json_skip(&p->json);
	}
	return code;
}

static int read_top_level(struct parser *p)
{
	struct hr__json_string key;
	struct seen seen = {.n = 0};
	bool more = true;
	int code = hr__json_open(&p->json, HR__JSON_OBJECT, "the index");

	while (!code && more) {
		code = hr__json_member(&p->json, &key, &more);
		if (code || !more)
			break;
		code = see_key(p, &seen, &key);
		if (code)
			break;
		if (hr__json_is(&key, "weight_map"))
			code = read_weight_map(p);
		else if (hr__json_is(&key, "metadata"))
			code = read_metadata(p);
		else
			code = hr__json_skip(&p->json);
	}
	return code ? code : hr__json_end(&p->json);
}

static int fail_index(int code, const char *message)
{
	return hr__fail_at(&(struct hr__where){.stage = "index", .offset = HR_NO_OFFSET}, code, "%s", message);
}

int hr__index_parse(const struct hr__hash_key *key, const uint8_t *json, size_t json_bytes, struct hr__index *out)
{
	struct parser p = {.key = key, .index = out, .json_bytes = json_bytes};
	int code;

	*out = (struct hr__index){.json = json, .json_bytes = json_bytes};
	if (json_bytes > HR__INDEX_MAX_BYTES)
		return fail_index(HR_E_LIMIT, "an index may have at most 100,000,000 bytes");
	hr__json_start(&p.json, json, json_bytes, 0, "index");
	code = hr__names_new(&p.shard_names, HR__MAX_SHARDS);
	if (!code)
		code = read_top_level(&p);
	if (!code && !p.has_weight_map)
		code = fail_index(HR_E_FIELD, "the index has no weight_map");
	if (!code && out->n_entries == 0)
		code = fail_index(HR_E_INDEX, "the index's weight_map is empty: it names no shard");
	if (!code)
		code = sort_shards(out);
	hr__names_free(&p.shard_names);
	if (code)
		hr__index_free(out);
	return code;
}

void hr__index_free(struct hr__index *index)
{
	for (uint32_t s = 0; s < index->n_shards; s++)
		hr__free((char *)(uintptr_t)index->shards[s]);
	hr__free(index->shards);
	hr__free(index->entries);
	hr__names_free(&index->names);
	hr__free(index->arena);
	memset(index, 0, sizeof(*index));
}
