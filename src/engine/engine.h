/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An engine: one mechanism for getting bytes off a source. This is the contract between the loader and the members,
 * which are listed in engines.c in order of preference.
 *
 * Two kinds. A *blocking* engine offers read(), which any number of reader threads call at once. A *queued* engine
 * offers submit(), reap() and wake(): one thread, the loader's, calls submit and reap; wake may come from any thread.
 *
 * From read() or submit() until the request comes back, the engine owns the request and its memory. It comes back
 * exactly once, with code 0 and every expected byte in place, or with a failure: then the memory holds garbage.
 * Engines retry what is no failure (EINTR, EAGAIN, short reads in mid-file, realigned where the read is direct). They
 * never allocate, never touch the thread's last error, and write nothing outside [memory, memory + asked).
 */
#ifndef HR_ENGINE_ENGINE_H
#define HR_ENGINE_ENGINE_H

#include "core/os.h"
#include "headrace.h"

#define HR__MAX_IOV 1024 /* the system's limit for one vectored read */

struct hr__io {
	const struct hr__file *file;
	uint64_t offset;
	size_t asked;    /* bytes; a multiple of the alignment if the read is direct */
	size_t expected; /* bytes that must come; less than asked only at the end of the file */
	/* Where to: one piece of memory, or (blocking engines, not direct) several. */
	void *memory;
	struct iovec *iov;
	int n_iov;   /* 0: `memory` */
	bool direct; /* O_DIRECT */
	bool staged; /* `memory` is inside the staging memory that open() was told of */

	/* The answer. */
	int code;   /* 0, HR_E_IO, HR_E_SHORT */
	int system; /* errno */
	size_t got; /* bytes that came, in order from the first */

	struct hr__io *next; /* for whoever owns the request */
};

struct hr__engine_env {
	void *staging;
	size_t staging_bytes;
	unsigned depth; /* requests in flight at most (queued engines) */
};

#define HR__ENGINE_BLOCKING   1u
#define HR__ENGINE_QUEUED     2u
#define HR__ENGINE_ON_REQUEST 4u /* used only when asked for by name */

struct hr__engine_ops {
	const char *name;
	uint32_t id; /* enum hr_engine */
	uint32_t caps;
	size_t state_bytes;
	/* Whether it can be used here, and for this file if one is given. 0, or HR_E_UNSUPPORTED with the reason. */
	int (*probe)(const struct hr__file *file, char *reason, size_t reason_bytes);
	/* `state` is zeroed memory of state_bytes. 0, or HR_E_UNSUPPORTED or HR_E_NOMEM with the reason. */
	int (*open)(void *state, const struct hr__engine_env *env, char *reason, size_t reason_bytes);
	void (*read)(void *state, struct hr__io *io);
	void (*submit)(void *state, struct hr__io *io);
	/* Waits for at least one answer or a wake(); gives up to `max` requests back through `done`. */
	size_t (*reap)(void *state, struct hr__io **done, size_t max);
	void (*wake)(void *state);
	void (*close)(void *state);
};

extern const struct hr__engine_ops hr__engine_pread, hr__engine_uring;

/* The table: NULL-terminated, best first. */
const struct hr__engine_ops *const *hr__engines(void);
const struct hr__engine_ops *hr__engine_find(const char *name);

/* For members: takes the next `got` bytes of a request into account. Answers whether the request is over (code
 * set), and if it is not, moves `offset`, `memory` or `iov` on, realigned for a direct read. */
bool hr__io_advance(struct hr__io *io, size_t got);
/* A request that failed with this errno is over. */
void hr__io_fail(struct hr__io *io, int errno_value);

#endif
