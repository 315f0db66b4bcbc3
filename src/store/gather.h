/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What an import takes in: the files behind a name. All of them are looked at, and the headers of all shards checked,
 * before anything is written.
 */
#ifndef HR_STORE_GATHER_H
#define HR_STORE_GATHER_H

#include "manifest.h"
#include "model/source.h"

struct hr__import_file {
	char *path, *name; /* name: relative, as the model has it */
	struct hr__identity identity;
	uint64_t bytes;
	uint32_t kind;
	/* Of a shard. */
	uint64_t header_len;
	uint8_t header_sha256[32];
	uint32_t n_tensors;
};

struct hr__gathered {
	struct hr__import_file *files;
	uint32_t n, room;
	uint32_t n_skipped; /* directories with a name that begins with a dot */
	uint64_t bytes;
};

/* A directory with all that is in it, an index and the shards that it names, or one file. Links to files are
 * followed, links to directories refused. HR_E_NOTFOUND, HR_E_IO, HR_E_PATH (a name that a model cannot have),
 * HR_E_INDEX, those of headers. */
int hr__gather(const char *path, struct hr__gathered *out);
void hr__gathered_free(struct hr__gathered *gathered);
/* Opens a file again; HR_E_CHANGED if it is not what was looked at. */
int hr__import_file_open(const struct hr__import_file *file, struct hr__source *out);

#endif
