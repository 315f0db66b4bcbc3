/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a process may use of its machine, as files below a root say it ("" for the real one; a test has a tree of its
 * own): control groups of version 2 and of version 1, also side by side, and how much memory is available. A limit at
 * any level above the process holds. What cannot be read limits nothing.
 */
#ifndef HR_CORE_LIMITS_H
#define HR_CORE_LIMITS_H

#include <stdint.h>

/* `cpus`, or fewer whole ones if a quota of CPU time allows less. */
unsigned hr__limits_cpus(const char *root, unsigned cpus);
/* MemAvailable, or less if a memory limit leaves less; page cache of the group counts as free. 0 = not known. */
uint64_t hr__limits_memory(const char *root);

#endif
