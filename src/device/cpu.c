/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The cpu device: host memory. It has no streams and nothing to wait for: a copy is done when copy() returns, so its
 * fences are done as soon as they are asked about. Reads may go straight into destinations (HR__DEVICE_HOST), and
 * mostly do.
 *
 * Large memory is mapped, with huge pages asked for; small memory comes from the allocator with its own block's
 * address kept in front of what is handed out. `bytes` tells the two apart again when memory is released.
 */
#include "core/arith.h"
#include "core/mem.h"
#include "core/os.h"
#include "device.h"

#include <stdio.h>
#include <string.h>

#define ALIGN       256
#define MAPPED_FROM ((uint64_t)2 << 20)

struct cpu_lane {
	uint64_t n_copies;
};

static int cpu_probe(int *n_devices, char (*about)[240], int max, struct hr__device_error *error)
{
	(void)error;
	*n_devices = 1;
	if (max > 0)
		snprintf(about[0], sizeof(about[0]), "host memory, %llu MiB available",
			 (unsigned long long)(hr__os_memory_available() >> 20));
	return 0;
}

static int cpu_open(hr_device *device, int ordinal, struct hr__device_error *error)
{
	(void)device;
	(void)ordinal;
	(void)error;
	return 0;
}

static void cpu_close(hr_device *device)
{
	(void)device;
}

static int cpu_info(hr_device *device, struct hr_device_info *out, struct hr__device_error *error)
{
	(void)device;
	(void)error;
	snprintf(out->name, sizeof(out->name), "host memory");
	out->free_bytes = hr__os_memory_available();
	return 0;
}

static int no_memory(uint64_t bytes, int system, struct hr__device_error *error)
{
	error->system = system;
	snprintf(error->reason, sizeof(error->reason), "out of host memory: %llu bytes could not be had",
		 (unsigned long long)bytes);
	return HR_E_NOMEM;
}

static int cpu_alloc(hr_device *device, uint64_t bytes, void **out, struct hr__device_error *error)
{
	char *block, *memory;
	int system;

	(void)device;
	*out = NULL;
	if (bytes > SIZE_MAX / 2)
		return no_memory(bytes, 0, error);
	if (bytes >= MAPPED_FROM) {
		system = hr__os_map(bytes, out);
		return system ? no_memory(bytes, system, error) : 0;
	}
	block = hr__malloc(bytes + ALIGN + sizeof(block));
	if (!block)
		return no_memory(bytes, 0, error);
	memory = (char *)hr__round_up((uintptr_t)block + sizeof(block), ALIGN);
	memcpy(memory - sizeof(block), &block, sizeof(block));
	*out = memory;
	return 0;
}

static int cpu_release(hr_device *device, void *memory, uint64_t bytes, struct hr__device_error *error)
{
	char *block;

	(void)device;
	(void)error;
	if (!memory)
		return 0;
	if (bytes >= MAPPED_FROM) {
		hr__os_unmap(memory, bytes);
		return 0;
	}
	memcpy(&block, (char *)memory - sizeof(block), sizeof(block));
	hr__free(block);
	return 0;
}

static int cpu_pin(hr_device *device, void *memory, size_t bytes, struct hr__device_error *error)
{
	(void)device;
	(void)memory;
	(void)bytes;
	(void)error;
	return 0;
}

static int cpu_unpin(hr_device *device, void *memory, struct hr__device_error *error)
{
	return cpu_pin(device, memory, 0, error);
}

static int cpu_read_back(hr_device *device, void *dst, const void *src, size_t bytes, struct hr__device_error *error)
{
	(void)device;
	(void)error;
	if (bytes)
		memcpy(dst, src, bytes);
	return 0;
}

static int cpu_lane_open(hr_device *device, struct hr__lane **out, struct hr__device_error *error)
{
	struct cpu_lane *lane = hr__calloc(1, sizeof(*lane));

	(void)device;
	*out = (struct hr__lane *)(void *)lane;
	return lane ? 0 : no_memory(sizeof(*lane), 0, error);
}

static void cpu_lane_close(struct hr__lane *lane)
{
	hr__free(lane);
}

static int cpu_copy(struct hr__lane *lane, const struct hr__copy *copies, size_t n, size_t *n_calls,
		    struct hr__device_error *error)
{
	(void)error;
	for (size_t i = 0; i < n; i++)
		memcpy(copies[i].dst, copies[i].src, copies[i].bytes);
	((struct cpu_lane *)(void *)lane)->n_copies += n;
	*n_calls = n;
	return 0;
}

static int cpu_fence(struct hr__lane *lane, uint64_t number, struct hr__device_error *error)
{
	(void)lane;
	(void)number;
	(void)error;
	return 0;
}

static int cpu_fence_done(struct hr__lane *lane, uint64_t number, struct hr__device_error *error)
{
	(void)lane;
	(void)number;
	(void)error;
	return 1;
}

const struct hr__device_ops hr__device_cpu = {
	.name = "cpu",
	.caps = HR__DEVICE_HOST,
	.state_bytes = 0,
	.probe = cpu_probe,
	.open = cpu_open,
	.close = cpu_close,
	.info = cpu_info,
	.alloc = cpu_alloc,
	.release = cpu_release,
	.pin = cpu_pin,
	.unpin = cpu_unpin,
	.read_back = cpu_read_back,
	.lane_open = cpu_lane_open,
	.lane_close = cpu_lane_close,
	.copy = cpu_copy,
	.fence = cpu_fence,
	.fence_done = cpu_fence_done,
};
