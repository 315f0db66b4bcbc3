/* SPDX-License-Identifier: Apache-2.0 */
/* The engine that is always there: blocking reads, buffered or O_DIRECT, by as many threads as the loader has
 * readers. */
#include "engine.h"

#include <stdio.h>

static int probe(const struct hr__file *file, char *reason, size_t reason_bytes)
{
	(void)file;
	(void)reason;
	(void)reason_bytes;
	return 0;
}

static int open_nothing(void *state, const struct hr__engine_env *env, char *reason, size_t reason_bytes)
{
	(void)state;
	(void)env;
	(void)reason;
	(void)reason_bytes;
	return 0;
}

/* What a library reads comes as a whole or not at all. */
static void read_raw(struct hr__io *io)
{
	const struct hr__raw_ops *ops = io->file->raw->ops;
	int error = ops->read(io->file->raw, io->offset, io->memory, io->expected);

	if (error) {
		io->system = error;
		snprintf(io->reason, sizeof(io->reason), "%s", ops->explain(error, &io->code));
		return;
	}
	io->got = io->expected;
	io->code = 0;
}

static void read_all(void *state, struct hr__io *io)
{
	int fd = io->direct ? io->file->direct_fd : io->file->fd;
	size_t got;

	(void)state;
	if (io->file->raw) {
		read_raw(io);
		return;
	}
	do {
		int error = io->n_iov ? hr__os_preadv(fd, io->iov, io->n_iov, io->offset, &got)
				      : hr__os_pread(fd, io->memory, io->asked, io->offset, &got);

		if (error) {
			hr__io_fail(io, error);
			return;
		}
	} while (!hr__io_advance(io, got));
}

static void close_nothing(void *state)
{
	(void)state;
}

const struct hr__engine_ops hr__engine_pread = {
	.name = "pread",
	.id = HR_ENGINE_PREAD,
	.caps = HR__ENGINE_BLOCKING | HR__ENGINE_RAW,
	.probe = probe,
	.open = open_nothing,
	.read = read_all,
	.close = close_nothing,
};
