/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Preloaded into the command to show that --verify can fail: open(2) of a file is given "<file>.other" where
 * there is one. The comparison opens files by path with open(); the library uses openat(), so that the load
 * itself sees the true file.
 */
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

int open(const char *path, int flags, ...);
int open64(const char *path, int flags, ...);

static int open_other(const char *symbol, const char *path, int flags, mode_t mode)
{
	int (*real)(const char *, int, ...);
	void *address = dlsym(RTLD_NEXT, symbol);
	char other[4096];

	memcpy(&real, &address, sizeof(real));
	snprintf(other, sizeof(other), "%s.other", path);
	return real(access(other, R_OK) == 0 ? other : path, flags, mode);
}

static mode_t mode_of(int flags, va_list list)
{
	return flags & O_CREAT ? va_arg(list, mode_t) : 0;
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
