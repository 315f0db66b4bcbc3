/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hr_map(): tensors in place. The bytes are right and stay right after the model is closed, one mapping of a shard
 * serves all, what nobody uses is let go of, and what the header warns of happens as it says: a write and a file that
 * became shorter end the process, here a child.
 */
#include "loadtest.h"
#include "modeltest.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>

static const char shard_name[] = "model-0000";

/* How many mappings of the bed's shards this process has, and how much of them is in memory. */
static int count_mappings(uint64_t *rss)
{
	FILE *file = fopen("/proc/self/smaps", "r");
	bool is_ours = false;
	char line[512];
	int n = 0;

	*rss = 0;
	while (file && fgets(line, sizeof(line), file)) {
		if (strchr(line, '-') && strchr(line, '-') < strchr(line, ' ')) {
			is_ours = strstr(line, shard_name) != NULL;
			n += is_ours;
		} else if (is_ours && strncmp(line, "Rss:", 4) == 0) {
			*rss += strtoull(line + 4, NULL, 10) << 10;
		}
	}
	if (file)
		fclose(file);
	return n;
}

/* Maps all tensors. */
static hr_buffer **map_all(const struct bed *bed, uint32_t flags)
{
	hr_buffer **buffers = calloc(bed->n_tensors, sizeof(hr_buffer *));
	struct hr_map_opts opts = HR_MAP_OPTS_INIT;

	opts.flags = flags;
	for (uint64_t i = 0; i < bed->n_tensors; i++)
		assert_ok(hr_map(bed->model, i, &opts, &buffers[i]));
	return buffers;
}

static void release_all(const struct bed *bed, hr_buffer **buffers)
{
	for (uint64_t i = 0; i < bed->n_tensors; i++)
		hr_buffer_release(buffers[i]);
	free(buffers);
}

static void gives_every_tensor_in_place(void **state)
{
	uint32_t flags[] = {0, HR_MAP_AHEAD, HR_MAP_POPULATE};
	struct bed bed;
	uint64_t rss;

	(void)state;
	bed_open(&bed, 81, 40, 300000);
	for (int round = 0; round < 3; round++) {
		hr_buffer **buffers = map_all(&bed, flags[round]);

		if (flags[round] == HR_MAP_POPULATE) {
			assert_int_equal(count_mappings(&rss), 2);
			assert_true(rss >= bed.bytes);
		}
		for (uint64_t i = 0; i < bed.n_tensors; i++) {
			struct hr_tensor t = HR_TENSOR_INIT;
			unsigned char *want;

			assert_ok(hr_model_tensor(bed.model, i, &t));
			want = plain_read(bed.model, &t);
			assert_int_equal(hr_buffer_flags(buffers[i]), HR_BUFFER_READ_ONLY);
			assert_int_equal(hr_buffer_bytes(buffers[i]), t.bytes);
			if (t.bytes)
				assert_memory_equal(hr_buffer_data(buffers[i]), want, t.bytes);
			else
				assert_null(hr_buffer_data(buffers[i]));
			assert_true(buffer_is_right(bed.model, &t, buffers[i]));
			free(want);
		}
		assert_int_equal(count_mappings(&rss), 2);
		release_all(&bed, buffers);
		assert_int_equal(count_mappings(&rss), 2);
		assert_int_equal(rss, 0);
	}
	bed_close(&bed);
	assert_int_equal(count_mappings(&rss), 0);
}

static void outlives_the_model(void **state)
{
	struct hr_tensor t = HR_TENSOR_INIT;
	hr_buffer *buffer, *same;
	unsigned char *want;
	struct bed bed;
	uint64_t rss;

	(void)state;
	bed_open(&bed, 82, 10, 200000);
	do {
		assert_ok(hr_model_tensor(bed.model, t.name ? t.index + 1 : 0, &t));
	} while (t.bytes < 10000);
	want = plain_read(bed.model, &t);
	assert_ok(hr_map(bed.model, t.index, NULL, &buffer));
	assert_ok(hr_map(bed.model, t.index, NULL, &same));
	assert_ptr_equal(hr_buffer_data(buffer), hr_buffer_data(same));
	hr_buffer_release(same);
	bed_close(&bed); /* and its files are gone */
	assert_memory_equal(hr_buffer_data(buffer), want, t.bytes);
	assert_int_equal(count_mappings(&rss), 1);
	assert_ptr_equal(hr_buffer_acquire(buffer), buffer);
	hr_buffer_release(buffer);
	assert_memory_equal(hr_buffer_data(buffer), want, t.bytes);
	hr_buffer_release(buffer);
	assert_int_equal(count_mappings(&rss), 0);
	free(want);
}

static void memory_of_a_loader_may_be_written(void **state)
{
	hr_buffer *buffer;
	struct bed bed;

	(void)state;
	bed_open(&bed, 83, 4, 1000);
	bed_load(&bed, "cpu", NULL);
	assert_ok(hr_buffer_new(bed.loader, 100, &buffer));
	assert_int_equal(hr_buffer_flags(buffer), 0);
	hr_buffer_release(buffer);
	bed_close(&bed);
}

static void refuses_what_makes_no_sense(void **state)
{
	struct hr_map_opts opts = HR_MAP_OPTS_INIT;
	hr_buffer *buffer = (hr_buffer *)&opts;
	unsigned char byte;
	struct bed bed;

	(void)state;
	bed_open(&bed, 84, 6, 100000);
	assert_fails(hr_map(NULL, 0, NULL, &buffer), HR_E_OPTS);
	assert_fails(hr_map(bed.model, 0, NULL, NULL), HR_E_OPTS);
	assert_fails(hr_map(bed.model, bed.n_tensors, NULL, &buffer), HR_E_OPTS);
	assert_null(buffer);
	opts.flags = 4;
	assert_fails(hr_map(bed.model, 0, &opts, &buffer), HR_E_OPTS);
	assert_ok(hr_map(bed.model, 0, NULL, &buffer));
	assert_fails(hr_buffer_release_on(buffer, &byte), HR_E_OPTS); /* and it was not released */
	assert_fails(hr_buffer_read(buffer, hr_buffer_bytes(buffer), &byte, 1), HR_E_OPTS);
	hr_buffer_release(buffer);
	bed_close(&bed);
}

static uint64_t large_tensor(const struct bed *bed)
{
	struct hr_tensor t = HR_TENSOR_INIT, best = HR_TENSOR_INIT;

	for (uint64_t i = 0; i < bed->n_tensors; i++) {
		assert_ok(hr_model_tensor(bed->model, i, &t));
		if (t.bytes > best.bytes)
			best = t;
	}
	assert_true(best.bytes > 100000);
	return best.index;
}

static void notices_a_file_that_changed_before(void **state)
{
	struct hr_tensor t = HR_TENSOR_INIT;
	unsigned char byte;
	hr_buffer *buffer, *late;
	struct bed bed;

	(void)state;
	bed_open(&bed, 85, 20, 300000);
	assert_ok(hr_model_tensor(bed.model, large_tensor(&bed), &t));
	assert_ok(hr_map(bed.model, t.index, NULL, &buffer));
	assert_int_equal(truncate(bed.paths[t.shard], 1000), 0);
	assert_fails(hr_map(bed.model, t.index, NULL, &late), HR_E_CHANGED);
	assert_null(late);
	/* Our own code reads through the file, where that is an error and not a signal. */
	assert_fails(hr_buffer_read(buffer, t.bytes - 1, &byte, 1), HR_E_CHANGED);
	hr_buffer_release(buffer);
	bed_close(&bed);
}

static void says_what_the_system_refuses(void **state)
{
	static const struct {
		const char *point;
		int error, code;
	} refusals[] = {{"mmap_file", ENOMEM, HR_E_NOMEM},
			{"mmap_file", EACCES, HR_E_IO},
			{"fstat", EIO, HR_E_IO},
			{"madvise_populate", EFAULT, HR_E_IO},
			{"madvise_populate", ENOMEM, HR_E_NOMEM}};
	struct hr_map_opts opts = HR_MAP_OPTS_INIT;
	hr_buffer *buffer;
	struct bed bed;
	uint64_t rss;

	(void)state;
	opts.flags = HR_MAP_POPULATE;
	for (size_t i = 0; i < sizeof(refusals) / sizeof(refusals[0]); i++) {
		bed_open(&bed, 86, 20, 300000);
		hr__fault_arm(refusals[i].point, 1, refusals[i].error);
		assert_fails(hr_map(bed.model, large_tensor(&bed), &opts, &buffer), refusals[i].code);
		hr__fault_arm(NULL, 0, 0);
		assert_null(buffer);
		bed_close(&bed);
		assert_int_equal(count_mappings(&rss), 0);
	}
	bed_open(&bed, 86, 20, 300000);
	hr__fault_arm("madvise_populate", 1, ENOTSUP); /* an older kernel: the hint is all there is */
	assert_ok(hr_map(bed.model, large_tensor(&bed), &opts, &buffer));
	assert_true(hr__fault_fired());
	hr_buffer_release(buffer);
	bed_close(&bed);
}

/* ---- in children ---- */

struct touch {
	volatile unsigned char *at;
	bool write;
};

static int touch_it(void *ctx)
{
	const struct touch *touch = ctx;
	const struct rlimit no_core = {0, 0};

	setrlimit(RLIMIT_CORE, &no_core);
	signal(SIGSEGV, SIG_DFL);
	signal(SIGBUS, SIG_DFL);
	if (touch->write)
		*touch->at = 1;
	return *touch->at == 7 ? 1 : 0;
}

static void ends_the_process_as_documented(void **state)
{
	struct hr_tensor t = HR_TENSOR_INIT;
	struct touch touch;
	hr_buffer *buffer;
	struct bed bed;

	(void)state;
	bed_open(&bed, 87, 20, 300000);
	assert_ok(hr_model_tensor(bed.model, large_tensor(&bed), &t));
	assert_ok(hr_map(bed.model, t.index, NULL, &buffer));
	touch = (struct touch){(unsigned char *)hr_buffer_data(buffer) + t.bytes - 1, false};
	assert_true(in_child(touch_it, &touch) <= 1);
	touch.write = true;
	assert_int_equal(in_child(touch_it, &touch), 101 + SIGSEGV);
	touch.write = false;
	assert_int_equal(truncate(bed.paths[t.shard], 1000), 0);
	assert_int_equal(in_child(touch_it, &touch), 101 + SIGBUS);
	hr_buffer_release(buffer);
	bed_close(&bed);
}

static int map_in_child(void *ctx)
{
	const struct bed *bed = ctx;
	struct hr_tensor t = HR_TENSOR_INIT;
	hr_buffer *buffer;

	for (uint64_t i = 0; i < bed->n_tensors; i++) {
		if (hr_model_tensor(bed->model, i, &t) || hr_map(bed->model, i, NULL, &buffer) ||
		    !buffer_is_right(bed->model, &t, buffer))
			return 1;
		hr_buffer_release(buffer);
	}
	return 0;
}

static void works_in_a_forked_child(void **state)
{
	hr_buffer **buffers;
	struct bed bed;

	(void)state;
	bed_open(&bed, 88, 12, 100000);
	assert_int_equal(in_child(map_in_child, &bed), 0);
	buffers = map_all(&bed, 0);
	assert_int_equal(in_child(map_in_child, &bed), 0);
	release_all(&bed, buffers);
	bed_close(&bed);
}

/* ---- threads ---- */

#define N_THREADS 8

static struct bed shared;
static int wrong[N_THREADS];

static void *map_again_and_again(void *arg)
{
	int *mine = arg;
	struct test_random random = {(uint64_t)(mine - wrong)};

	for (int i = 0; i < 300; i++) {
		struct hr_tensor t = HR_TENSOR_INIT;
		hr_buffer *buffer;

		if (hr_model_tensor(shared.model, test_random_below(&random, shared.n_tensors), &t) ||
		    hr_map(shared.model, t.index, NULL, &buffer)) {
			++*mine;
			continue;
		}
		if (i % 10 == 0) {
			unsigned char *want = plain_read(shared.model, &t);

			*mine += t.bytes && memcmp(want, hr_buffer_data(buffer), t.bytes) != 0;
			free(want);
		}
		hr_buffer_release(buffer);
	}
	return NULL;
}

static void is_used_by_many_threads_at_once(void **state)
{
	pthread_t threads[N_THREADS];
	uint64_t rss;

	(void)state;
	bed_open(&shared, 89, 30, 50000);
	for (int i = 0; i < N_THREADS; i++)
		assert_int_equal(pthread_create(&threads[i], NULL, map_again_and_again, &wrong[i]), 0);
	for (int i = 0; i < N_THREADS; i++) {
		pthread_join(threads[i], NULL);
		assert_int_equal(wrong[i], 0);
	}
	assert_int_equal(count_mappings(&rss), 2);
	bed_close(&shared);
	assert_int_equal(count_mappings(&rss), 0);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(gives_every_tensor_in_place),        cmocka_unit_test(outlives_the_model),
		cmocka_unit_test(memory_of_a_loader_may_be_written),  cmocka_unit_test(refuses_what_makes_no_sense),
		cmocka_unit_test(notices_a_file_that_changed_before), cmocka_unit_test(says_what_the_system_refuses),
		cmocka_unit_test(ends_the_process_as_documented),     cmocka_unit_test(works_in_a_forked_child),
		cmocka_unit_test(is_used_by_many_threads_at_once),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
