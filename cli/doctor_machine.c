/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Checks of the machine and of what this process may use of it: kernel, io_uring, limits, CPUs, memory, container.
 */
#include "doctor.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>

#define KERNEL_NEEDED   4014 /* MADV_WIPEONFORK */
#define KERNEL_READS    5006 /* io_uring's plain reads */
#define KERNEL_MEMLOCK  5012 /* the ring itself is no longer counted against memlock */
#define KERNEL_ALIGN    6001 /* statx tells the alignment of direct reads; deferred task work */
#define FEW_CPUS        4
#define FEW_SPARE_FILES 256
#define LEAST_FILES     64
#define SHM_OF_DOCKER   (UINT64_C(64) << 20)

DOCTOR_JUDGE(kernel)
{
	unsigned number = doctor_kernel_number(facts->kernel);

	if (!number)
		doctor_say(finding, DOCTOR_NONE, "the kernel does not tell its version");
	else if (number < KERNEL_NEEDED) {
		doctor_say(finding, DOCTOR_FAIL, "%s is older than 4.14, which loading needs", facts->kernel);
		doctor_advise(finding, "use a newer kernel; 6.1 and later have all that headrace can use");
	} else if (number < KERNEL_READS) {
		doctor_say(finding, DOCTOR_WARN, "%s is older than 5.6: its io_uring cannot do plain reads",
			   facts->kernel);
		doctor_advise(finding, "use a newer kernel, or --engine pread");
	} else if (number < KERNEL_ALIGN)
		doctor_say(finding, DOCTOR_OK, "%s (6.1 and later also tell how direct reads must be aligned)",
			   facts->kernel);
	else
		doctor_say(finding, DOCTOR_OK, "%s", facts->kernel);
}

DOCTOR_JUDGE(uring)
{
	if (!facts->uring_reason[0]) {
		doctor_say(finding, DOCTOR_OK, "can be used: cold bytes cost little CPU time");
		return;
	}
	if (facts->uring_disabled == 2 || (facts->uring_disabled == 1 && !facts->may_admin)) {
		doctor_say(finding, DOCTOR_WARN,
			   "switched off by the sysctl kernel.io_uring_disabled = %d; threads of pread "
			   "read instead, with more CPU time",
			   facts->uring_disabled);
		doctor_advise(finding, "as root: sysctl kernel.io_uring_disabled=0, or put the group of this process "
				       "into kernel.io_uring_group");
	} else if (facts->seccomp == 2) {
		doctor_say(finding, DOCTOR_WARN,
			   "refused, most likely by the seccomp filter that this process runs under "
			   "(%s); threads of pread read instead, with more CPU time",
			   facts->uring_reason);
		doctor_advise(finding,
			      "run the container with a profile that allows io_uring_setup, io_uring_enter and "
			      "io_uring_register (docker: --security-opt seccomp=PROFILE.json)");
	} else {
		doctor_say(finding, DOCTOR_WARN, "%s; threads of pread read instead, with more CPU time",
			   facts->uring_reason);
		doctor_advise(finding, "use a kernel with io_uring (5.6 and later, CONFIG_IO_URING)");
	}
}

DOCTOR_JUDGE(memlock)
{
	bool counts_ring = doctor_kernel_number(facts->kernel) < KERNEL_MEMLOCK;
	char have[32], need[32];

	if (!facts->has_memlock || facts->uring_reason[0])
		doctor_say(finding, DOCTOR_NONE, "%s",
			   facts->has_memlock ? "only io_uring is counted against the limit, and it cannot be used"
					      : "the limit cannot be read");
	else if (facts->memlock == UINT64_MAX || facts->may_lock)
		doctor_say(finding, DOCTOR_OK, "%s",
			   facts->memlock == UINT64_MAX ? "no limit" : "not counted: this process has CAP_IPC_LOCK");
	else if (facts->memlock >= facts->staging_bytes)
		doctor_say(finding, DOCTOR_OK, "%s, and io_uring registers %s", cli_human(have, facts->memlock),
			   cli_human(need, facts->staging_bytes));
	else {
		doctor_say(finding, DOCTOR_WARN,
			   "%s, less than the %s of staging memory that io_uring would register: it works without, "
			   "with a little more CPU time%s (memory for a GPU is pinned by its driver and not counted)",
			   cli_human(have, facts->memlock), cli_human(need, facts->staging_bytes),
			   counts_ring ? "; before Linux 5.12 the ring itself counts too and can be refused" : "");
		doctor_advise(finding,
			      "ulimit -l unlimited; docker: --ulimit memlock=-1; systemd: LimitMEMLOCK=infinity");
	}
}

/* A shard takes two descriptors, one for each way through the page cache. */
DOCTOR_JUDGE(files)
{
	uint64_t need = 2 * (uint64_t)facts->n_shards + LEAST_FILES;
	enum doctor_verdict verdict = DOCTOR_OK;

	if (!facts->has_files) {
		doctor_say(finding, DOCTOR_NONE, "the limit cannot be read");
		return;
	}
	if (facts->files < need || facts->model_errno == EMFILE)
		verdict = DOCTOR_FAIL;
	else if (facts->n_shards && facts->files < need + FEW_SPARE_FILES)
		verdict = DOCTOR_WARN;
	if (facts->files == UINT64_MAX)
		doctor_say(finding, verdict, "no limit");
	else if (facts->n_shards)
		doctor_say(finding, verdict, "%" PRIu64 " may be open; %" PRIu32 " shard%s take%s %" PRIu32,
			   facts->files, facts->n_shards, facts->n_shards == 1 ? "" : "s",
			   facts->n_shards == 1 ? "s" : "", 2 * facts->n_shards);
	else
		doctor_say(finding, verdict, "%" PRIu64 " may be open; each shard takes two", facts->files);
	if (verdict != DOCTOR_OK && facts->files_hard > facts->files)
		doctor_advise(finding, "ulimit -n %" PRIu64, need + FEW_SPARE_FILES);
	else if (verdict != DOCTOR_OK)
		doctor_advise(finding, "docker: --ulimit nofile=65536; systemd: LimitNOFILE=65536");
}

DOCTOR_JUDGE(cpus)
{
	double usable = facts->cpus_allowed;

	if (!facts->cpus_allowed) {
		doctor_say(finding, DOCTOR_NONE, "the kernel does not tell which CPUs this process may use");
		return;
	}
	if (facts->cpu_quota > 0 && facts->cpu_quota < usable) {
		usable = facts->cpu_quota;
		doctor_say(finding, usable < FEW_CPUS ? DOCTOR_WARN : DOCTOR_OK,
			   "a cgroup allows the time of %.1f CPUs; %u are there, this process may run on %u",
			   facts->cpu_quota, facts->cpus_online, facts->cpus_allowed);
	} else {
		doctor_say(finding, usable < FEW_CPUS ? DOCTOR_WARN : DOCTOR_OK, "this process may use %u of %u",
			   facts->cpus_allowed, facts->cpus_online);
	}
	if (usable < FEW_CPUS)
		doctor_advise(finding, "copying from the page cache takes CPU time: %s",
			      facts->cpu_quota > 0 && facts->cpu_quota < facts->cpus_allowed
				      ? "raise the quota (docker: --cpus, Kubernetes: limits.cpu)"
			      : facts->cpus_allowed < facts->cpus_online ? "allow more of them (taskset, --cpuset-cpus)"
									 : "a machine with more of them loads faster");
}

DOCTOR_JUDGE(cgroup)
{
	uint64_t left = facts->cgroup_limit - facts->cgroup_used;
	char limit[32], used[32];

	if (!facts->cgroup_limit) {
		doctor_say(finding, facts->cgroup_version ? DOCTOR_OK : DOCTOR_NONE, "%s",
			   facts->cgroup_version ? "none" : "there is no memory controller here");
		return;
	}
	doctor_say(finding, left < 4 * facts->staging_bytes ? DOCTOR_WARN : DOCTOR_OK,
		   "%s, of which %s are in use (version %u; page cache counts too, and is dropped when it must be)",
		   cli_human(limit, facts->cgroup_limit), cli_human(used, facts->cgroup_used), facts->cgroup_version);
	if (finding->verdict == DOCTOR_WARN)
		doctor_advise(finding,
			      "raise it (docker: --memory, Kubernetes: limits.memory), or use a smaller --staging");
}

DOCTOR_JUDGE(huge_pages)
{
	if (!facts->huge_pages[0])
		doctor_say(finding, DOCTOR_NONE, "this kernel has no transparent huge pages");
	else if (strcmp(facts->huge_pages, "never") == 0) {
		doctor_say(finding, DOCTOR_WARN,
			   "transparent huge pages are off (never): setting up staging memory and new "
			   "memory on cpu takes longer");
		doctor_advise(finding, "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled");
	} else
		doctor_say(finding, DOCTOR_OK, "transparent huge pages: %s", facts->huge_pages);
}

DOCTOR_JUDGE(container)
{
	char shm[32];

	if (!facts->container[0] && !facts->is_root_overlay) {
		doctor_say(finding, DOCTOR_NONE, "no sign of one");
		return;
	}
	doctor_say(finding, DOCTOR_OK, "%s, /dev/shm has %s",
		   facts->container[0] ? facts->container : "an overlay is the root", cli_human(shm, facts->shm_bytes));
	if (facts->shm_bytes > SHM_OF_DOCKER || !facts->to_gpu)
		return;
	finding->verdict = DOCTOR_WARN;
	doctor_advise(finding, "headrace does not use it, but engines with several ranks do: docker run --ipc=host, or "
			       "--shm-size=8g");
}
