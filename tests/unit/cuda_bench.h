/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the test programs of the cuda device share: the driver as a consumer uses it, and a device with a lane, staging
 * and memory beside a consumer with a stream in the same context. Each program includes this once.
 */
#ifndef HR_TESTS_CUDA_BENCH_H
#define HR_TESTS_CUDA_BENCH_H

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
static inline void block_stream(struct bench *b)
{
	atomic_store(&b->may_go_on, 0);
	assert_int_equal(driver.launch(b->stream, block, b), 0);
}

static inline void queue_copy(struct bench *b, uint64_t seed)
{
	size_t n_calls;

	fill_pattern(b->staging, BYTES, seed, 0);
	assert_device(b->ops->copy(b->lane, &(struct hr__copy){b->memory, b->staging, BYTES}, 1, &n_calls, &b->error));
	assert_device(b->ops->fence(b->lane, ++b->fence, &b->error));
}

static inline int wait_for(struct bench *b, uint64_t fence)
{
	int done = 0;

	while (done == 0) {
		done = b->ops->fence_done(b->lane, fence, &b->error);
		if (done == 0)
			hr__os_sleep_ns(20000);
	}
	return done;
}

static inline bool holds_pattern(struct bench *b, uint64_t seed)
{
	static char got[BYTES], wanted[BYTES];

	assert_device(b->ops->read_back(b->device, got, b->memory, BYTES, &b->error));
	fill_pattern(wanted, BYTES, seed, 0);
	return memcmp(got, wanted, BYTES) == 0;
}

static int reset(void **state)
{
	(void)state;
	if (has_fake)
		fake.reset();
	hr__fault_arm(NULL, 0, 0);
	return 0;
}

/* Whether there is a driver at all, the look-alike or a real one; says so if not. */
static bool find_driver(void)
{
	void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);

	if (!library) {
		printf("1..0 # SKIP no CUDA driver on this machine\n");
		return false;
	}
	has_fake = fake_cuda_find(&fake);
	load_driver();
	return true;
}

#define TEST(name) cmocka_unit_test_setup(name, reset)

#endif
