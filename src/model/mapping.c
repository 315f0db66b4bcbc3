/* SPDX-License-Identifier: Apache-2.0 */
/* One mapping for each source; mapping.h has the rules. */
#include "mapping.h"

#include "core/error.h"

/* Makes the mapping, or finds that another thread has just made it. */
static int make(struct hr__mapping *mapping, const struct hr__source *source)
{
	void *made, *none = NULL;
	int error = hr__os_map_file(source->file.fd, 0, (size_t)source->bytes, &made);

	if (error)
		return hr__fail_errno(&(struct hr__where){.stage = "map", .path = source->path, .offset = HR_NO_OFFSET},
				      error, "map");
	if (!atomic_compare_exchange_strong(&mapping->memory, &none, made))
		hr__os_unmap(made, (size_t)source->bytes);
	return 0;
}

int hr__mapping_acquire(struct hr__mapping *mapping, const struct hr__source *source, unsigned char **out)
{
	const struct hr__where at = {.stage = "map", .path = source->path, .offset = HR_NO_OFFSET};
	int code;

	if (source->file.fd < 0 || source->file.is_block || source->ops)
		return hr__fail_at(&at, HR_E_UNSUPPORTED,
				   "%s is not a file of its own, so its tensors cannot be had in place; load them",
				   source->path);
	code = hr__source_check(source);
	if (!code && !atomic_load(&mapping->memory))
		code = make(mapping, source);
	if (code)
		return code;
	atomic_fetch_add(&mapping->n_users, 1);
	*out = atomic_load(&mapping->memory);
	return 0;
}

void hr__mapping_release(struct hr__mapping *mapping, const struct hr__source *source)
{
	/* Who comes while pages are let go of has them read again, and nothing worse. */
	if (atomic_fetch_sub(&mapping->n_users, 1) == 1)
		hr__os_let_go(atomic_load(&mapping->memory), (size_t)source->bytes);
}

void hr__mapping_close(struct hr__mapping *mapping, const struct hr__source *source)
{
	hr__os_unmap(atomic_load(&mapping->memory), (size_t)source->bytes);
	atomic_store(&mapping->memory, NULL);
}
