/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The cache under sixteen threads at once: gets with and without patience, pins held and shared, hints, evictions,
 * trims, changes of the budget, statistics, caches of a thread's own that open and close beside, and loads that fail.
 * What must hold:
 *
 *  - every lease holds the group's bytes for as long as it is pinned;
 *  - the budget is never exceeded;
 *  - the group whose bytes cannot be read fails for everybody, and nothing else does;
 *  - in the end everything can be closed, and the loader is idle.
 *
 * Threads answer by value: the first sentence of what went wrong.
 */
#include "loadtest.h"

#include "cache/cache.h"
#include "fakes/fake_engine.h"

#include <errno.h>
#include <unistd.h>

#define N_THREADS 16
#define N_GROUPS  12
#define MAX_PINS  2
#define BAD       7 /* the group whose bytes cannot be read */

struct world {
	struct bed bed;
	hr_cache *cache;
	hr_group *groups[N_GROUPS];
	unsigned char *bytes[N_GROUPS];
	uint64_t budget, largest;
	bool is_bad;
	bool may_fail[N_GROUPS]; /* a read of theirs may cover the bad byte */
	int n_steps;
};

struct worker {
	struct world *world;
	struct test_random random;
	pthread_t thread;
	hr_buffer *pins[MAX_PINS];
	size_t n_pins;
	const char *wrong;
	int code;
};

static uint64_t pick(struct worker *w, uint64_t n)
{
	return test_random_below(&w->random, n);
}

static bool fail_worker(struct worker *w, const char *what, int code)
{
	if (!w->wrong) {
		w->wrong = what;
		w->code = code;
	}
	return false;
}

/* All of the group's bytes, gaps between members left out, as its members say. */
static bool lease_is_right(const struct world *world, size_t i, hr_buffer *buffer)
{
	const hr_group *group = world->groups[i];
	unsigned char *got = malloc(group->bytes + 1);
	bool right = hr_buffer_bytes(buffer) == group->bytes && hr_buffer_read(buffer, 0, got, group->bytes) == 0;

	for (size_t m = 0; right && m < group->n; m++) {
		struct hr_tensor t = HR_TENSOR_INIT;

		hr_model_tensor(world->bed.model, group->members[m].tensor, &t);
		right = memcmp(got + group->members[m].at, world->bytes[i] + group->members[m].at, t.bytes) == 0;
	}
	free(got);
	return right;
}

static void drop_one(struct worker *w)
{
	if (w->n_pins > 0)
		hr_buffer_release(w->pins[--w->n_pins]);
}

static bool is_excused(const struct world *world, size_t i, int rc)
{
	if (rc == HR_E_FULL || rc == HR_E_PENDING || rc == HR_E_BUDGET)
		return true;
	return rc == HR_E_IO && world->is_bad && world->may_fail[i];
}

static bool get_one(struct worker *w, hr_cache *cache)
{
	struct hr_cache_get_opts opts = HR_CACHE_GET_OPTS_INIT;
	size_t i = pick(w, N_GROUPS);
	hr_buffer *buffer;
	int rc;

	opts.room_timeout_ms = pick(w, 2) ? 0 : (uint32_t)pick(w, 8);
	opts.load_timeout_ms = pick(w, 3) ? 0 : 1;
	rc = hr_cache_get(cache, w->world->groups[i], &opts, &buffer);
	if (rc)
		return is_excused(w->world, i, rc) || fail_worker(w, "a get failed", rc);
	if (w->world->is_bad && i == BAD)
		return fail_worker(w, "bytes that cannot be read were handed out", 0);
	if (!lease_is_right(w->world, i, buffer))
		return fail_worker(w, "a lease holds wrong bytes", (int)i);
	if (pick(w, 4) == 0) {
		hr_buffer_acquire(buffer);
		usleep((useconds_t)pick(w, 200));
		if (!lease_is_right(w->world, i, buffer))
			return fail_worker(w, "a lease's bytes have changed", (int)i);
		hr_buffer_release(buffer);
	}
	if (cache == w->world->cache && pick(w, 4) == 0) {
		if (w->n_pins == MAX_PINS)
			drop_one(w);
		w->pins[w->n_pins++] = buffer;
	} else {
		hr_buffer_release(buffer);
	}
	return true;
}

/* What changes the cache, and may always be asked. */
static bool meddle(struct worker *w, hr_cache *cache)
{
	struct hr_cache_stats stats = HR_CACHE_STATS_INIT;
	struct hr_cache_event events[8];
	size_t i = pick(w, N_GROUPS), n;
	int rc;

	switch (pick(w, 6)) {
	case 0:
		rc = hr_cache_evict(cache, w->world->groups[i], NULL);
		return rc == 0 || rc == HR_E_BUSY || fail_worker(w, "an eviction failed", rc);
	case 1:
		rc = hr_cache_trim(cache, pick(w, 3 * w->world->largest), NULL);
		return rc == 0 || fail_worker(w, "a trim failed", rc);
	case 2:
		rc = hr_cache_events(cache, events, 8, &n, NULL);
		return rc == 0 || fail_worker(w, "no events", rc);
	case 3:
		if (pick(w, 10))
			return true;
		rc = hr_cache_set_budget(cache, w->world->budget + pick(w, w->world->budget));
		return rc == 0 || rc == HR_E_FULL || fail_worker(w, "a change of the budget failed", rc);
	default:
		rc = hr_cache_stats(cache, pick(w, 2) ? w->world->bed.model : NULL, &stats);
		return rc == 0 || fail_worker(w, "no statistics", rc);
	}
}

static bool use_own_cache(struct worker *w)
{
	struct hr_cache_opts opts = HR_CACHE_OPTS_INIT;
	bool good = true;
	hr_cache *cache;
	int rc;

	opts.budget_bytes = w->world->largest + pick(w, w->world->largest);
	opts.policy = (uint32_t)pick(w, 2);
	rc = hr_cache_open(w->world->bed.loader, &opts, &cache);
	if (rc)
		return fail_worker(w, "a cache did not open", rc);
	for (int i = 0; i < 5 && good; i++) {
		good = hr_cache_prefetch(cache, w->world->groups[pick(w, N_GROUPS)], NULL) == 0 ||
		       hr_error_last()->code == HR_E_BUDGET || fail_worker(w, "a hint failed", hr_error_last()->code);
		good = good && get_one(w, cache);
	}
	rc = hr_cache_close(cache, 20000);
	return (rc == 0 || fail_worker(w, "a cache did not close", rc)) && good;
}

static void *work(void *arg)
{
	struct worker *w = arg;
	bool good = true;
	int rc;

	for (int i = 0; i < w->world->n_steps && good; i++) {
		uint64_t what = pick(w, 100);

		if (what < 55) {
			good = get_one(w, w->world->cache);
		} else if (what < 75) {
			rc = hr_cache_prefetch(w->world->cache, w->world->groups[pick(w, N_GROUPS)], NULL);
			good = rc == 0 || fail_worker(w, "a hint failed", rc);
		} else if (what < 85) {
			drop_one(w);
		} else if (what < 99) {
			good = meddle(w, w->world->cache);
		} else {
			good = use_own_cache(w);
		}
	}
	if (pick(w, 2)) /* the others are released while the cache is being closed */
		while (w->n_pins > 0)
			drop_one(w);
	return NULL;
}

static void make_groups(struct world *world)
{
	uint64_t per = world->bed.n_tensors / N_GROUPS, tensors[64];

	for (size_t i = 0; i < N_GROUPS; i++) {
		for (uint64_t t = 0; t < per; t++)
			tensors[t] = i * per + (t * 7 + 3) % per; /* 7 and `per` have no factor in common */
		assert_ok(hr_group_new(world->bed.model, tensors, per, &world->groups[i]));
		world->bytes[i] = calloc(1, world->groups[i]->bytes + 1);
		for (size_t m = 0; m < per; m++) {
			struct hr_tensor t = HR_TENSOR_INIT;
			unsigned char *bytes;

			assert_ok(hr_model_tensor(world->bed.model, world->groups[i]->members[m].tensor, &t));
			bytes = plain_read(world->bed.model, &t);
			memcpy(world->bytes[i] + world->groups[i]->members[m].at, bytes, t.bytes);
			free(bytes);
		}
		world->largest = world->largest > world->groups[i]->bytes ? world->largest : world->groups[i]->bytes;
	}
	world->largest += 4096;
}

/* Whether a read of the group may cover a byte of its file: as wide as a direct read is. */
static bool may_cover(const struct world *world, const hr_group *group, uint64_t offset)
{
	uint64_t first = UINT64_MAX, end = 0;

	for (size_t m = 0; m < group->n; m++) {
		struct hr_tensor t = HR_TENSOR_INIT;

		assert_ok(hr_model_tensor(world->bed.model, group->members[m].tensor, &t));
		first = t.offset < first ? t.offset : first;
		end = t.offset + t.bytes > end ? t.offset + t.bytes : end;
	}
	return offset + 4096 > first && offset < end + 4096;
}

/* A byte of the bad group, in its file. The fake engine fails at that byte of any file. */
static void choose_bad_byte(struct world *world, struct fake_engine_settings *fake)
{
	struct hr_tensor t = HR_TENSOR_INIT;

	for (size_t m = 0; m < world->groups[BAD]->n; m++) {
		assert_ok(hr_model_tensor(world->bed.model, world->groups[BAD]->members[m].tensor, &t));
		if (t.bytes > 0)
			fake->fail_offset = t.offset;
	}
	fake->fail_errno = EIO;
	for (size_t i = 0; i < N_GROUPS; i++)
		world->may_fail[i] = may_cover(world, world->groups[i], fake->fail_offset);
}

static void *release_pins(void *arg)
{
	struct worker *workers = arg;

	usleep(2000);
	for (size_t i = 0; i < N_THREADS; i++)
		while (workers[i].n_pins > 0)
			drop_one(&workers[i]);
	return NULL;
}

static void close_under_pins(struct world *world, struct worker *workers)
{
	pthread_t thread;
	size_t n = 0;

	for (size_t i = 0; i < N_THREADS; i++)
		n += workers[i].n_pins;
	assert_true(world->cache->whole.now.n_pinned <= n);
	assert_true(world->cache->whole.now.used_bytes <= world->cache->whole.now.budget_bytes);
	if (n > 0)
		assert_fails(hr_cache_close(world->cache, 0), HR_E_BUSY);
	assert_int_equal(pthread_create(&thread, NULL, release_pins, workers), 0);
	assert_ok(hr_cache_close(world->cache, 20000));
	pthread_join(thread, NULL);
}

static void run_round(struct test_random *random, const char *device, bool with_failures, int n_steps)
{
	static const char *const engines[] = {NULL, "fake", "fake-queue", "fake"};
	struct fake_engine_settings fake = {.seed = test_random_next(random), .short_reads = 1, .delay_ns = 50000};
	struct hr_loader_opts opts = HR_LOADER_OPTS_INIT;
	struct hr_cache_opts cache = HR_CACHE_OPTS_INIT;
	struct worker *workers = calloc(N_THREADS, sizeof(*workers));
	struct world world = {.n_steps = n_steps};

	bed_open(&world.bed, test_random_next(random) >> 32, (size_t)N_GROUPS * 5, 20000);
	make_groups(&world);
	world.is_bad = with_failures;
	if (with_failures)
		choose_bad_byte(&world, &fake);
	fake_engine_set(&fake);
	opts.engine = with_failures ? "fake" : engines[test_random_below(random, 4)];
	opts.slot_bytes = HR_MIN_SLOT_BYTES;
	opts.staging_bytes = HR_MIN_SLOT_BYTES * (2 + test_random_below(random, 6));
	bed_load(&world.bed, device, &opts);
	world.budget = cache.budget_bytes = world.largest * (1 + test_random_below(random, 8));
	cache.policy = (uint32_t)test_random_below(random, 2);
	cache.n_events = 100;
	if (strcmp(device, "cpu") != 0 && test_random_below(random, 3))
		cache.host_budget_bytes = world.largest * (1 + test_random_below(random, N_GROUPS));
	assert_ok(hr_cache_open(world.bed.loader, &cache, &world.cache));
	for (size_t i = 0; i < N_THREADS; i++) {
		workers[i].world = &world;
		workers[i].random.state = test_random_next(random);
		assert_int_equal(pthread_create(&workers[i].thread, NULL, work, &workers[i]), 0);
	}
	for (size_t i = 0; i < N_THREADS; i++)
		pthread_join(workers[i].thread, NULL);
	for (size_t i = 0; i < N_THREADS; i++)
		if (workers[i].wrong)
			fail_msg("%s: %s (%d): %s", workers[i].wrong, hr_error_name(workers[i].code), workers[i].code,
				 opts.engine ? opts.engine : "auto");
	close_under_pins(&world, workers);
	for (size_t i = 0; i < N_GROUPS; i++) {
		hr_group_release(world.groups[i]);
		free(world.bytes[i]);
	}
	bed_close(&world.bed);
	fake_engine_set(NULL);
	free(workers);
}

static void run_rounds(const char *device, bool with_failures, uint64_t seed)
{
	const char *rounds = getenv("HR_ROUNDS");
	int n = rounds ? atoi(rounds) : 6;
	struct test_random random;

	if (!has_device(device))
		skip_for("%s", hr_error_last()->message);
	test_random_start(&random, seed);
	for (int i = 0; i < n; i++)
		run_round(&random, device, with_failures, 60);
}

static void sixteen_threads_get_the_right_bytes_on_cpu(void **state)
{
	(void)state;
	run_rounds("cpu", false, 11);
}

static void sixteen_threads_get_the_right_bytes_on_a_gpu(void **state)
{
	(void)state;
	run_rounds("cuda:0", false, 12); /* with and without a host tier */
}

static void what_cannot_be_read_fails_for_everybody_and_nothing_else_does(void **state)
{
	(void)state;
	run_rounds("cpu", true, 13);
	run_rounds("cuda:0", true, 14);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(sixteen_threads_get_the_right_bytes_on_cpu),
		cmocka_unit_test(sixteen_threads_get_the_right_bytes_on_a_gpu),
		cmocka_unit_test(what_cannot_be_read_fails_for_everybody_and_nothing_else_does),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
