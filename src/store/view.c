/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Objects as sources. Descriptors are the snapshot's and lent to all of them.
 *
 * Lock: view->lock is held for questions about the region, which one thread may ask at a time, and for the tables of
 * checksums; those are read when they are first wanted and stay.
 */
#include "view.h"

#include "core/arith.h"
#include "core/error.h"
#include "core/hash.h"
#include "core/mem.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

struct table {
	uint32_t *crc;
	uint64_t n;
};

struct hr__view {
	atomic_uint count;
	struct hr__snapshot *snapshot;
	pthread_mutex_t lock;
	struct table *tables; /* of each object; guarded by lock */
};

static void put_hex(char *out, const uint8_t *bytes, size_t n)
{
	for (size_t i = 0; i < n; i++)
		snprintf(out + i * 2, 3, "%02x", bytes[i]);
}

static int fail_pin(const struct hr__snapshot *snapshot, const char *what, const uint8_t *found,
		    const uint8_t *expected, size_t n)
{
	const struct hr__where at = {.stage = "store", .path = snapshot->region->path, .offset = HR_NO_OFFSET};
	char found_text[65], expected_text[65];

	put_hex(found_text, found, n);
	put_hex(expected_text, expected, n);
	return hr__fail_at(&at, HR_E_PIN,
			   "%s is not what the exported manifest describes: %s is %s, and %s was expected",
			   snapshot->region->path, what, found_text, expected_text);
}

/* Another store is told apart from a generation that is gone, so the newest is looked at first. */
static int open_pinned(const char *path, const struct hr__snapshot_want *want, const struct hr__pin *pin,
		       struct hr__snapshot **out)
{
	struct hr__snapshot_want own = *want;
	int code;

	own.generation = 0;
	code = hr__snapshot_open(path, &own, out);

	if (!code && memcmp((*out)->label.uuid, pin->uuid, 16) != 0)
		return fail_pin(*out, "its UUID", (*out)->label.uuid, pin->uuid, 16);
	if (!code && (*out)->root.generation != pin->generation) {
		hr__snapshot_release(*out);
		own.generation = pin->generation;
		code = hr__snapshot_open(path, &own, out);
	}
	if (!code && memcmp((*out)->root.body_sha256, pin->body_sha256, 32) != 0)
		return fail_pin(*out, "the SHA-256 of its manifest", (*out)->root.body_sha256, pin->body_sha256, 32);
	return code;
}

int hr__view_open(const char *path, const struct hr__snapshot_want *want, const struct hr__pin *pin,
		  struct hr__view **out)
{
	struct hr__view *view = hr__calloc(1, sizeof(*view));
	int code;

	*out = NULL;
	if (!view)
		return HR_E_NOMEM;
	atomic_init(&view->count, 1);
	pthread_mutex_init(&view->lock, NULL);
	code = pin ? open_pinned(path, want, pin, &view->snapshot) : hr__snapshot_open(path, want, &view->snapshot);
	if (!code) {
		view->tables = hr__calloc(view->snapshot->manifest.objects.n + (size_t)1, sizeof(*view->tables));
		code = view->tables ? 0 : HR_E_NOMEM;
	}
	if (code)
		hr__view_unref(view);
	else
		*out = view;
	return code;
}

struct hr__view *hr__view_acquire(struct hr__view *view)
{
	atomic_fetch_add_explicit(&view->count, 1, memory_order_relaxed);
	return view;
}

void hr__view_unref(struct hr__view *view)
{
	if (!view || atomic_fetch_sub_explicit(&view->count, 1, memory_order_acq_rel) != 1)
		return;
	for (uint32_t i = 0; view->tables && i < view->snapshot->manifest.objects.n; i++)
		hr__free(view->tables[i].crc);
	hr__free(view->tables);
	hr__snapshot_release(view->snapshot);
	pthread_mutex_destroy(&view->lock);
	hr__free(view);
}

const struct hr__snapshot *hr__view_snapshot(const struct hr__view *view)
{
	return view->snapshot;
}

void hr__view_list(const struct hr__view *view, uint32_t model, int (*each)(void *ctx, const char *name), void *ctx)
{
	const struct hr__manifest *manifest = &view->snapshot->manifest;
	struct hr__model_record record;

	hr__manifest_model(manifest, model, &record);
	for (uint32_t i = 0; i < record.n_members; i++) {
		char name[HR__MAX_NAME + 1];
		struct hr__member member;

		hr__manifest_member(manifest, record.first_member + i, &member);
		if (member.name_len > HR__MAX_NAME || memchr(member.name, '/', member.name_len))
			continue;
		memcpy(name, member.name, member.name_len);
		name[member.name_len] = '\0';
		if (each(ctx, name))
			break;
	}
}

/* ---- objects as sources ---- */

static struct hr__view *view_of(const struct hr__source *source)
{
	return source->owner;
}

static void object_of(const struct hr__source *source, struct hr__object *out)
{
	hr__manifest_object(&view_of(source)->snapshot->manifest, source->number, out);
}

static int check(const struct hr__source *source)
{
	struct hr__view *view = view_of(source);
	int code;

	pthread_mutex_lock(&view->lock);
	code = hr__snapshot_check(view->snapshot);
	pthread_mutex_unlock(&view->lock);
	return code;
}

/* What the manifest vouches for: of a shard its header, of another file all of it. */
static int prove(const struct hr__source *source, const void *bytes, size_t n)
{
	const struct hr__where at = {.stage = "store", .path = source->path, .offset = 0};
	char expected_text[65], found_text[65];
	const uint8_t *expected;
	struct hr__object object;
	uint8_t found[32];

	object_of(source, &object);
	expected = object.kind == HR__OBJECT_SHARD ? object.header_sha256 : object.payload_sha256;
	hr__sha256_of(bytes, n, found);
	if (memcmp(found, expected, 32) == 0)
		return 0;
	put_hex(expected_text, expected, 32);
	put_hex(found_text, found, 32);
	return hr__fail_at(&at, HR_E_DIGEST,
			   "%s: its %s has SHA-256 %s, but the store's manifest says %s; the data is damaged: run "
			   "`headrace store check --digests`, then import the model anew",
			   source->path, object.kind == HR__OBJECT_SHARD ? "header" : "content", found_text,
			   expected_text);
}

static int blocks_of(const struct hr__source *source, struct hr__source_blocks *out)
{
	struct hr__view *view = view_of(source);
	struct table *table = &view->tables[source->number];
	struct hr__object object;
	int code = 0;

	object_of(source, &object);
	pthread_mutex_lock(&view->lock);
	if (!table->crc)
		code = hr__snapshot_digests(view->snapshot, &object, &table->crc, &table->n);
	*out = (struct hr__source_blocks){table->crc, table->n, (uint8_t)object.block_log2};
	pthread_mutex_unlock(&view->lock);
	return code;
}

static void close_source(struct hr__source *source)
{
	hr__view_unref(view_of(source));
}

static const struct hr__source_ops source_ops = {
	.check = check,
	.prove = prove,
	.blocks = blocks_of,
	.close = close_source,
};

static int fail_member(const struct hr__view *view, const char *path)
{
	const struct hr__where at = {.stage = "open", .path = path, .offset = HR_NO_OFFSET};

	return hr__fail_at(&at, HR_E_NOTFOUND, "%s is not in generation %" PRIu64 " of the store", path,
			   view->snapshot->root.generation);
}

int hr__view_source(struct hr__view *view, uint32_t model, const char *name, const char *path, struct hr__source *out)
{
	const struct hr__manifest *manifest = &view->snapshot->manifest;
	struct hr__member member;
	struct hr__object object;
	uint32_t number;
	char *copy;

	*out = (struct hr__source){.file = {.fd = -1, .direct_fd = -1}};
	if (!hr__manifest_find_member(manifest, model, name, strlen(name), &number))
		return fail_member(view, path);
	hr__manifest_member(manifest, number, &member);
	hr__manifest_object(manifest, member.object, &object);
	copy = hr__strdup(path);
	if (!copy)
		return HR_E_NOMEM;
	*out = (struct hr__source){
		.file = view->snapshot->region->file,
		.path = copy,
		.base = view->snapshot->region->file_base + object.ext_off + object.payload_off,
		.bytes = object.payload_len,
		.room = object.meta_off - object.payload_off,
		.proven = object.kind == HR__OBJECT_SHARD ? 8 + object.header_len : object.payload_len,
		.ops = &source_ops,
		.owner = hr__view_acquire(view),
		.number = member.object,
	};
	memcpy(&out->identity, object.uuid, sizeof(object.uuid)); /* two names of one object are the same file */
	if (out->file.is_block)
		out->file.fd = -1; /* around the page cache only */
	return 0;
}
