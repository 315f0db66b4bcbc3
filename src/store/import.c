/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Importing a model. All files are looked at and all space is taken before the first byte is written. Then each file
 * becomes an object, unless the store has its bytes already; now and then what is written so far is committed as
 * objects that no model has yet, so that an import that dies goes on where it was; and the last commit gives the model
 * its name: all of it or nothing.
 *
 * Whether the store has the bytes is not known before they are hashed. So only where an object of that size (and, of a
 * shard, that header) is there, the file is hashed first and written if it is another one after all.
 */
#include "gather.h"
#include "store.h"
#include "stream.h"

#include "core/arith.h"
#include "core/error.h"
#include "core/hash.h"
#include "core/mem.h"

#include <stdio.h>
#include <string.h>

#define DEFAULT_COMMIT_BYTES (UINT64_C(4) << 30)
/* often enough to read back meanwhile, seldom enough to cost nothing */
#define FLUSH_BYTES      (UINT64_C(128) << 20)
#define DEFAULT_HELPERS  3
#define MAX_TABLE_BLOCKS (UINT64_C(1) << 20) /* digests of an object: 4 MiB, as long as blocks can grow */
#define NOT_YET          UINT32_MAX

struct import {
	hr_store *store;
	const char *model;
	struct hr_store_import_opts opts;
	struct hr__gathered files;
	struct hr__draft draft;
	uint32_t *objects;    /* of each file: in the draft, or NOT_YET */
	uint64_t *extents;    /* of each file: where, if it has space; else 0 */
	uint64_t *checked;    /* of each object that no commit has yet: bytes that were read back */
	uint32_t first_fresh; /* the first of those, in the draft */
	uint64_t fresh_bytes;
	struct hr_store_progress progress;
	struct hr_store_import_info info;
};

static struct hr__where here(const struct import *import)
{
	return (struct hr__where){.stage = "import", .path = import->store->now->region->path, .offset = HR_NO_OFFSET};
}

/* ---- progress ---- */

static int tell(void *ctx, uint64_t bytes)
{
	struct import *import = ctx;

	import->progress.done_bytes += bytes;
	return import->opts.progress ? import->opts.progress(import->opts.progress_ctx, &import->progress) : 0;
}

/* ---- sizes ---- */

static uint32_t block_log2_for(uint64_t bytes)
{
	uint32_t log2 = 16;

	while (log2 < 20 && bytes >> log2 > MAX_TABLE_BLOCKS)
		log2++;
	return log2;
}

/* What an object of this file would be; its place is not known yet. */
static struct hr__object object_for(const struct hr__import_file *file)
{
	struct hr__object object = {.payload_len = file->bytes,
				    .header_len = file->header_len,
				    .kind = file->kind,
				    .n_tensors = file->n_tensors,
				    .block_log2 = block_log2_for(file->bytes)};

	memcpy(object.header_sha256, file->header_sha256, 32);
	object.meta_off = hr__round_up(file->bytes, HR__EXTENT_ALIGN);
	object.meta_len = hr__object_meta_bytes(file->bytes, object.block_log2);
	object.ext_len = hr__round_up(object.meta_off + object.meta_len, HR__EXTENT_ALIGN);
	return object;
}

/* ---- what is there already ---- */

static bool may_be(const struct hr__import_file *file, const struct hr__object *object)
{
	if (object->payload_len != file->bytes || object->kind != file->kind)
		return false;
	return file->kind != HR__OBJECT_SHARD || memcmp(object->header_sha256, file->header_sha256, 32) == 0;
}

static bool has_candidate(const struct import *import, const struct hr__import_file *file)
{
	for (uint32_t i = 0; i < import->draft.n_objects; i++)
		if (may_be(file, &import->draft.objects[i]))
			return true;
	return false;
}

static bool find_same(const struct import *import, const struct hr__import_file *file, const uint8_t sha256[32],
		      uint32_t *number)
{
	for (uint32_t i = 0; i < import->draft.n_objects; i++) {
		const struct hr__object *object = &import->draft.objects[i];

		*number = i;
		if (may_be(file, object) && memcmp(object->payload_sha256, sha256, 32) == 0)
			return true;
	}
	return false;
}

/* ---- space ---- */

static int take_extents(struct import *import)
{
	int code = 0;

	for (uint32_t i = 0; i < import->files.n && !code; i++) {
		if (import->extents[i] || has_candidate(import, &import->files.files[i]))
			continue;
		code = hr__store_take(import->store, object_for(&import->files.files[i]).ext_len, &import->extents[i]);
	}
	return code ? code : hr__store_has_spare(import->store, import->files.n, HR__SPARE_BODIES);
}

static void give_back_extents(struct import *import)
{
	memset(import->extents, 0, import->files.n * sizeof(*import->extents));
	import->store->n_pending = 0;
}

/* All at once, so that what does not fit fails before anything is written. If it does not fit, what readers no
 * longer hold is given up first, which takes a commit. */
static int take_space(struct import *import)
{
	int code = take_extents(import);
	uint64_t floor;

	if ((code != HR_E_NOSPACE && code != HR_E_FRAGMENTED) || import->draft.n_retired == 0)
		return code;
	give_back_extents(import);
	code = hr__store_survey(import->store);
	if (!code)
		code = hr__store_floor(import->store, hr__store_next_generation(import->store), &floor);
	if (!code)
		code = hr__store_commit(
			import->store,
			&(struct hr__commit){.draft = &import->draft, .floor_gen = floor, .first_fresh = UINT32_MAX});
	return code ? code : take_extents(import);
}

/* ---- one file ---- */

/* Behind the payload: padding, footer, digests, padding. */
static int write_meta(struct import *import, struct hr__object *object, const uint32_t *digests)
{
	struct hr__region *region = import->store->now->region;
	uint64_t begin = hr__round_up(object->payload_len, HR__RECORD_BYTES);
	size_t room = (size_t)(object->ext_len - begin);
	uint8_t *meta;
	void *memory;
	int code = hr__region_memory(room, &memory);

	if (code)
		return code;
	meta = (uint8_t *)memory + (object->meta_off - begin);
	hr__footer_encode(object, import->store->now->label.uuid, meta);
	for (uint64_t i = 0; i < hr__object_n_blocks(object); i++) {
		uint32_t digest = hr__le32(digests[i]);

		memcpy(meta + HR__RECORD_BYTES + 4 * i, &digest, 4);
	}
	hr__sha256_of(meta, (size_t)object->meta_len, object->meta_sha256);
	code = hr__region_write(region, object->ext_off + begin, memory, room, "an object's footer");
	hr__region_memory_free(memory, room);
	return code;
}

static int fail_changed(const struct hr__import_file *file)
{
	return hr__fail_at(&(struct hr__where){.stage = "import", .path = file->path, .offset = HR_NO_OFFSET},
			   HR_E_CHANGED, "%s was changed while it was read; import it again", file->path);
}

/* Hashes a file, and writes it where `object` says if it says so. */
static int run_stream(struct import *import, uint32_t number, const struct hr__object *object,
		      struct hr__stream *stream)
{
	const struct hr__import_file *file = &import->files.files[number];
	struct hr__source source;
	int code = hr__import_file_open(file, &source);

	if (code)
		return code;
	stream->source = &source;
	stream->head_bytes = file->kind == HR__OBJECT_SHARD ? 8 + file->header_len : 0;
	stream->block_log2 = object->block_log2;
	stream->n_helpers = import->opts.threads ? import->opts.threads - 1 : DEFAULT_HELPERS;
	stream->progress = tell;
	stream->ctx = import;
	stream->digests = hr__malloc((size_t)hr__object_n_blocks(object) * sizeof(*stream->digests));
	code = stream->digests ? hr__stream_run(stream) : HR_E_NOMEM;
	if (!code)
		code = hr__source_check(&source);
	if (!code && file->kind == HR__OBJECT_SHARD && memcmp(stream->head_sha256, file->header_sha256, 32) != 0)
		code = fail_changed(file);
	hr__source_close(&source);
	stream->source = NULL;
	return code;
}

static int write_object(struct import *import, uint32_t number)
{
	struct hr__object object = object_for(&import->files.files[number]);
	struct hr__stream stream = {.region = import->store->now->region};
	int code = 0;

	if (!import->extents[number])
		code = hr__store_take(import->store, object.ext_len, &import->extents[number]);
	if (!code)
		code = hr__uuid_new(object.uuid);
	object.ext_off = import->extents[number];
	object.created_gen = hr__store_next_generation(import->store);
	stream.to = object.ext_off;
	stream.flush_bytes = import->opts.flags & HR_IMPORT_NO_READ_BACK ? 0 : FLUSH_BYTES;
	if (!code)
		code = run_stream(import, number, &object, &stream);
	if (stream.is_flush_lost)
		import->store->poisoned_by = object.created_gen;
	memcpy(object.payload_sha256, stream.sha256, 32);
	if (!code)
		code = write_meta(import, &object, stream.digests);
	hr__free(stream.digests);
	import->checked[import->draft.n_objects - import->first_fresh] = stream.read_back;
	if (!code)
		code = hr__draft_add_object(&import->draft, &object, &import->objects[number]);
	import->fresh_bytes += object.ext_len;
	import->info.written_bytes += object.payload_len;
	return code;
}

/* Hashes a file that may be there already. */
static int share_object(struct import *import, uint32_t number)
{
	const struct hr__import_file *file = &import->files.files[number];
	struct hr__object object = object_for(file);
	struct hr__stream stream = {.region = NULL};
	int code = run_stream(import, number, &object, &stream);

	hr__free(stream.digests);
	if (code)
		return code;
	if (find_same(import, file, stream.sha256, &import->objects[number])) {
		import->info.shared_bytes += file->bytes;
	} else {
		import->objects[number] = NOT_YET;
		import->progress.done_bytes -= file->bytes; /* it is read once more */
	}
	return 0;
}

/* ---- commits ---- */

static int commit(struct import *import)
{
	uint32_t read_back = import->opts.flags & HR_IMPORT_NO_READ_BACK ? UINT32_MAX : import->first_fresh;
	struct hr_store_progress before = import->progress;
	uint64_t floor;
	int code = hr__store_floor_if_tight(import->store, &floor);

	import->progress.step = "checking";
	import->progress.done_bytes = 0;
	import->progress.total_bytes = 0;
	for (uint32_t i = import->first_fresh; i < import->draft.n_objects; i++)
		import->progress.total_bytes += import->draft.objects[i].payload_len -
						import->checked[i - import->first_fresh];
	if (!code)
		code = hr__store_commit(import->store, &(struct hr__commit){.draft = &import->draft,
									    .floor_gen = floor,
									    .first_fresh = read_back,
									    .checked = import->checked,
									    .progress = tell,
									    .ctx = import});
	import->progress = before;
	if (code)
		return code;
	import->first_fresh = import->draft.n_objects;
	import->fresh_bytes = 0;
	return 0;
}

static int import_file(struct import *import, uint32_t number)
{
	uint64_t commit_bytes = import->opts.commit_bytes ? import->opts.commit_bytes : DEFAULT_COMMIT_BYTES;
	const struct hr__import_file *file = &import->files.files[number];
	int code = 0;

	import->progress.file = file->name;
	import->progress.step = "writing";
	if (has_candidate(import, file))
		code = share_object(import, number);
	if (!code && import->objects[number] == NOT_YET)
		code = write_object(import, number);
	import->progress.done_files++;
	if (!code && import->fresh_bytes >= commit_bytes && number + 1 < import->files.n)
		code = commit(import);
	return code;
}

/* ---- the model ---- */

static int make_model(struct import *import, const char *source)
{
	struct hr__draft_model model = {.created_gen = hr__store_next_generation(import->store)};
	char escaped[600];

	model.name = hr__strdup(import->model);
	model.provenance = hr__strdup(hr__escape(escaped, sizeof(escaped), source, HR_STRLEN));
	model.members = hr__calloc(import->files.n, sizeof(*model.members));
	if (!model.name || !model.provenance || !model.members || hr__uuid_new(model.uuid)) {
		hr__draft_model_free(&model);
		return HR_E_NOMEM;
	}
	for (uint32_t i = 0; i < import->files.n; i++) {
		model.members[i] = (struct hr__draft_member){hr__strdup(import->files.files[i].name),
							     import->objects[i]};
		model.n_members = i + 1;
		if (!model.members[i].name) {
			hr__draft_model_free(&model);
			return HR_E_NOMEM;
		}
	}
	return hr__draft_add_model(&import->draft, &model);
}

static int bind_model(struct import *import, const char *source)
{
	uint32_t before = import->draft.n_objects, fresh = before - import->first_fresh;
	int code = make_model(import, source);

	for (uint32_t i = 0; i + 1 < import->draft.n_models && !code; i++)
		if (strcmp(import->draft.models[i].name, import->model) == 0) {
			code = hr__draft_drop_model(&import->draft, i, import->store->now->root.generation);
			break;
		}
	import->first_fresh = import->draft.n_objects - fresh;
	if (!code)
		code = commit(import);
	import->info.generation = import->store->now->root.generation;
	return code;
}

/* ---- from the outside ---- */

static int check_model_name(struct import *import)
{
	const struct hr__where at = here(import);
	uint32_t number;

	if (!import->model || !hr__store_name_is_good(import->model, strlen(import->model), false) ||
	    strchr(import->model, '@') || strchr(import->model, '#'))
		return hr__fail(HR_E_OPTS,
				"a model's name is UTF-8 without control bytes, \"@\" and \"#\", of 1 to %u bytes",
				HR__MAX_NAME);
	if (hr__manifest_find_model(&import->store->now->manifest, import->model, strlen(import->model), &number) &&
	    !(import->opts.flags & HR_IMPORT_REPLACE))
		return hr__fail_at(
			&at, HR_E_EXISTS,
			"%s has a model of the name %s already; HR_IMPORT_REPLACE (--replace) puts the new one in its place",
			at.path, import->model);
	return 0;
}

static int start(struct import *import, const char *source)
{
	int code = check_model_name(import);

	if (!code && (!source || !source[0]))
		code = hr__fail(HR_E_OPTS, "the name of what is to be imported is empty");
	if (!code)
		code = hr__gather(source, &import->files);
	if (!code)
		code = hr__draft_from(&import->store->now->manifest, &import->draft);
	if (code)
		return code;
	import->objects = hr__malloc(import->files.n * sizeof(*import->objects));
	import->extents = hr__calloc(import->files.n, sizeof(*import->extents));
	import->checked = hr__calloc(import->files.n, sizeof(*import->checked));
	if (!import->objects || !import->extents || !import->checked)
		return HR_E_NOMEM;
	memset(import->objects, 0xff, import->files.n * sizeof(*import->objects));
	import->first_fresh = import->draft.n_objects;
	import->progress = (struct hr_store_progress){.size = sizeof(import->progress),
						      .step = "writing",
						      .file = "",
						      .total_bytes = import->files.bytes,
						      .total_files = import->files.n};
	import->info.size = sizeof(import->info);
	import->info.n_files = import->files.n;
	import->info.n_skipped = import->files.n_skipped;
	import->info.bytes = import->files.bytes;
	for (uint32_t i = 0; i < import->files.n; i++) {
		import->info.n_shards += import->files.files[i].kind == HR__OBJECT_SHARD;
		if (!has_candidate(import, &import->files.files[i]))
			import->info.needed_bytes += object_for(&import->files.files[i]).ext_len;
	}
	return 0;
}

static int run(struct import *import, const char *source)
{
	int code = take_space(import);

	for (uint32_t i = 0; i < import->files.n && !code; i++)
		code = import_file(import, i);
	return code ? code : bind_model(import, source);
}

static void let_go(struct import *import)
{
	hr__gathered_free(&import->files);
	hr__draft_free(&import->draft);
	hr__free(import->objects);
	hr__free(import->extents);
	hr__free(import->checked);
}

/* What was taken and not committed is free again. */
static int finish(struct import *import, int code)
{
	hr_store *store = import->store;
	struct hr__error_record why;

	hr__error_save(&why);
	let_go(import);
	store->n_pending = 0;
	if (!store->poisoned_by && hr__store_survey(store))
		store->poisoned_by = hr__store_next_generation(store);
	return code ? hr__error_restore(&why) : 0;
}

static int plan(struct import *import, const char *source)
{
	int code;

	pthread_mutex_lock(&import->store->lock);
	code = start(import, source);
	pthread_mutex_unlock(&import->store->lock);
	let_go(import);
	return code;
}

int hr_store_import(hr_store *store, const char *source, const char *model, const struct hr_store_import_opts *given,
		    struct hr_store_import_info *out)
{
	struct import import = {.store = store, .model = model};
	int code = hr__opts_copy(&import.opts, sizeof(import.opts), given, "hr_store_import_opts");

	if (!code && (import.opts.flags & ~(HR_IMPORT_REPLACE | HR_IMPORT_NO_READ_BACK | HR_IMPORT_PLAN)))
		code = hr__fail(HR_E_OPTS, "hr_store_import_opts.flags has bits that this version does not know");
	if (code)
		return code;
	if (import.opts.flags & HR_IMPORT_PLAN) {
		code = hr__store_check_usable(store);
		if (!code)
			code = plan(&import, source);
	} else {
		code = hr__store_begin(store);
		if (code)
			return code;
		code = start(&import, source);
		if (!code)
			code = run(&import, source);
		code = finish(&import, code);
		hr__store_end(store);
	}
	return code || !out ? code : hr__out_copy(out, &import.info, sizeof(import.info), "hr_store_import_info");
}
