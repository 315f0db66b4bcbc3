/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The cache, with every allocation and every system and driver call failing once: n = 1, 2, ... until the scenario goes
 * through without meeting the fault. It makes groups, gets, hints, evicts, trims, comes back from the host tier where
 * there is one, and closes. What must hold, wherever the fault strikes: a call that fails answers a code that fits and
 * leaves its out-parameter NULL; what succeeds delivered the right bytes; the books balance; the cache closes; and the
 * next round, over the same loader, finds nothing missing.
 */
#include "loadtest.h"

#include "cache/cache.h"
#include "fakes/fake_cuda.h"

#include <errno.h>

#define N_GROUPS 3
#define N_EACH   3

struct scenario {
	struct bed bed;
	const char *point;
	int errno_value;
	uint64_t n;
	unsigned char *want[N_GROUPS * N_EACH];
};

static bool code_fits(const struct scenario *s, int code)
{
	if (s->point)
		return code == HR_E_NOMEM;
	return code == HR_E_IO || code == HR_E_NOMEM || code == HR_E_UNSUPPORTED || code == HR_E_DEVICE ||
	       code == HR_E_DEVICE_MEMORY || (s->errno_value == ENOENT && code == HR_E_NOTFOUND);
}

/* Whether the call succeeded; one that failed did so properly. */
static bool went_well(const struct scenario *s, const char *what, int rc, const void *out)
{
	if (rc == 0)
		return true;
	if (!hr__fault_fired() || hr_error_last()->code != rc || !hr_error_last()->message[0] || out ||
	    !code_fits(s, rc))
		fail_msg("%s %llu, errno %d: %s: %s (%d): %s", s->point ? s->point : "call", (unsigned long long)s->n,
			 s->errno_value, what, hr_error_name(rc), rc, hr_error_last()->message);
	return false;
}
#define TRY(call, out) went_well(s, #call, (call), (out))

static void check_lease(const struct scenario *s, const hr_group *group, hr_buffer *buffer)
{
	unsigned char *got = malloc(group->bytes + 1);

	if (TRY(hr_buffer_read(buffer, 0, got, group->bytes), NULL))
		for (size_t m = 0; m < group->n; m++) {
			struct hr_tensor t = HR_TENSOR_INIT;

			assert_int_equal(hr_model_tensor(s->bed.model, group->members[m].tensor, &t), 0);
			assert_memory_equal(got + group->members[m].at, s->want[t.index], t.bytes);
		}
	free(got);
}

static void visit(const struct scenario *s, hr_cache *cache, hr_group *group)
{
	hr_buffer *buffer = NULL;

	if (!TRY(hr_cache_get(cache, group, NULL, &buffer), buffer))
		return;
	check_lease(s, group, buffer);
	hr_buffer_release(buffer);
}

static void check_books(hr_cache *cache)
{
	uint64_t free = 0, places = 0;

	for (const struct hr__place *place = cache->free_places; place; place = place->next)
		free += place->bytes;
	for (struct hr__policy_node *node = cache->policy.oldest; node; node = node->newer)
		places += hr__entry_of(node)->place->bytes;
	assert_int_equal(cache->whole.now.free_bytes, free);
	assert_int_equal(cache->whole.now.used_bytes, free + places);
	assert_int_equal(cache->held_bytes, 0);
	assert_int_equal(cache->n_inside, 0);
}

static void use_cache(const struct scenario *s, hr_cache *cache, hr_group *const *groups)
{
	struct hr_cache_stats stats = HR_CACHE_STATS_INIT;
	uint64_t freed;

	visit(s, cache, groups[0]);
	TRY(hr_cache_prefetch(cache, groups[1], NULL), NULL);
	visit(s, cache, groups[1]);
	visit(s, cache, groups[0]);
	visit(s, cache, groups[2]); /* of another size */
	TRY(hr_cache_prefetch(cache, groups[0], NULL), NULL);
	assert_int_equal(hr_cache_evict(cache, groups[0], &freed), 0);
	visit(s, cache, groups[1]);
	visit(s, cache, groups[0]);
	assert_int_equal(hr_cache_trim(cache, 1, &freed), 0);
	assert_int_equal(hr_cache_stats(cache, NULL, &stats), 0);
	check_books(cache);
	visit(s, cache, groups[2]);
}

static void play(const struct scenario *s)
{
	struct hr_cache_opts opts = HR_CACHE_OPTS_INIT;
	hr_group *groups[N_GROUPS] = {NULL};
	hr_cache *cache = NULL;
	bool good = true;

	for (uint64_t i = 0; i < N_GROUPS && good; i++) {
		const uint64_t tensors[N_EACH] = {N_EACH * i + 2, N_EACH * i, N_EACH * i + 1};

		good = TRY(hr_group_new(s->bed.model, tensors, i == 2 ? 1 : N_EACH, &groups[i]), groups[i]);
	}
	opts.policy = s->n % 2 ? HR_POLICY_LOOP : HR_POLICY_LRU;
	opts.n_events = 3;
	opts.budget_bytes = 1;
	for (size_t i = 0; i < N_GROUPS && good; i++)
		opts.budget_bytes = groups[i]->bytes + 4096 > opts.budget_bytes ? groups[i]->bytes + 4096
										: opts.budget_bytes;
	opts.host_budget_bytes = s->bed.device->ops->copy_down ? opts.budget_bytes * 2 : 0;
	if (good && TRY(hr_cache_open(s->bed.loader, &opts, &cache), cache))
		use_cache(s, cache, groups);
	assert_int_equal(hr_cache_close(cache, 20000), 0);
	for (size_t i = 0; i < N_GROUPS; i++)
		hr_group_release(groups[i]);
}

static void until_it_is_not_met(const char *device, const char *point, int errno_value)
{
	struct hr_loader_opts opts = HR_LOADER_OPTS_INIT;
	struct scenario s = {.point = point, .errno_value = errno_value};
	int fired = 1;

	if (!has_device(device))
		skip_for("%s", hr_error_last()->message);
	bed_open(&s.bed, 3, (size_t)N_GROUPS * N_EACH, 100000);
	for (uint64_t i = 0; i < s.bed.n_tensors; i++) {
		struct hr_tensor t = HR_TENSOR_INIT;

		assert_ok(hr_model_tensor(s.bed.model, i, &t));
		s.want[i] = plain_read(s.bed.model, &t);
	}
	opts.staging_bytes = HR_MIN_STAGING_BYTES;
	opts.readers = 2;
	bed_load(&s.bed, device, &opts);
	while (fired) {
		hr__fault_arm(point, ++s.n, errno_value);
		play(&s);
		fired = hr__fault_fired();
		hr__fault_arm(NULL, 0, 0);
	}
	printf("# %s, %s: %llu times\n", device, point ? point : "calls", (unsigned long long)s.n);
	assert_true(s.n > 15);
	for (uint64_t i = 0; i < s.bed.n_tensors; i++)
		free(s.want[i]);
	bed_close(&s.bed);
}

static void every_allocation_fails_once(void **state)
{
	(void)state;
	until_it_is_not_met("cpu", "malloc", ENOMEM);
	until_it_is_not_met("cuda:0", "malloc", ENOMEM);
}

static void every_system_call_fails_once(void **state)
{
	(void)state;
	until_it_is_not_met("cpu", NULL, EIO);
	until_it_is_not_met("cpu", NULL, ENOMEM);
}

static void every_driver_call_fails_once(void **state)
{
	(void)state;
	until_it_is_not_met("cuda:0", NULL, EIO);
	until_it_is_not_met("cuda:0", NULL, 2); /* ENOENT, and the driver's code for memory */
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(every_allocation_fails_once),
		cmocka_unit_test(every_system_call_fails_once),
		cmocka_unit_test(every_driver_call_fails_once),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
