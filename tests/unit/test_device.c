/* SPDX-License-Identifier: Apache-2.0 */
/*
 * device/: what every device must do, run on each kind of device that can be used here. Under the look-alike driver of
 * tests/fakes copies are late and in a strange order; on a GPU machine, started without it, the real driver is tested.
 * test_cuda.c has what is particular to CUDA.
 */
#include "hrtest.h"

#include "core/os.h"
#include "device/device.h"
#include "fakes/fake_cuda.h"

#include <errno.h>
#include <sys/wait.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)

static struct fake_cuda fake;
static bool has_fake;

/* A device with a lane and pinned staging memory, as the loader has them. */
struct bench {
	hr_device *device;
	const struct hr__device_ops *ops;
	struct hr__lane *lane;
	struct hr__device_error error;
	char *staging;
	size_t staging_bytes;
	uint64_t fence;
};

#define assert_device(call)                                                                                            \
	do {                                                                                                           \
		int rc_ = (call);                                                                                      \
		if (rc_)                                                                                               \
			fail_msg("%s: %s: %s", #call, hr_error_name(rc_), b->error.reason);                            \
	} while (0)

static void bench_open(struct bench *b, const char *spec, size_t staging_bytes)
{
	void *staging;

	memset(b, 0, sizeof(*b));
	assert_ok(hr_device_open(spec, &b->device));
	b->ops = b->device->ops;
	assert_int_equal(hr__os_map(staging_bytes, &staging), 0);
	b->staging = staging;
	b->staging_bytes = staging_bytes;
	assert_device(b->ops->pin(b->device, b->staging, staging_bytes, &b->error));
	assert_device(b->ops->lane_open(b->device, &b->lane, &b->error));
}

static void bench_close(struct bench *b)
{
	char text[256] = "";

	b->ops->lane_close(b->lane);
	assert_device(b->ops->unpin(b->device, b->staging, &b->error));
	hr__os_unmap(b->staging, b->staging_bytes);
	assert_int_equal(hr_device_close(b->device), 0);
	if (has_fake && fake.errors(text, sizeof(text)))
		fail_msg("the look-alike driver complains: %s", text);
}

static void wait_for(struct bench *b, uint64_t fence)
{
	int done = 0;

	while (done == 0) {
		done = b->ops->fence_done(b->lane, fence, &b->error);
		if (done == 0)
			hr__os_sleep_ns(20000);
	}
	if (done < 0)
		fail_msg("fence %llu: %s", (unsigned long long)fence, b->error.reason);
}

/* Copies, with a fence, and waits. */
static size_t copy_and_wait(struct bench *b, const struct hr__copy *copies, size_t n)
{
	size_t n_calls = 0;

	assert_device(b->ops->copy(b->lane, copies, n, &n_calls, &b->error));
	assert_device(b->ops->fence(b->lane, ++b->fence, &b->error));
	wait_for(b, b->fence);
	return n_calls;
}

static void *device_memory(struct bench *b, size_t bytes)
{
	void *memory;

	assert_device(b->ops->alloc(b->device, bytes, &memory, &b->error));
	assert_non_null(memory);
	return memory;
}

/* Compares device memory with fill_pattern(seed, 0). */
static void assert_pattern(struct bench *b, const void *memory, size_t bytes, uint64_t seed)
{
	char *got = malloc(bytes), *wanted = malloc(bytes);

	assert_device(b->ops->read_back(b->device, got, memory, bytes, &b->error));
	fill_pattern(wanted, bytes, seed, 0);
	for (size_t i = 0; i < bytes; i++)
		if (got[i] != wanted[i])
			fail_msg("byte %zu of %zu is %02x, should be %02x", i, bytes, (unsigned char)got[i],
				 (unsigned char)wanted[i]);
	free(got);
	free(wanted);
}

static void every_byte_arrives(void **state)
{
	static const size_t sizes[] = {1, 3, 256, 4097, 1 * MIB + 7, 5 * MIB + 1};
	struct bench bench, *b = &bench;

	bench_open(b, *state, 6 * MIB);
	for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
		void *memory = device_memory(b, sizes[i]);

		fill_pattern(b->staging, sizes[i], i, 0);
		copy_and_wait(b, &(struct hr__copy){memory, b->staging, sizes[i]}, 1);
		assert_pattern(b, memory, sizes[i], i);
		assert_device(b->ops->release(b->device, memory, sizes[i], &b->error));
	}
	bench_close(b);
}

static void a_copy_writes_nothing_beside_its_range(void **state)
{
	struct bench bench, *b = &bench;
	size_t bytes = 1 * MIB;
	char *memory;

	bench_open(b, *state, 2 * MIB);
	memory = device_memory(b, bytes);
	fill_pattern(b->staging, bytes, 1, 0);
	copy_and_wait(b, &(struct hr__copy){memory, b->staging, bytes}, 1);
	/* Take 1001 bytes out of the middle and put the right ones back in. */
	memset(b->staging + bytes, 0, 1001);
	copy_and_wait(b, &(struct hr__copy){memory + 777, b->staging + bytes, 1001}, 1);
	copy_and_wait(b, &(struct hr__copy){memory + 777, b->staging + 777, 1001}, 1);
	assert_pattern(b, memory, bytes, 1);
	assert_device(b->ops->release(b->device, memory, bytes, &b->error));
	bench_close(b);
}

/* Pieces of 1 to 400 bytes, in an order of their own, that together are one pattern. */
static void thousands_of_small_copies_arrive(void **state)
{
	enum { N = 10000 };
	struct hr__copy *copies = calloc(N, sizeof(*copies));
	struct bench bench, *b = &bench;
	struct test_random random;
	struct hr_device_info info = HR_DEVICE_INFO_INIT;
	size_t bytes = 0, n_calls;
	char *memory;

	bench_open(b, *state, 4 * MIB);
	memory = device_memory(b, 4 * MIB);
	test_random_start(&random, 11);
	for (size_t i = 0; i < N; i++) {
		size_t part = 1 + test_random_below(&random, 400);

		copies[i] = (struct hr__copy){memory + bytes, b->staging + bytes, part};
		bytes += part;
	}
	for (size_t i = N - 1; i > 0; i--) {
		size_t other = test_random_below(&random, i + 1);
		struct hr__copy copy = copies[i];

		copies[i] = copies[other];
		copies[other] = copy;
	}
	fill_pattern(b->staging, bytes, 3, 0);
	n_calls = copy_and_wait(b, copies, N);
	assert_pattern(b, memory, bytes, 3);
	assert_ok(hr_device_info(b->device, &info));
	if (info.flags & HR_DEVICE_BATCH_COPY)
		assert_in_range(n_calls, 1, 3);
	else
		assert_int_equal(n_calls, N);
	assert_device(b->ops->release(b->device, memory, 4 * MIB, &b->error));
	free(copies);
	bench_close(b);
}

/* The loader's life in small: few slots, each filled again only after the fence of its last copy. */
static void slots_are_used_again_after_their_fences(void **state)
{
	enum { SLOTS = 5, ROUNDS = 700, SLOT = 8192 };
	uint64_t fences[SLOTS] = {0};
	struct bench bench, *b = &bench;
	char *memory, *pattern = malloc((size_t)ROUNDS * SLOT);
	size_t n_calls;

	bench_open(b, *state, SLOTS * SLOT);
	memory = device_memory(b, (size_t)ROUNDS * SLOT);
	fill_pattern(pattern, (size_t)ROUNDS * SLOT, 5, 0);
	for (size_t i = 0; i < ROUNDS; i++) {
		char *slot = b->staging + i % SLOTS * SLOT;
		struct hr__copy halves[2] = {{memory + i * SLOT, slot, SLOT / 2},
					     {memory + i * SLOT + SLOT / 2, slot + SLOT / 2, SLOT / 2}};

		if (fences[i % SLOTS])
			wait_for(b, fences[i % SLOTS]);
		memcpy(slot, pattern + i * SLOT, SLOT);
		assert_device(b->ops->copy(b->lane, halves, 2, &n_calls, &b->error));
		fences[i % SLOTS] = ++b->fence;
		assert_device(b->ops->fence(b->lane, b->fence, &b->error));
	}
	wait_for(b, b->fence);
	assert_pattern(b, memory, (size_t)ROUNDS * SLOT, 5);
	assert_device(b->ops->release(b->device, memory, (size_t)ROUNDS * SLOT, &b->error));
	free(pattern);
	bench_close(b);
}

static void as_many_fences_as_promised_may_be_outstanding(void **state)
{
	struct bench bench, *b = &bench;
	char *memory;
	size_t n_calls;

	bench_open(b, *state, 64 << 10);
	memory = device_memory(b, 64 << 10);
	fill_pattern(b->staging, 64 << 10, 6, 0);
	for (size_t i = 0; i < HR__MAX_FENCES; i++) {
		struct hr__copy copy = {memory + i * 1024, b->staging + i * 1024, 1024};

		assert_device(b->ops->copy(b->lane, &copy, 1, &n_calls, &b->error));
		assert_device(b->ops->fence(b->lane, ++b->fence, &b->error));
	}
	wait_for(b, b->fence);
	for (uint64_t fence = 1; fence <= b->fence; fence++) /* the last one's end is that of all */
		assert_int_equal(b->ops->fence_done(b->lane, fence, &b->error), 1);
	assert_pattern(b, memory, 64 << 10, 6);
	assert_device(b->ops->release(b->device, memory, 64 << 10, &b->error));
	bench_close(b);
}

static void memory_is_aligned_and_large_enough(void **state)
{
	static const size_t sizes[] = {1, 255, 256, 257, 4096, 2 * MIB - 1, 2 * MIB, 3 * MIB + 1, 0};
	enum { N = sizeof(sizes) / sizeof(sizes[0]) };
	struct bench bench, *b = &bench;
	void *memory[N];

	bench_open(b, *state, 4 * MIB);
	for (size_t i = 0; i < N; i++) {
		memory[i] = device_memory(b, sizes[i]);
		assert_int_equal((uintptr_t)memory[i] % 256, 0);
	}
	for (size_t i = 0; i < N; i++) { /* all at once: none overlaps another */
		fill_pattern(b->staging, sizes[i], 20 + i, 0);
		if (sizes[i])
			copy_and_wait(b, &(struct hr__copy){memory[i], b->staging, sizes[i]}, 1);
	}
	for (size_t i = 0; i < N; i++) {
		assert_pattern(b, memory[i], sizes[i], 20 + i);
		assert_device(b->ops->release(b->device, memory[i], sizes[i], &b->error));
	}
	assert_device(b->ops->release(b->device, NULL, 0, &b->error));
	bench_close(b);
}

static void memory_that_there_is_not_is_an_error_with_figures(void **state)
{
	struct bench bench, *b = &bench;
	bool is_cpu = strcmp(*state, "cpu") == 0;
	void *memory = &bench;

	bench_open(b, *state, 4096);
	assert_int_equal(b->ops->alloc(b->device, UINT64_C(1) << 50, &memory, &b->error),
			 is_cpu ? HR_E_NOMEM : HR_E_DEVICE_MEMORY);
	assert_null(memory);
	assert_non_null(strstr(b->error.reason, "1125899906842624 bytes"));
	if (!is_cpu)
		assert_non_null(strstr(b->error.reason, "are free"));
	assert_int_not_equal(b->ops->alloc(b->device, UINT64_MAX - 5, &memory, &b->error), 0);
	bench_close(b);
}

static void info_describes_the_device(void **state)
{
	struct hr_device_info info = HR_DEVICE_INFO_INIT;
	struct bench bench, *b = &bench;
	bool is_cpu = strcmp(*state, "cpu") == 0;

	bench_open(b, *state, 4096);
	assert_ok(hr_device_info(b->device, &info));
	assert_string_equal(info.spec, is_cpu ? "cpu" : "cuda:0");
	assert_true(info.name[0] != '\0');
	assert_true(info.free_bytes > 0);
	assert_true(is_cpu ? info.driver == 0 : info.driver >= 10000);
	assert_true(is_cpu || info.total_bytes >= info.free_bytes);
	assert_fails(hr_device_info(b->device, NULL), HR_E_OPTS);
	assert_fails(hr_device_info(NULL, &info), HR_E_OPTS);
	bench_close(b);
}

static void probe_counts_and_describes(void **state)
{
	struct hr__device_error error = {0};
	char about[2][240] = {"", ""};
	hr_device *device;
	int n = 0;

	assert_ok(hr_device_open(*state, &device));
	assert_int_equal(device->ops->probe(&n, about, 2, &error), 0);
	assert_true(n >= 1);
	assert_true(about[0][0] != '\0');
	assert_int_equal(device->ops->probe(&n, NULL, 0, &error), 0);
	assert_int_equal(hr_device_close(device), 0);
}

static void the_last_owner_closes_a_device(void **state)
{
	struct hr_device_info info = HR_DEVICE_INFO_INIT;
	hr_device *device;

	assert_ok(hr_device_open(*state, &device));
	assert_ptr_equal(hr__device_acquire(device), device);
	assert_ok(hr_device_close(device));
	assert_ok(hr_device_info(device, &info)); /* still there: the second owner has it */
	assert_ok(hr_device_close(device));
	assert_ok(hr_device_close(NULL));
}

/* In the child: 0 if all is as promised, else a number that says what is not. */
static int look_around_in_child(hr_device *device)
{
	struct hr_device_info info = HR_DEVICE_INFO_INIT;
	unsigned before = has_fake ? fake.errors(NULL, 0) : 0;
	hr_device *other = NULL;
	bool is_cpu = device->ops->caps & HR__DEVICE_HOST;

	if (hr__device_here(device) != HR_E_FORKED || hr_error_last()->code != HR_E_FORKED)
		return 1;
	if (hr_device_info(device, &info) != HR_E_FORKED)
		return 2;
	if (hr_device_close(device) != HR_E_FORKED)
		return 3;
	if (!is_cpu && hr_device_open("cuda", &other) != HR_E_UNSUPPORTED)
		return 4;
	if (!is_cpu && !strstr(hr_error_last()->message, "fork"))
		return 5;
	if (hr_device_open("cpu", &other) || hr_device_close(other))
		return 6;
	if (has_fake && fake.errors(NULL, 0) != before) /* it was called */
		return 7;
	return 0;
}

static void a_forked_child_gets_errors_and_frees_nothing(void **state)
{
	struct hr_device_info info = HR_DEVICE_INFO_INIT;
	hr_device *device;
	int status;
	pid_t child;

	assert_ok(hr_device_open(*state, &device));
	child = fork();
	if (child == 0)
		_exit(look_around_in_child(device));
	assert_int_equal(waitpid(child, &status, 0), child);
	assert_true(WIFEXITED(status));
	assert_int_equal(WEXITSTATUS(status), 0);
	assert_ok(hr_device_info(device, &info)); /* the parent's is as good as before */
	assert_ok(hr_device_close(device));
}

struct visitor {
	hr_device *device;
	uint64_t seed;
	int failures;
};

/* Allocates, looks and releases, as callers of hr_get() in several threads do. */
static void *visit(void *arg)
{
	struct visitor *v = arg;
	struct hr__device_error error;
	char byte;

	for (size_t i = 0; i < 40; i++) {
		size_t bytes = 1 + (v->seed * 7919 + i * 104729) % (256 << 10);
		void *memory;

		if (v->device->ops->alloc(v->device, bytes, &memory, &error)) {
			v->failures++;
			continue;
		}
		v->failures += v->device->ops->read_back(v->device, &byte, (char *)memory + bytes - 1, 1, &error) != 0;
		v->failures += v->device->ops->release(v->device, memory, bytes, &error) != 0;
	}
	return NULL;
}

static void memory_may_be_had_from_any_thread_while_a_lane_copies(void **state)
{
	enum { N = 4, ROUNDS = 60 };
	struct visitor visitors[N];
	struct bench bench, *b = &bench;
	pthread_t threads[N];
	char *memory;

	bench_open(b, *state, 1 * MIB);
	memory = device_memory(b, 1 * MIB);
	for (size_t i = 0; i < N; i++) {
		visitors[i] = (struct visitor){b->device, i, 0};
		assert_int_equal(hr__os_thread(&threads[i], "visitor", visit, &visitors[i]), 0);
	}
	for (size_t i = 0; i < ROUNDS; i++) {
		fill_pattern(b->staging, 1 * MIB, i, 0);
		copy_and_wait(b, &(struct hr__copy){memory, b->staging, 1 * MIB}, 1);
	}
	for (size_t i = 0; i < N; i++) {
		pthread_join(threads[i], NULL);
		assert_int_equal(visitors[i].failures, 0);
	}
	assert_pattern(b, memory, 1 * MIB, ROUNDS - 1);
	assert_device(b->ops->release(b->device, memory, 1 * MIB, &b->error));
	bench_close(b);
}

static void without_memory_every_step_fails_cleanly(void **state)
{
	for (uint64_t n = 1;; n++) {
		struct hr__device_error error = {0};
		struct hr__lane *lane = NULL;
		hr_device *device;
		void *memory;
		char host[64];

		hr__fault_arm("malloc", n, ENOMEM);
		if (hr_device_open(*state, &device) == 0) {
			const struct hr__device_ops *ops = device->ops;

			if (ops->pin(device, host, sizeof(host), &error) == 0)
				ops->unpin(device, host, &error);
			if (ops->lane_open(device, &lane, &error) == 0)
				ops->lane_close(lane);
			if (ops->alloc(device, 100, &memory, &error) == 0)
				assert_int_equal(ops->release(device, memory, 100, &error), 0);
			if (hr__fault_fired())
				assert_true(error.reason[0] != '\0');
			assert_int_equal(hr_device_close(device), 0);
		} else {
			assert_int_equal(hr_error_last()->code, HR_E_NOMEM);
			assert_null(device);
		}
		if (!hr__fault_fired())
			break;
	}
	hr__fault_arm(NULL, 0, 0);
}

static void names_of_devices_are_strict(void **state)
{
	static const char *const bad[] = {"",        "gpu",     "CPU",     "cpu:0",      "cpu ",
					  "cud",     "cuda:",   "cuda:-1", "cuda:01",    "cuda:a",
					  "cuda:0 ", "cuda:1x", "cuda0",   "cuda:99999", "cuda:4294967296"};
	hr_device *device = (hr_device *)1;

	(void)state;
	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
		assert_fails(hr_device_open(bad[i], &device), HR_E_OPTS);
		assert_null(device);
		assert_non_null(strstr(hr_error_last()->message, "\"cpu\", \"cuda\", \"cuda:N\""));
	}
	assert_fails(hr_device_open(NULL, &device), HR_E_OPTS);
	assert_fails(hr_device_open("cpu", NULL), HR_E_OPTS);
}

static void a_missing_fork_page_is_told(void **state)
{
	hr_device *device;

	(void)state;
	hr__fault_arm("fork_mark", 1, ENOMEM);
	assert_fails(hr_device_open("cpu", &device), HR_E_UNSUPPORTED);
	hr__fault_arm(NULL, 0, 0);
}

static int reset(void **state)
{
	(void)state;
	if (has_fake)
		fake.reset();
	hr__fault_arm(NULL, 0, 0);
	return 0;
}

static const struct {
	const char *name;
	CMUnitTestFunction run;
} everywhere[] = {
#define TEST(name)                                                                                                     \
	{                                                                                                              \
#name, name                                                                                            \
	}
	TEST(every_byte_arrives),
	TEST(a_copy_writes_nothing_beside_its_range),
	TEST(thousands_of_small_copies_arrive),
	TEST(slots_are_used_again_after_their_fences),
	TEST(as_many_fences_as_promised_may_be_outstanding),
	TEST(memory_is_aligned_and_large_enough),
	TEST(memory_that_there_is_not_is_an_error_with_figures),
	TEST(info_describes_the_device),
	TEST(probe_counts_and_describes),
	TEST(the_last_owner_closes_a_device),
	TEST(a_forked_child_gets_errors_and_frees_nothing),
	TEST(memory_may_be_had_from_any_thread_while_a_lane_copies),
	TEST(without_memory_every_step_fails_cleanly),
};
static const struct {
	const char *name;
	CMUnitTestFunction run;
} once[] = {TEST(names_of_devices_are_strict), TEST(a_missing_fork_page_is_told)};

int main(void)
{
	enum { N_EVERYWHERE = sizeof(everywhere) / sizeof(everywhere[0]), N_ONCE = sizeof(once) / sizeof(once[0]) };
	static struct CMUnitTest tests[2 * N_EVERYWHERE + N_ONCE];
	static char names[2 * N_EVERYWHERE][96];
	static char *const specs[] = {"cpu", "cuda"};
	size_t n = 0;

	has_fake = fake_cuda_find(&fake);
	for (size_t d = 0; d < 2; d++) {
		hr_device *device;

		if (hr_device_open(specs[d], &device)) {
			printf("# not on %s: %s\n", specs[d], hr_error_last()->message);
			continue;
		}
		hr_device_close(device);
		for (size_t i = 0; i < N_EVERYWHERE; i++) {
			snprintf(names[n], sizeof(names[n]), "%s_%s", specs[d], everywhere[i].name);
			tests[n] = (struct CMUnitTest){names[n], everywhere[i].run, reset, NULL, specs[d]};
			n++;
		}
	}
	for (size_t i = 0; i < N_ONCE; i++)
		tests[n++] = (struct CMUnitTest){once[i].name, once[i].run, reset, NULL, NULL};
	return run_group("device", tests, n, NULL, NULL);
}
