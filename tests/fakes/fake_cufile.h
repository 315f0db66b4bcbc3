/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Controls of the look-alike cuFile library (fake_cufile.c), for tests; found by name at run time, so that the same
 * test program runs over the real library too. It works over the look-alike driver only, into whose device memory it
 * writes.
 *
 * Settings, by fake.set(key, value) or in the environment as HR_FAKE_CUFILE="key=value,key=value":
 *
 *   nvidia_fs=1      whether the kernel's part is there; without it the driver opens in compatibility mode or not at
 *                    all
 *   version=1150     of the library; below 1150 there are no statistics, from 1190 they are laid out anew
 *   fallback=0       1: every read goes through host memory whatever the configuration says; 2: every second
 *   short_every=0    each n-th read gives fewer bytes than asked for, and spoils the rest
 *   delay_us=100     a read takes up to this much longer, so that reads of several threads end in any order
 *   teardown_us=0    what a read leaves in the driver is gone this long after it has returned
 *   bar_kib=0        what cuFileGetBARSizeInKB says; 0 = nothing of use
 *   room_kib=0       what can be registered in all; 0 = anything
 *   busy=0           so many deregistrations of memory are refused
 *   others=0         1: something else in the process has started the driver before, with the settings as shipped
 *   seed=1           of delays
 *   strict=1         an error of the caller's ends the process with a message; 0 only counts it
 *
 * Errors of the caller's, which the real library or the driver below it answers with wrong bytes, a crash or a hang:
 * reading into memory that is not registered, or into which another read is going on, or whose previous read is not
 * torn down; a read that is too long; a descriptor that is no longer the file it was registered for; taking handles,
 * memory or the driver away under a read; any call without a CUDA context, before the driver is open or after it is
 * closed; and starting without settings, which has the library write its log into the working directory.
 */
#ifndef HR_TESTS_FAKE_CUFILE_H
#define HR_TESTS_FAKE_CUFILE_H

#include "fake_find.h"

struct fake_cufile {
	/* As in fake_cuda.h. arm: `code` is a CUfileOpError; for cuFileRead also an errno (it answers -1 then).
	 * "live" counts "handles", "buffers", "opens", "reads" (in motion), "peak_reads" (at once), "kib"
	 * (registered); NULL = handles and buffers and opens. */
	int (*set)(const char *key, long long value);
	void (*arm)(const char *function, unsigned n, int code);
	unsigned (*errors)(char *text, size_t text_bytes);
	unsigned long long (*calls)(const char *function);
	long long (*live)(const char *kind);
	void (*reset)(void);
};

/* Whether libcufile.so.0 is the fake. */
static inline bool fake_cufile_find(struct fake_cufile *out)
{
	return fake_find("libcufile.so.0", "fake_cufile", out, sizeof(*out) / sizeof(void *));
}

#endif
