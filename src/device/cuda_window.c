/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Windows of the cuda device: memory that a storage library registers and fills. It comes from cuMemAlloc alone, never
 * from the stream-ordered pool, whose memory other hardware cannot reach everywhere. A window begins at a 64 KiB
 * border: the unit in which a GPU's memory is mapped for others, and one that a library may round down to unasked.
 *
 * cuMemAlloc promises 256 bytes only. Allocations of 2 MiB and more lie at such borders in practice; where one does
 * not, a slightly larger one is made, and the window begins inside it.
 */
#include "cuda_driver.h"

#include "core/arith.h"
#include "core/mem.h"

#include <stdio.h>

/* In the context. */
static int alloc_aligned(struct hr__cuda *cuda, struct hr__cuda_window *window, size_t bytes,
			 struct hr__device_error *error)
{
	int rc = HR__CU_CHECK(cuda, error, cuMemAlloc, &window->allocation, bytes);

	if (!rc && window->allocation % HR__WINDOW_ALIGN != 0) {
		rc = HR__CU_CHECK(cuda, error, cuMemFree, window->allocation);
		if (!rc)
			rc = HR__CU_CHECK(cuda, error, cuMemAlloc, &window->allocation, bytes + HR__WINDOW_ALIGN);
	}
	if (!rc)
		window->memory = hr__round_up(window->allocation, HR__WINDOW_ALIGN);
	return rc;
}

int hr__cuda_window_alloc(hr_device *device, uint64_t bytes, void **out, struct hr__device_error *error)
{
	struct hr__cuda *cuda = hr__cuda_of(device);
	struct hr__cuda_window *window = hr__calloc(1, sizeof(*window));
	struct hr__device_visit visit;
	int rc;

	*out = NULL;
	if (!window) {
		snprintf(error->reason, sizeof(error->reason), "out of host memory");
		return HR_E_NOMEM;
	}
	rc = hr__cuda_enter(cuda, &visit, error);
	if (!rc) {
		rc = alloc_aligned(cuda, window, (size_t)bytes, error);
		hr__cuda_leave(&visit);
	}
	if (rc) {
		hr__free(window);
		return rc;
	}
	pthread_mutex_lock(&cuda->lock);
	window->next = cuda->windows;
	cuda->windows = window;
	pthread_mutex_unlock(&cuda->lock);
	*out = (void *)(uintptr_t)window->memory;
	return 0;
}

static struct hr__cuda_window *take_window(struct hr__cuda *cuda, hr__cu_ptr memory)
{
	struct hr__cuda_window **at, *window;

	pthread_mutex_lock(&cuda->lock);
	for (at = &cuda->windows; *at && (*at)->memory != memory;)
		at = &(*at)->next;
	window = *at;
	if (window)
		*at = window->next;
	pthread_mutex_unlock(&cuda->lock);
	return window;
}

int hr__cuda_window_free(hr_device *device, void *memory, struct hr__device_error *error)
{
	struct hr__cuda *cuda = hr__cuda_of(device);
	struct hr__cuda_window *window = take_window(cuda, (hr__cu_ptr)(uintptr_t)memory);
	struct hr__device_visit visit;
	int rc;

	if (!window) {
		error->system = 0;
		snprintf(error->reason, sizeof(error->reason), "there is no window at %p", memory);
		return HR_E_OPTS;
	}
	rc = hr__cuda_enter(cuda, &visit, error);
	if (!rc) {
		rc = HR__CU_CHECK(cuda, error, cuMemFree, window->allocation);
		hr__cuda_leave(&visit);
	}
	hr__free(window);
	return rc;
}

int hr__cuda_window_enter(hr_device *device, struct hr__device_visit *visit, struct hr__device_error *error)
{
	return hr__cuda_enter(hr__cuda_of(device), visit, error);
}
