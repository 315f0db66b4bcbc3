/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The cuda device: streams of a consumer, contexts, graph captures, every driver call failing, drivers that lack things. Most
 * of it needs the look-alike driver of tests/fakes and is left out where there is a real one; what concerns streams and
 * captures runs on both. Also tests of the look-alike itself: that it notices what it is there to notice.
 */
#include "hrtest.h"

#include "core/os.h"
#include "device/cuda_syms.h"
#include "device/device.h"
#include "fakes/fake_cuda.h"

#include <errno.h>

#define MIB   ((size_t)1 << 20)
#define BYTES (64 << 10)

static struct fake_cuda fake;
static bool has_fake;

/* The driver as a consumer uses it, next to the library. */
static struct {
	struct hr__cu_api api;
	hr__cu_result (*launch)(hr__cu_stream stream, void (*host)(void *arg), void *arg);
	hr__cu_result (*begin_capture)(hr__cu_stream stream, int mode);
	hr__cu_result (*end_capture)(hr__cu_stream stream, void **graph);
	hr__cu_result (*destroy_graph)(void *graph);
	hr__cu_result (*get_current)(hr__cu_context *context);
} driver;

static void find(void *library, const char *name, void *out)
{
	void *address = dlsym(library, name);

	assert_non_null(address);
	memcpy(out, &address, sizeof(address));
}

static void load_driver(void)
{
	void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);

	assert_non_null(library);
#define FIND(field, symbol, parameters, required) find(library, #symbol, &driver.api.field);
	HR__CU_SYMBOLS(FIND)
#undef FIND
	find(library, "cuLaunchHostFunc", &driver.launch);
	find(library, "cuStreamBeginCapture_v2", &driver.begin_capture);
	find(library, "cuStreamEndCapture", &driver.end_capture);
	find(library, "cuGraphDestroy", &driver.destroy_graph);
	find(library, "cuCtxGetCurrent", &driver.get_current);
}

/* A device with a lane, staging and memory, and a consumer with a stream in the same context. */
struct bench {
	hr_device *device;
	const struct hr__device_ops *ops;
	struct hr__lane *lane;
	struct hr__device_error error;
	char *staging, *memory;
	uint64_t fence;
	hr__cu_stream stream;
	atomic_int may_go_on; /* what block_stream() waits for */
};

#define assert_device(call)                                                                                            \
	do {                                                                                                           \
		int rc_ = (call);                                                                                      \
		if (rc_)                                                                                               \
			fail_msg("%s: %s: %s", #call, hr_error_name(rc_), b->error.reason);                            \
	} while (0)

static void bench_open(struct bench *b)
{
	hr__cu_context context;
	void *memory;

	memset(b, 0, sizeof(*b));
	assert_ok(hr_device_open("cuda", &b->device));
	b->ops = b->device->ops;
	assert_int_equal(hr__os_map(2 * MIB, &memory), 0);
	b->staging = memory;
	assert_device(b->ops->pin(b->device, b->staging, 2 * MIB, &b->error));
	assert_device(b->ops->lane_open(b->device, &b->lane, &b->error));
	assert_device(b->ops->alloc(b->device, BYTES, &memory, &b->error));
	b->memory = memory;
	assert_int_equal(driver.api.cuDevicePrimaryCtxRetain(&context, 0), 0);
	assert_int_equal(driver.api.cuCtxPushCurrent(context), 0);
	assert_int_equal(driver.api.cuStreamCreate(&b->stream, HR__CU_STREAM_NON_BLOCKING), 0);
}

static void assert_no_complaint(void)
{
	char text[256] = "";

	if (has_fake && fake.errors(text, sizeof(text)))
		fail_msg("the look-alike driver complains: %s", text);
}

static void bench_close(struct bench *b)
{
	hr__cu_context context;

	assert_int_equal(driver.api.cuStreamSynchronize(b->stream), 0);
	assert_int_equal(driver.api.cuStreamDestroy(b->stream), 0);
	assert_int_equal(driver.api.cuCtxPopCurrent(&context), 0);
	b->ops->lane_close(b->lane);
	if (b->memory)
		assert_device(b->ops->release(b->device, b->memory, BYTES, &b->error));
	assert_device(b->ops->unpin(b->device, b->staging, &b->error));
	hr__os_unmap(b->staging, 2 * MIB);
	assert_int_equal(driver.api.cuDevicePrimaryCtxRelease(0), 0);
	assert_ok(hr_device_close(b->device));
	assert_no_complaint();
}

static void block(void *arg)
{
	struct bench *b = arg;

	while (!atomic_load(&b->may_go_on))
		hr__os_sleep_ns(100000);
}

/* Work on the consumer's stream that lasts until may_go_on is set. */
static void block_stream(struct bench *b)
{
	atomic_store(&b->may_go_on, 0);
	assert_int_equal(driver.launch(b->stream, block, b), 0);
}

static void queue_copy(struct bench *b, uint64_t seed)
{
	size_t n_calls;

	fill_pattern(b->staging, BYTES, seed, 0);
	assert_device(b->ops->copy(b->lane, &(struct hr__copy){b->memory, b->staging, BYTES}, 1, &n_calls, &b->error));
	assert_device(b->ops->fence(b->lane, ++b->fence, &b->error));
}

static int wait_for(struct bench *b, uint64_t fence)
{
	int done = 0;

	while (done == 0) {
		done = b->ops->fence_done(b->lane, fence, &b->error);
		if (done == 0)
			hr__os_sleep_ns(20000);
	}
	return done;
}

static bool holds_pattern(struct bench *b, uint64_t seed)
{
	static char got[BYTES], wanted[BYTES];

	assert_device(b->ops->read_back(b->device, got, b->memory, BYTES, &b->error));
	fill_pattern(wanted, BYTES, seed, 0);
	return memcmp(got, wanted, BYTES) == 0;
}

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
	static char seen[BYTES], wanted[BYTES];
	struct bench bench, *b = &bench;

	(void)state;
	bench_open(b);
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
	static char seen[BYTES], wanted[BYTES];
	struct bench bench, *b = &bench;
	void *others[4];
	pthread_t thread;
	size_t n_calls;

	(void)state;
	bench_open(b);
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
		skip();
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
		skip();
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

/* One life of a device, in which any call may fail. Says whether one did; bytes are right if none did. */
static bool live_through_a_failure(hr__cu_stream stream)
{
	struct hr__device_error error = {0};
	const struct hr__device_ops *ops = &hr__device_cuda;
	static char staging[BYTES], seen[BYTES];
	struct hr__lane *lane = NULL;
	void *memory = NULL, *mark = NULL;
	hr_device *device;
	size_t n_calls;
	int rc, done = 0;

	if (hr_device_open("cuda", &device)) {
		assert_null(device);
		assert_true(strlen(hr_error_last()->message) > 10);
		return true;
	}
	fill_pattern(staging, BYTES, 77, 0);
	rc = ops->pin(device, staging, BYTES, &error);
	if (!rc) {
		struct hr__copy halves[] = {{NULL, staging, 1000}, {NULL, staging + 1000, BYTES - 1000}};

		rc = ops->lane_open(device, &lane, &error);
		rc = rc ? rc : ops->alloc(device, BYTES, &memory, &error);
		rc = rc ? rc : ops->mark(device, stream, &mark, &error);
		rc = rc ? rc : ops->lane_after(lane, mark, &error);
		halves[0].dst = memory;
		halves[1].dst = (char *)memory + 1000;
		rc = rc ? rc : ops->copy(lane, halves, 2, &n_calls, &error);
		rc = rc ? rc : ops->copy(lane, halves, 1, &n_calls, &error);
		rc = rc ? rc : ops->fence(lane, 1, &error);
		while (!rc && done == 0)
			done = ops->fence_done(lane, 1, &error);
		rc = rc ? rc : done < 0 ? done : 0;
		rc = rc ? rc : ops->read_back(device, seen, memory, BYTES, &error);
		if (!rc)
			assert_memory_equal(seen, staging, BYTES);
		rc = rc ? rc : ops->signal(device, stream, &error);
		rc = rc ? rc : ops->retire(device, stream, &error);
		/* What may be under a copy is given back only after a fence, as the loader does. */
		if (lane && done != 1 && ops->fence(lane, 2, &error) == 0)
			while (ops->fence_done(lane, 2, &error) == 0)
				hr__os_sleep_ns(20000);
		ops->mark_free(device, mark);
		if (memory)
			ops->release(device, memory, BYTES, &error);
		ops->lane_close(lane);
		ops->unpin(device, staging, &error);
	}
	/* A device that is broken leaves what it had registered. */
	fake.drain();
	driver.api.cuMemHostUnregister(staging);
	if (rc) {
		assert_true(rc == HR_E_DEVICE || rc == HR_E_DEVICE_MEMORY || rc == HR_E_NOMEM);
		assert_true(strlen(error.reason) > 10);
	}
	assert_ok(hr_device_close(device));
	return rc != 0;
}

/* What a failing call to destroy something leaves behind is no mistake; anything else is. */
static void assert_only_leftovers(void)
{
	char text[256] = "";

	if (fake.errors(text, sizeof(text)) && strncmp(text, "a primary context ends with", 27) != 0)
		fail_msg("the look-alike driver complains: %s", text);
}

static void fail_every_call(int code)
{
	hr__cu_context context, current;
	hr__cu_stream stream;
	unsigned n_failed = 0;
	uint64_t n;

	fake.set("strict", 0);
	fake.set("delay_us", 20);
	assert_int_equal(driver.api.cuDevicePrimaryCtxRetain(&context, 0), 0);
	assert_int_equal(driver.api.cuCtxPushCurrent(context), 0);
	assert_int_equal(driver.api.cuStreamCreate(&stream, HR__CU_STREAM_NON_BLOCKING), 0);
	for (n = 1; n < 1000; n++) {
		hr__fault_arm(NULL, n, code);
		n_failed += live_through_a_failure(stream);
		assert_int_equal(driver.get_current(&current), 0);
		assert_ptr_equal(current, context);
		assert_only_leftovers();
		if (!hr__fault_fired())
			break;
	}
	hr__fault_arm(NULL, 0, 0);
	assert_in_range(n, 90, 999); /* 64 events alone */
	assert_true(n_failed > 80);
	assert_false(live_through_a_failure(stream)); /* and the next device is none the worse */
	assert_int_equal(driver.api.cuStreamDestroy(stream), 0);
	assert_int_equal(driver.api.cuCtxPopCurrent(&current), 0);
	assert_int_equal(driver.api.cuDevicePrimaryCtxRelease(0), 0);
}

static void every_driver_call_may_fail_once(void **state)
{
	(void)state;
	if (!has_fake)
		skip();
	fail_every_call(999);
}

static void every_driver_call_may_fail_for_good(void **state)
{
	(void)state;
	if (!has_fake)
		skip();
	fail_every_call(HR__CU_ILLEGAL_ADDRESS);
}

static void a_broken_context_is_left_alone(void **state)
{
	struct bench bench, *b = &bench;
	unsigned long long before;
	void *memory;
	size_t n_calls;

	(void)state;
	if (!has_fake)
		skip();
	fake.set("strict", 0);
	bench_open(b);
	fake.arm("async", 1, HR__CU_ILLEGAL_ADDRESS);
	queue_copy(b, 1);
	assert_int_equal(wait_for(b, b->fence), HR_E_DEVICE);
	assert_non_null(strstr(b->error.reason, "cuEventQuery: an illegal memory access was encountered"));
	assert_int_equal(b->error.system, HR__CU_ILLEGAL_ADDRESS);
	before = fake.calls(NULL);
	assert_int_equal(b->ops->copy(b->lane, &(struct hr__copy){b->memory, b->staging, 1}, 1, &n_calls, &b->error),
			 HR_E_DEVICE);
	assert_non_null(strstr(b->error.reason, "earlier failure (CUDA_ERROR_ILLEGAL_ADDRESS, 700)"));
	assert_int_equal(b->ops->fence(b->lane, 2, &b->error), HR_E_DEVICE);
	assert_int_equal(b->ops->fence_done(b->lane, 2, &b->error), HR_E_DEVICE);
	assert_int_equal(b->ops->alloc(b->device, 1, &memory, &b->error), HR_E_DEVICE);
	assert_int_equal(b->ops->release(b->device, b->memory, BYTES, &b->error), HR_E_DEVICE);
	assert_int_equal(b->ops->unpin(b->device, b->staging, &b->error), HR_E_DEVICE);
	assert_int_equal(b->ops->signal(b->device, b->stream, &b->error), HR_E_DEVICE);
	assert_int_equal(fake.calls(NULL), before);
	b->ops->lane_close(b->lane); /* only gives the thread back what it had */
	before += 2;
	assert_ok(hr_device_close(b->device));
	assert_int_equal(fake.calls(NULL), before);
	driver.api.cuCtxPopCurrent(&(hr__cu_context){NULL});
	hr__os_unmap(b->staging, 2 * MIB);
}

static void large_registrations_are_made_in_pieces(void **state)
{
	struct bench bench, *b = &bench;
	size_t bytes = 96 * MIB, n_calls;
	void *memory, *range;
	char *big, *seen = malloc(4 * MIB);

	(void)state;
	if (!has_fake)
		skip();
	fake.set("register_mib", 40);
	bench_open(b);
	assert_int_equal(hr__os_map(bytes, &range), 0);
	big = range;
	assert_device(b->ops->pin(b->device, big, bytes, &b->error));
	assert_int_equal(fake.live("registrations"), 1 + 3);
	assert_device(b->ops->alloc(b->device, 4 * MIB, &memory, &b->error));
	/* Over the border of two pieces, which the driver itself refuses. */
	fill_pattern(big + 31 * MIB, 4 * MIB, 8, 0);
	assert_device(
		b->ops->copy(b->lane, &(struct hr__copy){memory, big + 31 * MIB, 4 * MIB}, 1, &n_calls, &b->error));
	assert_device(b->ops->fence(b->lane, ++b->fence, &b->error));
	assert_int_equal(wait_for(b, b->fence), 1);
	assert_device(b->ops->read_back(b->device, seen, memory, 4 * MIB, &b->error));
	assert_memory_equal(seen, big + 31 * MIB, 4 * MIB);
	assert_device(b->ops->release(b->device, memory, 4 * MIB, &b->error));
	assert_device(b->ops->unpin(b->device, big, &b->error));
	assert_int_equal(fake.live("registrations"), 1);
	fake.set("register_mib", 1); /* none of the sizes tried will do */
	assert_int_equal(b->ops->pin(b->device, big, bytes, &b->error), HR_E_DEVICE);
	assert_non_null(strstr(b->error.reason, "cuMemHostRegister: invalid argument"));
	assert_int_equal(fake.live("registrations"), 1);
	assert_int_equal(b->ops->unpin(b->device, big, &b->error), HR_E_OPTS);
	hr__os_unmap(big, bytes);
	free(seen);
	bench_close(b);
}

static void a_driver_that_refuses_batches_gets_single_copies(void **state)
{
	struct hr_device_info info = HR_DEVICE_INFO_INIT;
	struct bench bench, *b = &bench;
	size_t n_calls;

	(void)state;
	if (!has_fake)
		skip();
	fake.set("batch_result", HR__CU_NOT_SUPPORTED);
	bench_open(b);
	assert_ok(hr_device_info(b->device, &info));
	for (uint64_t seed = 1; seed < 4; seed++) {
		struct hr__copy halves[] = {{b->memory, b->staging, 999},
					    {b->memory + 999, b->staging + 999, BYTES - 999}};

		fill_pattern(b->staging, BYTES, seed, 0);
		assert_device(b->ops->copy(b->lane, halves, 2, &n_calls, &b->error));
		assert_device(b->ops->fence(b->lane, ++b->fence, &b->error));
		assert_int_equal(wait_for(b, b->fence), 1);
		assert_true(holds_pattern(b, seed));
		assert_int_equal(n_calls, seed == 1 && info.flags ? 3 : 2);
	}
	assert_ok(hr_device_info(b->device, &info));
	assert_int_equal(info.flags & HR_DEVICE_BATCH_COPY, 0);
	assert_in_range(fake.calls("cuMemcpyBatchAsync") + fake.calls("cuMemcpyBatchAsync_v2"), 0, 1);
	bench_close(b);
}

static void copies_that_are_wrong_do_not_end_batches(void **state)
{
	struct hr_device_info info = HR_DEVICE_INFO_INIT;
	struct bench bench, *b = &bench;
	struct hr__copy bad[2];
	uint32_t flags;
	size_t n_calls;

	(void)state;
	if (!has_fake)
		skip();
	bench_open(b);
	assert_ok(hr_device_info(b->device, &info));
	flags = info.flags;
	bad[0] = (struct hr__copy){b->memory, b->staging, 10};
	bad[1] = (struct hr__copy){b->memory + BYTES - 5, b->staging, 10}; /* beyond the end */
	fake.set("strict", 0);
	assert_int_equal(b->ops->copy(b->lane, bad, 2, &n_calls, &b->error), HR_E_DEVICE);
	assert_true(fake.errors(NULL, 0) > 0);
	fake.reset();
	assert_device(b->ops->fence(b->lane, ++b->fence, &b->error)); /* for the first of the two */
	assert_int_equal(wait_for(b, b->fence), 1);
	assert_ok(hr_device_info(b->device, &info));
	assert_int_equal(info.flags, flags);
	queue_copy(b, 5);
	assert_int_equal(wait_for(b, b->fence), 1);
	assert_true(holds_pattern(b, 5));
	bench_close(b);
}

/* ---- the look-alike itself ---- */

static void the_fake_shows_a_slot_that_is_used_again_too_early(void **state)
{
	struct bench bench, *b = &bench;

	(void)state;
#ifdef __SANITIZE_THREAD__
	skip(); /* it is a race, on purpose */
#endif
	if (!has_fake)
		skip();
	fake.set("delay_us", 100000);
	fake.set("seed", 12345);
	bench_open(b);
	block_stream(b);
	queue_copy(b, 1);
	fill_pattern(b->staging, BYTES, 2, 0); /* before its fence */
	atomic_store(&b->may_go_on, 1);
	assert_int_equal(wait_for(b, b->fence), 1);
	assert_false(holds_pattern(b, 1));
	bench_close(b);
}

static void the_fake_notices_mistakes(void **state)
{
	static char loose[100];
	struct bench bench, *b = &bench;
	hr__cu_ptr memory;
	unsigned n = 0;

	(void)state;
	if (!has_fake)
		skip();
	bench_open(b);
	memory = (uintptr_t)b->memory;
	fake.set("strict", 0);
	assert_int_equal(driver.api.cuMemcpyHtoDAsync(memory, loose, sizeof(loose), b->stream), 0);
	assert_int_equal(fake.errors(NULL, 0), ++n); /* not registered */
	assert_int_not_equal(driver.api.cuMemcpyHtoDAsync(memory + BYTES, b->staging, 1, b->stream), 0);
	assert_int_equal(fake.errors(NULL, 0), ++n); /* not allocated */
	driver.api.cuMemcpyHtoDAsync(memory, b->staging, 1, NULL);
	assert_int_equal(fake.errors(NULL, 0), ++n); /* the NULL stream */
	block_stream(b);
	assert_int_equal(driver.api.cuMemcpyHtoDAsync(memory, b->staging, 1, b->stream), 0);
	assert_device(b->ops->unpin(b->device, b->staging, &b->error));
	assert_int_equal(fake.errors(NULL, 0), ++n); /* under a pending copy */
	atomic_store(&b->may_go_on, 1);
	assert_int_equal(driver.api.cuStreamSynchronize(b->stream), 0);
	assert_device(b->ops->pin(b->device, b->staging, 2 * MIB, &b->error));
	assert_device(b->ops->release(b->device, b->memory, BYTES, &b->error));
	assert_int_not_equal(driver.api.cuMemcpyHtoDAsync(memory, b->staging, 1, b->stream), 0);
	assert_true(fake.errors(NULL, 0) > n); /* freed */
	fake.reset();
	b->memory = NULL;
	bench_close(b);
}

static int reset(void **state)
{
	(void)state;
	if (has_fake)
		fake.reset();
	hr__fault_arm(NULL, 0, 0);
	return 0;
}

/* Before the driver is loaded, once a process: what loading may meet. */
static void loading_may_fail_and_be_tried_again(void **state)
{
	static const struct {
		const char *point;
		int result, code;
		const char *text;
	} cases[] = {
		{"dlopen", 1, HR_E_UNSUPPORTED, "no usable CUDA driver"},
		{"dlsym", 1, HR_E_UNSUPPORTED, "too old"},
		{"cuInit", HR__CU_NO_DEVICE, HR_E_NOTFOUND, "CUDA_ERROR_NO_DEVICE"},
		{"cuInit", HR__CU_STUB_LIBRARY, HR_E_UNSUPPORTED, "cuInit"},
		{"cuInit", 999, HR_E_DEVICE, "cuInit"},
		{"cuDriverGetVersion", 1, HR_E_DEVICE, "cuDriverGetVersion"},
	};
	struct hr__device_error error = {0};
	hr_device *device;
	int n = 1;

	(void)state;
	if (has_fake) { /* without a GPU, as it would be on a machine with a driver only */
		fake.set("devices", 0);
		assert_fails(hr_device_open("cuda", &device), HR_E_NOTFOUND);
		assert_int_equal(hr__device_cuda.probe(&n, NULL, 0, &error), HR_E_UNSUPPORTED);
		assert_non_null(strstr(error.reason, "no CUDA-capable device"));
		assert_int_equal(n, 0);
		fake.set("devices", 1);
	}
	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		hr__fault_arm(cases[i].point, 1, cases[i].result);
		assert_fails(hr_device_open("cuda", &device), cases[i].code);
		assert_true(hr__fault_fired());
		assert_non_null(strstr(hr_error_last()->message, cases[i].text));
		assert_non_null(strstr(hr_error_last()->message, "cuda:0: cannot be opened: "));
	}
	hr__fault_arm(NULL, 0, 0);
	assert_ok(hr_device_open("cuda", &device));
	assert_ok(hr_device_close(device));
}

#define TEST(name) cmocka_unit_test_setup(name, reset)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(loading_may_fail_and_be_tried_again), /* first */
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
		TEST(large_registrations_are_made_in_pieces),
		TEST(a_driver_that_refuses_batches_gets_single_copies),
		TEST(copies_that_are_wrong_do_not_end_batches),
		TEST(the_fake_shows_a_slot_that_is_used_again_too_early),
		TEST(the_fake_notices_mistakes),
		TEST(every_driver_call_may_fail_once),
		TEST(every_driver_call_may_fail_for_good),
		TEST(a_broken_context_is_left_alone), /* last: what it leaves behind is never taken away */
	};
	void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);

	if (!library) {
		printf("1..0 # SKIP no CUDA driver on this machine\n");
		return 0;
	}
	has_fake = fake_cuda_find(&fake);
	load_driver();
	return cmocka_run_group_tests_name("cuda", tests, NULL, NULL);
}
