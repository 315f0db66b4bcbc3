/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Errors. A failure is recorded once, where it is detected, with its values; callers hand the code up
 * unchanged. The record is thread-local, so a loader's thread never makes one: it puts code, position and
 * the system's code into its request, and the job turns the first of those into an error of its own. A
 * thread that helps to open a model saves its record, and the caller makes that its own.
 *
 * Usage, at the place of detection:
 *
 *     return hr__fail(HR_E_BOUNDS, "...ends at %" PRIu64 ", the file has %" PRIu64, end, size);
 *     return hr__fail_at(&(struct hr__where){.stage = "read", .path = path, .offset = off}, HR_E_IO, ...);
 */
#ifndef HR_CORE_ERROR_H
#define HR_CORE_ERROR_H

#include "headrace.h"

#include <inttypes.h>

/* Where something went wrong. Zero means "does not apply" except for `offset`: HR_NO_OFFSET. */
struct hr__where {
	const char *stage;
	const char *path;
	const char *tensor;
	size_t tensor_len; /* HR_STRLEN allowed */
	uint64_t offset;
	int32_t system;
};
#define HR__NOWHERE {.offset = HR_NO_OFFSET}

/* A whole error, with the memory of its strings: what a thread and a failed job each keep one of. */
struct hr__error_record {
	struct hr_error error;
	char stage[16];
	char path[512];   /* the tail, if it is longer */
	char tensor[256]; /* control bytes escaped; shortened with "..." */
	char message[1024];
};

/* Makes the thread's last error; gives `code`. The message is one sentence without a newline. */
#define hr__fail(...)    hr__failed(hr__record(__VA_ARGS__))
#define hr__fail_at(...) hr__failed(hr__record_at(__VA_ARGS__))
/* As hr__fail_at() for a system call: code from errno_value (ENOENT -> HR_E_NOTFOUND, ENOMEM -> HR_E_NOMEM, else
 * HR_E_IO), message "cannot <doing> <path>: <strerror>". */
#define hr__fail_errno(...)   hr__failed(hr__record_errno(__VA_ARGS__))
#define hr__fail_nomem(bytes) hr__failed(hr__record_nomem(bytes))

/* The functions behind them. hr__failed() is here so that a compiler sees what it cannot know of a call: a failure
 * is not 0. */
int hr__record(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));
int hr__record_at(const struct hr__where *where, int code, const char *format, ...)
	__attribute__((format(printf, 3, 4)));
int hr__record_errno(const struct hr__where *where, int errno_value, const char *doing);
int hr__record_nomem(size_t bytes);
static inline int hr__failed(int code)
{
	return code ? code : HR_E_IO;
}

/* Adds what the place of detection did not know (path, tensor, a stage) to the thread's last error, where those are
 * still empty, and puts "<path>: " before the message if the path was. Returns its code. */
int hr__error_locate(const char *stage, const char *path, const char *tensor, size_t tensor_len);

/* Copies the thread's last error, and makes a copy the thread's last error; the latter returns its code. */
void hr__error_save(struct hr__error_record *record);
int hr__error_restore(const struct hr__error_record *record);
/* The same by value: fills a record without touching the thread's. */
void hr__error_fill(struct hr__error_record *record, const struct hr__where *where, int code, const char *format, ...)
	__attribute__((format(printf, 4, 5)));

/* Writes `text` with control bytes, quotes and invalid UTF-8 escaped (\n, \x1b, \u202e style for bidi controls),
 * shortened to fit. Always terminates. Returns `out`. For names and paths in messages. */
const char *hr__escape(char *out, size_t out_bytes, const char *text, size_t text_len);

#endif
