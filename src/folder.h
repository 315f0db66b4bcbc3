/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A folder: where the files of one model lie side by side under their names. A directory, or a model of a store: what
 * it takes to find an index and shards in it is the same, so open.c asks only this.
 */
#ifndef HR_FOLDER_H
#define HR_FOLDER_H

#include "model/source.h"
#include "store/view.h"

struct hr__folder {
	const char *name; /* for messages; paths of its files are "<name>/<file>" */
	int fd;           /* a directory; -1: a model of a store */
	int no_symlinks;  /* of a directory: its files may not be links */
	struct hr__view *view;
	uint32_t model;
};

/* A directory by its path, or a file's by the file's path (NULL: none in it). The folder keeps `name`. 0 or an
 * errno. */
int hr__folder_open_directory(const char *name, int no_symlinks, struct hr__folder *out);
/* A model of a store. Takes over a count of the view. */
void hr__folder_of_view(const char *name, struct hr__view *view, uint32_t model, struct hr__folder *out);
void hr__folder_close(struct hr__folder *folder);

/* "<name>/<file>" in new memory; NULL: HR_E_NOMEM. */
char *hr__folder_path(const struct hr__folder *folder, const char *file);
/* Calls `each` for all names that have no slash, unsorted; a non-zero answer ends the walk. Records its failure. */
int hr__folder_list(const struct hr__folder *folder, int (*each)(void *ctx, const char *name), void *ctx);
/* A file as a source; `path` is what messages call it. Errors: HR_E_NOTFOUND, HR_E_IO, and those of a store. */
int hr__folder_source(const struct hr__folder *folder, const char *file, const char *path, struct hr__source *out);

#endif
