/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The cuda device: NVIDIA GPUs through the driver (cuda_driver.c). Here is the device and its memory; cuda_lane.c has
 * the streams and what copies.
 *
 * Always: the primary context is used, never one of our own; the caller's current context is current again when a call
 * returns; the NULL stream is never touched; after a sticky failure nothing is called any more, clean-up included.
 *
 * Memory comes from a private stream-ordered pool, which keeps nothing (release threshold 0): what is freed goes back
 * to the system at the next synchronisation. Where the driver has no pools, from cuMemAlloc.
 */
#include "cuda_driver.h"

#include "core/arith.h"
#include "core/mem.h"

#include <stdio.h>
#include <string.h>

#define MIB ((size_t)1 << 20)

static bool has_batch(void)
{
	return hr__cu_api.batch_v1 || hr__cu_api.batch_v2;
}

static void describe(int ordinal, char (*about)[240])
{
	hr__cu_device device;
	char name[112] = "";
	size_t bytes = 0;

	if (HR__CU(cuDeviceGet, &device, ordinal) || HR__CU(cuDeviceGetName, name, (int)sizeof(name), device) ||
	    HR__CU(cuDeviceTotalMem, &bytes, device)) {
		snprintf(*about, sizeof(*about), "the driver does not describe it");
		return;
	}
	name[sizeof(name) - 1] = '\0';
	snprintf(*about, sizeof(*about), "%s, %zu MiB, CUDA %d.%d, %s", name, bytes / MIB, hr__cu_api.version / 1000,
		 hr__cu_api.version % 1000 / 10, has_batch() ? "copies in batches" : "copies one by one");
}

static int cuda_probe(int *n_devices, char (*about)[240], int max, struct hr__device_error *error)
{
	int rc = hr__cuda_load(error);

	*n_devices = 0;
	if (!rc)
		rc = HR__CU_CHECK(NULL, error, cuDeviceGetCount, n_devices);
	if (!rc && *n_devices == 0) {
		error->system = 0;
		snprintf(error->reason, sizeof(error->reason), "the CUDA driver sees no GPU");
		rc = HR_E_NOTFOUND;
	}
	if (rc)
		return rc == HR_E_NOTFOUND ? HR_E_UNSUPPORTED : rc;
	for (int i = 0; i < *n_devices && i < max; i++)
		describe(i, &about[i]);
	return 0;
}

/* A pool's first allocation has the driver set things up for some 10 ms: once, here, and not in the first load. Its
 * memory goes back at once. */
static void warm_pool(struct hr__cuda *cuda)
{
	hr__cu_ptr first;

	if (HR__CU(cuMemAllocFromPoolAsync, &first, 256, cuda->pool, cuda->memory_stream))
		return;
	HR__CU(cuMemFreeAsync, first, cuda->memory_stream);
	HR__CU(cuStreamSynchronize, cuda->memory_stream);
}

/* The pool is a better way to have memory; without it cuMemAlloc serves. */
static void make_pool(struct hr__cuda *cuda)
{
	const struct hr__cu_pool_props props = {.alloc_type = HR__CU_ALLOCATION_PINNED,
						.location = {HR__CU_LOCATION_DEVICE, cuda->device}};
	int has_pools = 0, off = 0;

	if (!hr__cu_api.cuMemPoolCreate || !hr__cu_api.cuMemPoolDestroy || !hr__cu_api.cuMemPoolSetAttribute ||
	    !hr__cu_api.cuMemAllocFromPoolAsync || !hr__cu_api.cuMemFreeAsync)
		return;
	if (HR__CU(cuDeviceGetAttribute, &has_pools, HR__CU_ATTRIBUTE_POOLS_SUPPORTED, cuda->device) || !has_pools)
		return;
	if (HR__CU(cuMemPoolCreate, &cuda->pool, &props)) {
		cuda->pool = NULL;
		return;
	}
	/* An allocation must not be made to wait for a consumer's stream while there is other memory. */
	HR__CU(cuMemPoolSetAttribute, cuda->pool, HR__CU_POOL_INTERNAL_DEPENDENCIES, &off);
	warm_pool(cuda);
}

/* In the context. */
static int make_parts(struct hr__cuda *cuda, struct hr__device_error *error)
{
	int host_pointers = 0, rc;

	rc = HR__CU_CHECK(cuda, error, cuStreamCreate, &cuda->memory_stream, HR__CU_STREAM_NON_BLOCKING);
	if (!rc)
		rc = HR__CU_CHECK(cuda, error, cuStreamCreate, &cuda->release_stream, HR__CU_STREAM_NON_BLOCKING);
	if (!rc)
		rc = HR__CU_CHECK(cuda, error, cuStreamCreate, &cuda->signal_stream, HR__CU_STREAM_NON_BLOCKING);
	if (!rc)
		rc = HR__CU_CHECK(cuda, error, cuEventCreate, &cuda->signal_event, HR__CU_EVENT_DISABLE_TIMING);
	if (rc)
		return rc;
	make_pool(cuda);
	/* In a batch a source is a device address. Registered host memory has the same one only if the device says
	 * so. */
	if (HR__CU(cuDeviceGetAttribute, &host_pointers, HR__CU_ATTRIBUTE_HOST_POINTER_USABLE, cuda->device))
		host_pointers = 0;
	cuda->batch = has_batch() && host_pointers ? HR__CUDA_BATCH_UNTRIED : HR__CUDA_BATCH_NONE;
	return 0;
}

static void cuda_close(hr_device *device)
{
	struct hr__cuda *cuda = hr__cuda_of(device);
	struct hr__device_error ignored;
	struct hr__device_visit visit;

	if (cuda->context && hr__cuda_enter(cuda, &visit, &ignored) == 0) {
		if (cuda->pool)
			HR__CU(cuMemPoolDestroy, cuda->pool);
		if (cuda->signal_event)
			HR__CU(cuEventDestroy, cuda->signal_event);
		if (cuda->signal_stream)
			HR__CU(cuStreamDestroy, cuda->signal_stream);
		if (cuda->release_stream)
			HR__CU(cuStreamDestroy, cuda->release_stream);
		if (cuda->memory_stream)
			HR__CU(cuStreamDestroy, cuda->memory_stream);
		hr__cuda_leave(&visit);
	}
	if (cuda->context && !cuda->broken)
		HR__CU(cuDevicePrimaryCtxRelease, cuda->device);
	cuda->context = NULL;
	while (cuda->pins) {
		struct hr__cuda_pin *pin = cuda->pins;

		cuda->pins = pin->next;
		hr__free(pin);
	}
	while (cuda->windows) {
		struct hr__cuda_window *window = cuda->windows;

		cuda->windows = window->next;
		hr__free(window);
	}
	pthread_mutex_destroy(&cuda->lock);
}

static int find_device(struct hr__cuda *cuda, int ordinal, struct hr__device_error *error)
{
	int count = 0, rc = HR__CU_CHECK(NULL, error, cuDeviceGetCount, &count);

	if (!rc && ordinal >= count) {
		error->system = 0;
		snprintf(error->reason, sizeof(error->reason),
			 "the driver shows %d device%s to this process, numbered from 0", count, count == 1 ? "" : "s");
		return HR_E_NOTFOUND;
	}
	if (!rc)
		rc = HR__CU_CHECK(NULL, error, cuDeviceGet, &cuda->device, ordinal);
	return rc;
}

static int cuda_open(hr_device *device, int ordinal, struct hr__device_error *error)
{
	struct hr__cuda *cuda = hr__cuda_of(device);
	struct hr__device_visit visit;
	int rc = hr__cuda_load(error);

	if (!rc)
		rc = find_device(cuda, ordinal, error);
	if (rc)
		return rc;
	if (pthread_mutex_init(&cuda->lock, NULL)) {
		snprintf(error->reason, sizeof(error->reason), "a lock could not be made");
		return HR_E_NOMEM;
	}
	rc = HR__CU_CHECK(cuda, error, cuDevicePrimaryCtxRetain, &cuda->context, cuda->device);
	if (!rc) {
		rc = hr__cuda_enter(cuda, &visit, error);
		if (!rc) {
			rc = make_parts(cuda, error);
			hr__cuda_leave(&visit);
		}
	} else {
		cuda->context = NULL;
	}
	if (rc)
		cuda_close(device);
	return rc;
}

static int cuda_info(hr_device *device, struct hr_device_info *out, struct hr__device_error *error)
{
	struct hr__cuda *cuda = hr__cuda_of(device);
	size_t free_bytes = 0, total_bytes = 0;
	struct hr__device_visit visit;
	int rc = hr__cuda_enter(cuda, &visit, error);

	if (rc)
		return rc;
	rc = HR__CU_CHECK(cuda, error, cuDeviceGetName, out->name, (int)sizeof(out->name), cuda->device);
	if (!rc)
		rc = HR__CU_CHECK(cuda, error, cuMemGetInfo, &free_bytes, &total_bytes);
	hr__cuda_leave(&visit);
	out->name[sizeof(out->name) - 1] = '\0';
	out->free_bytes = free_bytes;
	out->total_bytes = total_bytes;
	out->driver = (uint32_t)hr__cu_api.version;
	out->flags = cuda->batch == HR__CUDA_BATCH_NONE ? 0 : HR_DEVICE_BATCH_COPY;
	return rc;
}

/* In the context. Any lane may copy into the memory as soon as this returns, so it is waited for: the stream is
 * empty. */
static int alloc_from_pool(struct hr__cuda *cuda, size_t bytes, hr__cu_ptr *out, struct hr__device_error *error)
{
	int rc = HR__CU_CHECK(cuda, error, cuMemAllocFromPoolAsync, out, bytes, cuda->pool, cuda->memory_stream);

	if (rc)
		return rc;
	rc = HR__CU_CHECK(cuda, error, cuStreamSynchronize, cuda->memory_stream);
	if (rc && !cuda->broken)
		hr__cu_api.cuMemFreeAsync(*out, cuda->memory_stream);
	return rc;
}

/* In the context. What was released may still be behind a consumer's work: worth waiting for before giving up. */
static int alloc_somehow(struct hr__cuda *cuda, size_t bytes, hr__cu_ptr *out, struct hr__device_error *error)
{
	size_t free_bytes = 0, total_bytes = 0;
	int rc;

	if (!cuda->pool)
		rc = HR__CU_CHECK(cuda, error, cuMemAlloc, out, bytes);
	else
		rc = alloc_from_pool(cuda, bytes, out, error);
	if (rc == HR_E_DEVICE_MEMORY && cuda->pool &&
	    HR__CU(cuStreamSynchronize, cuda->release_stream) == HR__CU_SUCCESS)
		rc = alloc_from_pool(cuda, bytes, out, error);
	if (rc == HR_E_DEVICE_MEMORY && HR__CU(cuMemGetInfo, &free_bytes, &total_bytes) == HR__CU_SUCCESS)
		snprintf(error->reason, sizeof(error->reason),
			 "%zu bytes were asked for, %zu of %zu are free: free some, or use a device with more", bytes,
			 free_bytes, total_bytes);
	return rc;
}

static int cuda_alloc(hr_device *device, uint64_t bytes, void **out, struct hr__device_error *error)
{
	struct hr__cuda *cuda = hr__cuda_of(device);
	struct hr__device_visit visit;
	hr__cu_ptr memory = 0;
	int rc = hr__cuda_enter(cuda, &visit, error);

	*out = NULL;
	if (rc)
		return rc;
	rc = alloc_somehow(cuda, bytes ? bytes : 1, &memory, error);
	hr__cuda_leave(&visit);
	if (!rc)
		*out = (void *)(uintptr_t)memory;
	return rc;
}

/* Gives memory back in the order of `stream`. Without a pool that means: when the stream has come so far, if somebody's
 * work may still be before it there (`is_used`). */
static int release_on(struct hr__cuda *cuda, void *memory, hr__cu_stream stream, bool is_used,
		      struct hr__device_error *error)
{
	hr__cu_ptr address = (hr__cu_ptr)(uintptr_t)memory;
	struct hr__device_visit visit;
	int rc;

	if (!memory)
		return 0;
	rc = hr__cuda_enter(cuda, &visit, error);
	if (rc)
		return rc;
	if (cuda->pool) {
		rc = HR__CU_CHECK(cuda, error, cuMemFreeAsync, address, stream);
	} else {
		if (is_used)
			rc = HR__CU_CHECK(cuda, error, cuStreamSynchronize, stream);
		if (!rc)
			rc = HR__CU_CHECK(cuda, error, cuMemFree, address);
	}
	hr__cuda_leave(&visit);
	return rc;
}

static int cuda_release(hr_device *device, void *memory, uint64_t bytes, struct hr__device_error *error)
{
	struct hr__cuda *cuda = hr__cuda_of(device);

	(void)bytes;
	return release_on(cuda, memory, cuda->release_stream, true, error);
}

/* On the stream on which memory is taken: so the next allocation comes after it. */
static int cuda_release_idle(hr_device *device, void *memory, uint64_t bytes, struct hr__device_error *error)
{
	struct hr__cuda *cuda = hr__cuda_of(device);

	(void)bytes;
	return release_on(cuda, memory, cuda->memory_stream, false, error);
}

/* In the context: undoes the first `bytes` of a registration. */
static int unregister(struct hr__cuda *cuda, const struct hr__cuda_pin *pin, size_t bytes,
		      struct hr__device_error *error)
{
	int rc = 0;

	for (size_t at = 0; at < bytes; at += pin->segment_bytes) {
		hr__cu_result result = HR__CU(cuMemHostUnregister, pin->base + at);
		int one = 0;

		if (result != HR__CU_NOT_REGISTERED) /* which it is when an earlier try got so far */
			one = hr__cuda_check(cuda, error, "cuMemHostUnregister", result);
		rc = rc ? rc : one;
	}
	return rc;
}

/* In the context. */
static int register_segments(struct hr__cuda *cuda, const struct hr__cuda_pin *pin, struct hr__device_error *error)
{
	for (size_t at = 0; at < pin->bytes; at += pin->segment_bytes) {
		size_t part = hr__min_u64(pin->segment_bytes, pin->bytes - at);
		struct hr__device_error ignored;
		int rc = HR__CU_CHECK(cuda, error, cuMemHostRegister, pin->base + at, part, pin->flags);

		if (rc && !cuda->broken)
			unregister(cuda, pin, at, &ignored);
		if (rc)
			return rc == HR_E_DEVICE_MEMORY ? HR_E_NOMEM : rc; /* it is host memory that could not be had */
	}
	return 0;
}

/* In the context. Drivers are known to refuse a large range that they take in pieces; the first refusal is what is
 * told. */
static int register_somehow(struct hr__cuda *cuda, struct hr__cuda_pin *pin, struct hr__device_error *error)
{
	struct hr__device_error ignored;
	int rc;

	pin->segment_bytes = pin->bytes;
	rc = register_segments(cuda, pin, error);
	for (size_t segment = 256 * MIB; rc && !cuda->broken && segment >= 32 * MIB; segment /= 2) {
		if (segment >= pin->bytes)
			continue;
		pin->segment_bytes = segment;
		if (register_segments(cuda, pin, &ignored) == 0)
			rc = 0;
	}
	return rc;
}

/* In the context. Where the GPU walks the host's own page tables, the driver knows no read-only registrations and
 * needs none; anywhere else it refuses the plain one too, and its first answer is what is told. */
static int register_read_only(struct hr__cuda *cuda, struct hr__cuda_pin *pin, struct hr__device_error *error)
{
	struct hr__device_error ignored;
	int rc;

	pin->flags |= HR__CU_HOST_REGISTER_READ_ONLY;
	rc = register_somehow(cuda, pin, error);
	if (!rc || cuda->broken || error->system != HR__CU_NOT_SUPPORTED)
		return rc;
	pin->flags &= ~(unsigned int)HR__CU_HOST_REGISTER_READ_ONLY;
	pin->segment_bytes = pin->bytes;
	return register_segments(cuda, pin, &ignored) ? rc : 0;
}

static void add_pin(struct hr__cuda *cuda, struct hr__cuda_pin *pin)
{
	pthread_mutex_lock(&cuda->lock);
	pin->next = cuda->pins;
	cuda->pins = pin;
	pthread_mutex_unlock(&cuda->lock);
}

static int pin_somehow(hr_device *device, void *memory, size_t bytes, bool read_only, struct hr__device_error *error)
{
	struct hr__cuda *cuda = hr__cuda_of(device);
	struct hr__device_visit visit;
	struct hr__cuda_pin *pin = hr__calloc(1, sizeof(*pin));
	int rc;

	if (!pin) {
		snprintf(error->reason, sizeof(error->reason), "out of host memory");
		return HR_E_NOMEM;
	}
	pin->base = memory;
	pin->bytes = bytes;
	pin->flags = HR__CU_HOST_REGISTER_PORTABLE;
	rc = hr__cuda_enter(cuda, &visit, error);
	if (!rc) {
		rc = read_only ? register_read_only(cuda, pin, error) : register_somehow(cuda, pin, error);
		hr__cuda_leave(&visit);
	}
	if (rc) {
		hr__free(pin);
		return rc;
	}
	if (pin->segment_bytes < bytes)
		cuda->n_segmented++;
	add_pin(cuda, pin);
	return 0;
}

static int cuda_pin(hr_device *device, void *memory, size_t bytes, struct hr__device_error *error)
{
	return pin_somehow(device, memory, bytes, false, error);
}

static int cuda_pin_read_only(hr_device *device, void *memory, size_t bytes, struct hr__device_error *error)
{
	return pin_somehow(device, memory, bytes, true, error);
}

static struct hr__cuda_pin *take_pin(struct hr__cuda *cuda, const void *memory)
{
	struct hr__cuda_pin **at, *pin;

	pthread_mutex_lock(&cuda->lock);
	for (at = &cuda->pins; *at && (*at)->base != memory;)
		at = &(*at)->next;
	pin = *at;
	if (pin)
		*at = pin->next;
	pthread_mutex_unlock(&cuda->lock);
	return pin;
}

/* What could not be unregistered stays known, so that it can be tried again. */
static int cuda_unpin(hr_device *device, void *memory, struct hr__device_error *error)
{
	struct hr__cuda *cuda = hr__cuda_of(device);
	struct hr__cuda_pin *pin = take_pin(cuda, memory);
	struct hr__device_visit visit;
	int rc;

	if (!pin) {
		error->system = 0;
		snprintf(error->reason, sizeof(error->reason), "memory at %p was never registered", memory);
		return HR_E_OPTS;
	}
	rc = hr__cuda_enter(cuda, &visit, error);
	if (!rc) {
		rc = unregister(cuda, pin, pin->bytes, error);
		hr__cuda_leave(&visit);
	}
	if (rc) {
		add_pin(cuda, pin);
		return rc;
	}
	if (pin->segment_bytes < pin->bytes)
		cuda->n_segmented--;
	hr__free(pin);
	return 0;
}

size_t hr__cuda_until_border(struct hr__cuda *cuda, const char *src, size_t bytes)
{
	if (cuda->n_segmented == 0)
		return bytes;
	pthread_mutex_lock(&cuda->lock);
	for (const struct hr__cuda_pin *pin = cuda->pins; pin; pin = pin->next)
		if (src >= pin->base && src < pin->base + pin->bytes)
			bytes = hr__min_u64(bytes, pin->segment_bytes - (size_t)(src - pin->base) % pin->segment_bytes);
	pthread_mutex_unlock(&cuda->lock);
	return bytes;
}

static int cuda_read_back(hr_device *device, void *dst, const void *src, size_t bytes, struct hr__device_error *error)
{
	struct hr__cuda *cuda = hr__cuda_of(device);
	struct hr__device_visit visit;
	int rc;

	if (bytes == 0)
		return 0;
	rc = hr__cuda_enter(cuda, &visit, error);
	if (rc)
		return rc;
	rc = HR__CU_CHECK(cuda, error, cuMemcpyDtoHAsync, dst, (hr__cu_ptr)(uintptr_t)src, bytes, cuda->memory_stream);
	if (!rc)
		rc = HR__CU_CHECK(cuda, error, cuStreamSynchronize, cuda->memory_stream);
	/* `dst` is the caller's again when this returns, so a failed wait is tried once more before it is given up. */
	if (rc && !cuda->broken)
		hr__cu_api.cuStreamSynchronize(cuda->memory_stream);
	hr__cuda_leave(&visit);
	return rc;
}

const struct hr__device_ops hr__device_cuda = {
	.name = "cuda",
	.caps = HR__DEVICE_STREAMS,
	.state_bytes = sizeof(struct hr__cuda),
	.probe = cuda_probe,
	.open = cuda_open,
	.close = cuda_close,
	.info = cuda_info,
	.alloc = cuda_alloc,
	.release = cuda_release,
	.pin = cuda_pin,
	.pin_read_only = cuda_pin_read_only,
	.unpin = cuda_unpin,
	.release_idle = cuda_release_idle,
	.read_back = cuda_read_back,
	.window_alloc = hr__cuda_window_alloc,
	.window_free = hr__cuda_window_free,
	.enter = hr__cuda_window_enter,
	.leave = hr__cuda_leave,
	.mark = hr__cuda_mark,
	.mark_again = hr__cuda_mark_again,
	.mark_done = hr__cuda_mark_done,
	.mark_free = hr__cuda_mark_free,
	.lane_after = hr__cuda_lane_after,
	.signal = hr__cuda_signal,
	.retire = hr__cuda_retire,
	.lane_open = hr__cuda_lane_open,
	.lane_close = hr__cuda_lane_close,
	.copy = hr__cuda_copy,
	.copy_down = hr__cuda_copy_down,
	.fence = hr__cuda_fence,
	.fence_done = hr__cuda_fence_done,
};
