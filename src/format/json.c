/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The pull parser. `at` never passes `end`, every byte is looked at once (a short quote in an error apart), and each
 * function leaves `at` behind what it read. Strings are checked where they are met and decoded only if somebody wants
 * them: most are plain ASCII, which is passed over eight bytes at a time.
 */
#include "json.h"

#include "core/arith.h"
#include "core/error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define ONES  UINT64_C(0x0101010101010101)
#define HIGHS UINT64_C(0x8080808080808080)

void hr__json_start(struct hr__json *json, const void *bytes, size_t n, uint64_t base, const char *stage)
{
	*json = (struct hr__json){
		.start = bytes, .at = bytes, .end = (const uint8_t *)bytes + n, .base = base, .stage = stage};
}

uint64_t hr__json_position(const struct hr__json *json, const uint8_t *at)
{
	return json->base + (uint64_t)(at - json->start);
}

/* ---- errors ---- */

/* Cut at a character border, so that the end of the quote is not shown as broken UTF-8. */
static size_t quote_bytes(const uint8_t *at, size_t left)
{
	size_t n = left < 20 ? left : 20;

	while (n > 17 && n < left && (at[n] & 0xc0) == 0x80)
		n--;
	return n;
}

/* Escapes what must not reach a terminal; quotes and backslashes stay, they are what JSON is made of. */
static const char *quote_of(char *out, size_t out_bytes, const uint8_t *at, size_t n)
{
	const char *from;
	char *to = out;

	hr__escape(out, out_bytes, (const char *)at, n);
	for (from = out; *from; from++) {
		bool is_ours = strncmp(from, "\\x22", 4) == 0 || strncmp(from, "\\x5c", 4) == 0;

		*to++ = !is_ours ? *from : from[2] == '2' ? '"' : '\\';
		from += is_ours ? 3 : 0;
	}
	*to = '\0';
	return out;
}

int hr__json_fail(const struct hr__json *json, const uint8_t *at, int code, const char *format, ...)
{
	const struct hr__where where = {.stage = json->stage, .offset = hr__json_position(json, at)};
	size_t left = (size_t)(json->end - at), n = quote_bytes(at, left);
	char message[700], quote[100];
	va_list args;

	va_start(args, format);
	vsnprintf(message, sizeof(message), format, args);
	va_end(args);
	if (left == 0)
		return hr__fail_at(&where, code, "%s at byte %" PRIu64 ", found the end of the %s", message,
				   where.offset, json->stage);
	return hr__fail_at(&where, code, "%s at byte %" PRIu64 ", found `%s`%s", message, where.offset,
			   quote_of(quote, sizeof(quote), at, n), n < left ? "..." : "");
}

/* ---- characters ---- */

static inline void skip_space(struct hr__json *json)
{
	while (json->at < json->end &&
	       (*json->at == ' ' || *json->at == '\n' || *json->at == '\r' || *json->at == '\t'))
		json->at++;
}

static inline bool is_digit(const uint8_t *at, const uint8_t *end)
{
	return at < end && *at >= '0' && *at <= '9';
}

static inline bool is_tail(const uint8_t *at, uint8_t low, uint8_t high)
{
	return *at >= low && *at <= high;
}

/* Length of the well-formed UTF-8 sequence of two to four bytes at `at`, or 0 (table 3-7 of the Unicode standard). */
static size_t utf8_sequence(const uint8_t *at, const uint8_t *end)
{
	size_t left = (size_t)(end - at);
	uint8_t b = at[0];

	if (b >= 0xc2 && b <= 0xdf)
		return left >= 2 && is_tail(at + 1, 0x80, 0xbf) ? 2 : 0;
	if (b >= 0xe0 && b <= 0xef)
		return left >= 3 && is_tail(at + 1, b == 0xe0 ? 0xa0 : 0x80, b == 0xed ? 0x9f : 0xbf) &&
				       is_tail(at + 2, 0x80, 0xbf)
			       ? 3
			       : 0;
	if (b >= 0xf0 && b <= 0xf4)
		return left >= 4 && is_tail(at + 1, b == 0xf0 ? 0x90 : 0x80, b == 0xf4 ? 0x8f : 0xbf) &&
				       is_tail(at + 2, 0x80, 0xbf) && is_tail(at + 3, 0x80, 0xbf)
			       ? 4
			       : 0;
	return 0;
}

/* A byte that cannot stand here: not even UTF-8, or not JSON. */
static int fail_syntax(const struct hr__json *json, const char *expected)
{
	const uint8_t *at = json->at;

	if (at < json->end && *at >= 0x80 && utf8_sequence(at, json->end) == 0)
		return hr__json_fail(json, at, HR_E_UTF8, "the %s is not UTF-8", json->stage);
	if (at == json->start && json->end - at >= 3 && memcmp(at, "\xef\xbb\xbf", 3) == 0)
		return hr__json_fail(json, at, HR_E_JSON, "expected %s (not a byte order mark)", expected);
	if (at < json->end && *at == 0)
		return hr__json_fail(json, at, HR_E_JSON,
				     "expected %s (padding must be spaces, but there are NUL bytes)", expected);
	return hr__json_fail(json, at, HR_E_JSON, "expected %s", expected);
}

/* ---- strings ---- */

/* The first byte from `at` on that is not plain: a quote, a backslash, a control byte or the start of a UTF-8
 * sequence. */
static const uint8_t *plain_end(const uint8_t *at, const uint8_t *end)
{
	for (; end - at >= 8; at += 8) {
		uint64_t word, quote, slash, stop;

		memcpy(&word, at, 8);
		if (__BYTE_ORDER__ == __ORDER_BIG_ENDIAN__)
			word = __builtin_bswap64(word);
		quote = word ^ (ONES * '"');
		slash = word ^ (ONES * '\\');
		/* Borrows can mark bytes wrongly, but only behind a byte that is marked rightly. */
		stop = ((quote - ONES) | (slash - ONES) | (word - ONES * 0x20) | word) & HIGHS;
		if (stop)
			return at + __builtin_ctzll(stop) / 8;
	}
	while (at < end && *at >= 0x20 && *at < 0x80 && *at != '"' && *at != '\\')
		at++;
	return at;
}

static int hex_digit(uint8_t c)
{
	if (c >= '0' && c <= '9')
		return c - '0';
	c |= 0x20;
	return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* The four digits of a \u escape; -1 if they are not there. */
static int32_t hex4(const uint8_t *at, const uint8_t *end)
{
	int32_t value = 0;

	if (end - at < 4)
		return -1;
	for (int i = 0; i < 4; i++) {
		int digit = hex_digit(at[i]);

		if (digit < 0)
			return -1;
		value = value * 16 + digit;
	}
	return value;
}

static bool is_high(int32_t unit)
{
	return unit >= 0xd800 && unit <= 0xdbff;
}

static bool is_low(int32_t unit)
{
	return unit >= 0xdc00 && unit <= 0xdfff;
}

/*
 * The escape at `at` (a backslash): its length in the text, or 0 if it is none. *point is the character. Checking and
 * decoding both use this, so they cannot disagree.
 */
static size_t escape(const uint8_t *at, const uint8_t *end, uint32_t *point)
{
	static const char letters[] = "\"\\/bfnrt", meanings[] = "\"\\/\b\f\n\r\t";
	const char *letter;
	int32_t high, low;

	if (end - at < 2)
		return 0;
	letter = at[1] ? strchr(letters, at[1]) : NULL;
	if (letter) {
		*point = (uint32_t)meanings[letter - letters];
		return 2;
	}
	high = at[1] == 'u' ? hex4(at + 2, end) : -1;
	if (high < 0 || is_low(high))
		return 0;
	*point = (uint32_t)high;
	if (!is_high(high))
		return 6;
	low = end - at >= 12 && at[6] == '\\' && at[7] == 'u' ? hex4(at + 8, end) : -1;
	if (!is_low(low))
		return 0;
	*point = 0x10000 + (((uint32_t)high - 0xd800) << 10) + ((uint32_t)low - 0xdc00);
	return 12;
}

static size_t point_bytes(uint32_t point)
{
	return point < 0x80 ? 1 : point < 0x800 ? 2 : point < 0x10000 ? 3 : 4;
}

static char *put_point(char *out, uint32_t point)
{
	size_t n = point_bytes(point);
	static const uint8_t lead[] = {0, 0, 0xc0, 0xe0, 0xf0};

	for (size_t i = n - 1; i > 0; i--, point >>= 6)
		out[i] = (char)(0x80 | (point & 0x3f));
	out[0] = (char)(lead[n] | point);
	return out + n;
}

static int fail_escape(const struct hr__json *json, const uint8_t *at)
{
	if (json->end - at >= 6 && at[1] == 'u' && hex4(at + 2, json->end) >= 0)
		return hr__json_fail(json, at, HR_E_JSON, "half of a surrogate pair in a string");
	return hr__json_fail(json, at, HR_E_JSON, "an escape that JSON does not have, in a string");
}

/* The rest of a string that is not all plain; `at` is where the plain part ends. */
static int string_tail(struct hr__json *json, const uint8_t *at, struct hr__json_string *out)
{
	size_t saved = 0, n;
	uint32_t point;

	for (;; at = plain_end(at, json->end)) {
		if (at == json->end)
			return hr__json_fail(json, out->raw - 1, HR_E_JSON, "a string without an end");
		if (*at == '"')
			break;
		if (*at < 0x20)
			return hr__json_fail(json, at, HR_E_JSON, "a control byte in a string (it must be escaped)");
		if (*at == '\\') {
			n = escape(at, json->end, &point);
			if (n == 0)
				return fail_escape(json, at);
			saved += n - point_bytes(point);
		} else {
			n = utf8_sequence(at, json->end);
			if (n == 0)
				return hr__json_fail(json, at, HR_E_UTF8, "the %s is not UTF-8", json->stage);
		}
		at += n;
	}
	out->raw_bytes = (size_t)(at - out->raw);
	out->bytes = out->raw_bytes - saved;
	json->at = at + 1;
	return 0;
}

/* `at` is the opening quote. */
static int read_string(struct hr__json *json, struct hr__json_string *out)
{
	const uint8_t *at;

	out->raw = json->at + 1;
	at = plain_end(out->raw, json->end);
	if (at == json->end || *at != '"')
		return string_tail(json, at, out);
	out->raw_bytes = out->bytes = (size_t)(at - out->raw);
	json->at = at + 1;
	return 0;
}

void hr__json_decode(const struct hr__json_string *string, char *out)
{
	const uint8_t *at = string->raw, *end = at + string->raw_bytes;

	if (string->bytes == string->raw_bytes) {
		if (string->bytes)
			memcpy(out, string->raw, string->bytes);
		return;
	}
	while (at < end) {
		uint32_t point = 0;

		if (*at != '\\') {
			*out++ = (char)*at++;
			continue;
		}
		at += escape(at, end, &point);
		out = put_point(out, point);
	}
}

bool hr__json_is_escaped(const struct hr__json_string *string, const char *text, size_t length)
{
	char decoded[64];

	if (string->bytes != length || length > sizeof(decoded))
		return false;
	hr__json_decode(string, decoded);
	return memcmp(decoded, text, length) == 0;
}

/* ---- numbers and kinds ---- */

struct number {
	size_t bytes; /* of the token */
	bool is_integer, is_negative;
	uint64_t exponent; /* without its sign, saturated */
};

static const uint8_t *digits_end(const uint8_t *at, const uint8_t *end)
{
	while (is_digit(at, end))
		at++;
	return at;
}

/* Measures the number at `at` without reading it. */
static int scan_number(struct hr__json *json, struct number *out)
{
	const uint8_t *at = json->at, *end = json->end;

	*out = (struct number){.is_integer = true, .is_negative = *at == '-'};
	at += out->is_negative;
	if (!is_digit(at, end) || (*at == '0' && is_digit(at + 1, end)))
		goto malformed;
	at = digits_end(at, end);
	if (at < end && *at == '.') {
		out->is_integer = false;
		at++;
		if (!is_digit(at, end))
			goto malformed;
		at = digits_end(at, end);
	}
	if (at < end && (*at == 'e' || *at == 'E')) {
		out->is_integer = false;
		at++;
		at += at < end && (*at == '+' || *at == '-');
		if (!is_digit(at, end))
			goto malformed;
		for (; is_digit(at, end); at++)
			out->exponent = hr__min_u64(out->exponent * 10 + (uint64_t)(*at - '0'), 1000000);
	}
	out->bytes = (size_t)(at - json->at);
	return 0;
malformed:
	return hr__json_fail(json, json->at, HR_E_JSON, "a number that JSON does not have");
}

static bool is_text(const struct hr__json *json, const char *text)
{
	size_t length = strlen(text);

	return (size_t)(json->end - json->at) >= length && memcmp(json->at, text, length) == 0;
}

/* What comes next, and for numbers and literals its length. HR_E_JSON or HR_E_UTF8 if no value begins here. */
static int peek(struct hr__json *json, enum hr__json_kind *kind, struct number *token)
{
	*token = (struct number){.bytes = 0};
	skip_space(json);
	switch (json->at < json->end ? *json->at : 0) {
	case '{':
		*kind = HR__JSON_OBJECT;
		return 0;
	case '[':
		*kind = HR__JSON_ARRAY;
		return 0;
	case '"':
		*kind = HR__JSON_STRING;
		return 0;
	case '-':
	case '0':
	case '1':
	case '2':
	case '3':
	case '4':
	case '5':
	case '6':
	case '7':
	case '8':
	case '9':
		*kind = HR__JSON_NUMBER;
		return scan_number(json, token);
	default:
		*kind = HR__JSON_LITERAL;
		token->bytes = is_text(json, "true") || is_text(json, "null") ? 4 : is_text(json, "false") ? 5 : 0;
		return token->bytes ? 0 : fail_syntax(json, "a value");
	}
}

/* The next value is not of the wanted kind: says so, unless it is no value at all. */
static int fail_kind(struct hr__json *json, const char *what, const char *wanted)
{
	static const char *const found[] = {"an object", "an array", "a string", "a number", "a literal"};
	enum hr__json_kind kind;
	struct number token;
	int rc = peek(json, &kind, &token);

	if (rc)
		return rc;
	return hr__json_fail(json, json->at, HR_E_TYPE, "%s must be %s, not %s,", what, wanted, found[kind]);
}

/* ---- what callers ask for ---- */

uint64_t hr__json_next_position(struct hr__json *json)
{
	skip_space(json);
	return hr__json_position(json, json->at);
}

int hr__json_open(struct hr__json *json, enum hr__json_kind kind, const char *what)
{
	skip_space(json);
	if (json->at == json->end || *json->at != (kind == HR__JSON_OBJECT ? '{' : '['))
		return fail_kind(json, what, kind == HR__JSON_OBJECT ? "an object" : "an array");
	json->at++;
	json->is_fresh = true;
	return 0;
}

/* The border before the next item of a container, or its end. */
static int next_in(struct hr__json *json, uint8_t closing, bool *more)
{
	bool is_first = json->is_fresh;

	json->is_fresh = false;
	*more = false;
	skip_space(json);
	if (json->at < json->end && *json->at == closing) {
		json->at++;
		return 0;
	}
	*more = true;
	if (is_first)
		return 0;
	if (json->at == json->end || *json->at != ',')
		return fail_syntax(json, closing == '}' ? "',' or '}'" : "',' or ']'");
	json->at++;
	return 0;
}

int hr__json_member(struct hr__json *json, struct hr__json_string *key, bool *more)
{
	int rc = next_in(json, '}', more);

	if (rc || !*more)
		return rc;
	skip_space(json);
	if (json->at == json->end || *json->at != '"')
		return fail_syntax(json, "a name in double quotes");
	rc = read_string(json, key);
	if (rc)
		return rc;
	skip_space(json);
	if (json->at == json->end || *json->at != ':')
		return fail_syntax(json, "':'");
	json->at++;
	return 0;
}

int hr__json_item(struct hr__json *json, bool *more)
{
	return next_in(json, ']', more);
}

int hr__json_string(struct hr__json *json, const char *what, struct hr__json_string *out)
{
	skip_space(json);
	if (json->at == json->end || *json->at != '"')
		return fail_kind(json, what, "a string");
	return read_string(json, out);
}

/* Anything but plain digits before a comma or bracket. */
static int u64_slow(struct hr__json *json, const char *what, uint64_t *out)
{
	struct number token;
	uint64_t value = 0;
	int rc;

	if (!is_digit(json->at, json->end) && !(json->at < json->end && *json->at == '-'))
		return fail_kind(json, what, "an integer");
	rc = scan_number(json, &token);
	if (rc)
		return rc;
	if (!token.is_integer)
		return hr__json_fail(json, json->at, HR_E_TYPE, "%s is not an integer", what);
	if (token.is_negative)
		return hr__json_fail(json, json->at, HR_E_TYPE, "%s is negative", what);
	for (size_t i = 0; i < token.bytes; i++)
		if (!hr__mul_u64(value, 10, &value) || !hr__add_u64(value, (uint64_t)(json->at[i] - '0'), &value))
			return hr__json_fail(json, json->at, HR_E_TYPE, "%s is out of range (above 2^64-1)", what);
	*out = value;
	json->at += token.bytes;
	return 0;
}

int hr__json_u64(struct hr__json *json, const char *what, uint64_t *out)
{
	const uint8_t *at, *limit;
	uint64_t value = 0;

	skip_space(json);
	limit = json->end - json->at > 18 ? json->at + 18 : json->end; /* so many digits fit for sure */
	for (at = json->at; is_digit(at, limit); at++)
		value = value * 10 + (uint64_t)(*at - '0');
	if (at == json->at || at == json->end || (*at != ',' && *at != ']') || (*json->at == '0' && at - json->at > 1))
		return u64_slow(json, what, out);
	*out = value;
	json->at = at;
	return 0;
}

bool hr__json_take_null(struct hr__json *json)
{
	skip_space(json);
	if (!is_text(json, "null"))
		return false;
	json->at += 4;
	return true;
}

/* A value that has no inside, or the opening of one that has: then *kind says so. */
static int skip_one(struct hr__json *json, enum hr__json_kind *kind)
{
	struct hr__json_string string;
	struct number token;
	int rc = peek(json, kind, &token);

	if (rc)
		return rc;
	if (*kind == HR__JSON_OBJECT || *kind == HR__JSON_ARRAY)
		return hr__json_open(json, *kind, "");
	if (*kind == HR__JSON_STRING)
		return read_string(json, &string);
	if (*kind == HR__JSON_NUMBER &&
	    (token.bytes > HR__JSON_MAX_SKIP_NUMBER || token.exponent > HR__JSON_MAX_SKIP_EXPONENT))
		return hr__json_fail(json, json->at, HR_E_LIMIT,
				     "a number of more than %d bytes or with an exponent above %d",
				     HR__JSON_MAX_SKIP_NUMBER, HR__JSON_MAX_SKIP_EXPONENT);
	json->at += token.bytes;
	return 0;
}

int hr__json_skip(struct hr__json *json)
{
	bool is_object[HR__JSON_MAX_SKIP_DEPTH]; /* the containers that we are in */
	struct hr__json_string key;
	enum hr__json_kind kind = HR__JSON_LITERAL;
	unsigned depth = 0;
	int rc;

	do {
		bool more = true;

		rc = depth == 0             ? 0
		     : is_object[depth - 1] ? hr__json_member(json, &key, &more)
					    : hr__json_item(json, &more);
		if (!rc && more)
			rc = skip_one(json, &kind);
		if (rc)
			return rc;
		if (!more) {
			depth--;
			continue;
		}
		if (kind != HR__JSON_OBJECT && kind != HR__JSON_ARRAY)
			continue;
		if (depth == HR__JSON_MAX_SKIP_DEPTH)
			return hr__json_fail(json, json->at - 1, HR_E_LIMIT,
					     "the value of an unknown field is nested deeper than %d",
					     HR__JSON_MAX_SKIP_DEPTH);
		is_object[depth++] = kind == HR__JSON_OBJECT;
	} while (depth > 0);
	return 0;
}

int hr__json_end(struct hr__json *json)
{
	skip_space(json);
	if (json->at == json->end)
		return 0;
	return fail_syntax(json, "nothing more");
}
