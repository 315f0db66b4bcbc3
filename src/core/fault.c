/* SPDX-License-Identifier: Apache-2.0 */
#include "fault.h"

#ifdef HR_TEST
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>

static const char *_Atomic armed_point;
static _Atomic uint64_t armed_n, passed;
static _Atomic int armed_errno, fired;

int hr__fault(const char *point)
{
	const char *wanted = armed_point;

	if (armed_n == 0)
		return 0;
	if (wanted ? strcmp(wanted, point) != 0 : strcmp(point, "malloc") == 0)
		return 0;
	if (++passed != armed_n)
		return 0;
	fired = 1;
	return armed_errno;
}

void hr__fault_arm(const char *point, uint64_t n, int errno_value)
{
	armed_n = 0;
	armed_point = point;
	armed_errno = errno_value;
	passed = 0;
	fired = 0;
	armed_n = n;
}

int hr__fault_fired(void)
{
	return fired;
}
#else
typedef int hr__fault_is_for_tests; /* ISO C wants a declaration */
#endif
