/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A source: where a shard's bytes are. An open file with a base offset and a length; for a plain file the base is 0
 * and the length the file's. An object of a store is a source too: its base is where it lies in the region.
 */
#ifndef HR_MODEL_SOURCE_H
#define HR_MODEL_SOURCE_H

#include "core/os.h"

struct hr__source {
	struct hr__file file;
	struct hr__identity identity; /* as it was when the header was read */
	char *path;                   /* as opened; for messages */
	uint64_t base;
	uint64_t bytes;
};

/* Opens a file below `directory_fd` (AT_FDCWD allowed) without following a link if `no_symlinks`. Never hangs on a
 * FIFO; only regular files. `path` is what messages call it. Fills the direct description too, or why there is
 * none. */
int hr__source_open_file(int directory_fd, const char *name, const char *path, int no_symlinks, struct hr__source *out);
void hr__source_close(struct hr__source *source);

/* HR_E_CHANGED, with what differs, if the file is no longer what it was at open. */
int hr__source_check(const struct hr__source *source);

/* Reads exactly `bytes` at `offset` of the source, through the page cache. HR_E_IO, HR_E_SHORT. For headers and
 * tools. */
int hr__source_read(const struct hr__source *source, uint64_t offset, void *dst, size_t bytes);

#endif
