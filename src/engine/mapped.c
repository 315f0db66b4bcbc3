/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The engine that reads nothing: it maps a window of the file's pages in the page cache and registers it read-only
 * with the GPU, whose DMA then takes the bytes from where they are. One core does it, since drivers register one
 * window at a time; while they do, other users of the GPU wait. So it is used only when asked for by name.
 *
 * Always: our CPU code never reads through a window, so a file that somebody truncates cannot end the process.
 * Populating answers EFAULT then, registering is refused, and pages that are registered stay, whatever becomes of the
 * file; that it changed is noticed at the end, as with every engine. Windows are whole pages. A window is unmapped
 * only after it was unregistered: addresses that the driver still takes for registered pages must not be used again,
 * or it would copy the old pages for the new. Where unregistering goes on failing, the addresses are kept, and the
 * engine reads no more.
 */
#include "engine.h"

#include "core/arith.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#define MAX_FAILURES 50
#define RETRY_NS     ((uint64_t)20 * 1000)

struct mapped {
	struct hr__engine_env env;
	size_t page;
	_Atomic bool is_stuck; /* a window could not be unregistered */
};

static int probe(const struct hr__file *file, char *reason, size_t reason_bytes)
{
	if (!file || (file->fd >= 0 && !file->is_block))
		return 0;
	snprintf(reason, reason_bytes, "it has no pages in the page cache: block devices are read around it");
	return HR_E_UNSUPPORTED;
}

/* Whether windows of files can be registered here at all, tried with a page of one that is there: the program. */
static int try_it(struct mapped *m, struct hr__io *io)
{
	void *memory;
	int fd, error, rc;

	error = hr__os_open(AT_FDCWD, "/proc/self/exe", O_RDONLY, &fd);
	if (error)
		return 0; /* then the first read tells */
	error = hr__os_map_file(fd, 0, m->page, &memory);
	hr__os_close(fd);
	if (error)
		return 0;
	rc = m->env.pin(m->env.device, memory, m->page, io);
	if (!rc && m->env.unpin(m->env.device, memory, io)) {
		hr__os_bury(memory, m->page);
		return HR_E_UNSUPPORTED;
	}
	hr__os_unmap(memory, m->page);
	return rc;
}

static int open_mapped(void *state, const struct hr__engine_env *env, char *reason, size_t reason_bytes)
{
	struct mapped *m = state;
	struct hr__io io = {0};
	int rc;

	if (!env->pin) {
		snprintf(
			reason, reason_bytes,
			"it feeds GPUs; on cpu ask for tensors in place instead (hr_map(), map=True in Python), or use engine auto");
		return HR_E_UNSUPPORTED;
	}
	m->env = *env;
	m->page = hr__os_page_bytes();
	rc = try_it(m, &io);
	if (!rc)
		return 0;
	snprintf(reason, reason_bytes, "the driver registers no pages of files: %.140s; use engine auto", io.reason);
	return rc == HR_E_NOMEM ? rc : HR_E_UNSUPPORTED;
}

/* ---- reading ---- */

/* What populating came to. Bytes that the file has no longer show only in its size if they are in its last page, which
 * is there nevertheless, filled up with zeros. */
static void judge(struct hr__io *io, int error)
{
	struct hr__os_stat st;
	int unknown = hr__os_fstat(io->file->fd, &st);

	if (!unknown && st.bytes < io->offset + io->expected && (!error || error == EFAULT)) {
		io->code = HR_E_SHORT;
		io->got = st.bytes > io->offset ? (size_t)(st.bytes - io->offset) : 0;
	} else if (error || unknown) {
		hr__io_fail(io, error == EFAULT ? EIO : error ? error : unknown);
	}
}

static void offer_window(struct mapped *m, struct hr__io *io)
{
	uint64_t start = hr__round_down(io->offset, m->page);
	size_t bytes = (size_t)(hr__round_up(io->offset + io->expected, m->page) - start);
	void *memory;
	int error = hr__os_map_file(io->file->fd, start, bytes, &memory);

	if (error) {
		hr__io_fail(io, error);
		return;
	}
	error = hr__os_populate(memory, bytes);
	/* Where the kernel does not offer that, registering brings the pages in; then the words for a failure are the
	 * driver's. */
	judge(io, error == ENOTSUP ? 0 : error);
	if (!io->code)
		io->code = m->env.pin(m->env.device, memory, bytes, io);
	if (io->code) {
		hr__os_unmap(memory, bytes);
		return;
	}
	io->window = memory;
	io->window_bytes = bytes;
	io->memory = (char *)memory + (io->offset - start);
	io->got = io->expected;
}

static void read_mapped(void *state, struct hr__io *io)
{
	struct mapped *m = state;

	if (m->is_stuck) {
		snprintf(io->reason, sizeof(io->reason),
			 "an earlier window could not be unregistered; open a new loader");
		io->code = HR_E_DEVICE;
		return;
	}
	offer_window(m, io);
}

static void release(void *state, struct hr__io *io)
{
	struct mapped *m = state;
	int rc = HR_E_DEVICE;

	for (int i = 0; i < MAX_FAILURES && rc; i++) {
		rc = m->env.unpin(m->env.device, io->window, io);
		if (rc)
			hr__os_sleep_ns(RETRY_NS);
	}
	if (rc) {
		m->is_stuck = true;
		hr__os_bury(io->window, io->window_bytes);
	} else {
		hr__os_unmap(io->window, io->window_bytes);
	}
	io->window = NULL;
}

static void close_mapped(void *state)
{
	(void)state;
}

const struct hr__engine_ops hr__engine_mapped = {
	.name = "mapped",
	.id = HR_ENGINE_MAPPED,
	.caps = HR__ENGINE_BLOCKING | HR__ENGINE_ON_REQUEST,
	.staging = HR__STAGING_WINDOW,
	.state_bytes = sizeof(struct mapped),
	.probe = probe,
	.open = open_mapped,
	.read = read_mapped,
	.release = release,
	.close = close_mapped,
};
