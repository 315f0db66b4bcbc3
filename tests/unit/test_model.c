/* SPDX-License-Identifier: Apache-2.0 */
/* model/: sources, the table of tensors, what happens when files change, and digests. */
#include "modeltest.h"

#include "core/hash.h"
#include "model/build.h"
#include "model/model.h"

#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <sys/stat.h>

#define BLOCK ((uint64_t)4 << 20) /* of a digest */

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

/* A file of this header and `n` data bytes 0, 1, 2 ... Gives its path. */
static char *write_raw(const char *dir, const char *name, const char *json, size_t json_bytes, size_t n)
{
	char *path = path_in(dir, name), *bytes = malloc(8 + json_bytes + n);
	uint64_t length = json_bytes;

	memcpy(bytes, &length, 8);
	memcpy(bytes + 8, json, json_bytes);
	for (size_t i = 0; i < n; i++)
		bytes[8 + json_bytes + i] = (char)i;
	write_file(path, bytes, 8 + json_bytes + n);
	free(bytes);
	return path;
}

static hr_model *open_raw(const char *dir, const char *json, size_t n)
{
	char *path = write_raw(dir, "raw.safetensors", json, strlen(json), n);
	hr_model *model;

	assert_ok(hr_model_open(path, NULL, &model));
	free(path);
	return model;
}

/* ---- asking ---- */

static void tensors_are_numbered_in_file_order(void **state)
{
	hr_model *model = open_raw(*state,
				   "{\"c\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[8,12]},"
				   "\"z\":{\"dtype\":\"BF16\",\"shape\":[2,0,7],\"data_offsets\":[8,8]},"
				   "\"a\":{\"dtype\":\"U8\",\"shape\":[2,4],\"data_offsets\":[0,8]}}",
				   12);
	struct hr_tensor tensor = HR_TENSOR_INIT;
	struct hr_shard shard = HR_SHARD_INIT;
	struct hr__extent extent;
	size_t length;

	assert_ok(hr_model_shard(model, 0, &shard));
	assert_int_equal(shard.n_tensors, 3);
	assert_int_equal(shard.n_metadata, 0);
	assert_int_equal(shard.bytes, shard.data_offset + 12);
	assert_int_equal(hr__model_bytes(model), shard.bytes);
	assert_int_equal(hr_model_n_tensors(model), 3);
	assert_ok(hr_model_tensor(model, 0, &tensor));
	assert_memory_equal(tensor.name, "a", 1);
	assert_int_equal(tensor.rank, 2);
	assert_int_equal(tensor.dims[0], 2);
	assert_int_equal(tensor.dims[1], 4);
	assert_int_equal(tensor.dtype, HR_DTYPE_U8);
	assert_int_equal(tensor.bytes, 8);
	assert_int_equal(tensor.offset, shard.data_offset);
	assert_ok(hr_model_tensor(model, 1, &tensor));
	assert_memory_equal(tensor.name, "z", 1);
	assert_int_equal(tensor.bytes, 0);
	assert_int_equal(tensor.rank, 3);
	assert_ok(hr_model_tensor(model, 2, &tensor));
	assert_memory_equal(tensor.name, "c", 1);
	assert_int_equal(tensor.rank, 0);
	hr__model_extent(model, 2, &extent);
	assert_int_equal(extent.source, 0);
	assert_int_equal(extent.offset, tensor.offset);
	assert_int_equal(extent.bytes, 4);
	assert_memory_equal(hr__model_tensor_name(model, 2, &length), "c", 1);
	assert_int_equal(length, 1);
	hr_model_close(model);
}

static void names_are_found_by_their_exact_bytes(void **state)
{
	hr_model *model = open_raw(*state,
				   "{\"\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
				   "\"a\\u0000b\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,2]},"
				   "\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[2,3]}}",
				   3);
	uint64_t index = 77;

	assert_ok(hr_model_find(model, "", HR_STRLEN, &index));
	assert_int_equal(index, 0);
	assert_ok(hr_model_find(model, "a\0b", 3, &index));
	assert_int_equal(index, 1);
	assert_ok(hr_model_find(model, "a\0b", HR_STRLEN, &index));
	assert_int_equal(index, 2);
	assert_fails(hr_model_find(model, "a\0", 2, &index), HR_E_NOTFOUND);
	assert_fails(hr_model_find(model, "A", 1, &index), HR_E_NOTFOUND);
	assert_int_equal(index, 2);
	assert_fails(hr_model_find(model, NULL, 0, &index), HR_E_OPTS);
	assert_fails(hr_model_find(model, "a", 1, NULL), HR_E_OPTS);
	hr_model_close(model);
}

static void metadata_keeps_its_order_and_its_nul_bytes(void **state)
{
	hr_model *model = open_raw(*state, "{\"__metadata__\":{\"z\\u0000\":\"\\u0000v\",\"a\":\"\"}}", 0);
	const char *key, *value;
	size_t key_len, value_len;

	assert_int_equal(hr_model_n_tensors(model), 0);
	assert_ok(hr_model_metadata(model, 0, 0, &key, &key_len, &value, &value_len));
	assert_int_equal(key_len, 2);
	assert_memory_equal(key, "z\0", 2);
	assert_int_equal(value_len, 2);
	assert_memory_equal(value, "\0v", 2);
	assert_ok(hr_model_metadata(model, 0, 1, &key, &key_len, &value, &value_len));
	assert_int_equal(value_len, 0);
	assert_fails(hr_model_metadata(model, 0, 2, &key, &key_len, &value, &value_len), HR_E_OPTS);
	assert_fails(hr_model_metadata(model, 1, 0, &key, &key_len, &value, &value_len), HR_E_OPTS);
	hr_model_close(model);
}

static void numbers_out_of_range_and_bad_structs_are_refused(void **state)
{
	hr_model *model = open_raw(*state, "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1);
	struct hr_tensor tensor = HR_TENSOR_INIT;
	struct hr_shard shard = HR_SHARD_INIT;
	struct hr_digest digest;
	char byte;

	assert_fails(hr_model_tensor(model, 1, &tensor), HR_E_OPTS);
	assert_fails(hr_model_tensor(model, UINT64_MAX, &tensor), HR_E_OPTS);
	assert_fails(hr_model_tensor(model, 0, NULL), HR_E_OPTS);
	tensor.size = 0;
	assert_fails(hr_model_tensor(model, 0, &tensor), HR_E_OPTS);
	assert_fails(hr_model_shard(model, 1, &shard), HR_E_OPTS);
	assert_fails(hr_model_read_shard(model, 1, 0, &byte, 1), HR_E_OPTS);
	assert_fails(hr_model_digest(model, 1, &digest, NULL, 0), HR_E_OPTS);
	assert_fails(hr_model_digest(model, 0, &digest, &digest, 0), HR_E_OPTS);
	hr_model_close(model);
}

static void a_shard_is_read_byte_for_byte_and_never_past_its_end(void **state)
{
	static const char json[] = "{\"a\":{\"dtype\":\"U8\",\"shape\":[200],\"data_offsets\":[0,200]}}";
	hr_model *model = open_raw(*state, json, 200);
	uint64_t size = 8 + sizeof(json) - 1 + 200;
	unsigned char bytes[400];

	assert_ok(hr_model_read_shard(model, 0, 0, bytes, (size_t)size));
	assert_memory_equal(bytes + 8, json, sizeof(json) - 1);
	for (int i = 0; i < 200; i++)
		assert_int_equal(bytes[8 + sizeof(json) - 1 + i], i);
	assert_ok(hr_model_read_shard(model, 0, size - 1, bytes, 1));
	assert_int_equal(bytes[0], 199);
	assert_ok(hr_model_read_shard(model, 0, size, bytes, 0));
	assert_fails(hr_model_read_shard(model, 0, size, bytes, 1), HR_E_OPTS);
	assert_fails(hr_model_read_shard(model, 0, 1, bytes, (size_t)size), HR_E_OPTS);
	assert_fails(hr_model_read_shard(model, 0, UINT64_MAX, bytes, 2), HR_E_OPTS);
	hr__fault_arm("pread", 1, EIO);
	assert_fails(hr_model_read_shard(model, 0, 10, bytes, 5), HR_E_IO);
	hr__fault_arm(NULL, 0, 0);
	assert_int_equal(hr_error_last()->system, EIO);
	assert_int_equal(hr_error_last()->offset, 10);
	hr_model_close(model);
}

/* ---- sources ---- */

static void a_source_says_what_engines_need_to_know(void **state)
{
	char *path = path_in(*state, "f");
	struct hr__source source;
	struct hr__os_stat st;

	write_file(path, "0123456789", 10);
	assert_ok(hr__source_open_file(AT_FDCWD, path, "shown", 0, &source));
	assert_string_equal(source.path, "shown");
	assert_int_equal(source.base, 0);
	assert_int_equal(source.bytes, 10);
	assert_int_equal(source.file.bytes, 10);
	assert_true(source.file.fs_magic != 0);
	assert_true(source.file.may_mincore);
	assert_false(source.file.is_block);
	assert_int_equal(fcntl(source.file.fd, F_GETFL) & (O_NONBLOCK | O_ACCMODE), O_RDONLY);
	assert_int_equal(fcntl(source.file.fd, F_GETFD), FD_CLOEXEC);
	assert_true((source.file.direct_fd >= 0) == (source.file.direct_errno == 0));
	if (source.file.direct_fd >= 0) {
		assert_true(fcntl(source.file.direct_fd, F_GETFL) & O_DIRECT);
		assert_int_equal(hr__os_fstat(source.file.direct_fd, &st), 0);
		assert_int_equal(st.identity.inode, source.identity.inode);
		assert_true(source.file.offset_align >= 512);
	}
	hr__source_close(&source);
	hr__source_close(&source); /* a closed one is empty */
	hr__fault_arm("open_direct", 1, EINVAL);
	assert_ok(hr__source_open_file(AT_FDCWD, path, path, 0, &source));
	hr__fault_arm(NULL, 0, 0);
	assert_int_equal(source.file.direct_fd, -1);
	assert_int_equal(source.file.direct_errno, EINVAL);
	hr__source_close(&source);
	free(path);
}

static void a_source_may_lie_inside_a_file(void **state)
{
	char *path = path_in(*state, "f"), bytes[8] = "";
	struct hr__source source;

	write_file(path, "0123456789", 10);
	assert_ok(hr__source_open_file(AT_FDCWD, path, path, 0, &source));
	source.base = 3;
	source.bytes = 5;
	assert_ok(hr__source_read(&source, 1, bytes, 4));
	assert_string_equal(bytes, "4567");
	assert_fails(hr__source_read(&source, 1, bytes, 5), HR_E_OPTS);
	source.bytes = 20; /* beyond the file, which has not changed */
	assert_fails(hr__source_read(&source, 5, bytes, 4), HR_E_SHORT);
	assert_int_equal(hr_error_last()->offset, 7);
	hr__source_close(&source);
	free(path);
}

/* ---- files that change ---- */

enum change { TRUNCATE, GROW, REWRITE, REWRITE_AND_RESTORE_TIME, REPLACE, REMOVE, N_CHANGES };

static void change_file(const char *dir, const char *path, enum change how)
{
	struct stat st;
	char *other = path_in(dir, "other");
	int fd = open(path, O_WRONLY | O_CLOEXEC);

	assert_true(fd >= 0);
	assert_int_equal(fstat(fd, &st), 0);
	usleep(30000); /* the kernel's clock for files ticks slowly */
	if (how == TRUNCATE)
		assert_int_equal(ftruncate(fd, 100), 0);
	if (how == GROW)
		assert_int_equal(ftruncate(fd, st.st_size + 1), 0);
	if (how == REWRITE || how == REWRITE_AND_RESTORE_TIME)
		assert_int_equal(pwrite(fd, "x", 1, st.st_size - 1), 1);
	if (how == REWRITE_AND_RESTORE_TIME)
		assert_int_equal(futimens(fd, (struct timespec[]){st.st_atim, st.st_mtim}), 0);
	if (how == REPLACE) {
		SHARD(dir, "other", "a");
		assert_int_equal(rename(other, path), 0);
	}
	if (how == REMOVE)
		assert_int_equal(unlink(path), 0);
	close(fd);
	free(other);
}

/* I92, I93 */
static void a_file_that_changes_after_opening_is_noticed(void **state)
{
	static const char *const says[] = {"size was",        "size was",        "modification time was",
					   "change time was", "change time was", "change time was"};
	struct test_tensor tensor = {"a", "U8", 9 << 20};
	char *path = path_in(*state, "m.safetensors"), *tail = malloc(1 << 20);

	for (int how = 0; how < N_CHANGES; how++) {
		struct hr_digest digest;
		hr_model *model;

		write_safetensors(path, &tensor, 1, 1);
		assert_ok(hr_model_open(path, NULL, &model));
		assert_ok(hr__model_check(model));
		change_file(*state, path, how);
		assert_fails(hr_model_read_shard(model, 0, 8 << 20, tail, 1 << 20), HR_E_CHANGED);
		if (!strstr(hr_error_last()->message, says[how]))
			fail_msg("\"%s\" does not say \"%s\"", hr_error_last()->message, says[how]);
		assert_string_equal(hr_error_last()->path, path);
		assert_fails(hr_model_digest(model, 0, &digest, &digest, 1), HR_E_CHANGED);
		assert_fails(hr__model_check(model), HR_E_CHANGED);
		hr_model_close(model);
	}
	free(tail);
	free(path);
}

static void a_file_that_was_cut_before_opening_does_not_cover_its_tensors(void **state)
{
	struct test_tensor tensor = {"a", "U8", 1000};
	char *path = path_in(*state, "m.safetensors");
	hr_model *model;

	write_safetensors(path, &tensor, 1, 1);
	assert_int_equal(truncate(path, 500), 0);
	assert_fails(hr_model_open(path, NULL, &model), HR_E_COVER);
	assert_string_equal(hr_error_last()->path, path);
	assert_string_equal(hr_error_last()->stage, "header");
	assert_int_equal(truncate(path, 30), 0);
	assert_fails(hr_model_open(path, NULL, &model), HR_E_HEADER_LENGTH);
	free(path);
}

/* ---- owners ---- */

static int read_all(void *ctx)
{
	hr_model *model = ctx;
	struct hr_digest digest;
	unsigned char bytes[4];
	struct hr_tensor tensor = HR_TENSOR_INIT;
	uint64_t index;

	if (hr_model_find(model, "b", 1, &index) || hr_model_tensor(model, index, &tensor) ||
	    hr_model_read_shard(model, tensor.shard, tensor.offset, bytes, 4) ||
	    hr_model_digest(model, 0, &digest, NULL, 0))
		return 1;
	hr_model_close(model);
	return 0;
}

static void a_forked_child_may_read_the_model(void **state)
{
	char *path = path_in(*state, "m.safetensors");
	hr_model *model;

	write_safetensors(path, (struct test_tensor[]){{"a", "U8", 9 << 20}, {"b", "U8", 4}}, 2, 1);
	assert_ok(hr_model_open(path, NULL, &model));
	assert_int_equal(in_child(read_all, model), 0);
	assert_int_equal(read_all(hr_model_acquire(model)), 0);
	hr_model_close(model);
	free(path);
}

static void *use_model(void *ctx)
{
	hr_model *model = ctx;
	intptr_t bad = 0;

	for (int i = 0; i < 2000; i++) {
		hr_model *mine = hr_model_acquire(model);
		struct hr_tensor tensor = HR_TENSOR_INIT;
		uint64_t index;

		bad += mine != model || hr_model_find(mine, "b", 1, &index) || hr_model_tensor(mine, index, &tensor) ||
		       tensor.bytes != 4;
		hr_model_close(mine);
	}
	hr_model_close(model); /* the thread's own reference */
	return (void *)bad;
}

static void any_thread_may_own_a_model_and_the_last_one_frees_it(void **state)
{
	int before = count_open_files();
	pthread_t threads[8];
	hr_model *model;

	SHARD(*state, "m.safetensors", "a", "b");
	assert_ok(hr_model_open(*state, NULL, &model));
	for (int i = 0; i < 8; i++)
		assert_int_equal(pthread_create(&threads[i], NULL, use_model, hr_model_acquire(model)), 0);
	hr_model_close(model);
	for (int i = 0; i < 8; i++) {
		void *bad;

		pthread_join(threads[i], &bad);
		assert_null(bad);
	}
	assert_int_equal(count_open_files(), before);
}

/* ---- size ---- */

/* Bytes that the heap has handed out, or 0 where a sanitizer replaces it. */
static size_t heap_bytes(void)
{
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
	return 0;
#else
	struct mallinfo2 info = mallinfo2();

	return info.uordblks + info.hblkhd;
#endif
}

static void a_model_of_100000_tensors_is_small_and_complete(void **state)
{
	enum { PER_SHARD = 25000, SHARDS = 4 };
	char *name = malloc(PER_SHARD * 64), *paths[SHARDS], shown[64];
	struct test_tensor *tensors = malloc(PER_SHARD * sizeof(*tensors));
	struct hr_shard shard = HR_SHARD_INIT;
	uint64_t header_bytes = 0;
	size_t before;
	hr_model *model;

	for (int s = 0; s < SHARDS; s++) {
		for (int i = 0; i < PER_SHARD; i++) {
			snprintf(name + i * 64, 64, "model.layers.%d.mlp.experts.%d.weight", i % 61, s * PER_SHARD + i);
			tensors[i] = (struct test_tensor){name + i * 64, "BF16", i % 3 ? 8 : 0};
		}
		snprintf(shown, sizeof(shown), "%d.safetensors", s);
		paths[s] = path_in(*state, shown);
		write_safetensors(paths[s], tensors, PER_SHARD, (uint64_t)s);
	}
	before = heap_bytes();
	assert_ok(hr_model_open_files((const char *const *)paths, SHARDS, NULL, &model));
	assert_int_equal(hr_model_n_tensors(model), PER_SHARD * SHARDS);
	for (uint32_t s = 0; s < SHARDS; s++) {
		assert_ok(hr_model_shard(model, s, &shard));
		header_bytes += shard.data_offset;
	}
	assert_true(heap_bytes() - before <= 2 * header_bytes + 64 * PER_SHARD * SHARDS);
	for (uint64_t i = 0; i < PER_SHARD * SHARDS; i++) {
		struct hr_tensor tensor = HR_TENSOR_INIT;
		uint64_t found;

		assert_ok(hr_model_tensor(model, i, &tensor));
		assert_ok(hr_model_find(model, tensor.name, tensor.name_len, &found));
		assert_int_equal(found, i);
		assert_int_equal(tensor.shard, i / PER_SHARD);
	}
	hr_model_close(model);
	for (int s = 0; s < SHARDS; s++)
		free(paths[s]);
	free(tensors);
	free(name);
}

static int open_again(void *path, uint32_t number, struct hr__source *source)
{
	(void)number;
	return hr__source_open_file(AT_FDCWD, path, path, 0, source);
}

/* Eleven headers of nearly 100 MB, each one allowed, are more than a model may have. All paths lead to one file. */
static void headers_of_more_than_the_limit_together_are_refused(void **state)
{
	const size_t json_bytes = 99000000;
	char *json = malloc(json_bytes), *path;
	struct hr__shard_origin from = {.open = open_again};
	hr_model *model;

	memset(json, ' ', json_bytes);
	memcpy(json, "{}", 2);
	path = write_raw(*state, "m.safetensors", json, json_bytes, 0);
	from.ctx = path;
	free(json);
	for (uint32_t n = 11; n <= 22; n += 11) { /* one after the other, and several at once */
		assert_ok(hr__model_new(&model));
		assert_fails(hr__model_add(model, n, &from), HR_E_LIMIT);
		assert_int_equal(hr__model_n_sources(model), 10);
		assert_non_null(strstr(hr_error_last()->message, "1089000000"));
		hr_model_close(model);
	}
	free(path);
}

/* ---- digests ---- */

static void digest_of(const unsigned char *bytes, size_t n, struct hr_digest *out)
{
	hr__sha256 *sha;

	assert_ok(hr__sha256_new(&sha));
	assert_ok(hr__sha256_update(sha, bytes, n));
	assert_ok(hr__sha256_final(sha, out->sha256));
	hr__sha256_free(sha);
}

static unsigned char *read_file(const char *path, size_t *n)
{
	FILE *file = fopen(path, "rb");
	unsigned char *bytes;

	fseek(file, 0, SEEK_END);
	*n = (size_t)ftell(file);
	rewind(file);
	bytes = malloc(*n);
	assert_int_equal(fread(bytes, 1, *n, file), *n);
	fclose(file);
	return bytes;
}

/* Compares every digest of a shard with one made of a plain read of the file. */
static void assert_digests(const hr_model *model, uint32_t s)
{
	struct hr_shard shard = HR_SHARD_INIT;
	struct hr_digest whole, expected, tensors[16];
	unsigned char *bytes;
	size_t n, i = 0;

	assert_ok(hr_model_shard(model, s, &shard));
	bytes = read_file(shard.path, &n);
	memset(tensors, 0xee, sizeof(tensors));
	assert_ok(hr_model_digest(model, s, &whole, tensors, 16));
	digest_of(bytes, n, &expected);
	assert_memory_equal(&whole, &expected, sizeof(whole));
	for (uint64_t t = 0; t < hr_model_n_tensors(model); t++) {
		struct hr_tensor tensor = HR_TENSOR_INIT;

		assert_ok(hr_model_tensor(model, t, &tensor));
		if (tensor.shard != s)
			continue;
		digest_of(bytes + tensor.offset, (size_t)tensor.bytes, &expected);
		assert_memory_equal(&tensors[i], &expected, sizeof(expected));
		i++;
	}
	memset(&expected, 0xee, sizeof(expected));
	if (i < 16) /* no digest more than there are tensors */
		assert_memory_equal(&tensors[i], &expected, sizeof(expected));
	assert_ok(hr_model_digest(model, s, &expected, NULL, 0));
	assert_memory_equal(&whole, &expected, sizeof(whole));
	free(bytes);
}

/* A shard whose tensors end on, before and behind the borders of the digest's blocks. */
static hr_model *open_digest_model(const char *dir, char **path)
{
	struct test_tensor tensors[] = {
		{"small", "U8", 3},
		{"to_border", "U8", BLOCK},
		{"none", "F32", 0},
		{"whole_block", "U8", BLOCK},
		{"over", "U8", BLOCK + 999},
		{"nothing", "BF16", 0},
		{"over_2", "U8", 2 * BLOCK + 5},
		{"last", "U8", 1},
		{"none_at_the_end", "I64", 0},
	};
	const size_t n = sizeof(tensors) / sizeof(tensors[0]);
	struct hr_shard shard = HR_SHARD_INIT;
	hr_model *model;

	*path = path_in(dir, "digest.safetensors");
	write_safetensors(*path, tensors, n, 3);
	assert_ok(hr_model_open(*path, NULL, &model));
	assert_ok(hr_model_shard(model, 0, &shard));
	hr_model_close(model);
	tensors[1].bytes = BLOCK - 3 - shard.data_offset; /* as many digits as before */
	write_safetensors(*path, tensors, n, 3);
	assert_ok(hr_model_open(*path, NULL, &model));
	assert_ok(hr_model_shard(model, 0, &shard));
	return model;
}

static void digests_are_those_of_a_plain_read(void **state)
{
	struct hr_tensor tensor = HR_TENSOR_INIT;
	char *path;
	hr_model *model = open_digest_model(*state, &path);

	assert_ok(hr_model_tensor(model, 1, &tensor));
	assert_int_equal((tensor.offset + tensor.bytes) % BLOCK, 0);
	assert_digests(model, 0);
	hr__fault_arm("pthread_create", 1, EAGAIN); /* nobody helps */
	assert_digests(model, 0);
	assert_true(hr__fault_fired());
	hr__fault_arm(NULL, 0, 0);
	hr_model_close(model);
	free(path);
}

static void digests_of_small_shards_and_of_overridden_copies(void **state)
{
	hr_model *model;

	SHARD(*state, "1.safetensors", "w", "a", "x");
	SHARD(*state, "2.safetensors", "b", "w", "c");
	SHARD(*state, "3.safetensors", NULL);
	write_text(*state, "model.safetensors.index.json",
		   "{\"weight_map\":{\"w\":\"2.safetensors\",\"a\":\"1.safetensors\",\"b\":\"2.safetensors\"}}");
	assert_ok(hr_model_open(*state, NULL, &model));
	assert_digests(model, 0);
	assert_digests(model, 1);
	hr_model_close(model);
	{
		char *path = path_in(*state, "3.safetensors");

		assert_ok(hr_model_open(path, NULL, &model));
		assert_digests(model, 0);
		hr_model_close(model);
		free(path);
	}
}

static void a_failed_read_fails_the_digest_with_its_place(void **state)
{
	char *path;
	hr_model *model = open_digest_model(*state, &path);
	struct hr_digest whole, tensors[9];

	for (uint64_t n = 1; n <= 6; n++) {
		for (int without = 0; without < 2; without++) {
			hr__fault_arm("pread", n, EIO);
			assert_fails(hr_model_digest(model, 0, &whole, without ? NULL : tensors, 9), HR_E_IO);
			hr__fault_arm(NULL, 0, 0);
			assert_int_equal(hr_error_last()->system, EIO);
			assert_int_equal(hr_error_last()->offset, (n - 1) * BLOCK);
			assert_string_equal(hr_error_last()->path, path);
		}
	}
	for (uint64_t n = 1;; n++) {
		int rc, fired;

		hr__fault_arm("malloc", n, ENOMEM);
		rc = hr_model_digest(model, 0, &whole, tensors, 9);
		fired = hr__fault_fired();
		hr__fault_arm(NULL, 0, 0);
		assert_int_equal(rc, fired ? HR_E_NOMEM : 0);
		if (!fired)
			break;
		assert_true(n < 10);
	}
	hr_model_close(model);
	free(path);
}

static void *digest_shard(void *ctx)
{
	struct hr_digest whole;
	intptr_t bad = hr_model_digest(ctx, 0, &whole, NULL, 0);

	return (void *)bad;
}

static void several_threads_may_digest_at_once(void **state)
{
	char *path;
	hr_model *model = open_digest_model(*state, &path);
	pthread_t threads[4];

	for (int i = 0; i < 4; i++)
		assert_int_equal(pthread_create(&threads[i], NULL, digest_shard, model), 0);
	for (int i = 0; i < 4; i++) {
		void *bad;

		pthread_join(threads[i], &bad);
		assert_null(bad);
	}
	hr_model_close(model);
	free(path);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, new_dir, drop_dir)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(tensors_are_numbered_in_file_order),
		TEST(names_are_found_by_their_exact_bytes),
		TEST(metadata_keeps_its_order_and_its_nul_bytes),
		TEST(numbers_out_of_range_and_bad_structs_are_refused),
		TEST(a_shard_is_read_byte_for_byte_and_never_past_its_end),
		TEST(a_source_says_what_engines_need_to_know),
		TEST(a_source_may_lie_inside_a_file),
		TEST(a_file_that_changes_after_opening_is_noticed),
		TEST(a_file_that_was_cut_before_opening_does_not_cover_its_tensors),
		TEST(a_forked_child_may_read_the_model),
		TEST(any_thread_may_own_a_model_and_the_last_one_frees_it),
		TEST(a_model_of_100000_tensors_is_small_and_complete),
		TEST(headers_of_more_than_the_limit_together_are_refused),
		TEST(digests_are_those_of_a_plain_read),
		TEST(digests_of_small_shards_and_of_overridden_copies),
		TEST(a_failed_read_fails_the_digest_with_its_place),
		TEST(several_threads_may_digest_at_once),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
