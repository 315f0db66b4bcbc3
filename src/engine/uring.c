/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The queued engine: io_uring through liburing, with the staging memory registered as fixed buffers where that is
 * allowed.
 *
 * One thread submits and reaps, so the ring is set up as single-issuer with deferred task work where the kernel offers
 * it (6.1); older kernels get the plain ring. Another thread wakes it through an eventfd that the ring always polls;
 * user_data NULL marks that poll's completion. Containers often forbid io_uring (seccomp: EPERM, ENOSYS; the sysctl
 * kernel.io_uring_disabled: EPERM): probe() and open() then say so and the loader goes on without.
 *
 * No polled rings: the gain at megabyte reads is nil, and IOPOLL fails at the first read on common devices.
 */
#include "engine.h"

#include "core/fault.h"

#include <errno.h>
#include <liburing.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>

/* The kernel takes at most 1 GiB in one registered buffer. */
#define MAX_FIXED_BYTES ((size_t)1 << 30)

struct uring {
	struct io_uring ring;
	struct iovec staging;
	int wake_fd;
	bool is_fixed;
	bool is_enabled;
	bool wake_armed;
};

static int set_up(struct io_uring *ring, unsigned depth)
{
	int rc = HR__FAULT("io_uring_setup");

	if (rc)
		return -rc;
#if defined(IORING_SETUP_SINGLE_ISSUER) && defined(IORING_SETUP_DEFER_TASKRUN)
	/* Disabled at first: the thread that enables it, the one that submits, becomes the issuer. */
	rc = io_uring_queue_init(depth, ring,
				 IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN | IORING_SETUP_R_DISABLED);
#else
	rc = -EINVAL;
#endif
	if (rc == -EINVAL)
		rc = io_uring_queue_init(depth, ring, IORING_SETUP_R_DISABLED);
	return rc;
}

static int explain(int rc, char *reason, size_t reason_bytes)
{
	char text[64];
	const char *hint = rc == -EPERM || rc == -EACCES
				   ? " (sysctl kernel.io_uring_disabled, or a container's seccomp profile)"
			   : rc == -ENOSYS ? " (the kernel or the container does not offer it)"
					   : "";

	snprintf(reason, reason_bytes, "io_uring cannot be set up: %s%s", strerror_r(-rc, text, sizeof(text)), hint);
	return HR_E_UNSUPPORTED;
}

static int probe(const struct hr__file *file, char *reason, size_t reason_bytes)
{
	struct io_uring ring;
	int rc = set_up(&ring, 2);

	(void)file;
	if (rc < 0)
		return explain(rc, reason, reason_bytes);
	io_uring_queue_exit(&ring);
	return 0;
}

static int open_ring(void *state, const struct hr__engine_env *env, char *reason, size_t reason_bytes)
{
	struct uring *u = state;
	int rc = set_up(&u->ring, env->depth + 1);

	if (rc < 0)
		return explain(rc, reason, reason_bytes);
	rc = hr__os_eventfd(&u->wake_fd);
	if (rc) {
		io_uring_queue_exit(&u->ring);
		return explain(-rc, reason, reason_bytes);
	}
	u->staging = (struct iovec){env->staging, env->staging_bytes};
	return 0;
}

/* At the first read, on the thread that becomes the issuer. A registered buffer saves the kernel the pinning of
 * each read's pages; registering makes all pages exist, so it waits until a cold byte wants it. Refused (memlock
 * limit on old kernels) is fine. */
static void enable(struct uring *u)
{
	/* What io_uring_enable_rings() does; the shared library of liburing 2.3 does not export that one. */
	io_uring_register((unsigned)u->ring.ring_fd, IORING_REGISTER_ENABLE_RINGS, NULL, 0);
	u->is_enabled = true;
	u->is_fixed = u->staging.iov_len <= MAX_FIXED_BYTES && !HR__FAULT("io_uring_register") &&
		      io_uring_register_buffers(&u->ring, &u->staging, 1) == 0;
}

static struct io_uring_sqe *next_sqe(struct uring *u)
{
	struct io_uring_sqe *sqe;

	if (!u->is_enabled)
		enable(u);
	sqe = io_uring_get_sqe(&u->ring);
	if (!sqe) { /* full of what is not submitted yet; the depth leaves room after that */
		io_uring_submit(&u->ring);
		sqe = io_uring_get_sqe(&u->ring);
	}
	return sqe;
}

static void submit(void *state, struct hr__io *io)
{
	struct uring *u = state;
	int fd = io->direct ? io->file->direct_fd : io->file->fd;
	struct io_uring_sqe *sqe = next_sqe(u);

	if (u->is_fixed && io->staged)
		io_uring_prep_read_fixed(sqe, fd, io->memory, (unsigned)io->asked, io->offset, 0);
	else
		io_uring_prep_read(sqe, fd, io->memory, (unsigned)io->asked, io->offset);
	io_uring_sqe_set_data(sqe, io);
}

static void arm_wake(struct uring *u)
{
	struct io_uring_sqe *sqe;

	if (u->wake_armed)
		return;
	sqe = next_sqe(u);
	io_uring_prep_poll_add(sqe, u->wake_fd, POLLIN);
	io_uring_sqe_set_data(sqe, NULL);
	u->wake_armed = true;
}

/* Whether the request is over; one that must go on is submitted again. */
static bool take(struct uring *u, struct hr__io *io, int result)
{
	int armed = HR__FAULT("io_uring_read");

	if (armed)
		result = -armed;
	if (result == -EINTR || result == -EAGAIN) {
		submit(u, io);
		return false;
	}
	if (result < 0) {
		hr__io_fail(io, -result);
		return true;
	}
	if (hr__io_advance(io, (size_t)result))
		return true;
	submit(u, io);
	return false;
}

static size_t reap(void *state, struct hr__io **done, size_t max)
{
	struct uring *u = state;
	struct io_uring_cqe *cqe;
	size_t n = 0;

	arm_wake(u);
	io_uring_submit_and_wait(&u->ring, 1);
	while (n < max && io_uring_peek_cqe(&u->ring, &cqe) == 0) {
		struct hr__io *io = io_uring_cqe_get_data(cqe);
		int result = cqe->res;

		io_uring_cqe_seen(&u->ring, cqe);
		if (!io) {
			u->wake_armed = false;
			hr__os_eventfd_clear(u->wake_fd);
		} else if (take(u, io, result)) {
			done[n++] = io;
		}
	}
	return n;
}

static void wake(void *state)
{
	hr__os_eventfd_set(((struct uring *)state)->wake_fd);
}

static void close_ring(void *state)
{
	struct uring *u = state;

	io_uring_queue_exit(&u->ring);
	hr__os_close(u->wake_fd);
}

const struct hr__engine_ops hr__engine_uring = {
	.name = "uring",
	.id = HR_ENGINE_URING,
	.caps = HR__ENGINE_QUEUED,
	.state_bytes = sizeof(struct uring),
	.probe = probe,
	.open = open_ring,
	.submit = submit,
	.reap = reap,
	.wake = wake,
	.close = close_ring,
};
