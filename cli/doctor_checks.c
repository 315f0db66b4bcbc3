/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The table of checks, in the order in which they are printed, and what all of them use. Each check is a pure function:
 * the same facts give the same finding, so that every verdict can be forced by a test. docs/doctor.md describes each by
 * its id.
 */
#include "doctor.h"

#include <stdarg.h>

const struct doctor_check doctor_checks[] = {
	{"kernel", "Linux", false, doctor_judge_kernel},
	{"io_uring", "io_uring", false, doctor_judge_uring},
	{"memlock", "locked memory", false, doctor_judge_memlock},
	{"files", "open files", false, doctor_judge_files},
	{"cpus", "CPUs", false, doctor_judge_cpus},
	{"cgroup", "memory limit of the cgroup", false, doctor_judge_cgroup},
	{"huge_pages", "huge pages", false, doctor_judge_huge_pages},
	{"container", "container", false, doctor_judge_container},
	{"gpu", "NVIDIA GPU and driver", false, doctor_judge_gpu},
	{"cuda", "CUDA", false, doctor_judge_cuda},
	{"link", "PCIe link of the GPU", false, doctor_judge_link},
	{"numa", "nodes of memory", false, doctor_judge_numa},
	{"bar1", "BAR1 of the GPU", false, doctor_judge_bar1},
	{"gds", "GPUDirect Storage", false, doctor_judge_gds},
	{"ugds", "uGDS", false, doctor_judge_ugds},
	{"model", "the model", true, doctor_judge_model},
	{"memory", "room for the model", true, doctor_judge_memory},
	{"file_system", "file system", true, doctor_judge_fs},
	{"direct", "reads around the page cache", true, doctor_judge_direct},
	{"disk", "disk", true, doctor_judge_disk},
	{"page_cache", "page cache", true, doctor_judge_cache},
	{NULL, NULL, false, NULL},
};

const char *doctor_verdict_name(enum doctor_verdict verdict)
{
	static const char *const names[] = {"ok", "warn", "fail", "n/a"};

	return names[verdict];
}

void doctor_say(struct doctor_finding *finding, enum doctor_verdict verdict, const char *format, ...)
{
	va_list list;

	finding->verdict = verdict;
	finding->advice[0] = '\0';
	va_start(list, format);
	vsnprintf(finding->reason, sizeof(finding->reason), format, list);
	va_end(list);
}

void doctor_advise(struct doctor_finding *finding, const char *format, ...)
{
	va_list list;

	va_start(list, format);
	vsnprintf(finding->advice, sizeof(finding->advice), format, list);
	va_end(list);
}

unsigned doctor_kernel_number(const char *release)
{
	unsigned major, minor;

	if (sscanf(release, "%u.%u", &major, &minor) != 2 || minor > 999)
		return 0;
	return major * 1000 + minor;
}

uint64_t doctor_memory_left(const struct doctor_facts *facts)
{
	uint64_t left = facts->memory_available;

	if (facts->cgroup_limit && facts->cgroup_limit - facts->cgroup_used < left)
		left = facts->cgroup_limit - facts->cgroup_used;
	return left;
}
