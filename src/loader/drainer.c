/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The drainer: the one thread that copies. It takes slots that are full, sends the pieces that have a destination in
 * one batch, and sets one fence behind it. Pieces that follow one another both in the slot and at the destination
 * become one copy, so that tensors which lie in memory as they lie in the file cost one copy a slot, however many they
 * are.
 *
 * A slot may be drained in several steps (a feed's destinations come late); it has one fence outstanding at most, so a
 * batch is simply a list of slots. While copies are in flight the drainer looks at the oldest fence about every 20
 * microseconds, half the time that a slot takes on a fast link; otherwise it sleeps.
 *
 * A batch holds at most a sixteenth of the pool and four are in flight at most: so copies queue up on the link, which
 * then never waits for us, and slots come back in small portions, so that readers do not wait all at once and wake all
 * at once.
 *
 * It is also the clock: reads that miss their deadline are found here.
 */
#include "loader.h"

#include "core/arith.h"
#include "core/mem.h"

#define POLL_NS          ((uint64_t)20 * 1000)
#define MAX_FAILURES     50 /* of one call in a row, before a driver counts as gone for good */
#define DEADLINE_TICK_NS ((uint64_t)5 * 1000000)
#define REAP_TICK_NS     ((uint64_t)250 * 1000000)

/* Fences in flight, oldest first, each with the slots that it frees. */
struct fences {
	struct hr__slot_list slots[HR__MAX_FENCES];
	struct hr__move *moves[HR__MAX_FENCES]; /* or the one move, NULL */
	uint64_t first, next;                   /* numbers: first .. next - 1 are outstanding */
};

/* What one batch does, counted outside the lock. */
struct tally {
	uint64_t n_copies, n_batches;
	int code;
	struct hr__device_error error;
};

/* ---- building and sending; no lock ---- */

static void send(hr_loader *loader, size_t n, struct tally *tally)
{
	size_t n_calls = 0;

	if (n == 0 || tally->code)
		return;
	tally->code = loader->device->ops->copy(loader->lane, loader->copies, n, &n_calls, &tally->error);
	tally->n_copies += n;
	tally->n_batches += n_calls;
}

/* The copies of a batch while they are put together. */
struct packing {
	hr_loader *loader;
	struct tally *tally;
	size_t n;
	const unsigned char *end; /* of the allocation that the last copy goes to; NULL: it is another slot's */
};

/* One more copy, or the last one grown. Copies become one within one slot and one allocation: none may cross from one
 * registration or allocation into the next, even where the addresses go on. */
static void pack(struct packing *p, const struct hr__copy *copy, const unsigned char *end)
{
	struct hr__copy *last = p->n ? &p->loader->copies[p->n - 1] : NULL;
	unsigned char *dst = copy->dst;

	if (p->n > 0 && p->end && dst + copy->bytes <= p->end && last->from_device == copy->from_device &&
	    (const unsigned char *)last->src + last->bytes == copy->src &&
	    (unsigned char *)last->dst + last->bytes == dst) {
		last->bytes += copy->bytes;
		return;
	}
	if (p->n == HR__MAX_COPIES) {
		send(p->loader, p->n, p->tally);
		p->n = 0;
	}
	p->loader->copies[p->n++] = *copy;
	p->end = end;
}

/* A piece of a slot. Its last bytes may be in host memory: the end of a file whose slot is on the device. */
static void pack_piece(struct packing *p, const struct hr__slot *slot, const struct hr__piece *piece,
		       const struct hr__target *target)
{
	bool from_device = p->loader->pool.staging == HR__STAGING_DEVICE;
	unsigned char *dst = target->at + piece->from;
	uint64_t at = slot->envelope.lead + piece->at, tail_at = slot->tail_bytes ? slot->tail_at : UINT64_MAX;
	uint64_t head = at < tail_at ? hr__min_u64(piece->bytes, tail_at - at) : 0;
	const unsigned char *end = target->at + target->room;

	if (head)
		pack(p, &(struct hr__copy){dst, slot->payload + piece->at, (size_t)head, from_device}, end);
	if (head < piece->bytes)
		pack(p,
		     &(struct hr__copy){dst + head, slot->tail + (at + head - tail_at), (size_t)(piece->bytes - head),
					false},
		     end);
}

static void pack_slot(struct packing *p, const struct hr__slot *slot)
{
	const struct hr_job *job = slot->job;

	p->end = NULL;
	for (size_t span = slot->drained; span < slot->draining_to; span++) {
		struct hr__piece piece;

		if (hr__chunk_piece(&job->plan, &slot->chunk, span, &piece))
			pack_piece(p, slot, &piece, &job->targets[span]);
	}
}

/* The lane waits for consumers' streams before the first copy of a job that asked for it. */
static void apply_mark(hr_loader *loader, struct hr_job *job, struct tally *tally)
{
	for (; job->n_marks > 0 && !tally->code; job->n_marks--)
		tally->code = loader->device->ops->lane_after(loader->lane, job->marks[job->n_marks - 1],
							      &tally->error);
	if (!job->mark || tally->code)
		return;
	tally->code = loader->device->ops->lane_after(loader->lane, job->mark, &tally->error);
	loader->device->ops->mark_free(loader->device, job->mark);
	job->mark = NULL;
}

/* Waits until the copies before a fence are over. A question that fails says nothing about them, so it is asked
 * again; a driver that goes on failing has failed for good, and by its own rules touches nothing any more. */
static void wait_for_fence(hr_loader *loader, uint64_t fence)
{
	struct hr__device_error ignored;
	int n_failures = 0;

	while (n_failures < MAX_FAILURES) {
		int done = loader->device->ops->fence_done(loader->lane, fence, &ignored);

		if (done > 0)
			return;
		n_failures += done < 0;
		hr__os_sleep_ns(POLL_NS);
	}
}

/* Part of a batch that failed may be in flight. */
static void quiesce(hr_loader *loader, uint64_t fence)
{
	struct hr__device_error ignored;

	for (int i = 0; i < MAX_FAILURES; i++) {
		if (loader->device->ops->fence(loader->lane, fence, &ignored) == 0) {
			wait_for_fence(loader, fence);
			return;
		}
		hr__os_sleep_ns(POLL_NS);
	}
}

static void send_batch(hr_loader *loader, struct hr__slot_list *batch, uint64_t fence, struct tally *tally)
{
	struct packing packing = {.loader = loader, .tally = tally};

	*tally = (struct tally){0};
	for (struct hr__slot *slot = batch->head; slot; slot = slot->next) {
		apply_mark(loader, slot->job, tally);
		pack_slot(&packing, slot);
	}
	send(loader, packing.n, tally);
	if (!tally->code)
		tally->code = loader->device->ops->fence(loader->lane, fence, &tally->error);
	if (tally->code)
		quiesce(loader, fence);
}

/* ---- under the lock ---- */

/* Full slots whose job goes on, as many as one batch takes, each marked with how far it can be drained now. */
static void collect(hr_loader *loader, struct hr__slot_list *batch)
{
	uint32_t room = loader->pool.n_slots / 16 ? loader->pool.n_slots / 16 : 1;

	*batch = (struct hr__slot_list){0};
	while (room > 0) {
		struct hr__slot *slot = hr__slot_pop(&loader->full_slots);

		if (!slot)
			break;
		if (slot->job->code) {
			hr__slot_land(loader, slot);
			continue;
		}
		slot->draining_to = slot->chunk.last + 1 < slot->job->n_bound ? slot->chunk.last + 1
									      : slot->job->n_bound;
		hr__pool_move(&loader->pool, slot, HR__SLOT_DRAINING);
		hr__slot_push(batch, slot);
		room--;
	}
}

static void fail_copy(hr_loader *loader, struct hr_job *job, int code, const struct hr__device_error *error)
{
	struct hr__where where = {.stage = "copy", .offset = HR_NO_OFFSET, .system = error->system};

	hr__job_fail(job, code, &where, "copying to %s failed: %s", loader->device->spec, error->reason);
}

/* The copies of a batch are over, well (code 0) or not. */
static void finish_batch(hr_loader *loader, struct hr__slot_list *batch, int code, const struct hr__device_error *error)
{
	struct hr__slot *slot;

	for (slot = hr__slot_pop(batch); slot; slot = hr__slot_pop(batch)) {
		struct hr_job *job = slot->job;

		if (code)
			fail_copy(loader, job, code, error);
		else if (!job->code)
			hr__job_arrived(job, &slot->chunk, slot->drained, slot->draining_to);
		slot->drained = slot->draining_to;
		if (slot->drained <= slot->chunk.last && !job->code) {
			hr__pool_move(&loader->pool, slot, HR__SLOT_FULL);
			hr__drain(loader, slot);
		} else {
			hr__slot_land(loader, slot);
		}
	}
}

static void count_batch(hr_loader *loader, const struct hr__slot_list *batch, const struct tally *tally)
{
	struct hr_job *job = batch->head->job;

	loader->counts.n_copies += tally->n_copies;
	loader->counts.n_batches += tally->n_batches;
	/* A batch of several jobs is counted for the first; telling them apart is not worth a loop here. */
	job->counts.n_copies += tally->n_copies;
	job->counts.n_batches += tally->n_batches;
}

static void send_move(hr_loader *loader, const struct hr__move *move, uint64_t fence, struct tally *tally)
{
	const struct hr__device_ops *ops = loader->device->ops;
	size_t n_calls;

	*tally = (struct tally){0};
	for (size_t i = 0; i < move->n_marks && !tally->code; i++)
		tally->code = ops->lane_after(loader->lane, move->marks[i], &tally->error);
	if (!tally->code && move->is_down)
		tally->code = ops->copy_down(loader->lane, move->host, move->device, move->bytes, &tally->error);
	else if (!tally->code)
		tally->code = ops->copy(
			loader->lane, &(struct hr__copy){.dst = move->device, .src = move->host, .bytes = move->bytes},
			1, &n_calls, &tally->error);
	if (!tally->code)
		tally->code = ops->fence(loader->lane, fence, &tally->error);
	if (tally->code)
		quiesce(loader, fence);
}

/* Sends the oldest move. Takes and gives the lock back in between. True if there was one to send. */
static bool send_a_move(hr_loader *loader, struct fences *fences)
{
	struct hr__move *move = loader->moves;
	struct tally tally;

	if (!move || fences->next - fences->first == HR__MAX_BATCHES)
		return false;
	loader->moves = move->next;
	if (!loader->moves)
		loader->moves_end = &loader->moves;
	pthread_mutex_unlock(&loader->lock);
	send_move(loader, move, fences->next, &tally);
	pthread_mutex_lock(&loader->lock);
	if (tally.code)
		hr__move_end(loader, move, tally.code, &tally.error);
	fences->slots[fences->next % HR__MAX_FENCES] = (struct hr__slot_list){0};
	fences->moves[fences->next % HR__MAX_FENCES] = tally.code ? NULL : move;
	fences->next++;
	return true;
}

/* Sends a batch of full slots. Takes and gives the lock back in between. True if there was something to send. */
static bool drain_full(hr_loader *loader, struct fences *fences)
{
	struct hr__slot_list batch;
	struct tally tally;

	if (!loader->full_slots.head || loader->moves || fences->next - fences->first == HR__MAX_BATCHES)
		return false;
	collect(loader, &batch);
	if (!batch.head)
		return false;
	pthread_mutex_unlock(&loader->lock);
	send_batch(loader, &batch, fences->next, &tally);
	pthread_mutex_lock(&loader->lock);
	count_batch(loader, &batch, &tally);
	if (tally.code) {
		finish_batch(loader, &batch, tally.code, &tally.error);
		batch = (struct hr__slot_list){0}; /* its fence was waited for; a number is never used twice */
	}
	fences->slots[fences->next % HR__MAX_FENCES] = batch;
	fences->moves[fences->next % HR__MAX_FENCES] = NULL;
	fences->next++;
	return true;
}

/* Finishes the batches whose fences are done. True if one was. */
static bool settle_fences(hr_loader *loader, struct fences *fences)
{
	bool any = false;

	while (fences->first < fences->next) {
		struct hr__device_error error = {0};
		int done;

		pthread_mutex_unlock(&loader->lock);
		done = loader->device->ops->fence_done(loader->lane, fences->first, &error);
		if (done < 0)
			wait_for_fence(loader, fences->first);
		pthread_mutex_lock(&loader->lock);
		if (done == 0)
			break;
		finish_batch(loader, &fences->slots[fences->first % HR__MAX_FENCES], done < 0 ? done : 0, &error);
		if (fences->moves[fences->first % HR__MAX_FENCES])
			hr__move_end(loader, fences->moves[fences->first % HR__MAX_FENCES], done < 0 ? done : 0,
				     &error);
		fences->first++;
		any = true;
	}
	return any;
}

/* ---- deadlines; under the lock ---- */

static void lose(hr_loader *loader, struct hr__slot *slot)
{
	struct hr_job *job = slot->job;
	const struct hr__source *source = hr__model_source(job->model, slot->chunk.source);
	struct hr__where where = {.stage = "read", .path = source->path, .offset = slot->envelope.offset};

	where.tensor = hr__model_tensor_name(job->model, job->tensors[slot->chunk.first], &where.tensor_len);
	hr__job_fail(job, HR_E_TIMEDOUT, &where,
		     "%s: a read of %" PRIu64 " bytes at %" PRIu64 " has not come back within %" PRIu32
		     " ms; its staging memory is kept",
		     source->path, slot->envelope.asked, slot->envelope.offset, job->io_timeout_ms);
	slot->lost_model = hr_model_acquire(job->model);
	slot->deadline_ns = UINT64_MAX;
	if (slot->blocks_reader)
		loader->n_stuck_readers++;
	hr__pool_move(&loader->pool, slot, HR__SLOT_LOST);
	slot->job = NULL;
	hr__job_landed(job);
}

bool hr__loader_is_lost(const hr_loader *loader)
{
	const struct hr__pool *pool = &loader->pool;

	return pool->n_lost == pool->n_slots || loader->n_stuck_readers == loader->n_readers ||
	       pool->n_lost - loader->n_stuck_readers >= HR__QUEUE_DEPTH;
}

/* With nothing left to read into, or nobody left to read, whoever waits must be told. */
static void fail_if_nothing_is_left(hr_loader *loader)
{
	if (!hr__loader_is_lost(loader))
		return;
	for (uint32_t n = loader->n_jobs; n > 0 && loader->jobs; n--) { /* a job that settles leaves the ring */
		struct hr_job *job = loader->jobs;

		loader->jobs = job->next;
		hr__job_fail(job, HR_E_LOST, NULL,
			     "no staging memory or no reader is left: earlier reads never came back");
	}
}

static void check_deadlines(hr_loader *loader)
{
	uint64_t now;
	bool any = false;

	if (loader->n_deadlines == 0)
		return;
	now = hr__os_now_ns();
	for (uint32_t i = 0; i < loader->pool.n_slots; i++) {
		struct hr__slot *slot = &loader->pool.slots[i];

		if (slot->state == HR__SLOT_FILLING && slot->deadline_ns <= now) {
			lose(loader, slot);
			any = true;
		}
	}
	if (any)
		fail_if_nothing_is_left(loader);
}

/* ---- the thread ---- */

static void sleep_a_while(hr_loader *loader, const struct fences *fences)
{
	uint64_t now = hr__os_now_ns(), until = UINT64_MAX;

	if (fences->first < fences->next)
		until = now + POLL_NS;
	else if (loader->n_deadlines > 0)
		until = now + DEADLINE_TICK_NS;
	else if (loader->heap->bytes > 0)
		until = now + REAP_TICK_NS;
	loader->drainer_waiting = true;
	hr__os_cond_wait(&loader->full, &loader->lock, until);
	loader->drainer_waiting = false;
}

static void reap(hr_loader *loader)
{
	if (!atomic_load_explicit(&loader->heap->given_back, memory_order_relaxed))
		return;
	pthread_mutex_unlock(&loader->lock);
	hr__heap_reap(loader->heap, false);
	pthread_mutex_lock(&loader->lock);
}

static void report_ready(hr_loader *loader)
{
	struct hr__device_error error = {0};
	int code = loader->device->ops->lane_open(loader->device, &loader->lane, &error);

	pthread_mutex_lock(&loader->lock);
	loader->lane_code = code;
	loader->lane_error = error;
	loader->lane_ready = true;
	pthread_cond_broadcast(&loader->idle);
	pthread_mutex_unlock(&loader->lock);
}

void *hr__drainer_main(void *arg)
{
	hr_loader *loader = arg;
	struct fences fences = {.first = 1, .next = 1};

	hr__os_precise_waits();
	report_ready(loader);
	if (loader->lane_code)
		return NULL;
	pthread_mutex_lock(&loader->lock);
	for (;;) {
		bool busy = send_a_move(loader, &fences);

		busy |= drain_full(loader, &fences);
		busy |= settle_fences(loader, &fences);
		check_deadlines(loader);
		reap(loader);
		if (busy ||
		    ((loader->full_slots.head || loader->moves) && fences.next - fences.first < HR__MAX_BATCHES))
			continue;
		if (loader->stop && fences.first == fences.next)
			break;
		sleep_a_while(loader, &fences);
	}
	pthread_mutex_unlock(&loader->lock);
	loader->device->ops->lane_close(loader->lane);
	return NULL;
}
