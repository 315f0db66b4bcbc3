/* SPDX-License-Identifier: Apache-2.0 */
/*
 * From a name to a model: the one place that decides what a user's words mean. It never guesses: where more than one
 * model could be meant, the answer is HR_E_AMBIGUOUS with the candidates and what to type.
 *
 * A shard is opened below the descriptor of its directory and by a name without a slash, so an index cannot lead out
 * of it. A link is followed in the last component, since a Hugging Face cache is made of them, unless the caller
 * refuses links; a directory that is a link itself is opened either way, being the caller's own word.
 */
#include "folder.h"
#include "stored.h"

#include "core/arith.h"
#include "core/error.h"
#include "core/mem.h"
#include "model/build.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TEXT_(x) #x
#define TEXT(x)  TEXT_(x)

const char *hr_version(void)
{
	return TEXT(HR_VERSION_MAJOR) "." TEXT(HR_VERSION_MINOR) "." TEXT(HR_VERSION_PATCH);
}

static bool ends_with(const char *text, const char *end)
{
	size_t length = strlen(text), end_length = strlen(end);

	return length >= end_length && strcmp(text + length - end_length, end) == 0;
}

/* "model.safetensors.index.json", and "model.safetensors.index.fp16.json" as some tools have it. */
static bool is_index_name(const char *name)
{
	return ends_with(name, ".json") && strstr(name, ".index.");
}

/* ---- files ---- */

/* The shards of a model by their names; for hr__shards_read(). */
struct shard_names {
	const char *const *names;
	const struct hr_model_opts *opts;
	/* For open_shard(): what they are in, and what named them. */
	const struct hr__folder *folder;
	const char *index_path;
	/* For complete_index(). */
	const struct hr__hash_key *key;
	struct hr__index *index;
};

/* What only a store can do, asked of something else. 0: nothing is. */
static int refuse_store_opts(const char *name, const struct hr_model_opts *opts)
{
	const struct hr__where at = {.stage = "open", .path = name, .offset = HR_NO_OFFSET};

	if (opts->expect)
		return hr__fail_at(
			&at, HR_E_OPTS,
			"%s is not in a store, and only a store's generation can be compared with a manifest (expect)",
			name);
	if (opts->ugds)
		return hr__fail_at(&at, HR_E_OPTS,
				   "%s is not in a store, and only stores can be read through uGDS (ugds)", name);
	return 0;
}

static int open_path(void *ctx, uint32_t number, struct hr__source *source)
{
	const struct shard_names *shards = ctx;
	const char *path = shards->names[number];
	int code;

	if (!path || !path[0])
		return hr__fail(HR_E_OPTS, "the name of file %" PRIu32 " is empty", number);
	if (hr__store_name_is(path))
		return hr__store_member(path, shards->opts, source);
	code = refuse_store_opts(path, shards->opts);
	if (code)
		return code;
	return hr__source_open_file(AT_FDCWD, path, path, shards->opts->flags & HR_MODEL_NO_SYMLINKS, source);
}

static int open_shard(void *ctx, uint32_t number, struct hr__source *source)
{
	const struct shard_names *shards = ctx;
	const char *name = shards->names[number];
	char *path = hr__folder_path(shards->folder, name);
	int code;

	if (!path)
		return HR_E_NOMEM;
	code = hr__folder_source(shards->folder, name, path, source);
	if (code == HR_E_NOTFOUND && shards->index_path)
		code = hr__fail_at(&(struct hr__where){.stage = "index", .path = path, .offset = HR_NO_OFFSET},
				   HR_E_INDEX, "%s names the shard %s, which is not there; download it",
				   shards->index_path, path);
	hr__free(path);
	return code;
}

/* Refuses two paths that lead to the same file: with equal names in both, that is what was meant to be said. */
static int check_same_file(const hr_model *model, struct hr__names *files, uint32_t new)
{
	const struct hr__source *source = hr__model_source(model, new);
	const uint64_t id[2] = {source->identity.device, source->identity.inode};
	uint64_t hash = hr__hash(hr__model_key(model), id, sizeof(id));
	uint32_t number;

	for (size_t at = hr__names_first(files, hash); hr__names_next(files, hash, &at, &number);) {
		const struct hr__source *other = hr__model_source(model, number);

		if (other->identity.device == id[0] && other->identity.inode == id[1])
			return hr__fail_at(
				&(struct hr__where){.stage = "open", .path = source->path, .offset = HR_NO_OFFSET},
				HR_E_DUPLICATE, "%s is the same file as %s; name it once", source->path, other->path);
	}
	hr__names_add(files, hash, new);
	return 0;
}

static int open_files(hr_model *model, const char *const *paths, size_t n_paths, const struct hr_model_opts *opts)
{
	struct shard_names shards = {.names = paths, .opts = opts};
	struct hr__names files;
	int code, same = 0;

	if (n_paths > HR__MAX_SHARDS)
		return hr__fail(HR_E_LIMIT, "%zu files were named; a model may have at most %d", n_paths,
				HR__MAX_SHARDS);
	code = hr__names_new(&files, n_paths);
	if (code)
		return code;
	code = hr__model_add(model, (uint32_t)n_paths, &(struct hr__shard_origin){.open = open_path, .ctx = &shards});
	for (uint32_t i = 0; i < hr__model_n_sources(model) && !same; i++) /* also of those before one that is bad */
		same = check_same_file(model, &files, i);
	hr__names_free(&files);
	code = same ? same : code;
	return code ? code : hr__model_finish(model, NULL, NULL);
}

/* ---- an index ---- */

/* All of an index, in memory of its own (*text is the caller's to unmap): big ones come in huge pages, which are
 * quick to get. */
static int read_text(const struct hr__folder *folder, const char *name, const char *path, uint8_t **text, size_t *bytes)
{
	struct hr__source source;
	void *memory;
	int code = hr__folder_source(folder, name, path, &source);

	*text = NULL;
	if (code)
		return code;
	if (source.bytes > HR__INDEX_MAX_BYTES)
		code = hr__fail_at(&(struct hr__where){.stage = "index", .path = path, .offset = HR_NO_OFFSET},
				   HR_E_LIMIT, "%s has %" PRIu64 " bytes; an index may have at most %" PRIu64, path,
				   source.bytes, HR__INDEX_MAX_BYTES);
	*bytes = (size_t)source.bytes;
	if (!code && hr__os_map(*bytes + 1, &memory)) /* also for an empty file */
		code = hr__fail_nomem(*bytes);
	if (!code) {
		*text = memory;
		code = hr__source_read(&source, 0, memory, *bytes);
	}
	if (!code)
		code = hr__source_prove(&source, *text, *bytes);
	if (!code)
		code = hr__source_check(&source);
	hr__source_close(&source);
	return code;
}

/* The single file beside which an index of this name would stand: "model.safetensors". */
static size_t stem_bytes(const char *index_name)
{
	return (size_t)(strstr(index_name, ".index.") - index_name);
}

static bool names_shard(const struct hr__index *index, const char *name)
{
	for (uint32_t s = 0; s < index->n_shards; s++)
		if (strcmp(index->shards[s], name) == 0)
			return true;
	return false;
}

static int complete_index(void *ctx)
{
	const struct shard_names *shards = ctx;
	int code = hr__index_make_table(shards->key, shards->index);

	return code ? hr__error_locate("index", shards->index_path, NULL, 0) : 0;
}

/* `single`: a file that lies beside the index and could be a model of its own; NULL if there is none. */
static int open_index(hr_model *model, const struct hr__folder *folder, const char *name, const char *single)
{
	char *path = hr__folder_path(folder, name);
	struct hr__index index = {0};
	struct shard_names shards = {
		.folder = folder, .index_path = path, .key = hr__model_key(model), .index = &index};
	uint8_t *text = NULL;
	size_t bytes = 0;
	int code = path ? read_text(folder, name, path, &text, &bytes) : HR_E_NOMEM;

	if (code)
		goto out;
	code = hr__index_parse(shards.key, text, bytes, &index);
	if (code) {
		hr__error_locate("index", path, NULL, 0);
		goto out;
	}
	if (single && !names_shard(&index, single))
		code = hr__fail_at(
			&(struct hr__where){.stage = "open", .path = folder->name, .offset = HR_NO_OFFSET},
			HR_E_AMBIGUOUS,
			"%s holds both %s and %s, which does not name it; open the one you mean by its own path, "
			"%s/%s or %s/%s",
			folder->name, single, name, folder->name, single, folder->name, name);
	shards.names = index.shards;
	if (!code)
		code = hr__model_add(model, index.n_shards,
				     &(struct hr__shard_origin){open_shard, complete_index, &shards});
	if (!code)
		code = hr__model_finish(model, &index, path);
out:
	hr__index_free(&index);
	hr__os_unmap(text, bytes + 1);
	hr__free(path);
	return code;
}

static int open_index_at(hr_model *model, const char *path, const struct hr_model_opts *opts)
{
	const char *slash = strrchr(path, '/');
	char *directory = slash ? hr__strndup(path, slash == path ? 1 : (size_t)(slash - path)) : hr__strdup(".");
	struct hr__folder folder;
	int error, code;

	if (!directory)
		return HR_E_NOMEM;
	error = hr__folder_open_directory(directory, opts->flags & HR_MODEL_NO_SYMLINKS, &folder);
	if (error)
		code = hr__fail_errno(&(struct hr__where){.stage = "open", .path = directory, .offset = HR_NO_OFFSET},
				      error, "open directory");
	else
		code = open_index(model, &folder, slash ? slash + 1 : path, NULL);
	hr__folder_close(&folder);
	hr__free(directory);
	return code;
}

/* ---- a directory ---- */

struct name_list {
	char **names;
	size_t n;
};

/* What of a directory could be a model. Hidden files are nobody's weights. */
struct listing {
	struct name_list indexes, files;
	const char *other_format; /* an ending that we cannot read but that others keep weights under */
	int code;
};

static int list_add(struct name_list *list, const char *name)
{
	char **bigger = list->names;

	if ((list->n & (list->n - 1)) == 0) /* full at each power of two */
		bigger = hr__realloc(list->names, list->n ? list->n * 2 : 1, sizeof(*bigger));
	if (!bigger)
		return HR_E_NOMEM;
	list->names = bigger;
	bigger[list->n] = hr__strdup(name);
	if (!bigger[list->n])
		return HR_E_NOMEM;
	list->n++;
	return 0;
}

static void list_free(struct name_list *list)
{
	for (size_t i = 0; i < list->n; i++)
		hr__free(list->names[i]);
	hr__free(list->names);
}

static int compare_names(const void *a, const void *b)
{
	return strcmp(*(char *const *)a, *(char *const *)b);
}

static int list_entry(void *ctx, const char *name)
{
	static const char *const others[] = {".bin", ".gguf", ".pt", ".pth", ".ckpt", ".h5", ".onnx", ".npz"};
	struct listing *listing = ctx;

	if (name[0] == '.')
		return 0;
	if (is_index_name(name) && strstr(name, ".safetensors.index."))
		listing->code = list_add(&listing->indexes, name);
	else if (ends_with(name, ".safetensors"))
		listing->code = list_add(&listing->files, name);
	for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++)
		if (ends_with(name, others[i]))
			listing->other_format = others[i];
	return listing->code;
}

/* "a, b, c and 7 more" */
static const char *enumerate(const struct name_list *list, char *out, size_t out_bytes)
{
	size_t used = 0, i;

	for (i = 0; i < list->n && i < 6; i++) {
		char name[100];

		hr__escape(name, sizeof(name), list->names[i], HR_STRLEN);
		used += (size_t)snprintf(out + used, out_bytes - used, "%s%s", i ? ", " : "", name);
	}
	if (i < list->n)
		snprintf(out + used, out_bytes - used, " and %zu more", list->n - i);
	return out;
}

static int fail_directory(const char *directory, const struct listing *listing)
{
	const struct hr__where at = {.stage = "open", .path = directory, .offset = HR_NO_OFFSET};
	char names[6 * 102 + 40];

	if (listing->indexes.n > 1)
		return hr__fail_at(&at, HR_E_AMBIGUOUS,
				   "%s holds %zu index files (%s); open the one you mean by its path", directory,
				   listing->indexes.n, enumerate(&listing->indexes, names, sizeof(names)));
	if (listing->files.n > 1)
		return hr__fail_at(
			&at, HR_E_AMBIGUOUS,
			"%s holds %zu safetensors files and no index (%s); name the files that form the model",
			directory, listing->files.n, enumerate(&listing->files, names, sizeof(names)));
	if (listing->other_format)
		return hr__fail_at(
			&at, HR_E_NOTFOUND,
			"%s holds no *.safetensors file, only *%s, which headrace does not read; convert it first",
			directory, listing->other_format);
	return hr__fail_at(&at, HR_E_NOTFOUND, "%s holds no *.safetensors file and no index", directory);
}

/* The file that would be the model if there were no index, or NULL: the index's namesake, or "model.safetensors". */
static const char *single_beside(const struct listing *listing)
{
	const char *index_name = listing->indexes.names[0];
	size_t length = stem_bytes(index_name);

	for (size_t i = 0; i < listing->files.n; i++) {
		const char *name = listing->files.names[i];

		if ((strlen(name) == length && memcmp(name, index_name, length) == 0) ||
		    strcmp(name, "model.safetensors") == 0)
			return name;
	}
	return NULL;
}

static int open_single(hr_model *model, const struct hr__folder *folder, const char *name)
{
	struct shard_names shards = {.names = &name, .folder = folder};
	int code = hr__model_add(model, 1, &(struct hr__shard_origin){.open = open_shard, .ctx = &shards});

	return code ? code : hr__model_finish(model, NULL, NULL);
}

static int open_folder(hr_model *model, const struct hr__folder *folder)
{
	struct listing listing = {.code = 0};
	int code = hr__folder_list(folder, list_entry, &listing);

	if (!code)
		code = listing.code;
	if (code)
		goto out;
	if (listing.indexes.n == 1) {
		code = open_index(model, folder, listing.indexes.names[0], single_beside(&listing));
	} else if (listing.indexes.n == 0 && listing.files.n == 1) {
		code = open_single(model, folder, listing.files.names[0]);
	} else {
		/* Sorted, so that the message is the same wherever the directory lies. */
		if (listing.indexes.n > 1)
			qsort(listing.indexes.names, listing.indexes.n, sizeof(char *), compare_names);
		if (listing.files.n > 1)
			qsort(listing.files.names, listing.files.n, sizeof(char *), compare_names);
		code = fail_directory(folder->name, &listing);
	}
out:
	list_free(&listing.indexes);
	list_free(&listing.files);
	return code;
}

/* ---- a store ---- */

static int open_stored(hr_model *model, const char *name, const struct hr_model_opts *opts)
{
	struct hr__stored stored;
	int code = hr__store_resolve(name, opts, &stored);

	if (code)
		return code;
	if (!stored.member[0])
		code = open_folder(model, &stored.folder);
	else if (is_index_name(stored.member))
		code = open_index(model, &stored.folder, stored.member, NULL);
	else
		code = open_single(model, &stored.folder, stored.member);
	hr__stored_close(&stored);
	return code;
}

/* ---- the public two ---- */

static int start(const struct hr_model_opts *given, struct hr_model_opts *opts, hr_model **out)
{
	int code = hr__opts_copy(opts, sizeof(*opts), given, "hr_model_opts");

	if (code)
		return code;
	if (opts->flags & ~(HR_MODEL_NO_SYMLINKS | HR_MODEL_MOVED))
		return hr__fail(HR_E_OPTS,
				"hr_model_opts.flags is 0x%x, which has bits that this version does not know",
				(unsigned)opts->flags);
	return hr__model_new(out);
}

static int finish(int code, hr_model *model, hr_model **out)
{
	if (code)
		hr_model_close(model);
	else
		*out = model;
	return code;
}

static int open_name(hr_model *model, const char *name, const struct hr_model_opts *opts)
{
	const char *slash = strrchr(name, '/');
	struct hr__folder folder;
	int error, code;

	if (hr__store_name_is(name))
		return open_stored(model, name, opts);
	code = refuse_store_opts(name, opts);
	if (code)
		return code;
	/* A FIFO does not hang this: it is no directory. What is wrong with a link shows when it is opened as a
	 * file. */
	error = hr__folder_open_directory(name, opts->flags & HR_MODEL_NO_SYMLINKS, &folder);
	if (error == 0) {
		code = open_folder(model, &folder);
		hr__folder_close(&folder);
		return code;
	}
	if (error != ENOTDIR && error != ENOENT && error != ELOOP)
		return hr__fail_errno(&(struct hr__where){.stage = "open", .path = name, .offset = HR_NO_OFFSET}, error,
				      "open");
	if (is_index_name(slash ? slash + 1 : name))
		return open_index_at(model, name, opts);
	return open_files(model, &name, 1, opts);
}

int hr_model_open(const char *name, const struct hr_model_opts *opts, hr_model **out)
{
	struct hr_model_opts own;
	hr_model *model;
	int code;

	if (!out)
		return hr__fail(HR_E_OPTS, "hr_model_open() has no place for the model (out is NULL)");
	*out = NULL;
	if (!name || !name[0])
		return hr__fail(HR_E_OPTS, "the name of the model is empty");
	code = start(opts, &own, &model);
	return code ? code : finish(open_name(model, name, &own), model, out);
}

int hr_model_open_files(const char *const *paths, size_t n_paths, const struct hr_model_opts *opts, hr_model **out)
{
	struct hr_model_opts own;
	hr_model *model;
	int code;

	if (!out)
		return hr__fail(HR_E_OPTS, "hr_model_open_files() has no place for the model (out is NULL)");
	*out = NULL;
	if (!paths || n_paths == 0)
		return hr__fail(HR_E_OPTS, "a model needs at least one file");
	code = start(opts, &own, &model);
	return code ? code : finish(open_files(model, paths, n_paths, &own), model, out);
}
