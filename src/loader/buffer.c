/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory that is handed out. A buffer is a counted view of a block, a block one allocation of the device; small
 * tensors of a feed share blocks. The heap is what remains of a loader for as long as blocks are out. A buffer of
 * hr_map() has no block and no loader: it is a view of a mapped file, and holds the model.
 *
 * hr_buffer_release() may run anywhere: in a language's collector, under a caller's lock. So while the loader lives it
 * only pushes the block onto a lock-free stack and pokes the drainer; memory of a caller's hooks goes back on the next
 * thread that is inside one of our calls. Host memory needs none of this and goes back at once, as does all memory
 * once the loader has closed: it puts a mark on the stack then, so that no block can be pushed that nobody would take.
 */
#include "loader.h"

#include "core/arith.h"
#include "core/mem.h"

#include <stdio.h>

#define BUFFER_ALIGN 256

/* What the stack holds when there is no loader any more. */
static struct hr__block no_loader;

int hr__heap_new(hr_loader *loader, const struct hr_loader_opts *opts, struct hr__heap **out)
{
	struct hr__heap *heap = hr__calloc(1, sizeof(*heap));

	*out = NULL;
	if (!heap)
		return HR_E_NOMEM;
	heap->device = hr__device_acquire(loader->device);
	heap->loader = loader;
	atomic_fetch_add(&loader->count, 1);
	heap->alloc = opts->alloc;
	heap->release = opts->release;
	heap->ctx = opts->alloc_ctx;
	heap->count = 1;
	*out = heap;
	return 0;
}

struct hr__heap *hr__heap_acquire(struct hr__heap *heap)
{
	atomic_fetch_add(&heap->count, 1);
	return heap;
}

void hr__heap_unref(struct hr__heap *heap)
{
	if (!heap || atomic_fetch_sub(&heap->count, 1) > 1)
		return;
	hr_device_close(heap->device);
	hr__loader_unref(heap->loader);
	hr__free(heap);
}

static void block_end(struct hr__block *block)
{
	struct hr__heap *heap = block->heap;

	atomic_fetch_sub(&heap->bytes, block->bytes);
	hr__free(block);
	hr__heap_unref(heap);
}

/* Gives one allocation back. A failure of the driver has nobody to go to: the memory then is the driver's to clean
 * up. */
static void block_free(struct hr__block *block, void *stream)
{
	struct hr__heap *heap = block->heap;
	struct hr__device_error ignored;

	if (block->memory && heap->release)
		heap->release(heap->ctx, block->memory, block->bytes, stream);
	else if (block->memory)
		heap->device->ops->release(heap->device, block->memory, block->bytes, &ignored);
	block_end(block);
}

void hr__block_free_idle(struct hr__block *block)
{
	const struct hr__device_ops *ops = block->heap->device->ops;
	struct hr__device_error ignored;

	if (block->heap->release || !ops->release_idle) {
		block_free(block, NULL);
		return;
	}
	if (block->memory)
		ops->release_idle(block->heap->device, block->memory, block->bytes, &ignored);
	block_end(block);
}

static void free_all(struct hr__block *block)
{
	while (block && block != &no_loader) {
		struct hr__block *next = block->next;

		block_free(block, NULL);
		block = next;
	}
}

void hr__heap_reap(struct hr__heap *heap, bool may_call_hooks)
{
	struct hr__block *block;

	if (heap->release && !may_call_hooks)
		return;
	block = atomic_load(&heap->given_back);
	do {
		if (!block || block == &no_loader)
			return;
	} while (!atomic_compare_exchange_weak(&heap->given_back, &block, NULL));
	free_all(block);
}

void hr__heap_close(struct hr__heap *heap)
{
	if (!heap)
		return;
	free_all(atomic_exchange(&heap->given_back, &no_loader));
	hr__heap_unref(heap);
}

/* Leaves a block to the loader; false if there is none any more. */
static bool give_back(struct hr__heap *heap, struct hr__block *block)
{
	struct hr__block *head = atomic_load(&heap->given_back);

	do {
		if (head == &no_loader)
			return false;
		block->next = head;
	} while (!atomic_compare_exchange_weak(&heap->given_back, &head, block));
	return true;
}

void hr__block_release(struct hr__block *block)
{
	struct hr__heap *heap = block->heap;

	if (atomic_fetch_sub(&block->count, 1) > 1)
		return;
	if (!heap->release && (heap->device->ops->caps & HR__DEVICE_HOST)) {
		block_free(block, NULL);
		return;
	}
	hr__heap_acquire(heap); /* once the block is pushed, it no longer keeps the heap */
	if (!give_back(heap, block))
		block_free(block, NULL);
	else if (
		/* without the lock, since a caller's may be held; a poke that is missed costs a quarter second */
		!heap->release)
		pthread_cond_signal(&heap->loader->full);
	hr__heap_unref(heap);
}

static int no_memory(struct hr__heap *heap, int code, uint64_t bytes, const struct hr__device_error *error)
{
	char doing[96];

	if (heap->alloc)
		return hr__fail_at(&(struct hr__where){.stage = "device", .offset = HR_NO_OFFSET}, HR_E_DEVICE_MEMORY,
				   "the caller's allocator gave no memory for %" PRIu64 " bytes on %s", bytes,
				   heap->device->spec);
	snprintf(doing, sizeof(doing), "cannot allocate %" PRIu64 " bytes", bytes);
	return hr__failed(hr__device_fail(heap->device, code, doing, error));
}

int hr__block_new(struct hr__heap *heap, uint64_t bytes, void *stream, struct hr__block **out)
{
	struct hr__block *block = hr__calloc(1, sizeof(*block));
	struct hr__device_error error = {0};
	uint64_t now, peak;
	int rc = 0;

	*out = NULL;
	if (!block)
		return HR_E_NOMEM;
	if (bytes && heap->alloc) {
		block->memory = heap->alloc(heap->ctx, bytes, BUFFER_ALIGN, stream);
		rc = block->memory ? 0 : HR_E_DEVICE_MEMORY;
	} else if (bytes) {
		rc = heap->device->ops->alloc(heap->device, bytes, &block->memory, &error);
	}
	if (rc) {
		hr__free(block);
		return no_memory(heap, rc, bytes, &error);
	}
	block->heap = heap;
	block->bytes = bytes;
	block->count = 1;
	atomic_fetch_add(&heap->count, 1);
	now = atomic_fetch_add(&heap->bytes, bytes) + bytes;
	peak = heap->peak_bytes;
	while (now > peak && !atomic_compare_exchange_weak(&heap->peak_bytes, &peak, now))
		;
	*out = block;
	return 0;
}

int hr__buffer_new(struct hr__block *block, uint64_t offset, uint64_t bytes, hr_buffer **out)
{
	hr_buffer *buffer = hr__malloc(sizeof(*buffer));

	*out = NULL;
	if (!buffer)
		return HR_E_NOMEM;
	atomic_fetch_add(&block->count, 1);
	buffer->block = block;
	buffer->model = NULL;
	buffer->memory = bytes ? (char *)block->memory + offset : NULL;
	buffer->bytes = bytes;
	buffer->count = 1;
	buffer->owner = NULL;
	*out = buffer;
	return 0;
}

int hr__buffer_new_mapped(hr_model *model, const struct hr__extent *extent, unsigned char *memory, hr_buffer **out)
{
	hr_buffer *buffer = hr__malloc(sizeof(*buffer));

	*out = NULL;
	if (!buffer)
		return HR_E_NOMEM;
	*buffer = (hr_buffer){.model = hr_model_acquire(model),
			      .extent = *extent,
			      .memory = extent->bytes ? memory + extent->offset : NULL,
			      .bytes = extent->bytes,
			      .count = 1};
	*out = buffer;
	return 0;
}

uint32_t hr_buffer_flags(const hr_buffer *buffer)
{
	return buffer->block ? 0 : HR_BUFFER_READ_ONLY;
}

int hr_buffer_new(hr_loader *loader, uint64_t bytes, hr_buffer **out)
{
	struct hr__block *block;
	int rc;

	if (!out)
		return hr__fail(HR_E_OPTS, "hr_buffer_new: the result has nowhere to go (NULL)");
	*out = NULL;
	rc = hr__loader_here(loader);
	if (rc)
		return rc;
	hr__heap_reap(loader->heap, true);
	rc = hr__block_new(loader->heap, bytes, NULL, &block);
	if (rc)
		return rc;
	rc = hr__buffer_new(block, 0, bytes, out);
	hr__block_release(block);
	return rc;
}

void *hr_buffer_data(const hr_buffer *buffer)
{
	return buffer->memory;
}

uint64_t hr_buffer_bytes(const hr_buffer *buffer)
{
	return buffer->bytes;
}

hr_buffer *hr_buffer_acquire(hr_buffer *buffer)
{
	atomic_fetch_add(&buffer->count, 1);
	return buffer;
}

/* In a forked child the memory is the parent's: nothing is given back. A mapping is each process's own. */
static bool is_forked(const hr_buffer *buffer)
{
	const volatile uint32_t *mark = buffer->block ? buffer->block->heap->device->fork_mark : NULL;

	return mark && *mark == 0;
}

void hr_buffer_release(hr_buffer *buffer)
{
	if (!buffer || is_forked(buffer))
		return;
	if (buffer->owner) {
		buffer->owner->release(buffer);
		return;
	}
	if (atomic_fetch_sub(&buffer->count, 1) > 1)
		return;
	if (buffer->block) {
		hr__block_release(buffer->block);
	} else {
		hr__model_unmap(buffer->model, buffer->extent.source);
		hr_model_close(buffer->model);
	}
	hr__free(buffer);
}

int hr_buffer_release_on(hr_buffer *buffer, void *stream)
{
	struct hr__device_error error = {0};
	struct hr__block *block;
	hr_device *device;
	int rc;

	if (!buffer)
		return 0;
	block = buffer->block;
	if (!block)
		return hr__fail(HR_E_OPTS,
				"a mapped tensor is in host memory, which has no streams: use hr_buffer_release()");
	device = block->heap->device;
	rc = hr__device_here(device);
	if (rc)
		return rc;
	if (!(device->ops->caps & HR__DEVICE_STREAMS))
		return hr__fail(HR_E_OPTS, "%s has no streams: use hr_buffer_release()", device->spec);
	if (buffer->owner)
		return buffer->owner->release_on(buffer, stream);
	/* A caller's allocator is told the stream. Our own memory may have other owners, or be shared with other
	 * buffers, and who drops it last need not be this one: so the device is told that nothing it gets back from
	 * now on is free before this stream has come so far. If it cannot be told, nothing is released. */
	if (!block->heap->release)
		rc = device->ops->retire(device, stream, &error);
	if (rc)
		return hr__device_fail(device, rc, "cannot order a release after the stream", &error);
	if (atomic_fetch_sub(&buffer->count, 1) > 1)
		return 0;
	if (!block->heap->release)
		hr__block_release(block);
	else if (atomic_fetch_sub(&block->count, 1) == 1)
		block_free(block, stream);
	hr__free(buffer);
	return 0;
}

/* A mapped tensor's bytes come from its file: no code of ours reads through a mapping. */
static int read_file(const hr_buffer *buffer, uint64_t offset, void *dst, uint64_t bytes)
{
	const struct hr__source *source = hr__model_source(buffer->model, buffer->extent.source);
	int rc = hr__source_read(source, buffer->extent.offset + offset, dst, (size_t)bytes);

	return rc ? rc : hr__source_check(source);
}

int hr_buffer_read(hr_buffer *buffer, uint64_t offset, void *dst, uint64_t bytes)
{
	struct hr__device_error error = {0};
	hr_device *device;
	uint64_t end;
	int rc;

	if (!buffer || (!dst && bytes))
		return hr__fail(HR_E_OPTS, "hr_buffer_read: %s is NULL", buffer ? "dst" : "buffer");
	device = buffer->block ? buffer->block->heap->device : NULL;
	rc = device ? hr__device_here(device) : 0;
	if (rc)
		return rc;
	if (!hr__add_u64(offset, bytes, &end) || end > buffer->bytes)
		return hr__fail(HR_E_OPTS, "bytes %" PRIu64 " to %" PRIu64 " are outside of a buffer of %" PRIu64,
				offset, offset + bytes, buffer->bytes);
	if (bytes == 0)
		return 0;
	if (!device)
		return read_file(buffer, offset, dst, bytes);
	rc = device->ops->read_back(device, dst, (const char *)buffer->memory + offset, bytes, &error);
	return rc ? hr__device_fail(device, rc, "cannot copy a buffer to host memory", &error) : 0;
}
