/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory under the budget. Where a group's comes from, in this order:
 *
 *   1. a free place of its size, or somewhat larger: so the layers of a loop pass the same places on, and neither the
 *      driver nor an allocator is asked, although a model begins and ends with something smaller than a layer;
 *   2. new memory, as long as the budget has room;
 *   3. free places of other sizes are given back to the device, which leaves room for 2;
 *   4. other groups leave, as the policy says, which leaves free places for 1 or 3.
 *
 * Nobody is evicted for a group that would not fit then either: whether it will is known before, from what is held.
 * Memory is given back only when its marks have passed, and in such a way that the next allocation can have it: what
 * the device has handed out never exceeds the budget.
 */
#include "cache.h"

#include "core/arith.h"
#include "core/mem.h"

#define PAGES_FROM ((uint64_t)2 << 20) /* host memory from this size on comes in pages */
#define PAGE       4096
#define HOST_UNIT  256
#define CUDA_UNIT  512
#define POLL_NS    ((uint64_t)20 * 1000)

uint64_t hr__cache_charge_of(const hr_cache *cache, uint64_t bytes)
{
	uint64_t unit = cache->granularity, more;

	if (!unit && (cache->device->ops->caps & HR__DEVICE_HOST))
		unit = bytes >= PAGES_FROM ? PAGE : HOST_UNIT;
	else if (!unit)
		unit = CUDA_UNIT;
	return hr__add_u64(bytes, unit - 1, &more) ? hr__round_down(more, unit) : UINT64_MAX;
}

/* ---- free places; under the lock ---- */

void hr__cache_free_place(hr_cache *cache, struct hr__place *place)
{
	struct hr__place **at = &cache->free_places;

	while (*at) /* at the end: what is taken first has been free for longest */
		at = &(*at)->next;
	place->next = NULL;
	*at = place;
	cache->whole.now.free_bytes += place->bytes;
	if (cache->n_room_waiters > 0)
		pthread_cond_broadcast(&cache->changed);
}

static void unlink_place(hr_cache *cache, struct hr__place *place)
{
	struct hr__place **at = &cache->free_places;

	while (*at != place)
		at = &(*at)->next;
	*at = place->next;
	place->next = NULL;
	cache->whole.now.free_bytes -= place->bytes;
}

/* What a larger place would leave unused counts as used: an eighth of the group is little enough; as much again as
 * the group takes, if the budget hardly feels it. Neither may be what keeps out a group that would have fitted
 * beside it. */
static bool fits(const hr_cache *cache, const struct hr__place *place, uint64_t charge)
{
	uint64_t budget = cache->whole.now.budget_bytes, unused = place->bytes - charge;

	if (place->bytes <= charge)
		return place->bytes == charge;
	if (unused > charge / 8 && (unused > charge || unused > budget / 16))
		return false;
	return cache->held_bytes + place->bytes + cache->largest_charge <= budget;
}

static struct hr__place *take_free(hr_cache *cache, uint64_t charge)
{
	struct hr__place *best = NULL;

	for (struct hr__place *place = cache->free_places; place; place = place->next)
		if (fits(cache, place, charge) && (!best || place->bytes < best->bytes))
			best = place;
	if (best)
		unlink_place(cache, best);
	return best;
}

/* ---- memory from and to the device; no lock ---- */

void hr__cache_free_marks(hr_cache *cache, struct hr__mark *marks, size_t n)
{
	for (size_t i = 0; i < n; i++)
		cache->device->ops->mark_free(cache->device, marks[i].mark);
	hr__free(marks);
}

/* Whether nothing that was queued before the releases still uses the place. A driver that has failed for good touches
 * nothing any more. */
static bool marks_have_passed(hr_cache *cache, const struct hr__place *place, bool wait)
{
	struct hr__device_error ignored;

	for (size_t i = 0; i < place->n_marks; i++) {
		int done = cache->device->ops->mark_done(cache->device, place->marks[i].mark, &ignored);

		while (done == 0 && wait) {
			hr__os_sleep_ns(POLL_NS);
			done = cache->device->ops->mark_done(cache->device, place->marks[i].mark, &ignored);
		}
		if (done == 0)
			return false;
	}
	return true;
}

static void end_place(hr_cache *cache, struct hr__place *place)
{
	hr__cache_free_marks(cache, place->marks, place->n_marks);
	hr__block_free_idle(place->block);
	hr__free(place);
}

static int new_place(hr_cache *cache, uint64_t bytes, void *stream, struct hr__place **out)
{
	struct hr__place *place = hr__calloc(1, sizeof(*place));
	int rc;

	*out = NULL;
	if (!place)
		return HR_E_NOMEM;
	hr__heap_reap(cache->heap, true);
	rc = hr__block_new(cache->heap, bytes, stream, &place->block);
	if (rc) {
		hr__free(place);
		return rc;
	}
	place->bytes = bytes;
	*out = place;
	return 0;
}

/* ---- room; under the lock, which is let go and taken again ---- */

uint64_t hr__cache_give_back(hr_cache *cache, uint64_t bytes, bool wait)
{
	uint64_t given = 0;
	size_t n = 0;

	for (const struct hr__place *place = cache->free_places; place; place = place->next)
		n++;
	for (; n > 0 && given < bytes && cache->free_places; n--) {
		struct hr__place *place = cache->free_places;
		uint64_t own = place->bytes;
		bool passed;

		unlink_place(cache, place);
		cache->held_bytes += own;
		passed = hr__host_is_done(cache, place, wait);
		pthread_mutex_unlock(&cache->lock);
		passed = passed && marks_have_passed(cache, place, wait);
		if (passed)
			end_place(cache, place);
		pthread_mutex_lock(&cache->lock);
		cache->held_bytes -= own;
		if (passed) {
			cache->whole.now.used_bytes -= own;
			given += own;
		} else {
			hr__cache_free_place(cache, place);
		}
	}
	if (given && cache->n_room_waiters > 0)
		pthread_cond_broadcast(&cache->changed);
	return given;
}

void hr__cache_evict_entry(struct hr__entry *entry)
{
	hr_cache *cache = entry->cache;
	struct hr__place *place;

	if (entry->state == HR__ENTRY_LOADING) {
		hr__cache_give_up(entry);
		return;
	}
	hr__cache_event(cache, HR_CACHE_EVICT, entry, 0);
	HR__COUNT(entry, n_evictions, 1);
	HR__COUNT(entry, evicted_bytes, entry->group->bytes);
	place = hr__cache_detach(entry);
	entry->n_waiting++; /* keeps the group, which may have no other owner */
	hr__cache_remove(entry, 0);
	cache->held_bytes += place->bytes;
	hr__host_save(cache, entry->group, place);
	cache->held_bytes -= place->bytes;
	hr__cache_unwait(entry);
	hr__cache_free_place(cache, place);
}

/* New memory, counted before it is there. */
static int allocate(struct hr__entry *entry, uint64_t charge, void *stream, struct hr__place **out)
{
	hr_cache *cache = entry->cache;
	struct hr_cache_stats *now = &cache->whole.now;
	int rc;

	now->used_bytes += charge;
	now->peak_bytes = hr__max_u64(now->peak_bytes, now->used_bytes);
	cache->held_bytes += charge;
	pthread_mutex_unlock(&cache->lock);
	rc = new_place(cache, charge, stream, out);
	pthread_mutex_lock(&cache->lock);
	cache->held_bytes -= charge;
	if (rc) {
		now->used_bytes -= charge;
		if (cache->n_room_waiters > 0)
			pthread_cond_broadcast(&cache->changed);
	}
	return rc;
}

static struct hr__entry *victim_of(const hr_cache *cache, bool for_hint)
{
	struct hr__policy_node *node = hr__policy_victim(&cache->policy, for_hint);

	return node ? hr__entry_of(node) : NULL;
}

/* How much of the budget can be had, if all leaves that may. */
static uint64_t reach_of(const hr_cache *cache, bool for_hint)
{
	uint64_t kept = cache->held_bytes;

	for (struct hr__policy_node *node = cache->policy.oldest; node && for_hint; node = node->newer)
		if (!node->is_held && !hr__policy_may_leave(&cache->policy, node) && hr__entry_of(node)->place)
			kept += hr__entry_of(node)->place->bytes;
	return cache->whole.now.budget_bytes > kept ? cache->whole.now.budget_bytes - kept : 0;
}

/* Waits until something changes; false once the deadline has passed. */
static bool wait_for_room(struct hr__entry *entry, uint64_t deadline_ns, uint64_t *since_ns)
{
	hr_cache *cache = entry->cache;
	bool in_time;

	if (deadline_ns == 0)
		return false;
	if (!*since_ns) {
		*since_ns = hr__os_now_ns();
		HR__COUNT(entry, n_waits, 1);
		entry->is_short_of_room = true;
		pthread_cond_broadcast(&cache->changed);
	}
	cache->n_room_waiters++;
	in_time = hr__os_cond_wait(&cache->changed, &cache->lock, deadline_ns);
	cache->n_room_waiters--;
	return in_time;
}

/* A hint does not wait for consumers' work: it takes another group's memory only if that is of use at once. May let the
 * lock go and take it again. */
static bool is_of_use(struct hr__entry *victim, uint64_t charge)
{
	hr_cache *cache = victim->cache;
	bool passed;

	if (fits(cache, victim->place, charge))
		return true;
	if (cache->free_places) /* as others of its size, it would only lie there */
		return false;
	victim->is_ending = true;
	hr__cache_update_held(victim);
	pthread_mutex_unlock(&cache->lock);
	passed = marks_have_passed(cache, victim->place, false);
	pthread_mutex_lock(&cache->lock);
	victim->is_ending = false;
	hr__cache_update_held(victim);
	pthread_cond_broadcast(&cache->changed);
	return passed && !victim->node.is_held;
}

/* One step towards a place: 0 with *out, 0 without it (look again), HR_E_FULL, or what allocating answers. */
static int step(struct hr__entry *entry, bool for_hint, void *stream, struct hr__place **out)
{
	hr_cache *cache = entry->cache;
	const struct hr_cache_stats *now = &cache->whole.now;
	uint64_t charge = hr__cache_charge_of(cache, entry->group->bytes), used = now->used_bytes;
	struct hr__entry *victim;
	int rc;

	*out = take_free(cache, charge);
	if (*out)
		return 0;
	if (used <= now->budget_bytes && charge <= now->budget_bytes - used) {
		rc = allocate(entry, charge, stream, out);
		/* The device is full before the budget is: what we keep free may help. */
		if ((rc == HR_E_DEVICE_MEMORY || rc == HR_E_NOMEM) && hr__cache_give_back(cache, UINT64_MAX, !for_hint))
			return 0;
		return rc;
	}
	if (charge > reach_of(cache, for_hint))
		return HR_E_FULL;
	if (hr__cache_give_back(cache, used + charge - now->budget_bytes, !for_hint))
		return 0;
	victim = victim_of(cache, for_hint);
	if (!victim || (for_hint && !is_of_use(victim, charge)))
		return HR_E_FULL;
	hr__cache_evict_entry(victim);
	return 0;
}

int hr__cache_find_place(struct hr__entry *entry, bool for_hint, void *stream, uint64_t room_deadline_ns)
{
	hr_cache *cache = entry->cache;
	struct hr__place *place = NULL;
	uint64_t since_ns = 0;
	int rc = 0;

	cache->largest_charge = hr__max_u64(cache->largest_charge, hr__cache_charge_of(cache, entry->group->bytes));
	while (!rc && !place) {
		rc = step(entry, for_hint, stream, &place);
		if (rc == HR_E_FULL && wait_for_room(entry, room_deadline_ns, &since_ns))
			rc = 0;
	}
	entry->is_short_of_room = false;
	if (since_ns) {
		HR__COUNT(entry, room_wait_ns, hr__os_now_ns() - since_ns);
		hr__cache_event(cache, HR_CACHE_WAIT, entry, since_ns);
	}
	if (place)
		hr__cache_attach(entry, place);
	return rc;
}
