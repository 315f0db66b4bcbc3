/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How a chunk is read: by which engine, and through or around the page cache. Decided for each chunk, on the reader's
 * thread and without the lock, since asking what is resident is a system call.
 *
 * An engine that stages in windows of the page cache reads all there is, and always through it.
 *
 * With no engine named, bytes that are in the page cache are copied by the blocking engine, on as many threads as
 * there are readers; cold ones go to the queued engine where there is one, which costs a tenth of the CPU time.
 */
#include "loader.h"

#include "core/arith.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#define SAMPLE_BYTES ((uint64_t)512 << 10)

/* Whether a range is in the page cache, by one page in every SAMPLE_BYTES and the last: to walk all pages of a
 * range that is cached would cost a few percent of copying it, and a hole that is missed costs no more than a read
 * through the cache. Where there is no way to tell, that is the safe answer too. */
static bool is_resident(const struct hr__source *source, const struct hr__chunk *chunk)
{
	uint64_t end = source->base + chunk->offset + chunk->bytes, resident;

	for (uint64_t at = source->base + chunk->offset; at < end; at += SAMPLE_BYTES) {
		if (hr__os_resident(&source->file, at, 1, &resident))
			return true;
		if (resident == 0)
			return false;
	}
	return hr__os_resident(&source->file, end - 1, 1, &resident) || resident == 1;
}

/* Whether the loader has an engine for storage without descriptors, or for nothing else. */
static bool has_cap(const hr_loader *loader, uint32_t cap)
{
	return loader->blocking && (loader->blocking->caps & cap);
}

static bool wants_direct(const hr_loader *loader, const struct hr_job *job, const struct hr__source *source,
			 bool resident)
{
	if (source->file.fd < 0)
		return true;
	if (loader->caching == HR_CACHING_BYPASS)
		return true;
	if (loader->caching == HR_CACHING_FILL || resident || job->fill_cold)
		return false;
	return hr__file_is_direct(&source->file) && source->file.offset_align <= job->plan.align &&
	       !job->direct_refused;
}

void hr__choose(const hr_loader *loader, const struct hr_job *job, const struct hr__chunk *chunk,
		struct hr__choice *out)
{
	const struct hr__source *source = hr__model_source(job->model, chunk->source);
	bool is_asked = loader->caching == HR_CACHING_AUTO || (loader->blocking && loader->queued);
	bool resident;

	if (loader->pool.staging == HR__STAGING_WINDOW) {
		*out = (struct hr__choice){loader->blocking, false};
		return;
	}
	if (source->file.raw) {
		*out = (struct hr__choice){loader->blocking, true};
		return;
	}
	resident = is_asked && loader->caching != HR_CACHING_BYPASS && is_resident(source, chunk);
	out->direct = wants_direct(loader, job, source, resident);
	if (!loader->queued || (loader->blocking && resident && !out->direct))
		out->engine = loader->blocking;
	else
		out->engine = loader->queued;
}

void hr__choose_envelope(const struct hr_job *job, const struct hr__chunk *chunk, bool direct, struct hr__envelope *out)
{
	const struct hr__source *source = hr__model_source(job->model, chunk->source);

	hr__chunk_envelope(chunk, direct || job->blocks ? job->plan.align : 1, source->bytes, source->room, out);
}

/* Whether direct reads of a source can be cut to slots. A file system that wants more is read through the cache. */
static bool fits(const hr_loader *loader, const struct hr__source *source)
{
	uint64_t slot_bytes = loader->pool.slot_bytes;
	uint32_t align = source->file.offset_align;

	if (loader->pool.staging == HR__STAGING_DEVICE && align > HR__TAIL_BYTES)
		return false;
	return align <= slot_bytes / 2 && slot_bytes % align == 0 && source->base % align == 0 &&
	       (source->room == UINT64_MAX || source->room % align == 0);
}

/* A window is whole pages of a file that has pages in the cache. */
static int check_windows(const hr_loader *loader, const hr_model *model)
{
	for (uint32_t i = 0; i < hr__model_n_sources(model); i++) {
		const struct hr__source *source = hr__model_source(model, i);

		if (source->file.fd >= 0 && !source->file.is_block && source->base % hr__os_page_bytes() == 0)
			continue;
		return hr__fail_at(&(struct hr__where){.stage = "plan", .path = source->path, .offset = HR_NO_OFFSET},
				   HR_E_UNSUPPORTED,
				   "%s has no pages in the page cache that engine %s could use; use engine auto",
				   source->path, loader->blocking->name);
	}
	return 0;
}

static int check_raw(const hr_loader *loader, const struct hr__source *source)
{
	const struct hr__where at = {.stage = "plan", .path = source->path, .offset = HR_NO_OFFSET};
	const char *name = loader->blocking ? loader->blocking->name : loader->queued->name;

	if (source->file.raw && !has_cap(loader, HR__ENGINE_RAW))
		return hr__fail_at(
			&at, HR_E_UNSUPPORTED,
			"%s is read through uGDS, which engine %s cannot do; use engine ugds, or pread or auto "
			"(through host memory)",
			source->path, name);
	if (!source->file.raw && has_cap(loader, HR__ENGINE_RAW_ONLY))
		return hr__fail_at(
			&at, HR_E_UNSUPPORTED,
			"%s was not opened through uGDS, and engine %s reads nothing else; open a store's exported "
			"manifest with the node that has its device (ugds, --ugds), or use another engine",
			source->path, name);
	return 0;
}

int hr__choose_check(const hr_loader *loader, const hr_model *model)
{
	int rc = 0;

	for (uint32_t i = 0; i < hr__model_n_sources(model) && !rc; i++)
		rc = check_raw(loader, hr__model_source(model, i));
	if (rc)
		return rc;
	if (loader->pool.staging == HR__STAGING_WINDOW)
		return check_windows(loader, model);
	for (uint32_t i = 0; i < hr__model_n_sources(model); i++) {
		const struct hr__source *source = hr__model_source(model, i);
		const char *fs = hr__os_fs_name(source->file.fs_magic);
		char text[64];

		if (hr__file_is_direct(&source->file) && fits(loader, source))
			continue;
		if (hr__file_is_direct(&source->file) && loader->caching == HR_CACHING_BYPASS)
			return hr__fail_at(
				&(struct hr__where){.stage = "plan", .path = source->path, .offset = HR_NO_OFFSET},
				HR_E_UNSUPPORTED,
				"%s wants direct reads of %" PRIu32
				" bytes or a multiple, which do not fit into slots of %" PRIu64
				"; use slots of a multiple of twice that, or caching auto or fill",
				source->path, source->file.offset_align, loader->pool.slot_bytes);
		if (loader->caching == HR_CACHING_BYPASS || source->file.fd < 0)
			return hr__fail_at(
				&(struct hr__where){.stage = "plan",
						    .path = source->path,
						    .offset = HR_NO_OFFSET,
						    .system = source->file.direct_errno},
				HR_E_UNSUPPORTED,
				"%s cannot be read around the page cache: O_DIRECT is refused by %s (%s); use caching auto or fill",
				source->path, fs ? fs : "its file system",
				strerror_r(source->file.direct_errno, text, sizeof(text)));
	}
	return 0;
}

bool hr__choose_fill(const hr_loader *loader, const hr_model *model)
{
	uint64_t available;

	if (loader->caching != HR_CACHING_AUTO)
		return loader->caching == HR_CACHING_FILL;
	if (hr__model_n_sources(model) > 0 && hr__os_fs_is_network(hr__model_source(model, 0)->file.fs_magic))
		return true;
	available = hr__os_memory_available();
	return hr__model_bytes(model) <= available / 2;
}

void hr__choose_note(hr_loader *loader, const struct hr_job *job, char *out, size_t out_bytes)
{
	char text[64];

	out[0] = '\0';
	if (loader->pool.staging == HR__STAGING_DEVICE) {
		hr__window_note(loader, out, out_bytes);
		return;
	}
	if (job && hr__model_n_sources(job->model) > 0 && hr__model_source(job->model, 0)->file.raw) {
		snprintf(out, out_bytes,
			 "read through uGDS, GPU and host memory; engine ugds goes straight to the GPU");
		return;
	}
	if (loader->queued_reason[0]) {
		snprintf(out, out_bytes, "uring not used: %s", loader->queued_reason);
		return;
	}
	if (!job || loader->caching == HR_CACHING_FILL)
		return;
	if (job->direct_refused) {
		snprintf(out, out_bytes, "O_DIRECT not used: the first such read failed with EINVAL");
		return;
	}
	for (uint32_t i = 0; i < hr__model_n_sources(job->model); i++) {
		const struct hr__file *file = &hr__model_source(job->model, i)->file;
		const char *fs = hr__os_fs_name(file->fs_magic);

		if (hr__file_is_direct(file))
			continue;
		snprintf(out, out_bytes, "O_DIRECT not used: refused by %s (%s)", fs ? fs : "the file system",
			 strerror_r(file->direct_errno, text, sizeof(text)));
		return;
	}
}

uint32_t hr__choose_align(const hr_loader *loader, const hr_model *model)
{
	uint64_t align = HR__PLAN_ALIGN;

	if (loader->pool.staging == HR__STAGING_WINDOW)
		return (uint32_t)hr__max_u64(align, hr__os_page_bytes());

	for (uint32_t i = 0; i < hr__model_n_sources(model); i++) {
		const struct hr__source *source = hr__model_source(model, i);

		if (hr__file_is_direct(&source->file) && fits(loader, source))
			align = hr__max_u64(align, source->file.offset_align);
	}
	return (uint32_t)align;
}
