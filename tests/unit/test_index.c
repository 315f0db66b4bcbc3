/* SPDX-License-Identifier: Apache-2.0 */
/* model/index: what an index may say. Texts are parsed from blocks of exactly their size, so a sanitizer sees every
 * overrun. */
#include "modeltest.h"

#include "model/build.h"
#include "model/index.h"

#include <errno.h>

static const struct hr__hash_key key = {1, 2};

/* The index points into its text, which `keep` gets. */
static int parse(const char *text, size_t n, struct hr__index *out, uint8_t **keep)
{
	int code;

	*keep = malloc(n ? n : 1);
	if (n)
		memcpy(*keep, text, n);
	code = hr__index_parse(&key, *keep, n, out);
	if (!code)
		code = hr__index_make_table(&key, out);
	if (code)
		hr__index_free(out);
	return code;
}

static void assert_refused(const char *text, size_t n, int expected, const char *says)
{
	struct hr__index index;
	uint8_t *keep;
	int rc = parse(text, n, &index, &keep);

	if (rc != expected)
		fail_msg("%.200s: gave %s, expected %s (%s)", text, hr_error_name(rc), hr_error_name(expected),
			 rc ? hr_error_last()->message : "");
	assert_int_equal(hr_error_last()->code, expected);
	assert_string_equal(hr_error_last()->stage, "index");
	if (says && !strstr(hr_error_last()->message, says))
		fail_msg("\"%s\" does not say \"%s\"", hr_error_last()->message, says);
	assert_null(index.entries);
	assert_null(index.shards);
	free(keep);
}

static void refused(const char *text, int expected, const char *says)
{
	assert_refused(text, strlen(text), expected, says);
}

static uint32_t shard_of(const struct hr__index *index, const char *name, size_t n)
{
	const struct hr__index_entry *entry = hr__index_find(index, hr__hash(&key, name, n), name, n);

	return entry ? entry->shard : UINT32_MAX;
}

static void accepted(const char *text, uint32_t n_shards, size_t n_entries)
{
	struct hr__index index;
	uint8_t *keep;

	assert_ok(parse(text, strlen(text), &index, &keep));
	assert_int_equal(index.n_shards, n_shards);
	assert_int_equal(index.n_entries, n_entries);
	hr__index_free(&index);
	free(keep);
}

static void shards_are_numbered_by_name_and_tensors_found(void **state)
{
	static const char text[] =
		"\xef\xbb\xbf" /* skipped below */
		"{\"metadata\":{\"total_size\":12,\"x\":[1]},\"weight_map\":{\"c\":\"m-2.safetensors\",\"a\":\"m-1.safetensors\","
		"\"b\":\"m-2.safetensors\",\"\":\"m-1.safetensors\"}}";
	struct hr__index index;
	uint8_t *keep;

	(void)state;
	assert_ok(parse(text + 3, sizeof(text) - 4, &index, &keep));
	assert_int_equal(index.n_shards, 2);
	assert_string_equal(index.shards[0], "m-1.safetensors");
	assert_string_equal(index.shards[1], "m-2.safetensors");
	assert_int_equal(index.n_entries, 4);
	assert_int_equal(shard_of(&index, "a", 1), 0);
	assert_int_equal(shard_of(&index, "b", 1), 1);
	assert_int_equal(shard_of(&index, "c", 1), 1);
	assert_int_equal(shard_of(&index, "", 0), 0);
	assert_int_equal(shard_of(&index, "d", 1), UINT32_MAX);
	assert_true(index.has_total_size);
	assert_int_equal(index.total_size, 12);
	hr__index_free(&index);
	free(keep);
}

static void escapes_in_names_are_decoded(void **state)
{
	static const char text[] =
		"{\"weight_map\":{\"a\\u0000b\":\"\\u006d.safetensors\",\"\\ud83d\\ude00\":\"m.safetensors\","
		"\"plain\":\"m\\u002esafetensors\"}}";
	struct hr__index index;
	uint8_t *keep;

	(void)state;
	assert_ok(parse(text, sizeof(text) - 1, &index, &keep));
	assert_int_equal(index.n_shards, 1); /* three spellings of one name */
	assert_string_equal(index.shards[0], "m.safetensors");
	assert_int_equal(shard_of(&index, "a\0b", 3), 0);
	assert_int_equal(shard_of(&index, "\xf0\x9f\x98\x80", 4), 0);
	assert_int_equal(shard_of(&index, "plain", 5), 0);
	hr__index_free(&index);
	free(keep);
}

/* V51 */
static void total_size_is_taken_if_whole_and_ignored_otherwise(void **state)
{
	static const struct {
		const char *metadata;
		bool has;
		uint64_t value;
	} rows[] = {
		{"", false, 0},
		{"\"metadata\":null,", false, 0},
		{"\"metadata\":[1,2],", false, 0},
		{"\"metadata\":\"x\",", false, 0},
		{"\"metadata\":{},", false, 0},
		{"\"metadata\":{\"total_size\":8.0},", false, 0},
		{"\"metadata\":{\"total_size\":8e3},", false, 0},
		{"\"metadata\":{\"total_size\":-8},", false, 0},
		{"\"metadata\":{\"total_size\":\"8\"},", false, 0},
		{"\"metadata\":{\"total_size\":null},", false, 0},
		{"\"metadata\":{\"total_size\":18446744073709551616},", false, 0},
		{"\"metadata\":{\"total_size\":18446744073709551615},", true, UINT64_MAX},
		{"\"metadata\" : { \"total_size\" : 8 } ,", true, 8},
	};

	(void)state;
	for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
		char text[200];
		struct hr__index index;
		uint8_t *keep;

		snprintf(text, sizeof(text), "{%s\"weight_map\":{\"a\":\"m.safetensors\"}}", rows[i].metadata);
		assert_ok(parse(text, strlen(text), &index, &keep));
		assert_int_equal(index.has_total_size, rows[i].has);
		if (rows[i].has)
			assert_int_equal(index.total_size, rows[i].value);
		hr__index_free(&index);
		free(keep);
	}
}

/* V52, V55 */
static void real_world_spellings_are_accepted(void **state)
{
	(void)state;
	accepted(
		"\r\n\t {\n  \"version\": 1, \"weight_map\": {\n    \"b\": \"x.safetensors\",\n    \"a\": \"x.safetensors\"\n  },\n"
		"  \"extra\": {\"k\": [1, 2.5, {\"d\": null}]}\n}\n ",
		1, 2);
	accepted(
		"{\"weight_map\":{\"a\":\"consolidated-00001-of-00051.safetensors\",\"b\":\"model-1-of-61.safetensors\","
		"\"c\":\"model-000001-of-000163.safetensors\",\"d\":\"weights with space.safetensors\"}}",
		4, 4);
	accepted("{\"weight_map\":{\"weight_map\":\"..safetensors\"}}", 1, 1);
}

/* V52: indented, 17 MB, unsorted */
static void a_large_index_is_read_whole(void **state)
{
	const size_t n = 185000;
	char *text = malloc(n * 140 + 100), name[80];
	size_t used = 0;
	struct hr__index index;
	uint8_t *keep;

	(void)state;
	used += (size_t)snprintf(text, 60, "{\n  \"weight_map\": {\n");
	for (size_t i = 0; i < n; i++)
		used += (size_t)snprintf(
			text + used, 140,
			"    \"model.layers.%zu.mlp.experts.down_proj.weight_scale_inv\": \"model-%05zu-of-00161.safetensors\"%s\n",
			i * 7919 % n, i % 161, i + 1 < n ? "," : "");
	used += (size_t)snprintf(text + used, 10, "  }\n}\n");
	assert_true(used > 17000000);
	assert_ok(parse(text, used, &index, &keep));
	assert_int_equal(index.n_shards, 161);
	assert_int_equal(index.n_entries, n);
	for (size_t i = 0; i < n; i++) {
		int length = snprintf(name, sizeof(name), "model.layers.%zu.mlp.experts.down_proj.weight_scale_inv",
				      i * 7919 % n);

		assert_int_equal(shard_of(&index, name, (size_t)length), i % 161);
	}
	hr__index_free(&index);
	free(keep);
	free(text);
}

/* I95 */
static void refuses_what_is_not_json_or_not_utf8(void **state)
{
	static const char good[] = "{\"metadata\":{\"total_size\":8},\"weight_map\":{\"a\":\"m.safetensors\"}}";

	(void)state;
	refused("", HR_E_JSON, NULL);
	refused("hello", HR_E_JSON, NULL);
	refused("\xef\xbb\xbf{}", HR_E_JSON, NULL);
	refused("{\"weight_map\":{\"\xff\":\"m.safetensors\"}}", HR_E_UTF8, "byte");
	refused("{\"weight_map\":{\"a\":\"m\xc0\xaf.safetensors\"}}", HR_E_UTF8, NULL);
	refused("{\"weight_map\":{\"a\":\"m.safetensors\",}}", HR_E_JSON, NULL);
	refused("{\"weight_map\":{\"a\":\"m.safetensors\"}} {}", HR_E_JSON, NULL);
	refused("{\"weight_map\":{\"\\ud800\":\"m.safetensors\"}}", HR_E_JSON, NULL);
	assert_refused("{\"weight_map\":{\"a\":\"m.safetensors\"}}\0", 37, HR_E_JSON, NULL);
	for (size_t n = 0; n < sizeof(good) - 1; n++) /* every truncation */
		assert_refused(good, n, HR_E_JSON, NULL);
}

/* I95, I96, I97 */
static void refuses_the_wrong_shape(void **state)
{
	(void)state;
	refused("[]", HR_E_TYPE, NULL);
	refused("null", HR_E_TYPE, NULL);
	refused("\"x\"", HR_E_TYPE, NULL);
	refused("{}", HR_E_FIELD, "weight_map");
	refused("{\"metadata\":{\"weight_map\":{}}}", HR_E_FIELD, "weight_map");
	refused("{\"Weight_map\":{\"a\":\"m.safetensors\"}}", HR_E_FIELD, NULL);
	refused("{\"weight_map\":null}", HR_E_TYPE, "weight_map");
	refused("{\"weight_map\":[]}", HR_E_TYPE, "weight_map");
	refused("{\"weight_map\":{\"a\":1}}", HR_E_TYPE, NULL);
	refused("{\"weight_map\":{\"a\":null}}", HR_E_TYPE, NULL);
	refused("{\"weight_map\":{\"a\":[\"m.safetensors\"]}}", HR_E_TYPE, NULL);
	refused("{\"weight_map\":{}}", HR_E_INDEX, "empty");
}

/* I98 to I102 */
static void refuses_shard_names_that_are_paths(void **state)
{
	static const char *const names[] = {
		"../x.safetensors",
		"/x.safetensors",
		"/etc/passwd",
		"sub/x.safetensors",
		"./x.safetensors",
		"a//b.safetensors",
		"x.safetensors/",
		"..",
		".",
		"",
		"a\\\\b.safetensors",
		"..\\\\x.safetensors",
		"C:x.safetensors",
		"c:\\\\x.safetensors",
		"x.bin",
		"x",
		"x.safetensors.bin",
		"x.SAFETENSORS",
		"safetensors",
		"x.safetensors ",
		"a\\u0000.safetensors",
		"a\\n.safetensors",
		"a\\u007f.safetensors",
		"\\u002e\\u002e\\u002fx.safetensors",
		"x.safetensors\\u0000",
	};

	(void)state;
	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
		char text[200];

		snprintf(text, sizeof(text), "{\"weight_map\":{\"a\":\"ok.safetensors\",\"b\":\"%s\"}}", names[i]);
		refused(text, HR_E_PATH, "byte");
	}
}

static void file_names_have_at_most_255_bytes(void **state)
{
	char name[300], text[400];

	(void)state;
	memset(name, 'x', sizeof(name));
	snprintf(text, sizeof(text), "{\"weight_map\":{\"a\":\"%.243s.safetensors\"}}", name);
	accepted(text, 1, 1);
	snprintf(text, sizeof(text), "{\"weight_map\":{\"a\":\"%.244s.safetensors\"}}", name);
	refused(text, HR_E_PATH, "256");
}

/* I103, and every other level */
static void refuses_a_key_that_occurs_twice(void **state)
{
	(void)state;
	refused("{\"weight_map\":{\"a\":\"m.safetensors\",\"b\":\"m.safetensors\",\"a\":\"m.safetensors\"}}",
		HR_E_DUPLICATE, "\"a\"");
	refused("{\"weight_map\":{\"a\":\"m.safetensors\",\"a\":\"n.safetensors\"}}", HR_E_DUPLICATE, "\"a\"");
	refused("{\"weight_map\":{\"a\":\"m.safetensors\",\"\\u0061\":\"m.safetensors\"}}", HR_E_DUPLICATE, NULL);
	refused("{\"weight_map\":{\"a\":\"m.safetensors\"},\"weight_map\":{\"a\":\"m.safetensors\"}}", HR_E_DUPLICATE,
		NULL);
	refused("{\"weight_map\":{\"a\":\"m.safetensors\"},\"weight\\u005fmap\":{}}", HR_E_DUPLICATE, NULL);
	refused("{\"metadata\":null,\"metadata\":{},\"weight_map\":{\"a\":\"m.safetensors\"}}", HR_E_DUPLICATE, NULL);
	refused("{\"x\":1,\"x\":2,\"weight_map\":{\"a\":\"m.safetensors\"}}", HR_E_DUPLICATE, NULL);
	refused("{\"metadata\":{\"total_size\":1,\"total_size\":1},\"weight_map\":{\"a\":\"m.safetensors\"}}",
		HR_E_DUPLICATE, NULL);
	refused("{\"metadata\":{\"y\":1,\"y\":1},\"weight_map\":{\"a\":\"m.safetensors\"}}", HR_E_DUPLICATE, NULL);
}

/* I108 */
static void limits_keep_hostile_indexes_harmless(void **state)
{
	const size_t n = HR__MAX_SHARDS + 1;
	char *text = malloc(n * 40 + 70000);
	struct hr__index index;
	size_t used = 0;
	uint8_t *keep;

	(void)state;
	assert_fails(hr__index_parse(&key, (const uint8_t *)"{", HR__INDEX_MAX_BYTES + 1, &index), HR_E_LIMIT);
	used += (size_t)snprintf(text, 40, "{\"weight_map\":{");
	for (size_t i = 0; i < n; i++)
		used += (size_t)snprintf(text + used, 40, "%s\"%zu\":\"%zu.safetensors\"", i ? "," : "", i,
					 i % (n - 1));
	used += (size_t)snprintf(text + used, 3, "}}");
	assert_ok(parse(text, used, &index, &keep)); /* exactly as many as may be */
	assert_int_equal(index.n_shards, HR__MAX_SHARDS);
	hr__index_free(&index);
	free(keep);
	used = (size_t)(strstr(text + used - 20, ":\"0.") - text);
	used += (size_t)snprintf(text + used, 30, ":\"one_more.safetensors\"}}");
	assert_refused(text, used, HR_E_LIMIT, "65536");

	used = (size_t)snprintf(text, 40, "{\"weight_map\":{\"");
	memset(text + used, 'n', 65537);
	strncpy(text + used + 65537, "\":\"m.safetensors\"}}", 30);
	refused(text, HR_E_LIMIT, "65537");
	strncpy(text + used + 65536, "\":\"m.safetensors\"}}", 30);
	accepted(text, 1, 1);

	used = 1;
	for (int i = 0; i < 70; i++)
		used += (size_t)snprintf(text + used, 20, "\"k%d\":0,", i);
	snprintf(text + used, 60, "\"weight_map\":{\"a\":\"m.safetensors\"}}");
	refused(text, HR_E_LIMIT, NULL);
	memset(text, '[', 60000);
	memcpy(text, "{\"x\":", 5);
	assert_refused(text, 60000, HR_E_LIMIT, NULL);
	free(text);
}

static void survives_every_failing_allocation(void **state)
{
	char text[8000];
	size_t used = 0;
	uint64_t n;

	(void)state;
	used += (size_t)snprintf(text, 40, "{\"weight_map\":{\"\\u0041\":\"z.safetensors\"");
	for (int i = 0; i < 120; i++)
		used += (size_t)snprintf(text + used, 60, ",\"%d\":\"%d.safetensors\"", i, i % 40);
	snprintf(text + used, 3, "}}");
	for (n = 1;; n++) {
		struct hr__index index;
		uint8_t *keep;
		int rc, fired;

		hr__fault_arm("malloc", n, ENOMEM);
		rc = parse(text, strlen(text), &index, &keep);
		fired = hr__fault_fired();
		hr__fault_arm(NULL, 0, 0);
		if (fired)
			assert_int_equal(rc, HR_E_NOMEM);
		else
			assert_ok(rc);
		hr__index_free(&index);
		free(keep);
		if (!fired)
			break;
	}
	assert_true(n > 45);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(shards_are_numbered_by_name_and_tensors_found),
		cmocka_unit_test(escapes_in_names_are_decoded),
		cmocka_unit_test(total_size_is_taken_if_whole_and_ignored_otherwise),
		cmocka_unit_test(real_world_spellings_are_accepted),
		cmocka_unit_test(a_large_index_is_read_whole),
		cmocka_unit_test(refuses_what_is_not_json_or_not_utf8),
		cmocka_unit_test(refuses_the_wrong_shape),
		cmocka_unit_test(refuses_shard_names_that_are_paths),
		cmocka_unit_test(file_names_have_at_most_255_bytes),
		cmocka_unit_test(refuses_a_key_that_occurs_twice),
		cmocka_unit_test(limits_keep_hostile_indexes_harmless),
		cmocka_unit_test(survives_every_failing_allocation),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
