/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Regions over the system. One description serves metadata and import: O_DIRECT where that is allowed, so that what is
 * read back comes from the device, and what is written goes to it past the page cache; a plain file on a file system
 * that refuses O_DIRECT is read and written through the cache, and flushed.
 *
 * Who a device is stands in /sys/dev/block/MAJOR:MINOR, curated by the kernel; a partition's device is its parent
 * there.
 */
#include "block.h"

#include "core/arith.h"
#include "core/error.h"
#include "core/mem.h"
#include "layout.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sysmacros.h>

struct system_region {
	struct hr__region base;
	int fd;                       /* what the operations use */
	struct hr__identity identity; /* of a plain file */
};

/* ---- the operations ---- */

static int fd_of(const struct hr__region *region)
{
	return ((const struct system_region *)region)->fd;
}

static int region_read(struct hr__region *region, uint64_t off, void *dst, size_t bytes)
{
	size_t got;
	int error = hr__os_pread_full(fd_of(region), dst, bytes, off, &got);

	return error ? error : got < bytes ? ENODATA : 0;
}

static int region_write(struct hr__region *region, uint64_t off, const void *src, size_t bytes)
{
	size_t done;

	return hr__os_pwrite_full(fd_of(region), src, bytes, off, &done);
}

static int region_flush(struct hr__region *region)
{
	return hr__os_datasync(fd_of(region));
}

static int region_facts(struct hr__region *region, struct hr__region_facts *out)
{
	struct hr__os_block block;
	struct hr__os_stat st;
	int error = hr__os_fstat(fd_of(region), &st);

	if (error)
		return error;
	*out = (struct hr__region_facts){.bytes = st.bytes, .is_block = st.is_block, .lba_bytes = 512};
	if (!st.is_block)
		return 0;
	error = hr__os_block_ask(fd_of(region), &block);
	out->sequence = block.sequence;
	out->lba_bytes = block.logical_bytes;
	out->phys_bytes = block.physical_bytes;
	out->is_read_only = block.is_read_only;
	return error;
}

static int region_lock(struct hr__region *region, enum hr__os_lock kind, uint64_t byte)
{
	return hr__os_lock(fd_of(region), kind, byte, 1);
}

static int region_lowest_lock(struct hr__region *region, uint64_t first, uint64_t last, uint64_t *lowest)
{
	return hr__os_lock_lowest(fd_of(region), first, last - first + 1, lowest);
}

static void region_close(struct hr__region *region)
{
	struct system_region *system = (struct system_region *)region;

	if (system->fd != region->file.fd && system->fd != region->file.direct_fd)
		hr__os_close(system->fd);
	hr__os_close(region->file.direct_fd);
	hr__os_close(region->file.fd);
	hr__free(region->path);
	hr__free(system);
}

static const struct hr__region_ops system_ops = {
	.read = region_read,
	.write = region_write,
	.flush = region_flush,
	.facts = region_facts,
	.lock = region_lock,
	.lowest_lock = region_lowest_lock,
	.close = region_close,
};

/* ---- who it is ---- */

static bool attribute(const char *node, const char *name, char *out, size_t out_bytes)
{
	char path[256];

	snprintf(path, sizeof(path), "%s/%s", node, name);
	return hr__os_text(path, out, out_bytes);
}

/* A text without the blanks around it, cut to its field. */
static void text_field(const char *node, const char *name, char *out, size_t out_bytes)
{
	char text[256], *begin = text;
	size_t length;

	if (!attribute(node, name, text, sizeof(text)))
		return;
	while (*begin == ' ')
		begin++;
	length = strlen(begin);
	while (length && begin[length - 1] == ' ')
		length--;
	memcpy(out, begin, length < out_bytes ? length : out_bytes);
}

static int hex_digit(char c)
{
	if (c >= '0' && c <= '9')
		return c - '0';
	if (c >= 'a' && c <= 'f')
		return c - 'a' + 10;
	return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

/* "6b2a..." with dashes, colons or blanks between, or not. */
static void parse_hex(const char *text, uint8_t *out, size_t out_bytes)
{
	size_t n = 0;

	for (const char *c = text; *c && *c != '\n' && n < out_bytes * 2; c++) {
		int digit = hex_digit(*c);

		if (digit < 0)
			continue;
		out[n / 2] = (uint8_t)(n % 2 ? out[n / 2] | digit : digit << 4);
		n++;
	}
	if (n != out_bytes * 2)
		memset(out, 0, out_bytes);
}

static void hex_field(const char *node, const char *name, uint8_t *out, size_t out_bytes)
{
	char text[128];

	if (attribute(node, name, text, sizeof(text)))
		parse_hex(text, out, out_bytes);
}

static uint64_t number(const char *node, const char *name)
{
	char text[64];

	return attribute(node, name, text, sizeof(text)) ? strtoull(text, NULL, 10) : 0;
}

static uint32_t kind_of(const char *node)
{
	char target[512], text[64];
	const char *name;

	if (attribute(node, "loop/backing_file", text, sizeof(text)))
		return HR__IDENT_LOOP;
	if (attribute(node, "dm/name", text, sizeof(text)))
		return HR__IDENT_DM;
	if (hr__os_readlink(node, target, sizeof(target)))
		return HR__IDENT_OTHER;
	name = strrchr(target, '/');
	name = name ? name + 1 : target;
	return strncmp(name, "nvme", 4) == 0   ? HR__IDENT_NVME
	       : strncmp(name, "sd", 2) == 0   ? HR__IDENT_SCSI
	       : strncmp(name, "vd", 2) == 0   ? HR__IDENT_VIRTIO
	       : strncmp(name, "loop", 4) == 0 ? HR__IDENT_LOOP
	       : strncmp(name, "dm-", 3) == 0  ? HR__IDENT_DM
					       : HR__IDENT_OTHER;
}

/* It stands in the partition table, and, where udev runs, in its notes. */
static void partition_uuid(uint64_t device, uint8_t out[16])
{
	static const char key[] = "E:ID_PART_ENTRY_UUID=";
	char path[64], text[8192], *at;

	snprintf(path, sizeof(path), "/run/udev/data/b%u:%u", major(device), minor(device));
	at = hr__os_text(path, text, sizeof(text)) ? strstr(text, key) : NULL;
	if (at)
		parse_hex(at + sizeof(key) - 1, out, 16);
}

static void identify(uint64_t device, struct hr__ident *out)
{
	char partition[128], node[160], text[64];

	snprintf(partition, sizeof(partition), "/sys/dev/block/%u:%u", major(device), minor(device));
	snprintf(node, sizeof(node), "%s", partition);
	if (attribute(partition, "partition", text, sizeof(text))) {
		snprintf(node, sizeof(node), "%s/..", partition);
		out->region_base = number(partition, "start") * 512;
	}
	out->device_bytes = number(node, "size") * 512;
	out->kind = kind_of(partition);
	out->nsid = (uint32_t)number(node, "nsid");
	hex_field(node, "nguid", out->nguid, sizeof(out->nguid));
	hex_field(node, "eui", out->eui64, sizeof(out->eui64));
	hex_field(node, "uuid", out->ns_uuid, sizeof(out->ns_uuid));
	text_field(node, out->kind == HR__IDENT_VIRTIO ? "serial" : "device/serial", out->serial, sizeof(out->serial));
	text_field(node, "device/model", out->model, sizeof(out->model));
	if (out->kind == HR__IDENT_DM)
		text_field(node, "dm/uuid", out->wwid, sizeof(out->wwid));
	else
		text_field(node, out->kind == HR__IDENT_SCSI ? "device/wwid" : "wwid", out->wwid, sizeof(out->wwid));
	partition_uuid(device, out->partuuid);
}

/* ---- opening ---- */

static int fail_to_open(const char *path, bool is_writable, int error)
{
	const struct hr__where at = {.stage = "open", .path = path, .offset = HR_NO_OFFSET, .system = error};

	if (error == EBUSY && is_writable)
		return hr__fail_at(&at, HR_E_LOCKED,
				   "%s is mounted, or held by another device or program: unmount or stop that first",
				   path);
	return hr__fail_errno(&at, error, "open");
}

/* Fills the descriptions that engines read from, and the one for operations. */
static int describe(struct system_region *region, int flags, const struct hr__os_stat *st)
{
	struct hr__file *file = &region->base.file;
	int error;

	file->is_block = st->is_block;
	file->bytes = st->bytes;
	file->may_mincore = st->may_write_or_owns;
	file->fs_magic = st->is_block ? 0 : hr__os_fs_magic(file->fd);
	region->identity = st->identity;
	hr__os_open_direct(file);
	error = hr__os_reopen(file->fd, (flags & ~O_EXCL) | O_DIRECT, &region->fd);
	if (error == EINVAL && !st->is_block)
		region->fd = file->fd; /* tmpfs and the like */
	else if (error)
		return error;
	return hr__os_fstat(region->fd, &(struct hr__os_stat){0}); /* and it is ours to ask */
}

static int open_system(struct system_region *region, const char *path, bool is_writable)
{
	struct hr__where at = {.stage = "open", .path = path, .offset = HR_NO_OFFSET};
	int flags = is_writable ? O_RDWR : O_RDONLY, error;
	struct hr__os_stat st;

	error = hr__os_open(AT_FDCWD, path, O_RDONLY | O_NONBLOCK, &region->base.file.fd);
	if (!error)
		error = hr__os_fstat(region->base.file.fd, &st);
	if (error)
		return fail_to_open(path, is_writable, error);
	if (!st.is_regular && !st.is_block)
		return hr__fail_at(&at, HR_E_IO, "%s is %s, not a block device or a plain file", path,
				   st.is_directory ? "a directory" : "a FIFO, a character device or the like");
	if (is_writable) {
		flags |= st.is_block ? O_EXCL : 0;
		error = hr__os_reopen(region->base.file.fd, flags, &region->fd);
		hr__os_close(region->base.file.fd);
		region->base.file.fd = region->fd;
	}
	if (!error)
		error = describe(region, flags, &st);
	if (!error)
		error = region_facts(&region->base, &region->base.facts);
	if (error)
		return fail_to_open(path, is_writable, error);
	if (is_writable && region->base.facts.is_read_only)
		return hr__fail_at(&at, HR_E_IO, "%s is set read-only; blockdev --setrw makes it writable", path);
	if (st.is_block)
		identify(st.is_device, &region->base.ident);
	else
		region->base.ident = (struct hr__ident){.kind = HR__IDENT_FILE, .device_bytes = st.bytes};
	return 0;
}

int hr__region_open(const char *path, bool is_writable, struct hr__region **out)
{
	struct system_region *region = hr__calloc(1, sizeof(*region));
	int code;

	*out = NULL;
	if (!region)
		return HR_E_NOMEM;
	region->base.ops = &system_ops;
	region->base.is_writable = is_writable;
	region->base.file = (struct hr__file){.fd = -1, .direct_fd = -1};
	region->fd = -1;
	region->base.path = hr__strdup(path);
	code = region->base.path ? open_system(region, path, is_writable) : HR_E_NOMEM;
	if (code)
		region_close(&region->base);
	else
		*out = &region->base;
	return code;
}

void hr__region_close(struct hr__region *region)
{
	if (region)
		region->ops->close(region);
}

/* ---- with the error told ---- */

int hr__region_fail(const struct hr__region *region, int error, uint64_t off, const char *doing, const char *what)
{
	const struct hr__where at = {.stage = "store", .path = region->path, .offset = off, .system = error};
	char text[128];
	int code;

	if (region->file.raw) {
		const char *why = region->file.raw->ops->explain(error, &code);

		return hr__fail_at(&at, code, "%s: cannot %s %s at %" PRIu64 ": %s", region->path, doing, what, off,
				   why);
	}
	if (error == ENODATA)
		return hr__fail_at(&at, HR_E_REGION_CHANGED,
				   "%s ends before %s at %" PRIu64 ": it has become smaller than the store in it",
				   region->path, what, off);
	return hr__fail_at(&at, HR_E_IO, "%s: cannot %s %s at %" PRIu64 ": %s", region->path, doing, what, off,
			   strerror_r(error, text, sizeof(text)));
}

int hr__region_read(struct hr__region *region, uint64_t off, void *dst, size_t bytes, const char *what)
{
	int error = region->ops->read(region, off, dst, bytes);

	return error ? hr__region_fail(region, error, off, "read", what) : 0;
}

int hr__region_write(struct hr__region *region, uint64_t off, const void *src, size_t bytes, const char *what)
{
	int error = region->ops->write(region, off, src, bytes);

	return error ? hr__region_fail(region, error, off, "write", what) : 0;
}

int hr__region_flush(struct hr__region *region)
{
	const struct hr__where at = {.stage = "store", .path = region->path, .offset = HR_NO_OFFSET};
	int error = region->ops->flush(region);

	return error ? hr__fail_errno(&at, error, "flush") : 0;
}

int hr__region_check(struct hr__region *region)
{
	struct hr__where at = {.stage = "store", .path = region->path, .offset = HR_NO_OFFSET};
	const struct hr__region_facts *was = &region->facts;
	struct hr__region_facts now = {0};
	int error = region->ops->facts(region, &now);

	at.system = error;
	if (error && region->file.raw)
		return hr__region_fail(region, error, 0, "look at", "the region");
	if (error)
		return hr__fail_errno(&at, error, "look at");
	if (now.sequence != was->sequence)
		return hr__fail_at(&at, HR_E_REGION_CHANGED,
				   "%s is another device now: its sequence number was %" PRIu64 " and is %" PRIu64
				   "; open the store again",
				   region->path, was->sequence, now.sequence);
	if (now.bytes < was->bytes)
		return hr__fail_at(&at, HR_E_REGION_CHANGED,
				   "%s has shrunk from %" PRIu64 " to %" PRIu64 " bytes; open the store again",
				   region->path, was->bytes, now.bytes);
	if (now.lba_bytes != was->lba_bytes)
		return hr__fail_at(&at, HR_E_REGION_CHANGED,
				   "%s had sectors of %" PRIu32 " bytes and has sectors of %" PRIu32
				   " now; open the store again",
				   region->path, was->lba_bytes, now.lba_bytes);
	return 0;
}

/* Records come and go by the thousand, and a mapping of its own costs more than what is done with one. */
#define SMALL_BYTES ((size_t)256 << 10)

int hr__region_memory(size_t bytes, void **out)
{
	char *block, *aligned;

	*out = NULL;
	if (bytes > SMALL_BYTES)
		return hr__os_map(bytes, out) ? hr__fail_nomem(bytes) : 0;
	block = hr__calloc(1, bytes + 2 * (size_t)HR__RECORD_BYTES);
	if (!block)
		return HR_E_NOMEM;
	aligned = block + HR__RECORD_BYTES - (uintptr_t)block % HR__RECORD_BYTES;
	if (aligned - block < (ptrdiff_t)sizeof(block))
		aligned += HR__RECORD_BYTES;
	memcpy(aligned - sizeof(block), &block, sizeof(block)); /* what is to be freed */
	*out = aligned;
	return 0;
}

void hr__region_memory_free(void *memory, size_t bytes)
{
	char *block;

	if (!memory)
		return;
	if (bytes > SMALL_BYTES) {
		hr__os_unmap(memory, bytes);
		return;
	}
	memcpy(&block, (char *)memory - sizeof(block), sizeof(block));
	hr__free(block);
}
