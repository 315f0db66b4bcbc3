/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Opening and closing a cache, and what is asked of it as a whole: evicting, trimming, another budget, statistics,
 * events. A cache has no thread of its own.
 */
#include "cache.h"

#include "core/arith.h"
#include "core/mem.h"

#include <string.h>

int hr__cache_here(const hr_cache *cache)
{
	if (!cache)
		return hr__fail(HR_E_OPTS, "the cache is NULL");
	return hr__device_here(cache->device);
}

/* ---- opening ---- */

static int check_opts(const hr_loader *loader, const struct hr_cache_opts *opts)
{
	if (opts->budget_bytes == 0)
		return hr__fail(HR_E_OPTS, "hr_cache_opts.budget_bytes is 0: say how much memory the cache may hold");
	if (opts->policy > HR_POLICY_LOOP)
		return hr__fail(HR_E_OPTS, "policy %" PRIu32 ": lru (0) and loop (1) are known", opts->policy);
	if (opts->granularity_bytes & (opts->granularity_bytes - 1))
		return hr__fail(HR_E_OPTS, "a granularity of %" PRIu64 " bytes is not a power of two",
				opts->granularity_bytes);
	if (opts->host_budget_bytes && !loader->device->ops->copy_down)
		return hr__fail(HR_E_UNSUPPORTED, "%s is host memory: leave host_budget_bytes 0, raise budget_bytes",
				loader->device->spec);
	return 0;
}

static void free_cache(hr_cache *cache)
{
	struct hr__cache_counts *counts = cache->whole.next;

	while (counts) {
		struct hr__cache_counts *next = counts->next;

		hr__free(counts);
		counts = next;
	}
	hr__host_close(cache);
	hr__free(cache->events);
	hr__free(cache->memories);
	hr__free(cache->table);
	pthread_cond_destroy(&cache->changed);
	pthread_mutex_destroy(&cache->lock);
	hr__heap_unref(cache->heap);
	hr__loader_unref(cache->loader);
	hr__free(cache);
}

static int new_cache(hr_loader *loader, const struct hr_cache_opts *opts, hr_cache **out)
{
	hr_cache *cache = hr__calloc(1, sizeof(*cache));
	int error;

	if (!cache)
		return HR_E_NOMEM;
	error = hr__os_cond_init(&cache->changed);
	if (error) {
		hr__free(cache);
		return hr__fail_errno(&(struct hr__where)HR__NOWHERE, error, "make a condition variable");
	}
	pthread_mutex_init(&cache->lock, NULL);
	cache->loader = loader;
	atomic_fetch_add(&loader->count, 1);
	cache->heap = hr__heap_acquire(loader->heap);
	cache->device = cache->heap->device;
	cache->granularity = opts->granularity_bytes;
	cache->io_timeout_ms = opts->io_timeout_ms;
	cache->n_events = opts->n_events;
	cache->whole.now.budget_bytes = opts->budget_bytes;
	cache->whole.now.host_budget_bytes = opts->host_budget_bytes;
	hr__policy_start(&cache->host.policy, HR_POLICY_LRU, NULL);
	cache->memories = hr__calloc((size_t)HR__POLICY_SETS * HR__POLICY_WAYS, sizeof(*cache->memories));
	cache->events = opts->n_events ? hr__calloc(opts->n_events, sizeof(*cache->events)) : NULL;
	hr__policy_start(&cache->policy, opts->policy, cache->memories);
	if (!cache->memories || (opts->n_events && !cache->events)) {
		free_cache(cache);
		return HR_E_NOMEM;
	}
	*out = cache;
	return 0;
}

int hr_cache_open(hr_loader *loader, const struct hr_cache_opts *opts, hr_cache **out)
{
	struct hr_cache_opts own;
	int rc;

	if (!out)
		return hr__fail(HR_E_OPTS, "hr_cache_open: the result has nowhere to go (NULL)");
	*out = NULL;
	rc = hr__loader_here(loader);
	if (!rc)
		rc = hr__opts_copy(&own, sizeof(own), opts, "hr_cache_opts");
	if (!rc)
		rc = check_opts(loader, &own);
	return rc ? rc : new_cache(loader, &own, out);
}

/* ---- leaving ---- */

/* Under the lock, which it may let go: evicts all that may leave. */
static void evict_all(hr_cache *cache)
{
	struct hr__policy_node *node = hr__policy_victim(&cache->policy, false);

	for (; node; node = hr__policy_victim(&cache->policy, false))
		hr__cache_evict_entry(hr__entry_of(node));
}

static bool is_busy(const hr_cache *cache)
{
	return cache->n_entries > 0 || cache->n_inside > 0;
}

/* Gives free places back as their marks pass; false if some are left when the time is over. */
static bool give_all_back(hr_cache *cache, uint64_t deadline_ns)
{
	while (cache->free_places) {
		if (hr__cache_give_back(cache, UINT64_MAX, false))
			continue;
		if (hr__os_now_ns() >= deadline_ns)
			return false;
		pthread_mutex_unlock(&cache->lock);
		hr__os_sleep_ns(100000);
		pthread_mutex_lock(&cache->lock);
	}
	return true;
}

int hr_cache_close(hr_cache *cache, uint32_t timeout_ms)
{
	uint64_t deadline = timeout_ms == HR_FOREVER ? UINT64_MAX : hr__os_now_ns() + (uint64_t)timeout_ms * 1000000;
	uint64_t n_entries, n_pinned;
	bool in_time = true, is_done;
	int rc;

	if (!cache)
		return 0;
	rc = hr__cache_here(cache);
	if (rc)
		return rc;
	hr__cache_enter(cache);
	cache->is_closing = true;
	evict_all(cache);
	while (is_busy(cache) && in_time) {
		in_time = hr__os_cond_wait(&cache->changed, &cache->lock, deadline);
		evict_all(cache);
	}
	is_done = !is_busy(cache) && give_all_back(cache, deadline);
	cache->is_closing = false;
	n_entries = cache->n_entries;
	n_pinned = cache->whole.now.n_pinned;
	hr__cache_leave(cache);
	if (!is_done)
		return hr__fail(HR_E_BUSY,
				"%" PRIu64 " groups are in use or under way (%" PRIu64
				" pinned), or streams still use memory that was released; nothing was closed",
				n_entries, n_pinned);
	free_cache(cache);
	return 0;
}

int hr_cache_evict(hr_cache *cache, hr_group *group, uint64_t *freed_bytes)
{
	struct hr__entry *entry;
	uint64_t freed = 0;
	bool is_held;
	int rc = hr__cache_here(cache);

	if (freed_bytes)
		*freed_bytes = 0;
	if (rc)
		return rc;
	if (!group)
		return hr__fail(HR_E_OPTS, "hr_cache_evict: the group is NULL");
	hr__cache_enter(cache);
	cache->n_inside++;
	entry = hr__cache_find(cache, group);
	is_held = entry && entry->node.is_held;
	if (entry && !is_held) {
		freed = entry->place->bytes;
		hr__cache_evict_entry(entry);
	}
	cache->n_inside--;
	hr__cache_leave(cache);
	if (is_held)
		return hr__fail(HR_E_BUSY, "the group is in use or waited for: release it first");
	if (freed_bytes)
		*freed_bytes = freed;
	return 0;
}

/* Under the lock, which it may let go: what is free first, then what the policy says. */
static uint64_t trim(hr_cache *cache, uint64_t bytes)
{
	uint64_t given = hr__cache_give_back(cache, bytes, true);

	while (given < bytes) {
		struct hr__policy_node *node = hr__policy_victim(&cache->policy, false);

		if (!node)
			break;
		hr__cache_evict_entry(hr__entry_of(node));
		given += hr__cache_give_back(cache, bytes - given, true);
	}
	return given;
}

int hr_cache_trim(hr_cache *cache, uint64_t bytes, uint64_t *freed_bytes)
{
	uint64_t given;
	int rc = hr__cache_here(cache);

	if (freed_bytes)
		*freed_bytes = 0;
	if (rc)
		return rc;
	hr__cache_enter(cache);
	cache->n_inside++;
	given = trim(cache, bytes);
	cache->n_inside--;
	hr__cache_leave(cache);
	if (freed_bytes)
		*freed_bytes = given;
	return 0;
}

int hr_cache_set_budget(hr_cache *cache, uint64_t budget_bytes)
{
	uint64_t held;
	int rc = hr__cache_here(cache);

	if (rc)
		return rc;
	if (budget_bytes == 0)
		return hr__fail(HR_E_OPTS, "a budget of 0 bytes: close the cache instead");
	hr__cache_enter(cache);
	cache->n_inside++;
	held = cache->held_bytes;
	if (held <= budget_bytes) {
		cache->whole.now.budget_bytes = budget_bytes;
		if (cache->whole.now.used_bytes > budget_bytes)
			trim(cache, cache->whole.now.used_bytes - budget_bytes);
		pthread_cond_broadcast(&cache->changed);
	}
	cache->n_inside--;
	hr__cache_leave(cache);
	if (held <= budget_bytes)
		return 0;
	return hr__fail(HR_E_FULL, "%" PRIu64 " bytes are pinned or being loaded: the budget cannot be %" PRIu64, held,
			budget_bytes);
}

uint64_t hr_cache_charge(const hr_cache *cache, const hr_group *group)
{
	return hr__cache_charge_of(cache, group->bytes);
}

/* ---- what happened ---- */

int hr_cache_stats(hr_cache *cache, const hr_model *model, struct hr_cache_stats *out)
{
	struct hr_cache_stats own = {0};
	const struct hr__cache_counts *counts;
	int rc = hr__cache_here(cache);

	if (rc)
		return rc;
	hr__cache_enter(cache);
	counts = &cache->whole;
	while (model && counts && counts->model != hr__model_id(model))
		counts = counts->next;
	if (counts)
		own = counts->now;
	hr__cache_leave(cache);
	return hr__out_copy(out, &own, sizeof(own), "hr_cache_stats");
}

int hr_cache_events(hr_cache *cache, struct hr_cache_event *events, size_t n, size_t *n_found, uint64_t *n_lost)
{
	size_t found = 0;
	int rc = hr__cache_here(cache);

	if (!rc && (!n_found || (!events && n)))
		rc = hr__fail(HR_E_OPTS, "hr_cache_events: %s is NULL", n_found ? "events" : "n_found");
	if (rc)
		return rc;
	hr__cache_enter(cache);
	for (; found < n && cache->first_event < cache->next_event; found++)
		events[found] = cache->events[cache->first_event++ % cache->n_events];
	if (n_lost) {
		*n_lost = cache->lost_events;
		cache->lost_events = 0;
	}
	hr__cache_leave(cache);
	*n_found = found;
	return 0;
}
