/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Snapshots: a reader's hold on one generation of a store. This is what a model that comes from a store is made of:
 *
 *     hr__snapshot_open("pool.img", &(struct hr__snapshot_want){0}, &snapshot);
 *     hr__manifest_find_model(&snapshot->manifest, "llama", 5, &m);
 *     hr__manifest_model(&snapshot->manifest, m, &model);       members first_member .. + n_members
 *     hr__manifest_member(&snapshot->manifest, i, &member);     file name, number of its object
 *     hr__manifest_object(&snapshot->manifest, member.object, &object);
 *     payload: region bytes ext_off + payload_off .. + payload_len, read through snapshot->region->file
 *     hr__snapshot_digests(snapshot, &object, &digests, &n);    CRC-32C of each 1 << block_log2 bytes of payload
 *     ... after each batch: hr__snapshot_check(snapshot), before the bytes are handed out
 *
 * A snapshot is counted and immutable once it is open; any thread may use it. Its lease, where the system gives one,
 * ends with it. Opening writes nothing.
 */
#ifndef HR_STORE_SNAPSHOT_H
#define HR_STORE_SNAPSHOT_H

#include "manifest.h"

#include <stdatomic.h>

struct hr__snapshot_want {
	uint64_t generation; /* 0: the newest */
	bool is_moved;       /* the store may be on another device than it was made on */
	bool without_lease;  /* for the writer, whose lock is enough */
	bool step_back;      /* take the root before the newest if the newest's manifest is damaged */
	/* How the region is opened, where that is not by its path; may be called more than once. */
	int (*open_region)(void *ctx, struct hr__region **out);
	void *region_ctx;
};

struct hr__snapshot {
	struct hr__region *region; /* owned */
	struct hr__label label;
	struct hr__roots roots; /* as they were read last while opening */
	struct hr__root root;   /* of this generation */
	unsigned slot;
	struct hr__manifest manifest;
	atomic_uint refs;
	bool is_leased;
};

/* Opens a region read-only and its newest (or the wanted) generation, in this order: region, geometry, label,
 * device, roots, lease, manifest. HR_E_NOTFOUND, HR_E_NOT_A_STORE, HR_E_STORE_VERSION, HR_E_GEOMETRY,
 * HR_E_IDENTITY, HR_E_CORRUPT, HR_E_DIVERGED, HR_E_STALE (that generation is no longer kept), HR_E_IO, HR_E_NOMEM. */
int hr__snapshot_open(const char *path, const struct hr__snapshot_want *want, struct hr__snapshot **out);
/* The same on a region that is open; it belongs to the snapshot afterwards, also after a failure. */
int hr__snapshot_open_on(struct hr__region *region, const struct hr__snapshot_want *want, struct hr__snapshot **out);
struct hr__snapshot *hr__snapshot_acquire(struct hr__snapshot *snapshot);
void hr__snapshot_release(struct hr__snapshot *snapshot);

/* Whether what was read until now was this generation's: same device and size, same store, and no root that has
 * given this generation's space away. HR_E_REGION_CHANGED, HR_E_STALE, HR_E_IO. Reads three to five records. */
int hr__snapshot_check(struct hr__snapshot *snapshot);

/* Reads an object's footer and digests and checks them: HR_E_CORRUPT if they are not what the manifest says.
 * `*digests` is hr__malloc'ed, host byte order. */
int hr__snapshot_digests(struct hr__snapshot *snapshot, const struct hr__object *object, uint32_t **digests,
			 uint64_t *n_digests);
/* The same on a region by itself. */
int hr__digests_read(struct hr__region *region, const uint8_t store_uuid[16], const struct hr__object *object,
		     uint32_t **digests, uint64_t *n_digests);

#endif
