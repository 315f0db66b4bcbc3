/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Making a store. What stood at either end is zeroed first, so that nothing recognises the region as what it was; the
 * labels come last, so that a crash on the way leaves no store at all rather than half of one.
 *
 * Refused: what is not a block device or a plain file, is too small, begins at an odd place of its device, is mounted
 * or held, or has anything at either end, unless the caller insists.
 */
#include "store.h"

#include "core/arith.h"
#include "core/error.h"
#include "core/hash.h"
#include "core/mem.h"
#include "core/os_library.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

#define PIECE_BYTES ((size_t)1 << 20)

static struct hr__where here(const char *path)
{
	return (struct hr__where){.stage = "init", .path = path, .offset = HR_NO_OFFSET};
}

/* ---- what stands there ---- */

static int check_geometry(const struct hr__region *region)
{
	const struct hr__where at = here(region->path);

	if (region->facts.bytes < HR__REGION_MIN)
		return hr__fail_at(&at, HR_E_GEOMETRY, "%s has %" PRIu64 " bytes; a store needs at least %" PRIu64,
				   region->path, region->facts.bytes, HR__REGION_MIN);
	if (region->facts.lba_bytes != 512 && region->facts.lba_bytes != 4096)
		return hr__fail_at(&at, HR_E_GEOMETRY,
				   "%s has sectors of %" PRIu32 " bytes; a store needs sectors of 512 or 4096",
				   region->path, region->facts.lba_bytes);
	if (region->ident.region_base % HR__EXTENT_ALIGN)
		return hr__fail_at(&at, HR_E_GEOMETRY,
				   "%s begins at byte %" PRIu64
				   " of its device, which is not a multiple of 64 KiB; align the partition",
				   region->path, region->ident.region_base);
	return 0;
}

/* Calls for each piece of the two ends. */
static int each_end_piece(struct hr__region *region, void *memory, bool *go_on,
			  int (*visit)(struct hr__region *region, uint64_t off, void *memory, void *ctx), void *ctx)
{
	uint64_t end = hr__round_down(region->facts.bytes, HR__REGION_ALIGN);
	int code = 0;

	for (uint64_t off = 0; off < 2 * HR__GUARD_BYTES && !code && *go_on; off += PIECE_BYTES)
		code = visit(region, off < HR__GUARD_BYTES ? off : end - 2 * HR__GUARD_BYTES + off, memory, ctx);
	return code;
}

struct blank {
	bool is_blank;
	uint64_t at;
};

static int look(struct hr__region *region, uint64_t off, void *memory, void *ctx)
{
	struct blank *blank = ctx;
	int code = hr__region_read(region, off, memory, PIECE_BYTES, "what is there now");

	if (code || hr__is_zero(memory, PIECE_BYTES))
		return code;
	for (size_t i = 0; i < PIECE_BYTES && blank->is_blank; i++)
		if (((const char *)memory)[i]) {
			blank->at = off + i;
			blank->is_blank = false;
		}
	return 0;
}

int hr__region_is_blank(struct hr__region *region, bool *is_blank, uint64_t *at)
{
	struct blank blank = {.is_blank = true};
	void *memory;
	int code = hr__region_memory(PIECE_BYTES, &memory);

	if (!code)
		code = each_end_piece(region, memory, &blank.is_blank, look, &blank);
	hr__region_memory_free(memory, PIECE_BYTES);
	*is_blank = blank.is_blank;
	*at = blank.at;
	return code;
}

static int check_blank(struct hr__region *region)
{
	struct hr__where at = here(region->path);
	struct hr__label label;
	bool is_blank;
	int code = hr__region_is_blank(region, &is_blank, &at.offset);

	if (code || is_blank)
		return code;
	if (hr__label_read(region, &label) != HR_E_NOT_A_STORE)
		return hr__fail_at(
			&at, HR_E_FOREIGN,
			"%s holds a store already%s%s%s; HR_STORE_FORCE (--force) destroys it with all its models",
			region->path, label.name[0] ? " (" : "", label.name, label.name[0] ? ")" : "");
	return hr__fail_at(
		&at, HR_E_FOREIGN,
		"%s is not empty (there is something at byte %" PRIu64
		", where partition tables and file systems have their marks); HR_STORE_FORCE (--force) destroys what "
		"it holds",
		region->path, at.offset);
}

/* ---- writing ---- */

static int wipe(struct hr__region *region, uint64_t off, void *memory, void *ctx)
{
	(void)ctx;
	return hr__region_write(region, off, memory, PIECE_BYTES, "zeros");
}

static int write_records(struct hr__region *region, const struct hr__label *label, const struct hr__root *root,
			 void *memory)
{
	int code = 0;

	for (unsigned copy = 0; copy < 2 && !code; copy++) {
		uint64_t off = hr__root_off(label->region_len, 0, copy);

		hr__root_encode(root, label->uuid, off, memory);
		code = hr__region_write(region, off, memory, HR__RECORD_BYTES, "a root");
	}
	if (!code)
		code = hr__region_flush(region);
	for (unsigned copy = 0; copy < 2 && !code; copy++) {
		uint64_t off = hr__label_off(label->region_len, copy);

		hr__label_encode(label, off, memory);
		code = hr__region_write(region, off, memory, HR__RECORD_BYTES, "the label");
	}
	return code ? code : hr__region_flush(region);
}

/* An empty manifest, one copy at either end of the data area. */
static int write_body(struct hr__region *region, const struct hr__label *label, struct hr__root *root)
{
	const struct hr__draft nothing = {.n_objects = 0};
	uint8_t *body;
	size_t bytes;
	int code = hr__draft_build(&nothing, label, 1, &body, &bytes);

	if (code)
		return code;
	root->body_len = bytes;
	root->body_off[0] = label->data_off;
	root->body_off[1] = root->data_end - HR__EXTENT_ALIGN;
	hr__sha256_of(body, bytes, root->body_sha256);
	for (unsigned copy = 0; copy < 2 && !code; copy++)
		code = hr__region_write(region, root->body_off[copy], body, HR__EXTENT_ALIGN, "the manifest");
	hr__region_memory_free(body, HR__EXTENT_ALIGN);
	return code;
}

static int read_back(struct hr__region *region, const struct hr__label *label)
{
	struct hr__manifest manifest;
	struct hr__roots roots;
	struct hr__label found;
	int code = hr__label_read(region, &found);

	if (!code)
		code = hr__roots_read(region, &found, &roots);
	if (!code && (memcmp(&found.uuid, label->uuid, 16) != 0 || roots.roots[0].generation != 1))
		code = hr__fail_at(&(struct hr__where){.stage = "init", .path = region->path, .offset = HR_NO_OFFSET},
				   HR_E_CORRUPT, "%s does not give back what was written to it", region->path);
	if (!code)
		code = hr__manifest_read(region, &found, &roots.roots[0], &manifest);
	if (!code)
		hr__manifest_free(&manifest);
	return code;
}

int hr__store_format(struct hr__region *region, const char *name)
{
	struct hr__label label = {.region_len = hr__round_down(region->facts.bytes, HR__REGION_ALIGN),
				  .data_off = HR__GUARD_BYTES,
				  .init_time_ns = hr__os_date_ns(),
				  .lba_bytes = region->facts.lba_bytes,
				  .phys_bytes = region->facts.phys_bytes,
				  .ident = region->ident};
	struct hr__root root = {.generation = 1, .commit_time_ns = label.init_time_ns};
	bool always = true;
	void *memory;
	int code = hr__uuid_new(label.uuid);

	root.data_end = label.region_len - HR__GUARD_BYTES;
	memcpy(label.name, name ? name : "", name ? strlen(name) : 0);
	if (!code)
		code = hr__uuid_new(root.writer_id);
	if (code)
		return code;
	code = hr__region_memory(PIECE_BYTES, &memory);
	if (!code)
		code = each_end_piece(region, memory, &always, wipe, NULL);
	if (!code)
		code = hr__region_flush(region);
	if (!code)
		code = write_body(region, &label, &root);
	if (!code)
		code = hr__region_flush(region);
	if (!code)
		code = write_records(region, &label, &root, memory);
	hr__region_memory_free(memory, PIECE_BYTES);
	return code ? code : read_back(region, &label);
}

/* ---- the public way ---- */

/* A plain file that is not there, or empty, or to be made anew. */
static int make_file(const char *path, uint64_t bytes, uint32_t flags)
{
	const struct hr__where at = here(path);
	struct hr__os_stat st = {.bytes = 0};
	bool is_ours = !hr__os_is_there(path);
	int fd, error;

	if (bytes < HR__REGION_MIN)
		return hr__fail_at(&at, HR_E_OPTS, "%s would have %" PRIu64 " bytes; a store needs at least %" PRIu64,
				   path, bytes, HR__REGION_MIN);
	error = hr__os_create(AT_FDCWD, path, O_RDWR, &fd);
	if (!error)
		error = hr__os_fstat(fd, &st);
	if (!error && st.is_regular && st.bytes > 0 && !(flags & HR_STORE_FORCE)) {
		hr__os_close(fd);
		return hr__fail_at(&at, HR_E_FOREIGN,
				   "%s exists and has %" PRIu64 " bytes; HR_STORE_FORCE (--force) overwrites it", path,
				   st.bytes);
	}
	if (!error && st.is_regular)
		error = hr__os_allocate(fd, hr__round_up(bytes, HR__REGION_ALIGN));
	if (!error && st.is_regular)
		error = hr__os_datasync(fd);
	if (!error && st.is_regular)
		error = hr__os_sync_parent(path);
	hr__os_close(fd);
	if (error && is_ours)
		hr__os_unlink(AT_FDCWD, path);
	if (error == ENOSPC)
		return hr__fail_at(&at, HR_E_IO, "%s: there is no room for %" PRIu64 " bytes on its file system", path,
				   bytes);
	return error ? hr__fail_errno(&at, error, "make") : 0;
}

static int check_name(const char *name)
{
	if (!name || !name[0])
		return 0;
	if (strlen(name) >= sizeof(((struct hr__label *)0)->name) || !hr__store_name_is_good(name, strlen(name), false))
		return hr__fail(HR_E_OPTS, "the store's name has more than 64 bytes, control bytes, or is not UTF-8");
	return 0;
}

int hr_store_init(const char *path, const struct hr_store_init_opts *given)
{
	struct hr_store_init_opts opts;
	struct hr__region *region = NULL;
	int code = hr__opts_copy(&opts, sizeof(opts), given, "hr_store_init_opts");

	if (!code && (!path || !path[0]))
		code = hr__fail(HR_E_OPTS, "the path of the store is empty");
	if (!code && (opts.flags & ~HR_STORE_FORCE))
		code = hr__fail(HR_E_OPTS, "hr_store_init_opts.flags has bits that this version does not know");
	if (!code)
		code = check_name(opts.name);
	if (!code && opts.bytes)
		code = make_file(path, opts.bytes, opts.flags);
	if (!code)
		code = hr__region_open(path, true, &region);
	if (!code)
		code = hr__store_lock_writer(region);
	if (!code)
		code = check_geometry(region);
	if (!code && !(opts.flags & HR_STORE_FORCE))
		code = check_blank(region);
	if (!code)
		code = hr__store_format(region, opts.name);
	hr__region_close(region);
	return code;
}
