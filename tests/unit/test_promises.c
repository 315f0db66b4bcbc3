/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The promises about bytes: nothing partial, nothing aliased, no changed file unnoticed, staging inside its bounds,
 * nothing left behind. (Reads that hang: test_hanging.c. What the system refuses, forks, resident set: test_system.c.)
 * On every device that is here.
 */
#include "loadtest.h"
#include "modeltest.h"

#include "fakes/fake_cuda.h"
#include "fakes/fake_engine.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>

static void on_every_device_and_engine(void (*body)(const char *device, const char *engine))
{
	static const char *const devices[] = {"cpu", "cuda:0"}, *const engines[] = {"fake", "fake-queue",
										    "fake-window"};

	for (size_t d = 0; d < 2; d++)
		for (size_t e = 0; e < 3; e++)
			if (has_engine(devices[d], engines[e]))
				body(devices[d], engines[e]);
	fake_engine_set(NULL);
}

static void bed_with(struct bed *bed, const char *device, const char *engine, uint64_t staging_bytes)
{
	struct hr_loader_opts opts = HR_LOADER_OPTS_INIT;

	opts.engine = engine;
	opts.staging_bytes = staging_bytes;
	bed_open(bed, 61, 80, 500000);
	bed_load(bed, device, &opts);
}

/* ---- nothing partial ---- */

/* The last error names a file of the bed, a tensor of that file, and the byte that fails lies in or before it. */
static void check_place(const struct bed *bed, uint64_t fail_offset)
{
	const struct hr_error *error = hr_error_last();
	struct hr_tensor t = HR_TENSOR_INIT;
	uint64_t number;

	assert_string_equal(error->stage, "read");
	assert_ok(hr_model_find(bed->model, error->tensor, HR_STRLEN, &number));
	assert_ok(hr_model_tensor(bed->model, number, &t));
	assert_string_equal(error->path, bed->paths[t.shard]);
	assert_non_null(strstr(error->message, bed->paths[t.shard]));
	assert_true(error->offset <= fail_offset && fail_offset < error->offset + HR_MIN_SLOT_BYTES);
}

static void broken(const char *device, const char *engine)
{
	static const int codes[] = {EIO, 0};
	uint64_t in_middle = 1500000;

	for (int i = 0; i < 2; i++) {
		int expected = codes[i] ? HR_E_IO : HR_E_SHORT;
		struct hr_stats stats = HR_STATS_INIT;
		size_t n_out;
		struct bed bed;

		fake_engine_set(&(struct fake_engine_settings){.fail_offset = in_middle, .fail_errno = codes[i]});
		bed_with(&bed, device, engine, HR_MIN_STAGING_BYTES);
		assert_fails(load_by_job(bed.loader, bed.model, NULL), expected);
		check_place(&bed, in_middle);
		assert_int_equal(hr_error_last()->system, codes[i]);
		assert_fails(load_by_feed(bed.loader, bed.model, NULL, true, &n_out), expected);
		check_place(&bed, in_middle);
		assert_true(n_out < bed.n_tensors); /* those that went out are right: load_by_feed compares them */
		assert_ok(hr_loader_stats(bed.loader, &stats));
		assert_int_equal(stats.lost_bytes, 0);
		bed_close(&bed);
	}
}

static void fails_as_a_whole_and_says_where(void **state)
{
	(void)state;
	on_every_device_and_engine(broken);
}

/* A device that fails in the middle of copying. Only the look-alike driver can be told to. */
static void fails_as_a_whole_when_copying_fails(void **state)
{
	struct fake_cuda fake = {0};
	struct bed bed;

	(void)state;
	if (!has_device("cuda:0") || !fake_cuda_find(&fake))
		skip_for("needs the look-alike driver");
	bed_with(&bed, "cuda:0", NULL, HR_MIN_STAGING_BYTES);
	assert_ok(load_by_job(bed.loader, bed.model, NULL));
	for (unsigned n = 1; n < 12; n += 5) {
		fake.arm("cuMemcpyHtoDAsync_v2", n, 1);
		fake.arm("cuMemcpyBatchAsync_v2", n, 1);
		fake.arm("cuMemcpyBatchAsync", n, 1);
		assert_fails(load_by_job(bed.loader, bed.model, NULL), HR_E_DEVICE);
		assert_string_equal(hr_error_last()->stage, "copy");
		assert_int_equal(hr_error_last()->system, 1);
		fake.arm("*", 0, 0);
		assert_ok(load_by_feed(bed.loader, bed.model, NULL, true, NULL)); /* the loader goes on */
	}
	bed_close(&bed);
	assert_int_equal(fake.errors(NULL, 0), 0);
}

/* ---- no changed file unnoticed ---- */

static void rewrite(const struct bed *bed)
{
	int fd = open(bed->paths[0], O_WRONLY);

	assert_int_equal(pwrite(fd, "x", 1, 2000000), 1);
	close(fd);
}

static void truncate_it(const struct bed *bed)
{
	assert_int_equal(truncate(bed->paths[0], 1000000), 0);
}

static void replace(const struct bed *bed)
{
	char *other = path_in(bed->dir, "other");

	write_file(other, "other", 5);
	assert_int_equal(rename(other, bed->paths[0]), 0);
	free(other);
}

static void grow(const struct bed *bed)
{
	struct stat st;

	assert_int_equal(stat(bed->paths[0], &st), 0);
	assert_int_equal(truncate(bed->paths[0], st.st_size + 1), 0);
}

static void (*const changes[])(const struct bed *bed) = {rewrite, truncate_it, replace, grow};

static void during_a_job(const char *device, const char *engine)
{
	for (size_t i = 0; i < sizeof(changes) / sizeof(changes[0]); i++) {
		struct hr_tensor t = HR_TENSOR_INIT;
		struct hr_read read;
		hr_buffer *buffer;
		struct bed bed;
		hr_job *job;

		fake_engine_set(&(struct fake_engine_settings){.hang_read = 1});
		bed_with(&bed, device, engine, HR_MIN_STAGING_BYTES);
		do {
			assert_ok(hr_model_tensor(bed.model, t.name ? t.index + 1 : 0, &t));
		} while (t.bytes < 100000 || t.offset < 1000000);
		assert_ok(hr_buffer_new(bed.loader, t.bytes, &buffer));
		read = (struct hr_read){t.index, 0, UINT64_MAX, hr_buffer_data(buffer), t.bytes};
		assert_ok(hr_job_start(bed.loader, bed.model, &read, 1, NULL, &job));
		changes[i](&bed);
		fake_engine_let_go();
		assert_fails(hr_job_wait(job, HR_FOREVER), HR_E_CHANGED);
		assert_string_equal(hr_error_last()->path, bed.paths[0]);
		assert_fails(hr_job_wait(job, 0), HR_E_CHANGED);
		assert_ok(hr_job_close(job, 0));
		hr_buffer_release(buffer);
		bed_close(&bed);
	}
}

static void notices_a_file_that_changes_during_a_job(void **state)
{
	(void)state;
	on_every_device_and_engine(during_a_job);
}

static void during_a_feed(const char *device, const char *engine)
{
	for (size_t i = 0; i < sizeof(changes) / sizeof(changes[0]); i++) {
		struct hr_tensor t = HR_TENSOR_INIT;
		char handed_out[64];
		hr_buffer *buffer;
		struct bed bed;
		hr_feed *feed;
		int rc, n = 0;

		/* with the first tensors already in */
		fake_engine_set(&(struct fake_engine_settings){.hang_read = 12});
		bed_with(&bed, device, engine, HR_MIN_STAGING_BYTES);
		assert_ok(hr_feed_open(bed.loader, bed.model, NULL, &feed));
		do {
			rc = hr_feed_next(feed, &t, &buffer);
			n += !rc;
			if (!rc)
				hr_buffer_release(buffer);
			if (n == 1) {
				changes[i](&bed);
				fake_engine_let_go();
			}
		} while (!rc);
		assert_int_equal(rc, HR_E_CHANGED);
		assert_string_equal(hr_error_last()->path, bed.paths[0]);
		snprintf(handed_out, sizeof(handed_out), " %d tensors were handed out", n);
		assert_non_null(strstr(hr_error_last()->message, handed_out));
		assert_true(n < (int)bed.n_tensors / 2); /* the first shard has a half of them */
		assert_fails(hr_feed_next(feed, &t, &buffer), HR_E_CHANGED);
		assert_non_null(strstr(hr_error_last()->message, handed_out));
		assert_ok(hr_feed_close(feed, HR_FOREVER));
		bed_close(&bed);
	}
}

static void notices_a_file_that_changes_during_a_feed(void **state)
{
	(void)state;
	on_every_device_and_engine(during_a_feed);
}

/* ---- nothing aliased ---- */

static void beside_one_another(const char *device, const char *engine)
{
	struct hr_tensor t = HR_TENSOR_INIT;
	struct {
		const unsigned char *from, *to;
	} ranges[80];
	hr_buffer *buffers[81]; /* the last for the end */
	size_t n = 0;
	struct bed bed;
	hr_feed *feed;

	fake_engine_set(&(struct fake_engine_settings){.short_reads = 1});
	bed_with(&bed, device, engine, HR_MIN_STAGING_BYTES);
	assert_ok(hr_feed_open(bed.loader, bed.model, NULL, &feed));
	while (hr_feed_next(feed, &t, &buffers[n]) == 0) {
		ranges[n].from = hr_buffer_data(buffers[n]);
		ranges[n].to = ranges[n].from + t.bytes;
		for (size_t i = 0; i < n; i++)
			assert_true(!ranges[n].from || ranges[n].from >= ranges[i].to ||
				    ranges[i].from >= ranges[n].to);
		n++;
	}
	assert_int_equal(n, 80);
	assert_ok(hr_feed_close(feed, HR_FOREVER));
	assert_ok(load_by_job(bed.loader, bed.model, NULL)); /* other work does not disturb what is kept */
	for (size_t i = 0; i < n; i++) {
		assert_ok(hr_model_tensor(bed.model, i, &t));
		assert_true(buffer_is_right(bed.model, &t, buffers[i]));
		hr_buffer_release(buffers[i]);
	}
	bed_close(&bed);
}

static void never_hands_out_memory_twice(void **state)
{
	(void)state;
	on_every_device_and_engine(beside_one_another);
}

/* ---- bounds ---- */

static void within_bounds(const char *device, const char *engine)
{
	static const uint64_t pools[] = {HR_MIN_STAGING_BYTES, HR_MIN_STAGING_BYTES + 70000, UINT64_C(3) << 20};

	for (int i = 0; i < 3; i++) {
		struct hr_stats stats = HR_STATS_INIT;
		struct bed bed;

		fake_engine_set(NULL);
		bed_with(&bed, device, engine, pools[i]);
		assert_ok(load_by_job(bed.loader, bed.model,
				      &(struct hr_job_opts){sizeof(struct hr_job_opts), 10000, 0, NULL, NULL}));
		assert_ok(load_by_feed(bed.loader, bed.model, NULL, false, NULL));
		assert_ok(hr_loader_stats(bed.loader, &stats));
		assert_true(stats.staging_bytes <= pools[i]);
		assert_true(stats.peak_staging_bytes > 0 && stats.peak_staging_bytes <= stats.staging_bytes);
		bed_close(&bed);
	}
}

static void stays_inside_its_staging_memory(void **state)
{
	(void)state;
	on_every_device_and_engine(within_bounds);
}

static void use_everything(const char *device, const char *engine)
{
	struct hr_tensor t = HR_TENSOR_INIT;
	hr_buffer *buffer;
	hr_feed *feed;
	struct bed bed;

	fake_engine_set(&(struct fake_engine_settings){.fail_read = 7, .fail_errno = EIO});
	bed_with(&bed, device, engine, HR_MIN_STAGING_BYTES * 4);
	assert_fails(load_by_job(bed.loader, bed.model, NULL), HR_E_IO);
	assert_ok(load_by_job(bed.loader, bed.model, NULL));
	assert_ok(hr_feed_open(bed.loader, bed.model, NULL, &feed));
	assert_ok(hr_feed_next(feed, &t, &buffer));
	hr_buffer_release(buffer);
	assert_ok(hr_feed_close(feed, HR_FOREVER));
	bed_close(&bed);
	bed_with(&bed, device, strcmp(engine, "fake") == 0 ? "pread" : NULL, HR_MIN_STAGING_BYTES);
	assert_ok(load_by_job(bed.loader, bed.model, NULL));
	bed_close(&bed);
}

static void leaves_no_descriptor_and_no_thread_behind(void **state)
{
	uint64_t n_threads;
	int n_files;

	(void)state;
	on_every_device_and_engine(use_everything); /* a driver opens what it keeps */
	n_files = count_open_files();
	n_threads = proc_status("Threads");
	for (int i = 0; i < 3; i++)
		on_every_device_and_engine(use_everything);
	assert_int_equal(count_open_files(), n_files);
	assert_int_equal(proc_status("Threads"), n_threads);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(fails_as_a_whole_and_says_where),
		cmocka_unit_test(fails_as_a_whole_when_copying_fails),
		cmocka_unit_test(notices_a_file_that_changes_during_a_job),
		cmocka_unit_test(notices_a_file_that_changes_during_a_feed),
		cmocka_unit_test(never_hands_out_memory_twice),
		cmocka_unit_test(stays_inside_its_staging_memory),
		cmocka_unit_test(leaves_no_descriptor_and_no_thread_behind),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
