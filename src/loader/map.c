/* SPDX-License-Identifier: Apache-2.0 */
/* hr_map(): tensors in place, on cpu, for callers who asked for that. Nothing moves, so there is no loader in it; what
 * is here is the hints that a caller may ask for. The kernel takes them: we never touch the memory. */
#include "loader.h"

#include "core/arith.h"
#include "core/mem.h"

#include <errno.h>

/* Pages that cannot be had: because the file changed, or because its storage fails. */
static int fail_populate(const struct hr__source *source, const struct hr__extent *extent, int error)
{
	const struct hr__where at = {.stage = "map",
				     .path = source->path,
				     .offset = extent->offset,
				     .system = error == EFAULT ? EIO : error};
	int code = hr__source_check(source);

	if (code)
		return code;
	return hr__fail_errno(&at, at.system, "read ahead in");
}

static int hint(const hr_model *model, const struct hr__extent *extent, unsigned char *memory, uint32_t flags)
{
	const struct hr__source *source = hr__model_source(model, extent->source);
	size_t page = hr__os_page_bytes();
	uint64_t begin = hr__round_down(extent->offset, page),
		 end = hr__min_u64(hr__round_up(extent->offset + extent->bytes, page), source->bytes);
	int error = 0;

	if ((flags & HR_MAP_POPULATE) && extent->bytes)
		error = hr__os_populate(memory + begin, (size_t)(end - begin));
	if (extent->bytes && (error == ENOTSUP || flags == HR_MAP_AHEAD))
		hr__os_read_ahead(&source->file, begin, end - begin);
	return error && error != ENOTSUP ? fail_populate(source, extent, error) : 0;
}

static int map_extent(hr_model *model, const struct hr__extent *extent, uint32_t flags, hr_buffer **out)
{
	unsigned char *memory;
	int rc = hr__model_map(model, extent->source, &memory);

	if (rc)
		return rc;
	rc = hint(model, extent, memory, flags);
	if (!rc)
		rc = hr__buffer_new_mapped(model, extent, memory, out);
	if (rc)
		hr__model_unmap(model, extent->source);
	return rc;
}

int hr_map(hr_model *model, uint64_t tensor, const struct hr_map_opts *opts, hr_buffer **out)
{
	struct hr__extent extent;
	struct hr_map_opts own;
	int rc;

	if (!out || !model)
		return hr__fail(HR_E_OPTS, "hr_map: %s is NULL", out ? "the model" : "the result");
	*out = NULL;
	rc = hr__opts_copy(&own, sizeof(own), opts, "hr_map_opts");
	if (rc)
		return rc;
	if (own.flags & ~(HR_MAP_POPULATE | HR_MAP_AHEAD))
		return hr__fail(HR_E_OPTS, "hr_map_opts.flags is 0x%x: populate (1) and ahead (2) are known",
				own.flags);
	if (tensor >= hr_model_n_tensors(model))
		return hr__fail(HR_E_OPTS, "hr_map: tensor number %" PRIu64 " is out of range: the model has %" PRIu64,
				tensor, hr_model_n_tensors(model));
	hr__model_extent(model, tensor, &extent);
	return map_extent(model, &extent, own.flags, out);
}
