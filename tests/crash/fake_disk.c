/* SPDX-License-Identifier: Apache-2.0 */
#include "fake_disk.h"

#include <errno.h>

struct fake {
	struct hr__region base;
	struct fake_disk *disk;
};

/* ---- faults ---- */

static enum fake_fault fault_now(struct fake_disk *disk)
{
	disk->n_calls++;
	if (disk->fault_at == 0 || disk->n_calls != disk->fault_at)
		return FAKE_OK;
	disk->fired = true;
	if (disk->fault == FAKE_SHRINK)
		disk->bytes /= 2;
	if (disk->fault == FAKE_SWAP)
		disk->sequence += 2;
	return disk->fault;
}

/* ---- pending writes ---- */

static void add_pending(struct fake_disk *disk, uint32_t sector, const uint8_t *bytes)
{
	struct pending *entry;

	if (disk->n_pending == disk->room_pending) {
		disk->room_pending = disk->room_pending ? disk->room_pending * 2 : 1024;
		disk->pending = realloc(disk->pending, disk->room_pending * sizeof(*disk->pending));
		if (!disk->pending)
			abort();
	}
	entry = &disk->pending[disk->n_pending];
	entry->sector = sector;
	entry->before = disk->last[sector];
	memcpy(entry->bytes, bytes, SECTOR);
	disk->last[sector] = disk->n_pending;
	disk->n_pending++;
}

static void settle(struct fake_disk *disk)
{
	for (uint32_t i = 0; i < disk->n_pending; i++) {
		memcpy(disk->durable + (size_t)disk->pending[i].sector * SECTOR, disk->pending[i].bytes, SECTOR);
		disk->last[disk->pending[i].sector] = UINT32_MAX;
	}
	disk->n_pending = 0;
}

/* ---- a region ---- */

static struct fake_disk *disk_of(struct hr__region *region)
{
	return ((struct fake *)region)->disk;
}

static int fake_read(struct hr__region *region, uint64_t off, void *dst, size_t bytes)
{
	struct fake_disk *disk = disk_of(region);
	enum fake_fault fault = fault_now(disk);

	assert_true(off % HR__RECORD_BYTES == 0 && bytes % HR__RECORD_BYTES == 0 && (uintptr_t)dst % 4096 == 0);
	if (fault == FAKE_EIO)
		return EIO;
	if (fault == FAKE_SHORT || off + bytes > disk->bytes)
		return ENODATA;
	memcpy(dst, disk->now + off, bytes);
	if (fault == FAKE_FLIP)
		((uint8_t *)dst)[bytes / 3] ^= 16;
	return 0;
}

static int fake_write(struct hr__region *region, uint64_t off, const void *src, size_t bytes)
{
	struct fake_disk *disk = disk_of(region);
	enum fake_fault fault = fault_now(disk);
	size_t done = fault == FAKE_SHORT ? bytes / 2 / SECTOR * SECTOR : bytes;

	assert_true(region->is_writable);
	assert_true(off % HR__RECORD_BYTES == 0 && bytes % HR__RECORD_BYTES == 0 && (uintptr_t)src % 4096 == 0);
	disk->n_writes++;
	if (fault == FAKE_EIO)
		return EIO;
	if (fault == FAKE_LIE)
		return 0;
	if (fault == FAKE_MISDIRECT)
		off += off + 65536 + bytes <= disk->bytes ? 65536 : 0;
	if (off + bytes > disk->bytes)
		return ENOSPC;
	for (size_t at = 0; at < done; at += SECTOR)
		add_pending(disk, (uint32_t)((off + at) / SECTOR), (const uint8_t *)src + at);
	memcpy(disk->now + off, src, done);
	for (uint64_t at = off >> 16; at <= (off + bytes - 1) >> 16; at++)
		disk->touched[at] = 1;
	if (disk->hook)
		disk->hook(disk, disk->ctx);
	return fault == FAKE_SHORT ? ENOSPC : 0;
}

static int fake_flush(struct hr__region *region)
{
	struct fake_disk *disk = disk_of(region);
	enum fake_fault fault = fault_now(disk);

	disk->n_flushes++;
	if (fault == FAKE_EIO || fault == FAKE_SHORT)
		return EIO;
	settle(disk); /* a flush that lies cannot be noticed by anybody; the commit may be lost then */
	return 0;
}

static int fake_facts(struct hr__region *region, struct hr__region_facts *out)
{
	struct fake_disk *disk = disk_of(region);

	if (fault_now(disk) == FAKE_EIO)
		return EIO;
	*out = (struct hr__region_facts){.bytes = disk->bytes,
					 .sequence = disk->sequence,
					 .lba_bytes = disk->lba_bytes,
					 .phys_bytes = 4096,
					 .is_block = true};
	return 0;
}

static int fake_lock(struct hr__region *region, enum hr__os_lock kind, uint64_t byte)
{
	struct fake_disk *disk = disk_of(region);

	if (disk->no_locks && kind == HR__OS_LOCK_SHARED)
		return ENOLCK;
	for (unsigned i = 0; i < disk->n_locks; i++) {
		struct fake_lock *lock = &disk->locks[i];

		if (lock->byte != byte)
			continue;
		if (lock->owner != region && kind != HR__OS_UNLOCK && (lock->alone || kind == HR__OS_LOCK_ALONE))
			return EAGAIN;
		if (lock->owner == region && kind == HR__OS_UNLOCK) {
			*lock = disk->locks[--disk->n_locks];
			return 0;
		}
	}
	if (kind != HR__OS_UNLOCK) {
		assert_true(disk->n_locks < 32);
		disk->locks[disk->n_locks++] = (struct fake_lock){region, byte, kind == HR__OS_LOCK_ALONE};
	}
	return 0;
}

static int fake_lowest_lock(struct hr__region *region, uint64_t first, uint64_t last, uint64_t *lowest)
{
	struct fake_disk *disk = disk_of(region);

	*lowest = UINT64_MAX;
	if (fault_now(disk) == FAKE_EIO)
		return EIO;
	for (unsigned i = 0; i < disk->n_locks; i++) {
		const struct fake_lock *lock = &disk->locks[i];

		if (lock->owner != region && lock->byte >= first && lock->byte <= last && lock->byte < *lowest)
			*lowest = lock->byte;
	}
	return 0;
}

static void fake_close(struct hr__region *region)
{
	struct fake_disk *disk = disk_of(region);

	for (unsigned i = disk->n_locks; i > 0; i--)
		if (disk->locks[i - 1].owner == region)
			disk->locks[i - 1] = disk->locks[--disk->n_locks];
	free(region->path);
	free(region);
}

static const struct hr__region_ops fake_ops = {
	.read = fake_read,
	.write = fake_write,
	.flush = fake_flush,
	.facts = fake_facts,
	.lock = fake_lock,
	.lowest_lock = fake_lowest_lock,
	.close = fake_close,
};

struct hr__region *fake_region(struct fake_disk *disk, bool is_writable)
{
	struct fake *fake = calloc(1, sizeof(*fake));

	if (!fake)
		abort();
	fake->disk = disk;
	fake->base.ops = &fake_ops;
	fake->base.path = strdup("fake");
	fake->base.is_writable = is_writable;
	fake->base.file = (struct hr__file){.fd = -1, .direct_fd = -1};
	fake->base.facts = (struct hr__region_facts){.bytes = disk->bytes,
						     .sequence = disk->sequence,
						     .lba_bytes = disk->lba_bytes,
						     .phys_bytes = 4096,
						     .is_block = true};
	fake->base.ident.kind = HR__IDENT_OTHER;
	return &fake->base;
}

/* ---- disks ---- */

/* Disks that are not in use, blank: new memory costs more than all that a test does with it. */
static struct fake_disk *spare[4];
static unsigned n_spare;

static struct fake_disk *allocate(uint64_t bytes)
{
	struct fake_disk *disk = calloc(1, sizeof(*disk));

	if (!disk)
		abort();
	disk->n_sectors = (uint32_t)(bytes / SECTOR);
	disk->durable = calloc(1, bytes);
	disk->now = calloc(1, bytes);
	disk->touched = calloc(1, bytes >> 16);
	disk->last = malloc(disk->n_sectors * sizeof(*disk->last));
	if (!disk->durable || !disk->now || !disk->touched || !disk->last)
		abort();
	memset(disk->last, 0xff, disk->n_sectors * sizeof(*disk->last));
	return disk;
}

struct fake_disk *fake_disk_new(uint64_t bytes, uint32_t lba_bytes)
{
	struct fake_disk *disk;

	if (n_spare && spare[n_spare - 1]->n_sectors == bytes / SECTOR)
		disk = spare[--n_spare];
	else
		disk = allocate(bytes);
	disk->bytes = bytes;
	disk->lba_bytes = lba_bytes;
	disk->sequence = 7;
	return disk;
}

static void make_blank(struct fake_disk *disk)
{
	struct fake_disk blank = {.n_sectors = disk->n_sectors,
				  .durable = disk->durable,
				  .now = disk->now,
				  .touched = disk->touched,
				  .pending = disk->pending,
				  .room_pending = disk->room_pending,
				  .last = disk->last};

	for (uint32_t i = 0; i < disk->n_pending; i++)
		disk->last[disk->pending[i].sector] = UINT32_MAX;
	for (size_t at = 0; at < (size_t)disk->n_sectors * SECTOR; at += 65536) {
		if (!disk->touched[at >> 16])
			continue;
		memset(disk->durable + at, 0, 65536);
		memset(disk->now + at, 0, 65536);
		disk->touched[at >> 16] = 0;
	}
	*disk = blank;
}

struct fake_disk *fake_disk_copy(const struct fake_disk *disk, bool with_pending)
{
	struct fake_disk *copy = fake_disk_new((uint64_t)disk->n_sectors * SECTOR, disk->lba_bytes);

	for (uint64_t at = 0; at < copy->bytes; at += 65536) {
		if (!disk->touched[at >> 16])
			continue;
		copy->touched[at >> 16] = 1;
		memcpy(copy->durable + at, (with_pending ? disk->now : disk->durable) + at, 65536);
		memcpy(copy->now + at, copy->durable + at, 65536);
	}
	return copy;
}

void fake_disk_free(struct fake_disk *disk)
{
	if (!disk)
		return;
	if (n_spare < sizeof(spare) / sizeof(spare[0])) {
		make_blank(disk);
		spare[n_spare++] = disk;
		return;
	}
	free(disk->durable);
	free(disk->now);
	free(disk->touched);
	free(disk->pending);
	free(disk->last);
	free(disk);
}

/* ---- images ---- */

static void patch(const struct image *image, uint32_t sector, uint8_t *out)
{
	const struct fake_disk *disk = image->disk;

	for (uint32_t i = disk->last[sector]; i != UINT32_MAX; i = disk->pending[i].before) {
		if (image->states[i] == SECTOR_OLD)
			continue;
		if (image->states[i] == SECTOR_NEW)
			memcpy(out, disk->pending[i].bytes, SECTOR);
		else
			for (unsigned k = 0; k < SECTOR; k++)
				out[k] = (uint8_t)(sector * 31 + k * 7 + 0xa5);
		return;
	}
}

static void patch_written(const struct image *image, uint64_t off, uint8_t *dst, size_t bytes)
{
	for (uint32_t i = 0; i < image->n_written; i++) {
		uint64_t at = (uint64_t)image->written_sectors[i] * SECTOR;
		uint8_t state = image->written_states ? image->written_states[i] : SECTOR_NEW;

		if (at < off || at >= off + bytes || state == SECTOR_OLD)
			continue;
		if (state == SECTOR_NEW)
			memcpy(dst + (at - off), image->written[i], SECTOR);
		else
			memset(dst + (at - off), 0x5a, SECTOR);
	}
}

static int image_read(struct hr__region *region, uint64_t off, void *dst, size_t bytes)
{
	struct image *image = (struct image *)region;
	const struct fake_disk *disk = image->disk;

	if (off + bytes > disk->bytes)
		return ENODATA;
	image->n_reads++;
	memcpy(dst, disk->durable + off, bytes);
	for (size_t at = 0; at < bytes; at += SECTOR) {
		uint32_t sector = (uint32_t)((off + at) / SECTOR);

		if (disk->last[sector] != UINT32_MAX)
			patch(image, sector, (uint8_t *)dst + at);
	}
	patch_written(image, off, dst, bytes);
	return 0;
}

static int image_write(struct hr__region *region, uint64_t off, const void *src, size_t bytes)
{
	struct image *image = (struct image *)region;

	if (!region->is_writable || image->n_written + bytes / SECTOR > IMAGE_ROOM) {
		image->broke_promise = true;
		return EROFS;
	}
	for (size_t at = 0; at < bytes; at += SECTOR) {
		image->written_sectors[image->n_written] = (uint32_t)((off + at) / SECTOR);
		memcpy(image->written[image->n_written], (const uint8_t *)src + at, SECTOR);
		image->n_written++;
	}
	return 0;
}

static int image_flush(struct hr__region *region)
{
	(void)region;
	return 0;
}

static int image_facts(struct hr__region *region, struct hr__region_facts *out)
{
	*out = region->facts;
	return 0;
}

static int image_lock(struct hr__region *region, enum hr__os_lock kind, uint64_t byte)
{
	(void)region;
	(void)kind;
	(void)byte;
	return 0;
}

static int image_lowest_lock(struct hr__region *region, uint64_t first, uint64_t last, uint64_t *lowest)
{
	(void)region;
	(void)first;
	(void)last;
	*lowest = UINT64_MAX;
	return 0;
}

static void image_close(struct hr__region *region)
{
	(void)region; /* the test's own */
}

static const struct hr__region_ops image_ops = {
	.read = image_read,
	.write = image_write,
	.flush = image_flush,
	.facts = image_facts,
	.lock = image_lock,
	.lowest_lock = image_lowest_lock,
	.close = image_close,
};

void image_start(struct image *image, const struct fake_disk *disk, const uint8_t *states, bool is_writable)
{
	memset(image, 0, sizeof(*image));
	image->base.ops = &image_ops;
	image->base.path = (char *)"image";
	image->base.is_writable = is_writable;
	image->base.file = (struct hr__file){.fd = -1, .direct_fd = -1};
	image->base.facts = (struct hr__region_facts){.bytes = disk->bytes,
						      .sequence = 1,
						      .lba_bytes = disk->lba_bytes,
						      .phys_bytes = 4096,
						      .is_block = true};
	image->disk = disk;
	image->states = states;
	if (is_writable) {
		image->written = calloc(IMAGE_ROOM, SECTOR);
		image->written_sectors = calloc(IMAGE_ROOM, sizeof(*image->written_sectors));
		if (!image->written || !image->written_sectors)
			abort();
	}
}

void image_end(struct image *image)
{
	free(image->written);
	free(image->written_sectors);
}
