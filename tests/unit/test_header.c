/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The header parser where the corpus (tests/data/make_corpus.py) does not reach: every truncation, every flipped bit,
 * every failing allocation, respelled and reordered headers, positions of errors.
 */
#include "support/hrtest.h"

#include "core/mem.h"
#include "format/header.h"

#include <errno.h>
#include <stdbool.h>

static const struct hr__hash_key key = {0x0123456789abcdef, 0xfedcba9876543210};

static int parse(const char *json, size_t n, uint64_t data_bytes, struct hr__header *out)
{
	return hr__header_parse(&key, (const uint8_t *)json, n, data_bytes, out);
}

static int parse_text(const char *json, uint64_t data_bytes)
{
	struct hr__header header;
	int rc = parse(json, strlen(json), data_bytes, &header);

	hr__header_free(&header);
	return rc;
}

#define GOOD_DATA 24
static const char good[] = "{\"__metadata__\":{\"a\":\"b\\n\",\"c\":\"\"},"
			   "\"w\\u00e9\":{\"dtype\":\"F32\",\"shape\":[2,2],\"data_offsets\":[8,24]},"
			   "\"x\":{\"data_offsets\":[0,8],\"shape\":[4],\"x\":{\"y\":[1]},\"dtype\":\"BF16\"},"
			   "\"z\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[8,8]}}";

/* What must hold of every header that is accepted. */
static void check_invariants(const struct hr__header *header, uint64_t data_bytes)
{
	uint64_t end = 0;

	for (size_t i = 0; i < header->n_entries; i++) {
		const struct hr__entry *e = &header->entries[i];
		uint64_t bits = hr_dtype_bits(e->dtype);

		for (unsigned d = 0; d < e->rank; d++)
			bits *= e->dims[d];
		assert_true(e->begin == end && e->end >= e->begin && bits % 8 == 0 && e->end - e->begin == bits / 8);
		assert_true(e->hash == hr__hash(&key, e->name, e->name_len));
		end = e->end;
		for (size_t j = 0; j < i; j++)
			assert_false(header->entries[j].name_len == e->name_len &&
				     memcmp(header->entries[j].name, e->name, e->name_len) == 0);
	}
	assert_true(end == data_bytes);
}

static void reads_what_the_header_says(void **state)
{
	struct hr__header h;

	(void)state;
	assert_ok(parse(good, strlen(good), GOOD_DATA, &h));
	check_invariants(&h, GOOD_DATA);
	assert_int_equal(h.n_entries, 3);
	assert_int_equal(h.entries[0].name_len, 1);
	assert_memory_equal(h.entries[0].name, "x", 1);
	assert_int_equal(h.entries[0].dtype, HR_DTYPE_BF16);
	assert_memory_equal(h.entries[1].name, "z", 1);
	assert_int_equal(h.entries[1].rank, 1);
	assert_true(h.entries[1].dims[0] == 0);
	assert_int_equal(h.entries[2].name_len, 3);
	assert_memory_equal(h.entries[2].name, "w\xc3\xa9", 3);
	assert_int_equal(h.entries[2].rank, 2);
	assert_true(h.entries[2].dims[0] == 2 && h.entries[2].dims[1] == 2);
	assert_int_equal(h.n_pairs, 2);
	assert_int_equal(h.pairs[0].value_len, 2);
	assert_memory_equal(h.pairs[0].value, "b\n", 2);
	assert_int_equal(h.pairs[1].value_len, 0);
	hr__header_free(&h);
	assert_null(h.entries);
}

static void refuses_every_truncation_and_every_appended_byte(void **state)
{
	char longer[sizeof(good) + 1];
	struct hr__header h;

	(void)state;
	for (size_t n = 0; n < strlen(good); n++) {
		char *exact = malloc(n ? n : 1);

		assert_non_null(exact);
		memcpy(exact, good, n);
		assert_int_not_equal(parse(exact, n, GOOD_DATA, &h), 0);
		assert_true(h.entries == NULL && h.arena == NULL && h.pairs == NULL);
		free(exact);
	}
	for (uint64_t data = 0; data < 2 * GOOD_DATA; data++) {
		assert_int_equal(parse(good, strlen(good), data, &h), data == GOOD_DATA ? 0 : HR_E_COVER);
		hr__header_free(&h);
	}
	for (unsigned c = 0; c < 256; c++) {
		memcpy(longer, good, strlen(good));
		longer[strlen(good)] = (char)c;
		if (parse(longer, strlen(good) + 1, GOOD_DATA, &h) == 0)
			assert_true(c && strchr(" \t\r\n", (int)c));
		hr__header_free(&h);
	}
}

static void whatever_one_flipped_bit_leaves_accepted_is_consistent(void **state)
{
	char text[sizeof(good)];
	struct hr__header h;
	size_t n_accepted = 0;

	(void)state;
	for (size_t at = 0; at < strlen(good); at++)
		for (int bit = 0; bit < 8; bit++) {
			memcpy(text, good, sizeof(good));
			text[at] = (char)(text[at] ^ 1 << bit);
			if (parse(text, strlen(good), GOOD_DATA, &h) != 0)
				continue;
			check_invariants(&h, GOOD_DATA);
			n_accepted++;
			hr__header_free(&h);
		}
	assert_true(n_accepted > 20); /* names and metadata are free */
}

/* ---- the same list of tensors, spelled in many ways ---- */

struct speller {
	struct test_random random;
	char *out;
	size_t n;
	bool plain;
};

static void put(struct speller *s, const char *text)
{
	memcpy(s->out + s->n, text, strlen(text));
	s->n += strlen(text);
}

static void put_space(struct speller *s)
{
	static const char *const spaces[] = {"", "", " ", "\n", "\t", "\r\n", "    "};

	if (!s->plain)
		put(s, spaces[test_random_below(&s->random, 7)]);
}

static void put_token(struct speller *s, const char *token)
{
	put_space(s);
	put(s, token);
	put_space(s);
}

/* Each ASCII letter as itself or as \u with digits of either case. */
static void put_string(struct speller *s, const char *text)
{
	char escaped[8];

	put_space(s);
	put(s, "\"");
	for (; *text; text++) {
		snprintf(escaped, sizeof(escaped), test_random_below(&s->random, 2) ? "\\u%04x" : "\\u%04X",
			 (unsigned char)*text);
		if (!s->plain && test_random_below(&s->random, 3) == 0)
			put(s, escaped);
		else
			s->out[s->n++] = *text;
	}
	put(s, "\"");
	put_space(s);
}

static void shuffle(struct speller *s, unsigned *order, unsigned n)
{
	for (unsigned i = 0; i < n; i++)
		order[i] = i;
	for (unsigned i = n; !s->plain && i > 1; i--) {
		unsigned j = (unsigned)test_random_below(&s->random, i), other = order[j];

		order[j] = order[i - 1];
		order[i - 1] = other;
	}
}

#define N_TENSORS 40

static void put_entry(struct speller *s, unsigned i)
{
	unsigned fields[4];
	char text[64] = "";

	shuffle(s, fields, 4);
	put_token(s, "{");
	for (unsigned f = 0, n = 0; f < 4; f++) {
		if (fields[f] == 3 && s->plain)
			continue;
		if (n++)
			put_token(s, ",");
		put_string(s, fields[f] == 0   ? "dtype"
			      : fields[f] == 1 ? "shape"
			      : fields[f] == 2 ? "data_offsets"
					       : "unknown");
		put_token(s, ":");
		if (fields[f] == 0) {
			put_string(s, i % 2 ? "F8_E4M3" : "I16");
			continue;
		}
		if (fields[f] == 1) /* two bytes, i % 3 times */
			snprintf(text, sizeof(text), "[%u , %u]", i % 2 ? 2u : 1u, i % 3);
		if (fields[f] == 2) {
			uint64_t begin = 0;

			for (unsigned j = 0; j < i; j++)
				begin += 2 * (j % 3);
			snprintf(text, sizeof(text), "[%u,%u]", (unsigned)begin, (unsigned)(begin + 2 * (i % 3)));
		}
		put_token(s, fields[f] == 3 ? "[null,{\"dtype\":\"I8\",\"dtype\":1}]" : text);
	}
	put_token(s, "}");
}

static void put_header(struct speller *s)
{
	unsigned order[N_TENSORS + 1];
	char name[32];

	shuffle(s, order, N_TENSORS + 1);
	put_token(s, "{");
	for (unsigned i = 0; i <= N_TENSORS; i++) {
		if (i)
			put_token(s, ",");
		snprintf(name, sizeof(name), "layer.%u.weight", order[i]);
		put_string(s, order[i] == N_TENSORS ? "__metadata__" : name);
		put_token(s, ":");
		if (order[i] == N_TENSORS) {
			put_token(s, "{");
			put_string(s, "format");
			put_token(s, ":");
			put_string(s, "pt");
			put_token(s, "}");
		} else {
			put_entry(s, order[i]);
		}
	}
	put_token(s, "}");
}

static void compare(const struct hr__header *a, const struct hr__header *b)
{
	assert_int_equal(a->n_entries, b->n_entries);
	for (size_t i = 0; i < a->n_entries; i++) {
		const struct hr__entry *x = &a->entries[i], *y = NULL;

		for (size_t j = 0; j < b->n_entries; j++) /* tensors without bytes may change places */
			if (b->entries[j].name_len == x->name_len &&
			    memcmp(b->entries[j].name, x->name, x->name_len) == 0)
				y = &b->entries[j];
		assert_non_null(y);
		assert_true(x->begin == y->begin && x->end == y->end && x->dtype == y->dtype && x->rank == y->rank);
		assert_memory_equal(x->dims, y->dims, x->rank * sizeof(*x->dims));
	}
	assert_int_equal(b->n_pairs, 1);
	assert_memory_equal(b->pairs[0].key, "format", 6);
	assert_memory_equal(b->pairs[0].value, "pt", 2);
}

static void white_space_order_and_escapes_never_change_the_result(void **state)
{
	const uint64_t data = 13 * 6; /* (0 + 1 + 2) * 2 bytes, 13 times, and one tensor of none */
	struct speller s = {.plain = true, .out = malloc(1 << 17)};
	struct hr__header first, other;

	(void)state;
	assert_non_null(s.out);
	test_random_start(&s.random, 1);
	put_header(&s);
	assert_ok(parse(s.out, s.n, data, &first));
	s.plain = false;
	for (int round = 0; round < 500; round++) {
		s.n = 0;
		put_header(&s);
		assert_ok(parse(s.out, s.n, data, &other));
		check_invariants(&other, data);
		compare(&first, &other);
		hr__header_free(&other);
	}
	hr__header_free(&first);
	free(s.out);
}

/* ---- memory ---- */

static void every_failing_allocation_is_a_clean_error(void **state)
{
	const uint64_t data = 13 * 6;
	struct speller s = {.out = malloc(1 << 17)};
	struct hr__header h;
	uint64_t k;
	int rc = 1;

	(void)state;
	assert_non_null(s.out);
	test_random_start(&s.random, 2);
	put_header(&s);
	for (k = 1; rc != 0; k++) {
		hr__fault_arm("malloc", k, ENOMEM);
		rc = parse(s.out, s.n, data, &h);
		assert_true(rc == 0 || rc == HR_E_NOMEM);
		if (rc) {
			assert_int_equal(hr_error_last()->code, HR_E_NOMEM);
			assert_true(h.entries == NULL && h.arena == NULL);
		}
		assert_int_equal(hr__fault_fired(), rc != 0);
	}
	assert_true(k > 5);
	hr__fault_arm("malloc", 0, 0);
	hr__header_free(&h);
	free(s.out);
}

/* Names that collide under an unkeyed hash do not under ours; here only that many names stay linear: it ends at all. */
static void finds_one_name_that_occurs_twice_among_many(void **state)
{
	const unsigned n = 100000;
	char *text = malloc(n * 64 + 64);
	size_t at = 0;

	(void)state;
	assert_non_null(text);
	for (unsigned i = 0; i <= n; i++)
		at += (size_t)snprintf(text + at, 80, "%c\"%u\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,1]}",
				       i ? ',' : '{', i == n ? 77777 : i);
	memcpy(text + at, "}", 2);
	assert_fails(parse_text(text, n), HR_E_DUPLICATE);
	assert_string_equal(hr_error_last()->tensor, "77777");
	free(text);
}

/* ---- errors ---- */

static void errors_name_the_tensor_and_the_byte(void **state)
{
	static const struct {
		const char *text;
		int code;
		const char *tensor, *at,
			*words; /* `at`: the error is where this begins (the last one, if there are two) */
	} rows[] = {
		{"{\"a\":{\"dtype\":7}}", HR_E_TYPE, "a", "7}}", "dtype must be a string, not a number"},
		{"{\"a\":{\"dtype\":\"F33\"}}", HR_E_DTYPE, "a", "\"F33\"", "does not know"},
		{"{\"a\":{\"shape\":[1,x]}}", HR_E_JSON, "a", "x]", "expected a value"},
		{"{\"a\":{\"shape\":[1.5]}}", HR_E_TYPE, "a", "1.5", "a dimension of shape is not an integer"},
		{"{\"a\":{\"data_offsets\":[1,-5]}}", HR_E_TYPE, "a", "-5", "the end in data_offsets is negative"},
		{"{\"a\":{\"data_offsets\":[1]}}", HR_E_TYPE, "a", "]}}", "two integers, not one"},
		{"{\"a\":{\"dtype\":\"U8\"}}", HR_E_FIELD, "a", "}}", "shape is missing"},
		{"{\"a\":{\"dtype\":\"U8\",\"dtype\":\"U8\"}}", HR_E_DUPLICATE, "a", "\"dtype\":\"U8\"}}", "twice"},
		{"{\"a\":{\"x\":1,\"x\":2}}", HR_E_DUPLICATE, "a", "\"x\":2", "twice"},
		{"{\"a\\u001b\":0}", HR_E_TYPE, "a\\x1b", "0}",
		 "tensor \"a\\x1b\": a tensor's entry must be an object"},
		{"{\"__metadata__\":{\"a\":1}}", HR_E_TYPE, "", "1}}", "a value in __metadata__ must be a string"},
		{"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
		 "\"b\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[2,3]}}",
		 HR_E_OFFSET, "b", "\"b\":", "begins at 2, but that of \"a\" before it ends at 1: a hole of 1 bytes"},
		{"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
		 "\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,2]}}",
		 HR_E_DUPLICATE, "a", "\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1",
		 "at byte 9 and at byte"},
		{"{\"a\":{\"dtype\":\"F16\",\"shape\":[3],\"data_offsets\":[0,4]}}", HR_E_SIZE, "a", "\"a\"",
		 "dtype F16 and shape make 6 bytes, but its range 0 to 4 has 4"},
		{"{\"a\":{\"dtype\":\"F4\",\"shape\":[3],\"data_offsets\":[0,1]}}", HR_E_SUBBYTE, "a", "\"a\"",
		 "12 bits of F4"},
		{"{\"a\":{\"dtype\":\"F4\",\"shape\":[9223372036854775807,4],\"data_offsets\":[0,1]}}", HR_E_OVERFLOW,
		 "a", "\"a\"", "64 bits"},
	};

	(void)state;
	for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
		const char *at = NULL;

		for (const char *next = strstr(rows[i].text, rows[i].at); next; next = strstr(next + 1, rows[i].at))
			at = next;
		assert_fails(parse_text(rows[i].text, 1), rows[i].code);
		assert_string_equal(hr_error_last()->stage, "header");
		assert_string_equal(hr_error_last()->tensor, rows[i].tensor);
		if (!strstr(hr_error_last()->message, rows[i].words))
			fail_msg("row %zu: %s", i, hr_error_last()->message);
		if (hr_error_last()->offset != (uint64_t)(at - rows[i].text) + 8)
			fail_msg("row %zu: at %d, said %s", i, (int)(at - rows[i].text) + 8, hr_error_last()->message);
	}
}

static void says_how_much_is_missing_or_too_much(void **state)
{
	(void)state;
	assert_fails(parse_text(good, GOOD_DATA - 5), HR_E_COVER);
	assert_non_null(strstr(hr_error_last()->message, "describes 24 bytes of tensors, the file has 19"));
	assert_non_null(strstr(hr_error_last()->message, "short by 5; it is truncated, download it again"));
	assert_int_equal(hr_error_last()->offset, 8 + strlen(good) + GOOD_DATA - 5);
	assert_fails(parse_text(good, GOOD_DATA + 5), HR_E_COVER);
	assert_non_null(strstr(hr_error_last()->message, "5 bytes belong to no tensor"));
	assert_int_equal(hr_error_last()->offset, 8 + strlen(good) + GOOD_DATA);
}

static void messages_of_hostile_names_stay_short_and_printable(void **state)
{
	static char text[6 * 65536 + 200];
	size_t at = 2;

	(void)state;
	memcpy(text, "{\"", 2);
	for (unsigned i = 0; i < 65536; i++, at += 6)
		memcpy(text + at, i % 2 ? "\\u001b" : "\\u202e", 6);
	memcpy(text + at, "\":{}}", 6);
	assert_fails(parse_text(text, 0), HR_E_LIMIT); /* U+202E has three bytes: too long */
	for (unsigned i = 0; i < 65536; i++)
		memcpy(text + 2 + 6 * i, i % 2 ? "\\u0000" : "\\u001b", 6);
	assert_fails(parse_text(text, 0), HR_E_FIELD);
	for (const char *c = hr_error_last()->message; *c; c++)
		assert_true((unsigned char)*c >= 0x20);
	assert_true(strlen(hr_error_last()->message) < 400);
}

static void frame_checks_the_length_against_cap_and_file(void **state)
{
	static const struct {
		uint64_t n, file_bytes;
		int code;
	} rows[] = {
		{2, 10, 0},
		{2, 9, HR_E_HEADER_LENGTH},
		{0, 8, 0},
		{0, 7, HR_E_SMALL},
		{100000000, 100000008, 0},
		{100000000, 100000007, HR_E_HEADER_LENGTH},
		{100000000, UINT64_MAX, 0},
		{100000001, UINT64_MAX, HR_E_HEADER_LARGE},
		{UINT64_MAX, UINT64_MAX, HR_E_HEADER_LARGE},
		{UINT64_MAX - 7, UINT64_MAX, HR_E_HEADER_LARGE},
	};
	uint64_t json_bytes;
	uint8_t first[8];

	(void)state;
	for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
		for (int b = 0; b < 8; b++)
			first[b] = (uint8_t)(rows[i].n >> (8 * b));
		json_bytes = 1;
		assert_int_equal(hr__header_frame(first, 8, rows[i].file_bytes, &json_bytes), rows[i].code);
		assert_true(json_bytes == (rows[i].code ? 0 : rows[i].n));
	}
	assert_fails(hr__header_frame(first, 3, 3, &json_bytes), HR_E_SMALL);
	assert_fails(hr__header_frame(first, 0, 0, &json_bytes), HR_E_SMALL);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(reads_what_the_header_says),
		cmocka_unit_test(refuses_every_truncation_and_every_appended_byte),
		cmocka_unit_test(whatever_one_flipped_bit_leaves_accepted_is_consistent),
		cmocka_unit_test(white_space_order_and_escapes_never_change_the_result),
		cmocka_unit_test(every_failing_allocation_is_a_clean_error),
		cmocka_unit_test(finds_one_name_that_occurs_twice_among_many),
		cmocka_unit_test(errors_name_the_tensor_and_the_byte),
		cmocka_unit_test(says_how_much_is_missing_or_too_much),
		cmocka_unit_test(messages_of_hostile_names_stay_short_and_printable),
		cmocka_unit_test(frame_checks_the_length_against_cap_and_file),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
