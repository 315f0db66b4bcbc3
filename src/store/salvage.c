/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The rescue when both roots are gone: every object has a footer, which lies on a multiple of 64 KiB and says where it
 * lies and what the object's SHA-256 is. So a walk over the region finds all objects that were not overwritten, live
 * or given up; their names were in the manifest, so the files that are written are named by their hash.
 */
#include "check.h"
#include "copy_out.h"

#include "core/arith.h"
#include "core/error.h"
#include "core/mem.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>

#define STEP_BYTES ((size_t)4 << 20) /* read at once: 64 places where a footer may be */

static void say(struct hr__check *check, uint32_t is_bad, const char *sentence)
{
	check->info.n_bad += is_bad;
	if (check->opts.report)
		check->opts.report(check->opts.report_ctx, is_bad, sentence);
}

static void hex(const uint8_t sha256[32], char out[65])
{
	for (int i = 0; i < 32; i++)
		snprintf(out + (size_t)2 * i, 3, "%02x", sha256[i]);
}

/* Writes an object, or only looks whether its hash is right. */
static int rescue(struct hr__check *check, const struct hr__object *object, const char *name)
{
	struct hr__copy copy = {.region = check->region, .object = object, .fd = -1};
	const char *to = check->opts.salvage_to;
	char *path;
	int code;

	if (!to)
		return hr__object_copy(&copy);
	path = hr__format("%s/%s.%s", to, name, object->kind == HR__OBJECT_SHARD ? "safetensors" : "bin");
	if (!path)
		return HR_E_NOMEM;
	copy.path = path;
	code = hr__object_copy_to(&copy);
	hr__free(path);
	if (!code)
		check->info.n_salvaged++;
	return code == HR_E_EXISTS ? 0 : code; /* the same bytes, found twice */
}

static int found(struct hr__check *check, const struct hr__object *object)
{
	char name[65], sentence[512];
	int code;

	hex(object->payload_sha256, name);
	code = rescue(check, object, name);
	if (code == HR_E_NOMEM || code == HR_E_IO || code == HR_E_CANCELLED)
		return code;
	check->info.n_objects++;
	check->info.checked_bytes += code ? 0 : object->payload_len;
	snprintf(sentence, sizeof(sentence),
		 "%s of %" PRIu64 " bytes at %" PRIu64 ", generation %" PRIu64 ", SHA-256 %s: %s",
		 object->kind == HR__OBJECT_SHARD ? "a shard" : "a file", object->payload_len,
		 object->ext_off + object->payload_off, object->created_gen, name,
		 code ? "overwritten or damaged" : "whole");
	say(check, 0, sentence);
	return 0;
}

static int look_here(struct hr__check *check, const uint8_t *record, uint64_t off, uint64_t end)
{
	static const uint8_t unknown[16];
	bool any = memcmp(check->label.uuid, unknown, 16) == 0;
	struct hr__object object;

	if (hr__footer_decode(record, any ? NULL : check->label.uuid, &object) != HR__RECORD_GOOD ||
	    object.ext_off + object.meta_off != off || hr__object_check(&object, HR__GUARD_BYTES, end))
		return 0;
	return found(check, &object);
}

int hr__check_salvage(struct hr__check *check)
{
	uint64_t end = hr__round_down(check->region->facts.bytes, HR__EXTENT_ALIGN);
	void *memory;
	int code = hr__region_memory(STEP_BYTES, &memory);

	if (!code && check->opts.salvage_to) {
		/* If it is there or cannot be made, that shows when a file is made in it. */
		(void)hr__os_mkdir(AT_FDCWD, check->opts.salvage_to);
	}
	check->info.n_objects = 0;
	check->progress.step = "reading";
	check->progress.done_bytes = 0;
	check->progress.total_bytes = end - HR__GUARD_BYTES;
	for (uint64_t off = HR__GUARD_BYTES; off < end && !code; off += STEP_BYTES) {
		size_t n = (size_t)hr__min_u64(STEP_BYTES, end - off);

		code = hr__region_read(check->region, off, memory, n, "the data area");
		for (size_t at = 0; at < n && !code; at += (size_t)HR__EXTENT_ALIGN)
			code = look_here(check, (const uint8_t *)memory + at, off + at, end);
		check->progress.done_bytes += n;
		if (!code && check->opts.progress && check->opts.progress(check->opts.progress_ctx, &check->progress))
			code = hr__fail(HR_E_CANCELLED, "cancelled by the caller");
	}
	hr__region_memory_free(memory, STEP_BYTES);
	return code;
}
