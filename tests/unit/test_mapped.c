/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The mapped engine under a loader: right bytes from windows of any size and place, no more registered memory than
 * staging_bytes, each window given back after its own copies and none left, and what happens where the driver will
 * not have it. (Its contract alone: test_engine.c; against the other engines: test_engines.c.) On cuda only; most of
 * it also runs over a real driver, where it says whether that takes windows of files.
 */
#include "loadtest.h"
#include "modeltest.h"

#include "fakes/fake_cuda.h"

#include <errno.h>
#include <fcntl.h>

static struct fake_cuda fake;
static bool has_fake;

static int find_driver(void **state)
{
	(void)state;
	has_fake = fake_cuda_find(&fake);
	return 0;
}

static void need_fake(void)
{
	if (has_fake)
		return;
	skip_for("needs the look-alike driver");
}

/* Ends with a skip, and the reason, where windows cannot be had. */
static void bed_with_windows(struct bed *bed, uint64_t staging_bytes, uint64_t slot_bytes, uint32_t readers)
{
	struct hr_loader_opts opts = HR_LOADER_OPTS_INIT;
	int rc;

	if (!has_device("cuda:0")) {
		bed_close(bed);
		skip_for("no CUDA driver on this machine");
	}
	opts.engine = "mapped";
	opts.staging_bytes = staging_bytes;
	opts.slot_bytes = slot_bytes;
	opts.readers = readers;
	assert_ok(hr_device_open("cuda:0", &bed->device));
	rc = hr_loader_open(bed->device, &opts, &bed->loader);
	if (rc == HR_E_UNSUPPORTED && !has_fake) {
		bed_close(bed);
		skip_for("%s", hr_error_last()->message);
	}
	assert_ok(rc);
}

static void close_clean(struct bed *bed)
{
	char text[256] = "";

	bed_close(bed);
	if (!has_fake)
		return;
	if (fake.errors(text, sizeof(text)))
		fail_msg("%s", text);
	assert_int_equal(fake.live("registrations"), 0);
}

static void delivers_the_bytes_inside_its_staging_memory(void **state)
{
	static const struct {
		uint64_t staging, slot;
		uint32_t readers;
	} shapes[] = {{HR_MIN_STAGING_BYTES, HR_MIN_SLOT_BYTES, 1},
		      {HR_MIN_STAGING_BYTES * 4 + 5000, HR_MIN_SLOT_BYTES, 1},
		      {1 << 20, 0, 0},
		      {2 << 20, 1 << 20, 3},
		      {0, 0, 0}};

	(void)state;
	for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
		struct hr_stats stats = HR_STATS_INIT;
		struct bed bed;

		bed_open(&bed, 91 + i, 60, 700000);
		bed_with_windows(&bed, shapes[i].staging, shapes[i].slot, shapes[i].readers);
		if (has_fake)
			fake.live("most_registered");
		assert_ok(load_by_job(bed.loader, bed.model, NULL));
		assert_ok(load_by_feed(bed.loader, bed.model, NULL, true, NULL));
		assert_ok(load_by_feed(bed.loader, bed.model, NULL, false, NULL));
		assert_ok(hr_loader_stats(bed.loader, &stats));
		assert_true(stats.peak_staging_bytes > 0 && stats.peak_staging_bytes <= stats.staging_bytes);
		if (has_fake)
			assert_true(fake.live("most_registered") <= (long long)stats.staging_bytes);
		assert_int_equal(stats.cached_bytes[HR_ENGINE_MAPPED], stats.read_bytes);
		assert_int_equal(stats.done_bytes, 3 * bed.bytes);
		assert_int_equal(stats.lost_bytes, 0);
		close_clean(&bed);
	}
}

static void takes_files_of_memory_file_systems(void **state)
{
	char *dir = strdup("/dev/shm/hr-mapped-XXXXXX");
	struct bed bed;

	(void)state;
	if (!mkdtemp(dir))
		skip_for("no folder can be made in /dev/shm");
	bed_open_in(&bed, dir, 95, 20, 200000);
	bed_with_windows(&bed, HR_MIN_STAGING_BYTES * 4, 0, 0);
	assert_ok(load_by_job(bed.loader, bed.model, NULL));
	close_clean(&bed);
}

static void brings_cold_bytes_in_itself(void **state)
{
	struct bed bed;

	(void)state;
	bed_open(&bed, 96, 30, 900000);
	for (int i = 0; i < 2; i++) {
		int fd = open(bed.paths[i], O_RDONLY);

		assert_int_equal(fdatasync(fd), 0);
		posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
		close(fd);
	}
	bed_with_windows(&bed, 1 << 20, 0, 0);
	assert_ok(load_by_job(bed.loader, bed.model, NULL));
	close_clean(&bed);
}

static void says_where_it_cannot_be_used(void **state)
{
	struct hr_loader_opts opts = HR_LOADER_OPTS_INIT;
	hr_loader *loader;
	hr_device *device;

	(void)state;
	opts.engine = "mapped";
	assert_ok(hr_device_open("cpu", &device));
	assert_fails(hr_loader_open(device, &opts, &loader), HR_E_UNSUPPORTED);
	assert_non_null(strstr(hr_error_last()->message, "hr_map"));
	assert_ok(hr_device_close(device));
	if (!has_device("cuda:0"))
		return;
	assert_ok(hr_device_open("cuda:0", &device));
	opts.caching = HR_CACHING_BYPASS;
	assert_fails(hr_loader_open(device, &opts, &loader), HR_E_UNSUPPORTED);
	assert_non_null(strstr(hr_error_last()->message, "bypass"));
	opts.caching = HR_CACHING_AUTO;
	if (has_fake) {
		fake.set("read_only", 0);
		assert_fails(hr_loader_open(device, &opts, &loader), HR_E_UNSUPPORTED);
		assert_non_null(strstr(hr_error_last()->message, "cuMemHostRegister"));
		assert_non_null(strstr(hr_error_last()->message, "801"));
		assert_non_null(strstr(hr_error_last()->message, "use engine auto"));
		assert_int_equal(fake.live("registrations"), 0);
	}
	assert_ok(hr_device_close(device));
	if (has_fake)
		fake.reset();
}

static void needs_no_read_only_registrations_where_the_gpu_has_the_hosts_tables(void **state)
{
	struct bed bed;

	(void)state;
	need_fake();
	bed_open(&bed, 97, 20, 200000);
	fake.set("read_only", 0);
	fake.set("host_tables", 1);
	bed_with_windows(&bed, HR_MIN_STAGING_BYTES, 0, 0);
	assert_ok(load_by_job(bed.loader, bed.model, NULL));
	close_clean(&bed);
	fake.reset();
}

static void registers_in_pieces_where_the_driver_wants_that(void **state)
{
	static const struct test_tensor tensors[] = {{"a", "U8", 70000001}, {"b", "U8", 30000000}};
	struct bed bed = {.dir = make_temp_dir()};

	(void)state;
	bed.paths[0] = path_in(bed.dir, "large.safetensors");
	write_safetensors(bed.paths[0], tensors, 2, 5);
	assert_ok(hr_model_open(bed.paths[0], NULL, &bed.model));
	if (has_fake)
		fake.set("register_mib", 40);
	bed_with_windows(&bed, 192 << 20, 64 << 20, 0);
	assert_ok(load_by_job(bed.loader, bed.model, NULL));
	close_clean(&bed);
	if (has_fake)
		fake.reset();
}

/* ---- failures ---- */

static void fails_the_job_with_the_drivers_words_and_goes_on(void **state)
{
	struct bed bed;

	(void)state;
	need_fake();
	bed_open(&bed, 98, 40, 400000);
	bed_with_windows(&bed, HR_MIN_STAGING_BYTES * 2, 0, 0);
	for (unsigned n = 1; n < 20; n += 6) {
		fake.arm("cuMemHostRegister_v2", n, 304); /* no result that breaks the context */
		assert_fails(load_by_job(bed.loader, bed.model, NULL), HR_E_DEVICE);
		assert_string_equal(hr_error_last()->stage, "read");
		assert_non_null(strstr(hr_error_last()->message, "cuMemHostRegister"));
		assert_int_equal(hr_error_last()->system, 304);
		fake.arm("*", 0, 0);
		assert_ok(load_by_feed(bed.loader, bed.model, NULL, true, NULL));
	}
	fake.arm("cuMemHostRegister_v2", 3, 2);
	assert_fails(load_by_job(bed.loader, bed.model, NULL), HR_E_NOMEM);
	fake.arm("*", 0, 0);
	close_clean(&bed);
}

static void tries_again_to_give_a_window_back(void **state)
{
	struct bed bed;

	(void)state;
	need_fake();
	bed_open(&bed, 99, 40, 400000);
	bed_with_windows(&bed, HR_MIN_STAGING_BYTES * 2, 0, 0);
	for (unsigned n = 1; n < 12; n += 5) {
		fake.arm("cuMemHostUnregister", n, 304);
		assert_ok(load_by_job(bed.loader, bed.model, NULL));
		fake.arm("*", 0, 0);
	}
	close_clean(&bed);
}

static void system_refuses(const struct bed *bed, const char *point, int error, int code)
{
	hr__fault_arm(point, 2, error);
	assert_fails(load_by_job(bed->loader, bed->model, NULL), code);
	assert_true(hr__fault_fired());
	hr__fault_arm(NULL, 0, 0);
	if (code == HR_E_IO)
		assert_int_equal(hr_error_last()->system, error == EFAULT ? EIO : error);
	assert_ok(load_by_job(bed->loader, bed->model, NULL));
}

static void tells_what_the_system_refuses(void **state)
{
	struct bed bed;

	(void)state;
	bed_open(&bed, 100, 40, 400000);
	bed_with_windows(&bed, HR_MIN_STAGING_BYTES * 2, 0, 0);
	system_refuses(&bed, "mmap_file", ENOMEM, HR_E_IO);
	system_refuses(&bed, "madvise_populate", EFAULT, HR_E_IO);
	system_refuses(&bed, "madvise_populate", EIO, HR_E_IO);
	hr__fault_arm("madvise_populate", 1, ENOTSUP); /* an older kernel: registering brings the pages in */
	assert_ok(load_by_job(bed.loader, bed.model, NULL));
	assert_true(hr__fault_fired());
	hr__fault_arm(NULL, 0, 0);
	close_clean(&bed);
}

/* A context that breaks takes no call any more: the windows' addresses are kept, and all closes. */
static void survives_a_gpu_that_is_lost(void **state)
{
	struct bed bed;

	(void)state;
	need_fake();
	bed_open(&bed, 101, 40, 400000);
	bed_with_windows(&bed, HR_MIN_STAGING_BYTES * 4, 0, 0);
	fake.arm("async", 3, 700);
	assert_fails(load_by_job(bed.loader, bed.model, NULL), HR_E_DEVICE);
	assert_fails(load_by_job(bed.loader, bed.model, NULL), HR_E_DEVICE);
	bed_close(&bed);
	fake.reset();
}

/* ---- ends in the middle ---- */

static void gives_all_windows_back_after_a_cancelled_job(void **state)
{
	struct test_random random;
	struct bed bed;
	hr_buffer *buffer;

	(void)state;
	test_random_start(&random, 7);
	bed_open(&bed, 102, 60, 400000);
	bed_with_windows(&bed, HR_MIN_STAGING_BYTES * 4, 0, 0);
	assert_ok(hr_buffer_new(bed.loader, bed.bytes, &buffer));
	for (int round = 0; round < 40; round++) {
		struct hr_read reads[60];
		struct hr_tensor t = HR_TENSOR_INIT;
		hr_job *job;

		for (uint64_t i = 0, at = 0; i < 60; i++, at += t.bytes) {
			assert_ok(hr_model_tensor(bed.model, i, &t));
			reads[i] = (struct hr_read){i, 0, UINT64_MAX, (char *)hr_buffer_data(buffer) + at, t.bytes};
		}
		assert_ok(hr_job_start(bed.loader, bed.model, reads, 60, NULL, &job));
		usleep((useconds_t)test_random_below(&random, 3000));
		assert_ok(hr_job_close(job, HR_FOREVER));
	}
	assert_ok(load_by_job(bed.loader, bed.model, NULL));
	hr_buffer_release(buffer);
	close_clean(&bed);
}

static void closes_at_once_when_its_jobs_are_done(void **state)
{
	(void)state;
	for (int round = 0; round < 20; round++) {
		struct bed bed;

		bed_open(&bed, 103, 20, 300000);
		bed_with_windows(&bed, HR_MIN_STAGING_BYTES * 4, 0, 1);
		assert_ok(load_by_job(bed.loader, bed.model, NULL));
		assert_ok(hr_loader_close(bed.loader, 0)); /* windows that wait to be taken back are nobody's work */
		bed.loader = NULL;
		close_clean(&bed);
	}
}

/* A feed whose consumer is slow holds windows; a job beside it still gets some. */
static void lets_a_job_pass_a_feed_that_is_not_drunk(void **state)
{
	struct hr_tensor t = HR_TENSOR_INIT;
	hr_buffer *buffer;
	struct bed bed;
	hr_feed *feed;

	(void)state;
	bed_open(&bed, 104, 60, 300000);
	bed_with_windows(&bed, HR_MIN_STAGING_BYTES * 2, 0, 0);
	assert_ok(hr_feed_open(bed.loader, bed.model, NULL, &feed));
	usleep(20000);
	for (int i = 0; i < 10; i++) {
		assert_ok(load_by_job(bed.loader, bed.model, NULL));
		assert_ok(hr_feed_next(feed, &t, &buffer));
		assert_true(buffer_is_right(bed.model, &t, buffer));
		hr_buffer_release(buffer);
	}
	assert_ok(hr_feed_close(feed, HR_FOREVER));
	close_clean(&bed);
}

/* What is cut off between two windows: the first bytes went over, the job fails, and nothing is touched by the CPU. */
static void notices_a_file_that_becomes_shorter(void **state)
{
	static const struct test_tensor tensors[] = {{"w", "U8", 3000001}};
	struct bed bed = {.dir = make_temp_dir()};

	(void)state;
	bed.paths[0] = path_in(bed.dir, "short.safetensors");
	for (uint64_t left = 2; left <= 3000000; left = left * 3 + 4095) {
		write_safetensors(bed.paths[0], tensors, 1, 6);
		assert_ok(hr_model_open(bed.paths[0], NULL, &bed.model));
		bed_with_windows(&bed, HR_MIN_STAGING_BYTES, 0, 0);
		assert_int_equal(truncate(bed.paths[0], (off_t)left), 0);
		assert_fails(load_by_job(bed.loader, bed.model, NULL), HR_E_CHANGED);
		assert_ok(hr_loader_close(bed.loader, HR_FOREVER));
		assert_ok(hr_device_close(bed.device));
		hr_model_close(bed.model);
		bed.loader = NULL;
		bed.device = NULL;
		bed.model = NULL;
	}
	close_clean(&bed);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(delivers_the_bytes_inside_its_staging_memory),
		cmocka_unit_test(takes_files_of_memory_file_systems),
		cmocka_unit_test(brings_cold_bytes_in_itself),
		cmocka_unit_test(says_where_it_cannot_be_used),
		cmocka_unit_test(needs_no_read_only_registrations_where_the_gpu_has_the_hosts_tables),
		cmocka_unit_test(registers_in_pieces_where_the_driver_wants_that),
		cmocka_unit_test(fails_the_job_with_the_drivers_words_and_goes_on),
		cmocka_unit_test(tries_again_to_give_a_window_back),
		cmocka_unit_test(tells_what_the_system_refuses),
		cmocka_unit_test(gives_all_windows_back_after_a_cancelled_job),
		cmocka_unit_test(closes_at_once_when_its_jobs_are_done),
		cmocka_unit_test(lets_a_job_pass_a_feed_that_is_not_drunk),
		cmocka_unit_test(notices_a_file_that_becomes_shorter),
		cmocka_unit_test(survives_a_gpu_that_is_lost), /* last: what was registered there stays */
	};

	return cmocka_run_group_tests(tests, find_driver, NULL);
}
