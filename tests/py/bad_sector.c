/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Preloaded into Python, it makes every read at a position fail with EIO that takes in byte HR_BAD_SECTOR of whatever
 * file: a disk with one sector that cannot be read. Reads before and behind it are good, and so are reads that have no
 * position, which Python itself does.
 */
#include <dlfcn.h>
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>

ssize_t pread64(int fd, void *buffer, size_t bytes, off_t offset);
ssize_t preadv64(int fd, const struct iovec *iov, int n, off_t offset);
ssize_t preadv64v2(int fd, const struct iovec *iov, int n, off_t offset, int flags);

static int is_bad(off_t offset, size_t bytes)
{
	const char *text = getenv("HR_BAD_SECTOR");
	uint64_t bad = text ? strtoull(text, NULL, 10) : 0;

	return text && bad >= (uint64_t)offset && bad - (uint64_t)offset < bytes;
}

static size_t total(const struct iovec *iov, int n)
{
	size_t bytes = 0;

	for (int i = 0; i < n; i++)
		bytes += iov[i].iov_len;
	return bytes;
}

ssize_t pread64(int fd, void *buffer, size_t bytes, off_t offset)
{
	ssize_t (*real)(int, void *, size_t, off_t);
	void *address = dlsym(RTLD_NEXT, "pread64");

	memcpy(&real, &address, sizeof(real));
	errno = EIO;
	return is_bad(offset, bytes) ? -1 : real(fd, buffer, bytes, offset);
}

ssize_t preadv64(int fd, const struct iovec *iov, int n, off_t offset)
{
	ssize_t (*real)(int, const struct iovec *, int, off_t);
	void *address = dlsym(RTLD_NEXT, "preadv64");

	memcpy(&real, &address, sizeof(real));
	errno = EIO;
	return is_bad(offset, total(iov, n)) ? -1 : real(fd, iov, n, offset);
}

ssize_t preadv64v2(int fd, const struct iovec *iov, int n, off_t offset, int flags)
{
	ssize_t (*real)(int, const struct iovec *, int, off_t, int);
	void *address = dlsym(RTLD_NEXT, "preadv64v2");

	memcpy(&real, &address, sizeof(real));
	errno = EIO;
	return is_bad(offset, total(iov, n)) ? -1 : real(fd, iov, n, offset, flags);
}
