/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The engine that reads by uGDS: raw reads of a disk that was taken from the kernel, straight into GPU memory; only
 * when asked for by name, and only models of stores that were opened through uGDS. ugds_driver.c has the library and
 * the disk.
 *
 * What always holds:
 *  - One window of GPU memory is registered, once: at open if a disk is open by then, else at the first read, since
 *    memory is registered with a disk.
 *  - Only the synchronous call is used, by as many threads as there are readers. A request is at most
 *    HR__UGDS_MAX_REQUEST long; any count but the exact one fails the chunk, whose memory is garbage.
 *  - At the end: reads are over, then the window goes, then the session is let go of. After a read that failed the
 *    window may still be written to: it is kept.
 */
#include "engine.h"
#include "ugds_driver.h"

#include <stdio.h>

struct ugds {
	struct hr__ugds *session; /* NULL: nothing is registered yet; set once, guarded by lock */
	void *window;
	size_t window_bytes;
	bool *is_kept;
	pthread_mutex_t lock;
};

static int probe(const struct hr__file *file, char *reason, size_t reason_bytes)
{
	if (file && !hr__ugds_of(file)) {
		snprintf(reason, reason_bytes,
			 "it reads models of stores that were opened through uGDS (--ugds NODE), and nothing else");
		return HR_E_UNSUPPORTED;
	}
	return hr__ugds_look(reason, reason_bytes);
}

/* Takes over the count of the session. */
static int attach(struct ugds *u, struct hr__ugds *session, char *reason, size_t reason_bytes)
{
	int rc = hr__ugds_register(session, u->window, u->window_bytes, reason, reason_bytes);

	if (rc)
		hr__ugds_unref(session);
	else
		u->session = session;
	return rc;
}

static int open_window(void *state, const struct hr__engine_env *env, char *reason, size_t reason_bytes)
{
	struct ugds *u = state;
	struct hr__ugds *session;
	int rc = hr__ugds_look(reason, reason_bytes);

	if (rc)
		return rc;
	reason[0] = '\0';
	if (env->slot_bytes > HR__UGDS_MAX_REQUEST) {
		snprintf(reason, reason_bytes, "slots of %zu bytes are more than the %zu that are read in one piece",
			 env->slot_bytes, HR__UGDS_MAX_REQUEST);
		return HR_E_UNSUPPORTED;
	}
	u->window = env->staging;
	u->window_bytes = env->staging_bytes;
	u->is_kept = env->is_kept;
	*u->is_kept = false;
	session = hr__ugds_current();
	if (session)
		rc = attach(u, session, reason, reason_bytes);
	if (!rc)
		pthread_mutex_init(&u->lock, NULL);
	return rc;
}

/* The session of the file, with the window registered; NULL: the request has failed. */
static struct hr__ugds *session_for(struct ugds *u, struct hr__io *io)
{
	struct hr__ugds *session = hr__ugds_of(io->file);

	pthread_mutex_lock(&u->lock);
	if (session && !u->session) /* a failure leaves u->session as it is, and the reason in the request */
		attach(u, hr__ugds_acquire(session), io->reason, sizeof(io->reason));
	if (session != u->session)
		session = NULL;
	pthread_mutex_unlock(&u->lock);
	if (!session) {
		io->code = HR_E_GDS;
		if (!io->reason[0])
			snprintf(io->reason, sizeof(io->reason), "the file was not opened through this uGDS session");
	}
	return session;
}

static void read_one(void *state, struct hr__io *io)
{
	struct ugds *u = state;
	struct hr__ugds *session = session_for(u, io);
	int error;

	if (!session)
		return;
	error = hr__ugds_read(session, u->window, io->expected, io->offset,
			      (uint64_t)((char *)io->memory - (char *)u->window));
	if (error) {
		io->system = error;
		io->got = 0;
		snprintf(io->reason, sizeof(io->reason), "%s", hr__ugds_explain(error, &io->code));
		return;
	}
	io->got = io->expected;
	io->code = 0;
}

static void report(void *state, struct hr__engine_report *out)
{
	struct ugds *u = state;
	struct hr__ugds *session;

	pthread_mutex_lock(&u->lock);
	session = u->session;
	if (session)
		snprintf(out->note, sizeof(out->note), "uGDS, %.1f GB disk with sectors of %u bytes",
			 (double)hr__ugds_capacity(session) / 1e9, hr__ugds_lba_bytes(session));
	else
		snprintf(out->note, sizeof(out->note), "uGDS, no disk yet");
	pthread_mutex_unlock(&u->lock);
}

static void close_window(void *state)
{
	struct ugds *u = state;

	if (u->session) {
		*u->is_kept = !hr__ugds_deregister(u->session, u->window);
		hr__ugds_unref(u->session);
	}
	pthread_mutex_destroy(&u->lock);
}

const struct hr__engine_ops hr__engine_ugds = {
	.name = "ugds",
	.id = HR_ENGINE_UGDS,
	.caps = HR__ENGINE_BLOCKING | HR__ENGINE_ON_REQUEST | HR__ENGINE_RAW | HR__ENGINE_RAW_ONLY,
	.staging = HR__STAGING_DEVICE,
	.state_bytes = sizeof(struct ugds),
	.probe = probe,
	.open = open_window,
	.read = read_one,
	.report = report,
	.close = close_window,
};
