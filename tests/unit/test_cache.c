/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The cache, rule by rule, on cpu and over whatever CUDA driver there is: what a group is, hits and misses, pins, room,
 * errors in words, accounting, reuse of memory, hints, failures. Every lease's bytes are compared with a plain read.
 */
#include "cachetest.h"

#include "fakes/fake_engine.h"

#include <errno.h>
#include <pthread.h>
#include <unistd.h>

/* ---- groups ---- */

static void a_group_lays_its_tensors_out_in_the_models_order(void **state)
{
	uint64_t tensor, offset, twice[2] = {1, 1}, far[1] = {99};
	hr_group *group;
	struct kit kit;

	(void)state;
	open_groups(&kit);
	assert_int_equal(hr_group_n_tensors(kit.groups[1]), 2);
	assert_int_equal(hr_group_bytes(kit.groups[1]), 512 + LAYER);
	assert_ok(hr_group_tensor(kit.groups[1], 0, &tensor, &offset));
	assert_int_equal(tensor, 3);
	assert_int_equal(offset, 512);
	assert_ok(hr_group_tensor(kit.groups[1], 1, &tensor, &offset));
	assert_int_equal(tensor, 2);
	assert_int_equal(offset, 0);
	assert_fails(hr_group_tensor(kit.groups[1], 2, &tensor, &offset), HR_E_OPTS);
	assert_true(hr_group_id(kit.groups[1]) != hr_group_id(kit.groups[2]));
	assert_fails(hr_group_new(kit.model, twice, 2, &group), HR_E_DUPLICATE);
	assert_null(group);
	assert_fails(hr_group_new(kit.model, far, 1, &group), HR_E_OPTS);
	assert_fails(hr_group_new(kit.model, far, 0, &group), HR_E_OPTS);
	hr_model_close(kit.model); /* groups keep it */
	for (size_t i = 0; i < N_GROUPS; i++)
		hr_group_release(kit.groups[i]);
	hr_group_release(hr_group_acquire(kit.large));
	hr_group_release(kit.large);
	hr_group_release(NULL);
	remove_tree(kit.dir);
	free(kit.dir);
}

/* ---- on any device ---- */

static void hits_what_is_there_and_evicts_the_oldest(const char *device)
{
	struct hr_cache_opts opts = budget_for(3);
	struct hr_cache_stats stats;
	hr_buffer *a, *b;
	struct kit kit;

	kit_open(&kit, device, NULL, &opts);
	for (size_t i = 0; i < 3; i++)
		visit(&kit, i);
	visit(&kit, 0);
	visit(&kit, 3); /* 1 leaves */
	visit(&kit, 0);
	visit(&kit, 2);
	visit(&kit, 1);
	stats = stats_of(kit.cache);
	assert_int_equal(stats.n_hits, 3);
	assert_int_equal(stats.n_misses, 5);
	assert_int_equal(stats.n_loads, 5);
	assert_int_equal(stats.n_evictions, 2);
	assert_int_equal(stats.n_groups, 3);
	assert_int_equal(stats.pinned_bytes, 0);
	assert_int_equal(stats.used_bytes, 3 * hr_cache_charge(kit.cache, kit.groups[0]));
	assert_int_equal(stats.loaded_bytes, 5 * (LAYER + 333));
	assert_int_equal(stats.hit_bytes, 3 * (LAYER + 333));
	assert_ok(hr_cache_get(kit.cache, kit.groups[1], NULL, &a));
	assert_ok(hr_cache_get(kit.cache, kit.groups[1], NULL, &b));
	assert_ptr_equal(a, b); /* one buffer, two pins */
	stats = stats_of(kit.cache);
	assert_int_equal(stats.n_pinned, 1);
	assert_int_equal(stats.pinned_bytes, hr_cache_charge(kit.cache, kit.groups[1]));
	hr_buffer_release(a);
	assert_int_equal(stats_of(kit.cache).n_pinned, 1);
	hr_buffer_release(b);
	assert_int_equal(stats_of(kit.cache).n_pinned, 0);
	kit_close(&kit);
}

static void works_as_a_cache_on_cpu(void **state)
{
	(void)state;
	hits_what_is_there_and_evicts_the_oldest("cpu");
}

static void works_as_a_cache_on_a_gpu(void **state)
{
	(void)state;
	if (!has_device("cuda:0"))
		skip_for("%s", hr_error_last()->message);
	hits_what_is_there_and_evicts_the_oldest("cuda:0");
}

static void equal_groups_use_equal_memory_again(void **state)
{
	struct hr_cache_opts opts = budget_for(2);
	void *seen[2] = {NULL, NULL};
	struct kit kit;

	(void)state;
	kit_open(&kit, "cpu", NULL, &opts);
	for (size_t i = 0; i < (size_t)5 * N_GROUPS; i++) {
		hr_buffer *buffer;
		void *memory;

		assert_ok(hr_cache_get(kit.cache, kit.groups[i % N_GROUPS], NULL, &buffer));
		memory = hr_buffer_data(buffer);
		if (i < 2)
			seen[i] = memory;
		assert_true(memory == seen[0] || memory == seen[1]);
		hr_buffer_release(buffer);
	}
	kit_close(&kit);
}

static void loop_keeps_what_fits_of_a_walk(void **state)
{
	struct hr_cache_opts opts = budget_for(5);
	struct hr_cache_stats stats;
	struct kit kit;

	(void)state;
	opts.policy = HR_POLICY_LRU;
	kit_open(&kit, "cpu", NULL, &opts);
	for (size_t i = 0; i < (size_t)10 * N_GROUPS; i++)
		visit(&kit, i % N_GROUPS);
	assert_int_equal(stats_of(kit.cache).n_hits, 0);
	kit_close(&kit);
	opts.policy = HR_POLICY_LOOP;
	kit_open(&kit, "cpu", NULL, &opts);
	for (size_t i = 0; i < (size_t)10 * N_GROUPS; i++)
		visit(&kit, i % N_GROUPS);
	stats = stats_of(kit.cache);
	assert_true(stats.n_hits >= 9 * 4); /* four of eight stay; the fifth place passes the rest on */
	kit_close(&kit);
}

/* ---- room ---- */

static void says_who_holds_the_budget_when_all_is_pinned(void **state)
{
	struct hr_cache_opts opts = budget_for(2);
	struct hr_cache_get_opts get = HR_CACHE_GET_OPTS_INIT;
	hr_buffer *held[2], *buffer;
	const char *message;
	uint64_t start;
	struct kit kit;

	(void)state;
	kit_open(&kit, "cpu", NULL, &opts);
	assert_ok(hr_cache_get(kit.cache, kit.groups[0], NULL, &held[0]));
	assert_ok(hr_cache_get(kit.cache, kit.groups[5], NULL, &held[1]));
	assert_fails(hr_cache_get(kit.cache, kit.groups[2], NULL, &buffer), HR_E_FULL);
	assert_null(buffer);
	message = hr_error_last()->message;
	assert_non_null(strstr(message, "'layers.2.weight'"));
	assert_non_null(strstr(message, "'layers.0.weight'"));
	assert_non_null(strstr(message, "'layers.5.weight'"));
	assert_string_equal(hr_error_last()->stage, "cache");
	start = now_ms();
	get.room_timeout_ms = 60;
	assert_fails(hr_cache_get(kit.cache, kit.groups[2], &get, &buffer), HR_E_FULL);
	assert_true(now_ms() - start >= 59);
	assert_int_equal(stats_of(kit.cache).n_waits, 1);
	assert_int_equal(stats_of(kit.cache).n_groups, 2); /* what did not fit left nothing */
	assert_fails(hr_cache_get(kit.cache, kit.large, NULL, &buffer), HR_E_BUDGET);
	assert_fails(hr_cache_evict(kit.cache, kit.groups[0], NULL), HR_E_BUSY);
	assert_fails(hr_cache_set_budget(kit.cache, room_for(1)), HR_E_FULL);
	assert_fails(hr_cache_close(kit.cache, 10), HR_E_BUSY);
	assert_true(lease_is_right(kit.model, kit.groups[0], held[0]));
	hr_buffer_release(held[0]);
	visit(&kit, 2);
	hr_buffer_release(held[1]);
	kit_close(&kit);
}

struct late {
	hr_buffer *buffer;
};

static void *release_later(void *arg)
{
	usleep(50000);
	hr_buffer_release(((struct late *)arg)->buffer);
	return NULL;
}

static void waits_for_room_until_somebody_releases(void **state)
{
	struct hr_cache_opts opts = budget_for(1);
	struct hr_cache_get_opts get = HR_CACHE_GET_OPTS_INIT;
	hr_buffer *buffer;
	struct late late;
	pthread_t thread;
	struct kit kit;

	(void)state;
	get.room_timeout_ms = HR_FOREVER;
	kit_open(&kit, "cpu", NULL, &opts);
	assert_ok(hr_cache_get(kit.cache, kit.groups[0], NULL, &late.buffer));
	assert_int_equal(pthread_create(&thread, NULL, release_later, &late), 0);
	assert_ok(hr_cache_get(kit.cache, kit.groups[1], &get, &buffer));
	assert_true(lease_is_right(kit.model, kit.groups[1], buffer));
	hr_buffer_release(buffer);
	pthread_join(thread, NULL);
	kit_close(&kit);
}

static void gives_memory_back_only_when_another_size_needs_the_room(void **state)
{
	struct hr_cache_opts opts = HR_CACHE_OPTS_INIT;
	struct hr_cache_stats stats = HR_CACHE_STATS_INIT;
	hr_buffer *buffer;
	uint64_t freed;
	struct kit kit;

	(void)state;
	opts.budget_bytes = 810000; /* the large one, 808,192 bytes of it */
	kit_open(&kit, "cpu", NULL, &opts);
	for (size_t i = 0; i < N_GROUPS; i++)
		visit(&kit, i);
	assert_ok(hr_cache_evict(kit.cache, kit.groups[3], &freed));
	assert_int_equal(freed, hr_cache_charge(kit.cache, kit.groups[3]));
	assert_ok(hr_cache_evict(kit.cache, kit.groups[3], &freed));
	assert_int_equal(freed, 0);
	stats = stats_of(kit.cache);
	assert_int_equal(stats.free_bytes, hr_cache_charge(kit.cache, kit.groups[3]));
	assert_ok(hr_cache_get(kit.cache, kit.large, NULL, &buffer));
	assert_true(lease_is_right(kit.model, kit.large, buffer));
	hr_buffer_release(buffer);
	stats = stats_of(kit.cache);
	assert_int_equal(stats.n_groups, 1);
	assert_int_equal(stats.free_bytes, 0);
	visit(&kit, 0);
	stats = stats_of(kit.cache);
	assert_int_equal(stats.used_bytes, hr_cache_charge(kit.cache, kit.groups[0]));
	assert_ok(hr_cache_trim(kit.cache, 1, &freed));
	assert_int_equal(freed, hr_cache_charge(kit.cache, kit.groups[0]));
	assert_int_equal(stats_of(kit.cache).used_bytes, 0);
	for (size_t i = 0; i < N_GROUPS - 1; i++)
		visit(&kit, i);
	assert_ok(hr_cache_set_budget(kit.cache, room_for(2)));
	visit(&kit, 7);
	assert_ok(hr_cache_stats(kit.cache, NULL, &stats));
	assert_true(stats.n_groups <= 2 && stats.used_bytes <= room_for(2));
	kit_close(&kit);
}

/* ---- hints ---- */

static void a_hint_brings_a_group_in(void **state)
{
	struct hr_cache_opts opts = budget_for(3);
	struct hr_cache_stats stats;
	hr_buffer *held[2];
	struct kit kit;

	(void)state;
	kit_open(&kit, "cpu", NULL, &opts);
	assert_ok(hr_cache_prefetch(kit.cache, kit.groups[0], NULL));
	assert_ok(hr_cache_prefetch(kit.cache, kit.groups[0], NULL)); /* on its way already */
	visit(&kit, 0);
	stats = stats_of(kit.cache);
	assert_int_equal(stats.n_misses, 0);
	assert_int_equal(stats.n_hits + stats.n_joins, 1);
	assert_int_equal(stats.n_loads, 1);
	assert_int_equal(stats.n_prefetches, 1);
	/* Hints do not take one another's room, nor what is pinned. */
	assert_ok(hr_cache_get(kit.cache, kit.groups[0], NULL, &held[0]));
	assert_ok(hr_cache_prefetch(kit.cache, kit.groups[1], NULL));
	assert_ok(hr_cache_prefetch(kit.cache, kit.groups[2], NULL));
	assert_ok(hr_cache_prefetch(kit.cache, kit.groups[3], NULL));
	stats = stats_of(kit.cache);
	assert_int_equal(stats.n_passed_over, 1);
	assert_int_equal(stats.n_groups, 3);
	/* A get may. The newest hint goes first. */
	assert_ok(hr_cache_get(kit.cache, kit.groups[4], NULL, &held[1]));
	assert_true(lease_is_right(kit.model, kit.groups[4], held[1]));
	visit(&kit, 1);
	stats = stats_of(kit.cache);
	assert_int_equal(stats.n_misses, 1);
	hr_buffer_release(held[0]);
	hr_buffer_release(held[1]);
	/* An unused one may be evicted and closed over. */
	assert_ok(hr_cache_prefetch(kit.cache, kit.groups[6], NULL));
	assert_ok(hr_cache_prefetch(kit.cache, kit.groups[7], NULL));
	assert_ok(hr_cache_evict(kit.cache, kit.groups[6], NULL));
	assert_fails(hr_cache_prefetch(kit.cache, NULL, NULL), HR_E_OPTS);
	kit_close(&kit);
}

/* ---- what goes wrong ---- */

static void a_failed_load_leaves_nothing(void **state)
{
	struct fake_engine_settings bad = {.fail_read = 1, .fail_errno = EIO};
	struct hr_cache_opts opts = budget_for(2);
	hr_buffer *buffer;
	struct kit kit;

	(void)state;
	for (int by_hint = 0; by_hint < 2; by_hint++) {
		fake_engine_set(&bad);
		kit_open(&kit, "cpu", "fake", &opts);
		if (by_hint)
			assert_ok(hr_cache_prefetch(kit.cache, kit.groups[0], NULL));
		assert_fails(hr_cache_get(kit.cache, kit.groups[0], NULL, &buffer), HR_E_IO);
		assert_null(buffer);
		assert_non_null(strstr(hr_error_last()->path, "model.safetensors"));
		assert_int_equal(stats_of(kit.cache).n_groups, 0);
		assert_int_equal(stats_of(kit.cache).n_failures, 1);
		visit(&kit, 0);
		visit(&kit, 1);
		assert_int_equal(stats_of(kit.cache).n_groups, 2);
		kit_close(&kit);
		fake_engine_set(NULL);
	}
}

static void a_get_can_be_asked_to_come_back_later(void **state)
{
	struct fake_engine_settings slow = {.delay_ns = 100000000};
	struct hr_cache_get_opts get = HR_CACHE_GET_OPTS_INIT;
	struct hr_cache_opts opts = budget_for(2);
	hr_buffer *buffer;
	struct kit kit;
	int rc, n = 0;

	(void)state;
	fake_engine_set(&slow);
	kit_open(&kit, "cpu", "fake", &opts);
	get.load_timeout_ms = 1;
	assert_fails(hr_cache_get(kit.cache, kit.groups[0], &get, &buffer), HR_E_PENDING);
	do
		rc = hr_cache_get(kit.cache, kit.groups[0], &get, &buffer);
	while (rc == HR_E_PENDING && n++ < 10000);
	assert_ok(rc);
	assert_true(lease_is_right(kit.model, kit.groups[0], buffer));
	hr_buffer_release(buffer);
	assert_int_equal(stats_of(kit.cache).n_loads, 1);
	kit_close(&kit);
	fake_engine_set(NULL);
}

static void what_makes_no_sense_is_refused(void **state)
{
	struct hr_cache_opts opts = HR_CACHE_OPTS_INIT;
	struct hr_cache_get_opts get = HR_CACHE_GET_OPTS_INIT;
	struct hr_cache_stats stats = HR_CACHE_STATS_INIT;
	hr_buffer *buffer;
	hr_cache *cache;
	struct kit kit;
	size_t n;

	(void)state;
	opts.budget_bytes = 1 << 20;
	kit_open(&kit, "cpu", NULL, &opts);
	assert_fails(hr_cache_open(kit.loader, NULL, &cache), HR_E_OPTS);
	assert_fails(hr_cache_open(NULL, &opts, &cache), HR_E_OPTS);
	assert_fails(hr_cache_open(kit.loader, &opts, NULL), HR_E_OPTS);
	opts.policy = 2;
	assert_fails(hr_cache_open(kit.loader, &opts, &cache), HR_E_OPTS);
	assert_null(cache);
	opts.policy = 0;
	opts.granularity_bytes = 3;
	assert_fails(hr_cache_open(kit.loader, &opts, &cache), HR_E_OPTS);
	opts.granularity_bytes = 0;
	opts.host_budget_bytes = 1;
	assert_fails(hr_cache_open(kit.loader, &opts, &cache), HR_E_UNSUPPORTED);
	get.wait_stream = &kit;
	assert_fails(hr_cache_get(kit.cache, kit.groups[0], &get, &buffer), HR_E_OPTS);
	assert_fails(hr_cache_get(kit.cache, NULL, NULL, &buffer), HR_E_OPTS);
	assert_fails(hr_cache_get(NULL, kit.groups[0], NULL, &buffer), HR_E_OPTS);
	assert_fails(hr_cache_get(kit.cache, kit.groups[0], NULL, NULL), HR_E_OPTS);
	assert_fails(hr_cache_evict(kit.cache, NULL, NULL), HR_E_OPTS);
	assert_fails(hr_cache_trim(NULL, 1, NULL), HR_E_OPTS);
	assert_fails(hr_cache_set_budget(kit.cache, 0), HR_E_OPTS);
	assert_fails(hr_cache_stats(NULL, NULL, &stats), HR_E_OPTS);
	assert_fails(hr_cache_events(kit.cache, NULL, 1, &n, NULL), HR_E_OPTS);
	assert_ok(hr_cache_close(NULL, 0));
	kit_close(&kit);
}

static void events_tell_the_story(void **state)
{
	static const uint32_t wanted[] = {HR_CACHE_LOAD,  HR_CACHE_MISS, HR_CACHE_HIT,
					  HR_CACHE_EVICT, HR_CACHE_LOAD, HR_CACHE_MISS};
	struct hr_cache_event events[16];
	struct hr_cache_opts opts = budget_for(1);
	uint64_t lost;
	struct kit kit;
	size_t n;

	(void)state;
	opts.n_events = 6;
	kit_open(&kit, "cpu", NULL, &opts);
	visit(&kit, 0);
	visit(&kit, 0);
	visit(&kit, 1);
	assert_ok(hr_cache_events(kit.cache, events, 16, &n, &lost));
	assert_int_equal(n, 6);
	assert_int_equal(lost, 0);
	for (size_t i = 0; i < n; i++)
		assert_int_equal(events[i].kind, wanted[i]);
	assert_int_equal(events[0].group, hr_group_id(kit.groups[0]));
	assert_int_equal(events[5].group, hr_group_id(kit.groups[1]));
	assert_true(events[0].duration_ns > 0 && events[1].duration_ns >= events[0].duration_ns);
	for (size_t i = 0; i < 10; i++)
		visit(&kit, 1);
	assert_ok(hr_cache_events(kit.cache, events, 2, &n, &lost));
	assert_int_equal(n, 2);
	assert_int_equal(lost, 4);
	kit_close(&kit);
}

static void models_are_counted_apart(void **state)
{
	struct hr_cache_stats stats = HR_CACHE_STATS_INIT;
	struct hr_cache_opts opts = budget_for(4);
	struct kit kit, other;
	hr_buffer *buffer;

	(void)state;
	kit_open(&kit, "cpu", NULL, &opts);
	open_groups(&other);
	visit(&kit, 0);
	visit(&kit, 0);
	assert_ok(hr_cache_get(kit.cache, other.groups[0], NULL, &buffer));
	assert_ok(hr_cache_stats(kit.cache, other.model, &stats));
	assert_int_equal(stats.n_misses, 1);
	assert_int_equal(stats.n_hits, 0);
	assert_int_equal(stats.pinned_bytes, hr_cache_charge(kit.cache, other.groups[0]));
	assert_int_equal(stats.budget_bytes, 0);
	hr_buffer_release(buffer);
	assert_ok(hr_cache_stats(kit.cache, kit.model, &stats));
	assert_int_equal(stats.n_misses, 1);
	assert_int_equal(stats.n_hits, 1);
	assert_int_equal(stats.used_bytes, hr_cache_charge(kit.cache, kit.groups[0]));
	hr_model_close(other.model); /* the cache keeps what it holds */
	for (size_t i = 0; i < N_GROUPS; i++)
		hr_group_release(other.groups[i]);
	hr_group_release(other.large);
	remove_tree(other.dir);
	free(other.dir);
	kit_close(&kit);
}

static void a_closed_loader_still_serves_hits(void **state)
{
	struct hr_cache_opts opts = budget_for(2);
	hr_buffer *buffer;
	struct kit kit;

	(void)state;
	kit_open(&kit, "cpu", NULL, &opts);
	visit(&kit, 0);
	assert_ok(hr_cache_prefetch(kit.cache, kit.groups[1], NULL));
	assert_ok(hr_loader_close(kit.loader, 20000));
	kit.loader = NULL;
	visit(&kit, 0);
	assert_fails(hr_cache_get(kit.cache, kit.groups[2], NULL, &buffer), HR_E_CANCELLED);
	kit_close(&kit);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(a_group_lays_its_tensors_out_in_the_models_order),
		cmocka_unit_test(works_as_a_cache_on_cpu),
		cmocka_unit_test(works_as_a_cache_on_a_gpu),
		cmocka_unit_test(equal_groups_use_equal_memory_again),
		cmocka_unit_test(loop_keeps_what_fits_of_a_walk),
		cmocka_unit_test(says_who_holds_the_budget_when_all_is_pinned),
		cmocka_unit_test(waits_for_room_until_somebody_releases),
		cmocka_unit_test(gives_memory_back_only_when_another_size_needs_the_room),
		cmocka_unit_test(a_hint_brings_a_group_in),
		cmocka_unit_test(a_failed_load_leaves_nothing),
		cmocka_unit_test(a_get_can_be_asked_to_come_back_later),
		cmocka_unit_test(what_makes_no_sense_is_refused),
		cmocka_unit_test(events_tell_the_story),
		cmocka_unit_test(models_are_counted_apart),
		cmocka_unit_test(a_closed_loader_still_serves_hits),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
