/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory of the command. Nothing here is worth going on without: when memory is out, the command says so
 * and ends with status 1. Reads in flight end with the process. The library's own memory is not made here.
 */
#include "cli.h"

#include <stdarg.h>
#include <stdlib.h>

static void *checked(void *block, size_t bytes)
{
	if (!block && bytes) {
		fprintf(stderr, "headrace: out of memory: %zu bytes were wanted\n", bytes);
		exit(CLI_BAD);
	}
	return block;
}

void *cli_alloc(size_t n, size_t bytes)
{
	if (!n)
		n = 1;
	return checked(calloc(n, bytes), n * bytes);
}

void *cli_grow(void *block, size_t n, size_t bytes)
{
	return checked(reallocarray(block, n, bytes), n * bytes);
}

char *cli_text(const char *format, ...)
{
	va_list list;
	char *text = NULL;

	va_start(list, format);
	if (vasprintf(&text, format, list) < 0)
		text = NULL;
	va_end(list);
	return checked(text, 1);
}

void cli_free(void *block)
{
	free(block);
}
