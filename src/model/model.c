/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A model: the headers of all its shards behind one table of names. It is made by build.h's three steps, and never
 * changes after; only its count of owners does, so any thread may read it without a lock.
 *
 * Memory: the entries, names and dims that the header parser made (they are not copied), 16 bytes per tensor for its
 * number and 8 to 24 for its name. The text of a header lives only while it is read.
 */
#include "build.h"

#include "core/arith.h"
#include "core/error.h"
#include "core/mem.h"
#include "format/header.h"

#include <stdatomic.h>
#include <string.h>

struct tensor {
	const struct hr__entry *entry;
	uint32_t shard;
	uint32_t flags;
};

struct hr_model {
	atomic_uint owners;
	uint64_t id;
	struct hr__hash_key key;
	struct hr__shard *shards;
	uint32_t n_shards;
	struct tensor *tensors;
	uint64_t n_tensors;
	struct hr__names names;
	char **warnings;
	size_t n_warnings;
};

static _Atomic uint64_t last_id;

uint64_t hr__model_id(const hr_model *model)
{
	return model->id;
}

/* ---- building ---- */

int hr__model_new(hr_model **out)
{
	hr_model *model = hr__calloc(1, sizeof(*model));

	*out = model;
	if (!model)
		return HR_E_NOMEM;
	atomic_init(&model->owners, 1);
	model->id = atomic_fetch_add(&last_id, 1) + 1;
	hr__hash_key_new(&model->key);
	return 0;
}

const struct hr__hash_key *hr__model_key(const hr_model *model)
{
	return &model->key;
}

int hr__model_add(hr_model *model, uint32_t n, const struct hr__shard_origin *from)
{
	model->shards = hr__malloc(n * sizeof(*model->shards));
	if (!model->shards)
		return HR_E_NOMEM;
	return hr__shards_read(&model->key, from, model->shards, n, &model->n_shards);
}

/* Takes the text over; NULL says that there was no memory for it. */
static int add_warning(hr_model *model, char *text)
{
	char **bigger = text ? hr__realloc(model->warnings, model->n_warnings + 1, sizeof(*bigger)) : NULL;

	if (!bigger) {
		hr__free(text);
		return HR_E_NOMEM;
	}
	model->warnings = bigger;
	bigger[model->n_warnings++] = text;
	return 0;
}

static bool same_name(const struct hr__entry *a, const char *name, size_t name_len)
{
	return a->name_len == name_len && memcmp(a->name, name, name_len) == 0;
}

static bool find_name(const hr_model *model, uint64_t hash, const char *name, size_t name_len, uint32_t *number)
{
	for (size_t at = hr__names_first(&model->names, hash); hr__names_next(&model->names, hash, &at, number);)
		if (same_name(model->tensors[*number].entry, name, name_len))
			return true;
	return false;
}

static int fail_twice(const hr_model *model, const struct hr__entry *entry, uint32_t a, uint32_t b, bool has_index)
{
	const char *path_a = model->shards[a].source.path, *path_b = model->shards[b].source.path;
	const struct hr__where at = {.stage = "open",
				     .path = path_b,
				     .tensor = entry->name,
				     .tensor_len = entry->name_len,
				     .offset = HR_NO_OFFSET};
	char name[128];

	hr__escape(name, sizeof(name), entry->name, entry->name_len);
	return hr__fail_at(&at, HR_E_DUPLICATE,
			   has_index ? "tensor \"%s\" is in both %s and %s, and the index does not say which to take"
				     : "tensor \"%s\" is in both %s and %s; leave one of the two files out",
			   name, path_a, path_b);
}

/* Gives an entry the next number. `is_new`: the caller knows that no other shard's entry has this name. */
static int add_tensor(hr_model *model, const struct hr__entry *entry, uint32_t shard, uint32_t flags, bool is_new)
{
	uint32_t other;

	if (!is_new && find_name(model, entry->hash, entry->name, entry->name_len, &other))
		return fail_twice(model, entry, model->tensors[other].shard, shard, flags & HR_TENSOR_UNLISTED);
	model->tensors[model->n_tensors] = (struct tensor){entry, shard, flags};
	hr__names_add(&model->names, entry->hash, (uint32_t)model->n_tensors);
	model->n_tensors++;
	return 0;
}

/* ---- joining the index with the headers ---- */

/* What the index says of an entry: the mark that it gets. */
enum {
	UNLISTED,
	LISTED_HERE,
	LISTED_ELSEWHERE,
};

struct join {
	const hr_model *model;
	const struct hr__index *index;
	atomic_uint next; /* the first shard that nobody has taken */
};

/* Looking all names up costs more than the rest; it changes nothing but the marks, so helpers can share it. */
static void *mark_some(void *ctx)
{
	struct join *join = ctx;
	uint32_t s = atomic_fetch_add(&join->next, 1);

	for (; s < join->model->n_shards; s = atomic_fetch_add(&join->next, 1)) {
		const struct hr__header *header = &join->model->shards[s].header;

		for (size_t i = 0; i < header->n_entries; i++) {
			struct hr__entry *entry = &header->entries[i];
			const struct hr__index_entry *listed;

			if (i + 8 < header->n_entries)
				hr__index_expect(join->index, entry[8].hash, entry[4].hash);
			listed = hr__index_find(join->index, entry->hash, entry->name, entry->name_len);
			entry->mark = !listed ? UNLISTED : listed->shard == s ? LISTED_HERE : LISTED_ELSEWHERE;
		}
	}
	return NULL;
}

static void mark_listed(const hr_model *model, const struct hr__index *index)
{
	struct join join = {.model = model, .index = index};
	struct hr__os_team team;

	hr__os_team_start(&team, hr__shards_helpers(model->n_shards), "hr-open", mark_some, &join);
	mark_some(&join);
	hr__os_team_join(&team);
}

/* What joining the index with the headers found. */
struct tally {
	uint64_t n_listed, listed_bytes, n_unlisted;
	const struct hr__entry *first_unlisted;
	uint32_t first_unlisted_shard;
};

/* The entries of one shard, as far as they are the model's. The index decides between copies and does not filter. */
static int number_shard(hr_model *model, uint32_t s, const struct hr__index *index, struct tally *tally)
{
	struct hr__shard *shard = &model->shards[s];
	int code = 0;

	shard->first = model->n_tensors;
	for (size_t i = 0; i < shard->header.n_entries && !code; i++) {
		const struct hr__entry *entry = &shard->header.entries[i];

		if (i + 8 < shard->header.n_entries)
			hr__names_expect(&model->names, entry[8].hash);
		if (!index) {
			code = add_tensor(model, entry, s, 0, s == 0);
		} else if (entry->mark == UNLISTED) {
			code = add_tensor(model, entry, s, HR_TENSOR_UNLISTED, false);
			if (tally->n_unlisted++ == 0) {
				tally->first_unlisted = entry;
				tally->first_unlisted_shard = s;
			}
		} else if (entry->mark == LISTED_HERE) {
			code = add_tensor(model, entry, s, 0, true);
			tally->n_listed++;
			tally->listed_bytes += entry->end - entry->begin; /* for a warning: may wrap */
		}
	}
	shard->count = model->n_tensors - shard->first;
	return code;
}

/* Some listed tensor is not where the index says: find the first for the message. */
static int fail_missing(const hr_model *model, const struct hr__index *index, const char *index_path)
{
	for (size_t i = 0; i < index->n_entries; i++) {
		const struct hr__index_entry *entry = &index->entries[i];
		const struct hr__where at = {.stage = "index",
					     .path = index_path,
					     .tensor = entry->name,
					     .tensor_len = entry->name_len,
					     .offset = HR_NO_OFFSET};
		char name[128];
		uint32_t number;

		if (find_name(model, entry->hash, entry->name, entry->name_len, &number))
			continue; /* names are numbered from the shard that the index gives, or not at all */
		hr__escape(name, sizeof(name), entry->name, entry->name_len);
		return hr__fail_at(
			&at, HR_E_INDEX,
			"%s says that tensor \"%s\" is in %s, but that shard does not have it; download both again",
			index_path, name, index->shards[entry->shard]);
	}
	return hr__fail(HR_E_INDEX, "%s does not agree with its shards", index_path);
}

static int warn_of_index(hr_model *model, const struct hr__index *index, const char *index_path,
			 const struct tally *tally)
{
	char name[128];
	int code = 0;

	if (tally->n_unlisted) {
		hr__escape(name, sizeof(name), tally->first_unlisted->name, tally->first_unlisted->name_len);
		code = add_warning(
			model, hr__format("%" PRIu64 " tensor%s not in %s, the first is \"%s\" in %s; %s to the model "
					  "all the same",
					  tally->n_unlisted, tally->n_unlisted == 1 ? " is" : "s are", index_path, name,
					  model->shards[tally->first_unlisted_shard].source.path,
					  tally->n_unlisted == 1 ? "it belongs" : "they belong"));
	}
	if (!code && index->has_total_size && index->total_size != tally->listed_bytes)
		code = add_warning(model,
				   hr__format("%s says that its tensors have %" PRIu64 " bytes, but they have %" PRIu64,
					      index_path, index->total_size, tally->listed_bytes));
	return code;
}

int hr__model_finish(hr_model *model, const struct hr__index *index, const char *index_path)
{
	struct tally tally = {0};
	size_t n = 0;
	int code;

	for (uint32_t s = 0; s < model->n_shards; s++)
		n += model->shards[s].header.n_entries; /* the limit on header bytes keeps this below 2^26 */
	model->tensors = hr__malloc(n * sizeof(*model->tensors));
	if (!model->tensors)
		return HR_E_NOMEM;
	code = hr__names_new(&model->names, n);
	if (!code && index)
		mark_listed(model, index);
	for (uint32_t s = 0; s < model->n_shards && !code; s++)
		code = number_shard(model, s, index, &tally);
	if (code || !index)
		return code;
	if (tally.n_listed != index->n_entries)
		return fail_missing(model, index, index_path);
	return warn_of_index(model, index, index_path, &tally);
}

/* ---- owners ---- */

hr_model *hr_model_acquire(hr_model *model)
{
	atomic_fetch_add_explicit(&model->owners, 1, memory_order_relaxed);
	return model;
}

void hr_model_close(hr_model *model)
{
	if (!model || atomic_fetch_sub_explicit(&model->owners, 1, memory_order_acq_rel) != 1)
		return;
	for (uint32_t s = 0; s < model->n_shards; s++)
		hr__shard_close(&model->shards[s]);
	for (size_t i = 0; i < model->n_warnings; i++)
		hr__free(model->warnings[i]);
	hr__free(model->warnings);
	hr__free(model->shards);
	hr__free(model->tensors);
	hr__names_free(&model->names);
	hr__free(model);
}

/* ---- asking ---- */

uint64_t hr_model_n_tensors(const hr_model *model)
{
	return model->n_tensors;
}

int hr_model_tensor(const hr_model *model, uint64_t index, struct hr_tensor *out)
{
	const struct hr__entry *entry;
	struct hr_tensor tensor;

	if (index >= model->n_tensors)
		return hr__fail(HR_E_OPTS, "there is no tensor %" PRIu64 ": the model has %" PRIu64, index,
				model->n_tensors);
	entry = model->tensors[index].entry;
	tensor = (struct hr_tensor){
		.name = entry->name,
		.name_len = entry->name_len,
		.dims = entry->dims,
		.index = index,
		.bytes = entry->end - entry->begin,
		.offset = model->shards[model->tensors[index].shard].data_offset + entry->begin,
		.shard = model->tensors[index].shard,
		.dtype = entry->dtype,
		.rank = entry->rank,
		.flags = model->tensors[index].flags,
	};
	return hr__out_copy(out, &tensor, sizeof(tensor), "hr_tensor");
}

int hr_model_find(const hr_model *model, const char *name, size_t name_len, uint64_t *index)
{
	struct hr__where at = {.stage = "open", .tensor = name, .tensor_len = name_len, .offset = HR_NO_OFFSET};
	uint32_t number;
	char escaped[128];

	if (!name || !index)
		return hr__fail(HR_E_OPTS, "hr_model_find() needs a name and a place for the number");
	if (name_len == HR_STRLEN)
		name_len = strlen(name);
	if (find_name(model, hr__hash(&model->key, name, name_len), name, name_len, &number)) {
		*index = number;
		return 0;
	}
	hr__escape(escaped, sizeof(escaped), name, name_len);
	return hr__fail_at(&at, HR_E_NOTFOUND, "there is no tensor \"%s\" among the %" PRIu64 " of this model", escaped,
			   model->n_tensors);
}

uint32_t hr_model_n_shards(const hr_model *model)
{
	return model->n_shards;
}

static int check_shard(const hr_model *model, uint32_t shard)
{
	if (shard < model->n_shards)
		return 0;
	return hr__fail(HR_E_OPTS, "there is no shard %" PRIu32 ": the model has %" PRIu32, shard, model->n_shards);
}

int hr_model_shard(const hr_model *model, uint32_t shard, struct hr_shard *out)
{
	int code = check_shard(model, shard);
	const struct hr__shard *from;
	struct hr_shard described;

	if (code)
		return code;
	from = &model->shards[shard];
	described = (struct hr_shard){
		.path = from->source.path,
		.bytes = from->source.bytes,
		.data_offset = from->data_offset,
		.n_tensors = from->header.n_entries,
		.n_metadata = from->header.n_pairs,
	};
	return hr__out_copy(out, &described, sizeof(described), "hr_shard");
}

int hr_model_metadata(const hr_model *model, uint32_t shard, uint64_t pair, const char **key, size_t *key_len,
		      const char **value, size_t *value_len)
{
	const struct hr__pair *from;
	int code = check_shard(model, shard);

	if (code)
		return code;
	if (pair >= model->shards[shard].header.n_pairs)
		return hr__fail(HR_E_OPTS, "there is no metadata pair %" PRIu64 ": shard %" PRIu32 " has %zu", pair,
				shard, model->shards[shard].header.n_pairs);
	from = &model->shards[shard].header.pairs[pair];
	*key = from->key;
	*key_len = from->key_len;
	*value = from->value;
	*value_len = from->value_len;
	return 0;
}

const char *hr_model_warning(const hr_model *model, size_t i)
{
	return i < model->n_warnings ? model->warnings[i] : NULL;
}

int hr_model_read_shard(const hr_model *model, uint32_t shard, uint64_t offset, void *dst, size_t bytes)
{
	int code = check_shard(model, shard);

	if (!code)
		code = hr__source_read(&model->shards[shard].source, offset, dst, bytes);
	return code ? code : hr__source_check(&model->shards[shard].source);
}

/* ---- for the loader and the digest ---- */

uint32_t hr__model_n_sources(const hr_model *model)
{
	return model->n_shards;
}

const struct hr__source *hr__model_source(const hr_model *model, uint32_t source)
{
	return &model->shards[source].source;
}

void hr__model_extent(const hr_model *model, uint64_t tensor, struct hr__extent *out)
{
	const struct tensor *from = &model->tensors[tensor];

	out->source = from->shard;
	out->offset = model->shards[from->shard].data_offset + from->entry->begin;
	out->bytes = from->entry->end - from->entry->begin;
}

const char *hr__model_tensor_name(const hr_model *model, uint64_t tensor, size_t *length)
{
	*length = model->tensors[tensor].entry->name_len;
	return model->tensors[tensor].entry->name;
}

void hr__model_shard_tensors(const hr_model *model, uint32_t shard, uint64_t *first, uint64_t *count)
{
	*first = model->shards[shard].first;
	*count = model->shards[shard].count;
}

int hr__model_map(const hr_model *model, uint32_t source, unsigned char **out)
{
	struct hr__shard *shard = &model->shards[source];

	return hr__mapping_acquire(&shard->mapping, &shard->source, out);
}

void hr__model_unmap(const hr_model *model, uint32_t source)
{
	struct hr__shard *shard = &model->shards[source];

	hr__mapping_release(&shard->mapping, &shard->source);
}

int hr__model_check(const hr_model *model)
{
	int code = 0;

	for (uint32_t s = 0; s < model->n_shards && !code; s++)
		code = hr__source_check(&model->shards[s].source);
	return code;
}

uint64_t hr__model_bytes(const hr_model *model)
{
	uint64_t bytes = 0;

	for (uint32_t s = 0; s < model->n_shards; s++)
		bytes += model->shards[s].source.bytes;
	return bytes;
}
