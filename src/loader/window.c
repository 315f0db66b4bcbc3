/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Staging on the device: the pool's memory is one window of GPU memory, which an engine's library registers once and
 * fills without the CPU. Nothing else stands beside it but a little host memory: a block for each slot, since a file's
 * last partial block cannot be read so and goes through there, and 64 KiB for each reader, through which slots are
 * verified.
 *
 * Opening: the window, then the engine over it. Where a window of the size asked for cannot be registered, half of it
 * is tried, down to two slots; the statistics say so. Closing is the same backwards, when all threads have ended. A
 * window that its library does not let go of is never freed.
 */
#include "loader.h"

#include "core/arith.h"
#include "core/os_library.h"

#include <stdio.h>

#define MIN_SLOTS 2u

/* ---- opening and closing ---- */

static int open_tails(hr_loader *loader)
{
	struct hr__pool *pool = &loader->pool;
	struct hr__device_error error = {0};
	size_t all_tails = (size_t)pool->n_slots * HR__TAIL_BYTES;
	size_t bytes = all_tails + loader->n_readers * HR__BOUNCE_BYTES;
	void *memory;
	int rc = hr__os_map(bytes, &memory);

	if (rc)
		return hr__fail_errno(&(struct hr__where){.stage = "loader", .offset = HR_NO_OFFSET}, rc,
				      "allocate staging memory");
	pool->tails = memory;
	pool->tails_bytes = bytes;
	hr__os_touch(memory, bytes);
	rc = loader->device->ops->pin(loader->device, memory, bytes, &error);
	if (rc)
		return hr__device_fail(loader->device, rc, "cannot register the staging memory", &error);
	loader->is_pinned = true;
	for (uint32_t i = 0; i < pool->n_slots; i++)
		pool->slots[i].tail = pool->tails + (size_t)i * HR__TAIL_BYTES;
	for (uint32_t i = 0; i < loader->n_readers; i++)
		loader->readers[i].bounce = pool->tails + all_tails + i * HR__BOUNCE_BYTES;
	return 0;
}

/* What the engine's library takes beside the window, as far as it can be seen from outside: others of the process
 * and of the GPU move the same figures. */
struct taken {
	uint64_t host, device;
};

static struct taken look(hr_loader *loader)
{
	struct hr_device_info info = HR_DEVICE_INFO_INIT;
	struct hr__device_error ignored;
	struct taken now = {hr__os_resident_set(), 0};

	if (loader->device->ops->info(loader->device, &info, &ignored) == 0)
		now.device = info.total_bytes - info.free_bytes;
	return now;
}

static void free_window(hr_loader *loader)
{
	struct hr__device_error ignored;

	if (loader->pool.memory && !loader->window_is_kept)
		loader->device->ops->window_free(loader->device, loader->pool.memory, &ignored);
	loader->pool.memory = NULL;
}

static int open_engine(hr_loader *loader, const struct hr__engine_ops *ops, char *reason, size_t reason_bytes)
{
	struct hr__device_error error = {0};
	struct hr__device_visit visit;
	struct taken before = look(loader), after;
	int rc = loader->device->ops->enter(loader->device, &visit, &error);

	if (rc) {
		snprintf(reason, reason_bytes, "%s", error.reason);
		return rc;
	}
	rc = hr__loader_engine(loader, ops, reason, reason_bytes);
	loader->device->ops->leave(&visit);
	after = look(loader);
	loader->engine_host_bytes = after.host > before.host ? after.host - before.host : 0;
	loader->engine_device_bytes = after.device > before.device ? after.device - before.device : 0;
	return rc;
}

static int try_window(hr_loader *loader, const struct hr__engine_ops *ops, uint32_t n, char *reason,
		      size_t reason_bytes)
{
	struct hr__pool *pool = &loader->pool;
	struct hr__device_error error = {0};
	void *memory;
	int rc = loader->device->ops->window_alloc(loader->device, n * pool->slot_bytes, &memory, &error);

	if (rc) {
		snprintf(reason, reason_bytes, "%s", error.reason);
		return rc;
	}
	hr__pool_place(pool, memory, n);
	rc = open_engine(loader, ops, reason, reason_bytes);
	if (rc)
		free_window(loader);
	return rc;
}

int hr__window_open(hr_loader *loader, const struct hr__engine_ops *ops, char *reason, size_t reason_bytes)
{
	uint32_t n = loader->pool.n_slots;
	int rc;

	if (!loader->device->ops->window_alloc) {
		snprintf(reason, reason_bytes, "it reads into GPU memory, and the device is %s", loader->device->spec);
		return HR_E_UNSUPPORTED;
	}
	loader->window_asked = loader->pool.bytes;
	rc = open_tails(loader);
	if (rc)
		return rc;
	for (;;) {
		rc = try_window(loader, ops, n, reason, reason_bytes);
		if (rc == 0) {
			loader->window_bytes = loader->pool.bytes;
			loader->is_reportable = true;
		}
		if (rc != HR_E_SPACE)
			return rc;
		snprintf(loader->window_reason, sizeof(loader->window_reason), "%s", reason);
		if (n == MIN_SLOTS)
			return HR_E_GDS;
		n = n / 2 > MIN_SLOTS ? n / 2 : MIN_SLOTS;
	}
}

void hr__window_close(hr_loader *loader)
{
	struct hr__pool *pool = &loader->pool;
	struct hr__device_error ignored;
	struct hr__device_visit visit;

	pthread_mutex_lock(&loader->report_lock);
	loader->is_reportable = false;
	pthread_mutex_unlock(&loader->report_lock);
	if (loader->blocking) {
		bool entered = loader->device->ops->enter(loader->device, &visit, &ignored) == 0;

		loader->blocking->close(loader->blocking_state);
		if (entered)
			loader->device->ops->leave(&visit);
	}
	free_window(loader);
	if (loader->is_pinned)
		loader->device->ops->unpin(loader->device, pool->tails, &ignored);
	if (pool->tails)
		hr__os_unmap(pool->tails, pool->tails_bytes);
}

#define MIB 1048576.0

void hr__window_note(hr_loader *loader, char *out, size_t out_bytes)
{
	struct hr__engine_report report = {0};
	int n;

	pthread_mutex_lock(&loader->report_lock);
	if (loader->is_reportable && loader->blocking->report)
		loader->blocking->report(loader->blocking_state, &report);
	pthread_mutex_unlock(&loader->report_lock);
	n = snprintf(out, out_bytes, "%s", report.note);
	if (report.all && (size_t)n < out_bytes)
		n += snprintf(out + n, out_bytes - (size_t)n, "; %llu of %llu reads went through host memory",
			      (unsigned long long)report.through_host, (unsigned long long)report.all);
	if (loader->window_bytes < loader->window_asked && (size_t)n < out_bytes)
		snprintf(out + n, out_bytes - (size_t)n, "; window %.1f of %.1f MiB: %s",
			 (double)loader->window_bytes / MIB, (double)loader->window_asked / MIB, loader->window_reason);
	else if ((size_t)n < out_bytes)
		snprintf(out + n, out_bytes - (size_t)n,
			 "; beside the window the library took about %.1f MiB of host and %.1f MiB of GPU memory",
			 (double)loader->engine_host_bytes / MIB, (double)loader->engine_device_bytes / MIB);
}

/* ---- the end of a file ---- */

/* What the file has goes into the slot, but for a partial block at its end. A source in a region, a store's, has no
 * such end: what is behind its bytes may be read too. */
void hr__window_aim(struct hr__slot *slot, const struct hr__source *source)
{
	struct hr__io *io = &slot->io;

	slot->tail_bytes = 0;
	if (!io->direct)
		return;
	if (source->room != UINT64_MAX || io->expected == io->asked) {
		io->expected = io->asked;
		return;
	}
	slot->tail_at = (size_t)hr__round_down(io->expected, io->file->offset_align);
	slot->tail_bytes = io->expected - slot->tail_at;
	io->asked = io->expected = slot->tail_at;
}

bool hr__window_read_tail(struct hr__slot *slot)
{
	struct hr__io *io = &slot->io;
	const struct hr__file *file = io->file;
	size_t got, wanted = file->fd >= 0 ? slot->tail_bytes : HR__TAIL_BYTES; /* direct reads are of whole blocks */
	int error;

	if (slot->tail_bytes == 0)
		return true;
	error = hr__os_pread_full(file->fd >= 0 ? file->fd : file->direct_fd, slot->tail, wanted,
				  io->offset + slot->tail_at, &got);
	if (error) {
		hr__io_fail(io, error);
		return false;
	}
	if (got < slot->tail_bytes) {
		io->code = HR_E_SHORT;
		io->got += got;
		return false;
	}
	io->got += slot->tail_bytes;
	return true;
}
