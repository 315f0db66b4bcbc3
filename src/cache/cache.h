/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The cache's own header: what its files share. Read policy.h beside it.
 *
 * A **place** is one allocation on the device, and what still uses it: it belongs to one entry, or is free and waits
 * for the next one. An **entry** is a group that is resident or on its way. Every place counts against the budget,
 * from before it is allocated until after it is given back.
 *
 *   group.c    which tensors, and where each lies
 *   table.c    the entries, by group; what is counted; events
 *   place.c    memory: reuse, room, giving back, and the marks of consumers' streams
 *   host.c     the host tier: copies of what was evicted
 *   load.c     beginning and ending a load
 *   get.c      get and prefetch
 *   lease.c    the buffer that get hands out, and its release
 *   cache.c    opening, closing, evicting, trimming
 *
 * **Lock order.** There is one lock, cache->lock. It is never held over a system call, a driver call, a caller's hook
 * or the close of a model; loader->lock may be taken inside it, and nothing of the loader's calls the cache. A thread
 * that needs such a call marks the entry as held, lets the lock go and takes it again.
 *
 * **Who may touch an entry.** Under the lock, whoever finds it in the table. Without it, a thread that has a pin on
 * it, that counts in n_waiting, or that set state to PREPARING or `is_ending`.
 *
 * **When memory is used again.** A release on a stream puts a mark into the place: "what is queued there now". The
 * next load into that place has the loader's lane wait for the marks, so the host never waits. Marks are freed once a
 * load into the place has succeeded; if it failed before it had waited for them, they are still there for the next
 * one. Memory is given back to the device only when its marks have passed.
 */
#ifndef HR_CACHE_CACHE_H
#define HR_CACHE_CACHE_H

#include "cache/policy.h"
#include "core/error.h"
#include "loader/loader.h"

#include "headrace.h"

#include <pthread.h>
#include <stdatomic.h>

/* ---- groups (group.c) ---- */

struct hr__member {
	uint64_t tensor;
	uint64_t at; /* in the group's memory */
};

struct hr_group {
	hr_model *model;
	struct hr__member *members; /* n, in the order given */
	size_t n;
	uint64_t id;
	uint64_t bytes;   /* of its memory */
	uint64_t payload; /* without the room between members */
	_Atomic uint32_t count;
};

/* ---- places (place.c) ---- */

struct hr__mark {
	void *stream;
	void *mark; /* the device's */
};

struct hr__place {
	struct hr__block *block;
	uint64_t bytes;         /* what it counts against the budget */
	struct hr__mark *marks; /* guarded by lock; to be applied before the memory is written */
	size_t n_marks, max_marks;
	size_t n_lent;          /* room in `marks` for those that a release is making */
	struct hr__place *next; /* in the list of free ones, newest first; guarded by lock */
};

/* ---- the host tier (host.c); all guarded by lock, but for what a move uses ---- */

struct hr__host_memory {
	void *at; /* pinned */
	uint64_t room;
	struct hr__host_memory *next; /* among the free */
};

struct hr__host_copy {
	struct hr__policy_node node; /* held: on its way down, or in use */
	hr_group *group;             /* counted */
	struct hr__host_memory *memory;
	struct hr__move down;
	void **marks;   /* of `down` */
	bool is_saving; /* not known to be there yet */
	uint32_t n_users;
	struct hr__host_copy *next; /* among the dead */
};

struct hr__host {
	struct hr__policy policy; /* lru, of copies */
	struct hr__host_memory *free;
	struct hr__host_copy *dead; /* to be freed once the lock is let go */
};

/* ---- entries ---- */

enum hr__entry_state {
	HR__ENTRY_PREPARING, /* its thread looks for memory and starts the job */
	HR__ENTRY_LOADING,   /* has a job */
	HR__ENTRY_RESIDENT,
	HR__ENTRY_GONE, /* not in the table any more; kept for those who wait for it */
};

/* All guarded by lock, but for what its own thread may touch (see above). */
struct hr__entry {
	struct hr_buffer lease; /* what get hands out; its count is the pins */
	struct hr__policy_node node;
	hr_cache *cache;
	hr_group *group;                 /* counted */
	struct hr__cache_counts *counts; /* of its model */
	struct hr__place *place;
	hr_job *job;
	struct hr__host_copy *copy; /* in use: the load is `up`, and there is no job */
	struct hr__move up;
	void **job_marks; /* the place's, as the job wants them; NULL: none */
	enum hr__entry_state state;
	uint32_t n_waiting;    /* gets that wait for it */
	bool is_hint;          /* a hint began it, and no get has found it yet */
	bool is_ending;        /* a thread waits for the job, or gives it up */
	bool is_short_of_room; /* PREPARING: its thread waits for room */
	uint64_t held_bytes;   /* its part of the cache's */
	uint64_t started_ns;
	int code;                       /* GONE: why; 0 = ask again */
	struct hr__error_record *error; /* GONE: in words; NULL if there was no memory for it */
	struct hr__entry *next;         /* among the dead */
};

/* What is counted, for the whole and for each model. Guarded by lock. */
struct hr__cache_counts {
	uint64_t model; /* hr__model_id; 0 = the whole */
	struct hr__cache_counts *next;
	size_t n_entries;          /* that count here */
	struct hr_cache_stats now; /* budgets and sizes of free memory stay 0 in a model's */
};

struct hr_cache {
	hr_loader *loader;     /* counted */
	struct hr__heap *heap; /* counted */
	hr_device *device;     /* the heap's */
	uint32_t io_timeout_ms;
	uint64_t granularity; /* 0: the device's own */

	pthread_mutex_t lock;
	pthread_cond_t changed; /* an entry changed its state, a pin went, memory became free */
	/* All guarded by lock. */
	struct hr__policy policy;
	struct hr__policy_memory *memories;
	struct hr__entry **table; /* open addressing, a power of two */
	size_t n_table, n_entries;
	struct hr__place *free_places;
	struct hr__entry *dead; /* to be freed once the lock is let go */
	struct hr__cache_counts whole;
	struct hr__host host;
	uint64_t held_bytes;     /* of places that cannot be had now: pinned, loading, in transit */
	uint64_t largest_charge; /* of the groups that were brought in until now */
	uint32_t n_inside;       /* calls that may let the lock go in their middle */
	uint32_t n_room_waiters;
	bool is_closing;
	/* events: a ring */
	struct hr_cache_event *events;
	uint64_t n_events, first_event, next_event, lost_events;
};

int hr__cache_here(const hr_cache *cache);
/* Takes the lock; lets it go and frees what died meanwhile. */
void hr__cache_enter(hr_cache *cache);
void hr__cache_leave(hr_cache *cache);

/* ---- table.c; all under the lock ---- */

static inline struct hr__entry *hr__entry_of(struct hr__policy_node *node)
{
	return (struct hr__entry *)(void *)((char *)node - offsetof(struct hr__entry, node));
}

struct hr__entry *hr__cache_find(const hr_cache *cache, const hr_group *group);
/* A new entry, PREPARING and held; it counts the group. HR_E_NOMEM. */
int hr__cache_add(hr_cache *cache, hr_group *group, bool is_hint, struct hr__entry **out);
/* Out of the table and the policy; it dies now or when the last waiter has gone. `code` 0: waiters ask again. */
void hr__cache_remove(struct hr__entry *entry, int code);
/* One waiter less. */
void hr__cache_unwait(struct hr__entry *entry);
/* Gives an entry its place, or takes it away. */
void hr__cache_attach(struct hr__entry *entry, struct hr__place *place);
struct hr__place *hr__cache_detach(struct hr__entry *entry);
/* Sets what the policy must not touch: pinned, waited for, or in a thread's hands. */
void hr__cache_update_held(struct hr__entry *entry);
void hr__cache_event(hr_cache *cache, uint32_t kind, const struct hr__entry *entry, uint64_t start_ns);
/* Adds to a counter of the whole and of the entry's model. */
#define HR__COUNT(entry, field, amount)                                                                                \
	((entry)->cache->whole.now.field += (amount), (entry)->counts->now.field += (amount))

/* ---- place.c ---- */

uint64_t hr__cache_charge_of(const hr_cache *cache, uint64_t bytes);
/* Under the lock, which it may let go and take again: memory for an entry that is PREPARING, taken from what is free,
 * from the budget, or from other groups. 0, HR_E_FULL (nothing was recorded), HR_E_DEVICE_MEMORY, HR_E_NOMEM ... */
int hr__cache_find_place(struct hr__entry *entry, bool for_hint, void *stream, uint64_t room_deadline_ns);
/* Under the lock: a place that no entry has any more is free; whoever waits for room looks again. */
void hr__cache_free_place(hr_cache *cache, struct hr__place *place);
/* Under the lock, which it lets go and takes again: gives free places back to the device until `bytes` are, or none is
 * left; those with work pending are waited for, or (not `wait`) left. Answers how many bytes went. */
uint64_t hr__cache_give_back(hr_cache *cache, uint64_t bytes, bool wait);
/* Under the lock, which it may let go and take again: evicts a resident entry that is not held, or gives up a load that
 * nobody waits for. */
void hr__cache_evict_entry(struct hr__entry *entry);
/* No lock: frees marks that have served. */
void hr__cache_free_marks(hr_cache *cache, struct hr__mark *marks, size_t n);

/* ---- host.c; under the lock ---- */

/* A complete copy of the group, in use until it is released; NULL: there is none. */
struct hr__host_copy *hr__host_acquire(hr_cache *cache, const hr_group *group);
void hr__host_release(struct hr__host_copy *copy);
/* Begins to copy a group down that is being evicted; its place is not free yet. May let the lock go. */
void hr__host_save(hr_cache *cache, hr_group *group, const struct hr__place *place);
/* Whether no copy down from this place is under way. May let the lock go if it is to wait; the place is the
 * caller's. */
bool hr__host_is_done(hr_cache *cache, const struct hr__place *place, bool wait);
/* No lock: frees copies that were dropped; ends the tier when nothing of the cache is in motion any more. */
void hr__host_bury(struct hr__host_copy *dead);
void hr__host_close(hr_cache *cache);

/* ---- load.c; all under the lock, which they let go and take again ---- */

/* Starts the job of an entry that has its place. On failure the entry is gone. */
int hr__cache_start_load(struct hr__entry *entry, bool background, void *wait_stream);
/* Waits until the entry is resident or gone, or the deadline passes. The caller counts in n_waiting. */
void hr__cache_await(struct hr__entry *entry, uint64_t room_deadline_ns, uint64_t load_deadline_ns);
/* Ends a load that nobody waits for, however far it is. */
void hr__cache_give_up(struct hr__entry *entry);

/* ---- lease.c ---- */

extern const struct hr__buffer_owner hr__cache_lease;

#endif
