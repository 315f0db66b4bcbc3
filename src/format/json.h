/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A strict JSON pull parser over bytes in memory. The caller asks for what must come next, in the order of the text;
 * nothing is built, allocated or looked at twice, nesting needs no stack (skipping a value keeps 16 bits of one). RFC
 * 8259 to the letter: UTF-8 checked, lone surrogates refused, no BOM, integers exact to 2^64-1.
 *
 *     hr__json_start(&json, bytes, n, 0, "index");
 *     rc = hr__json_open(&json, HR__JSON_OBJECT, "the index");
 *     for (more = true; !rc && more;) {
 *             rc = hr__json_member(&json, &key, &more);
 *             if (!rc && more)
 *                     rc = hr__json_is(&key, "weight_map") ? read_map(&json) : hr__json_skip(&json);
 *     }
 *     if (!rc)
 *             rc = hr__json_end(&json);
 *
 * After a non-zero answer the parser must not be used again. Errors are HR_E_JSON (not JSON), HR_E_UTF8, HR_E_TYPE
 * (JSON, but not what was asked for) and HR_E_LIMIT (hr__json_skip only); each has the byte position in the file and
 * what is there. Duplicate keys are the caller's to find: only it has the memory for that.
 */
#ifndef HR_FORMAT_JSON_H
#define HR_FORMAT_JSON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define HR__JSON_MAX_SKIP_DEPTH  16
#define HR__JSON_MAX_SKIP_NUMBER 32 /* bytes of a number in a skipped value */
#define HR__JSON_MAX_SKIP_EXPONENT                                                                                     \
	200 /* so that no skipped number is beyond a double, which the official parser refuses */

struct hr__json {
	const uint8_t *start, *at, *end;
	uint64_t base;     /* position of `start` in the file */
	const char *stage; /* of errors: "header", "index" */
	bool is_fresh;     /* a container was just opened: no comma before its first item */
};

/* A string as it stands in the text, checked; it lives as long as the text does. */
struct hr__json_string {
	const uint8_t *raw; /* behind the opening quote */
	size_t raw_bytes;
	size_t bytes; /* decoded; equal to raw_bytes if and only if nothing is escaped: then `raw` is the string */
};

enum hr__json_kind {
	HR__JSON_OBJECT,
	HR__JSON_ARRAY,
	HR__JSON_STRING,
	HR__JSON_NUMBER,
	HR__JSON_LITERAL, /* true, false, null */
};

/* `base` is what to add to a position in `bytes` for one in the file; `stage` must outlive the parser. */
void hr__json_start(struct hr__json *json, const void *bytes, size_t n, uint64_t base, const char *stage);

/* In all of these, `what` names the value in messages ("dtype must be a string, ..."). */

/* Goes into an object or array. Then call hr__json_member() or hr__json_item() until *more is false: that left it
 * again. */
int hr__json_open(struct hr__json *json, enum hr__json_kind kind, const char *what);
/* Reads the next key and the colon; the value must be read next. */
int hr__json_member(struct hr__json *json, struct hr__json_string *key, bool *more);
/* Goes before the next item, which must be read next. */
int hr__json_item(struct hr__json *json, bool *more);
int hr__json_string(struct hr__json *json, const char *what, struct hr__json_string *out);
/* HR_E_TYPE for what is no integer (2.0 and 2e0 included), negative (-0 too) or above 2^64-1; the message says
 * which. */
int hr__json_u64(struct hr__json *json, const char *what, uint64_t *out);
/* If a null comes next, reads it and gives true; else nothing happens. */
bool hr__json_take_null(struct hr__json *json);
/* Reads a whole value of any kind, checking it. HR_E_LIMIT beyond the HR__JSON_MAX_SKIP_* limits. */
int hr__json_skip(struct hr__json *json);
/* Nothing but white space may be left. */
int hr__json_end(struct hr__json *json);

/* Decodes into `out`, which has room for string->bytes. No NUL is added. */
void hr__json_decode(const struct hr__json_string *string, char *out);
bool hr__json_is_escaped(const struct hr__json_string *string, const char *text, size_t length);
/* Whether the string, decoded, is this text (of at most 64 bytes). Inline, for texts that are constant. */
static inline bool hr__json_is(const struct hr__json_string *string, const char *text)
{
	size_t length = strlen(text);

	if (string->bytes != string->raw_bytes)
		return hr__json_is_escaped(string, text, length);
	return string->bytes == length && memcmp(string->raw, text, length) == 0;
}

/* The position in the file of a byte of the text; and of what comes next, white space passed over. */
uint64_t hr__json_position(const struct hr__json *json, const uint8_t *at);
uint64_t hr__json_next_position(struct hr__json *json);

/* Records an error at a byte of the text and returns `code`: "<message> at byte <position>, found <what is there>". */
int hr__json_fail(const struct hr__json *json, const uint8_t *at, int code, const char *format, ...)
	__attribute__((format(printf, 4, 5)));

#endif
