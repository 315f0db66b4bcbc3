/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An engine: one mechanism for getting bytes off a source. This is the contract between the loader and the members,
 * which are listed in engines.c in order of preference.
 *
 * Two kinds. A *blocking* engine offers read(), which any number of reader threads call at once. A *queued* engine
 * offers submit(), reap() and wake(): one thread, the loader's, calls submit and reap; wake may come from any thread.
 *
 * Where a chunk's bytes are while in motion is the engine's **staging**, one kind for all its life:
 *
 *   HR__STAGING_HOST     the loader's pool is host memory, registered with the device, and the engine writes into it
 *   HR__STAGING_DEVICE   the loader's pool is memory of the device itself, a window that the engine registers in open()
 *                        with the library that fills it, and takes back in close(). Every call but probe() is made with
 *                        the device current on the thread. A direct request asks for whole blocks inside the file and
 *                        expects all of them: the loader reads a file's last partial block itself
 *   HR__STAGING_WINDOW   the loader has no memory: read() maps the bytes where they are, registers that window with
 *                        the device through env.pin, and sets io->memory to the request's first byte. A window is no
 *                        larger than env.slot_bytes, if the request lies inside slot_bytes of whole pages; the loader
 *                        has at most staging_bytes / slot_bytes of them at once. It stays until release(), which the
 *                        loader calls once for every request that came back with code 0, on a reader's thread, when
 *                        no copy reads from it any more.
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
	/* 0, HR_E_IO, HR_E_SHORT, or (engines that register memory, or read by a library) HR_E_DEVICE, HR_E_NOMEM,
	 * HR_E_GDS, HR_E_FALLBACK */
	int code;
	int system;       /* errno; otherwise the driver's or library's code */
	size_t got;       /* bytes that came, in order from the first */
	char reason[200]; /* what failed, in the words of who refused it; empty: errno says it */

	/* Windows: what release() needs. */
	void *window;
	size_t window_bytes;

	struct hr__io *next; /* for whoever owns the request */
};

/* Where a chunk's bytes are while in motion; see above. */
enum hr__staging {
	HR__STAGING_HOST = 0,
	HR__STAGING_DEVICE,
	HR__STAGING_WINDOW,
};

struct hr__engine_env {
	void *staging; /* NULL for windows */
	size_t staging_bytes;
	unsigned depth;    /* requests in flight at most (queued engines) */
	size_t slot_bytes; /* of staging */
	/* Registers memory, which is never written through, with the loader's device, and takes that back. NULL where
	 * the device is host memory. Any thread. 0, or HR_E_* with the driver's code and reason in the request. */
	int (*pin)(void *device, void *memory, size_t bytes, struct hr__io *io);
	int (*unpin)(void *device, void *memory, struct hr__io *io);
	void *device; /* first argument of both */
	/* Staging on a device: its number, and whether reads may go through host memory all the same. */
	int ordinal;
	bool compat;
	bool *is_kept; /* close() sets it if something still uses the staging memory, which must then never be freed */
};

/* What an engine that reads by a library has to say of it. */
struct hr__engine_report {
	char note[160];             /* which library, and how it reads */
	uint64_t all, through_host; /* reads, by its own count; 0 and 0 = it does not count */
};

#define HR__ENGINE_BLOCKING   1u
#define HR__ENGINE_QUEUED     2u
#define HR__ENGINE_ON_REQUEST 4u  /* used only when asked for by name */
#define HR__ENGINE_RAW        8u  /* reads storage that has no descriptors (hr__file.raw), too */
#define HR__ENGINE_RAW_ONLY   16u /* reads nothing else */

struct hr__engine_ops {
	const char *name;
	uint32_t id; /* enum hr_engine */
	uint32_t caps;
	enum hr__staging staging;
	size_t state_bytes;
	/* Whether it can be used here, and for this file if one is given. 0, perhaps with a remark in `reason`, or
	 * HR_E_UNSUPPORTED with the reason. */
	int (*probe)(const struct hr__file *file, char *reason, size_t reason_bytes);
	/* `state` is zeroed memory of state_bytes. 0, or HR_E_UNSUPPORTED or HR_E_NOMEM with the reason; staging on a
	 * device: also HR_E_GDS, or HR_E_SPACE if less staging memory may do. */
	int (*open)(void *state, const struct hr__engine_env *env, char *reason, size_t reason_bytes);
	void (*read)(void *state, struct hr__io *io);
	/* Windows only: takes back what read() gave. Any thread. */
	void (*release)(void *state, struct hr__io *io);
	void (*submit)(void *state, struct hr__io *io);
	/* Waits for at least one answer or a wake(); gives up to `max` requests back through `done`. */
	size_t (*reap)(void *state, struct hr__io **done, size_t max);
	void (*wake)(void *state);
	/* Optional. Any thread, while it is open. */
	void (*report)(void *state, struct hr__engine_report *out);
	void (*close)(void *state);
};

extern const struct hr__engine_ops hr__engine_pread, hr__engine_uring, hr__engine_mapped, hr__engine_cufile,
	hr__engine_ugds;

/* The table: NULL-terminated, best first. */
const struct hr__engine_ops *const *hr__engines(void);
const struct hr__engine_ops *hr__engine_find(const char *name);

/* For members: takes the next `got` bytes of a request into account. Answers whether the request is over (code
 * set), and if it is not, moves `offset`, `memory` or `iov` on, realigned for a direct read. */
bool hr__io_advance(struct hr__io *io, size_t got);
/* A request that failed with this errno is over. */
void hr__io_fail(struct hr__io *io, int errno_value);

#endif
