/* SPDX-License-Identifier: Apache-2.0 */
#include "mem.h"

#include "arith.h"
#include "error.h"
#include "fault.h"
#include "os.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LARGE_BYTES ((size_t)2 << 20)

/* Large blocks are tables and texts that are written from end to end: in huge pages that costs a quarter. */
static void *checked(void *block, size_t bytes)
{
	if (!block)
		hr__fail_nomem(bytes);
	else if (bytes >= LARGE_BYTES)
		hr__os_wish_huge(block, bytes);
	return block;
}

void *hr__malloc(size_t bytes)
{
	return checked(HR__FAULT("malloc") ? NULL : malloc(bytes ? bytes : 1), bytes);
}

void *hr__calloc(size_t n, size_t bytes)
{
	return checked(HR__FAULT("malloc") ? NULL : calloc(n ? n : 1, bytes ? bytes : 1), n * bytes);
}

void *hr__realloc(void *block, size_t n, size_t bytes)
{
	size_t total;

	if (!hr__mul_size(n, bytes, &total)) {
		hr__fail_nomem(SIZE_MAX);
		return NULL;
	}
	return checked(HR__FAULT("malloc") ? NULL : realloc(block, total ? total : 1), total);
}

char *hr__strndup(const char *text, size_t length)
{
	char *copy = hr__malloc(length + 1);

	if (!copy)
		return NULL;
	memcpy(copy, text, length);
	copy[length] = '\0';
	return copy;
}

char *hr__strdup(const char *text)
{
	return hr__strndup(text, strlen(text));
}

char *hr__format(const char *format, ...)
{
	va_list args;
	char *text;
	int length;

	va_start(args, format);
	length = vsnprintf(NULL, 0, format, args);
	va_end(args);
	if (length < 0)
		return NULL;
	text = hr__malloc((size_t)length + 1);
	if (!text)
		return NULL;
	va_start(args, format);
	vsnprintf(text, (size_t)length + 1, format, args);
	va_end(args);
	return text;
}

void hr__free(void *block)
{
	free(block);
}

int hr__opts_copy(void *out, size_t out_bytes, const void *in, const char *what)
{
	size_t size;

	memset(out, 0, out_bytes);
	if (!in)
		return 0;
	memcpy(&size, in, sizeof(size));
	if (size < sizeof(size) || size > 4096)
		return hr__fail(HR_E_OPTS, "%s.size is %zu: set the struct up with its _INIT macro", what, size);
	for (size_t i = out_bytes; i < size; i++)
		if (((const unsigned char *)in)[i])
			return hr__fail(HR_E_OPTS,
					"%s has a field at byte %zu that this version of headrace does not know", what,
					i);
	memcpy(out, in, size < out_bytes ? size : out_bytes);
	return 0;
}

int hr__out_copy(void *out, const void *from, size_t from_bytes, const char *what)
{
	size_t size;

	if (!out)
		return hr__fail(HR_E_OPTS, "%s: the result has nowhere to go (NULL)", what);
	memcpy(&size, out, sizeof(size));
	if (size < sizeof(size) || size > 4096)
		return hr__fail(HR_E_OPTS, "%s.size is %zu: set the struct up with its _INIT macro", what, size);
	memset((unsigned char *)out + sizeof(size), 0, size - sizeof(size));
	if (from_bytes > sizeof(size))
		memcpy((unsigned char *)out + sizeof(size), (const unsigned char *)from + sizeof(size),
		       (size < from_bytes ? size : from_bytes) - sizeof(size));
	return 0;
}
