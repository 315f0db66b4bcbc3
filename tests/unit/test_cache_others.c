/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The cache among others: threads that want the same, loads that are more urgent, a caller's allocator, a forked child.
 */
#include "cachetest.h"
#include "modeltest.h"

#include "cache/cache.h"
#include "fakes/fake_engine.h"

#include <pthread.h>

struct getter {
	struct kit *kit;
	pthread_t thread;
	bool right;
};

static void *get_the_first(void *arg)
{
	struct getter *getter = arg;
	hr_buffer *buffer;

	if (hr_cache_get(getter->kit->cache, getter->kit->groups[0], NULL, &buffer))
		return NULL;
	getter->right = lease_is_right(getter->kit->model, getter->kit->groups[0], buffer);
	hr_buffer_release(buffer);
	return NULL;
}

static void what_many_want_at_once_is_read_once(void **state)
{
	struct fake_engine_settings slow = {.delay_ns = 20000000};
	struct hr_cache_opts opts = budget_for(2);
	struct getter getters[8];
	struct hr_cache_stats stats;
	struct kit kit;

	(void)state;
	fake_engine_set(&slow);
	kit_open(&kit, "cpu", "fake", &opts);
	for (size_t i = 0; i < 8; i++) {
		getters[i] = (struct getter){.kit = &kit};
		assert_int_equal(pthread_create(&getters[i].thread, NULL, get_the_first, &getters[i]), 0);
	}
	for (size_t i = 0; i < 8; i++) {
		pthread_join(getters[i].thread, NULL);
		assert_true(getters[i].right);
	}
	stats = stats_of(kit.cache);
	assert_int_equal(stats.n_loads, 1);
	assert_int_equal(stats.n_misses, 1);
	assert_int_equal(stats.n_hits + stats.n_joins, 7);
	kit_close(&kit);
	fake_engine_set(NULL);
}

static void hints_yield_to_what_somebody_waits_for(void **state)
{
	struct fake_engine_settings slow = {.delay_ns = 4000000};
	struct hr_cache_opts opts = HR_CACHE_OPTS_INIT;
	struct hr_loader_opts loader_opts = HR_LOADER_OPTS_INIT;
	uint64_t halves[2][N_GROUPS];
	struct hr_stats stats = HR_STATS_INIT;
	hr_group *groups[2];
	hr_buffer *buffer;
	hr_loader *loader;
	hr_cache *cache;
	struct kit kit;

	(void)state;
	open_groups(&kit);
	for (uint64_t i = 0; i < N_GROUPS; i++) {
		halves[0][i] = i;
		halves[1][i] = N_GROUPS + i;
	}
	fake_engine_set(&slow);
	loader_opts.engine = "fake";
	loader_opts.readers = 1;
	loader_opts.slot_bytes = HR_MIN_SLOT_BYTES;
	loader_opts.staging_bytes = HR_MIN_STAGING_BYTES;
	opts.budget_bytes = 2 << 20;
	assert_ok(hr_device_open("cpu", &kit.device));
	assert_ok(hr_loader_open(kit.device, &loader_opts, &loader));
	assert_ok(hr_cache_open(loader, &opts, &cache));
	for (size_t i = 0; i < 2; i++)
		assert_ok(hr_group_new(kit.model, halves[i], N_GROUPS, &groups[i]));
	assert_ok(hr_cache_prefetch(cache, groups[0], NULL));
	assert_ok(hr_cache_get(cache, groups[1], NULL, &buffer));
	hr_buffer_release(buffer);
	assert_ok(hr_job_stats(hr__cache_find(cache, groups[0])->job, &stats));
	assert_true(stats.done_bytes < stats.total_bytes / 2); /* in turns it would have had as many */
	assert_ok(hr_cache_get(cache, groups[0], NULL, &buffer));
	assert_true(lease_is_right(kit.model, groups[0], buffer));
	hr_buffer_release(buffer);
	assert_ok(hr_cache_close(cache, 20000));
	assert_ok(hr_loader_close(loader, 20000));
	fake_engine_set(NULL);
	for (size_t i = 0; i < 2; i++)
		hr_group_release(groups[i]);
	for (size_t i = 0; i < N_GROUPS; i++)
		hr_group_release(kit.groups[i]);
	hr_group_release(kit.large);
	assert_ok(hr_device_close(kit.device));
	hr_model_close(kit.model);
	remove_tree(kit.dir);
	free(kit.dir);
}

/* ---- a caller's memory ---- */

static struct {
	uint64_t now, peak, n_allocated;
	pthread_t thread;
	bool elsewhere;
} heap;

static void *heap_alloc(void *ctx, uint64_t bytes, uint64_t align, void *stream)
{
	(void)ctx;
	(void)stream;
	heap.elsewhere |= !pthread_equal(pthread_self(), heap.thread);
	heap.n_allocated++;
	heap.now += bytes;
	heap.peak = heap.now > heap.peak ? heap.now : heap.peak;
	return aligned_alloc(align, (bytes + align - 1) / align * align);
}

static void heap_release(void *ctx, void *memory, uint64_t bytes, void *stream)
{
	(void)ctx;
	(void)stream;
	heap.elsewhere |= !pthread_equal(pthread_self(), heap.thread);
	heap.now -= bytes;
	free(memory);
}

static void a_callers_allocator_is_asked_within_calls_and_within_the_budget(void **state)
{
	struct hr_loader_opts loader_opts = HR_LOADER_OPTS_INIT;
	struct hr_cache_opts opts = HR_CACHE_OPTS_INIT;
	hr_loader *loader;
	hr_buffer *buffer;
	struct kit kit;
	hr_cache *own;

	(void)state;
	memset(&heap, 0, sizeof(heap));
	heap.thread = pthread_self();
	opts.budget_bytes = 2 << 20;
	kit_open(&kit, "cpu", NULL, &opts);
	loader_opts.alloc = heap_alloc;
	loader_opts.release = heap_release;
	assert_ok(hr_loader_open(kit.device, &loader_opts, &loader));
	opts.granularity_bytes = 4096;
	opts.budget_bytes = 900000;
	assert_ok(hr_cache_open(loader, &opts, &own));
	assert_int_equal(hr_cache_charge(own, kit.groups[0]), (512 + LAYER + 4095) / 4096 * 4096);
	for (size_t i = 0; i < 40; i++) {
		hr_group *group = i % 13 == 12 ? kit.large : kit.groups[i * 3 % N_GROUPS];

		assert_ok(hr_cache_get(own, group, NULL, &buffer));
		assert_true(lease_is_right(kit.model, group, buffer));
		hr_buffer_release(buffer);
		assert_int_equal(stats_of(own).used_bytes, heap.now);
	}
	assert_true(heap.peak <= 900000);
	assert_ok(hr_cache_trim(own, UINT64_MAX, NULL));
	assert_int_equal(heap.now, 0);
	assert_ok(hr_cache_close(own, 0));
	assert_ok(hr_loader_close(loader, 20000));
	assert_false(heap.elsewhere);
	kit_close(&kit);
}

/* ---- fork ---- */

struct in_a_child {
	struct kit *kit;
	hr_buffer *buffer;
};

static int use_in_a_child(void *arg)
{
	struct in_a_child *in = arg;
	struct hr_cache_stats stats = HR_CACHE_STATS_INIT;
	hr_buffer *buffer;

	hr_buffer_release(in->buffer); /* does nothing */
	if (hr_cache_get(in->kit->cache, in->kit->groups[0], NULL, &buffer) != HR_E_FORKED)
		return 1;
	if (hr_cache_prefetch(in->kit->cache, in->kit->groups[1], NULL) != HR_E_FORKED)
		return 2;
	if (hr_cache_stats(in->kit->cache, NULL, &stats) != HR_E_FORKED)
		return 3;
	return hr_cache_close(in->kit->cache, 0) == HR_E_FORKED ? 0 : 4;
}

static void a_cache_belongs_to_the_process_that_opened_it(void **state)
{
	struct hr_cache_opts opts = budget_for(2);
	struct in_a_child in;
	struct kit kit;

	(void)state;
	kit_open(&kit, "cpu", NULL, &opts);
	in.kit = &kit;
	assert_ok(hr_cache_get(kit.cache, kit.groups[0], NULL, &in.buffer));
	assert_int_equal(in_child(use_in_a_child, &in), 0);
	assert_int_equal(stats_of(kit.cache).n_pinned, 1);
	hr_buffer_release(in.buffer);
	kit_close(&kit);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(what_many_want_at_once_is_read_once),
		cmocka_unit_test(hints_yield_to_what_somebody_waits_for),
		cmocka_unit_test(a_callers_allocator_is_asked_within_calls_and_within_the_budget),
		cmocka_unit_test(a_cache_belongs_to_the_process_that_opened_it),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
