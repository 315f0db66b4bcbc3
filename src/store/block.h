/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Block access: a region, that is a block device, a partition, a loop device or a plain file, as a store uses it:
 * synchronous reads of metadata, the writes of an import, flush, locks. Tensor data is read by the engines instead.
 *
 * The contract of the operations. All give 0 or a positive errno value and never touch the thread's last error. `off`
 * and `bytes` are multiples of 4096 and inside the region, and memory is aligned to 4096 (hr__region_memory()). A read
 * or write is whole or it fails: ENODATA means that the region ended first. flush() makes durable what was written
 * before it was called, by any thread; when it fails nothing is known, and it must not be tried again to find out.
 * read() and write() may be called by several threads at once; the others by one. A fake with the same operations
 * stands in for a disk in the crash tests.
 */
#ifndef HR_STORE_BLOCK_H
#define HR_STORE_BLOCK_H

#include "core/os.h"

#include "headrace.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* What the region is like now. */
struct hr__region_facts {
	uint64_t bytes;
	uint64_t sequence; /* of the device behind it; 0 = not known. Another number: another device */
	uint32_t lba_bytes, phys_bytes;
	bool is_block, is_read_only;
};

enum hr__ident_kind {
	HR__IDENT_NVME = 1,
	HR__IDENT_SCSI,
	HR__IDENT_VIRTIO,
	HR__IDENT_DM,
	HR__IDENT_LOOP,
	HR__IDENT_FILE,
	HR__IDENT_OTHER,
};

/* Who the device is, as far as it says. Texts are cut to their size and padded with zeros, as in the label. */
struct hr__ident {
	uint32_t kind, nsid;
	uint8_t nguid[16], eui64[8], ns_uuid[16], partuuid[16];
	char serial[20], model[40], wwid[96];
	uint64_t region_base;  /* where the region begins in its device */
	uint64_t device_bytes; /* of the whole device */
};

struct hr__region;

struct hr__region_ops {
	int (*read)(struct hr__region *region, uint64_t off, void *dst, size_t bytes);
	int (*write)(struct hr__region *region, uint64_t off, const void *src, size_t bytes);
	int (*flush)(struct hr__region *region);
	int (*facts)(struct hr__region *region, struct hr__region_facts *out);
	int (*lock)(struct hr__region *region, enum hr__os_lock kind, uint64_t byte);
	/* The lowest byte of [first, last] that another description holds a lock on; UINT64_MAX = none. */
	int (*lowest_lock)(struct hr__region *region, uint64_t first, uint64_t last, uint64_t *lowest);
	void (*close)(struct hr__region *region);
};

struct hr__region {
	const struct hr__region_ops *ops;
	char *path;                    /* for messages */
	struct hr__region_facts facts; /* as they were when it was opened */
	struct hr__ident ident;
	bool is_writable;
	/* What engines read from; a fake has none (both descriptors -1). */
	struct hr__file file;
	uint64_t file_base; /* where the region begins in that; 0 but where a library reads the whole disk */
};

/* Opens a device or a file. Writers of a block device are alone with it (O_EXCL): HR_E_LOCKED if it is mounted or
 * held. HR_E_NOTFOUND, HR_E_IO. */
int hr__region_open(const char *path, bool is_writable, struct hr__region **out);
void hr__region_close(struct hr__region *region);

/* As the operations, with the error told: HR_E_IO, HR_E_REGION_CHANGED (it ended too early). `what` is for the
 * message: "the label". */
int hr__region_read(struct hr__region *region, uint64_t off, void *dst, size_t bytes, const char *what);
int hr__region_write(struct hr__region *region, uint64_t off, const void *src, size_t bytes, const char *what);
int hr__region_flush(struct hr__region *region);
/* What a failed operation of one's own is told as; `doing` is "read" or "write". */
int hr__region_fail(const struct hr__region *region, int error, uint64_t off, const char *doing, const char *what);
/* HR_E_REGION_CHANGED unless size, sector size and device are what they were. */
int hr__region_check(struct hr__region *region);

/* Memory for operations, aligned, all zero. HR_E_NOMEM. */
int hr__region_memory(size_t bytes, void **out);
void hr__region_memory_free(void *memory, size_t bytes);

#endif
