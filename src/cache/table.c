/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The table of entries, and what is counted. Open addressing with linear probing; what is deleted is closed up behind,
 * so that a search ends at the first empty place. All of it under the lock.
 */
#include "cache.h"

#include "core/mem.h"

#include <string.h>

#define FIRST_TABLE 64
#define MANY_MODELS 64 /* beyond which those with nothing here are forgotten */
#define HASH_FACTOR UINT64_C(0x9e3779b97f4a7c15)

/* ---- by group ---- */

static size_t home_of(const hr_cache *cache, const hr_group *group)
{
	return (size_t)((group->id * HASH_FACTOR) >> 32) & (cache->n_table - 1);
}

struct hr__entry *hr__cache_find(const hr_cache *cache, const hr_group *group)
{
	if (!cache->table)
		return NULL;
	for (size_t at = home_of(cache, group); cache->table[at]; at = (at + 1) & (cache->n_table - 1))
		if (cache->table[at]->group == group)
			return cache->table[at];
	return NULL;
}

static void put(hr_cache *cache, struct hr__entry *entry)
{
	size_t at = home_of(cache, entry->group);

	while (cache->table[at])
		at = (at + 1) & (cache->n_table - 1);
	cache->table[at] = entry;
}

static int make_room(hr_cache *cache)
{
	struct hr__entry **old = cache->table;
	size_t n_old = cache->n_table, n = n_old ? 2 * n_old : FIRST_TABLE;
	struct hr__entry **bigger;

	if (old && 2 * (cache->n_entries + 1) <= n_old)
		return 0;
	bigger = hr__calloc(n, sizeof(*bigger));
	if (!bigger)
		return HR_E_NOMEM;
	cache->table = bigger;
	cache->n_table = n;
	for (size_t i = 0; old && i < n_old; i++)
		if (old[i])
			put(cache, old[i]);
	hr__free(old);
	return 0;
}

static void take_out(hr_cache *cache, const struct hr__entry *entry)
{
	size_t mask = cache->n_table - 1, at = home_of(cache, entry->group), next;

	while (cache->table[at] != entry)
		at = (at + 1) & mask;
	for (next = (at + 1) & mask; cache->table[next]; next = (next + 1) & mask) {
		size_t home = home_of(cache, cache->table[next]->group);

		if (((next - home) & mask) < ((next - at) & mask)) /* it would not be found at `at` */
			continue;
		cache->table[at] = cache->table[next];
		at = next;
	}
	cache->table[at] = NULL;
}

/* ---- counts ---- */

static void forget_models(hr_cache *cache)
{
	struct hr__cache_counts **at = &cache->whole.next;
	size_t n = 0;

	for (; *at; at = &(*at)->next)
		n++;
	if (n < MANY_MODELS)
		return;
	for (at = &cache->whole.next; *at;) {
		struct hr__cache_counts *counts = *at;

		if (counts->n_entries > 0) {
			at = &counts->next;
			continue;
		}
		*at = counts->next;
		hr__free(counts);
	}
}

static struct hr__cache_counts *counts_of(hr_cache *cache, const hr_model *model)
{
	uint64_t id = hr__model_id(model);
	struct hr__cache_counts *counts = cache->whole.next;

	while (counts && counts->model != id)
		counts = counts->next;
	if (counts)
		return counts;
	forget_models(cache);
	counts = hr__calloc(1, sizeof(*counts));
	if (!counts)
		return NULL;
	counts->model = id;
	counts->next = cache->whole.next;
	cache->whole.next = counts;
	return counts;
}

void hr__cache_event(hr_cache *cache, uint32_t kind, const struct hr__entry *entry, uint64_t start_ns)
{
	struct hr_cache_event *event;
	uint64_t now;

	if (cache->n_events == 0)
		return;
	now = hr__os_now_ns();
	if (cache->next_event - cache->first_event == cache->n_events) {
		cache->first_event++;
		cache->lost_events++;
	}
	event = &cache->events[cache->next_event++ % cache->n_events];
	*event = (struct hr_cache_event){.start_ns = start_ns ? start_ns : now,
					 .duration_ns = start_ns ? now - start_ns : 0,
					 .group = entry->group->id,
					 .bytes = entry->group->bytes,
					 .kind = kind,
					 .prefetch = entry->is_hint};
}

/* ---- entries ---- */

void hr__cache_update_held(struct hr__entry *entry)
{
	hr_cache *cache = entry->cache;
	bool is_held = entry->lease.count > 0 || entry->n_waiting > 0 || entry->is_ending ||
		       entry->state == HR__ENTRY_PREPARING;
	uint64_t bytes = is_held && entry->place ? entry->place->bytes : 0;

	entry->node.is_held = is_held;
	cache->held_bytes += bytes - entry->held_bytes;
	entry->held_bytes = bytes;
}

void hr__cache_attach(struct hr__entry *entry, struct hr__place *place)
{
	entry->place = place;
	entry->counts->now.used_bytes += place->bytes;
	hr__cache_update_held(entry);
}

struct hr__place *hr__cache_detach(struct hr__entry *entry)
{
	struct hr__place *place = entry->place;

	if (!place)
		return NULL;
	entry->place = NULL;
	entry->counts->now.used_bytes -= place->bytes;
	hr__cache_update_held(entry);
	return place;
}

int hr__cache_add(hr_cache *cache, hr_group *group, bool is_hint, struct hr__entry **out)
{
	struct hr__cache_counts *counts = counts_of(cache, group->model);
	struct hr__entry *entry = counts ? hr__calloc(1, sizeof(*entry)) : NULL;

	*out = NULL;
	if (!entry || make_room(cache)) {
		hr__free(entry);
		return HR_E_NOMEM;
	}
	entry->cache = cache;
	entry->group = hr_group_acquire(group);
	entry->counts = counts;
	counts->n_entries++;
	entry->lease.owner = &hr__cache_lease;
	entry->state = HR__ENTRY_PREPARING;
	entry->is_hint = is_hint;
	hr__policy_add(&cache->policy, &entry->node, group->id);
	hr__cache_update_held(entry);
	put(cache, entry);
	cache->n_entries++;
	HR__COUNT(entry, n_groups, 1);
	*out = entry;
	return 0;
}

static void die_if_forgotten(struct hr__entry *entry)
{
	if (entry->state != HR__ENTRY_GONE || entry->n_waiting > 0)
		return;
	entry->counts->n_entries--;
	entry->next = entry->cache->dead;
	entry->cache->dead = entry;
}

void hr__cache_remove(struct hr__entry *entry, int code)
{
	hr_cache *cache = entry->cache;

	take_out(cache, entry);
	cache->n_entries--;
	HR__COUNT(entry, n_groups, -UINT64_C(1));
	hr__policy_remove(&cache->policy, &entry->node);
	entry->state = HR__ENTRY_GONE;
	entry->code = code;
	pthread_cond_broadcast(&cache->changed);
	die_if_forgotten(entry);
}

void hr__cache_unwait(struct hr__entry *entry)
{
	entry->n_waiting--;
	hr__cache_update_held(entry);
	die_if_forgotten(entry);
}

void hr__cache_enter(hr_cache *cache)
{
	pthread_mutex_lock(&cache->lock);
}

void hr__cache_leave(hr_cache *cache)
{
	struct hr__entry *dead = cache->dead;
	struct hr__host_copy *dead_copies = cache->host.dead;

	cache->dead = NULL;
	cache->host.dead = NULL;
	pthread_mutex_unlock(&cache->lock);
	hr__host_bury(dead_copies);
	while (dead) {
		struct hr__entry *next = dead->next;

		hr_group_release(dead->group);
		hr__free(dead->error);
		hr__free(dead);
		dead = next;
	}
}
