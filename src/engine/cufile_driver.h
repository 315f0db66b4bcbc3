/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuFile in this process: the library, found at run time, and its driver, which is open as long as somebody uses it.
 * cufile.c is the engine over it.
 */
#ifndef HR_ENGINE_CUFILE_DRIVER_H
#define HR_ENGINE_CUFILE_DRIVER_H

#include "core/fault.h"
#include "core/os.h"
#include "cufile_syms.h"

/* Filled once per process; read-only from then on. */
extern struct hr__cf_api hr__cf_api;

/* A call that gives a struct hr__cf_error, by name, with its fault point. A test's armed number is taken as what cuFile
 * answers. */
#define HR__CF_CALL(name, call)                                                                                        \
	(__extension__({                                                                                               \
		int armed_ = HR__FAULT(name);                                                                          \
		armed_ ? (struct hr__cf_error){armed_, 0} : hr__cf_api.call;                                           \
	}))
#define HR__CF(call, ...) HR__CF_CALL(#call, call(__VA_ARGS__))
#define HR__CF_0(call)    HR__CF_CALL(#call, call())

/* Whether cuFile can be used here, as far as can be told without starting it; with a file, for that file. 0, or
 * HR_E_UNSUPPORTED with the reason. */
int hr__cufile_look(const struct hr__file *file, char *reason, size_t reason_bytes);

/* One more user of the driver, which is started for the first. `compat`: it may read through host memory; otherwise
 * that is forbidden and checked. In a current CUDA context. 0, HR_E_UNSUPPORTED or HR_E_GDS with the reason. A start
 * that failed is remembered: each costs the library a third of a second, and none goes better. */
int hr__cufile_acquire(bool compat, size_t slot_bytes, char *reason, size_t reason_bytes);
/* One less; the driver is closed after the last. Nothing may be registered or in flight any more. */
void hr__cufile_release(void);

/* "the memory is registered already (5023)", "Input/output error"; for an errno of cuFile's, which may be either. */
const char *hr__cufile_text(int code, char *out, size_t out_bytes);
/* The library's own count of reads that it did through host memory, and of all; false where it has no such counter. */
bool hr__cufile_counts(uint64_t *posix, uint64_t *all);
/* "cuFile 1.15, nvidia-fs 2.24"; what was found at the start. */
void hr__cufile_describe(char *out, size_t out_bytes);

#endif
