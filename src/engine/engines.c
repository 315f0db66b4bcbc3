/* SPDX-License-Identifier: Apache-2.0 */
/* The table of engines, and what all of them share. Build features appear here and nowhere else. */
#include "engine.h"

#include "core/arith.h"

#include <string.h>

#ifdef HR_TEST
/* tests/fakes/fake_engine.c */
extern const struct hr__engine_ops hr__engine_fake, hr__engine_fake_queue, hr__engine_fake_window;
#endif

static const struct hr__engine_ops *const engines[] = {
	&hr__engine_uring,
	&hr__engine_pread,
	&hr__engine_mapped,
	&hr__engine_cufile,
	&hr__engine_ugds,
#ifdef HR_TEST
	&hr__engine_fake,
	&hr__engine_fake_queue,
	&hr__engine_fake_window,
#endif
	NULL,
};

const struct hr__engine_ops *const *hr__engines(void)
{
	return engines;
}

const struct hr__engine_ops *hr__engine_find(const char *name)
{
	for (size_t i = 0; engines[i]; i++)
		if (strcmp(engines[i]->name, name) == 0)
			return engines[i];
	return NULL;
}

const char *hr_engine_name(uint32_t engine)
{
	static const char *const names[] = {"pread", "uring", "mapped", "cufile", "ugds"};

	return engine < sizeof(names) / sizeof(names[0]) ? names[engine] : NULL;
}

static void advance_iov(struct hr__io *io, size_t got)
{
	while (got > 0) {
		size_t part = got < io->iov->iov_len ? got : io->iov->iov_len;

		io->iov->iov_base = (char *)io->iov->iov_base + part;
		io->iov->iov_len -= part;
		got -= part;
		if (io->iov->iov_len == 0 && io->n_iov > 1) {
			io->iov++;
			io->n_iov--;
		}
	}
}

bool hr__io_advance(struct hr__io *io, size_t got)
{
	size_t step = got;

	if (got == 0 && io->expected > io->got) {
		io->code = HR_E_SHORT;
		return true;
	}
	if (io->got + got >= io->expected) {
		io->got = io->expected;
		io->code = 0;
		return true;
	}
	/* A direct read may end at a sector that is no place to go on from: part of it is read again. */
	if (io->direct) {
		step = (size_t)hr__round_down(got, io->file->offset_align);
		if (step == 0) {
			io->code = HR_E_SHORT;
			io->got += got;
			return true;
		}
	}
	io->got += step;
	io->offset += step;
	io->asked -= step;
	if (io->n_iov)
		advance_iov(io, step);
	else
		io->memory = (char *)io->memory + step;
	return false;
}

void hr__io_fail(struct hr__io *io, int errno_value)
{
	io->code = HR_E_IO;
	io->system = errno_value;
}
