/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What every C test needs. Names of tests are sentences ("rejects_offset_past_end"). cmocka asserts only on the main
 * thread. A test file includes this first; it brings cmocka's headers in their required order.
 */
#ifndef HR_TESTS_HRTEST_H
#define HR_TESTS_HRTEST_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "core/fault.h"
#include "headrace.h"

/* cmocka 1.1.5 writes "not ok 2 # SKIP name" for a skipped test, which readers of TAP take for a failure. */
#undef cmocka_run_group_tests
#define cmocka_run_group_tests(tests, setup, teardown) \
	run_group(#tests, tests, sizeof(tests) / sizeof((tests)[0]), setup, teardown)
#undef cmocka_run_group_tests_name
#define cmocka_run_group_tests_name(name, tests, setup, teardown) \
	run_group(name, tests, sizeof(tests) / sizeof((tests)[0]), setup, teardown)
int run_group(const char *name, const struct CMUnitTest *tests, size_t n, CMFixtureFunction setup,
	      CMFixtureFunction teardown);

/* A skip has a reason, in words as for printf; the summary reads it from the line before the result. */
#undef skip
#define skip_for(...)                                                                                        \
	do {                                                                                                 \
		printf("# " __VA_ARGS__);                                                                    \
		putchar('\n');                                                                               \
		_skip(__FILE__, __LINE__);                                                                   \
	} while (0)

/* Shows the library's own story when a call that must work does not. */
#define assert_ok(call)                                                                                      \
	do {                                                                                                 \
		int rc_ = (call);                                                                            \
		if (rc_)                                                                                     \
			fail_msg("%s: %s: %s", #call, hr_error_name(rc_), hr_error_last()->message);         \
	} while (0)

/* The call fails with this code, and the thread's last error says the same. */
#define assert_fails(call, expected)                                                                         \
	do {                                                                                                 \
		int rc_ = (call);                                                                            \
		if (rc_ != (expected))                                                                       \
			fail_msg("%s: gave %s, expected %s (%s)", #call, hr_error_name(rc_),                 \
				 hr_error_name(expected), hr_error_last()->message);                         \
		assert_int_equal(hr_error_last()->code, (expected));                                         \
	} while (0)

/* A new empty directory for this test; remove_tree() takes it away. In TMPDIR, or /var/tmp (a real disk). */
char *make_temp_dir(void);
void remove_tree(const char *path);
/* "<dir>/<name>" in new memory. */
char *path_in(const char *dir, const char *name);
void write_file(const char *path, const void *bytes, size_t n);

/* A small deterministic generator for tests: the same seed gives the same numbers everywhere. HR_SEED in the
 * environment overrides the seed; the one in use is printed as SEED=n. */
struct test_random {
	uint64_t state;
};
void test_random_start(struct test_random *random, uint64_t seed);
uint64_t test_random_next(struct test_random *random);
uint64_t test_random_below(struct test_random *random, uint64_t n); /* 0 .. n - 1 */

/* Fills memory with bytes that depend on `seed` and on the position, so that a shifted or swapped range shows. */
void fill_pattern(void *memory, size_t n, uint64_t seed, uint64_t position);

/* A safetensors file made of tensors with pattern bytes. Names are unique; data of tensor i is fill_pattern(seed +
 * i, 0). */
struct test_tensor {
	const char *name;
	const char *dtype; /* "U8" ... */
	uint64_t bytes;    /* shape is [bytes / element size] */
};
void write_safetensors(const char *path, const struct test_tensor *tensors, size_t n, uint64_t seed);

#endif
