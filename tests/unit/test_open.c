/* SPDX-License-Identifier: Apache-2.0 */
/* open.c: what a name may mean, by a directory, an index, one file or several. Each test works in a directory of
 * its own. */
#include "modeltest.h"

#include "model/model.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

static const char index_name[] = "model.safetensors.index.json";

static int new_dir(void **state)
{
	*state = make_temp_dir();
	return 0;
}

static int drop_dir(void **state)
{
	remove_tree(*state);
	free(*state);
	return 0;
}

/* Opens "<dir>/<name>" (or the directory itself) and gives the model, or NULL and the code in *rc. */
static hr_model *open_in(const char *dir, const char *name, uint32_t flags, int *rc)
{
	struct hr_model_opts opts = HR_MODEL_OPTS_INIT;
	char *path = name ? path_in(dir, name) : strdup(dir);
	int before = count_open_files();
	hr_model *model = (hr_model *)&opts;

	opts.flags = flags;
	*rc = hr_model_open(path, &opts, &model);
	free(path);
	if (*rc) {
		assert_null(model);
		assert_int_equal(count_open_files(), before);
	}
	return model;
}

static hr_model *must_open(const char *dir, const char *name)
{
	int rc;
	hr_model *model = open_in(dir, name, 0, &rc);

	assert_ok(rc);
	return model;
}

static void must_fail(const char *dir, const char *name, uint32_t flags, int expected, const char *says)
{
	int rc;

	open_in(dir, name, flags, &rc);
	if (rc != expected)
		fail_msg("%s: gave %s, expected %s (%s)", name ? name : dir, hr_error_name(rc), hr_error_name(expected),
			 rc ? hr_error_last()->message : "");
	assert_int_equal(hr_error_last()->code, expected);
	if (says && !strstr(hr_error_last()->message, says))
		fail_msg("\"%s\" does not say \"%s\"", hr_error_last()->message, says);
}

static struct hr_tensor tensor_named(const hr_model *model, const char *name)
{
	struct hr_tensor tensor = HR_TENSOR_INIT;
	uint64_t index;

	assert_ok(hr_model_find(model, name, HR_STRLEN, &index));
	assert_ok(hr_model_tensor(model, index, &tensor));
	assert_int_equal(tensor.index, index);
	assert_int_equal(tensor.name_len, strlen(name));
	assert_memory_equal(tensor.name, name, tensor.name_len);
	return tensor;
}

static const char *shard_path(const hr_model *model, uint32_t shard)
{
	static struct hr_shard described;

	described = (struct hr_shard)HR_SHARD_INIT;
	assert_ok(hr_model_shard(model, shard, &described));
	return described.path;
}

static bool path_ends(const char *path, const char *end)
{
	return strlen(path) >= strlen(end) && strcmp(path + strlen(path) - strlen(end), end) == 0;
}

/* ---- what opens ---- */

static void opens_one_file_by_path_and_by_its_directory(void **state)
{
	hr_model *model;

	SHARD(*state, "weights.safetensors", "a", "b");
	write_text(*state, "config.json", "{}");
	write_text(*state, "._weights.safetensors", "not ours");
	model = must_open(*state, "weights.safetensors");
	assert_int_equal(hr_model_n_tensors(model), 2);
	assert_int_equal(hr_model_n_shards(model), 1);
	assert_null(hr_model_warning(model, 0));
	hr_model_close(model);
	model = must_open(*state, NULL);
	assert_int_equal(hr_model_n_tensors(model), 2);
	assert_true(path_ends(shard_path(model, 0), "/weights.safetensors"));
	hr_model_close(model);
	model = must_open(*state, ""); /* with a slash at the end */
	assert_null(strstr(shard_path(model, 0), "//"));
	hr_model_close(model);
}

static void a_file_needs_no_suffix(void **state)
{
	hr_model *model;

	SHARD(*state, "0123abcd", "a");
	model = must_open(*state, "0123abcd");
	assert_int_equal(tensor_named(model, "a").bytes, 4);
	hr_model_close(model);
}

/* V47: snapshots/<revision>/x.safetensors -> ../../blobs/<digest> */
static void opens_a_hugging_face_cache_of_links(void **state)
{
	char *blobs = path_in(*state, "blobs"), *snapshots = path_in(*state, "snapshots"),
	     *revision = path_in(snapshots, "abc"), *link_a = path_in(revision, "model-1.safetensors"),
	     *link_b = path_in(revision, "model-2.safetensors"), *link_index = path_in(revision, index_name);
	hr_model *model;

	assert_int_equal(mkdir(blobs, 0700) | mkdir(snapshots, 0700) | mkdir(revision, 0700), 0);
	SHARD(blobs, "d1", "a");
	SHARD(blobs, "d2", "b");
	write_text(blobs, "d3", "{\"weight_map\":{\"a\":\"model-1.safetensors\",\"b\":\"model-2.safetensors\"}}");
	assert_int_equal(symlink("../../blobs/d1", link_a) | symlink("../../blobs/d2", link_b) |
				 symlink("../../blobs/d3", link_index),
			 0);
	model = must_open(revision, NULL);
	assert_int_equal(hr_model_n_tensors(model), 2);
	hr_model_close(model);
	model = must_open(revision, index_name);
	assert_int_equal(hr_model_n_tensors(model), 2);
	assert_int_equal(tensor_named(model, "b").shard, 1);
	hr_model_close(model);
	must_fail(revision, NULL, HR_MODEL_NO_SYMLINKS, HR_E_IO, "symbolic link");
	assert_int_equal(hr_error_last()->system, ELOOP);
	must_fail(revision, "model-1.safetensors", HR_MODEL_NO_SYMLINKS, HR_E_IO, "symbolic link");
	assert_int_equal(unlink(link_index), 0);
	write_text(revision, index_name, "{\"weight_map\":{\"a\":\"model-1.safetensors\"}}");
	must_fail(revision, NULL, HR_MODEL_NO_SYMLINKS, HR_E_IO, "model-1.safetensors");
	free(blobs);
	free(snapshots);
	free(revision);
	free(link_a);
	free(link_b);
	free(link_index);
}

/* V48 */
static void files_that_the_index_does_not_name_are_left_alone(void **state)
{
	hr_model *model;

	SHARD(*state, "model-1.safetensors", "a");
	write_text(*state, "consolidated.safetensors", "this is not even a safetensors file");
	write_text(*state, index_name, "{\"weight_map\":{\"a\":\"model-1.safetensors\"}}");
	model = must_open(*state, NULL);
	assert_int_equal(hr_model_n_shards(model), 1);
	assert_int_equal(hr_model_n_tensors(model), 1);
	hr_model_close(model);
}

/* V49 */
static void unlisted_tensors_of_listed_shards_belong_to_the_model(void **state)
{
	hr_model *model;

	SHARD(*state, "1.safetensors", "x", "a", "y");
	SHARD(*state, "2.safetensors", "b", "z");
	write_text(*state, index_name, "{\"weight_map\":{\"b\":\"2.safetensors\",\"a\":\"1.safetensors\"}}");
	model = must_open(*state, NULL);
	assert_int_equal(hr_model_n_tensors(model), 5);
	assert_int_equal(tensor_named(model, "a").flags, 0);
	assert_int_equal(tensor_named(model, "b").flags, 0);
	assert_int_equal(tensor_named(model, "x").flags, HR_TENSOR_UNLISTED);
	assert_int_equal(tensor_named(model, "y").flags, HR_TENSOR_UNLISTED);
	assert_int_equal(tensor_named(model, "z").flags, HR_TENSOR_UNLISTED);
	assert_int_equal(tensor_named(model, "z").shard, 1);
	assert_non_null(strstr(hr_model_warning(model, 0), "3 tensors"));
	assert_null(hr_model_warning(model, 1));
	hr_model_close(model);
}

/* V50 */
static void the_index_decides_between_copies(void **state)
{
	struct hr_shard shard = HR_SHARD_INIT;
	hr_model *model;

	SHARD(*state, "1.safetensors", "w", "a");
	SHARD(*state, "2.safetensors", "b", "w", "c");
	SHARD(*state, "3.safetensors", "w", "d");
	write_text(
		*state, index_name,
		"{\"weight_map\":{\"w\":\"2.safetensors\",\"a\":\"1.safetensors\",\"b\":\"2.safetensors\",\"c\":\"2.safetensors\","
		"\"d\":\"3.safetensors\"}}");
	model = must_open(*state, NULL);
	assert_int_equal(hr_model_n_tensors(model), 5); /* the copies are not numbered */
	assert_int_equal(tensor_named(model, "a").index, 0);
	assert_int_equal(tensor_named(model, "b").index, 1);
	assert_int_equal(tensor_named(model, "w").index, 2);
	assert_int_equal(tensor_named(model, "w").shard, 1);
	assert_int_equal(tensor_named(model, "c").index, 3);
	assert_int_equal(tensor_named(model, "d").index, 4);
	assert_ok(hr_model_shard(model, 0, &shard));
	assert_int_equal(shard.n_tensors, 2);
	assert_null(hr_model_warning(model, 0));
	hr_model_close(model);
}

/* V51 */
static void a_wrong_total_size_is_a_warning(void **state)
{
	static const char *const sizes[] = {"7", "8", "8.0", "\"7\""};
	static const bool warns[] = {true, false, false, false};

	SHARD(*state, "1.safetensors", "a", "b");
	for (size_t i = 0; i < 4; i++) {
		char text[200];
		hr_model *model;

		snprintf(
			text, sizeof(text),
			"{\"metadata\":{\"total_size\":%s},\"weight_map\":{\"a\":\"1.safetensors\",\"b\":\"1.safetensors\"}}",
			sizes[i]);
		write_text(*state, index_name, text);
		model = must_open(*state, NULL);
		assert_int_equal(hr_model_warning(model, 0) != NULL, warns[i]);
		if (warns[i])
			assert_non_null(strstr(hr_model_warning(model, 0), "7 bytes"));
		hr_model_close(model);
	}
}

/* V53 and the stale pair of it */
static void an_index_beside_a_single_file_must_name_it(void **state)
{
	hr_model *model;

	SHARD(*state, "model.safetensors", "a");
	SHARD(*state, "model-1.safetensors", "a");
	write_text(*state, index_name, "{\"weight_map\":{\"a\":\"model.safetensors\"}}");
	model = must_open(*state, NULL);
	assert_true(path_ends(shard_path(model, 0), "/model.safetensors"));
	hr_model_close(model);
	write_text(*state, index_name, "{\"weight_map\":{\"a\":\"model-1.safetensors\"}}");
	must_fail(*state, NULL, 0, HR_E_AMBIGUOUS, "/model.safetensors or ");
	model = must_open(*state, index_name); /* the caller picks */
	assert_true(path_ends(shard_path(model, 0), "/model-1.safetensors"));
	hr_model_close(model);
	model = must_open(*state, "model.safetensors");
	hr_model_close(model);
}

static void the_index_may_have_another_stem(void **state)
{
	static const char name[] = "diffusion_pytorch_model.safetensors.index.fp16.json";
	hr_model *model;

	SHARD(*state, "diffusion_pytorch_model.fp16-1.safetensors", "a");
	write_text(*state, name, "{\"weight_map\":{\"a\":\"diffusion_pytorch_model.fp16-1.safetensors\"}}");
	write_text(*state, "pytorch_model.bin.index.json", "{\"weight_map\":{\"a\":\"x.bin\"}}");
	model = must_open(*state, NULL);
	hr_model_close(model);
	model = must_open(*state, name);
	hr_model_close(model);
	must_fail(*state, "pytorch_model.bin.index.json", 0, HR_E_PATH, "x.bin");
	SHARD(*state, "diffusion_pytorch_model.safetensors", "a");
	must_fail(*state, NULL, 0, HR_E_AMBIGUOUS, "diffusion_pytorch_model.safetensors");
}

/* V54 */
static void tied_weights_get_no_alias(void **state)
{
	uint64_t index;
	hr_model *model;

	SHARD(*state, "1.safetensors", "embed.weight");
	write_text(*state, index_name, "{\"weight_map\":{\"embed.weight\":\"1.safetensors\"}}");
	model = must_open(*state, NULL);
	assert_fails(hr_model_find(model, "lm_head.weight", HR_STRLEN, &index), HR_E_NOTFOUND);
	assert_string_equal(hr_error_last()->tensor, "lm_head.weight");
	hr_model_close(model);
}

static void an_index_is_opened_relative_to_the_working_directory(void **state)
{
	int here = open(".", O_RDONLY | O_DIRECTORY);
	hr_model *model = NULL;
	int rc;

	SHARD(*state, "1.safetensors", "a");
	write_text(*state, index_name, "{\"weight_map\":{\"a\":\"1.safetensors\"}}");
	assert_int_equal(chdir(*state), 0);
	rc = hr_model_open(index_name, NULL, &model);
	assert_int_equal(fchdir(here), 0);
	close(here);
	assert_ok(rc);
	hr_model_close(model);
}

/* ---- several files ---- */

static void opens_a_list_of_files_in_the_callers_order(void **state)
{
	char *a = path_in(*state, "z.safetensors"), *b = path_in(*state, "b.safetensors");
	const char *paths[] = {a, b};
	hr_model *model;

	SHARD(*state, "z.safetensors", "t1", "t2");
	SHARD(*state, "b.safetensors", "t3");
	assert_ok(hr_model_open_files(paths, 2, NULL, &model));
	assert_int_equal(hr_model_n_tensors(model), 3);
	assert_int_equal(tensor_named(model, "t3").index, 2);
	assert_string_equal(shard_path(model, 0), a);
	hr_model_close(model);
	free(a);
	free(b);
}

/* I110 */
static void one_name_in_two_files_is_an_error_that_names_both(void **state)
{
	char *a = path_in(*state, "a.safetensors"), *b = path_in(*state, "b.safetensors");
	const char *paths[] = {a, b};
	hr_model *model;

	SHARD(*state, "a.safetensors", "t1", "same");
	SHARD(*state, "b.safetensors", "same", "t3");
	assert_fails(hr_model_open_files(paths, 2, NULL, &model), HR_E_DUPLICATE);
	assert_null(model);
	assert_string_equal(hr_error_last()->tensor, "same");
	assert_non_null(strstr(hr_error_last()->message, a));
	assert_non_null(strstr(hr_error_last()->message, b));
	free(a);
	free(b);
}

static void one_file_twice_is_an_error(void **state)
{
	char *a = path_in(*state, "a.safetensors"), *b = path_in(*state, "link.safetensors");
	const char *paths[] = {a, b};
	hr_model *model;

	SHARD(*state, "a.safetensors", NULL); /* no tensor that could clash */
	assert_int_equal(symlink("a.safetensors", b), 0);
	assert_fails(hr_model_open_files(paths, 2, NULL, &model), HR_E_DUPLICATE);
	assert_non_null(strstr(hr_error_last()->message, "same file"));
	paths[1] = a;
	assert_fails(hr_model_open_files(paths, 2, NULL, &model), HR_E_DUPLICATE);
	free(a);
	free(b);
}

static void two_copies_that_no_index_entry_decides_are_an_error(void **state)
{
	SHARD(*state, "1.safetensors", "a", "same");
	SHARD(*state, "2.safetensors", "b", "same");
	write_text(*state, index_name, "{\"weight_map\":{\"a\":\"1.safetensors\",\"b\":\"2.safetensors\"}}");
	must_fail(*state, NULL, 0, HR_E_DUPLICATE, "2.safetensors");
	assert_string_equal(hr_error_last()->tensor, "same");
}

/* ---- what does not open ---- */

static void nothing_to_open_says_what_is_there(void **state)
{
	must_fail(*state, NULL, 0, HR_E_NOTFOUND, "no *.safetensors");
	must_fail(*state, "missing", 0, HR_E_NOTFOUND, "missing");
	must_fail(*state, "missing/model.safetensors.index.json", 0, HR_E_NOTFOUND, "missing");
	assert_int_equal(hr_error_last()->system, ENOENT);
	write_text(*state, "pytorch_model.bin", "x");
	must_fail(*state, NULL, 0, HR_E_NOTFOUND, "*.bin");
	must_fail(*state, "pytorch_model.bin/x", 0, HR_E_IO, "Not a directory");
}

static void several_files_without_an_index_are_ambiguous(void **state)
{
	SHARD(*state, "b.safetensors", "b");
	SHARD(*state, "a.safetensors", "a");
	must_fail(*state, NULL, 0, HR_E_AMBIGUOUS, "(a.safetensors, b.safetensors)");
	for (char c = 'c'; c < 'k'; c++)
		SHARD(*state, ((char[]){c, '.', 's', 'a', 'f', 'e', 't', 'e', 'n', 's', 'o', 'r', 's', 0}), "x");
	must_fail(*state, NULL, 0, HR_E_AMBIGUOUS, "f.safetensors and 4 more");
}

/* I111 */
static void two_indexes_are_ambiguous(void **state)
{
	SHARD(*state, "1.safetensors", "a");
	write_text(*state, index_name, "{\"weight_map\":{\"a\":\"1.safetensors\"}}");
	write_text(*state, "model.safetensors.index.fp16.json", "{\"weight_map\":{\"a\":\"1.safetensors\"}}");
	must_fail(*state, NULL, 0, HR_E_AMBIGUOUS, "model.safetensors.index.fp16.json, model.safetensors.index.json");
}

/* I90 */
static void what_is_no_regular_file_is_refused_without_waiting(void **state)
{
	char *fifo = path_in(*state, "fifo.safetensors"), *dir = path_in(*state, "dir.safetensors"),
	     *sock = path_in(*state, "sock");
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	int listener = socket(AF_UNIX, SOCK_STREAM, 0);
	const char *paths[] = {dir};
	hr_model *model;

	alarm(20); /* a hang is a failure */
	assert_int_equal(mkfifo(fifo, 0600) | mkdir(dir, 0700), 0);
	snprintf(address.sun_path, sizeof(address.sun_path), "%s", sock);
	assert_int_equal(bind(listener, (struct sockaddr *)&address, sizeof(address)), 0);
	must_fail(*state, "fifo.safetensors", 0, HR_E_IO, "not a regular file");
	must_fail(*state, "sock", 0, HR_E_IO, "not a regular file");
	must_fail("/dev", "null", 0, HR_E_IO, "not a regular file");
	must_fail("/dev", "tty", 0, HR_E_IO, NULL);
	assert_fails(hr_model_open_files(paths, 1, NULL, &model), HR_E_IO);
	assert_non_null(strstr(hr_error_last()->message, "directory"));
	write_text(*state, index_name, "{\"weight_map\":{\"a\":\"fifo.safetensors\"}}");
	must_fail(*state, NULL, 0, HR_E_IO, "not a regular file");
	write_text(*state, index_name, "{\"weight_map\":{\"a\":\"dir.safetensors\"}}");
	must_fail(*state, NULL, 0, HR_E_IO, "is a directory");
	alarm(0);
	close(listener);
	free(fifo);
	free(dir);
	free(sock);
}

static int open_as_nobody(void *path)
{
	hr_model *model;

	if (geteuid() == 0 && (setgid(65534) || setuid(65534)))
		return 77;
	if (hr_model_open(path, NULL, &model) != HR_E_IO || hr_error_last()->system != EACCES)
		return 1;
	return strstr(hr_error_last()->message, "Permission denied") ? 0 : 2;
}

/* I91 */
static void links_to_nowhere_loops_and_forbidden_files_tell_their_reason(void **state)
{
	char *dangling = path_in(*state, "dangling"), *loop = path_in(*state, "loop"),
	     *secret = path_in(*state, "secret");
	int rc;

	assert_int_equal(symlink("no/such/file", dangling) | symlink("loop", loop), 0);
	must_fail(*state, "dangling", 0, HR_E_IO, "no/such/file");
	assert_int_equal(hr_error_last()->system, ENOENT);
	must_fail(*state, "loop", 0, HR_E_IO, "Too many levels");
	assert_int_equal(hr_error_last()->system, ELOOP);
	SHARD(*state, "secret", "a");
	assert_int_equal(chmod(*state, 0755) | chmod(secret, 0), 0);
	rc = in_child(open_as_nobody, secret);
	if (rc == 77)
		print_message("# cannot become another user here: a forbidden file was not tried\n");
	else
		assert_int_equal(rc, 0);
	free(dangling);
	free(loop);
	free(secret);
}

/* I98 to I102, I104, I105, I107 */
static void an_index_must_agree_with_its_shards(void **state)
{
	SHARD(*state, "1.safetensors", "a");
	SHARD(*state, "2.safetensors", "b");
	write_text(*state, index_name, "{\"weight_map\":{\"a\":\"1.safetensors\",\"b\":\"3.safetensors\"}}");
	must_fail(*state, NULL, 0, HR_E_INDEX, "3.safetensors");
	write_text(*state, index_name, "{\"weight_map\":{\"a\":\"1.safetensors\",\"c\":\"2.safetensors\"}}");
	must_fail(*state, NULL, 0, HR_E_INDEX, "\"c\" is in 2.safetensors");
	assert_string_equal(hr_error_last()->tensor, "c");
	write_text(*state, index_name, "{\"weight_map\":{\"a\":\"2.safetensors\",\"b\":\"1.safetensors\"}}");
	must_fail(*state, NULL, 0, HR_E_INDEX, NULL);
	write_text(*state, index_name, "{\"weight_map\":{\"a\":\"../1.safetensors\"}}");
	must_fail(*state, NULL, 0, HR_E_PATH, index_name);
	assert_true(path_ends(hr_error_last()->path, index_name));
	write_text(*state, "2.safetensors", "");
	write_text(*state, index_name, "{\"weight_map\":{\"a\":\"1.safetensors\",\"b\":\"2.safetensors\"}}");
	must_fail(*state, NULL, 0, HR_E_SMALL, "2.safetensors");
	write_text(*state, "2.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n");
	must_fail(*state, NULL, 0, HR_E_HEADER_LARGE, "2.safetensors");
	assert_true(path_ends(hr_error_last()->path, "/2.safetensors"));
	write_text(*state, index_name, "");
	must_fail(*state, NULL, 0, HR_E_JSON, index_name);
}

/* I108: refused by its size, not read */
static void an_index_above_the_limit_is_not_read(void **state)
{
	char *path = path_in(*state, index_name);

	write_text(*state, index_name, "");
	assert_int_equal(truncate(path, 100000001), 0);
	must_fail(*state, NULL, 0, HR_E_LIMIT, "100000001");
	free(path);
}

static void names_and_options_are_checked(void **state)
{
	struct hr_model_opts opts = HR_MODEL_OPTS_INIT;
	const char *paths[] = {NULL};
	hr_model *model = (hr_model *)&opts;

	(void)state;
	assert_fails(hr_model_open(NULL, NULL, &model), HR_E_OPTS);
	assert_null(model);
	assert_fails(hr_model_open("", NULL, &model), HR_E_OPTS);
	assert_fails(hr_model_open("x", NULL, NULL), HR_E_OPTS);
	assert_fails(hr_model_open_files(NULL, 1, NULL, &model), HR_E_OPTS);
	assert_fails(hr_model_open_files(paths, 0, NULL, &model), HR_E_OPTS);
	assert_fails(hr_model_open_files(paths, 1, NULL, &model), HR_E_OPTS);
	opts.flags = 0x80;
	assert_fails(hr_model_open("x", &opts, &model), HR_E_OPTS);
	opts.flags = 0;
	opts.size = 3;
	assert_fails(hr_model_open("x", &opts, &model), HR_E_OPTS);
	assert_fails(hr_model_open("store:/dev/nowhere#m", NULL, &model), HR_E_NOTFOUND);
	assert_fails(hr_model_open("store:", NULL, &model), HR_E_OPTS);
	assert_fails(hr_model_open("store:#m", NULL, &model), HR_E_OPTS);
	opts = (struct hr_model_opts)HR_MODEL_OPTS_INIT;
	opts.expect = "manifest.json"; /* which only a store could be compared with */
	assert_fails(hr_model_open("x", &opts, &model), HR_E_OPTS);
	assert_fails(hr_model_open_files((const char *const[]){"x"}, 1, &opts, &model), HR_E_OPTS);
	hr_model_close(NULL);
	assert_string_equal(hr_version(), "0.1.0");
}

/* ---- when the system says no ---- */

/* A directory that takes every path through opening: an index, three shards, and beside them a header that is
 * longer than the first read. */
static void write_rich_model(const char *dir)
{
	char *path = path_in(dir, "long.safetensors"), *names = malloc(3 * 30001);
	struct test_tensor tensors[3];

	for (int i = 0; i < 3; i++) {
		memset(names + i * 30001, 'l' + i, 30000);
		names[i * 30001 + 30000] = '\0';
		tensors[i] = (struct test_tensor){names + i * 30001, "F32", 8};
	}
	write_safetensors(path, tensors, 3, 1);
	SHARD(dir, "1.safetensors", "a", "x");
	SHARD(dir, "2.safetensors", "b");
	SHARD(dir, "3.safetensors", "n");
	write_text(
		dir, index_name,
		"{\"metadata\":{\"total_size\":1},\"weight_map\":{\"a\":\"1.safetensors\",\"\\u0062\":\"2.safetensors\","
		"\"n\":\"3.safetensors\"}}");
	free(names);
	free(path);
}

/* Fails the n-th passage of a point for every n, by directory and by list of files. Gives how many there were. */
static uint64_t fail_each(const char *dir, const char *point, int error, bool by_list)
{
	char *a = path_in(dir, "1.safetensors"), *b = path_in(dir, "long.safetensors");
	const char *paths[] = {a, b};
	int before = count_open_files(), rc, fired;
	hr_model *model;
	uint64_t n;

	for (n = 1;; n++) {
		hr__fault_arm(point, n, error);
		rc = by_list ? hr_model_open_files(paths, 2, NULL, &model) : hr_model_open(dir, NULL, &model);
		fired = hr__fault_fired();
		hr__fault_arm(NULL, 0, 0);
		if (rc) {
			if (!fired)
				fail_msg("%s", hr_error_last()->message);
			assert_null(model);
			assert_true(rc == HR_E_NOMEM || (!point && rc == HR_E_IO));
			assert_int_equal(hr_error_last()->code, rc);
			assert_true(hr_error_last()->message[0] != 0);
		} else {
			assert_int_equal(hr_model_n_tensors(model), by_list ? 5 : 4);
			assert_int_equal(tensor_named(model, "a").bytes, 4);
			if (point)
				assert_false(fired); /* no allocation is optional */
			hr_model_close(model);
		}
		assert_int_equal(count_open_files(), before);
		if (!fired)
			break;
	}
	free(a);
	free(b);
	return n;
}

static void survives_every_failing_allocation(void **state)
{
	write_rich_model(*state);
	assert_true(fail_each(*state, "malloc", ENOMEM, false) > 30);
	assert_true(fail_each(*state, "malloc", ENOMEM, true) > 10);
}

static void survives_every_failing_system_call(void **state)
{
	write_rich_model(*state);
	assert_true(fail_each(*state, NULL, EIO, false) > 30);
	assert_true(fail_each(*state, NULL, EIO, true) > 10);
}

static void running_out_of_descriptors_says_so(void **state)
{
	struct rlimit before, few;

	write_rich_model(*state);
	assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
	few = before;
	few.rlim_cur = (rlim_t)count_open_files() + 3; /* a directory and a shard, and then no more */
	assert_int_equal(setrlimit(RLIMIT_NOFILE, &few), 0);
	{
		hr_model *model;
		int rc = hr_model_open(*state, NULL, &model);

		assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
		assert_int_equal(rc, HR_E_IO);
		assert_non_null(strstr(hr_error_last()->message, "too many files open"));
		assert_int_equal(hr_error_last()->system, EMFILE);
	}
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, new_dir, drop_dir)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(opens_one_file_by_path_and_by_its_directory),
		TEST(a_file_needs_no_suffix),
		TEST(opens_a_hugging_face_cache_of_links),
		TEST(files_that_the_index_does_not_name_are_left_alone),
		TEST(unlisted_tensors_of_listed_shards_belong_to_the_model),
		TEST(the_index_decides_between_copies),
		TEST(a_wrong_total_size_is_a_warning),
		TEST(an_index_beside_a_single_file_must_name_it),
		TEST(the_index_may_have_another_stem),
		TEST(tied_weights_get_no_alias),
		TEST(an_index_is_opened_relative_to_the_working_directory),
		TEST(opens_a_list_of_files_in_the_callers_order),
		TEST(one_name_in_two_files_is_an_error_that_names_both),
		TEST(one_file_twice_is_an_error),
		TEST(two_copies_that_no_index_entry_decides_are_an_error),
		TEST(nothing_to_open_says_what_is_there),
		TEST(several_files_without_an_index_are_ambiguous),
		TEST(two_indexes_are_ambiguous),
		TEST(what_is_no_regular_file_is_refused_without_waiting),
		TEST(links_to_nowhere_loops_and_forbidden_files_tell_their_reason),
		TEST(an_index_must_agree_with_its_shards),
		TEST(an_index_above_the_limit_is_not_read),
		TEST(names_and_options_are_checked),
		TEST(survives_every_failing_allocation),
		TEST(survives_every_failing_system_call),
		TEST(running_out_of_descriptors_says_so),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
