/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reading a header: one pass over the text that fills a table of entries and a list of metadata pairs. Each value is
 * checked for its type here; rules about several entries at once are header_rules.c's.
 *
 * Memory: strings and dims go into chunks (strings from the bottom up, dims from the top down), both at most as many
 * as the text can hold: no length that the text claims is ever allocated. Entries and pairs are one growing array
 * each.
 */
#include "header.h"

#include "core/arith.h"
#include "core/error.h"
#include "core/mem.h"
#include "dtype.h"
#include "header_rules.h"
#include "json.h"

#include <string.h>

#define MAX_UNKNOWN_FIELDS 16 /* in one entry; each is compared with all others */
#define MAX_UNKNOWN_NAME   256

struct chunk {
	struct chunk *next;
	size_t low, high; /* what is between is free */
	char memory[];
};

enum field {
	FIELD_UNKNOWN = 0,
	FIELD_DTYPE = 1,
	FIELD_SHAPE = 2,
	FIELD_OFFSETS = 4,
	FIELDS_ALL = 7,
};

/* Everything that one call of hr__header_parse() knows. */
struct reader {
	struct hr__json json;
	const struct hr__hash_key *key;
	struct hr__header *out;
	size_t entries_room, pairs_room;
	size_t chunk_bytes;
	bool has_metadata;
	uint32_t last_dtype;       /* most tensors have the dtype of their neighbour ... */
	const uint64_t *last_dims; /* ... and often its shape */
	uint8_t last_rank;
};

/* ---- memory ---- */

/* The newest chunk, if it has that much left; else a new one. */
static struct chunk *chunk_with(struct reader *reader, size_t bytes)
{
	struct chunk *chunk = reader->out->arena;
	size_t room = bytes > reader->chunk_bytes ? bytes : reader->chunk_bytes;

	if (chunk && chunk->high - chunk->low >= bytes)
		return chunk;
	room = (room + 7) & ~(size_t)7;
	chunk = hr__malloc(sizeof(*chunk) + room);
	if (!chunk)
		return NULL;
	*chunk = (struct chunk){.next = reader->out->arena, .high = room};
	reader->out->arena = chunk;
	reader->chunk_bytes = (size_t)hr__min_u64((uint64_t)(reader->json.end - reader->json.start), 1 << 15) / 4 +
			      1024;
	return chunk;
}

/* The position goes before the string: see hr__header_position(). */
static int keep_string(struct reader *reader, const struct hr__json_string *string, const char **out)
{
	uint32_t position = (uint32_t)(string->raw - 1 - reader->json.start);
	struct chunk *chunk = chunk_with(reader, sizeof(position) + string->bytes);
	char *to;

	if (!chunk)
		return HR_E_NOMEM;
	to = chunk->memory + chunk->low;
	memcpy(to, &position, sizeof(position));
	hr__json_decode(string, to + sizeof(position));
	*out = to + sizeof(position);
	chunk->low += sizeof(position) + string->bytes;
	return 0;
}

static bool is_last_shape(const struct reader *reader, const uint64_t *dims, uint8_t rank)
{
	if (!reader->last_dims || reader->last_rank != rank)
		return false;
	for (unsigned i = 0; i < rank; i++)
		if (reader->last_dims[i] != dims[i])
			return false;
	return true;
}

static int keep_dims(struct reader *reader, const uint64_t *dims, uint8_t rank, const uint64_t **out)
{
	size_t bytes = rank * sizeof(*dims);
	struct chunk *chunk;

	if (!is_last_shape(reader, dims, rank)) {
		chunk = chunk_with(reader, bytes);
		if (!chunk)
			return HR_E_NOMEM;
		chunk->high -= bytes; /* stays a multiple of 8 */
		memcpy(chunk->memory + chunk->high, dims, bytes);
		reader->last_dims = (const uint64_t *)(const void *)(chunk->memory + chunk->high);
		reader->last_rank = rank;
	}
	*out = reader->last_dims;
	return 0;
}

/* Makes room for one more item in an array that doubles. */
static int grow(void **array, size_t n, size_t *room, size_t item_bytes)
{
	size_t wanted = *room ? *room * 2 : 16;
	void *bigger;

	if (n < *room)
		return 0;
	bigger = hr__realloc(*array, wanted, item_bytes);
	if (!bigger)
		return HR_E_NOMEM;
	*array = bigger;
	*room = wanted;
	return 0;
}

void hr__header_free(struct hr__header *header)
{
	struct chunk *chunk = header->arena;

	while (chunk) {
		struct chunk *next = chunk->next;

		hr__free(chunk);
		chunk = next;
	}
	hr__free(header->entries);
	hr__free(header->pairs);
	*header = (struct hr__header){.entries = NULL};
}

/* ---- fields of an entry ---- */

static int read_dtype(struct reader *reader, struct hr__entry *entry)
{
	struct hr__json_string name;
	char text[16];
	const uint8_t *at;
	int rc = hr__json_string(&reader->json, "dtype", &name);

	if (rc)
		return rc;
	if (!reader->last_dtype || !hr__json_is(&name, hr_dtype_name(reader->last_dtype))) {
		at = name.raw - 1;
		if (name.bytes > sizeof(text))
			name.bytes = name.raw_bytes = 0; /* longer than any */
		hr__json_decode(&name, text);
		reader->last_dtype = hr__dtype_find(text, name.bytes);
		if (!reader->last_dtype)
			return hr__json_fail(
				&reader->json, at, HR_E_DTYPE,
				"a dtype that this version of headrace does not know (it knows those of safetensors "
				"0.8)");
	}
	entry->dtype = (uint8_t)reader->last_dtype;
	return 0;
}

static int read_shape(struct reader *reader, struct hr__entry *entry)
{
	uint64_t dims[HR__MAX_RANK];
	struct hr__json *json = &reader->json;
	unsigned rank = 0;
	bool more;
	int rc = hr__json_open(json, HR__JSON_ARRAY, "shape");

	if (rc)
		return rc;
	for (;;) {
		rc = hr__json_item(json, &more);
		if (rc)
			return rc;
		if (!more)
			break;
		if (rank == HR__MAX_RANK)
			return hr__json_fail(json, json->at, HR_E_LIMIT, "shape has more than %d dimensions",
					     HR__MAX_RANK);
		rc = hr__json_u64(json, "a dimension of shape", &dims[rank++]);
		if (rc)
			return rc;
	}
	entry->rank = (uint8_t)rank;
	return keep_dims(reader, dims, entry->rank, &entry->dims);
}

static int read_offsets(struct reader *reader, struct hr__entry *entry)
{
	uint64_t values[2];
	struct hr__json *json = &reader->json;
	unsigned n = 0;
	bool more;
	int rc = hr__json_open(json, HR__JSON_ARRAY, "data_offsets");

	for (;;) {
		if (!rc)
			rc = hr__json_item(json, &more);
		if (rc)
			return rc;
		if (more == (n == 2))
			return hr__json_fail(json, json->at - !more, HR_E_TYPE,
					     "data_offsets must be two integers, not %s,",
					     more ? "more"
					     : n  ? "one"
						  : "none");
		if (!more)
			break;
		rc = hr__json_u64(json, n ? "the end in data_offsets" : "the begin in data_offsets", &values[n]);
		n++;
	}
	entry->begin = values[0];
	entry->end = values[1];
	return 0;
}

/* Fields that the format does not know, in one entry. */
struct unknown_fields {
	uint64_t hashes[MAX_UNKNOWN_FIELDS];
	unsigned n;
};

/* They are passed over, but not twice: such a file means different things to different readers. */
static int skip_unknown(struct reader *reader, const struct hr__json_string *name, struct unknown_fields *unknown)
{
	char text[MAX_UNKNOWN_NAME];
	uint64_t hash;

	if (name->bytes > sizeof(text) || unknown->n == MAX_UNKNOWN_FIELDS)
		return hr__json_fail(&reader->json, name->raw - 1, HR_E_LIMIT,
				     "more than %d unknown fields, or one with a name of more than %d bytes,",
				     MAX_UNKNOWN_FIELDS, MAX_UNKNOWN_NAME);
	hr__json_decode(name, text);
	hash = hr__hash(reader->key, text, name->bytes);
	for (unsigned i = 0; i < unknown->n; i++)
		if (unknown->hashes[i] == hash)
			return hr__json_fail(&reader->json, name->raw - 1, HR_E_DUPLICATE, "a field occurs twice,");
	unknown->hashes[unknown->n++] = hash;
	return hr__json_skip(&reader->json);
}

static enum field which_field(const struct hr__json_string *name)
{
	if (hr__json_is(name, "dtype"))
		return FIELD_DTYPE;
	if (hr__json_is(name, "shape"))
		return FIELD_SHAPE;
	return hr__json_is(name, "data_offsets") ? FIELD_OFFSETS : FIELD_UNKNOWN;
}

static int read_field(struct reader *reader, enum field field, struct hr__entry *entry)
{
	if (field == FIELD_DTYPE)
		return read_dtype(reader, entry);
	return field == FIELD_SHAPE ? read_shape(reader, entry) : read_offsets(reader, entry);
}

static int read_entry(struct reader *reader, struct hr__entry *entry)
{
	struct unknown_fields unknown = {.n = 0};
	struct hr__json *json = &reader->json;
	struct hr__json_string name;
	unsigned seen = 0;
	bool more = true;
	int rc = hr__json_open(json, HR__JSON_OBJECT, "a tensor's entry");

	while (!rc) {
		enum field field;

		rc = hr__json_member(json, &name, &more);
		if (rc || !more)
			break;
		field = which_field(&name);
		if (seen & field)
			return hr__json_fail(json, name.raw - 1, HR_E_DUPLICATE, "a field occurs twice,");
		seen |= field;
		rc = field ? read_field(reader, field, entry) : skip_unknown(reader, &name, &unknown);
	}
	if (!rc && seen != FIELDS_ALL)
		return hr__json_fail(json, json->at - 1, HR_E_FIELD, "%s is missing,",
				     !(seen & FIELD_DTYPE)   ? "dtype"
				     : !(seen & FIELD_SHAPE) ? "shape"
							     : "data_offsets");
	return rc;
}

/* ---- the document ---- */

/* Says which tensor an error is about. */
static int blame(const char *name, size_t name_len)
{
	const struct hr_error *error = hr_error_last();
	const struct hr__where where = {
		.stage = "header", .offset = error->offset, .tensor = name, .tensor_len = name_len};
	char shown[120];

	if (error->code == HR_E_NOMEM)
		return HR_E_NOMEM;
	return hr__fail_at(&where, error->code, "tensor \"%s\": %s", hr__escape(shown, sizeof(shown), name, name_len),
			   error->message);
}

static int read_tensor(struct reader *reader, const struct hr__json_string *name)
{
	struct hr__header *out = reader->out;
	struct hr__entry entry = {.name_len = (uint32_t)name->bytes};
	int rc;

	if (name->bytes > HR__MAX_NAME_BYTES)
		return hr__json_fail(&reader->json, name->raw - 1, HR_E_LIMIT,
				     "a tensor name of %zu bytes (at most %d are allowed)", name->bytes,
				     HR__MAX_NAME_BYTES);
	rc = keep_string(reader, name, &entry.name);
	if (!rc)
		rc = grow((void **)&out->entries, out->n_entries, &reader->entries_room, sizeof(entry));
	if (rc)
		return rc;
	rc = read_entry(reader, &entry);
	if (rc)
		return blame(entry.name, entry.name_len);
	entry.hash = hr__hash(reader->key, entry.name, entry.name_len);
	out->entries[out->n_entries++] = entry;
	return 0;
}

static int read_pair(struct reader *reader, const struct hr__json_string *key)
{
	struct hr__header *out = reader->out;
	struct hr__json_string value;
	struct hr__pair pair;
	int rc = hr__json_string(&reader->json, "a value in __metadata__", &value);

	if (!rc)
		rc = keep_string(reader, key, &pair.key);
	if (!rc)
		rc = keep_string(reader, &value, &pair.value);
	if (!rc)
		rc = grow((void **)&out->pairs, out->n_pairs, &reader->pairs_room, sizeof(pair));
	if (rc)
		return rc;
	pair.key_len = (uint32_t)key->bytes;
	pair.value_len = (uint32_t)value.bytes;
	out->pairs[out->n_pairs++] = pair;
	return 0;
}

static int read_metadata(struct reader *reader, const struct hr__json_string *name)
{
	struct hr__json *json = &reader->json;
	struct hr__json_string key;
	bool more = true;
	int rc;

	if (reader->has_metadata)
		return hr__json_fail(json, name->raw - 1, HR_E_DUPLICATE, "__metadata__ occurs twice,");
	reader->has_metadata = true;
	if (hr__json_take_null(json))
		return 0;
	rc = hr__json_open(json, HR__JSON_OBJECT, "__metadata__");
	while (!rc) {
		rc = hr__json_member(json, &key, &more);
		if (rc || !more)
			break;
		rc = read_pair(reader, &key);
	}
	return rc;
}

static int read_document(struct reader *reader)
{
	struct hr__json *json = &reader->json;
	struct hr__json_string name;
	bool more = true;
	int rc = hr__json_open(json, HR__JSON_OBJECT, "the header");

	while (!rc) {
		rc = hr__json_member(json, &name, &more);
		if (rc || !more)
			break;
		rc = hr__json_is(&name, "__metadata__") ? read_metadata(reader, &name) : read_tensor(reader, &name);
	}
	return rc ? rc : hr__json_end(json);
}

int hr__header_parse(const struct hr__hash_key *key, const uint8_t *json, size_t json_bytes, uint64_t data_bytes,
		     struct hr__header *out)
{
	const struct hr__where where = {.stage = "header", .offset = 0};
	const struct hr__header_text text = {.json = json, .json_bytes = json_bytes, .data_bytes = data_bytes};
	struct reader reader = {
		.key = key, .out = out, .chunk_bytes = (size_t)hr__min_u64(json_bytes / 2 + 64, 1 << 16)};
	int rc;

	*out = (struct hr__header){.entries = NULL};
	if (json_bytes > HR__HEADER_MAX_BYTES)
		return hr__fail_at(&where, HR_E_HEADER_LARGE,
				   "the header has %zu bytes, more than 100000000 are not allowed", json_bytes);
	if (json_bytes == 0)
		return hr__fail_at(&where, HR_E_JSON,
				   "the header length at byte 0 is 0, so there is no header: the file was "
				   "perhaps never written, download it again");
	hr__json_start(&reader.json, json, json_bytes, HR__FRAME_BYTES, "header");
	rc = read_document(&reader);
	if (!rc)
		rc = hr__header_check(&text, key, out);
	if (rc)
		hr__header_free(out);
	return rc;
}
