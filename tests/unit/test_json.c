/* SPDX-License-Identifier: Apache-2.0 */
/* The JSON parser: characters exhaustively, numbers and nesting at their borders, every truncation. */
#include "support/hrtest.h"

#include "format/json.h"

#include <stdbool.h>

#define BASE 1000

static int skip_all(const void *text, size_t n)
{
	struct hr__json json;
	int rc;

	hr__json_start(&json, text, n, BASE, "header");
	rc = hr__json_skip(&json);
	return rc ? rc : hr__json_end(&json);
}

static int skip_text(const char *text)
{
	return skip_all(text, strlen(text));
}

/* Reads `"<inside>"` from an exactly sized block, so that a sanitizer sees a read beyond it; decodes into `out`. */
static int string_of(const void *inside, size_t n, char *out, size_t *out_bytes)
{
	struct hr__json_string string;
	struct hr__json json;
	char *text = malloc(n + 2);
	int rc;

	assert_non_null(text);
	text[0] = text[n + 1] = '"';
	memcpy(text + 1, inside, n);
	hr__json_start(&json, text, n + 2, 0, "header");
	rc = hr__json_string(&json, "it", &string);
	if (!rc)
		rc = hr__json_end(&json);
	if (!rc) {
		assert_true(string.bytes <= string.raw_bytes);
		assert_int_equal(string.raw_bytes, n);
		hr__json_decode(&string, out);
		*out_bytes = string.bytes;
	}
	free(text);
	return rc;
}

/* ---- UTF-8 and escapes, against definitions written down in another way ---- */

/* Encodes a code point; 0 for what UTF-8 must not hold. */
static size_t encode(uint32_t point, unsigned char out[4])
{
	if ((point >= 0xd800 && point < 0xe000) || point > 0x10ffff)
		return 0;
	if (point < 0x80) {
		out[0] = (unsigned char)point;
		return 1;
	}
	if (point < 0x800) {
		out[0] = (unsigned char)(0xc0 + point / 64);
		out[1] = (unsigned char)(0x80 + point % 64);
		return 2;
	}
	if (point < 0x10000) {
		out[0] = (unsigned char)(0xe0 + point / 4096);
		out[1] = (unsigned char)(0x80 + point / 64 % 64);
		out[2] = (unsigned char)(0x80 + point % 64);
		return 3;
	}
	out[0] = (unsigned char)(0xf0 + point / 262144);
	out[1] = (unsigned char)(0x80 + point / 4096 % 64);
	out[2] = (unsigned char)(0x80 + point / 64 % 64);
	out[3] = (unsigned char)(0x80 + point % 64);
	return 4;
}

/* Every code point is accepted in its one spelling and comes out unchanged. Sets the bit of each 2- and 3-byte
 * spelling. */
static void accepts_every_code_point_in_utf8(void **state)
{
	unsigned char bytes[4];
	char out[8];
	size_t n, got;

	(void)state;
	for (uint32_t point = 0x20; point <= 0x10ffff; point++) {
		n = encode(point, bytes);
		if (n == 0 || point == '"' || point == '\\')
			continue;
		assert_ok(string_of(bytes, n, out, &got));
		assert_int_equal(got, n);
		assert_memory_equal(out, bytes, n);
	}
}

/* All sequences of two and of three bytes that begin above 0x7f: accepted exactly if some code point is spelled so. */
static void refuses_every_other_sequence_of_two_and_three_bytes(void **state)
{
	static unsigned char is_good[1 << 21]; /* a bit for each three bytes */
	unsigned char bytes[4];
	char out[8];
	size_t n, got;

	(void)state;
	memset(is_good, 0, sizeof(is_good));
	for (uint32_t point = 0x80; point <= 0xffff; point++) {
		n = encode(point, bytes);
		if (n == 2) /* and one plain byte after it */
			for (unsigned c = 0x20; c < 0x80; c++)
				if (c != '"' && c != '\\')
					is_good[(bytes[0] << 13) + (bytes[1] << 5) + c / 8] |=
						(unsigned char)(1 << c % 8);
		if (n == 3)
			is_good[(bytes[0] << 13) + (bytes[1] << 5) + bytes[2] / 8] |= (unsigned char)(1
												      << bytes[2] % 8);
	}
	for (uint32_t word = 0x800000; word <= 0xffffff; word++) {
		bool expected = is_good[word / 8] >> word % 8 & 1;
		int rc;

		/* Second bytes far from any border behave alike: a sample of them keeps this to a second. */
		if ((word >> 8 & 0xff) < 0x7e && (word & 0xff) % 16 != 1)
			continue;
		bytes[0] = (unsigned char)(word >> 16);
		bytes[1] = (unsigned char)(word >> 8);
		bytes[2] = (unsigned char)word;
		rc = string_of(bytes, 3, out, &got);
		if ((rc == 0) != expected)
			fail_msg("%06x: %s", word, hr_error_name(rc));
		if (rc && rc != HR_E_UTF8) /* two good bytes and one that a string must not have as it is */
			assert_true(rc == HR_E_JSON && bytes[0] < 0xe0 &&
				    (bytes[2] < 0x20 || bytes[2] == '"' || bytes[2] == '\\'));
	}
	for (uint32_t word = 0x8000; word <= 0xffff; word++) {
		bytes[0] = (unsigned char)(word >> 8);
		bytes[1] = (unsigned char)word;
		n = bytes[0] >= 0xc2 && bytes[0] < 0xe0 && bytes[1] >= 0x80 && bytes[1] < 0xc0;
		assert_int_equal(string_of(bytes, 2, out, &got), n ? 0 : HR_E_UTF8);
	}
}

static void refuses_every_bad_sequence_of_four_bytes(void **state)
{
	static const unsigned char tails[] = {0x20, 0x7f, 0x80, 0x8f, 0x90, 0x9f, 0xa0, 0xbf, 0xc0, 0xff};
	unsigned char bytes[4], again[4];
	char out[8];
	size_t got;

	(void)state;
	for (unsigned lead = 0xf0; lead <= 0xff; lead++)
		for (unsigned second = 0; second < 256; second++)
			for (unsigned t = 0; t < sizeof(tails) * sizeof(tails); t++) {
				uint32_t point;
				bool expected;

				bytes[0] = (unsigned char)lead;
				bytes[1] = (unsigned char)second;
				bytes[2] = tails[t / sizeof(tails)];
				bytes[3] = tails[t % sizeof(tails)];
				point = ((lead & 7) << 18) + ((second & 63) << 12) + ((bytes[2] & 63u) << 6) +
					(bytes[3] & 63u);
				expected = encode(point, again) == 4 && memcmp(again, bytes, 4) == 0;
				assert_int_equal(string_of(bytes, 4, out, &got), expected ? 0 : HR_E_UTF8);
			}
}

static void refuses_a_sequence_cut_by_the_end_of_the_string(void **state)
{
	static const char *const cut[] = {"\xc3", "\xe2\x82", "\xe2", "\xf0\x9f\x98", "\xf0\x9f", "\xf0"};
	char out[8];
	size_t got;

	(void)state;
	for (size_t i = 0; i < sizeof(cut) / sizeof(cut[0]); i++) {
		assert_fails(string_of(cut[i], strlen(cut[i]), out, &got), HR_E_UTF8);
		assert_int_not_equal(skip_all(cut[i], strlen(cut[i])), 0);
	}
}

/* All 65,536 values of \u, in lower and upper case. */
static void decodes_every_u_escape_and_refuses_lone_surrogates(void **state)
{
	unsigned char expected[4];
	char text[16], out[16];
	size_t n, got;

	(void)state;
	for (uint32_t unit = 0; unit <= 0xffff; unit++)
		for (int upper = 0; upper < 2; upper++) {
			snprintf(text, sizeof(text), upper ? "\\u%04X" : "\\u%04x", unit);
			n = encode(unit, expected);
			if (n == 0) {
				assert_fails(string_of(text, 6, out, &got), HR_E_JSON);
				continue;
			}
			assert_ok(string_of(text, 6, out, &got));
			assert_int_equal(got, n);
			assert_memory_equal(out, expected, n);
		}
}

/* A first unit of each class with a second of each class. Only high + low is a character. */
static void decodes_surrogate_pairs_in_order_only(void **state)
{
	static const uint32_t units[] = {0,      0x41,   0xd7ff, 0xd800, 0xd801, 0xdabc, 0xdbff,
					 0xdc00, 0xdc01, 0xdeff, 0xdfff, 0xe000, 0xffff};
	const size_t n_units = sizeof(units) / sizeof(units[0]);
	unsigned char expected[8];
	char text[16], out[16];
	size_t n, got;

	(void)state;
	for (size_t i = 0; i < n_units * n_units; i++) {
		uint32_t a = units[i / n_units], b = units[i % n_units];
		bool a_high = a >= 0xd800 && a < 0xdc00, b_low = b >= 0xdc00 && b < 0xe000;

		snprintf(text, sizeof(text), "\\u%04x\\u%04x", a, b);
		if (a_high && b_low)
			n = encode(0x10000 + (a - 0xd800) * 0x400 + (b - 0xdc00), expected);
		else
			n = encode(a, expected) && encode(b, expected)
				    ? encode(a, expected) + encode(b, expected + encode(a, expected))
				    : 0;
		if (n == 0) {
			assert_fails(string_of(text, 12, out, &got), HR_E_JSON);
			continue;
		}
		assert_ok(string_of(text, 12, out, &got));
		assert_int_equal(got, n);
		assert_memory_equal(out, expected, n);
	}
	assert_fails(string_of("\\ud83d\\x", 8, out, &got), HR_E_JSON);
	assert_fails(string_of("\\ud83d", 6, out, &got), HR_E_JSON);
	assert_fails(string_of("\\ud83d\\ude0", 11, out, &got), HR_E_JSON);
}

static void knows_eight_simple_escapes_and_no_others(void **state)
{
	const char known[] = "\"\\/bfnrt", meaning[] = "\"\\/\b\f\n\r\t";
	char text[2] = "\\", out[4];
	size_t got;

	(void)state;
	for (unsigned c = 0; c < 256; c++) {
		const char *at = c ? strchr(known, (int)c) : NULL;

		text[1] = (char)c;
		if (!at) {
			assert_fails(string_of(text, 2, out, &got), HR_E_JSON);
			continue;
		}
		assert_ok(string_of(text, 2, out, &got));
		assert_int_equal(got, 1);
		assert_int_equal(out[0], meaning[at - known]);
	}
}

/* Eight bytes are looked at together: each byte value is put at each place of strings of all small lengths. */
static void stops_at_the_same_byte_wherever_it_stands(void **state)
{
	char text[40], out[40];
	size_t got;

	(void)state;
	for (size_t n = 1; n <= 27; n++)
		for (size_t at = 0; at < n; at++)
			for (unsigned c = 0; c < 256; c++) {
				int expected = c >= 0x80                           ? HR_E_UTF8
					       : c < 0x20 || c == '"' || c == '\\' ? HR_E_JSON
										   : 0;

				for (size_t i = 0; i < n; i++)
					text[i] = i % 3 == 0 ? '!' : i % 3 == 1 ? '\x7f' : 'z'; /* '!' is next to '"' */
				text[at] = (char)c;
				if (at + 1 < n && c == '\\')
					text[at + 1] = '!';
				if (at + 1 < n && c == '"')
					text[at + 1] = 'x';
				assert_int_equal(string_of(text, n, out, &got), expected);
			}
}

/* ---- numbers ---- */

static int u64_of(const char *text, uint64_t *value)
{
	struct hr__json json;
	int rc;

	hr__json_start(&json, text, strlen(text), 0, "header");
	rc = hr__json_u64(&json, "it", value);
	return rc ? rc : hr__json_end(&json);
}

static void reads_integers_to_the_last_one(void **state)
{
	static const struct {
		const char *text;
		uint64_t value;
	} good[] = {{"0", 0},
		    {"7", 7},
		    {" 10 ", 10},
		    {"999999999999999999", 999999999999999999u},
		    {"1000000000000000000", 1000000000000000000u},
		    {"9007199254740993", 9007199254740993u},
		    {"18446744073709551615", UINT64_MAX}};
	char text[40];
	uint64_t value, power = 1;

	(void)state;
	for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++) {
		assert_ok(u64_of(good[i].text, &value));
		assert_true(value == good[i].value);
	}
	for (int digits = 1; digits < 20; digits++, power *= 10)
		for (int step = -1; step <= 1; step++) {
			snprintf(text, sizeof(text), "%llu", (unsigned long long)(power + (uint64_t)(int64_t)step));
			assert_ok(u64_of(text, &value));
			assert_true(value == power + (uint64_t)(int64_t)step);
		}
}

static void tells_wrong_numbers_apart(void **state)
{
	static const struct {
		const char *text;
		int code;
		const char *words;
	} bad[] = {
		{"18446744073709551616", HR_E_TYPE, "out of range"},
		{"18446744073709551620", HR_E_TYPE, "out of range"},
		{"99999999999999999999999999999999999999999", HR_E_TYPE, "out of range"},
		{"2.0", HR_E_TYPE, "not an integer"},
		{"2e0", HR_E_TYPE, "not an integer"},
		{"20E-1", HR_E_TYPE, "not an integer"},
		{"-1", HR_E_TYPE, "negative"},
		{"-0", HR_E_TYPE, "negative"},
		{"\"2\"", HR_E_TYPE, "not a string"},
		{"null", HR_E_TYPE, "not a literal"},
		{"[2]", HR_E_TYPE, "not an array"},
		{"{}", HR_E_TYPE, "not an object"},
		{"", HR_E_JSON, "the end"},
		{"02", HR_E_JSON, "a number that JSON does not have"},
		{"00", HR_E_JSON, "a number"},
		{"-", HR_E_JSON, "a number"},
		{"-a", HR_E_JSON, "a number"},
		{"1.", HR_E_JSON, "a number"},
		{"1.e1", HR_E_JSON, "a number"},
		{"1e", HR_E_JSON, "a number"},
		{"1e+", HR_E_JSON, "a number"},
		{"+1", HR_E_JSON, "a value"},
		{".5", HR_E_JSON, "a value"},
		{"NaN", HR_E_JSON, "a value"},
		{"Infinity", HR_E_JSON, "a value"},
		{"-Infinity", HR_E_JSON, "a number"},
		{"0x10", HR_E_JSON, "nothing more"},
		{"1 2", HR_E_JSON, "nothing more"},
		{"1_000", HR_E_JSON, "nothing more"},
	};
	uint64_t value;

	(void)state;
	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
		assert_fails(u64_of(bad[i].text, &value), bad[i].code);
		if (!strstr(hr_error_last()->message, bad[i].words))
			fail_msg("%s: %s", bad[i].text, hr_error_last()->message);
	}
}

static void limits_numbers_and_depth_in_skipped_values(void **state)
{
	char text[256];

	(void)state;
	for (int depth = 1; depth <= 40; depth++) {
		int limit = depth > HR__JSON_MAX_SKIP_DEPTH ? HR_E_LIMIT : 0;

		memset(text, '[', (size_t)depth);
		memset(text + depth, ']', (size_t)depth);
		assert_int_equal(skip_all(text, (size_t)(2 * depth)), limit);
		for (int i = 0; i < depth; i++)
			memcpy(text + 5 * i, "{\"\":[", 5);
		text[5 * depth] = '\0';
		assert_int_equal(skip_text(text), 2 * depth > HR__JSON_MAX_SKIP_DEPTH ? HR_E_LIMIT : HR_E_JSON);
	}
	assert_ok(skip_text("[1e200,-1E-200,1e+200,0e0,0.000,11111111111111111111111111111111]"));
	assert_fails(skip_text("1e201"), HR_E_LIMIT);
	assert_fails(skip_text("1e-201"), HR_E_LIMIT);
	assert_fails(skip_text("1e18446744073709551617"), HR_E_LIMIT); /* 1 if it wrapped */
	assert_fails(skip_text("111111111111111111111111111111111"), HR_E_LIMIT);
	assert_fails(skip_text("0.0000000000000000000000000000000"), HR_E_LIMIT);
}

/* ---- structure ---- */

static void accepts_all_of_json_and_nothing_else(void **state)
{
	static const char *const good[] = {"{}",
					   "[]",
					   "\"\"",
					   "0",
					   "-0",
					   "-0.5e-10",
					   "true",
					   "false",
					   "null",
					   " \t\r\n[ ]\n",
					   "[[],{},[{}]]",
					   "{\"a\":{\"b\":[1,2,{\"c\":null}]},\"\":\"\\u0000\"}",
					   "[1,\"a\",true]",
					   "{\"a\":1,\"a\":2}"};
	static const char *const bad[] = {"",
					  " ",
					  "{",
					  "}",
					  "[",
					  "]",
					  "[1",
					  "[1,",
					  "[1,]",
					  "[,1]",
					  "[1,,2]",
					  "[1 2]",
					  "[1:2]",
					  "{1:2}",
					  "{\"a\"}",
					  "{\"a\":}",
					  "{\"a\":1,}",
					  "{,\"a\":1}",
					  "{\"a\":1 \"b\":2}",
					  "{\"a\"1}",
					  "{\"a\",1}",
					  "{a:1}",
					  "{'a':1}",
					  "[1}",
					  "{\"a\":1]",
					  "[[1]",
					  "[]]",
					  "{}}",
					  "{}{}",
					  "1 1",
					  "tru",
					  "True",
					  "nulll",
					  "nan",
					  "\"",
					  "\"a",
					  "\"\\",
					  "\"\\u",
					  "\"\\u00\"",
					  "/**/1",
					  "1//",
					  "\v1",
					  "\f1",
					  "\xc2\xa0"
					  "1",
					  "\xef\xbb\xbf{}",
					  "[\"a\" \"b\"]",
					  "[\"a\":1]",
					  "{\"a\":1:2}",
					  "[-]",
					  "--1",
					  "{\"a\":1;}"};

	(void)state;
	for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++)
		assert_ok(skip_text(good[i]));
	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
		assert_fails(skip_text(bad[i]), HR_E_JSON);
}

static void refuses_every_prefix_of_a_document(void **state)
{
	static const char text[] =
		"{\"a\":[1,-2.5e+3,{\"b\\n\\u00e9\\ud83d\\ude00\xc3\xa9\":null}],\"c\":[true,false,\"\"],\"d\":{}}";

	(void)state;
	for (size_t n = 0; n < sizeof(text) - 1; n++) {
		char *exact = malloc(n ? n : 1);

		assert_non_null(exact);
		memcpy(exact, text, n);
		assert_int_not_equal(skip_all(exact, n), 0);
		free(exact);
	}
	assert_ok(skip_text(text));
}

static void walks_members_and_items_in_order(void **state)
{
	static const char text[] =
		" { \"x\" : [ 1 , 2 ] , \"y\" : { } , \"z\\u0061\" : \"v\" , \"n\" : null , \"m\" : 3 } ";
	struct hr__json_string string;
	struct hr__json json;
	uint64_t value;
	bool more;

	(void)state;
	hr__json_start(&json, text, sizeof(text) - 1, 0, "index");
	assert_ok(hr__json_open(&json, HR__JSON_OBJECT, "it"));
	assert_ok(hr__json_member(&json, &string, &more));
	assert_true(more && hr__json_is(&string, "x") && !hr__json_is(&string, "xy") && !hr__json_is(&string, ""));
	assert_ok(hr__json_open(&json, HR__JSON_ARRAY, "it"));
	for (uint64_t i = 1; i <= 2; i++) {
		assert_ok(hr__json_item(&json, &more));
		assert_true(more);
		assert_ok(hr__json_u64(&json, "it", &value));
		assert_true(value == i);
	}
	assert_ok(hr__json_item(&json, &more));
	assert_false(more);
	assert_ok(hr__json_member(&json, &string, &more));
	assert_true(more && hr__json_is(&string, "y"));
	assert_ok(hr__json_open(&json, HR__JSON_OBJECT, "it"));
	assert_ok(hr__json_member(&json, &string, &more));
	assert_false(more);
	assert_ok(hr__json_member(&json, &string, &more));
	assert_true(more && hr__json_is(&string, "za") && !hr__json_is(&string, "zb"));
	assert_false(hr__json_take_null(&json));
	assert_ok(hr__json_string(&json, "it", &string));
	assert_true(hr__json_is(&string, "v"));
	assert_ok(hr__json_member(&json, &string, &more));
	assert_true(hr__json_take_null(&json));
	assert_ok(hr__json_member(&json, &string, &more));
	assert_int_equal(hr__json_next_position(&json), sizeof(text) - 5);
	assert_ok(hr__json_skip(&json));
	assert_ok(hr__json_member(&json, &string, &more));
	assert_false(more);
	assert_ok(hr__json_end(&json));
}

static void errors_have_the_position_and_what_is_there(void **state)
{
	(void)state;
	assert_fails(skip_text("{\"a\": [1, oops, 2]}"), HR_E_JSON);
	assert_int_equal(hr_error_last()->offset, BASE + 10);
	assert_string_equal(hr_error_last()->message, "expected a value at byte 1010, found `oops, 2]}`");
	assert_string_equal(hr_error_last()->stage, "header");
	assert_fails(skip_text("[\"a\\qb\"]"), HR_E_JSON);
	assert_string_equal(hr_error_last()->message,
			    "an escape that JSON does not have, in a string at byte 1003, found `\\qb\"]`");
	assert_fails(skip_text("[1"), HR_E_JSON);
	assert_string_equal(hr_error_last()->message, "expected ',' or ']' at byte 1002, found the end of the header");
	assert_fails(skip_text("\x1b[31mred, and much more than fits into a quote"), HR_E_JSON);
	assert_string_equal(hr_error_last()->message,
			    "expected a value at byte 1000, found `\\x1b[31mred, and much m`...");
	assert_fails(skip_text("[\"\xe2\x80\xae\xff\"]"), HR_E_UTF8);
	assert_int_equal(hr_error_last()->offset, BASE + 5);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(accepts_every_code_point_in_utf8),
		cmocka_unit_test(refuses_every_other_sequence_of_two_and_three_bytes),
		cmocka_unit_test(refuses_every_bad_sequence_of_four_bytes),
		cmocka_unit_test(refuses_a_sequence_cut_by_the_end_of_the_string),
		cmocka_unit_test(decodes_every_u_escape_and_refuses_lone_surrogates),
		cmocka_unit_test(decodes_surrogate_pairs_in_order_only),
		cmocka_unit_test(knows_eight_simple_escapes_and_no_others),
		cmocka_unit_test(stops_at_the_same_byte_wherever_it_stands),
		cmocka_unit_test(reads_integers_to_the_last_one),
		cmocka_unit_test(tells_wrong_numbers_apart),
		cmocka_unit_test(limits_numbers_and_depth_in_skipped_values),
		cmocka_unit_test(accepts_all_of_json_and_nothing_else),
		cmocka_unit_test(refuses_every_prefix_of_a_document),
		cmocka_unit_test(walks_members_and_items_in_order),
		cmocka_unit_test(errors_have_the_position_and_what_is_there),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
