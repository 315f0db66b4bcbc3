/* SPDX-License-Identifier: Apache-2.0 */
/*
 * All small host memory. Each allocator records HR_E_NOMEM as the thread's last error when it gives NULL, so callers
 * just return HR_E_NOMEM. A loader's threads do not allocate.
 */
#ifndef HR_CORE_MEM_H
#define HR_CORE_MEM_H

#include <stddef.h>

void *hr__malloc(size_t bytes);
void *hr__calloc(size_t n, size_t bytes);
/* As realloc() for n * bytes, checked; the old block stays good on failure. */
void *hr__realloc(void *block, size_t n, size_t bytes);
char *hr__strdup(const char *text);
char *hr__strndup(const char *text, size_t length);
/* printf into new memory. */
char *hr__format(const char *format, ...) __attribute__((format(printf, 1, 2)));
void hr__free(void *block);

/* Copies an option struct that a caller of another version passed: shorter is zero-filled; longer must be zero
 * beyond what we know, else HR_E_OPTS. `in` may be NULL (all zero). `what` names it in the message. */
int hr__opts_copy(void *out, size_t out_bytes, const void *in, const char *what);
/* The other way round for output structs: writes min(own, caller's) bytes of `from` and keeps the caller's size
 * field. */
int hr__out_copy(void *out, const void *from, size_t from_bytes, const char *what);

#endif
