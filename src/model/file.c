/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Files as sources. One open description serves header and data, so what was checked is what is read; a second, direct
 * one is opened through it. Nothing here follows a path twice, maps a file, or waits for anything but storage.
 *
 * A file is "the same" while device, inode, size, modification and change time are. A rename over the file or its
 * removal moves the change time too, so it is noticed although our descriptor still reads the old bytes.
 */
#include "source.h"

#include "core/arith.h"
#include "core/error.h"
#include "core/mem.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#define BOUNCE_BYTES ((size_t)256 << 10)

static int fail_to_open(const char *path, int no_symlinks, int error)
{
	const struct hr__where at = {.stage = "open", .path = path, .offset = HR_NO_OFFSET, .system = error};
	char target[512];

	if (error == ELOOP && no_symlinks)
		return hr__fail_at(&at, HR_E_IO, "%s is a symbolic link, and links are refused here", path);
	if (error == ENOENT && hr__os_readlink(path, target, sizeof(target)) == 0)
		return hr__fail_at(&at, HR_E_IO, "%s is a symbolic link to %s, which does not exist", path, target);
	if (error == EMFILE)
		return hr__fail_at(&at, HR_E_IO,
				   "cannot open %s: the process has too many files open; raise the limit (ulimit -n)",
				   path);
	if (error == ENXIO)
		return hr__fail_at(&at, HR_E_IO, "%s is a socket or a device, not a regular file", path);
	return hr__fail_errno(&at, error, "open");
}

/* What the engines want to know of an open file. */
static void describe(struct hr__source *out, const struct hr__os_stat *st)
{
	out->identity = st->identity;
	out->bytes = st->bytes;
	out->file.bytes = st->bytes;
	out->file.may_mincore = st->may_write_or_owns;
	out->file.fs_magic = hr__os_fs_magic(out->file.fd);
	hr__os_open_direct(&out->file); /* a refusal is kept in direct_errno */
}

int hr__source_open_file(int directory_fd, const char *name, const char *path, int no_symlinks, struct hr__source *out)
{
	const struct hr__where at = {.stage = "open", .path = path, .offset = HR_NO_OFFSET};
	struct hr__os_stat st;
	int error, code = 0;

	memset(out, 0, sizeof(*out));
	out->file.fd = -1;
	out->file.direct_fd = -1;
	out->room = UINT64_MAX;
	error = hr__os_open(directory_fd, name, O_RDONLY | O_NONBLOCK | (no_symlinks ? O_NOFOLLOW : 0), &out->file.fd);
	if (error)
		return fail_to_open(path, no_symlinks, error);
	error = hr__os_fstat(out->file.fd, &st);
	if (error)
		code = hr__fail_errno(&at, error, "look at");
	else if (!st.is_regular)
		code = hr__fail_at(&at, HR_E_IO, "%s is %s, not a regular file", path,
				   st.is_directory ? "a directory"
				   : st.is_block   ? "a block device"
						   : "a FIFO, a device or the like");
	if (!code) {
		out->path = hr__strdup(path);
		code = out->path ? 0 : HR_E_NOMEM;
	}
	if (code) {
		hr__source_close(out);
		return code;
	}
	describe(out, &st);
	return 0;
}

void hr__source_close(struct hr__source *source)
{
	if (source->ops) {
		source->ops->close(source);
	} else {
		hr__os_close(source->file.direct_fd);
		hr__os_close(source->file.fd);
	}
	hr__free(source->path);
	memset(source, 0, sizeof(*source));
	source->file.fd = -1;
	source->file.direct_fd = -1;
}

/* "2024-05-01 12:00:00.000000001 UTC" */
static const char *time_text(int64_t ns, char out[64])
{
	int64_t rest = ns % 1000000000;
	time_t seconds = (time_t)(ns / 1000000000);
	char date[32];
	struct tm parts;

	if (rest < 0) {
		rest += 1000000000;
		seconds--;
	}
	if (!gmtime_r(&seconds, &parts) || !strftime(date, sizeof(date), "%Y-%m-%d %H:%M:%S", &parts))
		date[0] = '\0';
	snprintf(out, 64, "%s.%09d UTC", date, (int)rest);
	return out;
}

static int fail_changed(const struct hr__source *source, const struct hr__identity *now)
{
	const struct hr__where at = {.stage = "read", .path = source->path, .offset = HR_NO_OFFSET};
	const struct hr__identity *was = &source->identity;
	char before[64], after[64];

	if (now->device != was->device || now->inode != was->inode)
		return hr__fail_at(&at, HR_E_CHANGED,
				   "%s was replaced while it was in use: it was inode %" PRIu64 " of device %" PRIu64
				   ", and is inode %" PRIu64 " of device %" PRIu64 "; open the model again",
				   source->path, was->inode, was->device, now->inode, now->device);
	if (now->bytes != was->bytes)
		return hr__fail_at(&at, HR_E_CHANGED,
				   "%s was changed while it was in use: its size was %" PRIu64 " bytes and is %" PRIu64
				   " now; open the model again",
				   source->path, was->bytes, now->bytes);
	if (now->mtime_ns != was->mtime_ns)
		return hr__fail_at(&at, HR_E_CHANGED,
				   "%s was written to while it was in use: its modification time was %s and is %s now; "
				   "open the model again",
				   source->path, time_text(was->mtime_ns, before), time_text(now->mtime_ns, after));
	return hr__fail_at(
		&at, HR_E_CHANGED,
		"%s was renamed, replaced, removed or had its mode changed while it was in use: its change time "
		"was %s and is %s now; open the model again",
		source->path, time_text(was->ctime_ns, before), time_text(now->ctime_ns, after));
}

int hr__source_check(const struct hr__source *source)
{
	int fd = source->file.fd >= 0 ? source->file.fd : source->file.direct_fd;
	struct hr__os_stat st;
	int error;

	if (source->ops)
		return source->ops->check(source);
	error = hr__os_fstat(fd, &st);
	if (error)
		return hr__fail_errno(
			&(struct hr__where){.stage = "read", .path = source->path, .offset = HR_NO_OFFSET}, error,
			"look at");
	if (st.identity.device == source->identity.device && st.identity.inode == source->identity.inode &&
	    st.identity.bytes == source->identity.bytes && st.identity.mtime_ns == source->identity.mtime_ns &&
	    st.identity.ctime_ns == source->identity.ctime_ns)
		return 0;
	return fail_changed(source, &st.identity);
}

int hr__source_prove(const struct hr__source *source, const void *bytes, size_t n)
{
	return source->ops ? source->ops->prove(source, bytes, n) : 0;
}

/* A read that only can go around the page cache: what is aligned goes straight to its place, the rest through memory
 * of our own. */
static int pread_direct(const struct hr__source *source, uint64_t offset, unsigned char *dst, size_t bytes, size_t *got)
{
	uint64_t align = hr__max_u64(source->file.offset_align, source->file.memory_align);
	size_t whole = (size_t)hr__round_down(bytes, align), part;
	void *bounce;
	int error = 0;

	*got = 0;
	if (whole && offset % align == 0 && (uintptr_t)dst % align == 0) {
		error = hr__os_pread_full(source->file.direct_fd, dst, whole, source->base + offset, got);
		if (error || *got < whole || whole == bytes)
			return error;
	}
	error = hr__os_map(BOUNCE_BYTES, &bounce);
	while (!error && *got < bytes) {
		uint64_t at = hr__round_down(offset + *got, align), lead = offset + *got - at;
		size_t want = (size_t)hr__min_u64(hr__round_up(lead + bytes - *got, align), BOUNCE_BYTES);

		error = hr__os_pread_full(source->file.direct_fd, bounce, want, source->base + at, &part);
		if (error || part <= lead)
			break;
		part = (size_t)hr__min_u64(part - lead, bytes - *got);
		memcpy(dst + *got, (unsigned char *)bounce + lead, part);
		*got += part;
	}
	hr__os_unmap(bounce, BOUNCE_BYTES);
	return error;
}

int hr__source_pread(const struct hr__source *source, uint64_t offset, void *dst, size_t bytes, size_t *got)
{
	struct hr__raw *raw = source->file.raw;

	if (raw) {
		int error = raw->ops->read(raw, source->base + offset, dst, bytes);

		*got = error ? 0 : bytes;
		return error;
	}
	if (source->file.fd < 0)
		return pread_direct(source, offset, dst, bytes, got);
	return hr__os_pread_full(source->file.fd, dst, bytes, source->base + offset, got);
}

static int fail_raw(const struct hr__source *source, struct hr__where *at, int error)
{
	int code;
	const char *why = source->file.raw->ops->explain(error, &code);

	at->system = error;
	return hr__fail_at(at, code, "%s: cannot read at %" PRIu64 ": %s", source->path, at->offset, why);
}

int hr__source_read(const struct hr__source *source, uint64_t offset, void *dst, size_t bytes)
{
	struct hr__where at = {.stage = "read", .path = source->path, .offset = offset};
	size_t got;
	int error, code;

	if (offset > source->bytes || bytes > source->bytes - offset)
		return hr__fail_at(&at, HR_E_OPTS, "%s: %zu bytes at %" PRIu64 " do not lie in its %" PRIu64 " bytes",
				   source->path, bytes, offset, source->bytes);
	error = hr__source_pread(source, offset, dst, bytes, &got);
	if (error && source->file.raw)
		return fail_raw(source, &at, error);
	if (error)
		return hr__fail_errno(&at, error, "read");
	if (got == bytes)
		return 0;
	code = hr__source_check(source); /* most likely truncated: then say that */
	if (code)
		return code;
	at.offset = offset + got;
	return hr__fail_at(&at, HR_E_SHORT,
			   "%s: storage gave %zu of %zu bytes at %" PRIu64 ", although the file has %" PRIu64,
			   source->path, got, bytes, offset, source->bytes);
}
