/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Preloaded into the command to show that a comparison can fail: one of its two ways to a file is given "<file>.other"
 * where there is one. The comparison opens files by path with open(), the library with openat(): HR_REDIRECT=openat
 * has the library load other bytes than those that are expected, whatever its engine; otherwise the comparison
 * expects other bytes than those that are loaded.
 */
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int open(const char *path, int flags, ...);
int open64(const char *path, int flags, ...);
int openat(int directory_fd, const char *path, int flags, ...);
int openat64(int directory_fd, const char *path, int flags, ...);

static int is_library_misled(void)
{
	const char *which = getenv("HR_REDIRECT");

	return which && strcmp(which, "openat") == 0;
}

static mode_t mode_of(int flags, va_list list)
{
	return flags & O_CREAT ? va_arg(list, mode_t) : 0;
}

static int open_other(const char *symbol, const char *path, int flags, mode_t mode)
{
	int (*real)(const char *, int, ...);
	void *address = dlsym(RTLD_NEXT, symbol);
	char other[4096];

	memcpy(&real, &address, sizeof(real));
	snprintf(other, sizeof(other), "%s.other", path);
	return real(!is_library_misled() && access(other, R_OK) == 0 ? other : path, flags, mode);
}

static int openat_other(const char *symbol, int directory_fd, const char *path, int flags, mode_t mode)
{
	int (*real)(int, const char *, int, ...);
	void *address = dlsym(RTLD_NEXT, symbol);
	char other[4096];

	memcpy(&real, &address, sizeof(real));
	snprintf(other, sizeof(other), "%s.other", path);
	if (is_library_misled() && faccessat(directory_fd, other, R_OK, 0) == 0)
		path = other;
	return real(directory_fd, path, flags, mode);
}

int open(const char *path, int flags, ...)
{
	va_list list;
	mode_t mode;

	va_start(list, flags);
	mode = mode_of(flags, list);
	va_end(list);
	return open_other("open", path, flags, mode);
}

int open64(const char *path, int flags, ...)
{
	va_list list;
	mode_t mode;

	va_start(list, flags);
	mode = mode_of(flags, list);
	va_end(list);
	return open_other("open64", path, flags, mode);
}

int openat(int directory_fd, const char *path, int flags, ...)
{
	va_list list;
	mode_t mode;

	va_start(list, flags);
	mode = mode_of(flags, list);
	va_end(list);
	return openat_other("openat", directory_fd, path, flags, mode);
}

int openat64(int directory_fd, const char *path, int flags, ...)
{
	va_list list;
	mode_t mode;

	va_start(list, flags);
	mode = mode_of(flags, list);
	va_end(list);
	return openat_other("openat64", directory_fd, path, flags, mode);
}
