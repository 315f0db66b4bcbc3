/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Loaders and jobs by the public header: options and their errors, the smallest pool, ranges, waits, cancel,
 * statistics, the order of closing. Each test that moves bytes runs on every device that is here.
 */
#include "loadtest.h"

#include "fakes/fake_engine.h"

#include <errno.h>
#include <poll.h>
#include <unistd.h>

static const char *const devices[] = {"cpu", "cuda:0"};

/* Runs a test's body on every device that can be opened here. */
static void on_every_device(void (*body)(const char *device))
{
	for (size_t i = 0; i < 2; i++)
		if (has_device(devices[i]))
			body(devices[i]);
	fake_engine_set(NULL);
}

static void refuses(hr_device *device, struct hr_loader_opts opts, int code)
{
	hr_loader *loader = (hr_loader *)(uintptr_t)1;

	assert_fails(hr_loader_open(device, &opts, &loader), code);
	assert_null(loader);
	assert_true(strlen(hr_error_last()->message) > 10);
}

static void *no_alloc(void *ctx, uint64_t bytes, uint64_t align, void *stream)
{
	(void)ctx;
	(void)bytes;
	(void)align;
	(void)stream;
	return NULL;
}

static void refuses_options_that_are_not_valid(void **state)
{
#define WITH(...) (struct hr_loader_opts){.size = sizeof(struct hr_loader_opts), __VA_ARGS__}
	hr_loader *loader;
	hr_device *device;

	(void)state;
	assert_ok(hr_device_open("cpu", &device));
	refuses(device, WITH(.staging_bytes = HR_MIN_STAGING_BYTES - 1), HR_E_OPTS);
	refuses(device, WITH(.staging_bytes = UINT64_MAX), HR_E_OPTS);
	refuses(device, WITH(.slot_bytes = HR_MIN_SLOT_BYTES - 1), HR_E_OPTS);
	refuses(device, WITH(.slot_bytes = HR_MIN_SLOT_BYTES + 4096), HR_E_OPTS);
	refuses(device, WITH(.slot_bytes = HR_MIN_SLOT_BYTES * 2, .staging_bytes = HR_MIN_SLOT_BYTES * 3), HR_E_OPTS);
	refuses(device, WITH(.slot_bytes = UINT64_C(2) << 30, .staging_bytes = UINT64_C(8) << 30), HR_E_OPTS);
	refuses(device, WITH(.caching = 3), HR_E_OPTS);
	refuses(device, WITH(.readers = 65), HR_E_OPTS);
	refuses(device, WITH(.engine = "steam"), HR_E_OPTS);
	assert_non_null(strstr(hr_error_last()->message, "steam"));
	refuses(device, WITH(.alloc = no_alloc), HR_E_OPTS);
	refuses(device, (struct hr_loader_opts){.size = 3}, HR_E_OPTS);
	assert_fails(hr_loader_open(NULL, NULL, &loader), HR_E_OPTS);
	assert_fails(hr_loader_open(device, NULL, NULL), HR_E_OPTS);
	assert_ok(hr_loader_close(NULL, 0));
	assert_ok(hr_device_close(device));
#undef WITH
}

static void in_smallest_pool(const char *device)
{
	struct hr_loader_opts opts = HR_LOADER_OPTS_INIT;
	struct hr_stats stats = HR_STATS_INIT;
	struct bed bed;

	opts.staging_bytes = HR_MIN_STAGING_BYTES;
	bed_open(&bed, 11, 30, 5 * HR_MIN_STAGING_BYTES); /* tensors larger than the pool, and empty ones */
	bed_load(&bed, device, &opts);
	assert_ok(load_by_job(bed.loader, bed.model, NULL));
	assert_ok(load_by_feed(bed.loader, bed.model, NULL, false, NULL));
	assert_ok(hr_loader_stats(bed.loader, &stats));
	/* a window on the device has a little host memory for each slot and reader beside it */
	assert_true(stats.staging_bytes == HR_MIN_STAGING_BYTES ||
		    (getenv("HR_TEST_ENGINE") &&
		     stats.staging_bytes == HR_MIN_STAGING_BYTES + 2 * 4096 + stats.n_readers * 65536));
	assert_true(stats.peak_staging_bytes <= HR_MIN_STAGING_BYTES);
	assert_int_equal(stats.n_slots, 2);
	bed_close(&bed);
}

static void works_with_the_smallest_pool(void **state)
{
	(void)state;
	on_every_device(in_smallest_pool);
}

static void of_no_bytes(const char *device)
{
	static const struct test_tensor tensors[] = {{"empty", "F32", 0}, {"one", "U8", 1}, {"none", "U8", 0}};
	char *dir = make_temp_dir(), *path = path_in(dir, "a.safetensors"), *nothing = path_in(dir, "b.safetensors");
	hr_buffer *buffer;
	struct bed bed;

	write_safetensors(path, tensors, 3, 5);
	write_safetensors(nothing, NULL, 0, 0);
	bed_open_model(&bed, path);
	bed_load(&bed, device, NULL);
	assert_ok(load_by_job(bed.loader, bed.model, NULL));
	assert_ok(load_by_feed(bed.loader, bed.model, NULL, true, NULL));
	assert_ok(hr_get(bed.loader, bed.model, 0, &buffer));
	assert_int_equal(hr_buffer_bytes(buffer), 0);
	assert_null(hr_buffer_data(buffer));
	hr_buffer_release(buffer);
	assert_ok(hr_read_into(bed.loader, bed.model, 2, NULL, 0));
	bed_close(&bed);
	bed_open_model(&bed, nothing);
	bed_load(&bed, device, NULL);
	assert_int_equal(bed.n_tensors, 0);
	assert_ok(load_by_job(bed.loader, bed.model, NULL));
	assert_ok(load_by_feed(bed.loader, bed.model, NULL, true, NULL));
	bed_close(&bed);
	remove_tree(dir);
	free(nothing);
	free(path);
	free(dir);
}

static void loads_tensors_of_no_bytes_and_models_of_no_tensors(void **state)
{
	(void)state;
	on_every_device(of_no_bytes);
}

/* One tensor that has at least this many bytes. */
static struct hr_tensor large_tensor(const struct bed *bed, uint64_t bytes)
{
	struct hr_tensor t = HR_TENSOR_INIT;

	for (uint64_t i = 0; i < bed->n_tensors; i++) {
		assert_ok(hr_model_tensor(bed->model, i, &t));
		if (t.bytes >= bytes)
			return t;
	}
	fail_msg("no tensor of %llu bytes", (unsigned long long)bytes);
	return t;
}

static void refused_read(const struct bed *bed, struct hr_read second, int code)
{
	struct hr_tensor t = large_tensor(bed, 1000);
	unsigned char *memory = calloc(1, t.bytes);
	struct hr_read reads[2] = {{t.index, 0, UINT64_MAX, memory, t.bytes}, second};
	hr_job *job = (hr_job *)(uintptr_t)1;

	assert_fails(hr_job_start(bed->loader, bed->model, reads, 2, NULL, &job), code);
	assert_null(job);
	usleep(2000);
	for (uint64_t i = 0; i < t.bytes; i++) /* none of it starts */
		assert_int_equal(memory[i], 0);
	free(memory);
}

static void checks_all_reads_before_one_starts(void **state)
{
	struct hr_job_opts flags = HR_JOB_OPTS_INIT, stream = HR_JOB_OPTS_INIT;
	struct hr_read read;
	unsigned char memory[64];
	struct hr_tensor t;
	struct bed bed;
	hr_job *job;

	(void)state;
	bed_open(&bed, 21, 12, 60000);
	bed_load(&bed, "cpu", NULL);
	t = large_tensor(&bed, 1000);
	refused_read(&bed, (struct hr_read){bed.n_tensors, 0, 1, memory, 64}, HR_E_OPTS);
	refused_read(&bed, (struct hr_read){t.index, 0, 65, memory, 64}, HR_E_SPACE);
	refused_read(&bed, (struct hr_read){t.index, 0, UINT64_MAX, memory, t.bytes - 1}, HR_E_SPACE);
	refused_read(&bed, (struct hr_read){t.index, t.bytes, 1, memory, 64}, HR_E_OPTS);
	refused_read(&bed, (struct hr_read){t.index, t.bytes + 1, UINT64_MAX, memory, 64}, HR_E_OPTS);
	refused_read(&bed, (struct hr_read){t.index, t.bytes + 1, 0, memory, 64}, HR_E_OPTS);
	refused_read(&bed, (struct hr_read){t.index, UINT64_MAX - 1, 8, memory, 64}, HR_E_OPTS);
	refused_read(&bed, (struct hr_read){t.index, 5, 1, NULL, 64}, HR_E_OPTS);
	assert_non_null(strstr(hr_error_last()->message, "NULL"));
	assert_int_equal(strncmp(hr_error_last()->tensor, t.name, t.name_len), 0);
	flags.flags = 1u << 31;
	stream.wait_stream = memory;
	read = (struct hr_read){t.index, 0, 1, memory, 64};
	assert_fails(hr_job_start(bed.loader, bed.model, &read, 1, &flags, &job), HR_E_OPTS);
	assert_fails(hr_job_start(bed.loader, bed.model, &read, 1, &stream, &job), HR_E_OPTS);
	assert_fails(hr_job_start(bed.loader, bed.model, NULL, 1, NULL, &job), HR_E_OPTS);
	assert_fails(hr_job_start(bed.loader, NULL, &read, 1, NULL, &job), HR_E_OPTS);
	assert_fails(hr_job_start(NULL, bed.model, &read, 1, NULL, &job), HR_E_OPTS);
	assert_fails(hr_job_start(bed.loader, bed.model, &read, 1, NULL, NULL), HR_E_OPTS);
	assert_fails(hr_job_wait(NULL, 0), HR_E_OPTS);
	assert_fails(hr_get(bed.loader, bed.model, bed.n_tensors, &(hr_buffer *){NULL}), HR_E_OPTS);
	assert_fails(hr_read_into(bed.loader, bed.model, t.index, memory, 64), HR_E_SPACE);
	bed_close(&bed);
}

static void reads_ranges_into_memory_of_any_alignment(void **state)
{
	struct hr_read reads[3];
	unsigned char *want, *memory;
	struct hr_tensor t;
	struct bed bed;
	hr_job *job;

	(void)state;
	bed_open(&bed, 22, 12, 900000);
	bed_load(&bed, "cpu", NULL);
	t = large_tensor(&bed, 400000);
	want = plain_read(bed.model, &t);
	memory = malloc(t.bytes + 3);
	memset(memory, 0x77, t.bytes + 3);
	reads[0] = (struct hr_read){t.index, 200001, UINT64_MAX, memory + 1 + 200001, t.bytes - 200001};
	reads[1] = (struct hr_read){t.index, 0, 200000, memory + 1, 200000};
	reads[2] = (struct hr_read){t.index, t.bytes, UINT64_MAX, memory, 0};
	assert_ok(hr_job_start(bed.loader, bed.model, reads, 3, NULL, &job));
	memset(reads, 0, sizeof(reads)); /* the call has copied them */
	assert_ok(hr_job_wait(job, HR_FOREVER));
	assert_ok(hr_job_wait(job, 0)); /* asked again, it says the same */
	assert_ok(hr_job_close(job, 0));
	assert_int_equal(memory[0], 0x77);
	assert_memory_equal(memory + 1, want, 200000);
	assert_int_equal(memory[200001], 0x77);
	assert_memory_equal(memory + 200002, want + 200001, t.bytes - 200001);
	assert_int_equal(memory[t.bytes + 1], 0x77);
	assert_ok(hr_read_into(bed.loader, bed.model, t.index, memory + 2, t.bytes));
	assert_memory_equal(memory + 2, want, t.bytes);
	free(want);
	free(memory);
	bed_close(&bed);
}

static void add_up(const char *device)
{
	struct hr_stats stats = HR_STATS_INIT, total = HR_STATS_INIT;
	struct hr_plan_info info = HR_PLAN_INFO_INIT;
	struct hr_tensor t;
	struct hr_read read;
	struct bed bed;
	uint64_t sum = 0;
	hr_buffer *buffer;
	hr_job *job;

	bed_open(&bed, 23, 20, 3000000);
	bed_load(&bed, device, NULL);
	t = large_tensor(&bed, 1500000);
	assert_ok(hr_buffer_new(bed.loader, t.bytes, &buffer));
	read = (struct hr_read){t.index, 0, UINT64_MAX, hr_buffer_data(buffer), t.bytes};
	assert_ok(hr_plan(bed.loader, bed.model, &read, 1, &info));
	assert_ok(hr_job_start(bed.loader, bed.model, &read, 1, NULL, &job));
	assert_ok(hr_job_wait(job, HR_FOREVER));
	assert_ok(hr_job_stats(job, &stats));
	assert_ok(hr_loader_stats(bed.loader, &total));
	assert_int_equal(stats.total_bytes, t.bytes);
	assert_int_equal(stats.done_bytes, t.bytes);
	assert_int_equal(stats.total_tensors, 1);
	assert_true(stats.read_bytes >= t.bytes);
	for (int i = 0; i < HR_N_ENGINES; i++)
		sum += stats.cached_bytes[i] + stats.direct_bytes[i];
	assert_int_equal(sum, stats.read_bytes);
	assert_int_equal(stats.n_chunks, info.n_chunks);
	assert_int_equal(stats.read_bytes, info.read_bytes);
	assert_int_equal(info.payload_bytes, t.bytes);
	assert_int_equal(info.n_pieces, info.n_chunks);
	assert_true(stats.first_ns > 0 && stats.first_ns <= stats.elapsed_ns);
	assert_int_equal(total.done_bytes, stats.done_bytes);
	assert_int_equal(total.read_bytes, stats.read_bytes);
	assert_int_equal(total.peak_buffer_bytes, t.bytes);
	assert_true(strcmp(device, "cpu") == 0 || (stats.n_copies >= stats.n_batches && stats.n_batches > 0));
	assert_ok(hr_job_close(job, 0));
	hr_buffer_release(buffer);
	bed_close(&bed);
}

static void counts_what_it_does(void **state)
{
	(void)state;
	on_every_device(add_up);
}

/* A bed whose first read hangs, and a job on it. */
static hr_job *hanging_job(struct bed *bed, const char *device, const char *engine, hr_buffer **buffer,
			   uint32_t io_timeout_ms)
{
	struct hr_loader_opts opts = HR_LOADER_OPTS_INIT;
	struct hr_job_opts how = HR_JOB_OPTS_INIT;
	struct hr_tensor t;
	struct hr_read read;
	hr_job *job;

	fake_engine_set(&(struct fake_engine_settings){.hang_read = 1});
	opts.engine = engine;
	opts.readers = 2;
	bed_open(bed, 31, 12, 900000);
	bed_load(bed, device, &opts);
	t = large_tensor(bed, 400000);
	assert_ok(hr_buffer_new(bed->loader, t.bytes, buffer));
	read = (struct hr_read){t.index, 0, UINT64_MAX, hr_buffer_data(*buffer), t.bytes};
	how.io_timeout_ms = io_timeout_ms;
	assert_ok(hr_job_start(bed->loader, bed->model, &read, 1, &how, &job));
	return job;
}

static void expires(const char *device)
{
	hr_buffer *buffer;
	struct pollfd p;
	struct bed bed;
	hr_job *job = hanging_job(&bed, device, "fake", &buffer, 0);

	p = (struct pollfd){.events = POLLIN};
	assert_ok(hr_job_fd(job, &p.fd));
	assert_fails(hr_job_wait(job, 0), HR_E_PENDING);
	assert_fails(hr_job_wait(job, 20), HR_E_PENDING);
	assert_int_equal(poll(&p, 1, 0), 0);
	fake_engine_let_go();
	assert_int_equal(poll(&p, 1, 10000), 1); /* the event comes without a wait */
	assert_ok(hr_job_wait(job, 0));
	assert_ok(hr_job_fd(job, &p.fd)); /* the same one, still readable */
	assert_int_equal(poll(&p, 1, 0), 1);
	assert_ok(hr_job_cancel(job)); /* what has finished stays finished */
	assert_ok(hr_job_wait(job, 0));
	assert_ok(hr_job_close(job, 0));
	hr_buffer_release(buffer);
	bed_close(&bed);
}

static void ends_a_wait_that_expires_but_not_the_job(void **state)
{
	(void)state;
	on_every_device(expires);
}

static void has_an_event_that_is_set_if_asked_for_late(void **state)
{
	struct pollfd p = {.events = POLLIN};
	struct hr_read read;
	unsigned char byte;
	struct hr_tensor t;
	struct bed bed;
	hr_job *job;

	(void)state;
	bed_open(&bed, 24, 4, 3000);
	bed_load(&bed, "cpu", NULL);
	t = large_tensor(&bed, 1);
	read = (struct hr_read){t.index, 0, 1, &byte, 1};
	assert_ok(hr_job_start(bed.loader, bed.model, &read, 1, NULL, &job));
	assert_ok(hr_job_wait(job, HR_FOREVER));
	assert_ok(hr_job_fd(job, &p.fd));
	assert_int_equal(poll(&p, 1, 0), 1);
	assert_ok(hr_job_close(job, 0));
	bed_close(&bed);
}

static void cancelled(const char *device)
{
	hr_buffer *buffer;
	struct bed bed;
	hr_job *job = hanging_job(&bed, device, is_through_ugds() ? "fake" : "fake-queue", &buffer, 0);

	while (fake_engine_hanging() == 0)
		usleep(1000);
	assert_ok(hr_job_cancel(job));
	assert_fails(hr_job_wait(job, 10), HR_E_PENDING); /* the read is still out */
	assert_fails(hr_job_close(job, 10), HR_E_BUSY);
	fake_engine_let_go();
	assert_fails(hr_job_wait(job, 10000), HR_E_CANCELLED);
	assert_fails(hr_job_wait(job, 0), HR_E_CANCELLED);
	assert_ok(hr_job_close(job, 0));
	assert_ok(load_by_job(bed.loader, bed.model, NULL)); /* and the loader goes on */
	hr_buffer_release(buffer);
	bed_close(&bed);
}

static void settles_a_cancelled_job_only_when_its_reads_are_back(void **state)
{
	(void)state;
	on_every_device(cancelled);
}

static void in_any_order(const char *device)
{
	struct hr_loader_opts opts = HR_LOADER_OPTS_INIT;
	struct hr_tensor t, from_feed = HR_TENSOR_INIT, after = HR_TENSOR_INIT;
	struct hr_stats stats = HR_STATS_INIT;
	hr_buffer *buffer, *first, *none;
	struct hr_read read;
	hr_feed *feed;
	struct bed bed;
	hr_job *job;

	opts.staging_bytes = HR_MIN_STAGING_BYTES;
	/* more than the two allocations that a feed of small tensors is bound to at once */
	bed_open(&bed, 25, 300, 900000);
	bed_load(&bed, device, &opts);
	t = large_tensor(&bed, 400000);
	assert_ok(hr_buffer_new(bed.loader, t.bytes, &buffer));
	read = (struct hr_read){t.index, 0, UINT64_MAX, hr_buffer_data(buffer), t.bytes};
	assert_ok(hr_feed_open(bed.loader, bed.model, NULL, &feed));
	assert_ok(hr_feed_next(feed, &from_feed, &first));
	assert_ok(hr_job_start(bed.loader, bed.model, &read, 1, NULL, &job));
	assert_ok(hr_job_wait(job, HR_FOREVER));
	assert_ok(hr_loader_close(bed.loader, 20000)); /* the loader first, and then everything that hangs on it */
	bed.loader = NULL;
	assert_ok(hr_device_close(bed.device));
	bed.device = NULL;
	assert_ok(hr_job_wait(job, 0));
	assert_ok(hr_job_stats(job, &stats));
	assert_int_equal(stats.done_bytes, t.bytes);
	assert_ok(hr_feed_stats(feed, &stats));
	assert_fails(hr_feed_next(feed, &after, &none), HR_E_CANCELLED);
	assert_null(none);
	assert_ok(hr_job_close(job, 0));
	assert_true(buffer_is_right(bed.model, &t, buffer));
	hr_buffer_release(buffer);
	assert_ok(hr_feed_close(feed, 0));
	assert_int_equal(from_feed.index, 0);
	hr_model_close(hr_model_acquire(bed.model));
	assert_true(buffer_is_right(bed.model, &from_feed, first));
	bed_close(&bed);
	hr_buffer_release(first);
}

static void lets_handles_be_closed_in_any_order(void **state)
{
	(void)state;
	on_every_device(in_any_order);
}

static void holds_the_model_for_its_jobs(void **state)
{
	hr_buffer *buffer;
	struct bed bed;
	hr_job *job = hanging_job(&bed, "cpu", "fake", &buffer, 0);

	(void)state;
	hr_model_close(bed.model);
	bed.model = NULL;
	fake_engine_let_go();
	assert_ok(hr_job_wait(job, 10000));
	assert_ok(hr_job_close(job, 0));
	hr_buffer_release(buffer);
	bed_close(&bed);
	fake_engine_set(NULL);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(refuses_options_that_are_not_valid),
		cmocka_unit_test(works_with_the_smallest_pool),
		cmocka_unit_test(loads_tensors_of_no_bytes_and_models_of_no_tensors),
		cmocka_unit_test(checks_all_reads_before_one_starts),
		cmocka_unit_test(reads_ranges_into_memory_of_any_alignment),
		cmocka_unit_test(counts_what_it_does),
		cmocka_unit_test(ends_a_wait_that_expires_but_not_the_job),
		cmocka_unit_test(has_an_event_that_is_set_if_asked_for_late),
		cmocka_unit_test(settles_a_cancelled_job_only_when_its_reads_are_back),
		cmocka_unit_test(lets_handles_be_closed_in_any_order),
		cmocka_unit_test(holds_the_model_for_its_jobs),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
