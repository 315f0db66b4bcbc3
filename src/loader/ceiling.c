/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Ceilings: what the link, the storage, the page cache and the memory of this machine can do at best. Plain loops on
 * purpose, which share nothing with the loader but the system: a loader measured against itself would always look
 * good.
 */
#define HR_EXPERIMENTAL
#include "loader.h"

#include "core/arith.h"
#include "core/mem.h"

#include <string.h>

#define BLOCK_BYTES      ((uint64_t)4 << 20)
#define LINK_BYTES       ((uint64_t)64 << 20)
#define STORAGE_THREADS  16
#define MAX_MEMORY_BYTES ((uint64_t)2 << 30)

/* One measurement, shared by its threads. */
struct run {
	hr_loader *loader;
	hr_model *model;
	uint32_t kind;
	uint64_t wanted;          /* bytes to move */
	uint64_t block;           /* bytes of one step */
	unsigned char *memory;    /* what the pool has, or less */
	uint64_t share;           /* of it for each thread: it goes round in that, as slots do */
	unsigned char *from, *to; /* HR_CEILING_MEMORY */
	uint64_t room;            /* of those */
	_Atomic uint64_t next;    /* the next byte that nobody has taken */
	_Atomic uint64_t moved;
	_Atomic int error; /* errno of the first failure */
	int code;          /* HR_CEILING_LINK: of the device */
	struct hr__device_error device_error;
};

struct worker {
	struct run *run;
	pthread_t thread;
	unsigned char *memory;
};

/* The place of a byte of the whole model: its source, and where in it. */
static const struct hr__source *locate(const struct run *run, uint64_t at, uint64_t *offset)
{
	for (uint32_t i = 0; i < hr__model_n_sources(run->model); i++) {
		const struct hr__source *source = hr__model_source(run->model, i);
		uint64_t whole = hr__round_up(source->bytes, run->block);

		if (at < whole) {
			*offset = at;
			return source;
		}
		at -= whole;
	}
	return NULL;
}

static void read_blocks(struct worker *worker)
{
	struct run *run = worker->run;
	bool direct = run->kind == HR_CEILING_STORAGE;
	uint64_t round = 0;

	while (!run->error) {
		uint64_t at = atomic_fetch_add(&run->next, run->block), offset;
		const struct hr__source *source = at < run->wanted ? locate(run, at, &offset) : NULL;
		size_t got, block;
		int error;

		if (!source)
			return;
		block = (size_t)hr__min_u64(run->block, source->room - offset);
		error = hr__os_pread_full(direct ? source->file.direct_fd : source->file.fd,
					  worker->memory + round % run->share, block, source->base + offset, &got);
		round += run->block;
		/* A direct read at the end of the file stops at a byte that is no place to go on from; it has all
		 * there is. */
		if (error && got == 0)
			atomic_store(&run->error, error);
		atomic_fetch_add(&run->moved, got);
	}
}

static void copy_blocks(struct worker *worker)
{
	struct run *run = worker->run;

	for (;;) {
		uint64_t at = atomic_fetch_add(&run->next, run->block);
		uint64_t bytes = at < run->wanted ? hr__min_u64(run->block, run->wanted - at) : 0;

		if (bytes == 0)
			return;
		memcpy(run->to + at % run->room, run->from + at % run->room, (size_t)bytes);
		atomic_fetch_add(&run->moved, bytes);
	}
}

static void *worker_main(void *arg)
{
	struct worker *worker = arg;

	if (worker->run->kind == HR_CEILING_MEMORY)
		copy_blocks(worker);
	else
		read_blocks(worker);
	return NULL;
}

static int run_workers(struct run *run, uint32_t n)
{
	struct worker *workers = hr__calloc(n, sizeof(*workers));
	uint32_t started = 0;
	int error = 0;

	if (!workers)
		return HR_E_NOMEM;
	for (; started < n && !error; started += !error) {
		workers[started] = (struct worker){.run = run, .memory = run->memory + started * run->share};
		error = hr__os_thread(&workers[started].thread, "hr-ceiling", worker_main, &workers[started]);
	}
	for (uint32_t i = 0; i < started; i++)
		pthread_join(workers[i].thread, NULL);
	hr__free(workers);
	if (error || run->error)
		return hr__fail_errno(&(struct hr__where){.stage = "ceiling", .offset = HR_NO_OFFSET},
				      error ? error : run->error, error ? "start a thread" : "read the model's files");
	return 0;
}

/* On a thread of its own, since a lane makes its device current. */
static void *link_main(void *arg)
{
	struct run *run = arg;
	hr_device *device = run->loader->device;
	struct hr__device_error *error = &run->device_error;
	uint64_t fences = 0, done = 0;
	struct hr__lane *lane;

	run->code = device->ops->lane_open(device, &lane, error);
	if (run->code)
		return NULL;
	while (!run->code && (run->moved < run->wanted || done < fences)) {
		struct hr__copy copy = {run->to, run->memory, (size_t)run->block};
		size_t calls;

		/* a few queued, so that the link never waits for us */
		if (run->moved < run->wanted && fences - done < 4) {
			run->code = device->ops->copy(lane, &copy, 1, &calls, error);
			if (!run->code)
				run->code = device->ops->fence(lane, ++fences, error);
			run->moved += run->block;
			continue;
		}
		int state = device->ops->fence_done(lane, done + 1, error);

		if (state < 0)
			run->code = state;
		done += state == 1;
	}
	device->ops->lane_close(lane);
	return NULL;
}

static int run_link(struct run *run)
{
	pthread_t thread;
	int error = hr__os_thread(&thread, "hr-ceiling", link_main, run);

	if (error)
		return hr__fail_errno(&(struct hr__where)HR__NOWHERE, error, "start a thread");
	pthread_join(thread, NULL);
	return run->code
		       ? hr__device_fail(run->loader->device, run->code, "cannot measure the link", &run->device_error)
		       : 0;
}

static int check_sources(const struct run *run)
{
	for (uint32_t i = 0; i < hr__model_n_sources(run->model); i++) {
		const struct hr__source *source = hr__model_source(run->model, i);

		if (source->file.raw && run->kind == HR_CEILING_STORAGE)
			return hr__fail(
				HR_E_UNSUPPORTED,
				"the storage cannot be measured: %s is read through uGDS, which plain loops cannot use",
				source->path);
		if (run->kind == HR_CEILING_STORAGE && source->file.direct_fd < 0)
			return hr__fail(HR_E_UNSUPPORTED, "the storage cannot be measured: O_DIRECT is refused for %s",
					source->path);
		if (run->kind == HR_CEILING_CACHED && source->file.fd < 0)
			return hr__fail(HR_E_UNSUPPORTED,
					"the page cache cannot be measured: %s is on a block device, "
					"which is read around it",
					source->path);
	}
	return 0;
}

static void measure_start(struct hr_ceiling *out)
{
	out->ns = hr__os_now_ns();
	out->cpu_ns = hr__os_process_cpu_ns();
}

static void measure_end(struct hr_ceiling *out, const struct run *run)
{
	out->ns = hr__os_now_ns() - out->ns;
	out->cpu_ns = hr__os_process_cpu_ns() - out->cpu_ns;
	out->bytes = run->moved;
}

/* Memory for the steps, registered with the device and touched, outside of what is timed. */
static int measure_staged(struct run *run, uint32_t n_threads, struct hr_ceiling *out)
{
	hr_device *device = run->loader->device;
	struct hr__device_error error = {0};
	uint64_t bytes;
	void *memory, *target = NULL;
	int rc;

	run->share = run->loader->pool.bytes / n_threads / run->block * run->block;
	bytes = n_threads * run->share;
	rc = hr__os_map((size_t)bytes, &memory);
	if (rc)
		return hr__fail_errno(&(struct hr__where)HR__NOWHERE, rc, "allocate memory for a measurement");
	hr__os_touch(memory, (size_t)bytes);
	run->memory = memory;
	rc = device->ops->pin(device, memory, (size_t)bytes, &error);
	if (!rc && run->kind == HR_CEILING_LINK)
		rc = device->ops->alloc(device, run->block, &target, &error);
	if (rc)
		rc = hr__device_fail(device, rc, "cannot set up a measurement", &error);
	run->to = target;
	measure_start(out);
	if (!rc)
		rc = run->kind == HR_CEILING_LINK ? run_link(run) : run_workers(run, n_threads);
	measure_end(out, run);
	if (target)
		device->ops->release(device, target, run->block, &error);
	device->ops->unpin(device, memory, &error);
	hr__os_unmap(memory, (size_t)bytes);
	return rc;
}

static int measure_memory(struct run *run, struct hr_ceiling *out)
{
	void *from, *to;
	int error;

	run->wanted = hr__min_u64(run->wanted, MAX_MEMORY_BYTES);
	run->room = hr__round_up(run->wanted, run->block);
	error = hr__os_map((size_t)run->room, &from);
	if (error)
		return hr__fail_errno(&(struct hr__where)HR__NOWHERE, error, "allocate memory for a measurement");
	error = hr__os_map((size_t)run->room, &to);
	if (error) {
		hr__os_unmap(from, (size_t)run->room);
		return hr__fail_errno(&(struct hr__where)HR__NOWHERE, error, "allocate memory for a measurement");
	}
	memset(from, 1, (size_t)run->room); /* the destination stays untouched: a load's is fresh memory too */
	run->from = from;
	run->to = to;
	measure_start(out);
	error = run_workers(run, run->loader->n_readers);
	measure_end(out, run);
	hr__os_unmap(from, (size_t)run->room);
	hr__os_unmap(to, (size_t)run->room);
	return error;
}

int hr_ceiling(hr_loader *loader, hr_model *model, uint32_t kind, uint64_t bytes, struct hr_ceiling *out)
{
	struct hr_ceiling own = {0};
	struct run run = {.loader = loader, .model = model, .kind = kind, .block = BLOCK_BYTES};
	uint64_t fit;
	int rc = hr__loader_here(loader);

	if (rc)
		return rc;
	if (!model || !out || kind > HR_CEILING_MEMORY)
		return hr__fail(HR_E_OPTS, "hr_ceiling: the model or the result is NULL, or there is no kind %u", kind);
	run.wanted = bytes ? bytes : hr__model_bytes(model);
	if (kind == HR_CEILING_LINK)
		run.block = hr__min_u64(LINK_BYTES, loader->pool.bytes);
	else if (kind != HR_CEILING_STORAGE)
		run.block = loader->pool.slot_bytes;
	run.block = hr__min_u64(run.block, loader->pool.bytes);
	fit = loader->pool.bytes / run.block;
	if (kind == HR_CEILING_MEMORY)
		rc = measure_memory(&run, &own);
	else if (kind == HR_CEILING_LINK)
		rc = measure_staged(&run, 1, &own);
	else
		rc = check_sources(&run);
	if (!rc && kind == HR_CEILING_CACHED)
		rc = measure_staged(&run, (uint32_t)hr__min_u64(loader->n_readers, fit), &own);
	if (!rc && kind == HR_CEILING_STORAGE)
		rc = measure_staged(&run, (uint32_t)hr__min_u64(STORAGE_THREADS, fit), &own);
	return rc ? rc : hr__out_copy(out, &own, sizeof(own), "hr_ceiling");
}
