/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A store as a handle: the newest generation, and, for a writer, what it takes to make the next one. Reading models
 * goes by snapshots (snapshot.h), which do not know this file.
 *
 * Locks: store->writing is held through a whole import, remove or reclaim; store->lock only while the current
 * generation is looked at or switched. Order: writing, then lock.
 */
#ifndef HR_STORE_STORE_H
#define HR_STORE_STORE_H

#include "extents.h"
#include "snapshot.h"

#include <pthread.h>

struct hr_store {
	pthread_mutex_t writing, lock;
	const volatile uint32_t *fork_mark;
	bool is_writable;
	struct hr__snapshot *now; /* guarded by lock */
	/* How many files are each object, of generation `users_of`; guarded by lock. */
	uint32_t *users;
	uint64_t users_of;
	/* Writers only; guarded by writing. */
	struct hr__manifest other; /* what the other root names; no body: nothing */
	struct hr__space space;    /* what may not be written to; extents of objects in the making are taken from it */
	struct hr__range *pending; /* taken for objects that no commit has yet */
	size_t n_pending, room_pending;
	uint64_t lowest_lease; /* as it was when `space` was made */
	uint64_t poisoned_by;  /* generation whose commit failed; 0 = none */
	uint8_t writer_id[16];
};

/* The tail of hr_store_open(), for any region: it belongs to the store afterwards, also after a failure. */
int hr__store_open_on(struct hr__region *region, const struct hr__snapshot_want *want, hr_store **out);

/* HR_E_LOCKED. */
int hr__store_lock_writer(struct hr__region *region);
/* HR_E_OPTS (NULL), HR_E_FORKED. */
int hr__store_check_usable(const hr_store *store);
/* HR_E_FORKED, HR_E_OPTS (read-only), HR_E_POISONED; or `writing` is held. */
int hr__store_begin(hr_store *store);
void hr__store_end(hr_store *store);

/* Makes `space` anew from both roots, and looks for leases. */
int hr__store_survey(hr_store *store);
/* Whether a retired extent may be used: a durable root has given it up, and no reader holds it. */
bool hr__store_is_reusable(const hr_store *store, const struct hr__retired *retired);
/* The floor that a commit may set: as high as leases allow, at most `generation`. */
int hr__store_floor(hr_store *store, uint64_t generation, uint64_t *floor);
uint64_t hr__store_next_generation(const hr_store *store);
/* Space for an object; it stays taken until `n_pending` is set to zero and the next survey. */
int hr__store_take(hr_store *store, uint64_t len, uint64_t *off);
/* Commits need room for manifests, those that remove something too: this much an import leaves free. HR_E_NOSPACE. */
#define HR__SPARE_BODIES 8
int hr__store_has_spare(const hr_store *store, uint32_t n_new, unsigned n_bodies);
/* A floor for the next commit if room for manifests runs short; else 0. */
int hr__store_floor_if_tight(hr_store *store, uint64_t *floor);

/* Makes a draft the next generation. Objects in it are written, but need not be durable: this flushes, reads back
 * those that `fresh` marks (NULL: none), switches roots. Errors before the switch leave the store as it was;
 * HR_E_COMMIT_UNKNOWN, and whatever comes from a failed flush, poison the handle. */
struct hr__commit {
	struct hr__draft *draft;
	uint64_t floor_gen;   /* 0: as it is */
	uint32_t first_fresh; /* objects of the draft from this number on are read back; UINT32_MAX: none */
	/* Of each of these: how many bytes of its payload were read back already, after a flush. NULL: nothing was. */
	const uint64_t *checked;
	/* Called between pieces of read-back; non-zero: HR_E_CANCELLED. NULL: nobody. */
	int (*progress)(void *ctx, uint64_t bytes);
	void *ctx;
};
int hr__store_commit(hr_store *store, const struct hr__commit *commit);
/* Reads an object from the region and compares it with its digests, those with what was hashed on the way in; of its
 * payload the header and what lies behind the first `checked` bytes, a multiple of 4 MiB. HR_E_DIGEST, HR_E_CORRUPT. */
int hr__object_verify(struct hr__region *region, const uint8_t store_uuid[16], const struct hr__object *object,
		      uint64_t checked, int (*progress)(void *ctx, uint64_t bytes), void *ctx);

/* Writes a new, empty store onto a region that is open for writing, whatever stood there. */
int hr__store_format(struct hr__region *region, const char *name);
/* Whether anything stands where signatures of file systems and partition tables are: *at is where. */
int hr__region_is_blank(struct hr__region *region, bool *is_blank, uint64_t *at);

#endif
