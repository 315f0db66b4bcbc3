/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A look-alike of the CUDA driver over host memory, built as libcuda.so.1: what headrace and its tests call, as the
 * public documentation in cuda.h describes it, and made to be as unpleasant as the documentation allows. fake_cuda.h
 * has the controls and says which mistakes of a caller are recorded.
 *
 * Here are the controls, devices and contexts; fake_cuda_calls.c has memory, copies, streams and events. Each function
 * begins with BEGIN, which takes the lock and deals with what may be wrong before the call as such: a forked child, no
 * cuInit, an armed failure, no current context, a broken one, a capture going on in another thread.
 */
#include "fake_cuda.h"

#include "fake_controls.h"
#include "fake_cuda_core.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

struct fake_settings fake_settings;
pthread_mutex_t fake_lock = PTHREAD_MUTEX_INITIALIZER;
struct fake_event *fake_events;
struct fake_context fake_contexts[FAKE_MAX_DEVICES];

struct fake_pool *fake_pools;
static _Atomic pid_t owner; /* the process that called cuInit */
int fake_global_captures;
static const struct fake_setting table[] = {
#define FAKE_SETTING(name, value) {#name, &fake_settings.name, value},
	FAKE_SETTINGS(FAKE_SETTING)
#undef FAKE_SETTING
};
static struct fake_controls controls = {
	.who = "CUDA", .settings = table, .n_settings = sizeof(table) / sizeof(table[0])};

static _Thread_local struct fake_context *stack[16];
static _Thread_local int depth;
static _Thread_local int capture_mode;

/* ---- controls ---- */

void *fake_alloc(size_t bytes)
{
	void *block = calloc(1, bytes ? bytes : 1);

	if (!block)
		abort();
	return block;
}

void fake_error(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	fake_tell(&controls, fake_settings.strict, format, args);
	va_end(args);
}

uint64_t fake_random(void)
{
	return fake_draw(&controls);
}

API int fake_cuda_set(const char *key, long long value);
API int fake_cuda_set(const char *key, long long value)
{
	int rc;

	pthread_mutex_lock(&fake_lock);
	rc = fake_set(&controls, key, value);
	pthread_mutex_unlock(&fake_lock);
	return rc;
}

static void set_defaults(void)
{
	for (int i = 0; i < FAKE_MAX_DEVICES; i++)
		fake_contexts[i].device = i;
	fake_set_all(&controls, "HR_FAKE_CUDA");
}

/* When the library is loaded, so that tests may change settings before the first call. */
__attribute__((constructor)) static void start(void)
{
	set_defaults();
}

API void fake_cuda_reset(void);
API void fake_cuda_reset(void)
{
	pthread_mutex_lock(&fake_lock);
	set_defaults();
	fake_controls_reset(&controls);
	for (int i = 0; i < FAKE_MAX_DEVICES; i++) {
		fake_contexts[i].sticky = 0;
		fake_contexts[i].peak_bytes = fake_contexts[i].used_bytes;
	}
	fake_global_captures = 0;
	pthread_mutex_unlock(&fake_lock);
}

API void fake_cuda_drain(void);
API void fake_cuda_drain(void)
{
	struct fake_stream *stream;

	pthread_mutex_lock(&fake_lock);
	do {
		for (stream = fake_streams; stream && !stream->first;)
			stream = stream->next;
		if (stream)
			fake_changed_wait();
	} while (stream);
	pthread_mutex_unlock(&fake_lock);
}

API void fake_cuda_arm(const char *function, unsigned n, int code);
API void fake_cuda_arm(const char *function, unsigned n, int code)
{
	pthread_mutex_lock(&fake_lock);
	fake_arm(&controls, function, n, code);
	pthread_mutex_unlock(&fake_lock);
}

int fake_armed(const char *function)
{
	return fake_take_armed(&controls, function);
}

API unsigned fake_cuda_errors(char *text, size_t text_bytes);
API unsigned fake_cuda_errors(char *text, size_t text_bytes)
{
	return fake_told(&controls, text, text_bytes);
}

API unsigned long long fake_cuda_calls(const char *function);
API unsigned long long fake_cuda_calls(const char *function)
{
	unsigned long long n;

	pthread_mutex_lock(&fake_lock);
	n = fake_calls(&controls, function);
	pthread_mutex_unlock(&fake_lock);
	return n;
}

/* Objects of one context (NULL: of all). */
static long long n_live(const char *kind, const struct fake_context *context)
{
	bool all = kind == NULL;
	long long n = 0;

	if (all || strcmp(kind, "memory") == 0)
		n += fake_blocks_live(context);
	if ((all && !context) || (kind && strcmp(kind, "registrations") == 0))
		n += fake_ranges_live();
	for (struct fake_stream *s = fake_streams; s && (all || strcmp(kind, "streams") == 0); s = s->next)
		n += !s->is_destroyed && (!context || s->context == context);
	for (struct fake_event *e = fake_events; e && (all || strcmp(kind, "events") == 0); e = e->next)
		n += !context || e->context == context;
	for (struct fake_pool *p = fake_pools; p && (all || strcmp(kind, "pools") == 0); p = p->next)
		n += !context || p->context == context;
	for (int i = 0; i < FAKE_MAX_DEVICES && !context && (all || strcmp(kind, "contexts") == 0); i++)
		n += fake_contexts[i].n_retained > 0;
	return n;
}

API long long fake_cuda_live(const char *kind);
API long long fake_cuda_live(const char *kind)
{
	long long n;

	pthread_mutex_lock(&fake_lock);
	if (kind && strcmp(kind, "bytes") == 0)
		n = (long long)fake_contexts[0].used_bytes;
	else if (kind && strcmp(kind, "peak_bytes") == 0)
		n = (long long)fake_contexts[0].peak_bytes;
	else if (kind && strcmp(kind, "most_registered") == 0)
		n = fake_ranges_most();
	else
		n = n_live(kind, NULL);
	pthread_mutex_unlock(&fake_lock);
	return n;
}

/* ---- the frame of every function ---- */

struct fake_context *fake_current(void)
{
	return depth ? stack[depth - 1] : NULL;
}

/* Takes the lock, or gives the result that the function answers at once. */
int fake_begin(const char *function, int needs)
{
	int code;

	/* Before the lock: the worker may have held it when the process forked. */
	if (owner && owner != getpid()) {
		controls.n_errors++;
		snprintf(controls.last_error, sizeof(controls.last_error), "%s is called in a forked child", function);
		return HR__CU_NOT_INITIALIZED;
	}
	pthread_mutex_lock(&fake_lock);
	fake_count(&controls, function);
	code = fake_armed(function);
	if (!code && (needs & NEEDS_INIT) && !owner) {
		fake_error("%s is called before cuInit", function);
		code = HR__CU_NOT_INITIALIZED;
	}
	if (!code && (needs & 2) && !fake_current()) {
		fake_error("%s is called with no current context", function);
		code = HR__CU_INVALID_CONTEXT;
	}
	if (!code && (needs & 2) && fake_current()->n_retained == 0) {
		fake_error("%s is called in a context that nobody holds", function);
		code = HR__CU_CONTEXT_IS_DESTROYED;
	}
	if (!code && (needs & 2))
		code = fake_current()->sticky;
	if (!code && (needs & UNSAFE_IN_CAPTURE) && fake_global_captures &&
	    capture_mode != HR__CU_CAPTURE_MODE_RELAXED) {
		fake_error("%s breaks a graph capture of another thread", function);
		for (struct fake_stream *stream = fake_streams; stream; stream = stream->next)
			stream->capture_broken = stream->is_capturing;
		code = HR__CU_CAPTURE_UNSUPPORTED;
	}
	if (code)
		pthread_mutex_unlock(&fake_lock);
	return code;
}

int fake_end(int code)
{
	pthread_mutex_unlock(&fake_lock);
	return code;
}

bool fake_is_stream(const struct fake_stream *stream)
{
	for (const struct fake_stream *s = fake_streams; s; s = s->next)
		if (s == stream && !s->is_destroyed)
			return true;
	fake_error(stream ? "a handle that is no stream, or none any more" : "the NULL stream is used");
	return false;
}

bool fake_is_event(const struct fake_event *event)
{
	for (const struct fake_event *e = fake_events; e; e = e->next)
		if (e == event)
			return true;
	fake_error("a handle that is no event, or none any more");
	return false;
}

/* ---- driver and devices ---- */

hr__cu_result cuInit(unsigned int flags)
{
	BEGIN(NEEDS_NOTHING);
	if (flags)
		return fake_end(HR__CU_INVALID_VALUE);
	if (fake_settings.devices == 0)
		return fake_end(HR__CU_NO_DEVICE);
	if (!owner)
		owner = getpid();
	return fake_end(0);
}

hr__cu_result cuDriverGetVersion(int *version)
{
	BEGIN(NEEDS_NOTHING);
	*version = (int)fake_settings.version;
	return fake_end(0);
}

static const struct {
	int code;
	const char *name, *text;
} results[] = {
	{HR__CU_SUCCESS, "CUDA_SUCCESS", "no error"},
	{HR__CU_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
	{HR__CU_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
	{HR__CU_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
	{HR__CU_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
	{HR__CU_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
	{HR__CU_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
	{HR__CU_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
	{HR__CU_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
	{HR__CU_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
	{HR__CU_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
	{HR__CU_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
};

hr__cu_result cuGetErrorName(hr__cu_result result, const char **text)
{
	*text = NULL;
	for (size_t i = 0; i < sizeof(results) / sizeof(results[0]); i++)
		if (results[i].code == result)
			*text = results[i].name;
	return *text ? 0 : HR__CU_INVALID_VALUE;
}

hr__cu_result cuGetErrorString(hr__cu_result result, const char **text)
{
	*text = NULL;
	for (size_t i = 0; i < sizeof(results) / sizeof(results[0]); i++)
		if (results[i].code == result)
			*text = results[i].text;
	return *text ? 0 : HR__CU_INVALID_VALUE;
}

hr__cu_result cuGetProcAddress_v2(const char *symbol, void **address, int version, uint64_t flags, int *status)
{
	hr__cu_result(*v1) HR__CU_BATCH_V1_PARAMETERS = cuMemcpyBatchAsync;
	hr__cu_result(*v2) HR__CU_BATCH_V2_PARAMETERS = cuMemcpyBatchAsync_v2;
	bool has_v1, has_v2;

	BEGIN(NEEDS_NOTHING);
	(void)flags;
	*address = NULL;
	has_v1 = version >= 12080 && fake_settings.version >= 12080;
	has_v2 = version >= 13000 && fake_settings.version >= 13000;
	if (strcmp(symbol, "cuMemcpyBatchAsync") != 0)
		*status = 1;
	else
		*status = has_v1 ? 0 : fake_settings.version >= 12080 ? 2 : 1;
	if (*status == 0)
		memcpy(address, has_v2 ? (void *)&v2 : (void *)&v1, sizeof(*address));
	return fake_end(0);
}

hr__cu_result cuDeviceGetCount(int *n)
{
	BEGIN(NEEDS_INIT);
	*n = (int)fake_settings.devices;
	return fake_end(0);
}

hr__cu_result cuDeviceGet(hr__cu_device *device, int ordinal)
{
	BEGIN(NEEDS_INIT);
	*device = ordinal;
	return fake_end(ordinal >= 0 && ordinal < fake_settings.devices ? 0 : HR__CU_INVALID_DEVICE);
}

hr__cu_result cuDeviceGetName(char *name, int length, hr__cu_device device)
{
	BEGIN(NEEDS_INIT);
	snprintf(name, (size_t)length, "Look-alike GPU %d", device);
	return fake_end(0);
}

/* What headrace asks for, and what NVIDIA's own libraries do. */
static int attribute_of(int attribute, int device)
{
	switch (attribute) {
	case HR__CU_ATTRIBUTE_POOLS_SUPPORTED:
		return (int)fake_settings.pools;
	case HR__CU_ATTRIBUTE_HOST_POINTER_USABLE:
		return (int)fake_settings.host_pointers;
	case 33: /* PCI bus */
		return 0x40 + device;
	case 41: /* unified addressing */
		return 1;
	case 75: /* compute capability */
		return 9;
	default:
		return 0;
	}
}

hr__cu_result cuDeviceGetAttribute(int *value, int attribute, hr__cu_device device)
{
	BEGIN(NEEDS_INIT);
	*value = attribute_of(attribute, device);
	return fake_end(0);
}

hr__cu_result cuDeviceTotalMem_v2(size_t *bytes, hr__cu_device device)
{
	BEGIN(NEEDS_INIT);
	(void)device;
	*bytes = (size_t)fake_settings.memory_mib << 20;
	return fake_end(0);
}

/* ---- contexts ---- */

hr__cu_result cuDevicePrimaryCtxRetain(hr__cu_context *context, hr__cu_device device)
{
	BEGIN(NEEDS_INIT);
	if (device < 0 || device >= FAKE_MAX_DEVICES)
		return fake_end(HR__CU_INVALID_DEVICE);
	fake_contexts[device].n_retained++;
	*context = &fake_contexts[device];
	return fake_end(0);
}

hr__cu_result cuDevicePrimaryCtxRelease_v2(hr__cu_device device)
{
	struct fake_context *context = &fake_contexts[device];

	BEGIN(NEEDS_INIT);
	if (context->n_retained == 0) {
		fake_error("a primary context is released more often than retained");
		return fake_end(HR__CU_INVALID_CONTEXT);
	}
	if (--context->n_retained == 0) {
		long long n = n_live(NULL, context);

		if (n)
			fake_error(
				"a primary context ends with %lld objects alive (%lld allocations, %lld streams, %lld events)",
				n, n_live("memory", context), n_live("streams", context), n_live("events", context));
	}
	return fake_end(0);
}

hr__cu_result cuCtxPushCurrent_v2(hr__cu_context context)
{
	BEGIN(NEEDS_INIT);
	if (depth == (int)(sizeof(stack) / sizeof(stack[0]))) {
		fake_error("contexts are pushed and not popped");
		return fake_end(HR__CU_INVALID_CONTEXT);
	}
	stack[depth++] = context;
	return fake_end(0);
}

hr__cu_result cuCtxPopCurrent_v2(hr__cu_context *context)
{
	BEGIN(NEEDS_INIT);
	if (depth == 0) {
		fake_error("a context is popped that was never pushed");
		return fake_end(HR__CU_INVALID_CONTEXT);
	}
	*context = stack[--depth];
	return fake_end(0);
}

hr__cu_result cuCtxGetCurrent(hr__cu_context *context)
{
	BEGIN(NEEDS_INIT);
	*context = fake_current();
	return fake_end(0);
}

hr__cu_result cuThreadExchangeStreamCaptureMode(int *mode)
{
	int old = capture_mode;

	BEGIN(NEEDS_NOTHING);
	capture_mode = *mode;
	*mode = old;
	return fake_end(0);
}
