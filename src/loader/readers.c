/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Readers: the threads that bring bytes in. A reader draws a chunk together with a slot, decides how it is read, and
 * reads it itself or hands it to the queued engine, whose thread is the last part of this file. Either way the slot
 * comes back through finish_read().
 *
 * Who may take a slot: a chunk that somebody waits for (its first destination is known) may take any; look-ahead
 * leaves pool->reserve slots alone, and a chunk that goes into the reserve is cut where the known destinations end, so
 * that it drains and never parks there. That is why feeds whose consumers are slow cannot starve a job.
 *
 * Where the engine stages in windows, readers also take back those that nothing reads from any more, and that before
 * they draw again: taking back is a matter of system and driver calls, which the drainer must not wait for.
 */
#include "loader.h"

#include "core/arith.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* ---- drawing; under the lock ---- */

static bool is_demanded(const struct hr_job *job)
{
	size_t span = job->cursor.span;
	uint64_t done = job->cursor.done;

	for (; span < job->n_bound; span++, done = 0)
		if (job->spans[span].bytes > done)
			return true;
	return false;
}

static bool draw_from(hr_loader *loader, struct hr_job *job, struct hr__chunk *chunk)
{
	bool demanded, scarce = loader->pool.n_free <= loader->pool.reserve;

	if (job->code || job->is_drawn || loader->pool.n_free == 0)
		return false;
	demanded = is_demanded(job);
	if (scarce && !demanded)
		return false;
	if (hr__plan_next(&job->plan, &job->cursor, scarce ? job->n_bound : job->n_spans, chunk)) {
		struct hr__cursor peek = job->cursor;
		struct hr__chunk ignored;

		job->is_drawn = !hr__plan_next(&job->plan, &peek, job->n_spans, &ignored);
		return true;
	}
	return false;
}

/* The oldest background job started after the one with this number; NULL if there is none. */
static struct hr_job *background_after(const hr_loader *loader, uint64_t number)
{
	struct hr_job *job = loader->jobs, *oldest = NULL;

	for (uint32_t i = 0; i < loader->n_jobs; i++, job = job->next)
		if (job->is_background && job->number > number && (!oldest || job->number < oldest->number))
			oldest = job;
	return oldest;
}

/* Background jobs one after the other: what comes first is wanted first. */
static struct hr_job *draw_background(hr_loader *loader, struct hr__chunk *chunk)
{
	struct hr_job *job = loader->n_background ? background_after(loader, 0) : NULL;

	while (job && !draw_from(loader, job, chunk))
		job = background_after(loader, job->number);
	return job;
}

/* The job whose turn it is, and its next chunk; NULL if there is nothing to do now. */
static struct hr_job *draw_job(hr_loader *loader, struct hr__chunk *chunk)
{
	struct hr_job *job = loader->jobs;

	for (uint32_t i = 0; i < loader->n_jobs; i++, job = job->next) {
		if (job->is_background || !draw_from(loader, job, chunk))
			continue;
		loader->jobs = job->next;
		return job;
	}
	return draw_background(loader, chunk);
}

/* A slot with the next chunk of some job; NULL if there is nothing to do now. */
static struct hr__slot *draw(hr_loader *loader)
{
	struct hr__slot *slot;
	struct hr__chunk chunk;
	struct hr_job *job = draw_job(loader, &chunk);

	if (!job)
		return NULL;
	slot = hr__pool_take(&loader->pool);
	slot->job = job;
	slot->chunk = chunk;
	slot->drained = chunk.first;
	slot->deadline_ns = UINT64_MAX;
	slot->blocks_reader = false;
	job->in_flight++;
	return slot;
}

void hr__wake_readers(hr_loader *loader, uint32_t n)
{
	if (loader->n_idle_readers == 0)
		return;
	if (n == 1)
		pthread_cond_signal(&loader->work);
	else
		pthread_cond_broadcast(&loader->work);
}

/* ---- setting a read up; no lock ---- */

static void prepare(const hr_loader *loader, struct hr__slot *slot, bool direct)
{
	const struct hr_job *job = slot->job;
	const struct hr__source *source = hr__model_source(job->model, slot->chunk.source);

	hr__choose_envelope(job, &slot->chunk, direct, &slot->envelope);
	slot->payload = slot->memory ? slot->memory + slot->envelope.lead : NULL;
	slot->io = (struct hr__io){.file = &source->file,
				   .offset = source->base + slot->envelope.offset,
				   .asked = (size_t)slot->envelope.asked,
				   .expected = (size_t)slot->envelope.expected,
				   .memory = slot->memory,
				   .direct = direct,
				   .staged = true};
	if (loader->pool.staging == HR__STAGING_DEVICE)
		hr__window_aim(slot, source);
}

/* Whether the read can go straight into the destinations: the CPU may write them, all are known, nothing has to be
 * verified first, and no deadline could leave the read running after the job has settled. `n_bound` was read under the
 * lock and only grows. */
static bool may_go_straight(const hr_loader *loader, const struct hr__slot *slot, bool direct, size_t n_bound)
{
	return (loader->device->ops->caps & HR__DEVICE_HOST) && !direct && slot->job->io_timeout_ms == 0 &&
	       !slot->job->blocks && slot->chunk.last < n_bound;
}

/* Points the read at its destinations; gaps between them go into the slot, which nobody reads. Where a destination is
 * fresh memory, a chunk's first bytes lie in the huge page that the chunk before begins, and its reader is at it at the
 * same moment: whoever of the two comes second clears the page in vain. So each claims the pages that begin with it. */
static void aim_straight(struct hr__reader *reader, struct hr__slot *slot)
{
	const struct hr_job *job = slot->job;
	uint64_t at = 0;
	int n = 0;

	for (size_t span = slot->chunk.first; span <= slot->chunk.last; span++) {
		struct hr__piece piece;

		if (!hr__chunk_piece(&job->plan, &slot->chunk, span, &piece))
			continue;
		if (piece.at > at)
			reader->iov[n++] = (struct iovec){slot->memory, (size_t)(piece.at - at)};
		reader->iov[n] = (struct iovec){job->targets[span].at + piece.from, (size_t)piece.bytes};
		hr__os_claim(reader->iov[n].iov_base, reader->iov[n].iov_len);
		n++;
		at = piece.at + piece.bytes;
	}
	slot->io.staged = false;
	slot->io.memory = n == 1 ? reader->iov[0].iov_base : NULL;
	slot->io.iov = reader->iov;
	slot->io.n_iov = n == 1 ? 0 : n;
}

static uint64_t deadline_of(const struct hr_job *job)
{
	return job->io_timeout_ms ? hr__os_now_ns() + (uint64_t)job->io_timeout_ms * 1000000 : UINT64_MAX;
}

/* ---- a read has come back; under the lock ---- */

static void count_read(hr_loader *loader, struct hr__slot *slot)
{
	struct hr__counts *both[] = {&slot->job->counts, &loader->counts};

	for (size_t i = 0; i < 2; i++) {
		uint64_t *by_engine = slot->io.direct ? both[i]->direct_bytes : both[i]->cached_bytes;

		both[i]->n_chunks++;
		both[i]->read_bytes += slot->envelope.expected;
		by_engine[slot->engine->id] += slot->envelope.expected;
	}
}

/* Nothing reads from the slot any more: it is free, or its window has to go first. Under the lock. */
static void vacate(hr_loader *loader, struct hr__slot *slot)
{
	if (slot->has_window) {
		hr__pool_move(&loader->pool, slot, HR__SLOT_LEAVING);
		slot->job = NULL;
		hr__slot_push(&loader->leaving, slot);
	} else {
		hr__pool_move(&loader->pool, slot, HR__SLOT_FREE);
	}
	hr__wake_readers(loader, 1);
}

void hr__slot_land(hr_loader *loader, struct hr__slot *slot)
{
	struct hr_job *job = slot->job;

	vacate(loader, slot);
	hr__job_landed(job);
}

void hr__drain(hr_loader *loader, struct hr__slot *slot)
{
	struct hr_job *job = slot->job;

	if (job->code) {
		hr__slot_land(loader, slot);
		return;
	}
	if (slot->drained >= job->n_bound) {
		hr__slot_push(&job->parked, slot);
		return;
	}
	hr__slot_push(&loader->full_slots, slot);
	if (loader->drainer_waiting)
		pthread_cond_signal(&loader->full);
}

/* A direct read that the file system turned down although it had let us open the file so: once per job, on to
 * buffered. Under the lock; true if the slot must be read again. */
static bool must_read_again(hr_loader *loader, struct hr__slot *slot)
{
	if (slot->state == HR__SLOT_LOST || slot->job->code || loader->caching != HR_CACHING_AUTO)
		return false;
	if (slot->io.code != HR_E_IO || slot->io.system != EINVAL || !slot->io.direct || slot->io.file->fd < 0)
		return false;
	slot->job->direct_refused = true;
	prepare(loader, slot, false);
	return true;
}

/* A read that missed its deadline has come back after all. Under the lock; gives the model to close after it. */
static hr_model *find_again(hr_loader *loader, struct hr__slot *slot)
{
	hr_model *model = slot->lost_model;

	slot->lost_model = NULL;
	if (slot->blocks_reader)
		loader->n_stuck_readers--;
	vacate(loader, slot);
	pthread_cond_broadcast(&loader->idle);
	return model;
}

static void finish_read(hr_loader *loader, struct hr__slot *slot)
{
	struct hr_job *job = slot->job;

	if (slot->io.code) {
		hr__job_fail_read(job, &slot->io, &slot->chunk);
		hr__slot_land(loader, slot);
		return;
	}
	count_read(loader, slot);
	if (!slot->io.staged && (loader->device->ops->caps & HR__DEVICE_HOST)) { /* straight: it has arrived */
		hr__job_arrived(job, &slot->chunk, slot->chunk.first, slot->chunk.last + 1);
		hr__slot_land(loader, slot);
		return;
	}
	hr__pool_move(&loader->pool, slot, HR__SLOT_FULL);
	if (job->blocks && !job->code) { /* for any reader: the queued engine has one thread only */
		hr__slot_push(&loader->verify_slots, slot);
		hr__wake_readers(loader, 1);
		return;
	}
	hr__drain(loader, slot);
}

/* ---- the reader ---- */

static void verify_slot(struct hr__reader *reader, struct hr__slot *slot)
{
	hr_loader *loader = reader->loader;
	uint64_t cpu = hr__os_thread_cpu_ns();
	struct hr__bad_block bad;
	bool good = hr__verify_slot(slot, reader->bounce, &bad);
	struct hr_job *job = slot->job;

	cpu = hr__os_thread_cpu_ns() - cpu;
	pthread_mutex_lock(&loader->lock);
	loader->counts.read_cpu_ns += cpu;
	job->counts.read_cpu_ns += cpu;
	if (good) {
		loader->counts.verified_bytes += slot->envelope.expected;
		job->counts.verified_bytes += slot->envelope.expected;
	} else {
		hr__verify_fail(job, slot, &bad);
	}
	hr__drain(loader, slot);
	pthread_mutex_unlock(&loader->lock);
}

/* To the queued engine's thread. */
static void hand_over(hr_loader *loader, struct hr__slot *slot)
{
	bool must_wake;

	pthread_mutex_lock(&loader->lock);
	hr__slot_push(&loader->queue_slots, slot);
	must_wake = loader->queue_reaping;
	if (!must_wake)
		pthread_cond_signal(&loader->queue);
	pthread_mutex_unlock(&loader->lock);
	if (must_wake)
		loader->queued->wake(loader->queued_state);
}

static void count_time(struct hr__counts *counts, uint64_t wall, uint64_t cpu)
{
	counts->read_cpu_ns += cpu;
	counts->storage_wait_ns += wall > cpu ? wall - cpu : 0;
}

/* The engine's part, and the file's last partial block where that is the loader's. */
static void read_now(hr_loader *loader, struct hr__slot *slot)
{
	if (slot->tail_bytes && !hr__window_read_tail(slot))
		return;
	if (slot->io.asked > 0)
		loader->blocking->read(loader->blocking_state, &slot->io);
}

static void read_blocking(struct hr__reader *reader, struct hr__slot *slot)
{
	hr_loader *loader = reader->loader;
	uint64_t wall = hr__os_now_ns(), cpu = hr__os_thread_cpu_ns();
	hr_model *model = NULL;

	for (;;) {
		read_now(loader, slot);
		pthread_mutex_lock(&loader->lock);
		if (!must_read_again(loader, slot))
			break;
		pthread_mutex_unlock(&loader->lock);
	}
	if (loader->pool.staging == HR__STAGING_WINDOW && !slot->io.code) {
		slot->payload = slot->io.memory;
		slot->has_window = true;
	}
	wall = hr__os_now_ns() - wall;
	cpu = hr__os_thread_cpu_ns() - cpu;
	count_time(&loader->counts, wall, cpu);
	if (slot->state == HR__SLOT_LOST) {
		model = find_again(loader, slot);
	} else {
		count_time(&slot->job->counts, wall, cpu);
		finish_read(loader, slot);
	}
	pthread_mutex_unlock(&loader->lock);
	hr_model_close(model);
}

static void read_slot(struct hr__reader *reader, struct hr__slot *slot, size_t n_bound)
{
	hr_loader *loader = reader->loader;
	struct hr__choice choice;

	hr__choose(loader, slot->job, &slot->chunk, &choice);
	slot->engine = choice.engine;
	prepare(loader, slot, choice.direct);
	if (choice.engine == loader->queued) {
		hand_over(loader, slot);
		return;
	}
	if (may_go_straight(loader, slot, choice.direct, n_bound))
		aim_straight(reader, slot);
	if (slot->job->io_timeout_ms) {
		pthread_mutex_lock(&loader->lock);
		slot->deadline_ns = deadline_of(slot->job);
		slot->blocks_reader = true;
		pthread_mutex_unlock(&loader->lock);
	}
	read_blocking(reader, slot);
}

void hr__take_windows_back(hr_loader *loader)
{
	struct hr__slot *slot;

	for (slot = hr__slot_pop(&loader->leaving); slot; slot = hr__slot_pop(&loader->leaving)) {
		pthread_mutex_unlock(&loader->lock);
		slot->engine->release(loader->blocking_state, &slot->io);
		pthread_mutex_lock(&loader->lock);
		slot->has_window = false;
		hr__pool_move(&loader->pool, slot, HR__SLOT_FREE);
		pthread_cond_broadcast(&loader->idle);
	}
}

/* What a reader has got to do. */
struct task {
	struct hr__slot *slot; /* NULL: it is to end */
	size_t n_bound;        /* of its job */
	bool is_read;          /* and has to be verified */
};

static bool take_task(hr_loader *loader, struct task *task)
{
	task->slot = hr__slot_pop(&loader->verify_slots);
	task->is_read = task->slot;
	if (!task->slot)
		task->slot = draw(loader);
	if (task->slot)
		task->n_bound = task->slot->job->n_bound;
	return task->slot;
}

/* Waits for something to do. The wait counts as one for copies if it is slots that are missing. */
static struct task next_task(hr_loader *loader)
{
	struct task task = {.slot = NULL};

	pthread_mutex_lock(&loader->lock);
	while (!loader->stop) {
		bool lacks_slots;
		uint64_t since;

		hr__take_windows_back(loader);
		if (loader->stop || take_task(loader, &task)) /* it may have come to stop meanwhile */
			break;
		lacks_slots = loader->n_jobs > 0 && loader->pool.n_free == 0;
		since = lacks_slots ? hr__os_now_ns() : 0;
		loader->n_idle_readers++;
		pthread_cond_wait(&loader->work, &loader->lock);
		loader->n_idle_readers--;
		if (lacks_slots) {
			uint64_t waited = hr__os_now_ns() - since;

			loader->counts.copy_wait_ns += waited;
			if (loader->jobs)
				loader->jobs->counts.copy_wait_ns += waited;
		}
	}
	pthread_mutex_unlock(&loader->lock);
	return task;
}

/* Each reader makes its part of the pool's pages exist, all at once: that takes longest of all that setting a pool
 * up does, and one thread would need ten times as long. A host device's pool is used for cold bytes only, and stays
 * untouched until then. */
static void touch_part(struct hr__reader *reader)
{
	hr_loader *loader = reader->loader;
	struct hr__pool *pool = &loader->pool;
	uint64_t mine = (uint64_t)(reader - loader->readers);
	uint64_t part = hr__round_up(pool->bytes / loader->n_readers + 1, (uint64_t)2 << 20);
	uint64_t begin = hr__min_u64(mine * part, pool->bytes);
	uint64_t end = hr__min_u64(begin + part, pool->bytes);

	if (end > begin && pool->staging == HR__STAGING_HOST && !(loader->device->ops->caps & HR__DEVICE_HOST))
		hr__os_touch(pool->memory + begin, (size_t)(end - begin));
	pthread_mutex_lock(&loader->lock);
	loader->n_touched++;
	pthread_cond_broadcast(&loader->idle);
	pthread_mutex_unlock(&loader->lock);
}

/* Engines that stage on the device are called with it current. If it cannot be made so, their reads fail and say it. */
static bool enter(const hr_loader *loader, struct hr__device_visit *visit)
{
	struct hr__device_error ignored;

	return loader->pool.staging == HR__STAGING_DEVICE &&
	       loader->device->ops->enter(loader->device, visit, &ignored) == 0;
}

void *hr__reader_main(void *arg)
{
	struct hr__reader *reader = arg;
	struct hr__device_visit visit;
	struct task task;
	bool entered;

	touch_part(reader);
	entered = enter(reader->loader, &visit);
	for (task = next_task(reader->loader); task.slot; task = next_task(reader->loader)) {
		if (task.is_read)
			verify_slot(reader, task.slot);
		else
			read_slot(reader, task.slot, task.n_bound);
	}
	if (entered)
		reader->loader->device->ops->leave(&visit);
	return NULL;
}

/* ---- the queued engine's thread ---- */

/* Takes what may be submitted now; slots of jobs that have failed meanwhile go home. Under the lock. */
static size_t take_queued(hr_loader *loader, struct hr__slot **out)
{
	size_t n = 0;

	while (loader->queue_in_flight < HR__QUEUE_DEPTH) {
		struct hr__slot *slot = hr__slot_pop(&loader->queue_slots);

		if (!slot)
			break;
		if (slot->job->code) {
			hr__slot_land(loader, slot);
			continue;
		}
		slot->deadline_ns = deadline_of(slot->job);
		loader->queue_in_flight++;
		out[n++] = slot;
	}
	return n;
}

static struct hr__slot *slot_of(struct hr__io *io)
{
	return (struct hr__slot *)((char *)io - offsetof(struct hr__slot, io));
}

/* Under the lock; n_models models of lost reads are for the caller to close after it. */
static size_t take_back(hr_loader *loader, struct hr__io **done, size_t n, uint64_t waited, hr_model **models)
{
	size_t n_models = 0;

	count_time(&loader->counts, waited, 0);
	for (size_t i = 0; i < n; i++) {
		struct hr__slot *slot = slot_of(done[i]);

		loader->queue_in_flight--;
		if (slot->state == HR__SLOT_LOST) {
			models[n_models++] = find_again(loader, slot);
			continue;
		}
		count_time(&slot->job->counts, waited / n, 0);
		if (must_read_again(loader, slot)) {
			slot->deadline_ns = UINT64_MAX; /* until it is sent again */
			hr__slot_push(&loader->queue_slots, slot);
		} else {
			finish_read(loader, slot);
		}
	}
	return n_models;
}

void *hr__queue_main(void *arg)
{
	hr_loader *loader = arg;
	struct hr__slot *batch[HR__QUEUE_DEPTH];
	struct hr__io *done[HR__QUEUE_DEPTH];
	hr_model *models[HR__QUEUE_DEPTH];
	size_t n_models = 0;

	pthread_mutex_lock(&loader->lock);
	for (;;) {
		size_t n = take_queued(loader, batch), n_done;
		uint64_t since;

		if (loader->queue_in_flight == 0) {
			if (loader->stop)
				break;
			pthread_cond_wait(&loader->queue, &loader->lock);
			continue;
		}
		loader->queue_reaping = true;
		pthread_mutex_unlock(&loader->lock);
		while (n_models > 0)
			hr_model_close(models[--n_models]);
		for (size_t i = 0; i < n; i++)
			loader->queued->submit(loader->queued_state, &batch[i]->io);
		since = hr__os_now_ns();
		n_done = loader->queued->reap(loader->queued_state, done, HR__QUEUE_DEPTH);
		since = hr__os_now_ns() - since;
		pthread_mutex_lock(&loader->lock);
		loader->queue_reaping = false;
		n_models = take_back(loader, done, n_done, since, models);
	}
	pthread_mutex_unlock(&loader->lock);
	while (n_models > 0)
		hr_model_close(models[--n_models]);
	return NULL;
}
