/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The pool: a fixed number of equal slots of staging memory, made once. Only this file changes a slot's state, and it
 * checks each change. A free slot is poisoned for AddressSanitizer, so that a store into a slot that was given back
 * shows, a pread's too. Where the engine stages in windows of the page cache, the pool has no memory, only the right to
 * so many of them; where it stages on the device, window.c brings the memory.
 */
#include "loader.h"

#include "core/mem.h"

#include <assert.h>

#if defined(__SANITIZE_ADDRESS__)
#define HAVE_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define HAVE_ASAN 1
#endif
#endif
#ifdef HAVE_ASAN
#include <sanitizer/asan_interface.h>
#define POISON(memory, bytes)   ASAN_POISON_MEMORY_REGION(memory, bytes)
#define UNPOISON(memory, bytes) ASAN_UNPOISON_MEMORY_REGION(memory, bytes)
#else
#define POISON(memory, bytes)   ((void)(memory), (void)(bytes))
#define UNPOISON(memory, bytes) ((void)(memory), (void)(bytes))
#endif

int hr__pool_open(struct hr__pool *pool, enum hr__staging staging, uint64_t staging_bytes, uint64_t slot_bytes)
{
	uint32_t n = (uint32_t)(staging_bytes / slot_bytes);
	void *memory = NULL;
	int error;

	*pool = (struct hr__pool){
		.staging = staging, .slot_bytes = slot_bytes, .bytes = n * slot_bytes, .n_slots = n, .n_free = n};
	pool->slots = hr__calloc(n, sizeof(*pool->slots));
	if (!pool->slots)
		return HR_E_NOMEM;
	error = staging == HR__STAGING_HOST ? hr__os_map(pool->bytes, &memory) : 0;
	if (error) {
		hr__free(pool->slots);
		pool->slots = NULL;
		return hr__fail_errno(&(struct hr__where){.stage = "loader", .offset = HR_NO_OFFSET}, error,
				      "allocate staging memory");
	}
	hr__pool_place(pool, memory, n);
	return 0;
}

void hr__pool_place(struct hr__pool *pool, unsigned char *memory, uint32_t n)
{
	pool->memory = memory;
	pool->n_slots = pool->n_free = n;
	pool->bytes = n * pool->slot_bytes;
	pool->reserve = n / 4 ? n / 4 : 1;
	pool->free = NULL;
	pool->free_last = &pool->slots[n - 1];
	for (uint32_t i = n; i-- > 0;) { /* so that slot 0 is taken first */
		struct hr__slot *slot = &pool->slots[i];

		slot->memory = memory ? memory + i * pool->slot_bytes : NULL;
		slot->next = pool->free;
		pool->free = slot;
	}
}

void hr__pool_close(struct hr__pool *pool)
{
	if (!pool->slots)
		return;
	assert(pool->n_free == pool->n_slots);
	if (pool->staging == HR__STAGING_HOST) {
		UNPOISON(pool->memory, pool->bytes);
		hr__os_unmap(pool->memory, pool->bytes);
	}
	hr__free(pool->slots);
	pool->slots = NULL; /* what kind of pool it was may still be asked, without the lock */
	pool->memory = NULL;
}

static bool is_allowed(enum hr__slot_state from, enum hr__slot_state to)
{
	switch (from) {
	case HR__SLOT_FREE:
		return to == HR__SLOT_FILLING;
	case HR__SLOT_FILLING: /* free: the read failed, or went straight to its destination */
		return to == HR__SLOT_FULL || to == HR__SLOT_LOST || to == HR__SLOT_FREE;
	case HR__SLOT_FULL: /* free or leaving: its job has failed */
		return to == HR__SLOT_DRAINING || to == HR__SLOT_FREE || to == HR__SLOT_LEAVING;
	case HR__SLOT_DRAINING: /* full: pieces are left that have no destination yet */
		return to == HR__SLOT_FREE || to == HR__SLOT_FULL || to == HR__SLOT_LOST || to == HR__SLOT_LEAVING;
	case HR__SLOT_LEAVING:
		return to == HR__SLOT_FREE;
	case HR__SLOT_LOST: /* it came back after all */
		return to == HR__SLOT_FREE || to == HR__SLOT_LEAVING;
	}
	return false;
}

static void put_free(struct hr__pool *pool, struct hr__slot *slot)
{
	if (pool->staging == HR__STAGING_DEVICE && pool->free) {
		slot->next = NULL;
		pool->free_last->next = slot;
	} else {
		slot->next = pool->free;
		pool->free = slot;
	}
	if (!slot->next)
		pool->free_last = slot;
}

void hr__pool_move(struct hr__pool *pool, struct hr__slot *slot, enum hr__slot_state to)
{
	bool allowed = is_allowed(slot->state, to);

	assert(allowed);
	(void)allowed;
	pool->n_lost += (to == HR__SLOT_LOST) - (slot->state == HR__SLOT_LOST);
	pool->n_leaving += (to == HR__SLOT_LEAVING) - (slot->state == HR__SLOT_LEAVING);
	if (to == HR__SLOT_FULL && pool->n_slots - pool->n_free > pool->n_peak)
		pool->n_peak = pool->n_slots - pool->n_free;
	if (to == HR__SLOT_FREE) {
		slot->job = NULL;
		put_free(pool, slot);
		pool->n_free++;
		if (pool->staging == HR__STAGING_HOST)
			POISON(slot->memory, pool->slot_bytes);
	}
	slot->state = to;
}

struct hr__slot *hr__pool_take(struct hr__pool *pool)
{
	struct hr__slot *slot = pool->free;

	if (!slot)
		return NULL;
	pool->free = slot->next;
	slot->next = NULL;
	pool->n_free--;
	if (pool->staging == HR__STAGING_HOST)
		UNPOISON(slot->memory, pool->slot_bytes);
	hr__pool_move(pool, slot, HR__SLOT_FILLING);
	return slot;
}

void hr__slot_push(struct hr__slot_list *list, struct hr__slot *slot)
{
	slot->next = NULL;
	if (list->tail)
		list->tail->next = slot;
	else
		list->head = slot;
	list->tail = slot;
}

struct hr__slot *hr__slot_pop(struct hr__slot_list *list)
{
	struct hr__slot *slot = list->head;

	if (!slot)
		return NULL;
	list->head = slot->next;
	if (!list->head)
		list->tail = NULL;
	slot->next = NULL;
	return slot;
}
