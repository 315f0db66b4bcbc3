/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Engine cufile over NVIDIA's own libcufile: that our use of its true interface works, in compatibility mode where
 * there is no nvidia-fs. The driver below it may be the look-alike (tools/check) or real (a GPU machine).
 */
#include "gdstest.h"

#include "modeltest.h"

#include <errno.h>
#include <fcntl.h>

static struct hr_loader_opts window_of(uint64_t slot_bytes, uint64_t n_slots, uint32_t flags)
{
	struct hr_loader_opts opts = HR_LOADER_OPTS_INIT;

	opts.engine = "cufile";
	opts.slot_bytes = slot_bytes;
	opts.staging_bytes = slot_bytes * n_slots;
	opts.flags = flags;
	return opts;
}

/* Where the library can reach the GPU it must deliver; elsewhere it must not pretend. */
static void direct_reads_work_or_fail_with_the_reason(void **state)
{
	struct hr_loader_opts opts = window_of(MIB, 8, 0);
	struct bed bed;
	int rc;

	(void)state;
	bed_open(&bed, 91, 20, 3 * MIB);
	assert_ok(hr_device_open("cuda:0", &bed.device));
	rc = hr_loader_open(bed.device, &opts, &bed.loader);
	if (rc) {
		printf("# %s\n", hr_error_last()->message);
		assert_int_equal(rc, HR_E_UNSUPPORTED);
		assert_non_null(strstr(hr_error_last()->message, "cuFile"));
		assert_fails(hr_loader_open(bed.device, &opts, &bed.loader), HR_E_UNSUPPORTED); /* at once */
	} else {
		assert_ok(load_by_job(bed.loader, bed.model, NULL));
	}
	bed_close(&bed);
}

static void compatibility_mode_delivers_right_bytes(void **state)
{
	static const struct hr_job_opts timed = {sizeof(timed), 60000, 0, NULL, NULL};
	static const uint64_t slots[] = {64 << 10, MIB, 8 * MIB};

	(void)state;
	for (size_t i = 0; i < 3; i++)
		for (uint32_t caching = 0; caching < 3; caching++) {
			struct hr_loader_opts opts = window_of(slots[i], 4, HR_LOADER_CUFILE_COMPAT);
			struct hr_stats stats = HR_STATS_INIT;
			struct bed bed;

			opts.caching = caching;
			bed_open(&bed, 92, 30, 4 * MIB);
			bed_load(&bed, "cuda:0", &opts);
			assert_ok(load_by_job(bed.loader, bed.model, NULL));
			assert_ok(load_by_job(bed.loader, bed.model, &timed));
			assert_ok(load_by_feed(bed.loader, bed.model, NULL, true, NULL));
			assert_ok(hr_loader_stats(bed.loader, &stats));
			if (caching == 0)
				printf("# %s\n", stats.note);
			assert_non_null(strstr(stats.note, "compat"));
			if (!strstr(stats.note, "cuFile 1.14")) /* which has no counters */
				assert_non_null(strstr(stats.note, "reads went through host memory"));
			bed_close(&bed);
		}
}

static int cut(const char *path)
{
	return truncate(path, 300000);
}

static void a_file_that_was_cut_fails_the_job(void **state)
{
	struct hr_loader_opts opts = window_of(256 << 10, 4, HR_LOADER_CUFILE_COMPAT);
	struct bed bed;

	(void)state;
	bed_open(&bed, 93, 30, MIB);
	bed_load(&bed, "cuda:0", &opts);
	assert_int_equal(cut(bed.paths[0]), 0);
	assert_fails(load_by_job(bed.loader, bed.model, NULL), HR_E_CHANGED);
	bed_close(&bed);
}

static void opening_and_closing_many_times_leaves_nothing(void **state)
{
	struct hr_loader_opts opts = window_of(MIB, 4, HR_LOADER_CUFILE_COMPAT);
	struct hr_device_info info = HR_DEVICE_INFO_INIT;
	int n_times = getenv("HR_OPEN_CLOSE") ? (int)strtol(getenv("HR_OPEN_CLOSE"), NULL, 10) : 8, n_files = 0;
	uint64_t free_bytes = 0, n_threads = 0;
	hr_loader *loader;
	struct bed bed;

	(void)state;
	bed_open(&bed, 94, 4, MIB);
	assert_ok(hr_device_open("cuda:0", &bed.device));
	for (int i = 0; i < n_times; i++) {
		assert_ok(hr_loader_open(bed.device, &opts, &loader));
		if (i % 50 == 0)
			assert_ok(load_by_job(loader, bed.model, NULL));
		assert_ok(hr_loader_close(loader, HR_FOREVER));
		assert_ok(hr_device_info(bed.device, &info));
		if (i == 1) { /* what the first time leaves for good does not count */
			n_files = count_open_files();
			n_threads = proc_status("Threads");
			free_bytes = info.free_bytes;
		}
	}
	printf("# %d times: %d descriptors, %llu threads, %llu bytes of GPU memory free, then %d, %llu, %llu\n",
	       n_times, n_files, (unsigned long long)n_threads, (unsigned long long)free_bytes, count_open_files(),
	       (unsigned long long)proc_status("Threads"), (unsigned long long)info.free_bytes);
	assert_int_equal(count_open_files(), n_files);
	assert_true(proc_status("Threads") <= n_threads);
	if (has_fake_cuda) /* on a real GPU others may come and go; the line above tells */
		assert_int_equal(info.free_bytes, free_bytes);
	bed_close(&bed);
}

#define TEST(name) cmocka_unit_test(name)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(direct_reads_work_or_fail_with_the_reason),
		TEST(compatibility_mode_delivers_right_bytes),
		TEST(a_file_that_was_cut_fails_the_job),
		TEST(opening_and_closing_many_times_leaves_nothing),
	};

	if (!find_libraries())
		return 0;
	if (has_fake_cufile || !has_device("cuda:0")) {
		printf("1..0 # SKIP this test is for the real libcufile, and a CUDA driver\n");
		return 0;
	}
	return cmocka_run_group_tests(tests, NULL, NULL);
}
