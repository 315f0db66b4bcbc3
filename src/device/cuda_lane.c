/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Streams and lanes of the cuda device. A lane is one non-blocking stream and a ring of events, one per outstanding
 * fence, made once. Its thread keeps the context current and is in relaxed capture mode from open to close, so that it
 * cannot break a graph capture of another thread. After lane_open nothing here allocates.
 *
 * Copies of one call go to the driver in one cuMemcpyBatchAsync where there is one, up to BATCH_MAX a call. A driver
 * that has the call but refuses the first one is served by the loop from then on; hr_device_info says which it is.
 *
 * A stream that is being captured into a graph is refused: our events would become part of the graph, or break it.
 */
#include "cuda_driver.h"

#include "core/mem.h"

#include <stdio.h>
#include <stdlib.h>

#define BATCH_MAX 4096

struct cuda_lane {
	struct hr__cuda *cuda;
	struct hr__device_visit visit;
	hr__cu_stream stream;
	hr__cu_event fences[HR__MAX_FENCES]; /* number % HR__MAX_FENCES */
	uint64_t done;                       /* all fences up to this one are known to be done */
	/* The copies of the next driver call. */
	size_t n;
	hr__cu_ptr dsts[BATCH_MAX], srcs[BATCH_MAX];
	size_t sizes[BATCH_MAX];
	bool from_device[BATCH_MAX];
};

static struct cuda_lane *own(struct hr__lane *lane)
{
	return (struct cuda_lane *)(void *)lane;
}

static int not_capturing(struct hr__cuda *cuda, void *stream, struct hr__device_error *error)
{
	int status = HR__CU_CAPTURE_STATUS_NONE;
	int rc = HR__CU_CHECK(cuda, error, cuStreamIsCapturing, stream, &status);

	if (rc || status == HR__CU_CAPTURE_STATUS_NONE)
		return rc;
	error->system = 0;
	snprintf(error->reason, sizeof(error->reason),
		 "the stream is being captured into a graph; end the capture first, or use another stream");
	return HR_E_OPTS;
}

/* In the context. */
static int make_mark(struct hr__cuda *cuda, void *stream, hr__cu_event *out, struct hr__device_error *error)
{
	hr__cu_event event = NULL;
	int rc = not_capturing(cuda, stream, error);

	if (!rc)
		rc = HR__CU_CHECK(cuda, error, cuEventCreate, &event, HR__CU_EVENT_DISABLE_TIMING);
	if (rc)
		return rc;
	rc = HR__CU_CHECK(cuda, error, cuEventRecord, event, stream);
	if (rc) {
		if (!cuda->broken)
			hr__cu_api.cuEventDestroy(event);
		return rc;
	}
	*out = event;
	return 0;
}

int hr__cuda_mark(hr_device *device, void *stream, void **mark, struct hr__device_error *error)
{
	struct hr__cuda *cuda = hr__cuda_of(device);
	struct hr__device_visit visit;
	int rc = hr__cuda_enter(cuda, &visit, error);

	*mark = NULL;
	if (rc)
		return rc;
	rc = make_mark(cuda, stream, mark, error);
	hr__cuda_leave(&visit);
	return rc;
}

int hr__cuda_mark_again(hr_device *device, void *stream, void *mark, struct hr__device_error *error)
{
	struct hr__cuda *cuda = hr__cuda_of(device);
	struct hr__device_visit visit;
	int rc = hr__cuda_enter(cuda, &visit, error);

	if (rc)
		return rc;
	rc = not_capturing(cuda, stream, error);
	if (!rc)
		rc = HR__CU_CHECK(cuda, error, cuEventRecord, mark, stream);
	hr__cuda_leave(&visit);
	return rc;
}

int hr__cuda_mark_done(hr_device *device, void *mark, struct hr__device_error *error)
{
	struct hr__cuda *cuda = hr__cuda_of(device);
	struct hr__device_visit visit;
	hr__cu_result result;
	int rc = hr__cuda_enter(cuda, &visit, error);

	if (rc)
		return rc;
	result = HR__CU(cuEventQuery, mark);
	if (result != HR__CU_NOT_READY)
		rc = hr__cuda_check(cuda, error, "cuEventQuery", result);
	hr__cuda_leave(&visit);
	return rc ? rc : result != HR__CU_NOT_READY;
}

/* The driver keeps a destroyed event for as long as a stream waits for it. */
void hr__cuda_mark_free(hr_device *device, void *mark)
{
	struct hr__cuda *cuda = hr__cuda_of(device);
	struct hr__device_error ignored;
	struct hr__device_visit visit;

	if (!mark || hr__cuda_enter(cuda, &visit, &ignored))
		return;
	HR__CU(cuEventDestroy, mark);
	hr__cuda_leave(&visit);
}

/* The copies meant are complete: their fences were seen. What is left is to make the order known to the consumer's
 * stream, with an event of a stream on which nothing else ever runs, so that nothing else is waited for. */
int hr__cuda_signal(hr_device *device, void *stream, struct hr__device_error *error)
{
	struct hr__cuda *cuda = hr__cuda_of(device);
	struct hr__device_visit visit;
	int rc = hr__cuda_enter(cuda, &visit, error);

	if (rc)
		return rc;
	rc = not_capturing(cuda, stream, error);
	if (!rc) {
		pthread_mutex_lock(&cuda->lock);
		rc = HR__CU_CHECK(cuda, error, cuEventRecord, cuda->signal_event, cuda->signal_stream);
		if (!rc)
			rc = HR__CU_CHECK(cuda, error, cuStreamWaitEvent, stream, cuda->signal_event, 0);
		pthread_mutex_unlock(&cuda->lock);
	}
	hr__cuda_leave(&visit);
	return rc;
}

int hr__cuda_retire(hr_device *device, void *stream, struct hr__device_error *error)
{
	struct hr__cuda *cuda = hr__cuda_of(device);
	struct hr__device_visit visit;
	hr__cu_event event = NULL;
	int rc = hr__cuda_enter(cuda, &visit, error);

	if (rc)
		return rc;
	rc = make_mark(cuda, stream, &event, error);
	if (!rc) {
		rc = HR__CU_CHECK(cuda, error, cuStreamWaitEvent, cuda->release_stream, event, 0);
		if (!cuda->broken)
			HR__CU(cuEventDestroy, event);
	}
	hr__cuda_leave(&visit);
	return rc;
}

/* On the lane's thread, in the context. */
static void destroy_parts(struct cuda_lane *lane)
{
	if (lane->cuda->broken)
		return;
	for (size_t i = 0; i < HR__MAX_FENCES; i++)
		if (lane->fences[i])
			HR__CU(cuEventDestroy, lane->fences[i]);
	if (lane->stream)
		HR__CU(cuStreamDestroy, lane->stream);
}

static int make_parts(struct cuda_lane *lane, struct hr__device_error *error)
{
	int rc = HR__CU_CHECK(lane->cuda, error, cuStreamCreate, &lane->stream, HR__CU_STREAM_NON_BLOCKING);

	for (size_t i = 0; i < HR__MAX_FENCES && !rc; i++)
		rc = HR__CU_CHECK(lane->cuda, error, cuEventCreate, &lane->fences[i], HR__CU_EVENT_DISABLE_TIMING);
	return rc;
}

int hr__cuda_lane_open(hr_device *device, struct hr__lane **out, struct hr__device_error *error)
{
	struct cuda_lane *lane = hr__calloc(1, sizeof(*lane));
	int rc;

	*out = NULL;
	if (!lane) {
		snprintf(error->reason, sizeof(error->reason), "out of host memory");
		return HR_E_NOMEM;
	}
	lane->cuda = hr__cuda_of(device);
	rc = hr__cuda_enter(lane->cuda, &lane->visit, error);
	if (rc) {
		hr__free(lane);
		return rc;
	}
	rc = make_parts(lane, error);
	if (rc) {
		destroy_parts(lane);
		hr__cuda_leave(&lane->visit);
		hr__free(lane);
		return rc;
	}
	*out = (struct hr__lane *)(void *)lane;
	return 0;
}

void hr__cuda_lane_close(struct hr__lane *lane)
{
	struct cuda_lane *l = own(lane);

	if (!lane)
		return;
	destroy_parts(l);
	hr__cuda_leave(&l->visit);
	hr__free(l);
}

int hr__cuda_lane_after(struct hr__lane *lane, void *mark, struct hr__device_error *error)
{
	struct cuda_lane *l = own(lane);
	int rc = hr__cuda_usable(l->cuda, error);

	return rc ? rc : HR__CU_CHECK(l->cuda, error, cuStreamWaitEvent, l->stream, mark, 0);
}

static int send_one_by_one(struct cuda_lane *lane, size_t *n_calls, struct hr__device_error *error)
{
	int rc = 0;

	for (size_t i = 0; i < lane->n && !rc; i++) {
		if (lane->from_device[i])
			rc = HR__CU_CHECK(lane->cuda, error, cuMemcpyDtoDAsync, lane->dsts[i], lane->srcs[i],
					  lane->sizes[i], lane->stream);
		else
			rc = HR__CU_CHECK(lane->cuda, error, cuMemcpyHtoDAsync, lane->dsts[i],
					  (const void *)(uintptr_t)lane->srcs[i], lane->sizes[i], lane->stream);
		++*n_calls;
	}
	return rc;
}

static hr__cu_result call_batch(struct cuda_lane *lane)
{
	struct hr__cu_copy_attributes attributes = {.source_order = HR__CU_SOURCE_ORDER_STREAM};
	size_t first = 0, failed = 0;
	int armed = HR__FAULT("cuMemcpyBatchAsync");

	if (armed)
		return armed;
	if (hr__cu_api.batch_v2)
		return hr__cu_api.batch_v2(lane->dsts, lane->srcs, lane->sizes, lane->n, &attributes, &first, 1,
					   lane->stream);
	return hr__cu_api.batch_v1(lane->dsts, lane->srcs, lane->sizes, lane->n, &attributes, &first, 1, &failed,
				   lane->stream);
}

/* The first batch decides. If the driver refuses it and takes the same copies one by one, it is the call that it
 * does not like; if it refuses those too, it is the copies, and nothing has been learned. */
static int send_batch(struct cuda_lane *lane, size_t *n_calls, struct hr__device_error *error)
{
	struct hr__cuda *cuda = lane->cuda;
	hr__cu_result result = call_batch(lane);
	int rc;

	++*n_calls;
	if (result == HR__CU_SUCCESS) {
		if (cuda->batch == HR__CUDA_BATCH_UNTRIED)
			cuda->batch = HR__CUDA_BATCH_WORKS;
		return 0;
	}
	if (cuda->batch == HR__CUDA_BATCH_WORKS || (result != HR__CU_NOT_SUPPORTED && result != HR__CU_INVALID_VALUE))
		return hr__cuda_check(cuda, error, "cuMemcpyBatchAsync", result);
	rc = send_one_by_one(lane, n_calls, error);
	if (!rc)
		cuda->batch = HR__CUDA_BATCH_NONE;
	return rc;
}

static int send(struct cuda_lane *lane, size_t *n_calls, struct hr__device_error *error)
{
	int rc = 0;

	if (lane->n == 1 || lane->cuda->batch == HR__CUDA_BATCH_NONE)
		rc = send_one_by_one(lane, n_calls, error);
	else if (lane->n > 1)
		rc = send_batch(lane, n_calls, error);
	lane->n = 0;
	return rc;
}

int hr__cuda_copy(struct hr__lane *lane, const struct hr__copy *copies, size_t n, size_t *n_calls,
		  struct hr__device_error *error)
{
	struct cuda_lane *l = own(lane);
	int rc = hr__cuda_usable(l->cuda, error);

	*n_calls = 0;
	for (size_t i = 0; i < n; i++) {
		const char *src = copies[i].src;
		char *dst = copies[i].dst;

		for (size_t at = 0; at < copies[i].bytes && !rc;) {
			size_t part = hr__cuda_until_border(l->cuda, src + at, copies[i].bytes - at);

			l->dsts[l->n] = (hr__cu_ptr)(uintptr_t)(dst + at);
			l->srcs[l->n] = (hr__cu_ptr)(uintptr_t)(src + at);
			l->from_device[l->n] = copies[i].from_device;
			l->sizes[l->n++] = part;
			at += part;
			if (l->n == BATCH_MAX)
				rc = send(l, n_calls, error);
		}
	}
	return rc ? rc : send(l, n_calls, error);
}

int hr__cuda_copy_down(struct hr__lane *lane, void *dst, const void *src, size_t bytes, struct hr__device_error *error)
{
	struct cuda_lane *l = own(lane);
	int rc = hr__cuda_usable(l->cuda, error);

	for (size_t at = 0; at < bytes && !rc;) {
		size_t part = hr__cuda_until_border(l->cuda, (char *)dst + at, bytes - at);

		rc = HR__CU_CHECK(l->cuda, error, cuMemcpyDtoHAsync, (char *)dst + at,
				  (hr__cu_ptr)(uintptr_t)((const char *)src + at), part, l->stream);
		at += part;
	}
	return rc;
}

int hr__cuda_fence(struct hr__lane *lane, uint64_t number, struct hr__device_error *error)
{
	struct cuda_lane *l = own(lane);
	int rc = hr__cuda_usable(l->cuda, error);

	return rc ? rc : HR__CU_CHECK(l->cuda, error, cuEventRecord, l->fences[number % HR__MAX_FENCES], l->stream);
}

int hr__cuda_fence_done(struct hr__lane *lane, uint64_t number, struct hr__device_error *error)
{
	struct cuda_lane *l = own(lane);
	hr__cu_result result;
	int rc;

	if (number <= l->done)
		return 1;
	rc = hr__cuda_usable(l->cuda, error);
	if (rc)
		return rc;
	result = HR__CU(cuEventQuery, l->fences[number % HR__MAX_FENCES]);
	if (result == HR__CU_NOT_READY)
		return 0;
	rc = hr__cuda_check(l->cuda, error, "cuEventQuery", result);
	if (rc)
		return rc;
	l->done = number;
	return 1;
}
