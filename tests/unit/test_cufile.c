/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Engine cufile over the look-alike library: right bytes through a window of any size, what a window may cost, that no
 * slot is used again too early, and each failure that was met in the field, with the error that it must give, nothing
 * left and nothing handed out. test_cufile_start.c has how the library is started.
 */
#include "gdstest.h"

#include "engine/cufile_syms.h"
#include "loader/loader.h"
#include "modeltest.h"

#include <errno.h>
#include <fcntl.h>

static struct hr_loader_opts window_of(uint64_t slot_bytes, uint64_t n_slots)
{
	struct hr_loader_opts opts = HR_LOADER_OPTS_INIT;

	opts.engine = "cufile";
	opts.slot_bytes = slot_bytes;
	opts.staging_bytes = slot_bytes * n_slots;
	return opts;
}

static void bytes_are_right(struct bed *bed)
{
	static const struct hr_job_opts timed = {sizeof(timed), 60000, 0, NULL, NULL};

	assert_ok(load_by_job(bed->loader, bed->model, NULL));
	assert_ok(load_by_job(bed->loader, bed->model, &timed));
	assert_ok(load_by_feed(bed->loader, bed->model, NULL, true, NULL));
}

static void delivers_right_bytes_and_says_how(void **state)
{
	struct hr_loader_opts opts = window_of(256 << 10, 8);
	struct hr_stats stats = HR_STATS_INIT;
	struct bed bed;

	(void)state;
	bed_open(&bed, 61, 60, 900000);
	bed_load(&bed, "cuda:0", &opts);
	bytes_are_right(&bed);
	assert_ok(hr_loader_stats(bed.loader, &stats));
	for (int i = 0; i < HR_N_ENGINES; i++) {
		assert_int_equal(stats.cached_bytes[i], 0);
		assert_true((stats.direct_bytes[i] > 0) == (i == HR_ENGINE_CUFILE));
	}
	/* the window, a block for the ends of files for each slot, and 64 KiB for each reader */
	assert_int_equal(stats.staging_bytes, 2 * MIB + 8 * 4096 + stats.n_readers * 65536);
	assert_int_equal(stats.n_slots, 8);
	assert_int_equal(cufile.calls("cuFileBufRegister"), 1);
	assert_int_equal(cufile.live("kib"), 2048);
	assert_non_null(strstr(stats.note, "cuFile 1.15, nvidia-fs 2.24"));
	assert_non_null(strstr(stats.note, "; 0 of "));
	bed_close(&bed);
	assert_no_complaint();
}

/* Files that end at every place in a block that matters, with a last read that has whole blocks or none. */
static void the_end_of_a_file_arrives_wherever_it_is(void **state)
{
	static const uint64_t ends[] = {1,    2,     511,   512,   513,    4095,   4096,
					4097, 65535, 65536, 65537, 131072, 131073, 200001};
	struct hr_loader_opts opts = window_of(64 << 10, 2);

	(void)state;
	for (size_t i = 0; i < sizeof(ends) / sizeof(ends[0]); i++) {
		const struct test_tensor tensors[] = {{"a", "U8", ends[i]}, {"b", "U8", 3}};
		char *dir = make_temp_dir(), *path = path_in(dir, "a.safetensors");
		struct hr_read read = {.tensor = 1, .length = UINT64_MAX};
		hr_buffer *buffer;
		struct bed bed;

		for (size_t n = 1; n < 3; n++) {
			write_safetensors(path, tensors, n, i);
			bed_open_model(&bed, path);
			bed_load(&bed, "cuda:0", &opts);
			assert_ok(load_by_job(bed.loader, bed.model, NULL));
			if (n == 2) { /* only the very last bytes */
				assert_ok(hr_buffer_new(bed.loader, 3, &buffer));
				read.dst = hr_buffer_data(buffer);
				read.dst_bytes = 3;
				assert_ok(hr_read_into(bed.loader, bed.model, 1, read.dst, 3));
				hr_buffer_release(buffer);
			}
			bed_close(&bed);
		}
		remove_tree(dir);
		free(path);
		free(dir);
	}
	assert_no_complaint();
}

/* ---- no slot is used again too early, and nothing beside the window is taken ---- */

static void *late(hr_loader *loader, uint64_t bytes, hr_buffer **out)
{
	assert_ok(hr_buffer_new(loader, bytes, out));
	return hr_buffer_data(*out);
}

/* The look-alikes end the process if a read meets a read, a copy, or what a read has left behind. */
static void rotate(uint64_t n_slots, uint64_t seed)
{
	struct hr_loader_opts opts = window_of(MIB, n_slots);
	struct hr_read reads[2];
	hr_buffer *buffers[2];
	long long before;
	struct bed bed;
	hr_job *job;

	bed_open_in(&bed, make_temp_dir(), seed, 24, 5 * MIB);
	cuda.set("seed", (long long)seed);
	cufile.set("seed", (long long)seed);
	cuda.set("delay_us", 3000);
	cufile.set("delay_us", 2000);
	assert_ok(hr_device_open("cuda:0", &bed.device));
	before = cuda.live("bytes");
	opts.readers = 8;
	assert_ok(hr_loader_open(bed.device, &opts, &bed.loader));
	assert_int_equal(cuda.live("bytes") - before, n_slots * MIB + (n_slots < 4 ? HR__WINDOW_ALIGN : 0));
	assert_ok(load_by_job(bed.loader, bed.model, NULL));
	assert_ok(load_by_feed(bed.loader, bed.model, NULL, false, NULL));
	/* two jobs at once, whose destinations are all that is taken beside the window */
	for (uint64_t i = 0; i < 2; i++) {
		struct hr_tensor t = HR_TENSOR_INIT;

		assert_ok(hr_model_tensor(bed.model, i, &t));
		reads[i] = (struct hr_read){i, 0, UINT64_MAX, late(bed.loader, t.bytes, &buffers[i]), t.bytes};
	}
	assert_ok(hr_job_start(bed.loader, bed.model, reads, 2, NULL, &job));
	assert_ok(hr_job_wait(job, HR_FOREVER));
	assert_ok(hr_job_close(job, HR_FOREVER));
	for (uint64_t i = 0; i < 2; i++) {
		struct hr_tensor t = HR_TENSOR_INIT;

		assert_ok(hr_model_tensor(bed.model, i, &t));
		assert_true(buffer_is_right(bed.model, &t, buffers[i]));
		hr_buffer_release(buffers[i]);
	}
	assert_true(cufile.live("peak_reads") <= (long long)n_slots);
	if (n_slots > 2)
		assert_true(cufile.live("peak_reads") > 1);
	bed_close(&bed);
	assert_no_complaint();
}

static void no_slot_is_used_again_before_its_read_and_its_copy_are_over(void **state)
{
	static const uint64_t sizes[] = {2, 3, 16};

	(void)state;
	for (size_t i = 0; i < 3; i++)
		for (uint64_t seed = 1; seed < 4; seed++) {
			reset_fakes(NULL);
			rotate(sizes[i], seed);
		}
}

/* What a driver keeps of a read for a while is keyed by its address, so the slot that was used last comes last. */
static void slots_take_turns_so_that_a_read_is_torn_down_before_the_next_one_there(void **state)
{
	struct hr_loader_opts opts = window_of(256 << 10, 16);
	struct bed bed;

	(void)state;
	opts.readers = 2;
	cuda.set("delay_us", 20);
	cufile.set("delay_us", 1000);
	cufile.set("teardown_us", 1000);
	bed_open(&bed, 64, 12, 2 * MIB);
	bed_load(&bed, "cuda:0", &opts);
	assert_ok(load_by_job(bed.loader, bed.model, NULL));
	bed_close(&bed);
	cufile.set("teardown_us", 0);
	assert_no_complaint();
}

/* Device memory at its highest is the destinations, the window, and nothing. */
static void a_load_takes_its_destinations_and_the_window(void **state)
{
	struct hr_loader_opts opts = window_of(MIB, 16);
	hr_buffer *buffers[40];
	struct hr_read reads[40];
	long long before, destinations;
	struct bed bed;
	hr_job *job;

	(void)state;
	bed_open(&bed, 65, 40, 3 * MIB);
	bed_load(&bed, "cuda:0", &opts);
	before = cuda.live("bytes");
	for (uint64_t i = 0; i < 40; i++) {
		struct hr_tensor t = HR_TENSOR_INIT;

		assert_ok(hr_model_tensor(bed.model, i, &t));
		assert_ok(hr_buffer_new(bed.loader, t.bytes, &buffers[i]));
		reads[i] = (struct hr_read){i, 0, UINT64_MAX, hr_buffer_data(buffers[i]), t.bytes};
	}
	destinations = cuda.live("bytes") - before;
	assert_ok(hr_job_start(bed.loader, bed.model, reads, 40, NULL, &job));
	assert_ok(hr_job_wait(job, HR_FOREVER));
	assert_ok(hr_job_close(job, HR_FOREVER));
	assert_int_equal(cuda.live("peak_bytes"), before + destinations); /* `before` has the window */
	for (uint64_t i = 0; i < 40; i++)
		hr_buffer_release(buffers[i]);
	bed_close(&bed);
	assert_no_complaint();
}

/* ---- failures ---- */

struct failure {
	const char *function;
	unsigned n;
	int code;     /* what the library answers */
	int expected; /* what a load gives */
	const char *says;
};

static void a_failing_read_fails_the_job_and_hands_nothing_out(void **state)
{
	static const struct failure table[] = {
		{"cuFileRead", 1, EIO, HR_E_IO, "Input/output error"},
		{"cuFileRead", 4, HR__CF_INTERNAL_ERROR, HR_E_GDS, "internal error (5030)"},
		{"cuFileRead", 2, HR__CF_MAPPING_RANGE, HR_E_GDS, "(5017)"},
		{"cuFileRead", 3, HR__CF_HANDLE_NOT_REGISTERED, HR_E_GDS, "(5027)"},
		{"cuFileRead", 3, EPERM, HR_E_GDS, "any failure"},
		{"cuFileHandleRegister", 1, HR__CF_HANDLE_NOT_REGISTERED, HR_E_GDS, "refuses the file"},
		{"cuFileHandleRegister", 2, HR__CF_MAPPING_SIZE, HR_E_GDS, "(5016)"},
	};
	struct hr_loader_opts opts = window_of(128 << 10, 4);

	(void)state;
	for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++) {
		const struct failure *f = &table[i];
		struct bed bed;

		bed_open(&bed, 66, 30, 400000);
		bed_load(&bed, "cuda:0", &opts);
		cufile.arm(f->function, f->n, f->code);
		assert_fails(load_by_job(bed.loader, bed.model, NULL), f->expected);
		assert_int_equal(hr_error_last()->system, f->code);
		assert_string_equal(hr_error_last()->stage, "read");
		if (!strstr(hr_error_last()->message, f->says))
			fail_msg("\"%s\" does not say \"%s\"", hr_error_last()->message, f->says);
		cufile.arm(NULL, 0, 0);
		assert_ok(load_by_job(bed.loader, bed.model, NULL)); /* the next one goes well */
		bed_close(&bed);
		assert_no_complaint();
	}
}

static void a_short_read_fails_the_job(void **state)
{
	struct hr_loader_opts opts = window_of(128 << 10, 4);
	struct bed bed;

	(void)state;
	bed_open(&bed, 67, 30, 400000);
	bed_load(&bed, "cuda:0", &opts);
	cufile.set("short_every", 5);
	assert_fails(load_by_job(bed.loader, bed.model, NULL), HR_E_SHORT);
	assert_fails(load_by_feed(bed.loader, bed.model, NULL, false, NULL), HR_E_SHORT);
	cufile.set("short_every", 0);
	assert_ok(load_by_job(bed.loader, bed.model, NULL));
	bed_close(&bed);
	assert_no_complaint();
}

static void reads_through_host_memory_are_found_out(void **state)
{
	static const long long versions[] = {1150, 1190};
	struct hr_loader_opts opts = window_of(128 << 10, 4);

	(void)state;
	for (size_t v = 0; v < 2; v++)
		for (long long every = 1; every < 3; every++) {
			struct bed bed;

			bed_open(&bed, 68, 30, 400000);
			cufile.set("version", versions[v]);
			bed_load(&bed, "cuda:0", &opts);
			assert_ok(load_by_job(bed.loader, bed.model, NULL));
			cufile.set("fallback", every);
			assert_fails(load_by_job(bed.loader, bed.model, NULL), HR_E_FALLBACK);
			assert_non_null(strstr(hr_error_last()->message, "cufile=compat"));
			cufile.set("fallback", 0);
			bed_close(&bed);
			assert_no_complaint();
		}
}

static void compatibility_mode_is_used_only_when_asked_for_and_told(void **state)
{
	struct hr_loader_opts opts = window_of(128 << 10, 8);
	struct hr_stats stats = HR_STATS_INIT;
	struct bed bed;

	(void)state;
	cufile.set("nvidia_fs", 0);
	bed_open(&bed, 69, 30, 400000);
	opts.flags = HR_LOADER_CUFILE_COMPAT;
	for (uint32_t caching = 0; caching < 3; caching++) {
		opts.caching = caching;
		bed_load(&bed, "cuda:0", &opts);
		bytes_are_right(&bed);
		assert_ok(hr_loader_stats(bed.loader, &stats));
		if (caching == HR_CACHING_FILL)
			assert_int_equal(stats.direct_bytes[HR_ENGINE_CUFILE], 0);
		if (caching == HR_CACHING_BYPASS)
			assert_int_equal(stats.cached_bytes[HR_ENGINE_CUFILE], 0);
		assert_non_null(strstr(stats.note, "compat"));
		assert_non_null(strstr(stats.note, "reads went through host memory"));
		assert_null(strstr(stats.note, "; 0 of "));
		assert_ok(hr_loader_close(bed.loader, HR_FOREVER));
		assert_ok(hr_device_close(bed.device));
	}
	bed.loader = NULL;
	bed.device = NULL;
	bed_close(&bed);
	assert_no_complaint();
}

static void a_window_that_does_not_fit_is_made_smaller(void **state)
{
	static const struct {
		const char *key;
		long long value;
		uint64_t n_slots;
	} table[] = {{"room_kib", 5 << 10, 4}, {"bar_kib", 8 << 10, 8}, {"room_kib", 2 << 10, 2}};

	(void)state;
	for (size_t i = 0; i < 3; i++) {
		struct hr_loader_opts opts = window_of(MIB, 16);
		struct hr_stats stats = HR_STATS_INIT;
		struct bed bed;

		cufile.set(table[i].key, table[i].value);
		bed_open(&bed, 70, 20, MIB);
		bed_load(&bed, "cuda:0", &opts);
		assert_ok(load_by_job(bed.loader, bed.model, NULL));
		assert_ok(hr_loader_stats(bed.loader, &stats));
		assert_int_equal(stats.n_slots, table[i].n_slots);
		assert_non_null(strstr(stats.note, " of 16.0 MiB: "));
		bed_close(&bed);
		cufile.set(table[i].key, 0);
		assert_no_complaint();
	}
}

static void refuse(const struct hr_loader_opts *opts, const char *device_name, int code, const char *says)
{
	hr_loader *loader = (hr_loader *)(uintptr_t)1;
	hr_device *device;

	assert_ok(hr_device_open(device_name, &device));
	assert_fails(hr_loader_open(device, opts, &loader), code);
	assert_null(loader);
	if (!strstr(hr_error_last()->message, says))
		fail_msg("\"%s\" does not say \"%s\"", hr_error_last()->message, says);
	assert_ok(hr_device_close(device));
	assert_no_complaint();
}

static void what_cannot_be_opened_leaves_nothing(void **state)
{
	struct hr_loader_opts opts = window_of(MIB, 4);

	(void)state;
	refuse(&opts, "cpu", HR_E_UNSUPPORTED, "the device is cpu");
	cufile.set("room_kib", 1024);
	refuse(&opts, "cuda:0", HR_E_GDS, "(5036)");
	cufile.set("room_kib", 0);
	cufile.arm("cuFileBufRegister", 1, HR__CF_POINTER_INVALID);
	refuse(&opts, "cuda:0", HR_E_GDS, "(5012)");
	cuda.set("memory_mib", 3);
	refuse(&opts, "cuda:0", HR_E_DEVICE_MEMORY, "memory");
	cuda.set("memory_mib", 4096);
	opts.slot_bytes = 16 * MIB;
	opts.staging_bytes = 64 * MIB;
	refuse(&opts, "cuda:0", HR_E_UNSUPPORTED, "one piece");
	opts = window_of(MIB, 4);
	opts.caching = HR_CACHING_FILL;
	refuse(&opts, "cuda:0", HR_E_UNSUPPORTED, "around the page cache");
	opts.caching = HR_CACHING_AUTO;
	opts.flags = HR_LOADER_CUFILE_COMPAT;
	opts.engine = "pread";
	refuse(&opts, "cuda:0", HR_E_OPTS, "engine pread");
	opts.engine = NULL;
	refuse(&opts, "cuda:0", HR_E_OPTS, "engine auto");
}

static void memory_that_is_busy_for_a_moment_is_waited_for(void **state)
{
	struct hr_loader_opts opts = window_of(MIB, 4);
	struct bed bed;

	(void)state;
	bed_open(&bed, 71, 10, MIB);
	bed_load(&bed, "cuda:0", &opts);
	assert_ok(load_by_job(bed.loader, bed.model, NULL));
	cufile.set("busy", 5);
	bed_close(&bed);
	assert_int_equal(cufile.calls("cuFileBufDeregister"), 6);
	assert_no_complaint();
}

static void memory_that_the_library_keeps_is_never_freed(void **state)
{
	struct hr_loader_opts opts = window_of(MIB, 4);
	struct bed bed;

	(void)state;
	cuda.set("strict", 0); /* its context ends with the window alive */
	bed_open(&bed, 72, 10, MIB);
	bed_load(&bed, "cuda:0", &opts);
	cufile.set("busy", 1000000);
	bed_close(&bed);
	assert_int_equal(cufile.errors(NULL, 0), 0);
	assert_int_equal(cufile.live("buffers"), 1);
	assert_int_equal(cuda.live("memory"), 1);
}

/* ---- files ---- */

/* A descriptor's number is used again for another file while the library still has the first one's handle. */
static void a_model_that_was_closed_is_never_read_in_place_of_another(void **state)
{
	struct hr_loader_opts opts = window_of(128 << 10, 4);
	struct bed bed, other;

	(void)state;
	bed_open(&bed, 73, 10, 300000);
	bed_load(&bed, "cuda:0", &opts);
	assert_ok(load_by_job(bed.loader, bed.model, NULL));
	for (uint64_t i = 0; i < 5; i++) {
		bed_open(&other, 80 + i, 10, 300000);
		assert_ok(load_by_job(bed.loader, other.model, NULL));
		bed_close(&other); /* its numbers and, on most file systems, its inodes come again */
	}
	assert_ok(load_by_job(bed.loader, bed.model, NULL));
	bed_close(&bed);
	assert_no_complaint();
}

static void more_files_than_handles_are_read(void **state)
{
	enum { N = 150 };
	struct hr_loader_opts opts = window_of(64 << 10, 8);
	char *dir = make_temp_dir(), *paths[N];
	struct bed bed = {0};

	(void)state;
	for (int i = 0; i < N; i++) {
		char name[32];
		struct test_tensor tensor = {name, "U8", 10000 + (uint64_t)i};

		snprintf(name, sizeof(name), "%03d.safetensors", i);
		paths[i] = path_in(dir, name);
		write_safetensors(paths[i], &tensor, 1, (uint64_t)i);
	}
	assert_ok(hr_model_open_files((const char *const *)paths, N, NULL, &bed.model));
	bed.n_tensors = N;
	bed_load(&bed, "cuda:0", &opts);
	assert_ok(load_by_job(bed.loader, bed.model, NULL));
	assert_true(cufile.live("handles") <= 64);
	assert_ok(load_by_job(bed.loader, bed.model, NULL));
	bed_close(&bed);
	for (int i = 0; i < N; i++)
		free(paths[i]);
	remove_tree(dir);
	free(dir);
	assert_no_complaint();
}

/* ---- a thousand times ---- */

static void opening_and_closing_a_thousand_times_leaves_nothing(void **state)
{
	struct hr_loader_opts opts = window_of(256 << 10, 4);
	hr_device *device;
	hr_loader *loader;
	long long bytes;
	int n_files;

	(void)state;
	assert_ok(hr_device_open("cuda:0", &device));
	n_files = count_open_files();
	bytes = cuda.live("bytes");
	opts.readers = 1;
	for (int i = 0; i < 1000; i++) {
		assert_ok(hr_loader_open(device, &opts, &loader));
		assert_ok(hr_loader_close(loader, 0));
	}
	assert_int_equal(count_open_files(), n_files);
	assert_int_equal(cuda.live("bytes"), bytes);
	assert_int_equal(cufile.live(NULL), 0);
	assert_int_equal(cufile.calls("cuFileDriverOpen"), cufile.calls("cuFileDriverClose_v2"));
	assert_ok(hr_device_close(device));
	assert_no_complaint();
}

#define TEST(name) cmocka_unit_test_setup(name, reset_fakes)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(delivers_right_bytes_and_says_how),
		TEST(the_end_of_a_file_arrives_wherever_it_is),
		TEST(no_slot_is_used_again_before_its_read_and_its_copy_are_over),
		TEST(slots_take_turns_so_that_a_read_is_torn_down_before_the_next_one_there),
		TEST(a_load_takes_its_destinations_and_the_window),
		TEST(a_failing_read_fails_the_job_and_hands_nothing_out),
		TEST(a_short_read_fails_the_job),
		TEST(reads_through_host_memory_are_found_out),
		TEST(compatibility_mode_is_used_only_when_asked_for_and_told),
		TEST(a_window_that_does_not_fit_is_made_smaller),
		TEST(what_cannot_be_opened_leaves_nothing),
		TEST(memory_that_is_busy_for_a_moment_is_waited_for),
		TEST(a_model_that_was_closed_is_never_read_in_place_of_another),
		TEST(more_files_than_handles_are_read),
		TEST(opening_and_closing_a_thousand_times_leaves_nothing),
		TEST(memory_that_the_library_keeps_is_never_freed), /* last: it is not */
	};

	if (!find_libraries())
		return 0;
	if (!has_fake_cuda || !has_fake_cufile) {
		printf("1..0 # SKIP the look-alike driver and library are not the ones that are found\n");
		return 0;
	}
	return cmocka_run_group_tests(tests, NULL, NULL);
}
