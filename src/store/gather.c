/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A directory is walked with a list of what is still to be looked into, so its depth costs no stack; names grow with
 * depth and have a limit. Directories whose name begins with a dot (.git, .cache) are no part of a model and left out;
 * files that do so (.gitattributes) are.
 */
#include "gather.h"

#include "core/arith.h"
#include "core/error.h"
#include "core/hash.h"
#include "core/mem.h"
#include "format/header.h"
#include "format/json.h"

#include <fcntl.h>
#include <string.h>

#define MAX_INDEX_BYTES (UINT64_C(256) << 20)

static bool ends_with(const char *text, const char *end)
{
	size_t length = strlen(text), end_length = strlen(end);

	return length >= end_length && memcmp(text + length - end_length, end, end_length) == 0;
}

/* ---- one file ---- */

static int parse_shard(const struct hr__source *source, uint8_t *json, uint64_t json_bytes,
		       struct hr__import_file *file)
{
	const struct hr__hash_key key = {1, 2}; /* names are not looked up, so nobody gains from knowing it */
	struct hr__header header;
	int code = hr__source_read(source, 0, json, 8 + (size_t)json_bytes);

	if (code)
		return code;
	hr__sha256_of(json, 8 + (size_t)json_bytes, file->header_sha256);
	code = hr__header_parse(&key, json + 8, (size_t)json_bytes, source->bytes - 8 - json_bytes, &header);
	if (code)
		return hr__error_locate("header", source->path, NULL, 0);
	file->header_len = json_bytes;
	file->n_tensors = (uint32_t)hr__min_u64(header.n_entries, UINT32_MAX);
	hr__header_free(&header);
	return 0;
}

static int look_at_shard(const struct hr__source *source, struct hr__import_file *file)
{
	size_t got = (size_t)hr__min_u64(source->bytes, 64);
	uint8_t first[64], *json;
	uint64_t json_bytes;
	int code = hr__source_read(source, 0, first, got);

	if (code)
		return code;
	code = hr__header_frame(first, got, source->bytes, &json_bytes);
	if (code)
		return hr__error_locate("header", source->path, NULL, 0);
	json = hr__malloc(8 + (size_t)json_bytes);
	code = json ? parse_shard(source, json, json_bytes, file) : HR_E_NOMEM;
	hr__free(json);
	return code;
}

static int look_at(struct hr__import_file *file)
{
	struct hr__source source;
	int code = hr__source_open_file(AT_FDCWD, file->path, file->path, 0, &source);

	if (code)
		return code;
	file->identity = source.identity;
	file->bytes = source.bytes;
	file->kind = ends_with(file->name, ".safetensors") ? HR__OBJECT_SHARD : HR__OBJECT_BLOB;
	if (file->bytes >= HR__MAX_PAYLOAD)
		code = hr__fail(HR_E_LIMIT, "%s has %" PRIu64 " bytes; an object may have up to 2^48", file->path,
				file->bytes);
	else if (file->kind == HR__OBJECT_SHARD)
		code = look_at_shard(&source, file);
	if (!code)
		code = hr__source_check(&source);
	hr__source_close(&source);
	return code;
}

int hr__import_file_open(const struct hr__import_file *file, struct hr__source *out)
{
	int code = hr__source_open_file(AT_FDCWD, file->path, file->path, 0, out);

	if (code)
		return code;
	out->identity = file->identity;
	code = hr__source_check(out);
	if (code)
		hr__source_close(out);
	return code;
}

static int fail_name(const char *path, const char *name)
{
	char escaped[300];

	hr__escape(escaped, sizeof(escaped), name, HR_STRLEN);
	return hr__fail_at(
		&(struct hr__where){.stage = "import", .path = path, .offset = HR_NO_OFFSET}, HR_E_PATH,
		"\"%s\" in %s cannot be a file of a model: names are UTF-8 without control bytes, of at most %u bytes",
		escaped, path, HR__MAX_NAME);
}

/* Takes over `path` and `name`, also when it fails. */
static int add_file(struct hr__gathered *gathered, char *path, char *name)
{
	struct hr__import_file *files = gathered->files;
	int code = path && name ? 0 : HR_E_NOMEM;

	if (!code && !hr__store_name_is_good(name, strlen(name), true))
		code = fail_name(path, name);
	if (!code && gathered->n == HR__MAX_OBJECTS)
		code = hr__fail(HR_E_LIMIT, "a model may have at most %u files", HR__MAX_OBJECTS);
	if (!code && gathered->n == gathered->room) {
		uint32_t room = gathered->room ? gathered->room * 2 : 16;

		files = hr__realloc(gathered->files, room, sizeof(*files));
		code = files ? 0 : HR_E_NOMEM;
		if (files) {
			gathered->files = files;
			gathered->room = room;
		}
	}
	if (code) {
		hr__free(path);
		hr__free(name);
		return code;
	}
	files[gathered->n] = (struct hr__import_file){.path = path, .name = name};
	gathered->n++;
	code = look_at(&files[gathered->n - 1]);
	gathered->bytes += files[gathered->n - 1].bytes;
	return code;
}

/* ---- a directory ---- */

struct walk {
	struct hr__gathered *gathered;
	const char *top; /* the directory that was named */
	char **below;    /* directories below it, relative; "" is itself */
	uint32_t n, room;
	/* The directory whose names are being listed. */
	char **names;
	uint32_t n_names, room_names;
	int code;
};

static int push(char ***list, uint32_t *n, uint32_t *room, char *text)
{
	char **bigger = *list;

	if (text && *n == *room) {
		bigger = hr__realloc(*list, *room ? (size_t)*room * 2 : 16, sizeof(*bigger));
		if (bigger) {
			*list = bigger;
			*room = *room ? *room * 2 : 16;
		}
	}
	if (!text || !bigger) {
		hr__free(text);
		return HR_E_NOMEM;
	}
	bigger[*n] = text;
	(*n)++;
	return 0;
}

static int keep_name(void *ctx, const char *name)
{
	struct walk *walk = ctx;

	walk->code = push(&walk->names, &walk->n_names, &walk->room_names, hr__strdup(name));
	return walk->code;
}

static int visit(struct walk *walk, int fd, const char *below, const char *name)
{
	char *relative = hr__format("%s%s%s", below, below[0] ? "/" : "", name);
	char *path = hr__format("%s/%s", walk->top, relative ? relative : "");
	int below_fd, error;

	if (!relative || !path) {
		hr__free(relative);
		hr__free(path);
		return HR_E_NOMEM;
	}
	error = hr__os_open(fd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW, &below_fd);
	hr__os_close(below_fd);
	if (error) /* no directory, or a link: what is wrong with it shows when it is opened as a file */
		return add_file(walk->gathered, path, relative);
	hr__free(path);
	if (name[0] == '.') {
		hr__free(relative);
		walk->gathered->n_skipped++;
		return 0;
	}
	if (strlen(relative) >= HR__MAX_NAME) {
		int code = fail_name(walk->top, relative);

		hr__free(relative);
		return code;
	}
	return push(&walk->below, &walk->n, &walk->room, relative);
}

static int list_one(struct walk *walk, const char *below)
{
	const char *slash = below[0] ? "/" : "";
	char *path = hr__format("%s%s%s", walk->top, slash, below);
	struct hr__where at = {.stage = "import", .path = path, .offset = HR_NO_OFFSET};
	int fd = -1, error, code = path ? 0 : HR_E_NOMEM;

	if (code)
		return code;
	error = hr__os_open(AT_FDCWD, path, O_RDONLY | O_DIRECTORY, &fd);
	walk->code = 0;
	if (!error)
		error = hr__os_list(fd, keep_name, walk);
	if (error)
		code = hr__fail_errno(&at, error, "list");
	if (!code)
		code = walk->code;
	for (uint32_t i = 0; i < walk->n_names; i++) {
		if (!code)
			code = visit(walk, fd, below, walk->names[i]);
		hr__free(walk->names[i]);
	}
	walk->n_names = 0;
	hr__os_close(fd);
	hr__free(path);
	return code;
}

static int gather_directory(const char *path, struct hr__gathered *out)
{
	struct walk walk = {.gathered = out, .top = path};
	int code = push(&walk.below, &walk.n, &walk.room, hr__strdup(""));

	while (walk.n > 0) {
		char *below = walk.below[walk.n - 1];

		walk.n--;
		if (!code)
			code = list_one(&walk, below);
		hr__free(below);
	}
	hr__free(walk.below);
	hr__free(walk.names);
	if (!code && out->n == 0)
		code = hr__fail_at(&(struct hr__where){.stage = "import", .path = path, .offset = HR_NO_OFFSET},
				   HR_E_NOTFOUND, "%s holds no file", path);
	return code;
}

/* ---- an index ---- */

static char *beside(const char *path, const char *name)
{
	const char *slash = strrchr(path, '/');

	return hr__format("%.*s%s", slash ? (int)(slash + 1 - path) : 0, path, name);
}

static int add_shard_once(struct hr__gathered *out, const char *index, const struct hr__json_string *value)
{
	char *name = hr__malloc(value->bytes + 1);

	if (!name)
		return HR_E_NOMEM;
	hr__json_decode(value, name);
	name[value->bytes] = '\0';
	/* Tensors of one shard mostly follow one another in an index. */
	for (uint32_t i = out->n; i > 0; i--)
		if (strcmp(out->files[i - 1].name, name) == 0) {
			hr__free(name);
			return 0;
		}
	if (strlen(name) != value->bytes || strchr(name, '/') || !ends_with(name, ".safetensors")) {
		int code = fail_name(index, name);

		hr__free(name);
		return code;
	}
	return add_file(out, beside(index, name), name);
}

static int read_weight_map(struct hr__gathered *out, const char *index, struct hr__json *json)
{
	struct hr__json_string tensor, shard;
	bool more = true;
	int code = hr__json_open(json, HR__JSON_OBJECT, "weight_map");

	while (!code && more) {
		code = hr__json_member(json, &tensor, &more);
		if (!code && more)
			code = hr__json_string(json, "a shard's name", &shard);
		if (!code && more)
			code = add_shard_once(out, index, &shard);
	}
	return code;
}

static int read_index(struct hr__gathered *out, const char *path, const uint8_t *text, size_t bytes)
{
	struct hr__json json;
	struct hr__json_string key;
	bool more = true, has_map = false;
	int code;

	hr__json_start(&json, text, bytes, 0, "index");
	code = hr__json_open(&json, HR__JSON_OBJECT, "the index");
	while (!code && more) {
		code = hr__json_member(&json, &key, &more);
		if (code || !more)
			break;
		if (hr__json_is(&key, "weight_map") && !has_map) {
			has_map = true;
			code = read_weight_map(out, path, &json);
		} else {
			code = hr__json_skip(&json);
		}
	}
	if (!code)
		code = hr__json_end(&json);
	if (!code && !has_map)
		code = hr__fail(HR_E_FIELD, "%s has no \"weight_map\"", path);
	return code ? hr__error_locate("index", path, NULL, 0) : 0;
}

static int gather_index(const char *path, struct hr__gathered *out)
{
	uint64_t bytes = out->files[0].bytes;
	struct hr__source source;
	uint8_t *text;
	int code;

	if (bytes > MAX_INDEX_BYTES)
		return hr__fail(HR_E_LIMIT, "%s has %" PRIu64 " bytes; an index may have %" PRIu64, path, bytes,
				MAX_INDEX_BYTES);
	text = hr__malloc((size_t)bytes);
	if (!text)
		return HR_E_NOMEM;
	code = hr__import_file_open(&out->files[0], &source);
	if (!code) {
		code = hr__source_read(&source, 0, text, (size_t)bytes);
		hr__source_close(&source);
	}
	if (!code)
		code = read_index(out, path, text, (size_t)bytes);
	hr__free(text);
	return code;
}

int hr__gather(const char *path, struct hr__gathered *out)
{
	const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
	int fd, code;

	memset(out, 0, sizeof(*out));
	if (hr__os_open(AT_FDCWD, path, O_RDONLY | O_DIRECTORY, &fd) == 0) {
		hr__os_close(fd);
		code = gather_directory(path, out);
	} else {
		code = add_file(out, hr__strdup(path), hr__strdup(name));
		if (!code && ends_with(name, ".json") && strstr(name, ".index."))
			code = gather_index(path, out);
	}
	if (code)
		hr__gathered_free(out);
	return code;
}

void hr__gathered_free(struct hr__gathered *gathered)
{
	for (uint32_t i = 0; i < gathered->n; i++) {
		hr__free(gathered->files[i].path);
		hr__free(gathered->files[i].name);
	}
	hr__free(gathered->files);
	memset(gathered, 0, sizeof(*gathered));
}
