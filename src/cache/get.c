/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Get and prefetch. A get looks at the table until it finds its group resident: it begins the load if nobody has, and
 * waits for it as one of those who do. What others did to the entry in between (a failure, a hint that found no room)
 * is known by its state when the wait ends.
 */
#include "cache.h"

#include "core/mem.h"

#include <stdio.h>
#include <string.h>

#define MAX_NAMED 4 /* holders named in a message */

/* One get on its way. */
struct getting {
	hr_cache *cache;
	hr_group *group;
	struct hr_cache_get_opts opts;
	uint64_t start_ns, room_deadline_ns, load_deadline_ns;
	uint32_t kind; /* HR_CACHE_HIT, MISS, JOIN: what it turned out to be */
};

/* ---- what to say ---- */

static const char *name_of(const hr_group *group, char *out, size_t out_bytes)
{
	size_t length;
	const char *name = hr__model_tensor_name(group->model, group->members[0].tensor, &length);

	return hr__escape(out, out_bytes, name, length);
}

/* Under the lock: those who hold the budget, the first few by name. */
static void name_holders(const hr_cache *cache, char *out, size_t out_bytes)
{
	size_t at = 0, n = 0;
	char name[96];

	out[0] = '\0';
	for (struct hr__policy_node *node = cache->policy.newest; node; node = node->older) {
		const struct hr__entry *entry = hr__entry_of(node);

		if (!entry->lease.count || !entry->place)
			continue;
		if (n < MAX_NAMED && at < out_bytes)
			at += (size_t)snprintf(out + at, out_bytes - at, "%s'%s' (%" PRIu64 ")", n ? ", " : "",
					       name_of(entry->group, name, sizeof(name)), entry->place->bytes);
		n++;
	}
	if (n > MAX_NAMED && at < out_bytes)
		snprintf(out + at, out_bytes - at, " and %zu more", n - MAX_NAMED);
	else if (n == 0)
		snprintf(out, out_bytes, "none, but loads are under way");
}

/* Under the lock. */
static int fail_full(const struct getting *g)
{
	const struct hr_cache_stats *now = &g->cache->whole.now;
	char name[96], holders[600];

	name_holders(g->cache, holders, sizeof(holders));
	return hr__fail_at(&(struct hr__where){.stage = "cache", .offset = HR_NO_OFFSET, .tensor = NULL}, HR_E_FULL,
			   "no room for the group of '%s' (%" PRIu64 " bytes) in a budget of %" PRIu64
			   " bytes, of which %" PRIu64 " are pinned, by: %s; release some, or raise the budget",
			   name_of(g->group, name, sizeof(name)), hr__cache_charge_of(g->cache, g->group->bytes),
			   now->budget_bytes, now->pinned_bytes, holders);
}

/* Under the lock. */
static int check_budget(const hr_cache *cache, const hr_group *group)
{
	uint64_t charge = hr__cache_charge_of(cache, group->bytes);
	char name[96];

	if (charge <= cache->whole.now.budget_bytes)
		return 0;
	return hr__fail_at(&(struct hr__where){.stage = "cache", .offset = HR_NO_OFFSET}, HR_E_BUDGET,
			   "the group of '%s' (%zu tensors) takes %" PRIu64
			   " bytes, more than the whole budget of %" PRIu64
			   "; raise the budget, or make smaller groups",
			   name_of(group, name, sizeof(name)), group->n, charge, cache->whole.now.budget_bytes);
}

/* ---- the parts of a get; under the lock ---- */

static void pin(struct hr__entry *entry)
{
	hr__policy_use(&entry->cache->policy, &entry->node);
	entry->is_hint = false;
	if (atomic_fetch_add(&entry->lease.count, 1) > 0)
		return;
	HR__COUNT(entry, n_pinned, 1);
	HR__COUNT(entry, pinned_bytes, entry->place->bytes);
	hr__cache_update_held(entry);
}

static void count_hit(struct hr__entry *entry)
{
	HR__COUNT(entry, n_hits, 1);
	HR__COUNT(entry, hit_bytes, entry->group->payload);
}

/* The entry exists and is not resident: somebody waits for it now. */
static void join(struct getting *g, struct hr__entry *entry)
{
	entry->n_waiting++;
	hr__cache_update_held(entry);
	if (g->kind != HR_CACHE_MISS)
		g->kind = HR_CACHE_JOIN;
	if (!entry->is_hint || entry->state != HR__ENTRY_LOADING || entry->is_ending)
		return;
	if (entry->copy ? hr__move_wait(g->cache->loader, &entry->up, 0) : hr__job_has_settled(entry->job))
		g->kind = HR_CACHE_HIT;
	else if (!entry->copy)
		hr__job_promote(entry->job);
}

/* Makes the entry and has its load begun; it counts as waited for. */
static int begin(struct getting *g, struct hr__entry **out)
{
	int rc = check_budget(g->cache, g->group);

	if (!rc)
		rc = hr__cache_add(g->cache, g->group, false, out);
	if (rc)
		return rc;
	g->kind = HR_CACHE_MISS;
	(*out)->n_waiting++;
	rc = hr__cache_find_place(*out, false, g->opts.wait_stream, g->room_deadline_ns);
	if (rc == HR_E_FULL)
		fail_full(g);
	if (rc)
		hr__cache_remove(*out, 0);
	else
		rc = hr__cache_start_load(*out, false, g->opts.wait_stream);
	return rc;
}

static int fail_waiting(const struct getting *g, const struct hr__entry *entry)
{
	char name[96];

	if (entry->state == HR__ENTRY_GONE && entry->error)
		return hr__error_restore(entry->error);
	if (entry->state == HR__ENTRY_GONE)
		return hr__fail(entry->code, "the load of the group of '%s' failed",
				name_of(g->group, name, sizeof(name)));
	if (entry->is_short_of_room)
		return fail_full(g);
	return hr__fail(HR_E_PENDING, "the group of '%s' has not arrived within %" PRIu32 " ms; its load goes on",
			name_of(g->group, name, sizeof(name)), g->opts.load_timeout_ms);
}

/* One look at the table. 0 with *out: the entry is pinned; 0 without: look again. */
static int look(struct getting *g, struct hr__entry **out)
{
	struct hr__entry *entry = hr__cache_find(g->cache, g->group);
	int rc = 0;

	*out = NULL;
	if (entry && entry->state != HR__ENTRY_RESIDENT) {
		join(g, entry);
	} else if (!entry) {
		rc = begin(g, &entry);
		if (!entry)
			return rc;
	} else {
		entry->n_waiting++;
	}
	if (!rc)
		hr__cache_await(entry, g->room_deadline_ns, g->load_deadline_ns);
	if (!rc && entry->state == HR__ENTRY_RESIDENT) {
		pin(entry);
		*out = entry;
	} else if (!rc && (entry->state != HR__ENTRY_GONE || entry->code)) {
		rc = fail_waiting(g, entry);
	}
	hr__cache_unwait(entry);
	return rc;
}

static void count_get(const struct getting *g, struct hr__entry *entry)
{
	if (g->kind == HR_CACHE_HIT)
		count_hit(entry);
	else if (g->kind == HR_CACHE_JOIN)
		HR__COUNT(entry, n_joins, 1);
	else
		HR__COUNT(entry, n_misses, 1);
	HR__COUNT(entry, load_wait_ns, hr__os_now_ns() - g->start_ns);
	hr__cache_event(g->cache, g->kind, entry, g->start_ns);
}

static uint64_t deadline_after(uint64_t now_ns, uint32_t timeout_ms)
{
	return timeout_ms == HR_FOREVER ? UINT64_MAX : now_ns + (uint64_t)timeout_ms * 1000000;
}

/* The bytes are there, the host has seen that; what is left is to tell the consumer's stream. */
static int signal_stream(const struct getting *g, struct hr__entry *entry)
{
	hr_device *device = g->cache->device;
	struct hr__device_error error = {0};
	int rc;

	if (!g->opts.signal_stream)
		return 0;
	rc = device->ops->signal(device, g->opts.signal_stream, &error);
	if (!rc)
		return 0;
	hr_buffer_release(&entry->lease);
	return hr__device_fail(device, rc, "cannot signal the caller's stream", &error);
}

/* All but a plain hit. */
static int get_slowly(struct getting *g, hr_buffer **out)
{
	hr_cache *cache = g->cache;
	struct hr__entry *entry = NULL;
	int rc = 0;

	g->start_ns = hr__os_now_ns();
	g->room_deadline_ns = g->opts.room_timeout_ms ? deadline_after(g->start_ns, g->opts.room_timeout_ms) : 0;
	g->load_deadline_ns = deadline_after(g->start_ns,
					     g->opts.load_timeout_ms ? g->opts.load_timeout_ms : HR_FOREVER);
	hr__cache_enter(cache);
	cache->n_inside++;
	while (!rc && !entry)
		rc = look(g, &entry);
	if (entry)
		count_get(g, entry);
	cache->n_inside--;
	hr__cache_leave(cache);
	if (!rc)
		rc = signal_stream(g, entry);
	if (!rc)
		*out = &entry->lease;
	return rc;
}

/* ---- public ---- */

static int check_call(const char *call, const hr_cache *cache, const hr_group *group,
		      const struct hr_cache_get_opts *opts, struct hr_cache_get_opts *own)
{
	int rc = hr__cache_here(cache);

	if (rc)
		return rc;
	if (!group)
		return hr__fail(HR_E_OPTS, "%s: the group is NULL", call);
	rc = hr__opts_copy(own, sizeof(*own), opts, "hr_cache_get_opts");
	if (!rc && (own->wait_stream || own->signal_stream) && !(cache->device->ops->caps & HR__DEVICE_STREAMS))
		rc = hr__fail(HR_E_OPTS, "%s has no streams: leave wait_stream and signal_stream NULL",
			      cache->device->spec);
	return rc;
}

int hr_cache_get(hr_cache *cache, hr_group *group, const struct hr_cache_get_opts *opts, hr_buffer **out)
{
	struct getting g = {.cache = cache, .group = group, .kind = HR_CACHE_HIT};
	struct hr__entry *entry;
	int rc;

	if (!out)
		return hr__fail(HR_E_OPTS, "hr_cache_get: the result has nowhere to go (NULL)");
	*out = NULL;
	rc = check_call("hr_cache_get", cache, group, opts, &g.opts);
	if (rc)
		return rc;
	pthread_mutex_lock(&cache->lock);
	entry = hr__cache_find(cache, group);
	if (entry && entry->state == HR__ENTRY_RESIDENT) {
		pin(entry);
		count_hit(entry);
		hr__cache_event(cache, HR_CACHE_HIT, entry, 0);
		*out = &entry->lease;
	}
	pthread_mutex_unlock(&cache->lock);
	return *out ? 0 : get_slowly(&g, out);
}

/* Under the lock. */
static int begin_hint(hr_cache *cache, hr_group *group, void *wait_stream)
{
	struct hr__entry *entry;
	int rc = check_budget(cache, group);

	if (!rc)
		rc = hr__cache_add(cache, group, true, &entry);
	if (rc)
		return rc;
	entry->n_waiting++;
	rc = hr__cache_find_place(entry, true, wait_stream, 0);
	if (rc == HR_E_FULL) {
		HR__COUNT(entry, n_passed_over, 1);
		hr__cache_event(cache, HR_CACHE_PASS, entry, 0);
	}
	if (rc)
		hr__cache_remove(entry, 0);
	else
		rc = hr__cache_start_load(entry, entry->n_waiting == 1, wait_stream);
	if (!rc)
		HR__COUNT(entry, n_prefetches, 1);
	hr__cache_unwait(entry);
	return rc == HR_E_FULL ? 0 : rc;
}

int hr_cache_prefetch(hr_cache *cache, hr_group *group, const struct hr_cache_get_opts *opts)
{
	struct hr_cache_get_opts own;
	int rc = check_call("hr_cache_prefetch", cache, group, opts, &own);

	if (rc)
		return rc;
	hr__cache_enter(cache);
	cache->n_inside++;
	if (!hr__cache_find(cache, group))
		rc = begin_hint(cache, group, own.wait_stream);
	cache->n_inside--;
	hr__cache_leave(cache);
	return rc;
}
