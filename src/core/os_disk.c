/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The seam to the operating system, second half: what a store needs beside reading. Writes, flushes, locks, new files,
 * and what a block device is. Same rules as in os.c: 0 or an errno value, EINTR handled here, each call can be made to
 * fail in a test.
 */
#include "os.h"

#include "arith.h"
#include "fault.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#define FAIL_IF_ARMED(point) HR__FAIL_IF_ARMED(point)

int hr__os_pwrite_full(int fd, const void *buffer, size_t bytes, uint64_t offset, size_t *done)
{
	*done = 0;
	while (*done < bytes) {
		ssize_t n;

		FAIL_IF_ARMED("pwrite");
		n = pwrite(fd, (const char *)buffer + *done, bytes - *done, (off_t)(offset + *done));
		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return n < 0 ? errno : ENOSPC;
		*done += (size_t)n;
	}
	return 0;
}

int hr__os_datasync(int fd)
{
	FAIL_IF_ARMED("fdatasync");
	return fdatasync(fd) ? errno : 0;
}

int hr__os_create(int directory_fd, const char *path, int flags, int *fd)
{
	*fd = -1;
	FAIL_IF_ARMED("create");
	do {
		*fd = openat(directory_fd, path, flags | O_CREAT | O_CLOEXEC | O_NOCTTY, 0666);
	} while (*fd < 0 && errno == EINTR);
	return *fd < 0 ? errno : 0;
}

int hr__os_mkdir(int directory_fd, const char *path)
{
	FAIL_IF_ARMED("mkdir");
	return mkdirat(directory_fd, path, 0777) ? errno : 0;
}

int hr__os_unlink(int directory_fd, const char *path)
{
	return unlinkat(directory_fd, path, 0) ? errno : 0;
}

int hr__os_sync_parent(const char *path)
{
	const char *slash = strrchr(path, '/');
	size_t length = slash ? (size_t)(slash - path) : 0;
	char directory[4096];
	int error, fd;

	if (length >= sizeof(directory))
		return ENAMETOOLONG;
	memcpy(directory, path, length);
	directory[length] = '\0';
	error = hr__os_open(AT_FDCWD, length ? directory : slash ? "/" : ".", O_RDONLY | O_DIRECTORY, &fd);
	if (error)
		return error;
	error = HR__FAULT("fsync");
	if (!error && fsync(fd))
		error = errno;
	hr__os_close(fd);
	return error;
}

static bool has_room(int fd, const struct stat *st, uint64_t bytes)
{
	uint64_t has = (uint64_t)st->st_blocks * 512;
	struct statvfs fs;

	return bytes <= has || fstatvfs(fd, &fs) || (uint64_t)fs.f_bfree * fs.f_frsize >= bytes - has;
}

int hr__os_allocate(int fd, uint64_t bytes)
{
	struct stat st;
	int error;

	FAIL_IF_ARMED("fallocate");
	if (fstat(fd, &st))
		return errno;
	if (!has_room(fd, &st, bytes))
		return ENOSPC;
	do {
		error = posix_fallocate(fd, 0, (off_t)bytes);
	} while (error == EINTR);
	if (error && ftruncate(fd, st.st_size)) /* gives back what it took beyond the end before it failed */
		return errno;
	return error;
}

int hr__os_reopen(int fd, int flags, int *out)
{
	char path[64];

	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	return hr__os_open(AT_FDCWD, path, flags, out);
}

int hr__os_lock(int fd, enum hr__os_lock kind, uint64_t at, uint64_t bytes)
{
	struct flock lock = {
		.l_type = kind == HR__OS_UNLOCK        ? F_UNLCK
			  : kind == HR__OS_LOCK_SHARED ? F_RDLCK
						       : F_WRLCK,
		.l_whence = SEEK_SET,
		.l_start = (off_t)at,
		.l_len = (off_t)bytes,
	};

	FAIL_IF_ARMED("lock");
	if (fcntl(fd, F_OFD_SETLK, &lock) == 0)
		return 0;
	return errno == EACCES ? EAGAIN : errno;
}

int hr__os_lock_lowest(int fd, uint64_t at, uint64_t bytes, uint64_t *lowest)
{
	uint64_t end = bytes ? at + bytes : (uint64_t)INT64_MAX;

	*lowest = UINT64_MAX;
	FAIL_IF_ARMED("lock_lowest");
	/* The kernel names any lock that is in the way: what lies before it is asked again until nothing does. */
	while (at < end) {
		struct flock lock = {
			.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)at, .l_len = (off_t)(end - at)};

		if (fcntl(fd, F_OFD_GETLK, &lock))
			return errno;
		if (lock.l_type == F_UNLCK)
			break;
		*lowest = hr__max_u64((uint64_t)lock.l_start, at);
		end = *lowest;
	}
	return 0;
}

int hr__os_block_ask(int fd, struct hr__os_block *out)
{
	unsigned physical = 0;
	int logical = 0, read_only = 0;

	memset(out, 0, sizeof(*out));
	FAIL_IF_ARMED("block_ask");
	if (ioctl(fd, BLKSSZGET, &logical) || ioctl(fd, BLKROGET, &read_only))
		return errno;
	if (ioctl(fd, BLKPBSZGET, &physical) == 0)
		out->physical_bytes = physical;
#ifdef BLKGETDISKSEQ
	if (ioctl(fd, BLKGETDISKSEQ, &out->sequence))
		out->sequence = 0; /* before Linux 5.15 */
#endif
	out->logical_bytes = (uint32_t)logical;
	out->is_read_only = read_only != 0;
	return 0;
}
