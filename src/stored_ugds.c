/* SPDX-License-Identifier: Apache-2.0 */
#include "stored_ugds.h"

#include "core/error.h"
#include "core/mem.h"
#include "device/device.h"
#include "engine/ugds_driver.h"

#include <errno.h>
#include <stdio.h>

#define BOUNCE_BYTES ((size_t)1 << 20)
#define BASE_ALIGN   ((uint64_t)64 << 10) /* where a store's region may begin in its device */

/* ---- a GPU for the session ---- */

/* The piece of GPU memory with the device that it is of. */
struct gpu {
	hr_device *device;
	void *bounce;
};

static int gpu_inside(void *ctx, void (*call)(void *arg), void *arg)
{
	hr_device *device = ((struct gpu *)ctx)->device;
	struct hr__device_error ignored;
	struct hr__device_visit visit;

	if (device->ops->enter(device, &visit, &ignored))
		return HR_E_DEVICE;
	call(arg);
	device->ops->leave(&visit);
	return 0;
}

static int gpu_read_back(void *ctx, void *dst, const void *src, size_t bytes)
{
	hr_device *device = ((struct gpu *)ctx)->device;
	struct hr__device_error ignored;

	return device->ops->read_back(device, dst, src, bytes, &ignored);
}

/* Memory that is kept keeps its device. */
static void gpu_close(void *ctx, bool is_kept)
{
	struct hr__device_error ignored;
	struct gpu *gpu = ctx;

	if (is_kept)
		return;
	gpu->device->ops->window_free(gpu->device, gpu->bounce, &ignored);
	hr_device_close(gpu->device);
	hr__free(gpu);
}

/* The first GPU: it only carries headers and records to the host. */
static int gpu_open(struct hr__ugds_gpu *out, struct hr__ugds_fault *fault)
{
	struct hr__device_error error = {0};
	struct gpu *gpu = hr__calloc(1, sizeof(*gpu));
	int code = gpu ? hr_device_open("cuda:0", &gpu->device) : HR_E_NOMEM;

	if (code) {
		snprintf(fault->reason, sizeof(fault->reason), "uGDS reads into GPU memory: %.200s",
			 gpu ? hr_error_last()->message : "out of host memory");
		hr__free(gpu);
		return code;
	}
	code = gpu->device->ops->window_alloc(gpu->device, BOUNCE_BYTES, &gpu->bounce, &error);
	if (code) {
		fault->system = error.system;
		snprintf(fault->reason, sizeof(fault->reason), "no GPU memory for reads: %s", error.reason);
		hr_device_close(gpu->device);
		hr__free(gpu);
		return code;
	}
	*out = (struct hr__ugds_gpu){gpu->bounce, BOUNCE_BYTES, gpu_inside, gpu_read_back, gpu_close, gpu};
	return 0;
}

/* ---- the region ---- */

struct ugds_region {
	struct hr__region base;
	struct hr__ugds *session;
};

static int region_read(struct hr__region *region, uint64_t off, void *dst, size_t bytes)
{
	struct hr__raw *raw = region->file.raw;

	if (off > region->facts.bytes || bytes > region->facts.bytes - off)
		return EINVAL;
	return raw->ops->read(raw, region->file_base + off, dst, bytes);
}

static int region_write(struct hr__region *region, uint64_t off, const void *src, size_t bytes)
{
	(void)region;
	(void)off;
	(void)src;
	(void)bytes;
	return EROFS;
}

static int region_flush(struct hr__region *region)
{
	(void)region;
	return EROFS;
}

static int region_facts(struct hr__region *region, struct hr__region_facts *out)
{
	*out = region->facts;
	return 0;
}

static int region_lock(struct hr__region *region, enum hr__os_lock kind, uint64_t byte)
{
	(void)region;
	(void)kind;
	(void)byte;
	return ENOTSUP;
}

static int region_lowest_lock(struct hr__region *region, uint64_t first, uint64_t last, uint64_t *lowest)
{
	(void)region;
	(void)first;
	(void)last;
	*lowest = UINT64_MAX;
	return ENOTSUP;
}

static void region_close(struct hr__region *region)
{
	hr__ugds_unref(((struct ugds_region *)region)->session);
	hr__free(region->path);
	hr__free(region);
}

static const struct hr__region_ops ugds_region_ops = {
	.read = region_read,
	.write = region_write,
	.flush = region_flush,
	.facts = region_facts,
	.lock = region_lock,
	.lowest_lock = region_lowest_lock,
	.close = region_close,
};

static int check_manifest(const struct hr__ugds_place *place)
{
	const struct hr__where at = {.stage = "sidecar", .path = place->sidecar, .offset = HR_NO_OFFSET};
	const struct hr__pin_region *region = place->region;

	if (!region->bytes || !region->lba_bytes)
		return hr__fail_at(&at, HR_E_FIELD,
				   "%s does not say where in its device the store lies (\"region\"); export it again",
				   place->sidecar);
	if (region->base % BASE_ALIGN || region->base > UINT64_MAX - region->bytes)
		return hr__fail_at(&at, HR_E_GEOMETRY,
				   "%s: the region of %" PRIu64 " bytes at %" PRIu64
				   " does not begin at a multiple of 64 KiB, or ends beyond all disks",
				   place->sidecar, region->bytes, region->base);
	return 0;
}

static int check_disk(const struct hr__ugds_place *place, const struct hr__ugds *session)
{
	const struct hr__where at = {.stage = "open", .path = place->node, .offset = HR_NO_OFFSET};
	const struct hr__pin_region *region = place->region;
	uint64_t capacity = hr__ugds_capacity(session);

	if (hr__ugds_lba_bytes(session) != region->lba_bytes)
		return hr__fail_at(&at, HR_E_GEOMETRY,
				   "%s has sectors of %" PRIu32
				   " bytes, and the store that %s describes is on a device with "
				   "sectors of %" PRIu64 ": it is another disk, or was formatted anew",
				   place->node, hr__ugds_lba_bytes(session), place->sidecar, region->lba_bytes);
	if (region->device_bytes > capacity || region->base + region->bytes > capacity)
		return hr__fail_at(
			&at, HR_E_GEOMETRY,
			"%s has %" PRIu64 " bytes by uGDS's count, and the store that %s describes ends at %" PRIu64
			" of a device of %" PRIu64 ": it is another disk",
			place->node, capacity, place->sidecar, region->base + region->bytes, region->device_bytes);
	return 0;
}

static int open_session(const struct hr__ugds_place *place, struct hr__ugds **out)
{
	struct hr__where at = {.stage = "open", .path = place->node, .offset = HR_NO_OFFSET};
	struct hr__ugds_fault fault;
	int code = hr__ugds_open(place->node, gpu_open, out, &fault);

	at.system = fault.system;
	return code ? hr__fail_at(&at, code, "%s cannot be used through uGDS: %s", place->node, fault.reason) : 0;
}

int hr__ugds_region_open(void *ctx, struct hr__region **out)
{
	const struct hr__ugds_place *place = ctx;
	struct ugds_region *region;
	struct hr__ugds *session = NULL;
	int code = check_manifest(place);

	*out = NULL;
	if (!code)
		code = open_session(place, &session);
	if (!code)
		code = check_disk(place, session);
	region = code ? NULL : hr__calloc(1, sizeof(*region));
	if (region)
		region->base.path = hr__strdup(place->node);
	if (!region || !region->base.path) {
		hr__free(region);
		hr__ugds_unref(session);
		return code ? code : HR_E_NOMEM;
	}
	region->session = session;
	region->base.ops = &ugds_region_ops;
	region->base.file_base = place->region->base;
	region->base.facts = (struct hr__region_facts){.bytes = place->region->bytes,
						       .lba_bytes = hr__ugds_lba_bytes(session),
						       .is_block = true,
						       .is_read_only = true};
	region->base.file = (struct hr__file){.fd = -1,
					      .direct_fd = -1,
					      .memory_align = 4096,
					      .offset_align = hr__ugds_lba_bytes(session),
					      .is_block = true,
					      .bytes = hr__ugds_capacity(session),
					      .raw = hr__ugds_raw(session)};
	*out = &region->base;
	return 0;
}

int hr__ugds_compare(const struct hr__ugds_place *place, const struct hr__snapshot *snapshot)
{
	const struct hr__where at = {.stage = "store", .path = place->node, .offset = HR_NO_OFFSET};
	const struct hr__pin_region *said = place->region;
	const struct hr__label *label = &snapshot->label;

	if (label->region_len == said->bytes && label->ident.region_base == said->base &&
	    label->ident.device_bytes == said->device_bytes && label->lba_bytes == said->lba_bytes)
		return 0;
	return hr__fail_at(&at, HR_E_PIN,
			   "%s: the store's label says that it has %" PRIu64 " bytes at %" PRIu64 " of %" PRIu64
			   " with sectors of %" PRIu32 ", and %s says %" PRIu64 " at %" PRIu64 " of %" PRIu64
			   " with %" PRIu64 "; export the manifest again",
			   place->node, label->region_len, label->ident.region_base, label->ident.device_bytes,
			   label->lba_bytes, place->sidecar, said->bytes, said->base, said->device_bytes,
			   said->lba_bytes);
}
