/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Getting files out of a store again, byte for byte. Nothing is believed on the way: each digest block's CRC-32C, the
 * SHA-256 of the whole, and at the end of each file whether the generation still holds. A file that does not pass is
 * taken away again.
 */
#include "copy_out.h"

#include "core/arith.h"
#include "core/error.h"
#include "core/hash.h"
#include "core/mem.h"
#include "snapshot.h"
#include "store.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>

#define PIECE_BYTES (UINT64_C(4) << 20)

struct get {
	struct hr__copy copy;
	const uint32_t *digests;
	hr__sha256 *sha;
	uint8_t *memory;
	size_t room;
};

static int check_blocks(const struct get *get, uint64_t off, uint64_t bytes)
{
	const struct hr__object *object = get->copy.object;
	uint64_t block = UINT64_C(1) << object->block_log2;

	for (uint64_t at = 0; at < bytes; at += block) {
		uint64_t number = (off + at) >> object->block_log2;
		uint32_t found = hr__crc32c(0, get->memory + at, (size_t)hr__min_u64(block, bytes - at));

		if (found == get->digests[number])
			continue;
		return hr__fail_at(&(struct hr__where){.stage = "verify",
						       .path = get->copy.region->path,
						       .offset = object->ext_off + object->payload_off + off + at},
				   HR_E_DIGEST,
				   "%s: digest block %" PRIu64 " of the object at %" PRIu64 " has CRC-32C %08" PRIx32
				   " instead of %08" PRIx32 "; import its model again",
				   get->copy.region->path, number, object->ext_off, found, get->digests[number]);
	}
	return 0;
}

static int write_piece(const struct get *get, uint64_t off, uint64_t bytes)
{
	size_t done;
	int error;

	if (get->copy.fd < 0)
		return 0;
	error = hr__os_pwrite_full(get->copy.fd, get->memory, (size_t)bytes, off, &done);
	return error ? hr__fail_errno(&(struct hr__where){.stage = "get", .path = get->copy.path, .offset = off}, error,
				      "write")
		     : 0;
}

static int copy_piece(const struct get *get, uint64_t off)
{
	const struct hr__object *object = get->copy.object;
	uint64_t bytes = hr__min_u64(PIECE_BYTES, object->payload_len - off);
	int code = hr__region_read(get->copy.region, object->ext_off + object->payload_off + off, get->memory,
				   (size_t)hr__round_up(bytes, HR__RECORD_BYTES), "an object");

	if (!code && get->digests)
		code = check_blocks(get, off, bytes);
	if (!code)
		code = hr__sha256_update(get->sha, get->memory, (size_t)bytes);
	if (!code)
		code = write_piece(get, off, bytes);
	if (!code && get->copy.progress && get->copy.progress(get->copy.ctx, bytes))
		code = hr__fail(HR_E_CANCELLED, "cancelled by the caller");
	return code;
}

static int check_whole(const struct get *get)
{
	const struct hr__object *object = get->copy.object;
	uint8_t sha256[32];
	int code = hr__sha256_final(get->sha, sha256);

	if (code || memcmp(sha256, object->payload_sha256, 32) == 0)
		return code;
	return hr__fail_at(&(struct hr__where){.stage = "verify",
					       .path = get->copy.region->path,
					       .offset = object->ext_off + object->payload_off},
			   HR_E_DIGEST,
			   "%s: the object at %" PRIu64 " does not have its SHA-256; import its model again",
			   get->copy.region->path, object->ext_off);
}

int hr__object_copy(const struct hr__copy *copy)
{
	struct get get = {.copy = *copy};
	uint32_t *digests = NULL;
	void *memory = NULL;
	uint64_t n;
	int code = 0;

	get.room = (size_t)hr__round_up(hr__min_u64(PIECE_BYTES, copy->object->payload_len + 1), HR__RECORD_BYTES);
	if (copy->store_uuid)
		code = hr__digests_read(copy->region, copy->store_uuid, copy->object, &digests, &n);
	if (!code)
		code = hr__region_memory(get.room, &memory);
	if (!code)
		code = hr__sha256_new(&get.sha);
	get.digests = digests;
	get.memory = memory; /* a small object gets no more than it has bytes */
	for (uint64_t off = 0; off < copy->object->payload_len && !code; off += PIECE_BYTES)
		code = copy_piece(&get, off);
	if (!code)
		code = check_whole(&get);
	hr__sha256_free(get.sha);
	hr__region_memory_free(memory, get.room);
	hr__free(digests);
	return code;
}

/* ---- a model ---- */

struct out {
	hr_store *store;
	const char *directory;
	struct hr_store_get_opts opts;
	struct hr_store_progress progress;
};

static int tell(void *ctx, uint64_t bytes)
{
	struct out *out = ctx;

	out->progress.done_bytes += bytes;
	return out->opts.progress ? out->opts.progress(out->opts.progress_ctx, &out->progress) : 0;
}

static int make_directory(const char *path)
{
	int error = hr__os_mkdir(AT_FDCWD, path);

	return error && error != EEXIST
		       ? hr__fail_errno(&(struct hr__where){.stage = "get", .path = path, .offset = HR_NO_OFFSET},
					error, "make directory")
		       : 0;
}

/* The directories that a file's name goes through; `path` is put back as it was. */
static int make_parents(char *path, size_t from)
{
	int code = 0;

	for (char *slash = strchr(path + from, '/'); slash && !code; slash = strchr(slash + 1, '/')) {
		*slash = '\0';
		code = make_directory(path);
		*slash = '/';
	}
	return code;
}

/* Names were checked when the manifest was parsed: they cannot lead out of the directory. What stands there already
 * could: O_EXCL makes the file, and O_NOFOLLOW is implied by it. */
static int create(const char *path, int *fd)
{
	const struct hr__where at = {.stage = "get", .path = path, .offset = HR_NO_OFFSET};
	int error = hr__os_create(AT_FDCWD, path, O_WRONLY | O_EXCL, fd);

	if (error == EEXIST)
		return hr__fail_at(&at, HR_E_EXISTS, "%s exists; name another directory", path);
	return error ? hr__fail_errno(&at, error, "make") : 0;
}

int hr__object_copy_to(struct hr__copy *copy)
{
	struct hr__error_record why;
	int error, code = create(copy->path, &copy->fd);

	if (code)
		return code;
	code = hr__object_copy(copy);
	error = code ? 0 : hr__os_datasync(copy->fd);
	if (error)
		code = hr__fail_errno(&(struct hr__where){.stage = "get", .path = copy->path, .offset = HR_NO_OFFSET},
				      error, "flush");
	hr__os_close(copy->fd);
	if (!code)
		return 0;
	hr__error_save(&why);
	hr__os_unlink(AT_FDCWD, copy->path);
	return hr__error_restore(&why);
}

static int get_file(struct out *out, const struct hr__snapshot *now, uint32_t number)
{
	struct hr__member member;
	struct hr__object object;
	char *path;
	int code;

	hr__manifest_member(&now->manifest, number, &member);
	hr__manifest_object(&now->manifest, member.object, &object);
	path = hr__format("%s/%.*s", out->directory, (int)member.name_len, member.name);
	if (!path)
		return HR_E_NOMEM;
	out->progress.file = path + strlen(out->directory) + 1;
	code = make_parents(path, strlen(out->directory) + 1);
	if (!code)
		code = hr__object_copy_to(&(struct hr__copy){.region = now->region,
							     .store_uuid = now->label.uuid,
							     .object = &object,
							     .path = path,
							     .progress = tell,
							     .ctx = out});
	out->progress.done_files++;
	out->progress.file = "";
	hr__free(path);
	return code;
}

static int get_model(struct out *out, const char *name)
{
	struct hr__snapshot *now = out->store->now;
	const struct hr__where at = {.stage = "get", .path = now->region->path, .offset = HR_NO_OFFSET};
	struct hr__model_record model;
	uint32_t number;
	int code;

	if (!hr__manifest_find_model(&now->manifest, name, strlen(name), &number))
		return hr__fail_at(&at, HR_E_NOTFOUND,
				   "%s has no model of the name %s; \"headrace store ls\" lists them", at.path, name);
	hr__manifest_model(&now->manifest, number, &model);
	for (uint32_t i = 0; i < model.n_members; i++) {
		struct hr__member member;
		struct hr__object object;

		hr__manifest_member(&now->manifest, model.first_member + i, &member);
		hr__manifest_object(&now->manifest, member.object, &object);
		out->progress.total_bytes += object.payload_len;
	}
	out->progress.total_files = model.n_members;
	code = make_directory(out->directory);
	for (uint32_t i = 0; i < model.n_members && !code; i++)
		code = get_file(out, now, model.first_member + i);
	return code ? code : hr__snapshot_check(now);
}

int hr_store_get(hr_store *store, const char *model, const char *directory, const struct hr_store_get_opts *given)
{
	struct out out = {.store = store,
			  .directory = directory,
			  .progress = {.size = sizeof(out.progress), .step = "reading", .file = ""}};
	int code = hr__opts_copy(&out.opts, sizeof(out.opts), given, "hr_store_get_opts");

	if (!code)
		code = hr__store_check_usable(store);
	if (!code && (!model || !directory || !directory[0]))
		code = hr__fail(HR_E_OPTS, "hr_store_get() needs the name of a model and a directory");
	if (code)
		return code;
	pthread_mutex_lock(&store->writing); /* so that no commit of this handle takes the manifest away */
	code = get_model(&out, model);
	pthread_mutex_unlock(&store->writing);
	return code;
}
