/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A kernel with modules and udev, for programs that look for their files: where HR_FAKE_ROOT names a folder, paths
 * that it has are taken from there, and a path that it has with ".not" behind it is not there. Part of every test
 * program (whose symbols libraries see), or preloaded.
 */
#undef _FILE_OFFSET_BITS /* here fopen and fopen64 are two functions */
#undef _FORTIFY_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* `path`, or where it is in the folder. */
static const char *redirect(const char *path, char *out, size_t out_bytes)
{
	int (*real)(const char *, int);
	const char *root = getenv("HR_FAKE_ROOT");
	void *address;

	if (!root || path[0] != '/' || snprintf(out, out_bytes, "%s%s", root, path) >= (int)out_bytes)
		return path;
	address = dlsym(RTLD_NEXT, "access");
	memcpy(&real, &address, sizeof(real));
	if (real(out, F_OK) == 0)
		return out;
	snprintf(out, out_bytes, "%s%s.not", root, path);
	return real(out, F_OK) == 0 ? "/nowhere" : path;
}

int access(const char *path, int mode)
{
	int (*real)(const char *, int);
	void *address = dlsym(RTLD_NEXT, "access");
	char other[4096];

	memcpy(&real, &address, sizeof(real));
	return real(redirect(path, other, sizeof(other)), mode);
}

static FILE *open_stream(const char *symbol, const char *path, const char *mode)
{
	FILE *(*real)(const char *, const char *);
	void *address = dlsym(RTLD_NEXT, symbol);
	char other[4096];

	memcpy(&real, &address, sizeof(real));
	return real(redirect(path, other, sizeof(other)), mode);
}

FILE *fopen(const char *path, const char *mode)
{
	return open_stream("fopen", path, mode);
}

FILE *fopen64(const char *path, const char *mode);
FILE *fopen64(const char *path, const char *mode)
{
	return open_stream("fopen64", path, mode);
}
