/* SPDX-License-Identifier: Apache-2.0 */
/* Engines that read the real file and misbehave as told; fake_engine.h says how. Part of the test library. */
#include "fake_engine.h"

#include "engine/engine.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>

#define MAX_QUEUED 256

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct fake_engine_settings set; /* all below guarded by lock */
static uint64_t n_reads, random_state;
static int let_go, n_hanging, woken;

void fake_engine_set(const struct fake_engine_settings *settings)
{
	pthread_mutex_lock(&lock);
	memset(&set, 0, sizeof(set));
	if (settings)
		set = *settings;
	random_state = set.seed;
	n_reads = 0;
	let_go = 0;
	woken = 0;
	pthread_mutex_unlock(&lock);
}

void fake_engine_let_go(void)
{
	pthread_mutex_lock(&lock);
	let_go = 1;
	pthread_cond_broadcast(&changed);
	pthread_mutex_unlock(&lock);
}

uint64_t fake_engine_reads(void)
{
	pthread_mutex_lock(&lock);
	uint64_t n = n_reads;
	pthread_mutex_unlock(&lock);
	return n;
}

int fake_engine_hanging(void)
{
	pthread_mutex_lock(&lock);
	int n = n_hanging;
	pthread_mutex_unlock(&lock);
	return n;
}

/* Under the lock. */
static uint64_t next_random(void)
{
	uint64_t z = random_state += UINT64_C(0x9e3779b97f4a7c15);

	z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
	return z ^ (z >> 27);
}

static int covers(const struct hr__io *io, uint64_t offset)
{
	return offset && io->offset <= offset && offset < io->offset + io->asked;
}

/* One step of a read: what pread would give, cut short if told so. 0 or an errno. */
static int read_step(struct hr__io *io, size_t *got)
{
	int fd = io->direct ? io->file->direct_fd : io->file->fd;
	size_t ask = io->n_iov ? io->iov->iov_len : io->asked;
	void *to = io->n_iov ? io->iov->iov_base : io->memory;

	pthread_mutex_lock(&lock);
	if (set.short_reads && !io->direct)
		ask = 1 + next_random() % ask;
	else if (set.short_reads && ask > io->file->offset_align)
		ask = (1 + next_random() % (ask / io->file->offset_align)) * io->file->offset_align;
	pthread_mutex_unlock(&lock);
	if (io->file->raw) {
		*got = ask;
		return io->file->raw->ops->read(io->file->raw, io->offset, to, ask);
	}
	return hr__os_pread(fd, to, ask, io->offset, got);
}

/* Whether this read is one that hangs. Under the lock. */
static int hangs(uint64_t number)
{
	return set.hang_read && !let_go && number >= set.hang_read &&
	       number < set.hang_read + (set.n_hang ? set.n_hang : 1);
}

/* Waits or fails as told for the read of this number. 1: the read is over already. */
static int misbehave(struct hr__io *io, uint64_t number)
{
	uint64_t delay;
	int fails;

	pthread_mutex_lock(&lock);
	fails = (set.fail_read && number == set.fail_read) || covers(io, set.fail_offset);
	delay = set.delay_ns ? next_random() % set.delay_ns : 0;
	pthread_mutex_unlock(&lock);
	if (delay)
		hr__os_sleep_ns(delay);
	if (!fails)
		return 0;
	if (set.fail_errno)
		hr__io_fail(io, set.fail_errno);
	else
		io->code = HR_E_SHORT;
	return 1;
}

static void read_through(struct hr__io *io, uint64_t number)
{
	size_t got;

	if (misbehave(io, number))
		return;
	do {
		int error = read_step(io, &got);

		if (error) {
			hr__io_fail(io, error);
			return;
		}
	} while (!hr__io_advance(io, got));
}

/* The number of a read that begins; it hangs here if it is one that does. */
static uint64_t begin_read(void)
{
	uint64_t number;

	pthread_mutex_lock(&lock);
	number = ++n_reads;
	if (hangs(number)) {
		n_hanging++;
		while (!let_go)
			pthread_cond_wait(&changed, &lock);
		n_hanging--;
	}
	pthread_mutex_unlock(&lock);
	return number;
}

static void read_fake(void *state, struct hr__io *io)
{
	(void)state;
	read_through(io, begin_read());
}

static int probe(const struct hr__file *file, char *reason, size_t reason_bytes)
{
	(void)file;
	(void)reason;
	(void)reason_bytes;
	return 0;
}

static int open_fake(void *state, const struct hr__engine_env *env, char *reason, size_t reason_bytes)
{
	(void)state;
	(void)env;
	(void)reason;
	(void)reason_bytes;
	return 0;
}

static void close_fake(void *state)
{
	(void)state;
}

/* ---- the queued one: whatever is queued comes back in random order, one or several at a time ---- */

struct queue {
	struct hr__io *queued[MAX_QUEUED], *hung[MAX_QUEUED];
	uint64_t number[MAX_QUEUED];
	size_t n, n_hung;
};

static void submit_fake(void *state, struct hr__io *io)
{
	struct queue *queue = state;

	pthread_mutex_lock(&lock);
	n_reads++;
	if (hangs(n_reads)) {
		queue->hung[queue->n_hung++] = io;
		n_hanging++;
	} else {
		queue->number[queue->n] = n_reads;
		queue->queued[queue->n++] = io;
	}
	pthread_mutex_unlock(&lock);
}

/* Waits until something can come back, or for a wake. Under the lock; answers how many shall. */
static size_t wait_fake(struct queue *queue)
{
	while (queue->n == 0 && !let_go && !woken)
		pthread_cond_wait(&changed, &lock);
	woken = 0;
	while (let_go && queue->n_hung > 0) {
		queue->number[queue->n] = 0;
		queue->queued[queue->n++] = queue->hung[--queue->n_hung];
		n_hanging--;
	}
	return queue->n ? 1 + next_random() % queue->n : 0;
}

static size_t reap_fake(void *state, struct hr__io **done, size_t max)
{
	struct queue *queue = state;
	size_t n = 0, wanted;

	pthread_mutex_lock(&lock);
	wanted = wait_fake(queue);
	pthread_mutex_unlock(&lock);
	for (; n < wanted && n < max; n++) {
		uint64_t number;
		size_t pick;

		pthread_mutex_lock(&lock);
		pick = next_random() % queue->n;
		pthread_mutex_unlock(&lock);
		done[n] = queue->queued[pick];
		number = queue->number[pick];
		queue->queued[pick] = queue->queued[--queue->n];
		queue->number[pick] = queue->number[queue->n];
		read_through(done[n], number);
	}
	return n;
}

static void wake_fake(void *state)
{
	(void)state;
	pthread_mutex_lock(&lock);
	woken = 1;
	pthread_cond_broadcast(&changed);
	pthread_mutex_unlock(&lock);
}

/* ---- windows: the mapped engine's, offered late or not at all ---- */

static void read_window(void *state, struct hr__io *io)
{
	uint64_t number = begin_read();

	if (!misbehave(io, number))
		hr__engine_mapped.read(state, io);
}

static int open_window(void *state, const struct hr__engine_env *env, char *reason, size_t reason_bytes)
{
	return hr__engine_mapped.open(state, env, reason, reason_bytes);
}

static void release_window(void *state, struct hr__io *io)
{
	hr__engine_mapped.release(state, io);
}

const struct hr__engine_ops hr__engine_fake = {
	.name = "fake",
	.id = HR_N_ENGINES - 1,
	.caps = HR__ENGINE_BLOCKING | HR__ENGINE_ON_REQUEST | HR__ENGINE_RAW,
	.probe = probe,
	.open = open_fake,
	.read = read_fake,
	.close = close_fake,
};

const struct hr__engine_ops hr__engine_fake_queue = {
	.name = "fake-queue",
	.id = HR_N_ENGINES - 2,
	.caps = HR__ENGINE_QUEUED | HR__ENGINE_ON_REQUEST,
	.state_bytes = sizeof(struct queue),
	.probe = probe,
	.open = open_fake,
	.submit = submit_fake,
	.reap = reap_fake,
	.wake = wake_fake,
	.close = close_fake,
};

const struct hr__engine_ops hr__engine_fake_window = {
	.name = "fake-window",
	.id = HR_N_ENGINES - 3,
	.caps = HR__ENGINE_BLOCKING | HR__ENGINE_ON_REQUEST,
	.staging = HR__STAGING_WINDOW,
	.state_bytes = 256, /* the mapped engine's, and more */
	.probe = probe,
	.open = open_window,
	.read = read_window,
	.release = release_window,
	.close = close_fake,
};
