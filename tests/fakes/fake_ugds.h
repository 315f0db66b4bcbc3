/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Controls of the look-alike uGDS library (fake_ugds.c), for tests; found by name at run time. It works over the
 * look-alike CUDA driver only, into whose device memory it writes. The disk is whatever file the descriptor of the node
 * is open on: a plain file stands for "/dev/ugds_drv0".
 *
 * Settings, by fake.set(key, value) or in the environment as HR_FAKE_UGDS="key=value,key=value":
 *
 *   lba=512           sector size: less, or another place, is answered with -EINVAL
 *   capacity_mib=0    of the disk; 0 = the size of the file
 *   short_every=0     each n-th read gives fewer bytes than asked for, and spoils the rest
 *   delay_us=100      a read takes up to this much longer, so that reads of several threads end in any order
 *   teardown_us=0     what a read leaves in the driver is gone this long after it has returned
 *   wedge_after=0     the n-th read from now times out (-EIO) and its command stays in motion: every later call for
 *                     this disk answers -EBADF, and its memory is busy for ever
 *   room_kib=0        what can be registered in all; 0 = anything
 *   busy=0            so many deregistrations of memory are refused as busy
 *   seed=1            of delays
 *   strict=1          an error of the caller's ends the process with a message; 0 only counts it
 *
 * Errors of the caller's, which the real library answers with wrong bytes or worse: memory that does not begin and end
 * at 64 KiB borders (the kernel's part rounds the base down, so here too the bytes land before it); a read into memory
 * that is not registered by its first byte, or into which another read is going on, or whose previous read is not torn
 * down; registering a disk twice (that resets the controller under reads in motion); a read that is too long; taking a
 * handle, memory or the driver away under a read or in the wrong order; any call without a CUDA context, in a forked
 * child, or after the disk was lost.
 */
#ifndef HR_TESTS_FAKE_UGDS_H
#define HR_TESTS_FAKE_UGDS_H

#include "fake_find.h"

struct fake_ugds {
	/* As in fake_cuda.h. arm: `code` is a uGDSOpError; for uGDSRead an errno (it answers -code then). "live" counts
	 * "handles", "buffers", "opens", "reads" (in motion), "peak_reads" (at once), "kib" (registered); NULL =
	 * handles and buffers and opens. */
	int (*set)(const char *key, long long value);
	void (*arm)(const char *function, unsigned n, int code);
	unsigned (*errors)(char *text, size_t text_bytes);
	unsigned long long (*calls)(const char *function);
	long long (*live)(const char *kind);
	void (*reset)(void);
};

/* Whether libugds.so is the fake. */
static inline bool fake_ugds_find(struct fake_ugds *out)
{
	return fake_find("libugds.so", "fake_ugds", out, sizeof(*out) / sizeof(void *));
}

#endif
