/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Windows of the cuda device: where they lie, what they cost, that copies out of them arrive, mixed with copies from
 * host memory and in whatever way the driver takes them, and that each failing call is told and leaves nothing.
 */
#include "cuda_bench.h"

static void *window_of(struct bench *b, size_t bytes)
{
	void *memory;

	assert_device(b->ops->window_alloc(b->device, bytes, &memory, &b->error));
	assert_non_null(memory);
	return memory;
}

static void a_window_begins_at_a_64_kib_border(void **state)
{
	static const size_t sizes[] = {64 << 10, 128 << 10, 192 << 10, 2 * MIB, 3 * MIB, 16 * MIB, 64 * MIB};
	enum { N = sizeof(sizes) / sizeof(sizes[0]) };
	struct bench bench, *b = &bench;
	void *windows[N];
	long long before;

	(void)state;
	bench_open(b);
	before = has_fake ? fake.live("bytes") : 0;
	for (size_t i = 0; i < N; i++) {
		long long used = has_fake ? fake.live("bytes") : 0;

		windows[i] = window_of(b, sizes[i]);
		assert_int_equal((uintptr_t)windows[i] % HR__WINDOW_ALIGN, 0);
		if (has_fake && sizes[i] >= 4 * MIB) /* what lies right by itself costs nothing more */
			assert_int_equal(fake.live("bytes") - used, sizes[i]);
	}
	for (size_t i = 0; i < N; i++)
		assert_device(b->ops->window_free(b->device, windows[i], &b->error));
	if (has_fake)
		assert_int_equal(fake.live("bytes"), before);
	assert_int_equal(b->ops->window_free(b->device, windows[0], &b->error), HR_E_OPTS);
	bench_close(b);
}

/* Host staging to the window, then in pieces of 1 to 300 bytes on to the destination; every fifth piece comes from
 * host memory. */
static void copies_from_a_window_and_from_host_memory_arrive_together(void **state)
{
	enum { N = 6000 };
	struct hr__copy *copies = calloc(N, sizeof(*copies));
	struct bench bench, *b = &bench;
	struct test_random random;
	size_t bytes = 0, n = 0, n_calls;
	char *window, *got = malloc(MIB);
	void *memory;

	(void)state;
	bench_open(b);
	window = window_of(b, MIB);
	assert_device(b->ops->alloc(b->device, MIB, &memory, &b->error));
	fill_pattern(b->staging, MIB, 9, 0);
	assert_device(
		b->ops->copy(b->lane, &(struct hr__copy){window, b->staging, MIB, false}, 1, &n_calls, &b->error));
	assert_device(b->ops->fence(b->lane, ++b->fence, &b->error));
	assert_int_equal(wait_for(b, b->fence), 1);
	test_random_start(&random, 5);
	for (; n < N && bytes + 300 <= MIB; n++) {
		bool from_device = n % 5 != 0;
		size_t part = 1 + test_random_below(&random, 300);

		copies[n] = (struct hr__copy){(char *)memory + bytes, (from_device ? window : b->staging) + bytes, part,
					      from_device};
		bytes += part;
	}
	assert_device(b->ops->copy(b->lane, copies, n, &n_calls, &b->error));
	assert_device(b->ops->fence(b->lane, ++b->fence, &b->error));
	assert_int_equal(wait_for(b, b->fence), 1);
	assert_device(b->ops->read_back(b->device, got, memory, bytes, &b->error));
	assert_memory_equal(got, b->staging, bytes);
	assert_device(b->ops->release(b->device, memory, MIB, &b->error));
	assert_device(b->ops->window_free(b->device, window, &b->error));
	bench_close(b);
	free(copies);
	free(got);
}

static void a_window_that_cannot_be_had_leaves_nothing(void **state)
{
	static const char *const points[] = {"cuMemAlloc", "cuMemFree", "cuCtxPushCurrent", "malloc"};
	struct bench bench, *b = &bench;

	(void)state;
	bench_open(b);
	for (size_t i = 0; i < sizeof(points) / sizeof(points[0]); i++)
		for (uint64_t n = 1; n < 3; n++) {
			void *memory = b;
			int rc;

			/* small, so that the fake gives it at no border and a second allocation is needed */
			hr__fault_arm(points[i], n, HR__CU_OUT_OF_MEMORY);
			rc = b->ops->window_alloc(b->device, 128 << 10, &memory, &b->error);
			if (!hr__fault_fired()) {
				hr__fault_arm(NULL, 0, 0);
				assert_int_equal(rc, 0);
				assert_device(b->ops->window_free(b->device, memory, &b->error));
				continue;
			}
			assert_int_equal(rc, i < 3 ? HR_E_DEVICE_MEMORY : HR_E_NOMEM);
			assert_null(memory);
			assert_true(b->error.reason[0]);
			if (i == 1) /* the driver keeps what it would not take back */
				break;
		}
	hr__fault_arm(NULL, 0, 0);
	if (has_fake)
		fake.set("strict", 0); /* of the allocation that was not taken back */
	b->ops->lane_close(b->lane);
	assert_device(b->ops->release(b->device, b->memory, BYTES, &b->error));
	assert_device(b->ops->unpin(b->device, b->staging, &b->error));
	hr__os_unmap(b->staging, 2 * MIB);
	assert_int_equal(driver.api.cuStreamDestroy(b->stream), 0);
	assert_int_equal(driver.api.cuCtxPopCurrent(&(hr__cu_context){NULL}), 0);
	assert_ok(hr_device_close(b->device));
	driver.api.cuDevicePrimaryCtxRelease(0);
}

static void the_fake_sees_a_disk_write_under_a_copy(void **state)
{
	static const char bytes[4096];
	struct bench bench, *b = &bench;
	char *window, text[256];
	size_t n_calls;

	(void)state;
	if (!has_fake)
		skip_for("needs the look-alike driver");
	bench_open(b);
	window = window_of(b, MIB);
	fake.set("strict", 0);
	fake.set("delay_us", 50000);
	assert_int_equal(fake.store((uintptr_t)window, bytes, sizeof(bytes)), 0);
	assert_int_equal(fake.errors(NULL, 0), 0);
	assert_device(b->ops->copy(b->lane, &(struct hr__copy){b->memory, window + 8192, 4096, true}, 1, &n_calls,
				   &b->error));
	assert_int_equal(fake.store((uintptr_t)window, bytes, sizeof(bytes)), 0);
	assert_int_equal(fake.errors(NULL, 0), 0);
	assert_int_equal(fake.store((uintptr_t)window + 8192 + 4095, bytes, 1), 0);
	assert_int_equal(fake.errors(text, sizeof(text)), 1);
	assert_non_null(strstr(text, "queued copy"));
	assert_int_equal(fake.store(4096, bytes, 1), -1);
	fake.drain();
	fake.reset();
	assert_device(b->ops->window_free(b->device, window, &b->error));
	bench_close(b);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(a_window_begins_at_a_64_kib_border),
		TEST(copies_from_a_window_and_from_host_memory_arrive_together),
		TEST(the_fake_sees_a_disk_write_under_a_copy),
		TEST(a_window_that_cannot_be_had_leaves_nothing),
	};

	if (!find_driver())
		return 0;
	return cmocka_run_group_tests(tests, NULL, NULL);
}
