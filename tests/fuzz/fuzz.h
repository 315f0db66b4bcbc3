/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the fuzz targets share. Each target is one LLVMFuzzerTestOneInput(); with -Dfuzz=true it is linked with
 * libFuzzer, else with replay.c, which runs it over the seeds (make_seeds.py) and over fixed changes of them as an
 * ordinary test.
 *
 * The first two bytes of every input say which allocation fails (0: none), so that error paths are searched as well.
 */
#ifndef HR_TESTS_FUZZ_H
#define HR_TESTS_FUZZ_H

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/fault.h"
#include "headrace.h"

#define FUZZ_PREFIX 2

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n);
size_t LLVMFuzzerCustomMutator(uint8_t *bytes, size_t n, size_t max, unsigned seed);
size_t LLVMFuzzerMutate(uint8_t *bytes, size_t n, size_t max); /* libFuzzer's, or replay.c's */

/* assert() that is always there: a broken promise ends the process, which is what a fuzzer looks for. */
#define fuzz_check(condition)                                                                                          \
	do {                                                                                                           \
		if (!(condition)) {                                                                                    \
			fprintf(stderr, "%s:%d: broken: %s (last error: %s)\n", __FILE__, __LINE__, #condition,        \
				hr_error_last()->message);                                                             \
			abort();                                                                                       \
		}                                                                                                      \
	} while (0)

static inline void fuzz_arm(const uint8_t *bytes)
{
	hr__fault_arm("malloc", (uint64_t)(bytes[0] | bytes[1] << 8), ENOMEM);
}

/* After the call: whether the armed allocation failed. Disarms. */
static inline bool fuzz_fired(void)
{
	bool fired = hr__fault_fired() != 0;

	hr__fault_arm("malloc", 0, 0);
	return fired;
}

/* A copy of exactly this size, so that a read past the end is seen. */
static inline uint8_t *fuzz_copy(const uint8_t *bytes, size_t n)
{
	uint8_t *copy = malloc(n ? n : 1);

	if (!copy)
		abort();
	if (n)
		memcpy(copy, bytes, n);
	return copy;
}

/* What holds of every error: it says the code, is short, has no control bytes, and points into the file. */
static inline void fuzz_check_error(int rc, const char *stage, uint64_t file_bytes)
{
	const struct hr_error *error = hr_error_last();

	fuzz_check(rc < 0 && error->code == rc && error->message[0]);
	for (const char *c = error->message; *c; c++)
		fuzz_check((unsigned char)*c >= 0x20);
	if (rc == HR_E_NOMEM)
		return;
	fuzz_check(strcmp(error->stage, stage) == 0);
	fuzz_check(error->offset == HR_NO_OFFSET || error->offset <= file_bytes);
}

#endif
