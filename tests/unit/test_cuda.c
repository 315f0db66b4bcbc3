/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The cuda device beside its consumers: their streams, their contexts, their graph captures. All of it runs over the
 * real driver too, but for what needs a small memory or several GPUs.
 */
#include "cuda_bench.h"

static void copies_after_a_mark_wait_for_the_consumers_work(void **state)
{
	struct bench bench, *b = &bench;
	void *mark;

	(void)state;
	bench_open(b);
	queue_copy(b, 1);
	assert_int_equal(wait_for(b, b->fence), 1);
	block_stream(b);
	assert_device(b->ops->mark(b->device, b->stream, &mark, &b->error));
	assert_device(b->ops->lane_after(b->lane, mark, &b->error));
	b->ops->mark_free(b->device, mark);
	queue_copy(b, 2);
	hr__os_sleep_ns(30000000);
	assert_int_equal(b->ops->fence_done(b->lane, b->fence, &b->error), 0);
	assert_true(holds_pattern(b, 1)); /* the consumer may still read the old bytes */
	atomic_store(&b->may_go_on, 1);
	assert_int_equal(wait_for(b, b->fence), 1);
	assert_true(holds_pattern(b, 2));
	bench_close(b);
}

static void work_queued_after_a_signal_sees_our_writes(void **state)
{
	static char wanted[BYTES];
	struct bench bench, *b = &bench;
	char *seen;

	(void)state;
	bench_open(b);
	seen = b->staging + 1 * MIB;
	for (uint64_t seed = 3; seed < 8; seed++) {
		queue_copy(b, seed);
		assert_int_equal(wait_for(b, b->fence), 1);
		assert_device(b->ops->signal(b->device, b->stream, &b->error));
		assert_int_equal(driver.api.cuMemcpyDtoHAsync(seen, (uintptr_t)b->memory, BYTES, b->stream), 0);
		assert_int_equal(driver.api.cuStreamSynchronize(b->stream), 0);
		fill_pattern(wanted, BYTES, seed, 0);
		assert_memory_equal(seen, wanted, BYTES);
	}
	bench_close(b);
}

static void a_signal_waits_for_nobody_else(void **state)
{
	struct bench bench, *b = &bench;
	hr__cu_stream other;
	void *memory;

	(void)state;
	bench_open(b);
	assert_int_equal(driver.api.cuStreamCreate(&other, HR__CU_STREAM_NON_BLOCKING), 0);
	block_stream(b);
	assert_device(b->ops->retire(b->device, b->stream, &b->error));
	assert_device(b->ops->signal(b->device, b->stream, &b->error));
	assert_device(b->ops->signal(b->device, other, &b->error));
	assert_int_equal(driver.api.cuStreamSynchronize(other), 0); /* although the first stream is blocked */
	assert_device(b->ops->alloc(b->device, 4096, &memory, &b->error));
	atomic_store(&b->may_go_on, 1);
	assert_device(b->ops->release(b->device, memory, 4096, &b->error));
	assert_int_equal(driver.api.cuStreamDestroy(other), 0);
	bench_close(b);
}

static void *go_on_soon(void *arg)
{
	struct bench *b = arg;

	hr__os_sleep_ns(30000000);
	atomic_store(&b->may_go_on, 1);
	return NULL;
}

static void retired_memory_is_used_again_only_after_the_consumers_work(void **state)
{
	static char wanted[BYTES];
	struct bench bench, *b = &bench;
	char *seen; /* pinned: a copy to other memory would wait for its stream */
	void *others[4];
	pthread_t thread;
	size_t n_calls;

	(void)state;
	bench_open(b);
	seen = b->staging + 1 * MIB;
	queue_copy(b, 9);
	assert_int_equal(wait_for(b, b->fence), 1);
	block_stream(b);
	assert_int_equal(driver.api.cuMemcpyDtoHAsync(seen, (uintptr_t)b->memory, BYTES, b->stream), 0);
	assert_device(b->ops->retire(b->device, b->stream, &b->error));
	assert_int_equal(hr__os_thread(&thread, "consumer", go_on_soon, b), 0);
	assert_device(b->ops->release(b->device, b->memory, BYTES, &b->error));
	b->memory = NULL;
	memset(b->staging, 0, BYTES);
	for (size_t i = 0; i < 4; i++) { /* each would get the same memory, were it free */
		assert_device(b->ops->alloc(b->device, BYTES, &others[i], &b->error));
		assert_device(b->ops->copy(b->lane, &(struct hr__copy){others[i], b->staging, BYTES}, 1, &n_calls,
					   &b->error));
		assert_device(b->ops->fence(b->lane, ++b->fence, &b->error));
		assert_int_equal(wait_for(b, b->fence), 1);
	}
	pthread_join(thread, NULL);
	assert_int_equal(driver.api.cuStreamSynchronize(b->stream), 0);
	fill_pattern(wanted, BYTES, 9, 0);
	assert_memory_equal(seen, wanted, BYTES);
	for (size_t i = 0; i < 4; i++)
		assert_device(b->ops->release(b->device, others[i], BYTES, &b->error));
	bench_close(b);
}

static void an_allocation_waits_for_retired_memory_before_it_gives_up(void **state)
{
	struct bench bench, *b = &bench;
	void *first, *second;
	pthread_t thread;

	(void)state;
	if (!has_fake)
		skip_for("needs the look-alike driver");
	fake.set("memory_mib", 8);
	bench_open(b);
	if (fake.calls("cuMemPoolCreate") == 0) {
		bench_close(b);
		return;
	}
	assert_device(b->ops->alloc(b->device, 6 * MIB, &first, &b->error));
	block_stream(b);
	assert_device(b->ops->retire(b->device, b->stream, &b->error));
	assert_device(b->ops->release(b->device, first, 6 * MIB, &b->error));
	assert_int_equal(hr__os_thread(&thread, "consumer", go_on_soon, b), 0);
	assert_device(b->ops->alloc(b->device, 6 * MIB, &second, &b->error));
	pthread_join(thread, NULL);
	assert_int_equal(b->ops->alloc(b->device, 6 * MIB, &first, &b->error), HR_E_DEVICE_MEMORY);
	assert_non_null(strstr(b->error.reason, "6291456 bytes were asked for, 2031616 of 8388608 are free"));
	assert_int_equal(b->error.system, HR__CU_OUT_OF_MEMORY);
	assert_device(b->ops->release(b->device, second, 6 * MIB, &b->error));
	bench_close(b);
}

static void a_stream_that_is_captured_is_refused(void **state)
{
	struct bench bench, *b = &bench;
	void *mark = NULL, *graph = NULL;

	(void)state;
	bench_open(b);
	assert_int_equal(driver.begin_capture(b->stream, 0), 0);
	assert_int_equal(b->ops->mark(b->device, b->stream, &mark, &b->error), HR_E_OPTS);
	assert_null(mark);
	assert_non_null(strstr(b->error.reason, "captured"));
	assert_int_equal(b->ops->signal(b->device, b->stream, &b->error), HR_E_OPTS);
	assert_int_equal(b->ops->retire(b->device, b->stream, &b->error), HR_E_OPTS);
	assert_int_equal(driver.end_capture(b->stream, &graph), 0); /* and the capture has come to no harm */
	if (graph)
		driver.destroy_graph(graph);
	bench_close(b);
}

struct capture {
	struct bench *b;
	atomic_int step; /* 1: capturing, 2: may end, 3: ended */
	int result;
};

static void *capture(void *arg)
{
	struct capture *c = arg;
	hr__cu_context context;
	void *graph = NULL;

	c->result = driver.api.cuDevicePrimaryCtxRetain(&context, 0);
	c->result |= driver.api.cuCtxPushCurrent(context);
	c->result |= driver.begin_capture(c->b->stream, 0);
	atomic_store(&c->step, 1);
	while (atomic_load(&c->step) != 2)
		hr__os_sleep_ns(100000);
	c->result |= driver.end_capture(c->b->stream, &graph);
	if (graph)
		driver.destroy_graph(graph);
	c->result |= driver.api.cuCtxPopCurrent(&context);
	c->result |= driver.api.cuDevicePrimaryCtxRelease(0);
	return NULL;
}

static void a_graph_capture_of_another_thread_is_not_broken(void **state)
{
	struct bench bench, *b = &bench;
	struct capture c = {.b = b};
	pthread_t thread;
	void *memory;
	char *more;

	(void)state;
	bench_open(b);
	assert_int_equal(hr__os_map(BYTES, (void **)&more), 0);
	assert_int_equal(hr__os_thread(&thread, "capture", capture, &c), 0);
	while (atomic_load(&c.step) != 1)
		hr__os_sleep_ns(100000);
	queue_copy(b, 4);
	assert_int_equal(wait_for(b, b->fence), 1);
	assert_true(holds_pattern(b, 4));
	assert_device(b->ops->alloc(b->device, 4096, &memory, &b->error));
	assert_device(b->ops->release(b->device, memory, 4096, &b->error));
	assert_device(b->ops->pin(b->device, more, BYTES, &b->error));
	assert_device(b->ops->unpin(b->device, more, &b->error));
	atomic_store(&c.step, 2);
	pthread_join(thread, NULL);
	assert_int_equal(c.result, 0);
	hr__os_unmap(more, BYTES);
	bench_close(b);
}

/* Every call that a caller's thread makes, without a lane: that one keeps the context by contract. */
static void use_everything(hr_device *device, hr__cu_stream stream)
{
	const struct hr__device_ops *ops = device->ops;
	struct hr_device_info info = HR_DEVICE_INFO_INIT;
	struct hr__device_error error;
	char host[4096], byte;
	void *memory, *mark;

	assert_ok(hr_device_info(device, &info));
	assert_int_equal(ops->alloc(device, 100, &memory, &error), 0);
	assert_int_equal(ops->pin(device, host, sizeof(host), &error), 0);
	assert_int_equal(ops->unpin(device, host, &error), 0);
	assert_int_equal(ops->read_back(device, &byte, memory, 1, &error), 0);
	if (stream) {
		assert_int_equal(ops->mark(device, stream, &mark, &error), 0);
		ops->mark_free(device, mark);
		assert_int_equal(ops->signal(device, stream, &error), 0);
		assert_int_equal(ops->retire(device, stream, &error), 0);
	}
	assert_int_equal(ops->release(device, memory, 100, &error), 0);
}

static void the_callers_context_stays_current(void **state)
{
	hr__cu_context mine = NULL, current = NULL;
	hr__cu_stream stream;
	hr_device *device;

	(void)state;
	assert_ok(hr_device_open("cuda", &device));
	assert_int_equal(driver.get_current(&current), 0);
	assert_null(current);
	use_everything(device, NULL);
	assert_int_equal(driver.get_current(&current), 0);
	assert_null(current);
	if (has_fake)
		fake.set("devices", 2);
	assert_int_equal(driver.api.cuDevicePrimaryCtxRetain(&mine, has_fake ? 1 : 0), 0);
	assert_int_equal(driver.api.cuCtxPushCurrent(mine), 0);
	use_everything(device, NULL);
	assert_int_equal(driver.get_current(&current), 0);
	assert_ptr_equal(current, mine);
	if (!has_fake) {
		assert_int_equal(driver.api.cuStreamCreate(&stream, HR__CU_STREAM_NON_BLOCKING), 0);
		use_everything(device, stream);
		assert_int_equal(driver.api.cuStreamDestroy(stream), 0);
	}
	assert_ok(hr_device_close(device));
	assert_int_equal(driver.get_current(&current), 0);
	assert_ptr_equal(current, mine);
	assert_int_equal(driver.api.cuCtxPopCurrent(&current), 0);
	assert_int_equal(driver.api.cuDevicePrimaryCtxRelease(has_fake ? 1 : 0), 0);
	assert_no_complaint();
}

static void a_lane_gives_its_threads_context_back(void **state)
{
	hr__cu_context current = NULL;
	struct hr__device_error error;
	struct hr__lane *lane;
	hr_device *device;
	int mode = 0;

	(void)state;
	assert_ok(hr_device_open("cuda", &device));
	assert_int_equal(device->ops->lane_open(device, &lane, &error), 0);
	assert_int_equal(driver.get_current(&current), 0);
	assert_non_null(current);
	device->ops->lane_close(lane);
	assert_int_equal(driver.get_current(&current), 0);
	assert_null(current);
	assert_int_equal(driver.api.cuThreadExchangeStreamCaptureMode(&mode), 0);
	assert_int_equal(mode, 0); /* what it was: global */
	assert_ok(hr_device_close(device));
	assert_no_complaint();
}

static void a_device_that_there_is_not_is_not_found(void **state)
{
	hr_device *device;

	(void)state;
	assert_fails(hr_device_open("cuda:4711", &device), HR_E_NOTFOUND);
	assert_non_null(strstr(hr_error_last()->message, "cuda:4711: "));
	if (!has_fake)
		return;
	fake.set("devices", 3);
	assert_fails(hr_device_open("cuda:3", &device), HR_E_NOTFOUND);
	assert_non_null(strstr(hr_error_last()->message, "3 devices"));
	assert_ok(hr_device_open("cuda:2", &device));
	assert_string_equal(device->spec, "cuda:2");
	use_everything(device, NULL);
	assert_ok(hr_device_close(device));
	assert_int_equal(fake.live(NULL), 0);
	assert_no_complaint();
}

static void nothing_is_left_behind(void **state)
{
	struct bench bench, *b = &bench;

	(void)state;
	if (!has_fake)
		skip_for("needs the look-alike driver");
	bench_open(b);
	queue_copy(b, 1);
	assert_int_equal(wait_for(b, b->fence), 1);
	bench_close(b);
	assert_int_equal(fake.live("streams"), 0);
	assert_int_equal(fake.live("events"), 0);
	assert_int_equal(fake.live("pools"), 0);
	assert_int_equal(fake.live("registrations"), 0);
	assert_int_equal(fake.live("contexts"), 0);
	assert_int_equal(fake.live("memory"), 0);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(copies_after_a_mark_wait_for_the_consumers_work),
		TEST(work_queued_after_a_signal_sees_our_writes),
		TEST(a_signal_waits_for_nobody_else),
		TEST(retired_memory_is_used_again_only_after_the_consumers_work),
		TEST(an_allocation_waits_for_retired_memory_before_it_gives_up),
		TEST(a_stream_that_is_captured_is_refused),
		TEST(a_graph_capture_of_another_thread_is_not_broken),
		TEST(the_callers_context_stays_current),
		TEST(a_lane_gives_its_threads_context_back),
		TEST(a_device_that_there_is_not_is_not_found),
		TEST(nothing_is_left_behind),
	};

	return find_driver() ? cmocka_run_group_tests_name("cuda", tests, NULL, NULL) : 0;
}
