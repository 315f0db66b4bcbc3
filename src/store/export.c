/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The manifest as JSON. What a reader demands of a store (its UUID, generation, and the SHA-256 of the manifest) stands
 * first; the rest is for people and for programs that plan. It goes out in pieces of some kilobytes.
 */
#include "store.h"

#include "core/error.h"
#include "core/mem.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define ROOM 8192

struct writer {
	int (*write)(void *ctx, const char *text, size_t bytes);
	void *ctx;
	size_t n;
	bool is_over;
	char text[ROOM];
};

static void drain(struct writer *writer)
{
	if (writer->n && !writer->is_over && writer->write(writer->ctx, writer->text, writer->n))
		writer->is_over = true;
	writer->n = 0;
}

static void put(struct writer *writer, const char *text, size_t n)
{
	while (n > 0) {
		size_t part = n < ROOM - writer->n ? n : ROOM - writer->n;

		memcpy(writer->text + writer->n, text, part);
		writer->n += part;
		text += part;
		n -= part;
		if (writer->n == ROOM)
			drain(writer);
	}
}

__attribute__((format(printf, 2, 3))) static void say(struct writer *writer, const char *format, ...)
{
	char text[512];
	va_list args;
	int n;

	va_start(args, format);
	n = vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	put(writer, text, n < 0 ? 0 : (size_t)n < sizeof(text) ? (size_t)n : sizeof(text) - 1);
}

static void say_hex(struct writer *writer, const char *key, const uint8_t *bytes, size_t n)
{
	say(writer, "\"%s\": \"", key);
	for (size_t i = 0; i < n; i++)
		say(writer, "%02x", bytes[i]);
	say(writer, "\"");
}

/* Names are UTF-8, as the manifest was checked; others may not be, and are cut there. */
static void say_string(struct writer *writer, const char *text, size_t n)
{
	put(writer, "\"", 1);
	for (size_t i = 0; i < n && text[i]; i++) {
		unsigned char c = (unsigned char)text[i];

		if (c == '"' || c == '\\')
			say(writer, "\\%c", c);
		else if (c < 0x20 || c == 0x7f)
			say(writer, "\\u%04x", c);
		else
			put(writer, text + i, 1);
	}
	put(writer, "\"", 1);
}

static void say_text(struct writer *writer, const char *key, const char *text, size_t n)
{
	say(writer, "\"%s\": ", key);
	say_string(writer, hr__store_name_is_good(text, strnlen(text, n), false) ? text : "", n);
}

static void say_region(struct writer *writer, const struct hr__snapshot *now)
{
	const struct hr__ident *ident = &now->label.ident;

	say(writer, "  \"region\": {\"bytes\": %" PRIu64 ", \"lba_bytes\": %" PRIu32 ", \"base\": %" PRIu64,
	    now->label.region_len, now->label.lba_bytes, ident->region_base);
	say(writer, ", \"device_bytes\": %" PRIu64 ", \"nsid\": %" PRIu32 ", ", ident->device_bytes, ident->nsid);
	say_hex(writer, "nguid", ident->nguid, 16);
	say(writer, ", ");
	say_hex(writer, "eui64", ident->eui64, 8);
	say(writer, ", ");
	say_text(writer, "wwid", ident->wwid, sizeof(ident->wwid));
	say(writer, ", ");
	say_text(writer, "serial", ident->serial, sizeof(ident->serial));
	say(writer, ", ");
	say_text(writer, "model", ident->model, sizeof(ident->model));
	say(writer, "},\n");
}

static void say_object(struct writer *writer, const struct hr__object *object)
{
	say(writer, "    {");
	say_hex(writer, "uuid", object->uuid, 16);
	say(writer, ", \"kind\": \"%s\", \"offset\": %" PRIu64 ", \"bytes\": %" PRIu64,
	    object->kind == HR__OBJECT_SHARD ? "shard" : "blob", object->ext_off + object->payload_off,
	    object->payload_len);
	say(writer, ", \"extent_offset\": %" PRIu64 ", \"extent_bytes\": %" PRIu64 ", \"header_bytes\": %" PRIu64,
	    object->ext_off, object->ext_len, object->header_len);
	say(writer, ", \"n_tensors\": %" PRIu32 ", \"meta_offset\": %" PRIu64 ", \"meta_bytes\": %" PRIu64,
	    object->n_tensors, object->ext_off + object->meta_off, object->meta_len);
	say(writer, ", \"digest_block_bytes\": %u, \"created_generation\": %" PRIu64 ", ", 1u << object->block_log2,
	    object->created_gen);
	say_hex(writer, "sha256", object->payload_sha256, 32);
	say(writer, ", ");
	say_hex(writer, "header_sha256", object->header_sha256, 32);
	say(writer, ", ");
	say_hex(writer, "meta_sha256", object->meta_sha256, 32);
	say(writer, "}");
}

static void say_model(struct writer *writer, const struct hr__manifest *manifest, uint32_t number)
{
	struct hr__model_record model;

	hr__manifest_model(manifest, number, &model);
	say(writer, "    {\"name\": ");
	say_string(writer, model.name, model.name_len);
	say(writer, ", ");
	say_hex(writer, "uuid", model.uuid, 16);
	say(writer, ", \"created_generation\": %" PRIu64 ", ", model.created_gen);
	say_text(writer, "provenance", model.provenance, model.provenance_len);
	say(writer, ", \"files\": [");
	for (uint32_t i = 0; i < model.n_members; i++) {
		struct hr__member member;

		hr__manifest_member(manifest, model.first_member + i, &member);
		say(writer, "%s\n      {\"name\": ", i ? "," : "");
		say_string(writer, member.name, member.name_len);
		say(writer, ", \"object\": %" PRIu32 "}", member.object);
	}
	say(writer, "]}");
}

static void say_all(struct writer *writer, const struct hr__snapshot *now, const char *path)
{
	const struct hr__manifest *manifest = &now->manifest;

	say(writer, "{\n  \"format\": \"headrace-store-manifest\",\n  \"version\": 1,\n  ");
	say_hex(writer, "store_uuid", now->label.uuid, 16);
	say(writer, ",\n  \"generation\": %" PRIu64 ",\n  ", now->root.generation);
	say_hex(writer, "body_sha256", now->root.body_sha256, 32);
	say(writer, ",\n  \"path\": ");
	say_string(writer, path, strlen(path));
	say(writer, ",\n  ");
	say_text(writer, "name", now->label.name, sizeof(now->label.name));
	say(writer, ",\n");
	say_region(writer, now);
	say(writer, "  \"objects\": [");
	for (uint32_t i = 0; i < manifest->objects.n; i++) {
		struct hr__object object;

		hr__manifest_object(manifest, i, &object);
		say(writer, "%s\n", i ? "," : "");
		say_object(writer, &object);
	}
	say(writer, "],\n  \"models\": [");
	for (uint32_t i = 0; i < manifest->models.n; i++) {
		say(writer, "%s\n", i ? "," : "");
		say_model(writer, manifest, i);
	}
	say(writer, "]\n}\n");
}

/* The region's absolute path, as the system knows it. */
static void absolute_path(const struct hr__region *region, char *out, size_t out_bytes)
{
	char link[64], raw[1024];

	snprintf(link, sizeof(link), "/proc/self/fd/%d", region->file.fd);
	if (region->file.fd < 0 || hr__os_readlink(link, raw, sizeof(raw)) || raw[0] != '/')
		snprintf(raw, sizeof(raw), "%s", region->path);
	if (hr__store_name_is_good(raw, strlen(raw), false))
		snprintf(out, out_bytes, "%s", raw);
	else
		hr__escape(out, out_bytes, raw, HR_STRLEN); /* a path that JSON cannot hold */
}

int hr_store_export(hr_store *store, int (*write)(void *ctx, const char *text, size_t bytes), void *ctx)
{
	struct writer *writer;
	char path[4096];
	int code = hr__store_check_usable(store);

	if (!code && !write)
		code = hr__fail(HR_E_OPTS, "hr_store_export() has nowhere to write to (write is NULL)");
	if (code)
		return code;
	writer = hr__calloc(1, sizeof(*writer));
	if (!writer)
		return HR_E_NOMEM;
	writer->write = write;
	writer->ctx = ctx;
	absolute_path(store->now->region, path, sizeof(path));
	pthread_mutex_lock(&store->writing);
	say_all(writer, store->now, path);
	pthread_mutex_unlock(&store->writing);
	drain(writer);
	if (writer->is_over)
		code = hr__fail(HR_E_CANCELLED,
				"the manifest was not written to its end: the caller's write() gave up");
	hr__free(writer);
	return code;
}
