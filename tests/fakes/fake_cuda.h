/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Controls of the look-alike CUDA driver (fake_cuda.c), for tests. They are found by name at run time, so that the
 * same test program runs over the real driver too: fake_cuda_find() then says no, and the test leaves out what only
 * the fake can do.
 *
 * Settings, by fake.set(key, value) or in the environment as HR_FAKE_CUDA="key=value,key=value" before the first call:
 *
 *   devices=1         how many GPUs there are; 0 makes cuInit fail with CUDA_ERROR_NO_DEVICE
 *   memory_mib=4096   memory of each
 *   version=13000     of the driver: from 13000 cuMemcpyBatchAsync_v2, from 12080 the older shape, below neither
 *   pools=1           whether there are stream-ordered pools
 *   host_pointers=1   whether registered host memory has the same address on the device
 *   batch_result=0    what cuMemcpyBatchAsync answers, doing nothing, if not 0
 *   register_mib=0    the largest range that cuMemHostRegister takes; 0 = any
 *   read_only=1       whether host memory can be registered read-only, as memory that the CPU may only read must be
 *   host_tables=0     whether the GPU walks the host's page tables, so that such memory is taken without that
 *   delay_us=200      each queued operation starts up to this much later
 *   seed=1            of delays, of the order within a batch, and of which stream goes next
 *   strict=1          an error of the caller's ends the process with a message; 0 only counts it
 *
 * Errors of the caller's are what real hardware answers with wrong bytes or worse: copying from memory that is not
 * registered, into memory that is not allocated (or freed, or not yet allocated in stream order), freeing or
 * unregistering memory under a pending copy, calls without a current context or in a forked child, waiting for a
 * captured event, unbalanced contexts.
 */
#ifndef HR_TESTS_FAKE_CUDA_H
#define HR_TESTS_FAKE_CUDA_H

#include "fake_find.h"

struct fake_cuda {
	/* Changes a setting; 0, or -1 for a key that there is not. */
	int (*set)(const char *key, long long value);
	/* The n-th call (1 = the next) of an exported function answers `code` and does nothing; "*" = of any function;
	 * "async" = the n-th copy that runs breaks its context with `code`. n = 0 takes all of them back. */
	void (*arm)(const char *function, unsigned n, int code);
	/* How many errors of the caller's there were; the last one's text. */
	unsigned (*errors)(char *text, size_t text_bytes);
	/* How often a function was called; NULL = any. */
	unsigned long long (*calls)(const char *function);
	/* Objects that are alive: "memory" (allocations), "streams", "events", "pools", "registrations",
	 * "contexts"; NULL = all. "bytes": of the first device's memory in use; "peak_bytes": at most since the last
	 * reset; "most_registered": bytes of host memory at once, since this was last asked. */
	long long (*live)(const char *kind);
	/* Defaults again, counters 0, contexts healthy. */
	void (*reset)(void);
	/* Waits until nothing is queued any more. */
	void (*drain)(void);
	/* What other hardware, a disk, does to device memory: it writes there, past the driver. 0; -1 if the memory is
	 * not all allocated. That a queued copy reads or writes the same bytes is an error of the caller's. */
	int (*store)(unsigned long long address, const void *bytes, size_t n);
};

/* Whether libcuda.so.1 is the fake. */
static inline bool fake_cuda_find(struct fake_cuda *out)
{
	return fake_find("libcuda.so.1", "fake_cuda", out, sizeof(*out) / sizeof(void *));
}

#endif
