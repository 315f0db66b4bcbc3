/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The cache and consumers' streams, over whatever CUDA driver there is: memory passes from one group to the next only
 * behind the work that was queued before its release, whatever happens to the load in between, and without a call of
 * the driver that could make the host wait.
 */
#include "cuda_bench.h"
#include "loadtest.h"

#include "fakes/fake_engine.h"

#include <pthread.h>
#include <unistd.h>

#define GROUP_BYTES 300000
#define N_GROUPS    4
#define N_STREAMS   12

struct consumer {
	struct bench bench;
	hr_loader *loader;
	hr_cache *cache;
	hr_model *model;
	hr_group *groups[N_GROUPS]; /* of one tensor each, equal */
	hr_group *pair;             /* the first two: of another size */
	unsigned char *want[N_GROUPS];
	char *dir;
};

static struct consumer c;

static void consumer_open_host(const char *engine, uint64_t n_fit, uint64_t n_host)
{
	static const struct test_tensor tensors[] = {
		{"a", "U8", GROUP_BYTES}, {"b", "U8", GROUP_BYTES}, {"c", "U8", GROUP_BYTES}, {"d", "U8", GROUP_BYTES}};
	static const uint64_t two[] = {0, 1};
	struct hr_loader_opts loader_opts = HR_LOADER_OPTS_INIT;
	struct hr_cache_opts opts = HR_CACHE_OPTS_INIT;
	char *path;

	bench_open(&c.bench);
	c.dir = make_temp_dir();
	path = path_in(c.dir, "a.safetensors");
	write_safetensors(path, tensors, N_GROUPS, 9);
	assert_ok(hr_model_open(path, NULL, &c.model));
	free(path);
	for (uint64_t i = 0; i < N_GROUPS; i++) {
		struct hr_tensor t = HR_TENSOR_INIT;

		assert_ok(hr_model_tensor(c.model, i, &t));
		c.want[i] = plain_read(c.model, &t);
		assert_ok(hr_group_new(c.model, &i, 1, &c.groups[i]));
	}
	assert_ok(hr_group_new(c.model, two, 2, &c.pair));
	loader_opts.engine = engine;
	assert_ok(hr_loader_open(c.bench.device, &loader_opts, &c.loader));
	opts.budget_bytes = n_fit * 300032;
	opts.host_budget_bytes = n_host * 303104;
	assert_ok(hr_cache_open(c.loader, &opts, &c.cache));
}

static void consumer_open(const char *engine, uint64_t n_fit)
{
	consumer_open_host(engine, n_fit, 0);
}

static void consumer_close(void)
{
	assert_ok(hr_cache_close(c.cache, HR_FOREVER));
	for (size_t i = 0; i < N_GROUPS; i++) {
		hr_group_release(c.groups[i]);
		free(c.want[i]);
	}
	hr_group_release(c.pair);
	assert_ok(hr_loader_close(c.loader, HR_FOREVER));
	hr_model_close(c.model);
	bench_close(&c.bench);
	remove_tree(c.dir);
	free(c.dir);
	fake_engine_set(NULL);
}

/* The consumer's work: copies a lease's bytes away, when its turn on the stream comes. */
static void queue_use(hr_buffer *buffer, size_t at)
{
	assert_int_equal(driver.api.cuMemcpyDtoHAsync(c.bench.staging + at * GROUP_BYTES,
						      (hr__cu_ptr)(uintptr_t)hr_buffer_data(buffer), GROUP_BYTES,
						      c.bench.stream),
			 0);
}

static void assert_used(size_t at, size_t group)
{
	assert_int_equal(driver.api.cuStreamSynchronize(c.bench.stream), 0);
	assert_memory_equal(c.bench.staging + at * GROUP_BYTES, c.want[group], GROUP_BYTES);
}

static int get(size_t i, uint32_t load_timeout_ms, hr_buffer **out)
{
	struct hr_cache_get_opts opts = HR_CACHE_GET_OPTS_INIT;

	opts.load_timeout_ms = load_timeout_ms;
	opts.signal_stream = c.bench.stream;
	return hr_cache_get(c.cache, c.groups[i], &opts, out);
}

static void assert_holds(hr_buffer *buffer, size_t i)
{
	static unsigned char got[GROUP_BYTES];

	assert_ok(hr_buffer_read(buffer, 0, got, GROUP_BYTES));
	assert_memory_equal(got, c.want[i], GROUP_BYTES);
}

static void memory_passes_on_behind_the_stream_and_no_sooner(void **state)
{
	hr_buffer *a, *b;
	void *memory;

	(void)state;
	consumer_open(NULL, 1);
	assert_ok(get(0, 0, &a));
	memory = hr_buffer_data(a);
	block_stream(&c.bench);
	queue_use(a, 0);
	assert_ok(hr_buffer_release_on(a, c.bench.stream));
	assert_fails(get(1, 100, &b), HR_E_PENDING); /* its copies stand behind the stream */
	atomic_store(&c.bench.may_go_on, 1);
	assert_ok(get(1, 0, &b));
	assert_ptr_equal(hr_buffer_data(b), memory);
	assert_holds(b, 1);
	assert_used(0, 0);
	hr_buffer_release(b);
	consumer_close();
}

static void a_load_that_failed_before_it_waited_leaves_the_wait_to_the_next(void **state)
{
	struct fake_engine_settings bad = {.fail_read = 2, .fail_errno = EIO};
	hr_buffer *a, *b;

	(void)state;
	fake_engine_set(&bad);
	consumer_open("fake", 1);
	assert_ok(get(0, 0, &a));
	block_stream(&c.bench);
	queue_use(a, 0);
	assert_ok(hr_buffer_release_on(a, c.bench.stream));
	assert_fails(get(1, 0, &b), HR_E_IO);
	assert_fails(get(2, 100, &b), HR_E_PENDING);
	atomic_store(&c.bench.may_go_on, 1);
	assert_ok(get(2, 0, &b));
	assert_holds(b, 2);
	assert_used(0, 0);
	hr_buffer_release(b);
	consumer_close();
}

static void a_hint_that_is_given_up_leaves_no_trace_in_memory_still_in_use(void **state)
{
	hr_buffer *a, *b;

	(void)state;
	consumer_open(NULL, 1);
	for (int i = 0; i < 20; i++) {
		assert_ok(get(0, 0, &a));
		queue_use(a, 0);
		assert_ok(hr_buffer_release_on(a, c.bench.stream));
		assert_ok(hr_cache_prefetch(c.cache, c.groups[1], NULL));
		assert_ok(get(2, 0, &b)); /* takes the hint's memory */
		assert_holds(b, 2);
		assert_used(0, 0);
		assert_ok(hr_buffer_release_on(b, c.bench.stream));
	}
	consumer_close();
}

static void a_release_that_cannot_be_ordered_drops_nothing(void **state)
{
	hr_buffer *a, *b;

	(void)state;
	consumer_open(NULL, 1);
	assert_ok(get(0, 0, &a));
	for (int again = 0; again < 2; again++) { /* with no mark there yet, and with one */
		hr__fault_arm("cuEventRecord", 1, EIO);
		assert_fails(hr_buffer_release_on(a, c.bench.stream), HR_E_DEVICE);
		hr__fault_arm(NULL, 0, 0);
		assert_fails(hr_cache_evict(c.cache, c.groups[0], NULL), HR_E_BUSY);
		hr_buffer_acquire(a);
		assert_ok(hr_buffer_release_on(a, c.bench.stream));
	}
	block_stream(&c.bench);
	queue_use(a, 0);
	assert_ok(hr_buffer_release_on(a, c.bench.stream));
	assert_fails(get(1, 50, &b), HR_E_PENDING);
	atomic_store(&c.bench.may_go_on, 1);
	assert_used(0, 0);
	consumer_close();
}

static void *let_go_later(void *arg)
{
	usleep(100000);
	atomic_store(&((struct bench *)arg)->may_go_on, 1);
	return NULL;
}

static void memory_goes_back_to_the_device_only_when_the_stream_has_passed(void **state)
{
	hr_buffer *a, *pair;
	pthread_t thread;

	(void)state;
	consumer_open(NULL, 2);
	assert_ok(get(0, 0, &a));
	block_stream(&c.bench);
	queue_use(a, 0);
	assert_ok(hr_buffer_release_on(a, c.bench.stream));
	assert_ok(hr_cache_prefetch(c.cache, c.pair, NULL)); /* a hint does not wait for that */
	assert_int_equal(pthread_create(&thread, NULL, let_go_later, &c.bench), 0);
	assert_ok(hr_cache_get(c.cache, c.pair, NULL, &pair));
	pthread_join(thread, NULL);
	assert_used(0, 0);
	hr_buffer_release(pair);
	consumer_close();
}

static void closing_waits_for_streams_too(void **state)
{
	hr_buffer *a;

	(void)state;
	consumer_open(NULL, 1);
	assert_ok(get(0, 0, &a));
	block_stream(&c.bench);
	queue_use(a, 0);
	assert_ok(hr_buffer_release_on(a, c.bench.stream));
	assert_fails(hr_cache_close(c.cache, 30), HR_E_BUSY);
	atomic_store(&c.bench.may_go_on, 1);
	assert_used(0, 0);
	consumer_close();
}

static void many_streams_need_few_events(void **state)
{
	hr__cu_stream streams[N_STREAMS];
	hr_buffer *a;
	long long before;

	(void)state;
	consumer_open(NULL, 2);
	assert_ok(get(0, 0, &a));
	before = has_fake ? fake.live("events") : 0;
	for (size_t i = 0; i < N_STREAMS; i++)
		assert_int_equal(driver.api.cuStreamCreate(&streams[i], HR__CU_STREAM_NON_BLOCKING), 0);
	for (size_t i = 0; i < (size_t)10 * N_STREAMS; i++) {
		hr_buffer_acquire(a);
		assert_ok(hr_buffer_release_on(a, streams[i % N_STREAMS]));
		assert_int_equal(driver.api.cuStreamSynchronize(streams[i % N_STREAMS]), 0);
	}
	if (has_fake)
		assert_true(fake.live("events") - before <= 10);
	for (size_t i = 0; i < N_STREAMS; i++)
		assert_int_equal(driver.api.cuStreamDestroy(streams[i]), 0);
	hr_buffer_release(a);
	consumer_close();
}

/* ---- the host tier ---- */

static struct hr_cache_stats stats_now(void)
{
	struct hr_cache_stats stats = HR_CACHE_STATS_INIT;

	assert_ok(hr_cache_stats(c.cache, NULL, &stats));
	assert_true(stats.used_bytes <= stats.budget_bytes && stats.host_used_bytes <= stats.host_budget_bytes);
	assert_true(stats.host_peak_bytes <= stats.host_budget_bytes);
	return stats;
}

static void visit(size_t i)
{
	hr_buffer *a;

	assert_ok(get(i, 0, &a));
	assert_holds(a, i);
	assert_ok(hr_buffer_release_on(a, c.bench.stream));
}

/* Copies are looked at when they are asked for: the look-alike driver's take a while. */
static void settle(void)
{
	usleep(20000); /* until they are queued */
	if (has_fake) {
		fake.drain();
		usleep(2000);
	}
}

static void evicted_groups_come_back_without_storage(void **state)
{
	struct fake_engine_settings well = {.seed = 1};
	struct hr_cache_stats stats;
	uint64_t reads;

	(void)state;
	fake_engine_set(&well);
	consumer_open_host("fake", 2, N_GROUPS);
	for (size_t i = 0; i < N_GROUPS + 2; i++) {
		visit(i % N_GROUPS);
		settle();
	}
	reads = fake_engine_reads();
	for (size_t i = 0; i < (size_t)4 * N_GROUPS; i++) {
		if (i % 3 == 0)
			assert_ok(hr_cache_prefetch(c.cache, c.groups[(i + 3) % N_GROUPS], NULL));
		visit((i + 2) % N_GROUPS);
	}
	assert_int_equal(fake_engine_reads(), reads);
	stats = stats_now();
	assert_int_equal(stats.n_host_saves, N_GROUPS); /* each once */
	assert_true(stats.n_host_hits >= (uint64_t)3 * N_GROUPS);
	assert_int_equal(stats.host_hit_bytes, stats.n_host_hits * GROUP_BYTES);
	assert_int_equal(stats.n_host_groups, N_GROUPS);
	consumer_close();
}

static void a_small_host_tier_keeps_what_was_used_last(void **state)
{
	struct hr_cache_stats stats;

	(void)state;
	consumer_open_host(NULL, 1, 2);
	for (size_t i = 0; i < (size_t)6 * N_GROUPS; i++) {
		visit(i % 3 == 2 ? i / 3 % N_GROUPS : i % 3);
		if (i % 2)
			settle();
		stats_now();
	}
	stats = stats_now();
	assert_true(stats.n_host_hits > 0 && stats.n_host_evictions > 0);
	assert_true(stats.n_host_groups <= 2);
	consumer_close();
}

static void a_copy_down_stands_between_the_consumer_and_the_next_load(void **state)
{
	hr_buffer *a, *b;

	(void)state;
	consumer_open_host(NULL, 1, N_GROUPS);
	assert_ok(get(0, 0, &a));
	block_stream(&c.bench);
	queue_use(a, 0);
	assert_ok(hr_buffer_release_on(a, c.bench.stream));
	assert_fails(get(1, 100, &b), HR_E_PENDING);
	assert_int_equal(stats_now().n_host_saves, 1);
	atomic_store(&c.bench.may_go_on, 1);
	assert_ok(get(1, 0, &b));
	assert_holds(b, 1);
	hr_buffer_release(b);
	assert_used(0, 0);
	visit(0);
	assert_int_equal(stats_now().n_host_hits, 1);
	/* Memory under a copy does not go back to the device before it is over. */
	block_stream(&c.bench);
	assert_ok(get(2, 0, &a));
	queue_use(a, 0);
	assert_ok(hr_buffer_release_on(a, c.bench.stream));
	assert_ok(hr_cache_evict(c.cache, c.groups[2], NULL));
	assert_fails(hr_cache_close(c.cache, 30), HR_E_BUSY);
	atomic_store(&c.bench.may_go_on, 1);
	assert_used(0, 2);
	visit(2);
	consumer_close();
}

static void a_host_tier_that_fails_is_no_worse_than_none(void **state)
{
	static const char *const calls[] = {"cuMemHostRegister", "cuMemcpyDtoHAsync"};
	hr_buffer *a;

	(void)state;
	for (size_t k = 0; k < 2; k++) {
		consumer_open_host(NULL, 1, N_GROUPS);
		visit(0);
		hr__fault_arm(calls[k], 1, EIO);
		assert_ok(get(1, 0, &a));
		hr_buffer_release(a);
		assert_true(hr__fault_fired());
		hr__fault_arm(NULL, 0, 0);
		visit(1);
		visit(0);
		assert_int_equal(stats_now().n_host_hits, 0);
		consumer_close();
	}
	consumer_open_host(NULL, 1, N_GROUPS);
	visit(0);
	visit(1);
	settle();
	hr__fault_arm("cuMemcpyHtoDAsync", 1, EIO);
	assert_fails(get(0, 0, &a), HR_E_DEVICE);
	assert_non_null(strstr(hr_error_last()->message, "from host memory"));
	hr__fault_arm(NULL, 0, 0);
	visit(0);
	visit(1);
	assert_true(stats_now().n_host_hits > 0);
	consumer_close();
}

/* Nothing on the way of a loop over equal groups allocates, frees, or waits for a stream or the device. */
static void a_loop_never_makes_the_driver_wait(void **state)
{
	static const char *const slow_calls[] = {"cuMemAlloc_v2",   "cuMemFree_v2",        "cuMemAllocFromPoolAsync",
						 "cuMemFreeAsync",  "cuStreamSynchronize", "cuEventSynchronize",
						 "cuCtxSynchronize"};
	unsigned long long before[7];
	hr_buffer *a;

	(void)state;
	if (!has_fake)
		skip_for("needs the look-alike driver");
	consumer_open(NULL, 3);
	for (size_t i = 0; i < 60; i++) {
		if (i == 8)
			for (size_t k = 0; k < 7; k++)
				before[k] = fake.calls(slow_calls[k]);
		assert_ok(hr_cache_prefetch(c.cache, c.groups[(i + 1) % N_GROUPS], NULL));
		assert_ok(get(i % N_GROUPS, 0, &a));
		queue_use(a, i % 6);
		assert_ok(hr_buffer_release_on(a, c.bench.stream));
	}
	for (size_t k = 0; k < 7; k++)
		assert_int_equal(fake.calls(slow_calls[k]), before[k]);
	for (size_t i = 54; i < 60; i++)
		assert_used(i % 6, i % N_GROUPS);
	consumer_close();
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(memory_passes_on_behind_the_stream_and_no_sooner),
		TEST(a_load_that_failed_before_it_waited_leaves_the_wait_to_the_next),
		TEST(a_hint_that_is_given_up_leaves_no_trace_in_memory_still_in_use),
		TEST(a_release_that_cannot_be_ordered_drops_nothing),
		TEST(memory_goes_back_to_the_device_only_when_the_stream_has_passed),
		TEST(closing_waits_for_streams_too),
		TEST(many_streams_need_few_events),
		TEST(evicted_groups_come_back_without_storage),
		TEST(a_small_host_tier_keeps_what_was_used_last),
		TEST(a_copy_down_stands_between_the_consumer_and_the_next_load),
		TEST(a_host_tier_that_fails_is_no_worse_than_none),
		TEST(a_loop_never_makes_the_driver_wait),
	};

	if (!find_driver())
		return 0;
	return cmocka_run_group_tests(tests, NULL, NULL);
}
