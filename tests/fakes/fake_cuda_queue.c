/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Streams of the look-alike driver, and the one worker that does what was queued on them: late, in order within a
 * stream, in any order between streams, and in any order within a batch. The source of a copy is read when the copy
 * runs, so a slot that was filled again too early shows as wrong bytes; until then the destination holds what it held
 * before.
 *
 * A host function gets a thread of its own: it may block, and must not hold up other streams.
 */
#include "fake_cuda_core.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

struct fake_stream *fake_streams;

static pthread_cond_t changed;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static uint64_t now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

struct fake_op *fake_op_new(enum fake_kind kind, size_t n_copies)
{
	struct fake_op *op = fake_alloc(sizeof(*op) + n_copies * sizeof(op->copies[0]));

	op->kind = kind;
	op->n_copies = n_copies;
	return op;
}

void fake_record_drop(struct fake_record *record)
{
	if (record && --record->refs == 0)
		free(record);
}

/* The next stream whose first operation may run; else when to look again (UINT64_MAX: when something changes). */
static struct fake_stream *choose(uint64_t *again_ns)
{
	struct fake_stream *chosen = NULL;
	uint64_t now = now_ns(), n = 0;

	*again_ns = UINT64_MAX;
	for (struct fake_stream *stream = fake_streams; stream; stream = stream->next) {
		struct fake_op *op = stream->first;

		if (!op || stream->is_busy)
			continue;
		if (op->kind == FAKE_WAIT && !op->record->is_done && !stream->context->sticky)
			continue;
		if (op->not_before_ns > now) {
			*again_ns = op->not_before_ns < *again_ns ? op->not_before_ns : *again_ns;
			continue;
		}
		if (fake_random() % ++n == 0)
			chosen = stream;
	}
	return chosen;
}

static void shuffle(struct fake_op *op)
{
	for (size_t i = op->n_copies; i > 1; i--) {
		size_t other = fake_random() % i;
		struct fake_copy copy = op->copies[i - 1];

		op->copies[i - 1] = op->copies[other];
		op->copies[other] = copy;
	}
}

/* Without the lock: these bytes are nobody else's until the copy is done, and a race here is a race on real
 * hardware. */
static void move_bytes(const struct fake_op *op)
{
	for (size_t i = 0; i < op->n_copies; i++) {
		const struct fake_copy *copy = &op->copies[i];
		char *device = copy->block->backing + copy->block_offset;

		if (copy->source)
			memmove(device, copy->source->backing + copy->source_offset, copy->bytes);
		else if (op->kind == FAKE_COPY_IN)
			memcpy(device, copy->host, copy->bytes);
		else
			memcpy(copy->host, device, copy->bytes);
	}
}

static void run_copies(struct fake_stream *stream, struct fake_op *op)
{
	bool can_run = !stream->context->sticky;

	for (size_t i = 0; i < op->n_copies && can_run; i++) {
		int code = fake_armed("async");

		if (code)
			stream->context->sticky = code;
		if (!op->copies[i].block->is_ready)
			fake_error("a copy runs before its memory is allocated: nothing orders the two streams");
		if (code || op->copies[i].block->is_gone || (op->copies[i].source && op->copies[i].source->is_gone))
			can_run = false;
	}
	if (can_run) {
		shuffle(op);
		pthread_mutex_unlock(&fake_lock);
		move_bytes(op);
		pthread_mutex_lock(&fake_lock);
	}
	for (size_t i = 0; i < op->n_copies; i++)
		fake_copy_finished(&op->copies[i]);
}

static void pop(struct fake_stream *stream)
{
	struct fake_op *op = stream->first;

	stream->first = op->next;
	if (!stream->first)
		stream->end = &stream->first;
	stream->is_busy = false;
	free(op);
	if (!stream->first && stream->is_destroyed) {
		struct fake_stream **at = &fake_streams;

		while (*at != stream)
			at = &(*at)->next;
		*at = stream->next;
		free(stream);
	}
	pthread_cond_broadcast(&changed);
}

static void *run_host(void *arg)
{
	struct fake_stream *stream = arg;
	void (*host)(void *);
	void *host_arg;

	pthread_mutex_lock(&fake_lock);
	host = stream->first->host;
	host_arg = stream->first->host_arg;
	pthread_mutex_unlock(&fake_lock);
	host(host_arg);
	pthread_mutex_lock(&fake_lock);
	pop(stream);
	pthread_mutex_unlock(&fake_lock);
	return NULL;
}

static void run(struct fake_stream *stream)
{
	struct fake_op *op = stream->first;
	bool broken = stream->context->sticky != 0;
	pthread_t thread;

	stream->is_busy = true;
	if (op->kind == FAKE_COPY_IN || op->kind == FAKE_COPY_OUT)
		run_copies(stream, op);
	else if (op->kind == FAKE_RECORD && !broken)
		op->record->is_done = true;
	else if (op->kind == FAKE_ALLOC && !broken)
		op->block->is_ready = true;
	else if (op->kind == FAKE_FREE && !broken)
		fake_block_free(op->block);
	fake_record_drop(op->record);
	op->record = NULL;
	if (op->kind == FAKE_HOST && !broken) {
		if (pthread_create(&thread, NULL, run_host, stream))
			abort();
		pthread_detach(thread);
		return;
	}
	pop(stream);
}

static void *work(void *arg)
{
	pthread_mutex_lock(&fake_lock);
	for (;;) {
		uint64_t again_ns;
		struct fake_stream *stream = choose(&again_ns);
		struct timespec t = {(time_t)(again_ns / 1000000000), (long)(again_ns % 1000000000)};

		if (stream)
			run(stream);
		else if (again_ns == UINT64_MAX)
			pthread_cond_wait(&changed, &fake_lock);
		else
			pthread_cond_timedwait(&changed, &fake_lock, &t);
	}
	return arg;
}

/* The worker is never joined: a driver's threads are not either. */
static void start(void)
{
	pthread_condattr_t attr;
	pthread_t thread;

	pthread_condattr_init(&attr);
	pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
	pthread_cond_init(&changed, &attr);
	if (pthread_create(&thread, NULL, work, NULL))
		abort();
	pthread_detach(thread);
}

void fake_push(struct fake_stream *stream, struct fake_op *op)
{
	uint64_t delay_ns = (uint64_t)fake_settings.delay_us * 1000;

	pthread_once(&once, start);
	op->not_before_ns = now_ns() + (delay_ns ? fake_random() % delay_ns : 0);
	*stream->end = op;
	stream->end = &op->next;
	pthread_cond_broadcast(&changed);
}

static bool touches(const struct fake_block *block, size_t offset, size_t bytes, uint64_t address, size_t n)
{
	return block && block->address + offset < address + n && address < block->address + offset + bytes;
}

bool fake_is_in_flight(uint64_t address, size_t bytes)
{
	for (const struct fake_stream *stream = fake_streams; stream; stream = stream->next)
		for (const struct fake_op *op = stream->first; op; op = op->next)
			for (size_t i = 0; i < op->n_copies; i++) {
				const struct fake_copy *copy = &op->copies[i];

				if (touches(copy->block, copy->block_offset, copy->bytes, address, bytes) ||
				    touches(copy->source, copy->source_offset, copy->bytes, address, bytes))
					return true;
			}
	return false;
}

void fake_changed_wait(void)
{
	pthread_once(&once, start);
	pthread_cond_wait(&changed, &fake_lock);
}

void fake_changed_tell(void)
{
	pthread_once(&once, start);
	pthread_cond_broadcast(&changed);
}

void fake_wait_until_idle(struct fake_stream *stream)
{
	while (stream->first && !stream->context->sticky)
		fake_changed_wait();
}
