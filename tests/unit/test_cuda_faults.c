/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The cuda device when things go wrong: every driver call failing, once and for good, drivers that refuse what others
 * do, and a driver that cannot be loaded. Nearly all of it needs the look-alike driver of tests/fakes. Also tests of
 * the look-alike itself: that it notices what it is there to notice.
 */
#include "cuda_bench.h"

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
		skip_for("needs the look-alike driver");
	fail_every_call(999);
}

static void every_driver_call_may_fail_for_good(void **state)
{
	(void)state;
	if (!has_fake)
		skip_for("needs the look-alike driver");
	fail_every_call(HR__CU_ILLEGAL_ADDRESS);
}

static void a_broken_context_is_left_alone(void **state)
{
	struct bench bench, *b = &bench;
	unsigned long long before;
	void *memory;
	size_t n_calls;
	int rc;

	(void)state;
	if (!has_fake)
		skip_for("needs the look-alike driver");
	fake.set("strict", 0);
	bench_open(b);
	fake.arm("async", 1, HR__CU_ILLEGAL_ADDRESS);
	assert_device(b->ops->copy(b->lane, &(struct hr__copy){b->memory, b->staging, BYTES}, 1, &n_calls, &b->error));
	rc = b->ops->fence(b->lane, ++b->fence, &b->error);
	if (!rc) /* else the copy had failed before its fence was recorded */
		rc = wait_for(b, b->fence);
	assert_int_equal(rc, HR_E_DEVICE);
	assert_non_null(strstr(b->error.reason, ": an illegal memory access was encountered"));
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
		skip_for("needs the look-alike driver");
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
		skip_for("needs the look-alike driver");
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
		skip_for("needs the look-alike driver");
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
	skip_for("it is a race, on purpose");
#endif
	if (!has_fake)
		skip_for("needs the look-alike driver");
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
		skip_for("needs the look-alike driver");
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

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(loading_may_fail_and_be_tried_again), /* first */
		TEST(large_registrations_are_made_in_pieces),
		TEST(a_driver_that_refuses_batches_gets_single_copies),
		TEST(copies_that_are_wrong_do_not_end_batches),
		TEST(the_fake_shows_a_slot_that_is_used_again_too_early),
		TEST(the_fake_notices_mistakes),
		TEST(every_driver_call_may_fail_once),
		TEST(every_driver_call_may_fail_for_good),
		TEST(a_broken_context_is_left_alone), /* last: what it leaves behind is never taken away */
	};

	return find_driver() ? cmocka_run_group_tests_name("cuda faults", tests, NULL, NULL) : 0;
}
