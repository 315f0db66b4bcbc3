/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The cache against a slow model of it. Random gets, walks, releases, hints, evictions, trims and changes of the
 * budget over groups of a few sizes; after every step the model, which knows the rules of docs/cache.md and nothing
 * else, must agree with the cache about who is resident, who is pinned, what is free, in which order, and what was
 * counted; and the cache's own books must balance. Bytes are compared at every tenth get.
 *
 * HR_SEED=n repeats a run, HR_STEPS=n makes it longer.
 */
#include "loadtest.h"

#include "cache/cache.h"

#define N_GROUPS   24
#define MAX_PLACES 256
#define MAX_PINS   6

/* ---- the model ---- */

struct slow_group {
	uint64_t charge;
	bool is_there, is_fresh;
	uint32_t pins;
	uint64_t place; /* bytes of its memory */
	uint64_t added, order, last_use, intervals[2];
};

struct slow {
	struct slow_group groups[N_GROUPS];
	uint64_t budget, used, clock, order, largest;
	uint64_t free[MAX_PLACES]; /* oldest first */
	size_t n_free;
	uint32_t policy;
	uint64_t n_evictions, n_given_up, n_passed_over, n_full;
};

static bool slow_is_young(const struct slow *slow, const struct slow_group *g)
{
	return g->is_fresh && slow->clock - g->added <= HR__POLICY_PATIENCE;
}

/* Whether x leaves before y under loop: written out, not ranked. */
static bool slow_leaves_before(const struct slow *slow, const struct slow_group *x, const struct slow_group *y)
{
	const struct slow_group *both[2] = {x, y};
	uint64_t interval[2];
	bool overdue[2];

	for (int i = 0; i < 2; i++) {
		interval[i] = both[i]->intervals[0] > both[i]->intervals[1] ? both[i]->intervals[0]
									    : both[i]->intervals[1];
		overdue[i] = both[i]->is_fresh ||
			     (interval[i] && slow->clock - both[i]->last_use > 2 * interval[i] + HR__POLICY_SLACK);
	}
	if (overdue[0] != overdue[1])
		return overdue[0];
	if (overdue[0])
		return x->last_use != y->last_use ? x->last_use < y->last_use : x->order > y->order;
	if (!interval[0] != !interval[1])
		return !interval[0];
	if (!interval[0])
		return x->last_use != y->last_use ? x->last_use > y->last_use : x->order > y->order;
	if (x->last_use + interval[0] != y->last_use + interval[1])
		return x->last_use + interval[0] > y->last_use + interval[1];
	return x->order > y->order;
}

static struct slow_group *slow_victim(struct slow *slow, bool for_hint)
{
	struct slow_group *best = NULL;

	for (size_t i = 0; i < N_GROUPS; i++) {
		struct slow_group *g = &slow->groups[i];

		if (!g->is_there || g->pins || slow_is_young(slow, g))
			continue;
		if (!best ||
		    (slow->policy == HR_POLICY_LRU ? g->order < best->order : slow_leaves_before(slow, g, best)))
			best = g;
	}
	for (size_t i = 0; !for_hint && i < N_GROUPS && (!best || slow_is_young(slow, best)); i++) {
		struct slow_group *g = &slow->groups[i];

		if (g->is_there && !g->pins && (!best || g->order > best->order))
			best = g;
	}
	return best;
}

static uint64_t slow_pop(struct slow *slow, size_t at)
{
	uint64_t bytes = slow->free[at];

	memmove(&slow->free[at], &slow->free[at + 1], (--slow->n_free - at) * sizeof(bytes));
	return bytes;
}

static uint64_t slow_give_back(struct slow *slow, uint64_t bytes)
{
	uint64_t given = 0;

	while (slow->n_free && given < bytes)
		given += slow_pop(slow, 0);
	slow->used -= given;
	return given;
}

static void slow_evict(struct slow *slow, struct slow_group *g)
{
	g->is_there = false;
	slow->free[slow->n_free++] = g->place;
	if (g->is_fresh)
		slow->n_given_up++; /* or evicted, if its load had ended: not told apart */
	else
		slow->n_evictions++;
}

static uint64_t slow_trim(struct slow *slow, uint64_t bytes)
{
	uint64_t given = slow_give_back(slow, bytes);

	while (given < bytes) {
		struct slow_group *g = slow_victim(slow, false);

		if (!g)
			break;
		slow_evict(slow, g);
		given += slow_give_back(slow, bytes - given);
	}
	return given;
}

static uint64_t slow_held(const struct slow *slow, bool for_hint)
{
	uint64_t held = 0;

	for (size_t i = 0; i < N_GROUPS; i++)
		if (slow->groups[i].is_there &&
		    (slow->groups[i].pins || (for_hint && slow_is_young(slow, &slow->groups[i]))))
			held += slow->groups[i].place;
	return held;
}

static bool slow_may_take(const struct slow *slow, uint64_t place, uint64_t charge)
{
	if (place <= charge)
		return place == charge;
	if (place > charge + charge / 8 && (place > 2 * charge || place > charge + slow->budget / 16))
		return false;
	return slow_held(slow, false) + place + slow->largest <= slow->budget;
}

static bool slow_take(struct slow *slow, struct slow_group *g, bool for_hint)
{
	if (g->charge > slow->largest)
		slow->largest = g->charge;
	for (;;) {
		size_t best = MAX_PLACES;
		struct slow_group *victim;

		for (size_t i = 0; i < slow->n_free; i++)
			if (slow_may_take(slow, slow->free[i], g->charge) &&
			    (best == MAX_PLACES || slow->free[i] < slow->free[best]))
				best = i;
		if (best != MAX_PLACES) {
			g->place = slow_pop(slow, best);
			return true;
		}
		if (slow->used + g->charge <= slow->budget) {
			slow->used += g->charge;
			g->place = g->charge;
			return true;
		}
		if (slow_held(slow, for_hint) + g->charge > slow->budget)
			return false;
		if (slow_give_back(slow, slow->used + g->charge - slow->budget))
			continue;
		victim = slow_victim(slow, for_hint);
		slow_evict(slow, victim);
	}
}

static bool slow_bring(struct slow *slow, struct slow_group *g, bool for_hint)
{
	if (g->is_there)
		return true;
	if (!slow_take(slow, g, for_hint))
		return false;
	g->is_there = g->is_fresh = true;
	g->added = slow->clock;
	g->order = ++slow->order;
	return true;
}

static void slow_use(struct slow *slow, struct slow_group *g)
{
	slow->clock++;
	if (g->last_use) {
		g->intervals[1] = g->intervals[0];
		g->intervals[0] = slow->clock - g->last_use;
	}
	g->last_use = slow->clock;
	g->order = ++slow->order;
	g->is_fresh = false;
	g->pins++;
}

/* ---- the real one ---- */

struct world {
	struct slow slow;
	struct test_random random;
	char *dir;
	hr_model *model;
	hr_device *device;
	hr_loader *loader;
	hr_cache *cache;
	hr_group *groups[N_GROUPS];
	unsigned char *bytes[N_GROUPS];
	hr_buffer *pins[MAX_PINS];
	size_t pinned[MAX_PINS]; /* whose */
	size_t n_pins, walk;
	uint64_t n_gets, n_hits, step;
};

static uint64_t pick(struct world *w, uint64_t n)
{
	return test_random_below(&w->random, n);
}

static void world_open(struct world *w, uint32_t policy)
{
	static const uint64_t sizes[] = {1000, 1000, 1000, 1100, 2500, 300};
	struct hr_loader_opts opts = HR_LOADER_OPTS_INIT;
	struct hr_cache_opts cache = HR_CACHE_OPTS_INIT;
	struct test_tensor tensors[N_GROUPS];
	char names[N_GROUPS][16], *path;

	w->dir = make_temp_dir();
	path = path_in(w->dir, "a.safetensors");
	for (size_t i = 0; i < N_GROUPS; i++) {
		snprintf(names[i], sizeof(names[i]), "t%zu", i);
		tensors[i] = (struct test_tensor){names[i], "U8", sizes[i % 6]};
	}
	write_safetensors(path, tensors, N_GROUPS, 77);
	assert_ok(hr_model_open(path, NULL, &w->model));
	opts.engine = "pread";
	opts.readers = 1;
	opts.staging_bytes = 1 << 20;
	assert_ok(hr_device_open("cpu", &w->device));
	assert_ok(hr_loader_open(w->device, &opts, &w->loader));
	w->slow.policy = cache.policy = policy;
	w->slow.budget = cache.budget_bytes = 9000;
	assert_ok(hr_cache_open(w->loader, &cache, &w->cache));
	for (uint64_t i = 0; i < N_GROUPS; i++) {
		struct hr_tensor t = HR_TENSOR_INIT;

		assert_ok(hr_group_new(w->model, &i, 1, &w->groups[i]));
		assert_ok(hr_model_tensor(w->model, i, &t));
		w->bytes[i] = plain_read(w->model, &t);
		w->slow.groups[i].charge = hr_cache_charge(w->cache, w->groups[i]);
	}
	free(path);
}

static void world_close(struct world *w)
{
	assert_ok(hr_cache_close(w->cache, 0));
	for (size_t i = 0; i < N_GROUPS; i++) {
		hr_group_release(w->groups[i]);
		free(w->bytes[i]);
	}
	hr_model_close(w->model);
	assert_ok(hr_loader_close(w->loader, HR_FOREVER));
	assert_ok(hr_device_close(w->device));
	remove_tree(w->dir);
	free(w->dir);
}

#define must(condition)                                                                                                \
	do {                                                                                                           \
		if (!(condition))                                                                                      \
			fail_msg("step %llu: not so: %s", (unsigned long long)w->step, #condition);                    \
	} while (0)

/* The cache's own books. */
static void check_books(struct world *w)
{
	const hr_cache *c = w->cache;
	uint64_t free = 0, places = 0, held = 0, n = 0;

	for (const struct hr__place *place = c->free_places; place; place = place->next)
		free += place->bytes;
	for (struct hr__policy_node *node = c->policy.oldest; node; node = node->newer) {
		const struct hr__entry *entry = hr__entry_of(node);

		must(node->newer ? node->newer->older == node : c->policy.newest == node);
		must(hr__cache_find(c, entry->group) == entry);
		must(node->is_held == (entry->lease.count > 0));
		must(entry->held_bytes == (node->is_held ? entry->place->bytes : 0));
		places += entry->place->bytes;
		held += entry->held_bytes;
		n++;
	}
	must(n == c->n_entries && n == c->whole.now.n_groups);
	must(free == c->whole.now.free_bytes);
	must(held == c->held_bytes && held == c->whole.now.pinned_bytes);
	must(places + free == c->whole.now.used_bytes);
	must(c->whole.now.used_bytes <= c->whole.now.budget_bytes);
	must(c->whole.next == NULL || c->whole.next->now.used_bytes == places);
}

/* The cache and the model of it. */
static void compare(struct world *w)
{
	const struct hr_cache_stats *now = &w->cache->whole.now;
	const struct hr__place *place = w->cache->free_places;

	must(now->used_bytes == w->slow.used && now->budget_bytes == w->slow.budget);
	for (size_t i = 0; i < w->slow.n_free; i++, place = place->next)
		must(place && place->bytes == w->slow.free[i]);
	must(!place);
	for (size_t i = 0; i < N_GROUPS; i++) {
		const struct hr__entry *entry = hr__cache_find(w->cache, w->groups[i]);
		const struct slow_group *g = &w->slow.groups[i];

		must(!entry == !g->is_there);
		if (!entry)
			continue;
		must(entry->lease.count == g->pins && entry->place->bytes == g->place);
		must(entry->node.is_fresh == g->is_fresh && entry->node.last_use == g->last_use);
	}
	must(now->n_hits + now->n_joins == w->n_hits && now->n_hits + now->n_joins + now->n_misses == w->n_gets);
	must(now->n_passed_over == w->slow.n_passed_over);
	must(now->n_evictions + now->n_failures == w->slow.n_evictions + w->slow.n_given_up);
}

static void release_one(struct world *w)
{
	size_t at;

	if (w->n_pins == 0)
		return;
	at = pick(w, w->n_pins);
	hr_buffer_release(w->pins[at]);
	w->slow.groups[w->pinned[at]].pins--;
	w->pins[at] = w->pins[--w->n_pins];
	w->pinned[at] = w->pinned[w->n_pins];
}

static void get_one(struct world *w, size_t i)
{
	struct slow_group *g = &w->slow.groups[i];
	bool was_there = g->is_there;
	unsigned char got[4096];
	hr_buffer *buffer;

	if (w->n_pins == MAX_PINS)
		release_one(w);
	if (g->charge > w->slow.budget || !slow_bring(&w->slow, g, false)) {
		assert_fails(hr_cache_get(w->cache, w->groups[i], NULL, &buffer),
			     g->charge > w->slow.budget ? HR_E_BUDGET : HR_E_FULL);
		return;
	}
	assert_ok(hr_cache_get(w->cache, w->groups[i], NULL, &buffer));
	slow_use(&w->slow, g);
	w->n_gets++;
	w->n_hits += was_there;
	if (w->n_gets % 10 == 0) {
		assert_ok(hr_buffer_read(buffer, 0, got, hr_buffer_bytes(buffer)));
		must(memcmp(got, w->bytes[i], hr_buffer_bytes(buffer)) == 0);
	}
	w->pins[w->n_pins] = buffer;
	w->pinned[w->n_pins++] = i;
}

static void hint_one(struct world *w, size_t i)
{
	struct slow_group *g = &w->slow.groups[i];
	int rc = hr_cache_prefetch(w->cache, w->groups[i], NULL);

	if (!g->is_there && g->charge > w->slow.budget) {
		must(rc == HR_E_BUDGET);
		return;
	}
	must(rc == 0);
	if (!slow_bring(&w->slow, g, true))
		w->slow.n_passed_over++;
}

static void evict_one(struct world *w, size_t i)
{
	struct slow_group *g = &w->slow.groups[i];
	uint64_t freed;
	int rc = hr_cache_evict(w->cache, w->groups[i], &freed);

	must(rc == (g->is_there && g->pins ? HR_E_BUSY : 0));
	must(freed == (g->is_there && !g->pins ? g->place : 0));
	if (g->is_there && !g->pins)
		slow_evict(&w->slow, g);
}

static void change_budget(struct world *w)
{
	uint64_t budget = 1500 + pick(w, 14000);
	int rc = hr_cache_set_budget(w->cache, budget);

	must(rc == (slow_held(&w->slow, false) > budget ? HR_E_FULL : 0));
	if (rc)
		return;
	w->slow.budget = budget;
	if (w->slow.used > budget)
		slow_trim(&w->slow, w->slow.used - budget);
}

static void step(struct world *w)
{
	uint64_t what = pick(w, 1000), freed, bytes;

	if (what < 300) {
		get_one(w, pick(w, N_GROUPS));
	} else if (what < 550) { /* a walk, with a hint ahead */
		w->walk = (w->walk + 1) % 12;
		get_one(w, w->walk);
		if (pick(w, 2))
			hint_one(w, (w->walk + 1) % 12);
	} else if (what < 850) {
		release_one(w);
	} else if (what < 950) {
		hint_one(w, pick(w, N_GROUPS));
	} else if (what < 980) {
		evict_one(w, pick(w, N_GROUPS));
	} else if (what < 998) {
		bytes = pick(w, 3000);
		assert_ok(hr_cache_trim(w->cache, bytes, &freed));
		must(freed == slow_trim(&w->slow, bytes));
	} else {
		change_budget(w);
	}
	compare(w);
	check_books(w);
}

static void run(uint32_t policy)
{
	const char *steps = getenv("HR_STEPS");
	uint64_t n = steps ? strtoull(steps, NULL, 10) : 15000;
	struct world *w = calloc(1, sizeof(*w));

	test_random_start(&w->random, 20261130);
	world_open(w, policy);
	for (w->step = 0; w->step < n; w->step++)
		step(w);
	printf("# %llu steps: %llu gets, %llu hits, %llu evictions, %llu hints passed over\n", (unsigned long long)n,
	       (unsigned long long)w->n_gets, (unsigned long long)w->n_hits,
	       (unsigned long long)w->cache->whole.now.n_evictions,
	       (unsigned long long)w->cache->whole.now.n_passed_over);
	while (w->n_pins > 0)
		release_one(w);
	world_close(w);
	free(w);
}

static void lru_does_what_a_slow_model_does(void **state)
{
	(void)state;
	run(HR_POLICY_LRU);
}

static void loop_does_what_a_slow_model_does(void **state)
{
	(void)state;
	run(HR_POLICY_LOOP);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(lru_does_what_a_slow_model_does),
		cmocka_unit_test(loop_does_what_a_slow_model_does),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
