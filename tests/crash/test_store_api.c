/* SPDX-License-Identifier: Apache-2.0 */
/* The store's part of headrace.h on a plain file: what goes in comes out, what is wrong is told with its own code. */
#include "storetest.h"

#include "core/hash.h"
#include "store/copy_out.h"
#include "store/gather.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

static char *dir, *region;

static int make_region(void **state)
{
	struct hr_store_init_opts opts = HR_STORE_INIT_OPTS_INIT;

	(void)state;
	dir = make_temp_dir();
	region = path_in(dir, "region.img");
	opts.bytes = 32 << 20;
	opts.name = "a pool";
	assert_ok(hr_store_init(region, &opts));
	return 0;
}

static int remove_region(void **state)
{
	(void)state;
	remove_tree(dir);
	free(region);
	free(dir);
	return 0;
}

static hr_store *open_store(uint32_t flags)
{
	struct hr_store_opts opts = HR_STORE_OPTS_INIT;
	hr_store *store;

	opts.flags = flags;
	assert_ok(hr_store_open(region, &opts, &store));
	return store;
}

static int import(hr_store *store, const char *source, const char *model, uint32_t flags,
		  struct hr_store_import_info *info)
{
	struct hr_store_import_opts opts = HR_STORE_IMPORT_OPTS_INIT;
	char path[512];

	snprintf(path, sizeof(path), "%s/%s", store_sources, source);
	opts.flags = flags;
	return hr_store_import(store, path, model, &opts, info);
}

/* Changes bytes of the region behind the store's back. */
static void scribble(uint64_t at, const void *bytes, size_t n)
{
	int fd = open(region, O_WRONLY | O_CLOEXEC);

	assert_true(fd >= 0 && pwrite(fd, bytes, n, (off_t)at) == (ssize_t)n && fsync(fd) == 0);
	close(fd);
}

static struct hr_store_check_info check(uint32_t flags, const char *salvage_to)
{
	struct hr_store_check_opts opts = HR_STORE_CHECK_OPTS_INIT;
	struct hr_store_check_info info = HR_STORE_CHECK_INFO_INIT;

	opts.flags = flags;
	opts.salvage_to = salvage_to;
	assert_ok(hr_store_check(region, &opts, &info));
	return info;
}

/* ---- in and out ---- */

static void a_directory_comes_out_as_it_went_in(void **state)
{
	struct hr_store_import_info info = HR_STORE_IMPORT_INFO_INIT;
	hr_store *store = open_store(HR_STORE_WRITE);
	char command[2000], *deep = path_in(store_sources, "b/deep"), *out = path_in(dir, "out");

	(void)state;
	snprintf(command, sizeof(command),
		 "mkdir -p %s/er %s/b/.git && echo x > %s/er/file && : > %s/nothing && echo y > %s/b/.git/HEAD", deep,
		 store_sources, deep, deep, store_sources);
	assert_int_equal(system(command), 0);
	assert_ok(import(store, "b", "beta", 0, &info));
	assert_int_equal(info.n_files, 6);
	assert_int_equal(info.n_shards, 3);
	assert_int_equal(info.n_skipped, 1); /* .git */
	assert_ok(hr_store_get(store, "beta", out, NULL));
	snprintf(command, sizeof(command), "diff -r -x .git %s/b %s && test ! -e %s/.git", store_sources, out, out);
	assert_int_equal(system(command), 0);
	assert_fails(hr_store_get(store, "beta", out, NULL), HR_E_EXISTS);
	assert_fails(hr_store_get(store, "gamma", out, NULL), HR_E_NOTFOUND);
	hr_store_close(store);
	remove_tree(out);
	remove_tree(deep);
	snprintf(command, sizeof(command), "%s/b/.git", store_sources);
	remove_tree(command);
	free(deep);
	free(out);
}

static void what_is_there_already_is_not_written_again(void **state)
{
	struct hr_store_import_info info = HR_STORE_IMPORT_INFO_INIT;
	hr_store *store = open_store(HR_STORE_WRITE);
	uint64_t generation;

	(void)state;
	assert_ok(import(store, "a", "alpha", 0, &info));
	assert_int_equal(info.shared_bytes, 0);
	generation = info.generation;
	assert_fails(import(store, "a", "alpha", 0, &info), HR_E_EXISTS);
	assert_ok(import(store, "a", "again", 0, &info));
	assert_int_equal(info.written_bytes, 0);
	assert_int_equal(info.shared_bytes, info.bytes);
	assert_int_equal(info.generation, generation + 1);
	/* One shard of "c" is the same as one of "a". */
	assert_ok(import(store, "c", "alpha", HR_IMPORT_REPLACE, &info));
	assert_true(info.shared_bytes > 0 && info.written_bytes > 0);
	hr_store_close(store);
}

static void a_plan_writes_nothing(void **state)
{
	struct hr_store_import_info info = HR_STORE_IMPORT_INFO_INIT;
	hr_store *store = open_store(0);

	(void)state;
	assert_ok(import(store, "d", "delta", HR_IMPORT_PLAN, &info));
	assert_int_equal(info.n_files, 4);
	assert_int_equal(info.needed_bytes, 4 * 131072);
	assert_int_equal(info.generation, 0);
	assert_fails(import(store, "d", "delta", 0, &info), HR_E_OPTS); /* opened for reading */
	hr_store_close(store);
}

/* Some files of an import that was given up are found again. */
static int give_up_after_two(void *ctx, const struct hr_store_progress *progress)
{
	(void)ctx;
	return progress->done_files >= 2 && strcmp(progress->step, "writing") == 0;
}

static void an_import_goes_on_where_it_was(void **state)
{
	struct hr_store_import_opts opts = HR_STORE_IMPORT_OPTS_INIT;
	struct hr_store_import_info info = HR_STORE_IMPORT_INFO_INIT;
	struct hr_store_info before = HR_STORE_INFO_INIT, after = HR_STORE_INFO_INIT;
	hr_store *store = open_store(HR_STORE_WRITE);
	char path[512];

	(void)state;
	snprintf(path, sizeof(path), "%s/d", store_sources);
	opts.commit_bytes = 1;
	opts.progress = give_up_after_two;
	assert_fails(hr_store_import(store, path, "delta", &opts, NULL), HR_E_CANCELLED);
	assert_ok(hr_store_stats(store, &before));
	assert_int_equal(before.n_models, 0);
	assert_int_equal(before.n_unbound, 2);
	opts.progress = NULL;
	assert_ok(hr_store_import(store, path, "delta", &opts, &info));
	assert_true(info.shared_bytes > 0);
	assert_ok(hr_store_stats(store, &after));
	assert_int_equal(after.n_unbound, 0);
	assert_int_equal(after.n_models, 1);
	hr_store_close(store);
}

static void removed_space_comes_back(void **state)
{
	struct hr_store_reclaim_info freed = HR_STORE_RECLAIM_INFO_INIT;
	struct hr_store_info before = HR_STORE_INFO_INIT, after = HR_STORE_INFO_INIT;
	hr_store *store = open_store(HR_STORE_WRITE), *reader;

	(void)state;
	assert_ok(hr_store_stats(store, &before));
	assert_ok(import(store, "a", "alpha", 0, NULL));
	reader = open_store(0);
	assert_ok(hr_store_remove(store, "alpha"));
	assert_fails(hr_store_remove(store, "alpha"), HR_E_NOTFOUND);
	assert_ok(hr_store_reclaim(store, &freed));
	assert_true(freed.held_bytes > 0);
	assert_int_equal(freed.held_generation, 2);
	hr_store_close(reader);
	assert_ok(hr_store_reclaim(store, &freed));
	assert_true(freed.freed_bytes >= 3 * 131072);
	assert_int_equal(freed.held_bytes, 0);
	assert_ok(hr_store_stats(store, &after));
	assert_int_equal(after.live_bytes, 0);
	/* But for the manifests of the last two generations. */
	assert_true(after.free_bytes + 2 * 131072 >= before.free_bytes);
	hr_store_close(store);
}

static void an_index_brings_its_shards(void **state)
{
	static const char index[] =
		"{\"metadata\":{},\"weight_map\":{\"w\":\"m-1.safetensors\",\"v\":\"m-2.safetensors\","
		"\"u\":\"m-1.safetensors\"}}";
	static const char outside[] = "{\"weight_map\":{\"w\":\"../a/m-1.safetensors\"}}";
	struct hr_store_import_info info = HR_STORE_IMPORT_INFO_INIT;
	hr_store *store = open_store(HR_STORE_WRITE);
	char *path = path_in(store_sources, "b/model.safetensors.index.json");

	(void)state;
	write_file(path, index, sizeof(index) - 1);
	assert_ok(import(store, "b/model.safetensors.index.json", "indexed", 0, &info));
	assert_int_equal(info.n_files, 3); /* two shards and the index itself */
	assert_ok(import(store, "b/m-3.safetensors", "single", 0, &info));
	assert_int_equal(info.n_files, 1);
	write_file(path, outside, sizeof(outside) - 1);
	assert_fails(import(store, "b/model.safetensors.index.json", "outside", 0, &info), HR_E_PATH);
	unlink(path);
	free(path);
	hr_store_close(store);
}

static void a_bad_shard_is_refused_before_anything_is_written(void **state)
{
	struct hr_store_info before = HR_STORE_INFO_INIT, after = HR_STORE_INFO_INIT;
	hr_store *store = open_store(HR_STORE_WRITE);
	char *path = path_in(store_sources, "a/z.safetensors");

	(void)state;
	write_file(path, "nonsense and more", 17);
	assert_ok(hr_store_stats(store, &before));
	assert_int_not_equal(import(store, "a", "alpha", 0, NULL), 0);
	assert_non_null(strstr(hr_error_last()->path, "z.safetensors"));
	assert_ok(hr_store_stats(store, &after));
	assert_int_equal(before.generation, after.generation);
	unlink(path);
	free(path);
	assert_fails(import(store, "not there", "alpha", 0, NULL), HR_E_NOTFOUND);
	hr_store_close(store);
}

/* ---- the exported manifest ---- */

static int collect(void *ctx, const char *text, size_t bytes)
{
	char **all = ctx;
	size_t have = *all ? strlen(*all) : 0;

	*all = realloc(*all, have + bytes + 1);
	memcpy(*all + have, text, bytes);
	(*all)[have + bytes] = '\0';
	return 0;
}

static int refuse(void *ctx, const char *text, size_t bytes)
{
	(void)ctx;
	(void)text;
	return bytes > 0;
}

static void an_export_names_the_generation_and_its_files(void **state)
{
	hr_store *store = open_store(HR_STORE_WRITE);
	char *text = NULL;

	(void)state;
	assert_ok(import(store, "a", "a \"quoted\" name", 0, NULL));
	assert_ok(hr_store_export(store, collect, &text));
	assert_non_null(strstr(text, "\"format\": \"headrace-store-manifest\""));
	assert_non_null(strstr(text, "\"generation\": 2,"));
	assert_non_null(strstr(text, "a \\\"quoted\\\" name"));
	assert_non_null(strstr(text, "m-1.safetensors"));
	assert_non_null(strstr(text, region));
	assert_non_null(strstr(text, "/a\", \"files\": [")); /* where it came from */
	assert_fails(hr_store_export(store, refuse, NULL), HR_E_CANCELLED);
	free(text);
	hr_store_close(store);
}

/* ---- checks ---- */

static void a_check_finds_and_mends_lost_copies(void **state)
{
	struct hr_store_check_info info;
	unsigned char rubbish[4096];
	hr_store *store = open_store(HR_STORE_WRITE);
	struct hr__root root;
	unsigned slot;

	(void)state;
	assert_ok(import(store, "a", "alpha", 0, NULL));
	root = store->now->root;
	slot = store->now->slot;
	hr_store_close(store);
	info = check(HR_CHECK_DIGESTS, NULL);
	assert_int_equal(info.n_bad, 0);
	assert_int_equal(info.n_objects, 3);
	memset(rubbish, 0x5a, sizeof(rubbish));
	scribble(HR__LABEL_OFF, rubbish, sizeof(rubbish));
	scribble(HR__ROOT_OFF(slot), rubbish, sizeof(rubbish));
	scribble(root.body_off[1], rubbish, sizeof(rubbish));
	info = check(0, NULL);
	assert_int_equal(info.n_bad, 3);
	assert_int_equal(info.n_repaired, 0);
	info = check(HR_CHECK_REPAIR, NULL);
	assert_int_equal(info.n_bad, 0);
	assert_int_equal(info.n_repaired, 3);
	assert_int_equal(info.generation, root.generation + 1); /* a new manifest took a commit */
}

static void a_check_names_the_file_that_rotted(void **state)
{
	hr_store *store = open_store(HR_STORE_WRITE);
	struct hr_store_object_info object = HR_STORE_OBJECT_INFO_INIT;
	char *out = path_in(dir, "out");

	(void)state;
	assert_ok(import(store, "a", "alpha", 0, NULL));
	assert_ok(hr_store_object(store, 0, &object));
	hr_store_close(store);
	scribble(object.offset + object.bytes / 2, "rot", 3);
	assert_int_equal(check(0, NULL).n_bad, 0); /* nobody read it */
	assert_int_equal(check(HR_CHECK_DIGESTS, NULL).n_bad, 1);
	store = open_store(0);
	assert_fails(hr_store_get(store, "alpha", out, NULL), HR_E_DIGEST);
	hr_store_close(store);
	remove_tree(out);
	free(out);
}

static void a_salvage_finds_what_is_left(void **state)
{
	hr_store *store = open_store(HR_STORE_WRITE);
	char *to = path_in(dir, "salvage"), command[600];
	struct hr_store_check_info info;
	unsigned char rubbish[4096] = {0};

	(void)state;
	assert_ok(import(store, "a", "alpha", 0, NULL));
	hr_store_close(store);
	for (unsigned copy = 0; copy < 2; copy++) {
		scribble(hr__label_off(32 << 20, copy), rubbish, sizeof(rubbish));
		scribble(hr__root_off(32 << 20, 0, copy), rubbish, sizeof(rubbish));
		scribble(hr__root_off(32 << 20, 1, copy), rubbish, sizeof(rubbish));
	}
	assert_fails(hr_store_check(region, NULL, &info), HR_E_NOT_A_STORE);
	info = check(HR_CHECK_SALVAGE, to);
	assert_int_equal(info.n_objects, 3);
	assert_int_equal(info.n_salvaged, 3);
	snprintf(command, sizeof(command), "ls %s | grep -c safetensors | grep -qx 2", to);
	assert_int_equal(system(command), 0);
	remove_tree(to);
	free(to);
}

/* ---- what is refused ---- */

static void a_store_is_not_made_over_something_else(void **state)
{
	struct hr_store_init_opts opts = HR_STORE_INIT_OPTS_INIT;
	char *other = path_in(dir, "other.img");

	(void)state;
	assert_fails(hr_store_init(region, &opts), HR_E_FOREIGN); /* a store already */
	assert_int_equal(truncate(region, 0), 0);
	assert_fails(hr_store_init(region, &opts), HR_E_GEOMETRY);
	opts.bytes = 1 << 20;
	assert_fails(hr_store_init(other, &opts), HR_E_OPTS);
	opts.bytes = 16 << 20;
	write_file(other, "something", 9);
	assert_fails(hr_store_init(other, &opts), HR_E_FOREIGN);
	opts.flags = HR_STORE_FORCE;
	assert_ok(hr_store_init(other, &opts));
	opts.bytes = 0;
	opts.flags = 0;
	assert_fails(hr_store_init(dir, &opts), HR_E_IO);
	assert_fails(hr_store_init("/nonexistent/x", &opts), HR_E_NOTFOUND);
	free(other);
}

static void a_region_that_is_wrong_has_its_own_error(void **state)
{
	struct hr_store_opts opts = HR_STORE_OPTS_INIT;
	hr_store *store;
	struct hr__disk_label *label = calloc(1, sizeof(*label));
	char *blank = path_in(dir, "blank");
	int fd;

	(void)state;
	opts.generation = 7;
	assert_fails(hr_store_open(region, &opts, &store), HR_E_NOTFOUND);
	opts.generation = 0;
	write_file(blank, "", 0);
	assert_fails(hr_store_open(blank, &opts, &store), HR_E_NOT_A_STORE);
	assert_int_equal(truncate(blank, 32 << 20), 0);
	assert_fails(hr_store_open(blank, &opts, &store), HR_E_NOT_A_STORE);
	assert_int_equal(truncate(region, 24 << 20), 0);
	assert_fails(hr_store_open(region, &opts, &store), HR_E_GEOMETRY);
	assert_int_equal(truncate(region, 32 << 20), 0);
	/* A label with a feature that is not known. */
	fd = open(region, O_RDONLY | O_CLOEXEC);
	assert_int_equal(pread(fd, label, sizeof(*label), HR__LABEL_OFF), sizeof(*label));
	close(fd);
	label->feat_incompat = 1;
	hr__record_seal(label, HR__MAGIC_LABEL, label->head.store_uuid);
	scribble(HR__LABEL_OFF, label, sizeof(*label));
	assert_fails(hr_store_open(region, &opts, &store), HR_E_STORE_VERSION);
	/* One that a writer may not write beside. */
	label->feat_incompat = 0;
	label->feat_ro_compat = 1;
	hr__record_seal(label, HR__MAGIC_LABEL, label->head.store_uuid);
	scribble(HR__LABEL_OFF, label, sizeof(*label));
	opts.flags = HR_STORE_WRITE;
	assert_fails(hr_store_open(region, &opts, &store), HR_E_STORE_VERSION);
	/* A store of a device that has a name. */
	label->feat_ro_compat = 0;
	memcpy(label->wwid, "eui.0123", 8);
	hr__record_seal(label, HR__MAGIC_LABEL, label->head.store_uuid);
	scribble(HR__LABEL_OFF, label, sizeof(*label));
	assert_fails(hr_store_open(region, &opts, &store), HR_E_IDENTITY);
	opts.flags = HR_STORE_WRITE | HR_STORE_MOVED;
	assert_ok(hr_store_open(region, &opts, &store));
	hr_store_close(store);
	free(label);
	free(blank);
}

static void a_store_that_is_replaced_is_noticed(void **state)
{
	struct hr_store_init_opts opts = HR_STORE_INIT_OPTS_INIT;
	hr_store *reader = open_store(0);

	(void)state;
	assert_ok(hr__snapshot_check(reader->now));
	opts.flags = HR_STORE_FORCE;
	assert_ok(hr_store_init(region, &opts));
	assert_fails(hr__snapshot_check(reader->now), HR_E_REGION_CHANGED);
	hr_store_close(reader);
}

static void bad_names_and_options_are_refused(void **state)
{
	struct hr_store_import_opts opts = HR_STORE_IMPORT_OPTS_INIT;
	hr_store *store = open_store(HR_STORE_WRITE);
	uint32_t number;

	(void)state;
	assert_fails(import(store, "a", "", 0, NULL), HR_E_OPTS);
	assert_fails(import(store, "a", "a@b", 0, NULL), HR_E_OPTS);
	assert_fails(import(store, "a", "a\nb", 0, NULL), HR_E_OPTS);
	assert_fails(import(store, "a", "\xff", 0, NULL), HR_E_OPTS);
	assert_fails(import(store, "a", "good", 1u << 20, NULL), HR_E_OPTS);
	opts.size = 3;
	assert_fails(hr_store_import(store, store_sources, "good", &opts, NULL), HR_E_OPTS);
	assert_fails(hr_store_find(store, "good", &number), HR_E_NOTFOUND);
	assert_fails(hr_store_model(store, 0, NULL), HR_E_OPTS);
	hr_store_close(store);
	hr_store_close(NULL);
}

/* Names that could lead out of a directory, or mean two things. */
static void names_of_files_are_plain_relative_paths(void **state)
{
	static const char *const good[] = {"a", "a/b", ".gitattributes", "\xc3\xa4.json", "a b", "..."};
	static const char *const wrong[] = {"",     "/a",     "a/",    "a//b",  ".",        "..",
					    "../a", "a/../b", "a/./b", "a\x01", "\xc0\xaf", "\xed\xa0\x80"};

	(void)state;
	for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++)
		assert_true(hr__store_name_is_good(good[i], strlen(good[i]), true));
	for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++)
		assert_false(hr__store_name_is_good(wrong[i], strlen(wrong[i]), true));
	assert_false(hr__store_name_is_good("a\0b", 3, true));
}

/* ---- space, against a map of single units ---- */

#define UNITS 400u

static void gaps_are_found_as_a_slow_map_finds_them(void **state)
{
	struct hr__space space = {.begin = 0, .end = UNITS};
	struct test_random random;
	uint8_t map[UNITS] = {0};

	(void)state;
	test_random_start(&random, 11);
	for (int i = 0; i < 4000; i++) {
		uint64_t len = 1 + test_random_below(&random, 30), off, want = UINT64_MAX, total, largest, run = 0,
			 most = 0, n_free = 0;
		bool from_end = test_random_below(&random, 2);

		if (test_random_below(&random, 3) == 0) { /* give back what is there */
			off = test_random_below(&random, UNITS - 30);
			for (uint64_t k = 0; k < len; k++)
				if (!map[off + k])
					len = k;
			memset(map + off, 0, len);
			space.n = 0;
			for (uint64_t at = UNITS; at > 0; at--)
				if (map[at - 1])
					assert_ok(hr__space_add(&space, at - 1, 1));
		} else {
			for (uint64_t at = 0; at + len <= UNITS; at++) {
				uint64_t k = 0;

				while (k < len && !map[at + k])
					k++;
				if (k == len && (want == UINT64_MAX || from_end))
					want = at;
			}
			if (want == UINT64_MAX) {
				int code = hr__space_take(&space, len, from_end, &off);

				assert_true(code == HR_E_NOSPACE || code == HR_E_FRAGMENTED);
			} else {
				assert_ok(hr__space_take(&space, len, from_end, &off));
				assert_int_equal(off, want);
				memset(map + off, 1, len);
			}
		}
		for (uint64_t at = 0; at < UNITS; at++) {
			run = map[at] ? 0 : run + 1;
			n_free += !map[at];
			most = run > most ? run : most;
		}
		hr__space_merge(&space);
		hr__space_free_bytes(&space, &total, &largest);
		assert_int_equal(total, n_free);
		assert_int_equal(largest, most);
	}
	hr__space_free(&space);
}

#define ON_A_REGION(test) cmocka_unit_test_setup_teardown(test, make_region, remove_region)

int main(void)
{
	const struct CMUnitTest tests[] = {
		ON_A_REGION(a_directory_comes_out_as_it_went_in),
		ON_A_REGION(what_is_there_already_is_not_written_again),
		ON_A_REGION(a_plan_writes_nothing),
		ON_A_REGION(an_import_goes_on_where_it_was),
		ON_A_REGION(removed_space_comes_back),
		ON_A_REGION(an_index_brings_its_shards),
		ON_A_REGION(a_bad_shard_is_refused_before_anything_is_written),
		ON_A_REGION(an_export_names_the_generation_and_its_files),
		ON_A_REGION(a_check_finds_and_mends_lost_copies),
		ON_A_REGION(a_check_names_the_file_that_rotted),
		ON_A_REGION(a_salvage_finds_what_is_left),
		ON_A_REGION(a_store_is_not_made_over_something_else),
		ON_A_REGION(a_region_that_is_wrong_has_its_own_error),
		ON_A_REGION(a_store_that_is_replaced_is_noticed),
		ON_A_REGION(bad_names_and_options_are_refused),
		cmocka_unit_test(names_of_files_are_plain_relative_paths),
		cmocka_unit_test(gaps_are_found_as_a_slow_map_finds_them),
	};

	return cmocka_run_group_tests(tests, make_store_sources, remove_store_sources);
}
