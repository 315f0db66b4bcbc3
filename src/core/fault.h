/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fault points, in test builds only (HR_TEST). Every allocation passes one named "malloc"; every system and driver call
 * passes one of its own name. A test arms one: the n-th passage (counted over all names, or over one) answers as if the
 * call had failed with a chosen errno. In a normal build HR__FAULT() is the constant 0.
 */
#ifndef HR_CORE_FAULT_H
#define HR_CORE_FAULT_H

#ifdef HR_TEST
#include <stdint.h>

/* 0: go on; otherwise the errno that the call at this point must fail with. Threads: any. */
int hr__fault(const char *point);
/* Arms: the n-th passage (n = 1, 2, ...) of `point` (NULL: any but "malloc") fails once with `errno_value`. n = 0
 * disarms. Resets the counters. */
void hr__fault_arm(const char *point, uint64_t n, int errno_value);
/* Whether an armed fault has been given since. */
int hr__fault_fired(void);
#define HR__FAULT(point) hr__fault(point)
#else
#define HR__FAULT(point) 0
#endif

/* Gives the armed errno of a test, if this is the call that it wants to fail. */
#define HR__FAIL_IF_ARMED(point)                         \
	do {                                         \
		int armed_errno_ = HR__FAULT(point); \
		if (armed_errno_)                    \
			return armed_errno_;         \
	} while (0)

#endif
