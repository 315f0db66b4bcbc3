/* SPDX-License-Identifier: Apache-2.0 */
#include "error.h"

#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

static _Thread_local struct hr__error_record last;

static void point_at_own_strings(struct hr__error_record *record)
{
	record->error.stage = record->stage;
	record->error.path = record->path;
	record->error.tensor = record->tensor;
	record->error.message = record->message;
}

/* A path too long for its field keeps its end, which says more than its beginning. */
static void copy_tail(char *out, size_t out_bytes, const char *text)
{
	size_t length = text ? strlen(text) : 0;

	if (length >= out_bytes) {
		text += length - out_bytes + 1;
		length = out_bytes - 1;
	}
	if (length)
		memmove(out, text, length);
	out[length] = '\0';
}

/* Length of the UTF-8 sequence at `text`, or 0 if there is none that may be printed as it is. */
static size_t printable_utf8(const unsigned char *text, size_t left)
{
	unsigned char b = text[0];
	size_t need = b < 0x80 ? 1 : b >= 0xf0 && b < 0xf5 ? 4 : b >= 0xe0 ? 3 : b >= 0xc2 ? 2 : 0;

	if (b < 0x20 || b == 0x7f || b == '"' || b == '\\' || b > 0xf4 || need == 0 || need > left)
		return 0;
	for (size_t i = 1; i < need; i++)
		if ((text[i] & 0xc0) != 0x80)
			return 0;
	if ((b == 0xe0 && text[1] < 0xa0) || (b == 0xf0 && text[1] < 0x90)) /* longer than need be */
		return 0;
	if ((b == 0xed && text[1] > 0x9f) || (b == 0xf4 && text[1] > 0x8f)) /* surrogates; beyond Unicode */
		return 0;
	if (need == 2 && b == 0xc2 && text[1] < 0xa0) /* C1 controls */
		return 0;
	if (need == 3 && b == 0xe2 &&
	    ((text[1] == 0x80 && text[2] >= 0x8b && text[2] <= 0xae) ||
	     (text[1] == 0x81 && text[2] >= 0xa0 && text[2] <= 0xaf))) /* bidi, zero width */
		return 0;
	return need;
}

const char *hr__escape(char *out, size_t out_bytes, const char *text, size_t text_len)
{
	size_t o = 0;

	if (text_len == HR_STRLEN)
		text_len = text ? strlen(text) : 0;
	for (size_t i = 0; i < text_len;) {
		size_t n = printable_utf8((const unsigned char *)text + i, text_len - i);
		size_t room = n ? n : 4;

		if (o + room + 4 > out_bytes) { /* "..." and the end */
			memcpy(out + o, "...", 3);
			o += 3;
			break;
		}
		if (n)
			memcpy(out + o, text + i, n);
		else
			snprintf(out + o, 5, "\\x%02x", (unsigned char)text[i]);
		o += room;
		i += n ? n : 1;
	}
	out[o] = '\0';
	return out;
}

static void fill(struct hr__error_record *record, const struct hr__where *where, int code, const char *format,
		 va_list args)
{
	char message[sizeof(record->message)];

	/* Formatted aside first: the arguments may point into this very record. */
	vsnprintf(message, sizeof(message), format, args);
	copy_tail(record->path, sizeof(record->path), where->path);
	hr__escape(record->tensor, sizeof(record->tensor), where->tensor, where->tensor ? where->tensor_len : 0);
	snprintf(record->stage, sizeof(record->stage), "%s", where->stage ? where->stage : "");
	memcpy(record->message, message, sizeof(message));
	record->error.code = code;
	record->error.system = where->system;
	record->error.offset = where->offset;
	point_at_own_strings(record);
}

int hr__record(int code, const char *format, ...)
{
	const struct hr__where nowhere = HR__NOWHERE;
	va_list args;

	va_start(args, format);
	fill(&last, &nowhere, code, format, args);
	va_end(args);
	return code;
}

int hr__record_at(const struct hr__where *where, int code, const char *format, ...)
{
	va_list args;

	va_start(args, format);
	fill(&last, where, code, format, args);
	va_end(args);
	return code;
}

void hr__error_fill(struct hr__error_record *record, const struct hr__where *where, int code, const char *format, ...)
{
	va_list args;

	va_start(args, format);
	fill(record, where, code, format, args);
	va_end(args);
}

int hr__record_errno(const struct hr__where *where, int errno_value, const char *doing)
{
	struct hr__where at = *where;
	char text[128];
	int code = errno_value == ENOENT ? HR_E_NOTFOUND : errno_value == ENOMEM ? HR_E_NOMEM : HR_E_IO;

	at.system = errno_value;
	return hr__fail_at(&at, code, "cannot %s%s%s: %s", doing, at.path ? " " : "", at.path ? at.path : "",
			   strerror_r(errno_value, text, sizeof(text)));
}

int hr__record_nomem(size_t bytes)
{
	return hr__fail(HR_E_NOMEM, "out of host memory: %zu bytes could not be allocated", bytes);
}

int hr__error_locate(const char *stage, const char *path, const char *tensor, size_t tensor_len)
{
	if (path && !last.path[0]) {
		char message[sizeof(last.message)];

		memcpy(message, last.message, sizeof(message));
		copy_tail(last.path, sizeof(last.path), path);
		snprintf(last.message, sizeof(last.message), "%s: %.*s", last.path,
			 (int)(sizeof(last.message) - sizeof(last.path) - 3), message);
	}
	if (tensor && !last.tensor[0])
		hr__escape(last.tensor, sizeof(last.tensor), tensor, tensor_len);
	if (stage && !last.stage[0])
		snprintf(last.stage, sizeof(last.stage), "%s", stage);
	point_at_own_strings(&last);
	return last.error.code;
}

void hr__error_save(struct hr__error_record *record)
{
	*record = last;
	point_at_own_strings(record);
}

int hr__error_restore(const struct hr__error_record *record)
{
	last = *record;
	point_at_own_strings(&last);
	return last.error.code;
}

const struct hr_error *hr_error_last(void)
{
	if (last.error.code == HR_OK)
		last.error.offset = HR_NO_OFFSET;
	point_at_own_strings(&last);
	return &last.error;
}

static const struct {
	int code;
	const char *name, *text;
} codes[] = {{HR_OK, "HR_OK", "success"},
#define HR__ROW(name, number, text) {name, #name, text},
	     HR_ERROR_CODES(HR__ROW)
#undef HR__ROW
};

const char *hr_strerror(int code)
{
	for (size_t i = 0; i < sizeof(codes) / sizeof(codes[0]); i++)
		if (codes[i].code == code)
			return codes[i].text;
	return "unknown error code";
}

const char *hr_error_name(int code)
{
	for (size_t i = 0; i < sizeof(codes) / sizeof(codes[0]); i++)
		if (codes[i].code == code)
			return codes[i].name;
	return "HR_E_?";
}
