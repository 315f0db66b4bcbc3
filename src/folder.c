/* SPDX-License-Identifier: Apache-2.0 */
#include "folder.h"

#include "core/error.h"
#include "core/mem.h"

#include <fcntl.h>
#include <string.h>

int hr__folder_open_directory(const char *name, int no_symlinks, struct hr__folder *out)
{
	*out = (struct hr__folder){.name = name, .no_symlinks = no_symlinks, .fd = -1};
	return hr__os_open(AT_FDCWD, name, O_RDONLY | O_DIRECTORY, &out->fd);
}

void hr__folder_of_view(const char *name, struct hr__view *view, uint32_t model, struct hr__folder *out)
{
	*out = (struct hr__folder){.name = name, .fd = -1, .view = view, .model = model};
}

void hr__folder_close(struct hr__folder *folder)
{
	hr__os_close(folder->fd);
	hr__view_unref(folder->view);
	folder->fd = -1;
	folder->view = NULL;
}

char *hr__folder_path(const struct hr__folder *folder, const char *file)
{
	size_t length = strlen(folder->name);

	return hr__format("%s%s%s", folder->name, length && folder->name[length - 1] == '/' ? "" : "/", file);
}

int hr__folder_list(const struct hr__folder *folder, int (*each)(void *ctx, const char *name), void *ctx)
{
	const struct hr__where at = {.stage = "open", .path = folder->name, .offset = HR_NO_OFFSET};
	int error;

	if (folder->view) {
		hr__view_list(folder->view, folder->model, each, ctx);
		return 0;
	}
	error = hr__os_list(folder->fd, each, ctx);
	return error ? hr__fail_errno(&at, error, "list directory") : 0;
}

int hr__folder_source(const struct hr__folder *folder, const char *file, const char *path, struct hr__source *out)
{
	if (folder->view)
		return hr__view_source(folder->view, folder->model, file, path, out);
	return hr__source_open_file(folder->fd, file, path, folder->no_symlinks, out);
}
