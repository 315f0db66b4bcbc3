/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The doctor's checks, each forced to every verdict that it can give, from facts that are made up; and the facts, read
 * from trees that look like the /proc, /sys and /dev of machines that are not here: two nodes with a GPU, containers
 * under both versions of cgroups, nothing at all, and garbage.
 */
#include "hrtest.h"

#include "doctor.h"

#include <errno.h>
#include <sys/stat.h>
#include <unistd.h>

#define GIB (UINT64_C(1) << 30)
#define MIB (UINT64_C(1) << 20)

/* ---- judging ---- */

static bool seen[64][4]; /* by check and verdict */

/* A machine with a GPU on which everything is well, and a model on it. */
static struct doctor_facts good(void)
{
	struct doctor_facts f = {.kernel = "6.8.0-31-generic",
				 .cpus_online = 64,
				 .cpus_allowed = 64,
				 .memory_total = 512 * GIB,
				 .memory_available = 400 * GIB,
				 .cgroup_version = 2,
				 .huge_pages = "madvise",
				 .has_memlock = true,
				 .has_files = true,
				 .memlock = UINT64_MAX,
				 .files = 1048576,
				 .files_hard = 1048576,
				 .uring_disabled = 0,
				 .n_nodes = 2,
				 .allowed_nodes = 3,
				 .n_gpus = 1,
				 .gpus = {{"0000:17:00.0", 0, 256 * GIB, 16, 16}},
				 .has_modules = true,
				 .has_nvidia = true,
				 .has_uvm = true,
				 .has_nvidia_fs = true,
				 .driver = "580.95.05",
				 .has_nvidiactl = true,
				 .has_uvm_device = true,
				 .n_gpu_devices = 1,
				 .has_udev = true,
				 .path = "/data/model/a.safetensors",
				 .fs = "ext4",
				 .mount = "/data",
				 .disk = "nvme0n1",
				 .is_disk_known = true,
				 .to_gpu = true,
				 .device = {.size = sizeof(f.device),
					    .spec = "cuda:0",
					    .name = "NVIDIA H200",
					    .total_bytes = 140 * GIB,
					    .free_bytes = 139 * GIB,
					    .driver = 13000},
				 .shm_bytes = 64 * GIB,
				 .staging_bytes = 64 * MIB,
				 .has_model = true,
				 .model_bytes = 15 * GIB,
				 .model_needs = 15 * GIB,
				 .n_shards = 4,
				 .plan_bytes = 15 * GIB,
				 .direct_memory_align = 512,
				 .direct_offset_align = 512};

	return f;
}

static struct doctor_facts nothing(void)
{
	return (struct doctor_facts){.uring_disabled = -1, .disk_node = DOCTOR_NO_NODE};
}

static void expect(const struct doctor_facts *facts, const char *id, enum doctor_verdict verdict, const char *reason,
		   const char *advice)
{
	for (size_t i = 0; doctor_checks[i].id; i++) {
		struct doctor_finding finding = {.verdict = DOCTOR_NONE};

		if (strcmp(doctor_checks[i].id, id) != 0)
			continue;
		doctor_checks[i].judge(facts, &finding);
		if (finding.verdict != verdict || !strstr(finding.reason, reason) || !finding.reason[0] ||
		    (advice ? !strstr(finding.advice, advice) : finding.advice[0] != '\0'))
			fail_msg("%s: %s: '%s' -> '%s', expected %s with '%s' -> '%s'", id,
				 doctor_verdict_name(finding.verdict), finding.reason, finding.advice,
				 doctor_verdict_name(verdict), reason, advice ? advice : "");
		seen[i][verdict] = true;
		return;
	}
	fail_msg("there is no check '%s'", id);
}

static void a_good_machine_has_nothing_to_look_at(void **state)
{
	struct doctor_facts f = good();

	(void)state;
	for (const struct doctor_check *check = doctor_checks; check->id; check++) {
		struct doctor_finding finding = {.verdict = DOCTOR_NONE};

		check->judge(&f, &finding);
		if (finding.verdict == DOCTOR_WARN || finding.verdict == DOCTOR_FAIL)
			fail_msg("%s: %s", check->id, finding.reason);
	}
}

static void judges_kernels_by_what_they_lack(void **state)
{
	struct doctor_facts f = good(), none = nothing();

	(void)state;
	expect(&f, "kernel", DOCTOR_OK, "6.8.0-31-generic", NULL);
	expect(&none, "kernel", DOCTOR_NONE, "version", NULL);
	snprintf(f.kernel, sizeof(f.kernel), "5.15.0");
	expect(&f, "kernel", DOCTOR_OK, "6.1 and later", NULL);
	snprintf(f.kernel, sizeof(f.kernel), "5.4.0-150");
	expect(&f, "kernel", DOCTOR_WARN, "older than 5.6", "--engine pread");
	snprintf(f.kernel, sizeof(f.kernel), "3.10.0-1160.el7");
	expect(&f, "kernel", DOCTOR_FAIL, "older than 4.14", "newer kernel");
	snprintf(f.kernel, sizeof(f.kernel), "unreadable");
	expect(&f, "kernel", DOCTOR_NONE, "version", NULL);
}

static void tells_who_forbids_io_uring(void **state)
{
	struct doctor_facts f = good();

	(void)state;
	expect(&f, "io_uring", DOCTOR_OK, "can be used", NULL);
	snprintf(f.uring_reason, sizeof(f.uring_reason), "io_uring cannot be set up: Operation not permitted");
	expect(&f, "io_uring", DOCTOR_WARN, "Operation not permitted", "CONFIG_IO_URING");
	f.seccomp = 2;
	expect(&f, "io_uring", DOCTOR_WARN, "seccomp", "--security-opt");
	f.uring_disabled = 2;
	expect(&f, "io_uring", DOCTOR_WARN, "kernel.io_uring_disabled = 2", "sysctl");
	f.uring_disabled = 1;
	expect(&f, "io_uring", DOCTOR_WARN, "kernel.io_uring_disabled = 1", "io_uring_group");
	f.may_admin = true;
	expect(&f, "io_uring", DOCTOR_WARN, "seccomp", "--security-opt");
}

static void counts_locked_memory_only_where_the_kernel_does(void **state)
{
	struct doctor_facts f = good(), none = nothing();

	(void)state;
	expect(&f, "memlock", DOCTOR_OK, "no limit", NULL);
	expect(&none, "memlock", DOCTOR_NONE, "cannot be read", NULL);
	f.memlock = 64 * MIB;
	expect(&f, "memlock", DOCTOR_OK, "64.0 MiB", NULL);
	f.memlock = 8 * MIB;
	expect(&f, "memlock", DOCTOR_WARN, "less than the 64.0 MiB", "ulimit -l unlimited");
	snprintf(f.kernel, sizeof(f.kernel), "5.10.0");
	expect(&f, "memlock", DOCTOR_WARN, "the ring itself counts too", "LimitMEMLOCK");
	f.may_lock = true;
	expect(&f, "memlock", DOCTOR_OK, "CAP_IPC_LOCK", NULL);
	snprintf(f.uring_reason, sizeof(f.uring_reason), "no");
	expect(&f, "memlock", DOCTOR_NONE, "io_uring", NULL);
}

static void counts_descriptors_against_shards(void **state)
{
	struct doctor_facts f = good(), none = nothing();

	(void)state;
	expect(&f, "files", DOCTOR_OK, "4 shards take 8", NULL);
	expect(&none, "files", DOCTOR_NONE, "cannot be read", NULL);
	f.files = 1024;
	f.n_shards = 1433;
	expect(&f, "files", DOCTOR_FAIL, "1433 shards take 2866", "ulimit -n 3186");
	f.files_hard = 1024;
	expect(&f, "files", DOCTOR_FAIL, "1024 may be open", "LimitNOFILE");
	f.n_shards = 400;
	expect(&f, "files", DOCTOR_WARN, "400 shards", "nofile");
	f.n_shards = 0;
	f.model_errno = EMFILE;
	expect(&f, "files", DOCTOR_FAIL, "each shard takes two", "nofile");
	f.model_errno = 0;
	f.files = UINT64_MAX;
	expect(&f, "files", DOCTOR_OK, "no limit", NULL);
}

static void counts_cpus_by_affinity_and_quota(void **state)
{
	struct doctor_facts f = good(), none = nothing();

	(void)state;
	expect(&f, "cpus", DOCTOR_OK, "64 of 64", NULL);
	expect(&none, "cpus", DOCTOR_NONE, "does not tell", NULL);
	f.cpu_quota = 8;
	expect(&f, "cpus", DOCTOR_OK, "time of 8.0 CPUs", NULL);
	f.cpu_quota = 1.5;
	expect(&f, "cpus", DOCTOR_WARN, "time of 1.5 CPUs", "limits.cpu");
	f.cpu_quota = 0;
	f.cpus_allowed = 2;
	expect(&f, "cpus", DOCTOR_WARN, "2 of 64", "taskset");
	f.cpus_online = 2;
	expect(&f, "cpus", DOCTOR_WARN, "2 of 2", "a machine with more");
}

static void knows_the_limits_of_a_cgroup(void **state)
{
	struct doctor_facts f = good(), none = nothing();

	(void)state;
	expect(&f, "cgroup", DOCTOR_OK, "none", NULL);
	expect(&none, "cgroup", DOCTOR_NONE, "no memory controller", NULL);
	f.cgroup_limit = 8 * GIB;
	f.cgroup_used = 1 * GIB;
	expect(&f, "cgroup", DOCTOR_OK, "8.00 GiB", NULL);
	f.cgroup_used = 8 * GIB - 100 * MIB;
	expect(&f, "cgroup", DOCTOR_WARN, "8.00 GiB", "--memory");
}

static void looks_at_huge_pages(void **state)
{
	struct doctor_facts f = good(), none = nothing();

	(void)state;
	expect(&f, "huge_pages", DOCTOR_OK, "madvise", NULL);
	expect(&none, "huge_pages", DOCTOR_NONE, "no transparent", NULL);
	snprintf(f.huge_pages, sizeof(f.huge_pages), "never");
	expect(&f, "huge_pages", DOCTOR_WARN, "never", "echo madvise");
}

static void knows_a_container(void **state)
{
	struct doctor_facts f = good();

	(void)state;
	expect(&f, "container", DOCTOR_NONE, "no sign", NULL);
	f.is_root_overlay = true;
	expect(&f, "container", DOCTOR_OK, "overlay", NULL);
	snprintf(f.container, sizeof(f.container), "docker");
	expect(&f, "container", DOCTOR_OK, "docker", NULL);
	f.shm_bytes = 64 * MIB;
	expect(&f, "container", DOCTOR_WARN, "64.0 MiB", "--shm-size");
	f.to_gpu = false;
	expect(&f, "container", DOCTOR_OK, "64.0 MiB", NULL);
}

static void finds_what_keeps_a_gpu_from_use(void **state)
{
	struct doctor_facts f = good(), none = nothing();

	(void)state;
	expect(&f, "gpu", DOCTOR_OK, "NVIDIA H200, driver 580.95.05", NULL);
	snprintf(none.cuda_reason, sizeof(none.cuda_reason), "no usable CUDA driver");
	expect(&none, "gpu", DOCTOR_NONE, "no NVIDIA GPU on this machine", NULL);
	none.wants_gpu = true;
	expect(&none, "gpu", DOCTOR_FAIL, "no NVIDIA GPU on this machine", "--device cpu");
	f.to_gpu = false;
	expect(&f, "gpu", DOCTOR_OK, "not asked for", NULL);
	f.wants_gpu = true;
	snprintf(f.device_error, sizeof(f.device_error), "there is no cuda:9");
	expect(&f, "gpu", DOCTOR_FAIL, "there is no cuda:9", NULL);
	f.wants_gpu = false;
	snprintf(f.cuda_reason, sizeof(f.cuda_reason), "libcuda.so.1: cannot open shared object file");
	expect(&f, "gpu", DOCTOR_WARN, "libcuda.so.1", "NVIDIA_DRIVER_CAPABILITIES");
	f.wants_gpu = true;
	expect(&f, "gpu", DOCTOR_FAIL, "libcuda.so.1", "NVIDIA_DRIVER_CAPABILITIES");
	f.has_uvm_device = false;
	expect(&f, "gpu", DOCTOR_FAIL, "/dev/nvidia-uvm is not there: CUDA", "modprobe nvidia-uvm");
	f.has_uvm = false;
	expect(&f, "gpu", DOCTOR_FAIL, "nvidia_uvm is not loaded", "modprobe nvidia-uvm");
	f.has_nvidiactl = false;
	expect(&f, "gpu", DOCTOR_FAIL, "/dev/nvidiactl is not there", "nvidia-modprobe");
	f.is_root_overlay = true;
	expect(&f, "gpu", DOCTOR_FAIL, "container was not given the GPU", "--gpus all");
	f.has_nvidia = false;
	expect(&f, "gpu", DOCTOR_FAIL, "module nvidia is not loaded", "modprobe nvidia");
	f.has_nouveau = true;
	expect(&f, "gpu", DOCTOR_FAIL, "nouveau has taken it", "blacklisted");
}

static void judges_cuda_and_the_link(void **state)
{
	struct doctor_facts f = good(), none = nothing();

	(void)state;
	expect(&f, "cuda", DOCTOR_OK, "CUDA 13.0", NULL);
	f.device.driver = 12040;
	expect(&f, "cuda", DOCTOR_WARN, "CUDA 12.4", "12.8 or later");
	expect(&none, "cuda", DOCTOR_NONE, "no GPU", NULL);
	expect(&f, "link", DOCTOR_OK, "x16", NULL);
	f.n_gpus = 2;
	f.gpus[1] = (struct doctor_gpu){"0000:2a:00.0", 1, 256 * GIB, 8, 16};
	expect(&f, "link", DOCTOR_WARN, "0000:2a:00.0 has 8 of 16 lanes", "seat");
	expect(&none, "link", DOCTOR_NONE, "no NVIDIA GPU", NULL);
	f.n_gpus = 1;
	f.gpus[0].link_width = 0;
	expect(&f, "link", DOCTOR_NONE, "does not tell", NULL);
}

static void finds_bytes_that_cross_between_nodes(void **state)
{
	struct doctor_facts f = good(), none = nothing();

	(void)state;
	expect(&none, "numa", DOCTOR_NONE, "one node", NULL);
	f.disk_node = 0;
	expect(&f, "numa", DOCTOR_OK, "node 0 of 2, and so is the disk", "numactl");
	f.disk_node = 1;
	expect(&f, "numa", DOCTOR_WARN, "the disk nvme0n1 at node 1", "disk of node 0");
	f.allowed_nodes = 2;
	expect(&f, "numa", DOCTOR_WARN, "CPUs of others", "--cpunodebind=0");
	f.n_gpus = 2;
	f.gpus[1] = (struct doctor_gpu){"0000:2a:00.0", 1, 256 * GIB, 16, 16};
	expect(&f, "numa", DOCTOR_OK, "GPUs at several", "nvidia-smi topo");
	f.n_gpus = 0;
	expect(&f, "numa", DOCTOR_OK, "no GPU", NULL);
}

static void tells_what_gpudirect_storage_lacks(void **state)
{
	struct doctor_facts f = good(), none = nothing();

	(void)state;
	expect(&f, "bar1", DOCTOR_OK, "256.0 GiB", NULL);
	expect(&none, "bar1", DOCTOR_NONE, "no NVIDIA GPU", NULL);
	f.gpus[0].bar1_bytes = 256 * MIB;
	expect(&f, "bar1", DOCTOR_WARN, "256.0 MiB", "Resizable BAR");
	f.gpus[0].bar1_bytes = 0;
	expect(&f, "bar1", DOCTOR_NONE, "does not tell", NULL);
	expect(&f, "gds", DOCTOR_OK, "nvidia_fs", NULL);
	expect(&none, "gds", DOCTOR_NONE, "no GPU", NULL);
	f.has_udev = false;
	expect(&f, "gds", DOCTOR_WARN, "/run/udev/data", "-v /run/udev");
	f.has_nvidia_fs = false;
	expect(&f, "gds", DOCTOR_NONE, "nvidia_fs is not loaded", "nvidia-gds");
	expect(&none, "ugds", DOCTOR_NONE, "no GPU", NULL);
	expect(&f, "ugds", DOCTOR_NONE, "ugds_drv is not loaded", NULL);
	f.has_ugds = true;
	expect(&f, "ugds", DOCTOR_WARN, "has no disk", "bind");
	f.has_ugds_disk = true;
	expect(&f, "ugds", DOCTOR_OK, "has a disk", "--ugds");
	f.has_modules = false;
	expect(&f, "gds", DOCTOR_NONE, "/proc/modules", NULL);
}

static void judges_the_model_and_its_room(void **state)
{
	struct doctor_facts f = good(), none = nothing();

	(void)state;
	expect(&f, "model", DOCTOR_OK, "15.0 GiB in 4 shards", NULL);
	expect(&none, "model", DOCTOR_NONE, "no model", NULL);
	expect(&f, "memory", DOCTOR_OK, "15.0 GiB of the 139.0 GiB", NULL);
	expect(&none, "memory", DOCTOR_NONE, "no model", NULL);
	f.model_needs = 200 * GIB;
	expect(&f, "memory", DOCTOR_FAIL, "cuda:0 has 139.0 GiB", "--only");
	f.to_gpu = false;
	expect(&f, "memory", DOCTOR_OK, "of the 400.0 GiB", NULL);
	f.cgroup_limit = 100 * GIB;
	expect(&f, "memory", DOCTOR_FAIL, "the machine has 100.0 GiB", "free memory");
	f.to_gpu = true;
	f.model_needs = 15 * GIB;
	f.cgroup_limit = 100 * MIB;
	expect(&f, "memory", DOCTOR_WARN, "100.0 MiB of host memory", "--staging");
	f.device.free_bytes = 0;
	expect(&f, "memory", DOCTOR_NONE, "not known", NULL);
	f.has_model = false;
	snprintf(f.model_error, sizeof(f.model_error), "shard 3 is cut");
	expect(&f, "model", DOCTOR_FAIL, "shard 3 is cut", "headrace check");
	expect(&f, "memory", DOCTOR_NONE, "cannot be opened", NULL);
	f.model_errno = EMFILE;
	expect(&f, "model", DOCTOR_FAIL, "shard 3 is cut", "open files");
}

static void judges_the_file_system(void **state)
{
	struct doctor_facts f = good(), none = nothing();

	(void)state;
	expect(&f, "file_system", DOCTOR_OK, "ext4 at /data", NULL);
	expect(&none, "file_system", DOCTOR_NONE, "no model", NULL);
	snprintf(f.fs, sizeof(f.fs), "nfs4");
	expect(&f, "file_system", DOCTOR_WARN, "one connection", "nconnect=8");
	snprintf(f.mount_options, sizeof(f.mount_options), "rw,vers=4.2,nconnect=16");
	expect(&f, "file_system", DOCTOR_OK, "a network's", NULL);
	snprintf(f.fs, sizeof(f.fs), "overlay");
	expect(&f, "file_system", DOCTOR_WARN, "overlay", "volume");
	snprintf(f.fs, sizeof(f.fs), "tmpfs");
	expect(&f, "file_system", DOCTOR_OK, "in memory", NULL);
	f.fs[0] = '\0';
	expect(&f, "file_system", DOCTOR_NONE, "not known", NULL);
}

static void judges_direct_reads_and_the_disk(void **state)
{
	struct doctor_facts f = good(), none = nothing();

	(void)state;
	expect(&f, "direct", DOCTOR_OK, "blocks of 512 bytes", NULL);
	expect(&none, "direct", DOCTOR_NONE, "no model", NULL);
	f.direct_offset_align = 0;
	expect(&f, "direct", DOCTOR_OK, "4096", NULL);
	f.direct_offset_align = 1048576;
	expect(&f, "direct", DOCTOR_WARN, "1048576", "--slot 2097152");
	f.direct_errno = EINVAL;
	expect(&f, "direct", DOCTOR_WARN, "refused by ext4", "ext4 or XFS");
	snprintf(f.fs, sizeof(f.fs), "tmpfs");
	expect(&f, "direct", DOCTOR_NONE, "tmpfs is the page cache", NULL);
	expect(&f, "disk", DOCTOR_OK, "nvme0n1", NULL);
	expect(&none, "disk", DOCTOR_NONE, "no model", NULL);
	f.is_stacked = true;
	expect(&f, "disk", DOCTOR_OK, "stacked", NULL);
	f.is_rotational = true;
	expect(&f, "disk", DOCTOR_WARN, "turns", "SSD");
	snprintf(f.disk, sizeof(f.disk), "vda");
	expect(&f, "disk", DOCTOR_OK, "virtual", NULL);
	f.is_disk_known = false;
	expect(&f, "disk", DOCTOR_NONE, "no disk", NULL);
}

static void tells_how_cold_bytes_are_read(void **state)
{
	struct doctor_facts f = good(), none = nothing();

	(void)state;
	expect(&none, "page_cache", DOCTOR_NONE, "no model", NULL);
	expect(&f, "page_cache", DOCTOR_OK, "0 % of the model is in it; cold bytes are read through", NULL);
	f.resident_bytes = f.plan_bytes / 2;
	f.cgroup_limit = 16 * GIB;
	expect(&f, "page_cache", DOCTOR_OK, "50 % of the model is in it; cold bytes are read around", NULL);
	f.plan_bytes = 0;
	expect(&f, "page_cache", DOCTOR_NONE, "no bytes", NULL);
	snprintf(f.block, sizeof(f.block), "7:0");
	expect(&f, "page_cache", DOCTOR_NONE, "around it", NULL);
	snprintf(f.disk, sizeof(f.disk), "loop0");
	f.is_rotational = true;
	expect(&f, "disk", DOCTOR_OK, "loop0 (a virtual disk)", NULL);
}

/* Runs last: a check that can only say "ok" is none. */
static void every_check_was_forced_to_every_kind_of_verdict(void **state)
{
	(void)state;
	for (size_t i = 0; doctor_checks[i].id; i++) {
		bool is_told = strcmp(doctor_checks[i].id, "page_cache") == 0; /* says what is, not what should be */

		if (!seen[i][DOCTOR_OK] || (!is_told && !seen[i][DOCTOR_WARN] && !seen[i][DOCTOR_FAIL]) ||
		    (!seen[i][DOCTOR_NONE] && strcmp(doctor_checks[i].id, "io_uring") != 0))
			fail_msg("%s was not forced to ok, to warn or fail, and to n/a", doctor_checks[i].id);
	}
}

/* ---- reading ---- */

struct tree {
	char *root;
};

static int new_tree(void **state)
{
	struct tree *tree = calloc(1, sizeof(*tree));

	tree->root = make_temp_dir();
	*state = tree;
	return 0;
}

static int free_tree(void **state)
{
	struct tree *tree = *state;

	remove_tree(tree->root);
	free(tree->root);
	free(tree);
	return 0;
}

/* With all folders above it. */
static void make_parents(char *path)
{
	for (char *slash = strchr(path + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
		*slash = '\0';
		mkdir(path, 0700);
		*slash = '/';
	}
}

static void put(const struct tree *tree, const char *path, const char *text)
{
	char *full = cli_text("%s%s", tree->root, path);

	make_parents(full);
	write_file(full, text, strlen(text));
	free(full);
}

static void put_link(const struct tree *tree, const char *path, const char *target)
{
	char *full = cli_text("%s%s", tree->root, path);

	make_parents(full);
	assert_int_equal(symlink(target, full), 0);
	free(full);
}

#define STATUS                                                                                                         \
	"Name:\theadrace\nCapEff:\t0000000000000000\nSeccomp:\t2\nCpus_allowed:\tff\nCpus_allowed_list:\t64-71,200\n"
#define LIMITS                                                                                                         \
	"Limit                     Soft Limit           Hard Limit           Units     \n"                                 \
	"Max open files            1024                 524288               files     \n"                                 \
	"Max locked memory         8388608              unlimited            bytes     \n"

static void put_machine(const struct tree *tree)
{
	put(tree, "/proc/sys/kernel/osrelease", "6.8.0-31-generic\n");
	put(tree, "/proc/sys/kernel/io_uring_disabled", "1\n");
	put(tree, "/proc/self/status", STATUS);
	put(tree, "/proc/self/limits", LIMITS);
	put(tree, "/proc/meminfo", "MemTotal:       1000 kB\nMemFree:  1 kB\nMemAvailable:   600 kB\n");
	put(tree, "/sys/devices/system/cpu/online", "0-255\n");
	put(tree, "/sys/devices/system/node/online", "0-1\n");
	put(tree, "/sys/devices/system/node/node0/cpulist", "0-63,128-191\n");
	put(tree, "/sys/devices/system/node/node1/cpulist", "64-127,192-255\n");
	put(tree, "/sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n");
}

static void reads_a_machine(void **state)
{
	struct doctor_facts f = {0};
	const struct tree *tree = *state;

	put_machine(tree);
	doctor_files_read(tree->root, &f);
	assert_string_equal(f.kernel, "6.8.0-31-generic");
	assert_int_equal(f.uring_disabled, 1);
	assert_int_equal(f.seccomp, 2);
	assert_false(f.may_lock || f.may_admin);
	assert_int_equal(f.cpus_allowed, 9);
	assert_int_equal(f.cpus_online, 256);
	assert_int_equal(f.n_nodes, 2);
	assert_int_equal(f.allowed_nodes, 2); /* CPUs beyond the 64th count as well */
	assert_true(f.has_files && f.has_memlock);
	assert_int_equal(f.files, 1024);
	assert_int_equal(f.files_hard, 524288);
	assert_int_equal(f.memlock, 8388608);
	assert_int_equal(f.memory_total, 1000 * 1024);
	assert_int_equal(f.memory_available, 600 * 1024);
	assert_string_equal(f.huge_pages, "madvise");
	assert_int_equal(f.n_gpus, 0);
}

static void put_gpu(const struct tree *tree, const char *address, const char *node)
{
	char *folder = cli_text("/sys/bus/pci/devices/%s", address);
	const char *const files[][2] = {{"vendor", "0x10de\n"},
					{"class", "0x030200\n"},
					{"numa_node", node},
					{"current_link_width", "8\n"},
					{"max_link_width", "16\n"},
					{"resource", "0x00000000a0000000 0x00000000a0ffffff 0x0000000000040200\n"
						     "0x000000c000000000 0x000000dfffffffff 0x000000000014220c\n"}};

	for (size_t i = 0; i < CLI_N(files); i++) {
		char *path = cli_text("%s/%s", folder, files[i][0]);

		put(tree, path, files[i][1]);
		free(path);
	}
	free(folder);
}

static void reads_gpus_and_their_driver(void **state)
{
	struct doctor_facts f = {0};
	const struct tree *tree = *state;

	put_gpu(tree, "0000:17:00.0", "1\n");
	put(tree, "/sys/bus/pci/devices/0000:17:00.1/vendor", "0x10de\n"); /* its sound */
	put(tree, "/sys/bus/pci/devices/0000:17:00.1/class", "0x040300\n");
	put(tree, "/sys/bus/pci/devices/0000:00:02.0/vendor", "0x8086\n");
	put(tree, "/sys/bus/pci/devices/0000:00:02.0/class", "0x030000\n");
	put(tree, "/proc/modules",
	    "nvidia_uvm 1 0 - Live 0x0\nnvidia 2 1 nvidia_uvm, Live 0x0\nnvidia_fs 3 0 - Live 0x0\n");
	put(tree, "/proc/driver/nvidia/version",
	    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs-builder@U22)\n"
	    "GCC version:  gcc version 12.3.0\n");
	put(tree, "/dev/nvidia0", "");
	put(tree, "/dev/nvidia1", "");
	put(tree, "/dev/nvidiactl", "");
	put(tree, "/dev/nvidia-uvm", "");
	put(tree, "/run/udev/data/b259:1", "");
	doctor_files_read(tree->root, &f);
	assert_int_equal(f.n_gpus, 1);
	assert_string_equal(f.gpus[0].address, "0000:17:00.0");
	assert_int_equal(f.gpus[0].node, 1);
	assert_int_equal(f.gpus[0].bar1_bytes, UINT64_C(128) << 30);
	assert_int_equal(f.gpus[0].link_width, 8);
	assert_int_equal(f.gpus[0].link_width_max, 16);
	assert_true(f.has_modules && f.has_nvidia && f.has_uvm && f.has_nvidia_fs && !f.has_nouveau);
	assert_string_equal(f.driver, "580.95.05");
	assert_int_equal(f.n_gpu_devices, 2);
	assert_true(f.has_nvidiactl && f.has_uvm_device && f.has_udev);
}

static void reads_limits_at_every_level_of_cgroups(void **state)
{
	struct doctor_facts f = {0};
	const struct tree *tree = *state;

	put(tree, "/proc/self/cgroup", "0::/pod/box\n");
	put(tree, "/sys/fs/cgroup/pod/box/memory.max", "max\n");
	put(tree, "/sys/fs/cgroup/pod/box/memory.current", "1\n");
	put(tree, "/sys/fs/cgroup/pod/box/cpu.max", "max 100000\n");
	put(tree, "/sys/fs/cgroup/pod/memory.max", "8000000\n");
	put(tree, "/sys/fs/cgroup/pod/memory.current", "5000000\n");
	put(tree, "/sys/fs/cgroup/pod/memory.stat", "anon 1\ninactive_file 3000000\n");
	put(tree, "/sys/fs/cgroup/pod/cpu.max", "150000 100000\n");
	put(tree, "/sys/fs/cgroup/memory.max", "900000000\n");
	put(tree, "/sys/fs/cgroup/memory.current", "6000000\n");
	put(tree, "/sys/fs/cgroup/cpu.max", "400000 100000\n");
	doctor_files_read(tree->root, &f);
	assert_int_equal(f.cgroup_version, 2);
	assert_int_equal(f.cgroup_limit, 8000000);
	assert_int_equal(f.cgroup_used, 2000000);
	assert_true(f.cpu_quota > 1.49 && f.cpu_quota < 1.51);
}

static void reads_a_docker_container_of_version_1(void **state)
{
	struct doctor_facts f = {0};
	const struct tree *tree = *state;

	put(tree, "/proc/self/cgroup", "11:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n1:name=systemd:/\n0::/\n");
	put(tree, "/sys/fs/cgroup/memory/memory.limit_in_bytes", "4000000\n"); /* all that a container sees */
	put(tree, "/sys/fs/cgroup/memory/memory.usage_in_bytes", "3000000\n");
	put(tree, "/sys/fs/cgroup/memory/memory.stat", "inactive_file 1\ntotal_inactive_file 2500000\n");
	put(tree, "/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "200000\n");
	put(tree, "/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
	put(tree, "/.dockerenv", "");
	put(tree, "/proc/self/mountinfo", "31 1 0:29 / / rw,relatime - overlay overlay rw,lowerdir=/x\n");
	doctor_files_read(tree->root, &f);
	assert_int_equal(f.cgroup_version, 1);
	assert_int_equal(f.cgroup_limit, 4000000);
	assert_int_equal(f.cgroup_used, 500000);
	assert_true(f.cpu_quota > 1.99 && f.cpu_quota < 2.01);
	assert_string_equal(f.container, "docker");
	assert_true(f.is_root_overlay);
}

static void no_limit_of_version_1_is_none(void **state)
{
	struct doctor_facts f = {0};
	const struct tree *tree = *state;

	put(tree, "/proc/self/cgroup", "4:memory:/\n3:cpu:/\n");
	put(tree, "/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
	put(tree, "/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n");
	put(tree, "/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
	doctor_files_read(tree->root, &f);
	assert_int_equal(f.cgroup_version, 1);
	assert_int_equal(f.cgroup_limit, 0);
	assert_true(f.cpu_quota == 0);
}

static const char mounts[] = "27 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n"
			     "40 27 259:1 / /data rw shared:1 - xfs /dev/nvme0n1p1 rw,attr2\n"
			     "41 40 0:50 / /data/my\\040models rw - nfs4 server:/m rw,nconnect=4\n"
			     "42 27 0:51 / /database rw - btrfs /dev/sdb rw\n"
			     "garbage\n";

static void finds_the_mount_and_the_disk_of_a_path(void **state)
{
	struct doctor_facts f = {.path = "/data/model/a.safetensors"};
	const struct tree *tree = *state;
	const char *disk = "/sys/devices/pci0000:16/0000:17:00.0/nvme/nvme0/nvme0n1";

	put(tree, "/proc/self/mountinfo", mounts);
	put(tree, "/sys/devices/pci0000:16/0000:17:00.0/nvme/nvme0/nvme0n1/nvme0n1p1/partition", "1\n");
	put(tree, "/sys/devices/pci0000:16/0000:17:00.0/nvme/nvme0/nvme0n1/queue/rotational", "0\n");
	put(tree, "/sys/devices/pci0000:16/0000:17:00.0/numa_node", "1\n");
	put_link(tree, "/sys/dev/block/259:1", "../../devices/pci0000:16/0000:17:00.0/nvme/nvme0/nvme0n1/nvme0n1p1");
	doctor_mounts_read(tree->root, &f);
	assert_string_equal(f.fs, "xfs");
	assert_string_equal(f.mount, "/data");
	assert_string_equal(f.disk, "nvme0n1p1");
	assert_int_equal(f.disk_node, 1);
	assert_true(f.is_disk_known && !f.is_rotational && !f.is_stacked);
	(void)disk;
	f = (struct doctor_facts){.path = "/data/my models/x"};
	doctor_mounts_read(tree->root, &f);
	assert_string_equal(f.fs, "nfs4");
	assert_string_equal(f.mount_options, "rw,nconnect=4");
	assert_false(f.is_disk_known);
	put(tree, "/sys/devices/virtual/block/dm-0/dm/name", "x\n");
	put(tree, "/sys/devices/virtual/block/dm-0/queue/rotational", "1\n");
	put_link(tree, "/sys/class/block/sdb", "../../devices/virtual/block/dm-0");
	f = (struct doctor_facts){.path = "/database/x"};
	doctor_mounts_read(tree->root, &f);
	assert_string_equal(f.fs, "btrfs"); /* with a device number of its own: by the name of its disk */
	assert_true(f.is_disk_known && f.is_rotational && f.is_stacked);
	assert_int_equal(f.disk_node, DOCTOR_NO_NODE);
	f = (struct doctor_facts){.path = "/dev/nvme0n1p1", .block = "259:1", .has_model = true}; /* a store's */
	doctor_mounts_read(tree->root, &f);
	assert_string_equal(f.disk, "nvme0n1p1");
	assert_string_equal(f.fs, "");
	expect(&f, "file_system", DOCTOR_OK, "block device /dev/nvme0n1p1", NULL);
	f = (struct doctor_facts){.path = "/etc/x"};
	doctor_mounts_read(tree->root, &f);
	assert_string_equal(f.fs, "ext4");
}

static void judge_all(const struct doctor_facts *facts)
{
	for (const struct doctor_check *check = doctor_checks; check->id; check++) {
		struct doctor_finding finding = {.verdict = DOCTOR_NONE};

		check->judge(facts, &finding);
		assert_true(finding.reason[0]);
	}
}

static void survives_a_machine_without_any_file(void **state)
{
	struct doctor_facts f = {0};
	const struct tree *tree = *state;

	doctor_files_read(tree->root, &f);
	assert_string_equal(f.kernel, "");
	assert_int_equal(f.uring_disabled, -1);
	judge_all(&f);
	f.has_model = true;
	judge_all(&f);
}

static void survives_garbage_in_every_file(void **state)
{
	static const char *const paths[] = {"/proc/sys/kernel/osrelease",
					    "/proc/sys/kernel/io_uring_disabled",
					    "/proc/self/status",
					    "/proc/self/limits",
					    "/proc/self/cgroup",
					    "/proc/self/mountinfo",
					    "/proc/meminfo",
					    "/proc/modules",
					    "/proc/driver/nvidia/version",
					    "/sys/devices/system/cpu/online",
					    "/sys/devices/system/node/online",
					    "/sys/fs/cgroup/memory.max",
					    "/sys/fs/cgroup/cpu.max",
					    "/sys/bus/pci/devices/0000:17:00.0/resource",
					    "/sys/kernel/mm/transparent_hugepage/enabled"};
	static const char *const pieces[] = {"\n",
					     " ",
					     "0::/",
					     ":",
					     " - ",
					     "[",
					     "]",
					     "0-4294967295",
					     "99999999999999999999",
					     "Max open files",
					     "Cpus_allowed_list:",
					     "NVRM version:",
					     "\\0",
					     "\\777",
					     "/",
					     "../",
					     "MemAvailable: ",
					     "-1",
					     "\xff\xfe",
					     "x"};
	const struct tree *tree = *state;
	struct test_random random;

	test_random_start(&random, 7);
	put_gpu(tree, "0000:17:00.0", "garbage");
	for (unsigned round = 0; round < 60; round++) {
		struct doctor_facts f = {.path = "/data/x"};

		for (size_t i = 0; i < CLI_N(paths); i++) {
			char text[4096] = "";
			size_t len = 0, n = test_random_below(&random, 60);

			for (size_t k = 0; k < n && len + 32 < sizeof(text); k++)
				len += (size_t)snprintf(text + len, sizeof(text) - len, "%s",
							pieces[test_random_below(&random, CLI_N(pieces))]);
			put(tree, paths[i], text);
		}
		doctor_files_read(tree->root, &f);
		judge_all(&f);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(a_good_machine_has_nothing_to_look_at),
		cmocka_unit_test(judges_kernels_by_what_they_lack),
		cmocka_unit_test(tells_who_forbids_io_uring),
		cmocka_unit_test(counts_locked_memory_only_where_the_kernel_does),
		cmocka_unit_test(counts_descriptors_against_shards),
		cmocka_unit_test(counts_cpus_by_affinity_and_quota),
		cmocka_unit_test(knows_the_limits_of_a_cgroup),
		cmocka_unit_test(looks_at_huge_pages),
		cmocka_unit_test(knows_a_container),
		cmocka_unit_test(finds_what_keeps_a_gpu_from_use),
		cmocka_unit_test(judges_cuda_and_the_link),
		cmocka_unit_test(finds_bytes_that_cross_between_nodes),
		cmocka_unit_test(tells_what_gpudirect_storage_lacks),
		cmocka_unit_test(judges_the_model_and_its_room),
		cmocka_unit_test(judges_the_file_system),
		cmocka_unit_test(judges_direct_reads_and_the_disk),
		cmocka_unit_test(tells_how_cold_bytes_are_read),
		cmocka_unit_test(every_check_was_forced_to_every_kind_of_verdict),
		cmocka_unit_test_setup_teardown(reads_a_machine, new_tree, free_tree),
		cmocka_unit_test_setup_teardown(reads_gpus_and_their_driver, new_tree, free_tree),
		cmocka_unit_test_setup_teardown(reads_limits_at_every_level_of_cgroups, new_tree, free_tree),
		cmocka_unit_test_setup_teardown(reads_a_docker_container_of_version_1, new_tree, free_tree),
		cmocka_unit_test_setup_teardown(no_limit_of_version_1_is_none, new_tree, free_tree),
		cmocka_unit_test_setup_teardown(finds_the_mount_and_the_disk_of_a_path, new_tree, free_tree),
		cmocka_unit_test_setup_teardown(survives_a_machine_without_any_file, new_tree, free_tree),
		cmocka_unit_test_setup_teardown(survives_garbage_in_every_file, new_tree, free_tree),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
