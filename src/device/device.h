/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A device: memory that tensors are delivered into. This is the contract between the loader and the members cpu.c and
 * cuda.c, which are listed in devices.c.
 *
 * Two parts. The device itself (memory: allocate, pin, read back) may be called from any thread. A **lane** is what
 * copies: one queue of copies with numbered fences. A lane is used by one thread, the loader's drainer, from open to
 * close; `ordinal` devices on a driver make their own context current on that thread and leave it current until
 * lane_close.
 *
 * Copies of a lane start in order. A fence is "all copies given before"; fences are numbered from 1 by the caller in
 * the order given and at most HR__MAX_FENCES are outstanding. A source or destination may be touched again only after
 * its fence.
 *
 * Failures: functions return 0 or HR_E_*, and put the driver's code into *system and a sentence into `reason` through
 * struct hr__device_error; they never touch the thread's last error, since most run on the drainer.
 */
#ifndef HR_DEVICE_DEVICE_H
#define HR_DEVICE_DEVICE_H

#include "headrace.h"

#include <stdatomic.h>
#include <stdbool.h>

#define HR__MAX_FENCES 64

struct hr__device_error {
	int32_t system;
	char reason[200]; /* "cuMemcpyHtoDAsync: an illegal memory access was encountered (700)" */
};

struct hr__copy {
	void *dst;        /* device memory; for the cpu device host memory */
	const void *src;  /* pinned host memory (a slot), or memory of the device (a slot of a window) */
	size_t bytes;     /* never 0 */
	bool from_device; /* `src` is memory of the device */
};

/* What enter() found on a thread, for leave(). */
struct hr__device_visit {
	int capture_mode;
};

#define HR__WINDOW_ALIGN ((uint64_t)64 << 10) /* a page of a GPU's memory as other hardware sees it */

struct hr__lane; /* opaque to the loader; each member embeds what it needs behind it */

/* Capabilities. */
#define HR__DEVICE_HOST    1u /* the CPU may write destinations itself: reads can go straight into them */
#define HR__DEVICE_STREAMS 2u /* has streams: wait_stream, signal_stream, release_on */

struct hr__device_ops {
	const char *name; /* "cpu", "cuda" */
	uint32_t caps;
	size_t state_bytes;
	/* Whether this kind of device is there. HR_E_UNSUPPORTED or HR_E_DEVICE with the reason; on success
	 * *n_devices and, for each of up to `max`, a sentence about it. Creates no context. */
	int (*probe)(int *n_devices, char (*about)[240], int max, struct hr__device_error *error);
	int (*open)(hr_device *device, int ordinal, struct hr__device_error *error);
	void (*close)(hr_device *device);
	int (*info)(hr_device *device, struct hr_device_info *out, struct hr__device_error *error);

	/* Memory. alloc: at least 256-aligned, HR_E_DEVICE_MEMORY or HR_E_NOMEM if there is none; ordered before
	 * later copies of any lane. release: any thread; nothing queued uses the memory any more but, perhaps, what
	 * retire was told of. */
	int (*alloc)(hr_device *device, uint64_t bytes, void **out, struct hr__device_error *error);
	int (*release)(hr_device *device, void *memory, uint64_t bytes, struct hr__device_error *error);
	/* Registers host memory for copies, portably; unpin undoes it. No-ops on cpu. pin_read_only: memory that the
	 * process may only read, a mapping of a file; NULL on cpu. */
	int (*pin)(hr_device *device, void *memory, size_t bytes, struct hr__device_error *error);
	int (*pin_read_only)(hr_device *device, void *memory, size_t bytes, struct hr__device_error *error);
	int (*unpin)(hr_device *device, void *memory, struct hr__device_error *error);
	/* As release, for memory that nothing queued uses any more: the next alloc can have it. NULL: as release. */
	int (*release_idle)(hr_device *device, void *memory, uint64_t bytes, struct hr__device_error *error);
	/* Copies device memory to host memory and waits. Any thread. */
	int (*read_back)(hr_device *device, void *dst, const void *src, size_t bytes, struct hr__device_error *error);

	/* Windows: device memory that a storage library may register, for slots that it fills without the CPU. NULL
	 * where there is no such thing. One plain allocation at HR__WINDOW_ALIGN, since stream-ordered and virtual
	 * memory cannot be registered everywhere. window_free: nothing may be registered or in flight any more. */
	int (*window_alloc)(hr_device *device, uint64_t bytes, void **out, struct hr__device_error *error);
	int (*window_free)(hr_device *device, void *memory, struct hr__device_error *error);
	/* Makes the device current on this thread, for calls of a storage library, until leave. NULL: nothing to do. */
	int (*enter)(hr_device *device, struct hr__device_visit *visit, struct hr__device_error *error);
	void (*leave)(const struct hr__device_visit *visit);

	/* Streams (HR__DEVICE_STREAMS only). mark: makes an object that stands for "what is queued on this stream
	 * now"; any thread. mark_again: the same object stands for now, or after a failure for what it stood for.
	 * mark_done: 1 if what it stands for is over, 0 if not, < 0 failed. lane_after: later copies of the lane
	 * wait for what the mark stands for now; the drainer calls it. mark_free: any thread, also then. signal:
	 * what is queued on `stream` from now on sees all copies whose fences are done; any thread. retire: memory
	 * given to release() from now on is used again only after what is queued on `stream` now; any thread. */
	int (*mark)(hr_device *device, void *stream, void **mark, struct hr__device_error *error);
	int (*mark_again)(hr_device *device, void *stream, void *mark, struct hr__device_error *error);
	int (*mark_done)(hr_device *device, void *mark, struct hr__device_error *error);
	void (*mark_free)(hr_device *device, void *mark);
	int (*lane_after)(struct hr__lane *lane, void *mark, struct hr__device_error *error);
	int (*signal)(hr_device *device, void *stream, struct hr__device_error *error);
	int (*retire)(hr_device *device, void *stream, struct hr__device_error *error);

	/* Lanes. copy: queues n copies, in one driver call where the driver can; *n_calls says in how many. All or
	 * none are trusted: after a failure the loader treats the destinations as touched by DMA until the next
	 * good fence. fence_done: 1 done, 0 not yet, < 0 failed. */
	int (*lane_open)(hr_device *device, struct hr__lane **out, struct hr__device_error *error);
	void (*lane_close)(struct hr__lane *lane);
	int (*copy)(struct hr__lane *lane, const struct hr__copy *copies, size_t n, size_t *n_calls,
		    struct hr__device_error *error);
	/* The other way, into pinned host memory; NULL on cpu. In order with the copies before and after it. */
	int (*copy_down)(struct hr__lane *lane, void *dst, const void *src, size_t bytes,
			 struct hr__device_error *error);
	int (*fence)(struct hr__lane *lane, uint64_t number, struct hr__device_error *error);
	int (*fence_done)(struct hr__lane *lane, uint64_t number, struct hr__device_error *error);
};

struct hr_device {
	const struct hr__device_ops *ops;
	void *state; /* ops->state_bytes, zeroed before open */
	_Atomic uint32_t count;
	int ordinal;
	char spec[16];
	const volatile uint32_t *fork_mark; /* reads 0 in a forked child */
};

extern const struct hr__device_ops hr__device_cpu, hr__device_cuda;

/* The table: NULL-terminated. */
const struct hr__device_ops *const *hr__devices(void);

hr_device *hr__device_acquire(hr_device *device);
/* HR_E_FORKED, recorded, in a forked child; 0 otherwise. */
int hr__device_here(const hr_device *device);
/* Records a device's failure as the thread's last error: "<spec>: <doing>: <reason>". Returns `code`. */
int hr__device_fail(const hr_device *device, int code, const char *doing, const struct hr__device_error *error);

#endif
