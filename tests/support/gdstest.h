/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the tests of reads straight into GPU memory share: the look-alikes, and when to leave the tests out. The kernel
 * has what the library looks for where HR_FAKE_ROOT says so (fake_kernel.c). Each program includes this once.
 */
#ifndef HR_TESTS_GDSTEST_H
#define HR_TESTS_GDSTEST_H

#include "loadtest.h"

#include "fakes/fake_cuda.h"
#include "fakes/fake_cufile.h"

#define MIB (UINT64_C(1) << 20)

static struct fake_cuda cuda;
static struct fake_cufile cufile;
static bool has_fake_cuda, has_fake_cufile;

/* Whether both libraries are there, as look-alikes or real; says so if not. */
static inline bool find_libraries(void)
{
	has_fake_cuda = fake_cuda_find(&cuda);
	has_fake_cufile = fake_cufile_find(&cufile);
	if (dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL) && dlopen("libcufile.so.0", RTLD_NOW | RTLD_LOCAL))
		return true;
	printf("1..0 # SKIP no CUDA driver or no cuFile library on this machine\n");
	return false;
}

/* Nobody has made a mistake that the look-alikes know of, and nothing is left. */
static inline void assert_no_complaint(void)
{
	char text[256] = "";

	if (has_fake_cufile && cufile.errors(text, sizeof(text)))
		fail_msg("the look-alike cuFile complains: %s", text);
	if (has_fake_cuda && cuda.errors(text, sizeof(text)))
		fail_msg("the look-alike driver complains: %s", text);
	if (has_fake_cufile)
		assert_int_equal(cufile.live(NULL), 0);
	if (has_fake_cuda)
		assert_int_equal(cuda.live(NULL), 0);
}

static inline int reset_fakes(void **state)
{
	(void)state;
	if (has_fake_cufile)
		cufile.reset();
	if (has_fake_cuda)
		cuda.reset();
	hr__fault_arm(NULL, 0, 0);
	return 0;
}

#endif
