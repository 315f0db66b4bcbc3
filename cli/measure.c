/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the process used: wall clock, CPU time, memory. All from outside the library, so that the figures
 * do not depend on what it says of itself.
 */
#include "work.h"

#include <fcntl.h>
#include <inttypes.h>
#include <sched.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

uint64_t cli_now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

static uint64_t timeval_ns(struct timeval t)
{
	return (uint64_t)t.tv_sec * UINT64_C(1000000000) + (uint64_t)t.tv_usec * 1000;
}

uint64_t cli_cpu_ns(void)
{
	struct rusage usage;

	if (getrusage(RUSAGE_SELF, &usage))
		return 0;
	return timeval_ns(usage.ru_utime) + timeval_ns(usage.ru_stime);
}

uint64_t cli_status_bytes(const char *field)
{
	FILE *file = fopen("/proc/self/status", "re");
	uint64_t kib = 0;
	char line[256];

	if (!file)
		return 0;
	while (fgets(line, sizeof(line), file)) {
		if (strncmp(line, field, strlen(field)) == 0 && sscanf(line + strlen(field), "%" SCNu64, &kib) == 1)
			break;
	}
	fclose(file);
	return kib * 1024;
}

bool cli_peak_reset(void)
{
	int fd = open("/proc/self/clear_refs", O_WRONLY | O_CLOEXEC);
	bool is_done;

	if (fd < 0)
		return false;
	is_done = write(fd, "5", 1) == 1;
	close(fd);
	return is_done;
}

unsigned cli_cpus(void)
{
	cpu_set_t set;
	int n;

	if (sched_getaffinity(0, sizeof(set), &set))
		return 1;
	n = CPU_COUNT(&set);
	return n > 0 ? (unsigned)n : 1;
}

double cli_rate(uint64_t bytes, uint64_t ns)
{
	return ns ? (double)bytes / (double)ns : 0;
}
