/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The CUDA driver: opened at run time, once per process, never closed. Nothing happens when headrace is loaded or when
 * the process ends, and cuInit is called only when somebody asks for a CUDA device or what devices there are: a
 * process that merely links headrace may fork workers which use CUDA.
 *
 * Lock order: `loading` is taken with no other lock held.
 */
#include "cuda_driver.h"

#include "core/dl.h"
#include "core/os.h"

#include <stdio.h>
#include <string.h>

struct hr__cu_api hr__cu_api;

static pthread_mutex_t loading = PTHREAD_MUTEX_INITIALIZER;
static _Atomic bool is_loaded; /* written under `loading` */
/* A page that tells a forked child that the driver was started before the fork. */
static const volatile uint32_t *_Atomic started;

/* Results after which no call in this context can succeed; the driver says so of each of them. */
static bool is_sticky(hr__cu_result result)
{
	switch (result) {
	case HR__CU_DEINITIALIZED:
	case HR__CU_ECC_UNCORRECTABLE:
	case HR__CU_NVLINK_UNCORRECTABLE:
	case HR__CU_CONTAINED:
	case HR__CU_ILLEGAL_ADDRESS:
	case HR__CU_LAUNCH_TIMEOUT:
	case HR__CU_CONTEXT_IS_DESTROYED:
	case HR__CU_ASSERT:
		return true;
	default:
		return result >= HR__CU_HARDWARE_STACK && result <= HR__CU_LAUNCH_FAILED;
	}
}

int hr__cuda_check(struct hr__cuda *cuda, struct hr__device_error *error, const char *call, hr__cu_result result)
{
	const char *name = NULL, *text = NULL;
	int none = 0;

	if (result == HR__CU_SUCCESS)
		return 0;
	if (cuda && is_sticky(result))
		atomic_compare_exchange_strong(&cuda->broken, &none, result);
	hr__cu_api.cuGetErrorName(result, &name);
	hr__cu_api.cuGetErrorString(result, &text);
	error->system = result;
	snprintf(error->reason, sizeof(error->reason), "%s: %s (%s%s%d)", call, text ? text : "unknown error",
		 name ? name : "", name ? ", " : "", result);
	return result == HR__CU_OUT_OF_MEMORY ? HR_E_DEVICE_MEMORY : HR_E_DEVICE;
}

int hr__cuda_usable(struct hr__cuda *cuda, struct hr__device_error *error)
{
	int result = cuda->broken;
	const char *name = NULL;

	if (!result)
		return 0;
	hr__cu_api.cuGetErrorName(result, &name);
	error->system = result;
	snprintf(error->reason, sizeof(error->reason),
		 "an earlier failure (%s, %d) has made the GPU useless to this process: restart it",
		 name ? name : "unknown", result);
	return HR_E_DEVICE;
}

int hr__cuda_enter(struct hr__cuda *cuda, struct hr__device_visit *visit, struct hr__device_error *error)
{
	int rc = hr__cuda_usable(cuda, error);

	visit->capture_mode = HR__CU_CAPTURE_MODE_RELAXED;
	if (!rc)
		rc = HR__CU_CHECK(cuda, error, cuCtxPushCurrent, cuda->context);
	if (rc)
		return rc;
	rc = HR__CU_CHECK(cuda, error, cuThreadExchangeStreamCaptureMode, &visit->capture_mode);
	if (rc)
		hr__cu_api.cuCtxPopCurrent(&(hr__cu_context){NULL});
	return rc;
}

/* Nothing could be done about a failure here, so there is no fault point: the two calls only take back what enter
 * did. */
void hr__cuda_leave(const struct hr__device_visit *visit)
{
	int mode = visit->capture_mode;

	hr__cu_api.cuThreadExchangeStreamCaptureMode(&mode);
	hr__cu_api.cuCtxPopCurrent(&(hr__cu_context){NULL});
}

/* The address of one shape of cuMemcpyBatchAsync, or NULL. */
static void *find_batch(int version)
{
	void *address = NULL;
	int status = 0;

	if (!hr__cu_api.cuGetProcAddress || hr__cu_api.version < version)
		return NULL;
	if (HR__CU(cuGetProcAddress, "cuMemcpyBatchAsync", &address, version, 0, &status) != HR__CU_SUCCESS ||
	    status != 0)
		return NULL;
	return address;
}

static int start(struct hr__device_error *error)
{
	hr__cu_result result = HR__CU(cuInit, 0);
	void *v1, *v2;

	if (result != HR__CU_SUCCESS) {
		hr__cuda_check(NULL, error, "cuInit", result);
		return result == HR__CU_NO_DEVICE      ? HR_E_NOTFOUND
		       : result == HR__CU_STUB_LIBRARY ? HR_E_UNSUPPORTED
						       : HR_E_DEVICE;
	}
	if (HR__CU_CHECK(NULL, error, cuDriverGetVersion, &hr__cu_api.version))
		return HR_E_DEVICE;
	v2 = find_batch(13000);
	v1 = v2 ? NULL : find_batch(12080);
	/* As bytes: ISO C has no cast from an object pointer to a function pointer. */
	memcpy(&hr__cu_api.batch_v2, &v2, sizeof(v2));
	memcpy(&hr__cu_api.batch_v1, &v1, sizeof(v1));
	return 0;
}

static int load(struct hr__device_error *error)
{
	static const char *const names[] = {"libcuda.so.1", NULL};
	static const struct hr__dl_symbol symbols[] = {
#define HR__ROW(field, symbol, parameters, required) {offsetof(struct hr__cu_api, field), #symbol, required},
		HR__CU_SYMBOLS(HR__ROW)
#undef HR__ROW
	};
	char why[160];

	memset(&hr__cu_api, 0, sizeof(hr__cu_api));
	if (hr__dl_load(names, symbols, sizeof(symbols) / sizeof(symbols[0]), &hr__cu_api, why, sizeof(why))) {
		error->system = 0;
		snprintf(error->reason, sizeof(error->reason), "no usable CUDA driver: %s", why);
		return HR_E_UNSUPPORTED;
	}
	if (!started)
		started = hr__os_fork_mark_new();
	if (!started) {
		snprintf(error->reason, sizeof(error->reason),
			 "the system has no page that tells of a fork (MADV_WIPEONFORK)");
		return HR_E_UNSUPPORTED;
	}
	return start(error);
}

int hr__cuda_load(struct hr__device_error *error)
{
	const volatile uint32_t *mark = started;
	int rc = 0;

	/* Asked before the lock, which another thread may have held at the moment of the fork. */
	if (mark && *mark != 1) {
		error->system = 0;
		snprintf(
			error->reason, sizeof(error->reason),
			"CUDA was started before fork() and cannot be used in the child: start it in the child only, or use spawn");
		return HR_E_UNSUPPORTED;
	}
	if (is_loaded)
		return 0;
	pthread_mutex_lock(&loading);
	if (!is_loaded) {
		rc = load(error);
		is_loaded = rc == 0;
	}
	pthread_mutex_unlock(&loading);
	return rc;
}
