/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The functions of the look-alike CUDA driver that work in a context: memory, copies, streams and events. See
 * fake_cuda.c for what it is, fake_cuda_core.h for the frame of each function.
 */
#include "fake_cuda_core.h"

#include <stdlib.h>
#include <string.h>

/* ---- memory ---- */

hr__cu_result cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes)
{
	BEGIN(NEEDS_CONTEXT);
	*total_bytes = (size_t)fake_settings.memory_mib << 20;
	*free_bytes = *total_bytes - fake_current()->used_bytes;
	return fake_end(0);
}

hr__cu_result cuMemAlloc_v2(hr__cu_ptr *memory, size_t bytes)
{
	struct fake_block *block;

	BEGIN(NEEDS_CONTEXT | UNSAFE_IN_CAPTURE);
	if (bytes == 0)
		return fake_end(HR__CU_INVALID_VALUE);
	block = fake_block_new(fake_current(), bytes);
	if (!block)
		return fake_end(HR__CU_OUT_OF_MEMORY);
	block->is_ready = true;
	*memory = block->address;
	return fake_end(0);
}

/* A block by its first byte, not freed yet. */
static struct fake_block *whole_block(hr__cu_ptr memory, bool of_pool)
{
	struct fake_block *block = fake_block_find(memory, 0);

	if (!block || block->address != memory || block->is_freed || block->of_pool != of_pool) {
		fake_error("device memory at %#llx is freed but %s", memory,
			   !block || block->address != memory ? "was never allocated"
			   : block->is_freed                  ? "was freed before"
							      : "by the wrong function");
		return NULL;
	}
	return block;
}

hr__cu_result cuMemFree_v2(hr__cu_ptr memory)
{
	struct fake_block *block;

	BEGIN(NEEDS_CONTEXT | UNSAFE_IN_CAPTURE);
	block = whole_block(memory, false);
	if (block)
		fake_block_free(block);
	return fake_end(block ? 0 : HR__CU_INVALID_VALUE);
}

hr__cu_result cuMemPoolCreate(hr__cu_pool *pool, const struct hr__cu_pool_props *props)
{
	struct fake_pool *made;

	BEGIN(NEEDS_CONTEXT);
	if (!fake_settings.pools)
		return fake_end(HR__CU_NOT_SUPPORTED);
	if (props->alloc_type != HR__CU_ALLOCATION_PINNED || props->location.type != HR__CU_LOCATION_DEVICE ||
	    props->location.id != fake_current()->device)
		return fake_end(HR__CU_INVALID_VALUE);
	made = fake_alloc(sizeof(*made));
	made->context = fake_current();
	made->next = fake_pools;
	fake_pools = made;
	*pool = made;
	return fake_end(0);
}

hr__cu_result cuMemPoolDestroy(hr__cu_pool pool)
{
	BEGIN(NEEDS_CONTEXT);
	for (struct fake_pool **at = &fake_pools; *at; at = &(*at)->next) {
		if (*at != pool)
			continue;
		*at = (*at)->next;
		free(pool);
		return fake_end(0);
	}
	fake_error("a pool is destroyed that is none");
	return fake_end(HR__CU_INVALID_VALUE);
}

hr__cu_result cuMemPoolSetAttribute(hr__cu_pool pool, int attribute, void *value)
{
	BEGIN(NEEDS_CONTEXT);
	(void)pool;
	(void)value;
	return fake_end(attribute >= 1 && attribute <= 4 ? 0 : HR__CU_INVALID_VALUE);
}

hr__cu_result cuMemAllocFromPoolAsync(hr__cu_ptr *memory, size_t bytes, hr__cu_pool pool, hr__cu_stream stream)
{
	struct fake_block *block;
	struct fake_op *op;

	BEGIN(NEEDS_CONTEXT);
	(void)pool;
	if (!fake_is_stream(stream) || bytes == 0)
		return fake_end(HR__CU_INVALID_VALUE);
	block = fake_block_new(fake_current(), bytes);
	if (!block)
		return fake_end(HR__CU_OUT_OF_MEMORY);
	block->of_pool = true;
	op = fake_op_new(FAKE_ALLOC, 0);
	op->block = block;
	fake_push(stream, op);
	*memory = block->address;
	return fake_end(0);
}

hr__cu_result cuMemFreeAsync(hr__cu_ptr memory, hr__cu_stream stream)
{
	struct fake_block *block;
	struct fake_op *op;

	BEGIN(NEEDS_CONTEXT);
	if (!fake_is_stream(stream))
		return fake_end(HR__CU_INVALID_HANDLE);
	block = whole_block(memory, true);
	if (!block)
		return fake_end(HR__CU_INVALID_VALUE);
	block->is_freed = true;
	op = fake_op_new(FAKE_FREE, 0);
	op->block = block;
	fake_push(stream, op);
	return fake_end(0);
}

hr__cu_result cuMemHostRegister_v2(void *memory, size_t bytes, unsigned int flags)
{
	BEGIN(NEEDS_CONTEXT | UNSAFE_IN_CAPTURE);
	if (!(flags & HR__CU_HOST_REGISTER_PORTABLE))
		fake_error("host memory is registered for one device only");
	return fake_end(fake_range_add(memory, bytes, flags));
}

hr__cu_result cuMemHostUnregister(void *memory)
{
	BEGIN(NEEDS_CONTEXT | UNSAFE_IN_CAPTURE);
	return fake_end(fake_range_remove(memory));
}

/* ---- copies ---- */

static int push_copy(enum fake_kind kind, hr__cu_ptr device, void *host, size_t bytes, struct fake_stream *stream)
{
	struct fake_op *op;
	int code;

	if (!fake_is_stream(stream))
		return HR__CU_INVALID_HANDLE;
	if (bytes == 0)
		return 0;
	op = fake_op_new(kind, 1);
	code = fake_copy_prepare(&op->copies[0], device, host, bytes, kind == FAKE_COPY_IN);
	if (code)
		free(op);
	else
		fake_push(stream, op);
	return code;
}

hr__cu_result cuMemcpyHtoDAsync_v2(hr__cu_ptr dst, const void *src, size_t bytes, hr__cu_stream stream)
{
	BEGIN(NEEDS_CONTEXT);
	return fake_end(push_copy(FAKE_COPY_IN, dst, (void *)(uintptr_t)src, bytes, stream));
}

hr__cu_result cuMemcpyDtoDAsync_v2(hr__cu_ptr dst, hr__cu_ptr src, size_t bytes, hr__cu_stream stream)
{
	BEGIN(NEEDS_CONTEXT);
	if (!fake_block_find(src, bytes)) {
		fake_error("a copy of %zu bytes reads device memory at %#llx that is not allocated", bytes, src);
		return fake_end(HR__CU_INVALID_VALUE);
	}
	return fake_end(push_copy(FAKE_COPY_IN, dst, (void *)(uintptr_t)src, bytes, stream));
}

hr__cu_result cuMemcpyDtoHAsync_v2(void *dst, hr__cu_ptr src, size_t bytes, hr__cu_stream stream)
{
	BEGIN(NEEDS_CONTEXT);
	return fake_end(push_copy(FAKE_COPY_OUT, src, dst, bytes, stream));
}

/* Does not wait for non-blocking streams: what has not arrived yet is seen as poison. */
hr__cu_result cuMemcpyDtoH_v2(void *dst, hr__cu_ptr src, size_t bytes)
{
	struct fake_block *block;

	BEGIN(NEEDS_CONTEXT | UNSAFE_IN_CAPTURE);
	block = fake_block_find(src, bytes);
	if (!block || block->is_freed)
		return fake_end(HR__CU_INVALID_VALUE);
	memcpy(dst, block->backing + (src - block->address), bytes);
	return fake_end(0);
}

static int push_batch(hr__cu_ptr *dsts, hr__cu_ptr *srcs, size_t *sizes, size_t n,
		      const struct hr__cu_copy_attributes *attributes, struct fake_stream *stream)
{
	struct fake_op *op;

	if (!stream || n == 0 || attributes->source_order < 1 || attributes->source_order > 3)
		return HR__CU_INVALID_VALUE;
	if (!fake_is_stream(stream))
		return HR__CU_INVALID_HANDLE;
	op = fake_op_new(FAKE_COPY_IN, n);
	for (size_t i = 0; i < n; i++) {
		char *host = (char *)(uintptr_t)srcs[i];
		int code = sizes[i] ? fake_copy_prepare(&op->copies[i], dsts[i], host, sizes[i], true)
				    : HR__CU_INVALID_VALUE;

		if (code) {
			while (i-- > 0)
				fake_copy_finished(&op->copies[i]);
			free(op);
			return code;
		}
	}
	fake_push(stream, op);
	return 0;
}

static bool starts_are_good(const size_t *starts, size_t n_attributes, size_t n)
{
	return n_attributes == 1 && n_attributes <= n && starts[0] == 0;
}

hr__cu_result cuMemcpyBatchAsync_v2(hr__cu_ptr *dsts, hr__cu_ptr *srcs, size_t *sizes, size_t n,
				    struct hr__cu_copy_attributes *attributes, size_t *starts, size_t n_attributes,
				    hr__cu_stream stream)
{
	BEGIN(NEEDS_CONTEXT);
	if (fake_settings.batch_result)
		return fake_end((int)fake_settings.batch_result);
	if (!starts_are_good(starts, n_attributes, n))
		return fake_end(HR__CU_INVALID_VALUE);
	return fake_end(push_batch(dsts, srcs, sizes, n, attributes, stream));
}

hr__cu_result cuMemcpyBatchAsync(hr__cu_ptr *dsts, hr__cu_ptr *srcs, size_t *sizes, size_t n,
				 struct hr__cu_copy_attributes *attributes, size_t *starts, size_t n_attributes,
				 size_t *failed, hr__cu_stream stream)
{
	BEGIN(NEEDS_CONTEXT);
	*failed = SIZE_MAX;
	if (fake_settings.batch_result)
		return fake_end((int)fake_settings.batch_result);
	if (!starts_are_good(starts, n_attributes, n))
		return fake_end(HR__CU_INVALID_VALUE);
	return fake_end(push_batch(dsts, srcs, sizes, n, attributes, stream));
}

/* ---- streams and events ---- */

/* The legacy (1) and the per-thread (2) default stream. No test queues work there, so all of it is always done. */
static bool is_default(hr__cu_stream stream)
{
	return (uintptr_t)stream == 1 || (uintptr_t)stream == 2;
}

hr__cu_result cuStreamCreate(hr__cu_stream *stream, unsigned int flags)
{
	struct fake_stream *made;

	BEGIN(NEEDS_CONTEXT);
	(void)flags;
	made = fake_alloc(sizeof(*made));
	made->context = fake_current();
	made->end = &made->first;
	made->next = fake_streams;
	fake_streams = made;
	*stream = made;
	return fake_end(0);
}

hr__cu_result cuStreamDestroy_v2(hr__cu_stream stream)
{
	struct fake_stream *s = stream;

	BEGIN(NEEDS_CONTEXT);
	if (!fake_is_stream(s))
		return fake_end(HR__CU_INVALID_HANDLE);
	s->is_destroyed = true;
	if (!s->first) { /* else the worker takes it away after its last operation */
		struct fake_stream **at = &fake_streams;

		while (*at != s)
			at = &(*at)->next;
		*at = s->next;
		free(s);
	}
	return fake_end(0);
}

hr__cu_result cuStreamSynchronize(hr__cu_stream stream)
{
	struct fake_stream *s = stream;

	BEGIN(NEEDS_CONTEXT | UNSAFE_IN_CAPTURE);
	if (!fake_is_stream(s))
		return fake_end(HR__CU_INVALID_HANDLE);
	fake_wait_until_idle(s);
	return fake_end(s->context->sticky);
}

hr__cu_result cuStreamIsCapturing(hr__cu_stream stream, int *status)
{
	struct fake_stream *s = stream;

	BEGIN(NEEDS_CONTEXT);
	*status = 0;
	if (is_default(stream))
		return fake_end(0);
	if (!fake_is_stream(s))
		return fake_end(HR__CU_INVALID_HANDLE);
	*status = s->is_capturing ? 1 + s->capture_broken : 0;
	return fake_end(0);
}

hr__cu_result cuStreamBeginCapture_v2(hr__cu_stream stream, int mode)
{
	struct fake_stream *s = stream;

	BEGIN(NEEDS_CONTEXT);
	if (!fake_is_stream(s))
		return fake_end(HR__CU_INVALID_HANDLE);
	s->is_capturing = true;
	s->capture_broken = false;
	fake_global_captures += mode == 0;
	return fake_end(0);
}

hr__cu_result cuStreamEndCapture(hr__cu_stream stream, void **graph)
{
	struct fake_stream *s = stream;
	bool broken;

	BEGIN(NEEDS_CONTEXT);
	if (!fake_is_stream(s))
		return fake_end(HR__CU_INVALID_HANDLE);
	broken = s->capture_broken;
	s->is_capturing = false;
	if (fake_global_captures)
		fake_global_captures--;
	*graph = NULL;
	return fake_end(broken ? 901 : 0);
}

hr__cu_result cuGraphDestroy(void *graph)
{
	(void)graph;
	return 0;
}

hr__cu_result cuEventCreate(hr__cu_event *event, unsigned int flags)
{
	struct fake_event *made;

	BEGIN(NEEDS_CONTEXT);
	(void)flags;
	made = fake_alloc(sizeof(*made));
	made->context = fake_current();
	made->next = fake_events;
	fake_events = made;
	*event = made;
	return fake_end(0);
}

hr__cu_result cuEventRecord(hr__cu_event event, hr__cu_stream stream)
{
	struct fake_event *e = event;
	struct fake_stream *s = stream;
	struct fake_op *op;

	BEGIN(NEEDS_CONTEXT);
	if (!fake_is_event(e))
		return fake_end(HR__CU_INVALID_HANDLE);
	if (is_default(stream)) {
		fake_record_drop(e->record);
		e->record = fake_alloc(sizeof(*e->record));
		e->record->refs = 1;
		e->record->is_done = true;
		return fake_end(0);
	}
	if (!fake_is_stream(s) || e->context != s->context)
		return fake_end(HR__CU_INVALID_HANDLE);
	fake_record_drop(e->record);
	e->record = fake_alloc(sizeof(*e->record));
	e->record->refs = 1;
	e->record->is_captured = s->is_capturing;
	if (s->is_capturing)
		return fake_end(0);
	e->record->refs++;
	op = fake_op_new(FAKE_RECORD, 0);
	op->record = e->record;
	fake_push(s, op);
	return fake_end(0);
}

hr__cu_result cuStreamWaitEvent(hr__cu_stream stream, hr__cu_event event, unsigned int flags)
{
	struct fake_event *e = event;
	struct fake_stream *s = stream;
	struct fake_op *op;

	BEGIN(NEEDS_CONTEXT);
	(void)flags;
	if (fake_is_event(e) && is_default(stream))
		return fake_end(0);
	if (!fake_is_event(e) || !fake_is_stream(s))
		return fake_end(HR__CU_INVALID_HANDLE);
	if (s->is_capturing || (e->record && e->record->is_captured)) {
		fake_error("an event goes from a captured stream to one that is not, or the other way");
		s->capture_broken = s->is_capturing;
		return fake_end(HR__CU_CAPTURE_ISOLATION);
	}
	if (!e->record)
		return fake_end(0);
	e->record->refs++;
	op = fake_op_new(FAKE_WAIT, 0);
	op->record = e->record;
	fake_push(s, op);
	return fake_end(0);
}

hr__cu_result cuEventQuery(hr__cu_event event)
{
	struct fake_event *e = event;

	BEGIN(NEEDS_CONTEXT | UNSAFE_IN_CAPTURE);
	if (!fake_is_event(e))
		return fake_end(HR__CU_INVALID_HANDLE);
	return fake_end(!e->record || e->record->is_done ? 0 : HR__CU_NOT_READY);
}

hr__cu_result cuEventDestroy_v2(hr__cu_event event)
{
	BEGIN(NEEDS_CONTEXT);
	for (struct fake_event **at = &fake_events; *at; at = &(*at)->next) {
		struct fake_event *e = *at;

		if (e != event)
			continue;
		*at = e->next;
		fake_record_drop(e->record);
		free(e);
		return fake_end(0);
	}
	fake_error("an event is destroyed that is none");
	return fake_end(HR__CU_INVALID_HANDLE);
}

hr__cu_result cuLaunchHostFunc(hr__cu_stream stream, void (*host)(void *arg), void *arg)
{
	struct fake_op *op;

	BEGIN(NEEDS_CONTEXT);
	if (!fake_is_stream(stream))
		return fake_end(HR__CU_INVALID_HANDLE);
	op = fake_op_new(FAKE_HOST, 0);
	op->host = host;
	op->host_arg = arg;
	fake_push(stream, op);
	return fake_end(0);
}
