/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the files of the cuda device share: the loaded driver, the state of a device, and the three things that
 * surround every driver call: entering the context (and leaving it, so that the caller's own is current again),
 * turning a result into a reason, and remembering a failure after which the context is of no use.
 *
 * Read cuda.c for the device (memory), cuda_window.c for memory that storage libraries fill, cuda_lane.c for what
 * copies.
 */
#ifndef HR_DEVICE_CUDA_DRIVER_H
#define HR_DEVICE_CUDA_DRIVER_H

#include "core/fault.h"
#include "cuda_syms.h"
#include "device.h"

#include <pthread.h>

/* Filled once per process, by hr__cuda_load(); read-only from then on. */
extern struct hr__cu_api hr__cu_api;

/* Whether many copies may go to the driver in one call. */
enum hr__cuda_batch {
	HR__CUDA_BATCH_NONE,    /* the driver has no such call, or refused its first one: a loop for good */
	HR__CUDA_BATCH_UNTRIED, /* it has one; none has been accepted yet */
	HR__CUDA_BATCH_WORKS,
};

/* Host memory registered by hr__device_ops.pin, in one piece or in segments of equal size. */
struct hr__cuda_pin {
	struct hr__cuda_pin *next;
	char *base;
	size_t bytes;
	size_t segment_bytes; /* = bytes if in one piece */
	unsigned int flags;   /* of the registration */
};

/* Memory given out by hr__device_ops.window_alloc. */
struct hr__cuda_window {
	struct hr__cuda_window *next;
	hr__cu_ptr memory;     /* as handed out */
	hr__cu_ptr allocation; /* as the driver knows it */
};

struct hr__cuda {
	hr__cu_device device;
	hr__cu_context context;       /* the primary one; retained */
	_Atomic int broken;           /* a sticky result; from then on nothing is called any more */
	_Atomic int batch;            /* enum hr__cuda_batch */
	hr__cu_pool pool;             /* NULL: cuMemAlloc */
	hr__cu_stream memory_stream;  /* allocations and read-backs; empty but for the moment of such a call */
	hr__cu_stream release_stream; /* memory is freed here, behind the consumers' streams that retire named */
	hr__cu_stream signal_stream;  /* nothing is ever queued here but `signal_event` */
	hr__cu_event signal_event;    /* recorded and waited for under lock */
	pthread_mutex_t lock;
	struct hr__cuda_pin *pins;       /* guarded by lock */
	_Atomic int n_segmented;         /* of them, those in more than one segment */
	struct hr__cuda_window *windows; /* guarded by lock */
};

/* Opens the driver if this process has not yet. A failure is not remembered: the next call tries again.
 * HR_E_UNSUPPORTED (no driver, too old, started before a fork), HR_E_NOTFOUND (no GPU), HR_E_DEVICE. */
int hr__cuda_load(struct hr__device_error *error);

/* A driver call by its field name, with its fault point. A test's armed number is taken as the driver's result. */
#define HR__CU(call, ...) (__extension__(HR__FAULT(#call) ?: hr__cu_api.call(__VA_ARGS__)))
/* The same, with the result turned into HR_E_* and `error`. `cuda` may be NULL: nothing is remembered then. */
#define HR__CU_CHECK(cuda, error, call, ...) hr__cuda_check(cuda, error, #call, HR__CU(call, __VA_ARGS__))

/* 0 for a good result; otherwise fills `error` and returns HR_E_*. Remembers sticky results. */
int hr__cuda_check(struct hr__cuda *cuda, struct hr__device_error *error, const char *call, hr__cu_result result);
/* 0, or HR_E_DEVICE with a reason if an earlier failure has made the context useless. */
int hr__cuda_usable(struct hr__cuda *cuda, struct hr__device_error *error);

/* Makes the context current on this thread, and calls safe while another thread captures a graph, until leave. */
int hr__cuda_enter(struct hr__cuda *cuda, struct hr__device_visit *visit, struct hr__device_error *error);
void hr__cuda_leave(const struct hr__device_visit *visit);

static inline struct hr__cuda *hr__cuda_of(const hr_device *device)
{
	return device->state;
}

/* How many of `bytes` at `src` lie in one registration: the driver refuses a copy that crosses from one into the
 * next. */
size_t hr__cuda_until_border(struct hr__cuda *cuda, const char *src, size_t bytes);

/* cuda_window.c: memory for storage libraries. */
int hr__cuda_window_alloc(hr_device *device, uint64_t bytes, void **out, struct hr__device_error *error);
int hr__cuda_window_free(hr_device *device, void *memory, struct hr__device_error *error);
int hr__cuda_window_enter(hr_device *device, struct hr__device_visit *visit, struct hr__device_error *error);

/* cuda_lane.c: streams and lanes. */
int hr__cuda_mark(hr_device *device, void *stream, void **mark, struct hr__device_error *error);
int hr__cuda_mark_again(hr_device *device, void *stream, void *mark, struct hr__device_error *error);
int hr__cuda_mark_done(hr_device *device, void *mark, struct hr__device_error *error);
void hr__cuda_mark_free(hr_device *device, void *mark);
int hr__cuda_signal(hr_device *device, void *stream, struct hr__device_error *error);
int hr__cuda_retire(hr_device *device, void *stream, struct hr__device_error *error);
int hr__cuda_lane_open(hr_device *device, struct hr__lane **out, struct hr__device_error *error);
void hr__cuda_lane_close(struct hr__lane *lane);
int hr__cuda_lane_after(struct hr__lane *lane, void *mark, struct hr__device_error *error);
int hr__cuda_copy(struct hr__lane *lane, const struct hr__copy *copies, size_t n, size_t *n_calls,
		  struct hr__device_error *error);
int hr__cuda_copy_down(struct hr__lane *lane, void *dst, const void *src, size_t bytes, struct hr__device_error *error);
int hr__cuda_fence(struct hr__lane *lane, uint64_t number, struct hr__device_error *error);
int hr__cuda_fence_done(struct hr__lane *lane, uint64_t number, struct hr__device_error *error);

#endif
