/* SPDX-License-Identifier: Apache-2.0 */
/*
 * uGDS in this process: the library, found at run time, and **the session**: one disk that uGDS's own kernel module has
 * taken from the kernel, opened once and counted. Models that are read so hold it, and so do loaders with engine ugds
 * (ugds.c).
 *
 * What always holds:
 *  - One session at a time. Opening a disk resets its controller, so it happens once, however many models are opened;
 *    a second disk is refused, since the library maps memory through the first one's controller.
 *  - A read that failed or timed out may still be in motion, and the disk may write into GPU memory at any later time.
 *    So after one -EIO or -EBADF the process is done with uGDS: no further call is made, every later read and opening
 *    says so, and descriptor, handle and registered memory are kept for ever, on purpose.
 *  - A forked child makes no call at all.
 */
#ifndef HR_ENGINE_UGDS_DRIVER_H
#define HR_ENGINE_UGDS_DRIVER_H

#include "core/os.h"

#define HR__UGDS_MAX_REQUEST ((size_t)8 << 20)
#define HR__UGDS_GPU_PAGE    ((size_t)64 << 10) /* of what is registered: base and length are multiples */

struct hr__ugds;

/* What a session needs of a GPU, from who opens it: a piece of its memory, and ways to use that. */
struct hr__ugds_gpu {
	void *bounce; /* HR__UGDS_GPU_PAGE-aligned */
	size_t bounce_bytes;
	/* Runs `call(arg)` with the GPU current on this thread; HR_E_DEVICE if it cannot be. */
	int (*inside)(void *ctx, void (*call)(void *arg), void *arg);
	/* GPU memory to host memory; 0 or HR_E_*. */
	int (*read_back)(void *ctx, void *dst, const void *src, size_t bytes);
	/* The session is over. `is_kept`: the memory must never be freed. */
	void (*close)(void *ctx, bool is_kept);
	void *ctx;
};

/* Why something failed, in words. */
struct hr__ugds_fault {
	int code;   /* HR_E_* */
	int system; /* errno, or the library's code */
	char reason[320];
};

/* Whether uGDS can be used here, as far as can be told without starting it. 0, perhaps with a remark, or
 * HR_E_UNSUPPORTED with the reason. */
int hr__ugds_look(char *reason, size_t reason_bytes);

/* One more user of the session with this node ("/dev/ugds_drv0"); for the first one the disk is opened, with what
 * `gpu` fills in (fault->reason says why not). HR_E_NOTFOUND, HR_E_LOCKED, HR_E_BUSY (another node's session is open),
 * HR_E_UNSUPPORTED, HR_E_GDS, HR_E_FORKED, HR_E_IO, HR_E_NOMEM, HR_E_DEVICE*: in fault->code too. */
typedef int hr__ugds_gpu_open(struct hr__ugds_gpu *out, struct hr__ugds_fault *fault);
int hr__ugds_open(const char *node, hr__ugds_gpu_open *gpu, struct hr__ugds **out, struct hr__ugds_fault *fault);
struct hr__ugds *hr__ugds_acquire(struct hr__ugds *session);
/* The session that is open now, with one more user; NULL: none is. */
struct hr__ugds *hr__ugds_current(void);
void hr__ugds_unref(struct hr__ugds *session); /* takes NULL */

/* The session's disk as what files are read from; the session lives as long as its users. */
struct hr__raw *hr__ugds_raw(struct hr__ugds *session);
/* The session that is behind a file; NULL: it is none of ours. */
struct hr__ugds *hr__ugds_of(const struct hr__file *file);
uint64_t hr__ugds_capacity(const struct hr__ugds *session);
uint32_t hr__ugds_lba_bytes(const struct hr__ugds *session);

/* For the engine, in the GPU's context. Registers a window; HR_E_SPACE if less may do, HR_E_GDS, with the reason. */
int hr__ugds_register(struct hr__ugds *session, void *base, size_t bytes, char *reason, size_t reason_bytes);
/* False: it cannot be had back, and must never be freed. Waits while it is busy, for seconds at most. */
bool hr__ugds_deregister(struct hr__ugds *session, void *base);
/* Exactly `bytes` at `offset` of the disk, to `at` in registered memory; 0, or an errno that hr__ugds_explain() knows.
 * All three are checked: multiples of the sector, of 4096, and inside the disk. */
int hr__ugds_read(struct hr__ugds *session, void *base, size_t bytes, uint64_t offset, uint64_t at);
const char *hr__ugds_explain(int error, int *code);
/* "device memory could not be pinned (5036)" */
const char *hr__ugds_text(int code, char *out, size_t out_bytes);

#endif
