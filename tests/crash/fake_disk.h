/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A disk in memory that remembers what is not yet durable. It stands in for a device under a real store (it has the
 * same operations, src/store/block.h), and it can be asked what would be on it if the power failed now: every sector
 * that was written since the last flush may be old, new, or garbage, each by itself; two writes to one sector keep
 * their order.
 *
 * A fake region is one opening of a disk; an image is a read-only or recording region over one such outcome.
 */
#ifndef HR_TESTS_FAKE_DISK_H
#define HR_TESTS_FAKE_DISK_H

#include "hrtest.h"

#include "store/block.h"
#include "store/layout.h"

#define SECTOR 512u

struct pending {
	uint32_t sector;
	uint32_t before; /* number of the pending write to the same sector before this one; UINT32_MAX: none */
	uint8_t bytes[SECTOR];
};

struct fake_lock {
	const struct hr__region *owner;
	uint64_t byte;
	bool alone;
};

enum fake_fault {
	FAKE_OK,
	FAKE_EIO,       /* the call fails */
	FAKE_SHORT,     /* a write or read stops half way: the caller is told ENOSPC or ENODATA */
	FAKE_FLIP,      /* a read gives one wrong bit */
	FAKE_LIE,       /* a write or flush says 0 and does nothing */
	FAKE_MISDIRECT, /* a write goes 64 KiB further */
	FAKE_SHRINK,    /* from now on the disk has half its size */
	FAKE_SWAP,      /* from now on it is another device */
};

struct fake_disk {
	uint64_t bytes;
	uint32_t n_sectors, lba_bytes;
	uint8_t *durable, *now; /* without and with what is pending */
	uint8_t *touched;       /* of each 64 KiB: whether anything was ever written to it */
	struct pending *pending;
	uint32_t n_pending, room_pending;
	uint32_t *last; /* of each sector: its last pending write, or UINT32_MAX */
	struct fake_lock locks[32];
	unsigned n_locks;
	bool no_locks; /* as in a container with a device node of its own */
	uint64_t sequence;
	/* Called after each write and before each flush, if something is pending. */
	void (*hook)(struct fake_disk *disk, void *ctx);
	void *ctx;
	uint64_t n_calls, n_writes, n_flushes; /* of all regions of this disk */
	uint64_t fault_at;                     /* call that goes wrong: 1, 2 ...; 0: none */
	enum fake_fault fault;
	bool fired;
};

struct fake_disk *fake_disk_new(uint64_t bytes, uint32_t lba_bytes);
/* A disk with what is durable on this one, or with all that was written. */
struct fake_disk *fake_disk_copy(const struct fake_disk *disk, bool with_pending);
void fake_disk_free(struct fake_disk *disk);
struct hr__region *fake_region(struct fake_disk *disk, bool is_writable);

/* ---- after the power failed ---- */

/* Of each pending write, by its number: whether its sector has it. GARBAGE counts for the sector as a whole. */
enum sector_state {
	SECTOR_OLD,
	SECTOR_NEW,
	SECTOR_GARBAGE,
};

struct image {
	struct hr__region base;
	const struct fake_disk *disk;
	const uint8_t *states; /* enum sector_state of each pending write */
	/* What was written to the image itself, if it is writable. */
	uint8_t (*written)[SECTOR];
	uint32_t *written_sectors;
	uint8_t *written_states; /* as `states`; NULL: all new */
	uint32_t n_written;
	bool broke_promise; /* something wrote to it although it is read-only */
	uint64_t n_reads;
};

#define IMAGE_ROOM 64u
void image_start(struct image *image, const struct fake_disk *disk, const uint8_t *states, bool is_writable);
void image_end(struct image *image);

#endif
