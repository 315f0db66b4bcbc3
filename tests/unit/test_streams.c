/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Jobs and feeds beside a consumer's stream: nothing is written before the stream has come so far (wait_stream), what
 * is queued afterwards sees what was written (signal_stream), a caller's allocator hears the stream, and memory given
 * back "on" a stream is not used again before it. Over the look-alike driver or a real one. The consumer copies into
 * pinned memory: into any other, a real driver's copy would block.
 */
#include "cuda_bench.h"
#include "loadtest.h"

#include <pthread.h>
#include <unistd.h>

#define TENSOR_BYTES 300000

struct consumer {
	struct bench bench;
	hr_loader *loader;
	hr_model *model;
	char *dir;
	unsigned char want[TENSOR_BYTES], got[TENSOR_BYTES];
};

static struct consumer c;

static void consumer_open(const struct hr_loader_opts *opts)
{
	static const struct test_tensor tensors[] = {{"a", "U8", 1000}, {"w", "U8", TENSOR_BYTES}, {"z", "U8", 70000}};
	struct hr_tensor t = HR_TENSOR_INIT;
	char *path;

	bench_open(&c.bench);
	c.dir = make_temp_dir();
	path = path_in(c.dir, "a.safetensors");
	write_safetensors(path, tensors, 3, 9);
	assert_ok(hr_model_open(path, NULL, &c.model));
	assert_ok(hr_model_tensor(c.model, 1, &t));
	assert_ok(hr_model_read_shard(c.model, 0, t.offset, c.want, TENSOR_BYTES));
	assert_ok(hr_loader_open(c.bench.device, opts, &c.loader));
	free(path);
}

static void consumer_close(void)
{
	assert_ok(hr_loader_close(c.loader, HR_FOREVER));
	hr_model_close(c.model);
	bench_close(&c.bench);
	remove_tree(c.dir);
	free(c.dir);
}

static void a_job_waits_for_the_consumers_stream(void **state)
{
	struct hr_job_opts opts = HR_JOB_OPTS_INIT;
	struct hr_read read = {.tensor = 1, .length = UINT64_MAX};
	hr_buffer *buffer;
	hr_job *job;

	(void)state;
	consumer_open(NULL);
	assert_ok(hr_buffer_new(c.loader, TENSOR_BYTES, &buffer));
	read.dst = hr_buffer_data(buffer);
	read.dst_bytes = TENSOR_BYTES;
	opts.wait_stream = c.bench.stream;
	block_stream(&c.bench);
	assert_ok(hr_job_start(c.loader, c.model, &read, 1, &opts, &job));
	assert_fails(hr_job_wait(job, 100), HR_E_PENDING);
	assert_ok(hr_buffer_read(buffer, 0, c.got, TENSOR_BYTES));
	assert_memory_not_equal(c.got, c.want, 64); /* not one byte so far */
	atomic_store(&c.bench.may_go_on, 1);
	assert_ok(hr_job_wait(job, HR_FOREVER));
	assert_ok(hr_buffer_read(buffer, 0, c.got, TENSOR_BYTES));
	assert_memory_equal(c.got, c.want, TENSOR_BYTES);
	assert_ok(hr_job_close(job, 0));
	hr_buffer_release(buffer);
	consumer_close();
}

static void work_queued_after_a_wait_sees_the_bytes(void **state)
{
	struct hr_job_opts opts = HR_JOB_OPTS_INIT;
	struct hr_read read = {.tensor = 1, .length = UINT64_MAX};

	(void)state;
	consumer_open(NULL);
	opts.signal_stream = c.bench.stream;
	for (int i = 0; i < 20; i++) {
		hr_buffer *buffer;
		hr_job *job;

		assert_ok(hr_buffer_new(c.loader, TENSOR_BYTES, &buffer));
		read.dst = hr_buffer_data(buffer);
		read.dst_bytes = TENSOR_BYTES;
		assert_ok(hr_job_start(c.loader, c.model, &read, 1, &opts, &job));
		assert_ok(hr_job_wait(job, HR_FOREVER));
		memset(c.bench.staging, 0, TENSOR_BYTES);
		assert_int_equal(driver.api.cuMemcpyDtoHAsync(c.bench.staging, (hr__cu_ptr)(uintptr_t)read.dst,
							      TENSOR_BYTES, c.bench.stream),
				 0);
		assert_int_equal(driver.api.cuStreamSynchronize(c.bench.stream), 0);
		assert_memory_equal(c.bench.staging, c.want, TENSOR_BYTES);
		assert_ok(hr_job_close(job, 0));
		hr_buffer_release(buffer);
	}
	consumer_close();
}

static void a_feed_waits_and_signals(void **state)
{
	struct hr_feed_opts opts = HR_FEED_OPTS_INIT;
	struct hr_tensor t = HR_TENSOR_INIT;
	hr_buffer *buffer;
	hr_feed *feed;

	(void)state;
	consumer_open(NULL);
	opts.wait_stream = opts.signal_stream = c.bench.stream;
	assert_ok(hr_feed_open(c.loader, c.model, &opts, &feed));
	for (int i = 0; i < 3; i++) {
		assert_ok(hr_feed_next(feed, &t, &buffer));
		if (t.bytes == TENSOR_BYTES) {
			assert_int_equal(driver.api.cuMemcpyDtoHAsync(c.bench.staging,
								      (hr__cu_ptr)(uintptr_t)hr_buffer_data(buffer),
								      TENSOR_BYTES, c.bench.stream),
					 0);
			assert_int_equal(driver.api.cuStreamSynchronize(c.bench.stream), 0);
			assert_memory_equal(c.bench.staging, c.want, TENSOR_BYTES);
		}
		hr_buffer_release(buffer);
	}
	assert_ok(hr_feed_close(feed, 0));
	consumer_close();
}

static void *let_go_later(void *arg)
{
	usleep(100000);
	atomic_store(&((struct bench *)arg)->may_go_on, 1);
	return NULL;
}

static void memory_released_on_a_stream_is_used_only_after_it(void **state)
{
	hr_buffer *buffer, *others[40];
	pthread_t thread;

	(void)state;
	consumer_open(NULL);
	assert_ok(hr_get(c.loader, c.model, 1, &buffer));
	block_stream(&c.bench);
	assert_int_equal(driver.api.cuMemcpyDtoHAsync(c.bench.staging, (hr__cu_ptr)(uintptr_t)hr_buffer_data(buffer),
						      TENSOR_BYTES, c.bench.stream),
			 0);
	assert_ok(hr_buffer_release_on(buffer, c.bench.stream));
	/* From elsewhere: a driver without pools makes whoever gives memory back wait for the stream. */
	assert_int_equal(pthread_create(&thread, NULL, let_go_later, &c.bench), 0);
	for (int i = 0; i < 40; i++) /* whatever memory these get, it is not what the stream is still going to read */
		assert_ok(hr_get(c.loader, c.model, i % 2 ? 0 : 2, &others[i]));
	assert_int_equal(driver.api.cuStreamSynchronize(c.bench.stream), 0);
	pthread_join(thread, NULL);
	assert_memory_equal(c.bench.staging, c.want, TENSOR_BYTES);
	for (int i = 0; i < 40; i++)
		hr_buffer_release(others[i]);
	consumer_close();
}

/* The one who knows the stream need not be the last owner. */
static void an_owner_that_is_not_the_last_is_heard_too(void **state)
{
	hr_buffer *buffer, *others[40];
	pthread_t thread;

	(void)state;
	consumer_open(NULL);
	assert_ok(hr_get(c.loader, c.model, 1, &buffer));
	hr_buffer_acquire(buffer);
	block_stream(&c.bench);
	assert_int_equal(driver.api.cuMemcpyDtoHAsync(c.bench.staging, (hr__cu_ptr)(uintptr_t)hr_buffer_data(buffer),
						      TENSOR_BYTES, c.bench.stream),
			 0);
	hr__fault_arm("cuEventRecord", 1, EIO);
	assert_fails(hr_buffer_release_on(buffer, c.bench.stream), HR_E_DEVICE); /* and nothing was released */
	hr__fault_arm(NULL, 0, 0);
	assert_ok(hr_buffer_release_on(buffer, c.bench.stream));
	hr_buffer_release(buffer);
	assert_int_equal(pthread_create(&thread, NULL, let_go_later, &c.bench), 0);
	for (int i = 0; i < 40; i++)
		assert_ok(hr_get(c.loader, c.model, i % 2 ? 0 : 2, &others[i]));
	assert_int_equal(driver.api.cuStreamSynchronize(c.bench.stream), 0);
	pthread_join(thread, NULL);
	assert_memory_equal(c.bench.staging, c.want, TENSOR_BYTES);
	for (int i = 0; i < 40; i++)
		hr_buffer_release(others[i]);
	consumer_close();
}

/* ---- a caller's allocator ---- */

static struct {
	void *alloc_stream[8], *release_stream[8];
	int n_allocated, n_released;
} heard;

static void *hook_alloc(void *ctx, uint64_t bytes, uint64_t align, void *stream)
{
	hr__cu_ptr memory = 0;

	(void)ctx;
	(void)align;
	heard.alloc_stream[heard.n_allocated++] = stream;
	return driver.api.cuMemAlloc(&memory, (size_t)bytes) ? NULL : (void *)(uintptr_t)memory;
}

static void hook_release(void *ctx, void *memory, uint64_t bytes, void *stream)
{
	(void)ctx;
	(void)bytes;
	heard.release_stream[heard.n_released++] = stream;
	if (stream)
		driver.api.cuStreamSynchronize(stream);
	driver.api.cuMemFree((hr__cu_ptr)(uintptr_t)memory);
}

static void a_callers_allocator_hears_the_stream(void **state)
{
	struct hr_loader_opts with_hooks = HR_LOADER_OPTS_INIT;
	struct hr_feed_opts opts = HR_FEED_OPTS_INIT;
	struct hr_tensor t = HR_TENSOR_INIT;
	hr_buffer *buffers[3];
	hr_feed *feed;

	(void)state;
	memset(&heard, 0, sizeof(heard));
	with_hooks.alloc = hook_alloc;
	with_hooks.release = hook_release;
	consumer_open(&with_hooks);
	opts.signal_stream = c.bench.stream;
	assert_ok(hr_feed_open(c.loader, c.model, &opts, &feed));
	for (int i = 0; i < 3; i++) {
		assert_ok(hr_feed_next(feed, &t, &buffers[i]));
		assert_ptr_equal(heard.alloc_stream[i], c.bench.stream);
		assert_true(buffer_is_right(c.model, &t, buffers[i]));
	}
	assert_int_equal(heard.n_allocated, 3);
	assert_ok(hr_buffer_release_on(buffers[0], c.bench.stream));
	assert_int_equal(heard.n_released, 1);
	assert_ptr_equal(heard.release_stream[0], c.bench.stream);
	hr_buffer_release(buffers[1]);
	assert_ok(hr_feed_close(feed, 0));
	assert_ok(hr_loader_close(c.loader, HR_FOREVER));
	c.loader = NULL;
	assert_int_equal(heard.n_released, 2);
	assert_null(heard.release_stream[1]);
	hr_buffer_release(buffers[2]);
	assert_int_equal(heard.n_released, 3);
	consumer_close();
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(a_job_waits_for_the_consumers_stream),
		TEST(work_queued_after_a_wait_sees_the_bytes),
		TEST(a_feed_waits_and_signals),
		TEST(memory_released_on_a_stream_is_used_only_after_it),
		TEST(an_owner_that_is_not_the_last_is_heard_too),
		TEST(a_callers_allocator_hears_the_stream),
	};

	if (!find_driver())
		return 0;
	return cmocka_run_group_tests(tests, NULL, NULL);
}
