/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A source: where a shard's bytes are. A range of an open file: for a plain file all of it; for an object of a store
 * the place where it lies in the region, which it shares with others. What is different about such a one is behind
 * `ops`; readers, engines and digests see a descriptor, a base, a length, and how far an aligned read may reach.
 */
#ifndef HR_MODEL_SOURCE_H
#define HR_MODEL_SOURCE_H

#include "core/os.h"

struct hr__source;

/* The checksums of a source's blocks: CRC-32C of each 1 << log2 bytes, the last one of what is left. */
struct hr__source_blocks {
	const uint32_t *crc;
	uint64_t n;
	uint8_t log2; /* 16 to 20 */
};

/* A source that is not a file of its own. Called on any thread; the errors are the thread's last. */
struct hr__source_ops {
	/* Whether what was opened is still what lies there, for all sources of this owner; 0, or why not. */
	int (*check)(const struct hr__source *source);
	/* Whether the first `proven` bytes of it are what the owner vouches for. HR_E_DIGEST. */
	int (*prove)(const struct hr__source *source, const void *bytes, size_t n);
	/* The checksums, read and proven once; they live as long as the source. */
	int (*blocks)(const struct hr__source *source, struct hr__source_blocks *out);
	void (*close)(struct hr__source *source); /* of what the owner lent: the descriptors are the owner's */
};

struct hr__source {
	struct hr__file file;
	struct hr__identity identity; /* as it was when the header was read; of a file */
	char *path;                   /* as opened; for messages */
	uint64_t base;                /* in the file; a multiple of the alignment of direct reads */
	uint64_t bytes;
	uint64_t room; /* how far from `base` a read may reach; UINT64_MAX for a file: its end ends reads */
	const struct hr__source_ops *ops; /* NULL: a file */
	void *owner;                      /* whose `ops` are */
	uint32_t number;                  /* the owner's name for it */
	uint64_t proven; /* how many bytes from the first the owner vouches for: a shard's header, a small file */
};

/* Opens a file below `directory_fd` (AT_FDCWD allowed) without following a link if `no_symlinks`. Never hangs on a
 * FIFO; only regular files. `path` is what messages call it. Fills the direct description too, or why there is
 * none. */
int hr__source_open_file(int directory_fd, const char *name, const char *path, int no_symlinks, struct hr__source *out);
void hr__source_close(struct hr__source *source);

/* HR_E_CHANGED, with what differs, if the file is no longer what it was at open. An owner's sources: what its check
 * says. */
int hr__source_check(const struct hr__source *source);

/* Reads exactly `bytes` at `offset` of the source, through the page cache, or around it where that is the only way.
 * HR_E_IO, HR_E_SHORT. For headers and tools. */
int hr__source_read(const struct hr__source *source, uint64_t offset, void *dst, size_t bytes);
/* Whether bytes that were read from the source's beginning are what its owner says, where it has one. Nothing of them
 * is looked at before. HR_E_DIGEST. */
int hr__source_prove(const struct hr__source *source, const void *bytes, size_t n);
/* The same without a word: 0 or an errno, and how much came. The range lies in the source. For any thread. */
int hr__source_pread(const struct hr__source *source, uint64_t offset, void *dst, size_t bytes, size_t *got);

#endif
