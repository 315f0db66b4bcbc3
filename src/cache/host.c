/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The host tier: copies of evicted groups in pinned host memory, under a budget of its own. A group that has one comes
 * back over the link. Weights do not change, so a copy is made once, at the first eviction, and stays when its group is
 * resident again; the copies used longest ago make room for others.
 *
 * Copying down at eviction, and not filling the tier while loading, has two reasons: only what is evicted is kept, and
 * the loader's path stays as it is. The copy goes through the loader's lane, behind the consumers' work and before the
 * next load into that memory, so that neither waits on the host. A copy is looked at again when somebody asks for it:
 * until it is known to be complete, its group is read from storage.
 *
 * The tier only ever helps: where host memory cannot be had or a copy fails, there is none.
 */
#include "cache.h"

#include "core/arith.h"
#include "core/mem.h"

#define PAGE 4096

static struct hr__host_copy *copy_of(struct hr__policy_node *node)
{
	return (struct hr__host_copy *)(void *)((char *)node - offsetof(struct hr__host_copy, node));
}

/* ---- memory; under the lock, which is let go around the system and the driver ---- */

static void end_memory(hr_cache *cache, struct hr__host_memory *memory)
{
	struct hr__device_error ignored;

	cache->device->ops->unpin(cache->device, memory->at, &ignored);
	hr__os_unmap(memory->at, memory->room);
	hr__free(memory);
}

/* No lock. */
static struct hr__host_memory *new_memory(hr_cache *cache, uint64_t room)
{
	struct hr__host_memory *memory = hr__calloc(1, sizeof(*memory));
	struct hr__device_error ignored;

	if (!memory)
		return NULL;
	memory->room = room;
	if (hr__os_map(room, &memory->at)) {
		hr__free(memory);
		return NULL;
	}
	if (cache->device->ops->pin(cache->device, memory->at, room, &ignored)) {
		hr__os_unmap(memory->at, room);
		hr__free(memory);
		return NULL;
	}
	return memory;
}

static struct hr__host_memory *allocate(hr_cache *cache, uint64_t room)
{
	struct hr_cache_stats *now = &cache->whole.now;
	struct hr__error_record error;
	struct hr__host_memory *memory;

	now->host_used_bytes += room;
	now->host_peak_bytes = hr__max_u64(now->host_peak_bytes, now->host_used_bytes);
	pthread_mutex_unlock(&cache->lock);
	hr__error_save(&error); /* a failure here is nobody's */
	memory = new_memory(cache, room);
	if (!memory)
		hr__error_restore(&error);
	pthread_mutex_lock(&cache->lock);
	if (!memory)
		now->host_used_bytes -= room;
	return memory;
}

static struct hr__host_memory *take_free(hr_cache *cache, uint64_t room)
{
	struct hr__host_memory **at = &cache->host.free, *memory;

	while (*at && ((*at)->room < room || (*at)->room - room > room / 8))
		at = &(*at)->next;
	memory = *at;
	if (memory)
		*at = memory->next;
	return memory;
}

static void give_back_one(hr_cache *cache)
{
	struct hr__host_memory *memory = cache->host.free;
	uint64_t room = memory->room;

	cache->host.free = memory->next;
	pthread_mutex_unlock(&cache->lock);
	end_memory(cache, memory);
	pthread_mutex_lock(&cache->lock);
	cache->whole.now.host_used_bytes -= room;
}

/* ---- copies; under the lock ---- */

/* Out of the tier; its memory is free. */
static void drop(hr_cache *cache, struct hr__host_copy *copy)
{
	hr__policy_remove(&cache->host.policy, &copy->node);
	cache->whole.now.n_host_groups--;
	copy->memory->next = cache->host.free;
	cache->host.free = copy->memory;
	copy->next = cache->host.dead;
	cache->host.dead = copy;
}

/* Sees whether a copy that was on its way down is there now; one that failed is dropped, and NULL. */
static struct hr__host_copy *look_at(hr_cache *cache, struct hr__host_copy *copy)
{
	if (!copy->is_saving || !hr__move_wait(cache->loader, &copy->down, 0))
		return copy;
	if (copy->down.code && copy->n_users > 0) /* somebody waited for it: the next look drops it */
		return copy;
	copy->is_saving = false;
	copy->node.is_held = copy->n_users > 0;
	hr__free(copy->marks);
	copy->marks = NULL;
	if (!copy->down.code)
		return copy;
	drop(cache, copy);
	return NULL;
}

/* The copy of a group, complete or not. */
static struct hr__host_copy *find(hr_cache *cache, const hr_group *group)
{
	struct hr__policy_node *node = cache->host.policy.newest;

	while (node && copy_of(node)->group != group)
		node = node->older;
	return node ? look_at(cache, copy_of(node)) : NULL;
}

/* Memory for one more copy; NULL: there is none to be had. */
static struct hr__host_memory *take_memory(hr_cache *cache, uint64_t room)
{
	const struct hr_cache_stats *now = &cache->whole.now;

	while (room <= now->host_budget_bytes) {
		struct hr__host_memory *memory = take_free(cache, room);
		struct hr__policy_node *node, *newer;

		if (memory)
			return memory;
		if (now->host_used_bytes <= now->host_budget_bytes &&
		    room <= now->host_budget_bytes - now->host_used_bytes)
			return allocate(cache, room);
		if (cache->host.free) {
			give_back_one(cache);
			continue;
		}
		for (node = cache->host.policy.oldest; node; node = newer) { /* those that are there by now */
			newer = node->newer;
			look_at(cache, copy_of(node));
		}
		if (cache->host.free)
			continue;
		node = hr__policy_victim(&cache->host.policy, false);
		if (!node)
			return NULL;
		cache->whole.now.n_host_evictions++;
		drop(cache, copy_of(node));
	}
	return NULL;
}

struct hr__host_copy *hr__host_acquire(hr_cache *cache, const hr_group *group)
{
	struct hr__host_copy *copy = cache->host.policy.newest ? find(cache, group) : NULL;

	if (!copy || copy->is_saving)
		return NULL;
	hr__policy_use(&cache->host.policy, &copy->node);
	copy->n_users++;
	copy->node.is_held = true;
	return copy;
}

void hr__host_release(struct hr__host_copy *copy)
{
	copy->n_users--;
	copy->node.is_held = copy->n_users > 0 || copy->is_saving;
}

/* The marks that the copy must come after, as a move wants them. */
static bool list_marks(struct hr__host_copy *copy, const struct hr__place *place)
{
	if (place->n_marks == 0)
		return true;
	copy->marks = hr__calloc(place->n_marks, sizeof(void *));
	for (size_t i = 0; copy->marks && i < place->n_marks; i++)
		copy->marks[i] = place->marks[i].mark;
	return copy->marks != NULL;
}

static struct hr__host_copy *start_copy(hr_cache *cache, hr_group *group, const struct hr__place *place,
					struct hr__host_memory *memory)
{
	struct hr__host_copy *copy = hr__calloc(1, sizeof(*copy));

	if (!copy)
		return NULL;
	copy->memory = memory;
	if (list_marks(copy, place)) {
		copy->down = (struct hr__move){.device = place->block->memory,
					       .host = memory->at,
					       .bytes = (size_t)group->bytes,
					       .is_down = true,
					       .marks = copy->marks,
					       .n_marks = place->n_marks};
		if (hr__move_start(cache->loader, &copy->down) == 0)
			return copy;
	}
	hr__free(copy->marks);
	hr__free(copy);
	return NULL;
}

void hr__host_save(hr_cache *cache, hr_group *group, const struct hr__place *place)
{
	struct hr__host_memory *memory;
	struct hr__host_copy *copy;

	if (!cache->whole.now.host_budget_bytes || group->bytes == 0 || cache->is_closing || find(cache, group))
		return;
	memory = take_memory(cache, hr__round_up(group->bytes, PAGE));
	if (!memory)
		return;
	copy = find(cache, group) ? NULL : start_copy(cache, group, place, memory);
	if (!copy) {
		memory->next = cache->host.free;
		cache->host.free = memory;
		return;
	}
	copy->group = hr_group_acquire(group);
	copy->is_saving = true;
	hr__policy_add(&cache->host.policy, &copy->node, group->id);
	hr__policy_use(&cache->host.policy, &copy->node);
	copy->node.is_held = true;
	cache->whole.now.n_host_groups++;
	cache->whole.now.n_host_saves++;
}

static struct hr__host_copy *on_its_way_from(hr_cache *cache, const struct hr__place *place)
{
	for (struct hr__policy_node *node = cache->host.policy.oldest; node; node = node->newer)
		if (copy_of(node)->is_saving && copy_of(node)->down.device == place->block->memory &&
		    !hr__move_wait(cache->loader, &copy_of(node)->down, 0))
			return copy_of(node);
	return NULL;
}

bool hr__host_is_done(hr_cache *cache, const struct hr__place *place, bool wait)
{
	struct hr__host_copy *copy = on_its_way_from(cache, place);

	while (copy && wait) {
		copy->n_users++; /* so that it stays */
		pthread_mutex_unlock(&cache->lock);
		hr__move_wait(cache->loader, &copy->down, UINT64_MAX);
		pthread_mutex_lock(&cache->lock);
		hr__host_release(copy);
		copy = on_its_way_from(cache, place);
	}
	return !copy;
}

/* ---- ends; no lock ---- */

void hr__host_bury(struct hr__host_copy *dead)
{
	while (dead) {
		struct hr__host_copy *next = dead->next;

		hr_group_release(dead->group);
		hr__free(dead);
		dead = next;
	}
}

void hr__host_close(hr_cache *cache)
{
	struct hr__policy_node *node = cache->host.policy.newest;

	for (; node; node = cache->host.policy.newest) {
		struct hr__host_copy *copy = copy_of(node);

		if (copy->is_saving)
			hr__move_wait(cache->loader, &copy->down, UINT64_MAX);
		hr__free(copy->marks);
		drop(cache, copy);
	}
	while (cache->host.free) {
		struct hr__host_memory *memory = cache->host.free;

		cache->host.free = memory->next;
		end_memory(cache, memory);
	}
	hr__host_bury(cache->host.dead);
}
