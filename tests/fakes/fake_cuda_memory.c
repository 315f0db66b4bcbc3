/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of the look-alike driver: blocks of device memory, and registered ranges of host memory. See
 * fake_cuda_core.h. */
#include "fake_cuda_core.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define PAGE         ((size_t)4096)
#define MAX_BLOCKS   ((size_t)1 << 20)
#define KEEP_FREED   512 /* freed blocks whose addresses are not used again yet */
#define SLAB_BYTES   ((size_t)64 << 20)
#define PACKED_BELOW ((size_t)4 << 20)
#define PACKED_ALIGN ((size_t)512)
#define LARGE_ALIGN  ((size_t)2 << 20)

static struct fake_block *blocks[MAX_BLOCKS]; /* by address */
static size_t n_blocks, n_gone;
static struct fake_range *ranges;
static size_t range_bytes, most_range_bytes;

static size_t padded(size_t bytes)
{
	return (bytes + PAGE - 1) / PAGE * PAGE;
}

/* The first block whose address is above `address`. */
static size_t upper(uint64_t address)
{
	size_t low = 0, high = n_blocks;

	while (low < high) {
		size_t middle = (low + high) / 2;

		if (blocks[middle]->address <= address)
			low = middle + 1;
		else
			high = middle;
	}
	return low;
}

/* Addresses that the CPU may not touch, with a page before and after that nothing may. Large ones are aligned as a
 * driver's are. */
static char *reserve(size_t bytes)
{
	size_t slack = bytes >= LARGE_ALIGN ? LARGE_ALIGN : 0, all = padded(bytes) + 2 * PAGE + slack;
	char *seen = mmap(NULL, all, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0), *begin;

	if (seen == MAP_FAILED)
		abort();
	if (!slack)
		return seen + PAGE;
	begin = (char *)(((uintptr_t)seen + PAGE + LARGE_ALIGN - 1) & ~(uintptr_t)(LARGE_ALIGN - 1));
	munmap(seen, (size_t)(begin - PAGE - seen));
	munmap(begin + padded(bytes) + PAGE, (size_t)(seen + all - begin) - padded(bytes) - PAGE);
	return begin;
}

/* Small blocks lie wall to wall, as a driver's pool gives them: a copy that runs from one into the next is an error
 * that only their limits show. */
static char *pack(size_t bytes)
{
	static char *slab, *slab_end;
	char *address;

	if (!slab || (size_t)(slab_end - slab) < bytes + PACKED_ALIGN) {
		slab = reserve(SLAB_BYTES);
		slab_end = slab + SLAB_BYTES;
	}
	address = slab;
	slab += (bytes + PACKED_ALIGN - 1) / PACKED_ALIGN * PACKED_ALIGN;
	return address;
}

struct fake_block *fake_block_new(struct fake_context *context, size_t bytes)
{
	uint64_t limit = (uint64_t)fake_settings.memory_mib << 20;
	struct fake_block *block;
	size_t at;

	if (bytes > limit || context->used_bytes + bytes > limit || n_blocks == MAX_BLOCKS)
		return NULL;
	block = fake_alloc(sizeof(*block));
	block->is_packed = bytes < PACKED_BELOW;
	block->address = (uint64_t)(uintptr_t)(block->is_packed ? pack(bytes) : reserve(bytes));
	block->backing = mmap(NULL, padded(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (block->backing == MAP_FAILED)
		abort();
	memset(block->backing, FAKE_POISON, padded(bytes));
	block->bytes = bytes;
	block->context = context;
	context->used_bytes += bytes;
	if (context->used_bytes > context->peak_bytes)
		context->peak_bytes = context->used_bytes;
	at = upper(block->address);
	memmove(blocks + at + 1, blocks + at, (n_blocks - at) * sizeof(blocks[0]));
	blocks[at] = block;
	n_blocks++;
	return block;
}

struct fake_block *fake_block_find(uint64_t address, size_t bytes)
{
	size_t at = upper(address);
	struct fake_block *block = at ? blocks[at - 1] : NULL;

	if (!block || address - block->address > block->bytes || bytes > block->bytes - (address - block->address))
		return NULL;
	return block;
}

/* Forgets freed blocks, from the lowest address on, when there are many. */
static void forget_some(void)
{
	size_t kept = 0;

	if (n_gone <= KEEP_FREED)
		return;
	for (size_t i = 0; i < n_blocks; i++) {
		struct fake_block *block = blocks[i];

		if (block->is_gone && block->n_pending == 0 && n_gone > KEEP_FREED / 2) {
			if (!block->is_packed)
				munmap((void *)(uintptr_t)(block->address - PAGE), padded(block->bytes) + 2 * PAGE);
			free(block);
			n_gone--;
		} else {
			blocks[kept++] = block;
		}
	}
	n_blocks = kept;
}

void fake_block_free(struct fake_block *block)
{
	if (block->n_pending)
		fake_error("%zu bytes of device memory are freed under %u pending copies", block->bytes,
			   block->n_pending);
	for (size_t i = block->bytes; i < padded(block->bytes); i++)
		if ((unsigned char)block->backing[i] != FAKE_POISON) {
			fake_error("something was written beyond %zu bytes of device memory", block->bytes);
			break;
		}
	munmap(block->backing, padded(block->bytes));
	block->backing = NULL;
	block->is_freed = true;
	block->is_gone = true;
	block->context->used_bytes -= block->bytes;
	n_gone++;
	forget_some();
}

long long fake_blocks_live(const struct fake_context *context)
{
	long long n = 0;

	for (size_t i = 0; i < n_blocks; i++)
		n += !blocks[i]->is_freed && (!context || blocks[i]->context == context);
	return n;
}

/* Whether all of a range is mapped, and the CPU may write to it. */
static bool is_mapped(const char *base, size_t bytes, bool *is_writable)
{
	uint64_t at = (uint64_t)(uintptr_t)base, end = at + bytes, low, high;
	FILE *maps = fopen("/proc/self/maps", "re");
	char line[512], rights[8];

	*is_writable = true;
	while (at < end && maps && fgets(line, sizeof(line), maps)) {
		if (sscanf(line, "%" SCNx64 "-%" SCNx64 " %7s", &low, &high, rights) != 3 || at < low || at >= high)
			continue;
		*is_writable &= rights[1] == 'w';
		at = high;
	}
	if (maps)
		fclose(maps);
	return at >= end;
}

/* Whether the driver takes a range with these flags: it pins pages for writing unless told otherwise. */
static int judge(const char *base, size_t bytes, unsigned int flags)
{
	bool is_writable;

	if ((flags & HR__CU_HOST_REGISTER_READ_ONLY) && !fake_settings.read_only)
		return HR__CU_NOT_SUPPORTED;
	if (!is_mapped(base, bytes, &is_writable))
		return HR__CU_INVALID_VALUE;
	if (!is_writable && !(flags & HR__CU_HOST_REGISTER_READ_ONLY) && !fake_settings.host_tables)
		return HR__CU_INVALID_VALUE;
	return 0;
}

int fake_range_add(char *base, size_t bytes, unsigned int flags)
{
	struct fake_range *range;
	int code;

	if (!base || bytes == 0)
		return HR__CU_INVALID_VALUE;
	code = judge(base, bytes, flags);
	if (code)
		return code;
	if (fake_settings.register_mib && bytes > (size_t)fake_settings.register_mib << 20)
		return HR__CU_INVALID_VALUE;
	for (range = ranges; range; range = range->next)
		if (!range->is_gone && base < range->base + range->bytes && range->base < base + bytes)
			return HR__CU_ALREADY_REGISTERED;
	range = fake_alloc(sizeof(*range));
	range->base = base;
	range->bytes = bytes;
	range->next = ranges;
	ranges = range;
	range_bytes += bytes;
	if (range_bytes > most_range_bytes)
		most_range_bytes = range_bytes;
	return 0;
}

int fake_range_remove(char *base)
{
	for (struct fake_range **at = &ranges; *at; at = &(*at)->next) {
		struct fake_range *range = *at;

		if (range->base != base || range->is_gone)
			continue;
		range_bytes -= range->bytes;
		if (range->n_pending) { /* and leave the record to the copies */
			fake_error("host memory is unregistered under %u pending copies", range->n_pending);
			range->is_gone = true;
			return 0;
		}
		*at = range->next;
		free(range);
		return 0;
	}
	return HR__CU_NOT_REGISTERED;
}

int fake_range_find(const char *base, size_t bytes, struct fake_range **out)
{
	*out = NULL;
	for (struct fake_range *range = ranges; range; range = range->next) {
		if (range->is_gone || base >= range->base + range->bytes || base + bytes <= range->base)
			continue;
		if (base < range->base || base + bytes > range->base + range->bytes)
			return HR__CU_INVALID_VALUE;
		*out = range;
		return 0;
	}
	return 0;
}

long long fake_ranges_most(void)
{
	long long most = (long long)most_range_bytes;

	most_range_bytes = range_bytes;
	return most;
}

long long fake_ranges_live(void)
{
	long long n = 0;

	for (const struct fake_range *range = ranges; range; range = range->next)
		n += !range->is_gone;
	return n;
}

int fake_copy_prepare(struct fake_copy *copy, uint64_t device, char *host, size_t bytes, bool must_be_registered)
{
	struct fake_block *block = fake_block_find(device, bytes);
	struct fake_block *source = fake_block_find((uint64_t)(uintptr_t)host, bytes);
	struct fake_range *range;
	int rc;

	if (!block || block->is_freed) {
		fake_error("a copy of %zu bytes touches device memory at %#llx that %s", bytes,
			   (unsigned long long)device, block ? "was freed" : "is not allocated, or not to its end");
		return HR__CU_INVALID_VALUE;
	}
	if (source) {
		if (source->is_freed)
			fake_error("a copy of %zu bytes reads device memory that was freed", bytes);
		*copy = (struct fake_copy){block,
					   (size_t)(device - block->address),
					   NULL,
					   bytes,
					   NULL,
					   source,
					   (size_t)((uint64_t)(uintptr_t)host - source->address)};
		block->n_pending++;
		source->n_pending++;
		return 0;
	}
	rc = fake_range_find(host, bytes, &range);
	if (rc)
		return rc;
	if (!range && must_be_registered)
		fake_error("a copy of %zu bytes touches host memory at %p that is not registered", bytes, (void *)host);
	*copy = (struct fake_copy){block, (size_t)(device - block->address), host, bytes, range, NULL, 0};
	block->n_pending++;
	if (range)
		range->n_pending++;
	return 0;
}

void fake_copy_finished(struct fake_copy *copy)
{
	copy->block->n_pending--;
	if (copy->range)
		copy->range->n_pending--;
	if (copy->source)
		copy->source->n_pending--;
}

API int fake_cuda_store(unsigned long long address, const void *bytes, size_t n);
API int fake_cuda_store(unsigned long long address, const void *bytes, size_t n)
{
	struct fake_block *block;

	pthread_mutex_lock(&fake_lock);
	block = fake_block_find(address, n);
	if (!block || block->is_freed) {
		fake_error("a disk writes %zu bytes to device memory at %#llx that %s", n, address,
			   block ? "was freed" : "is not allocated, or not to its end");
		pthread_mutex_unlock(&fake_lock);
		return -1;
	}
	if (fake_is_in_flight(address, n))
		fake_error("a disk writes %zu bytes of device memory that a queued copy uses", n);
	block->n_pending++;
	pthread_mutex_unlock(&fake_lock);
	memcpy(block->backing + (address - block->address), bytes, n);
	pthread_mutex_lock(&fake_lock);
	block->n_pending--;
	pthread_mutex_unlock(&fake_lock);
	return 0;
}
