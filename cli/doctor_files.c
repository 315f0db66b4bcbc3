/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Facts that stand in files: /proc, /sys, /dev, /run. All paths are below a root, so that a test can show this code any
 * machine. A file that is not there or cannot be understood leaves its fact "not known"; nothing here fails.
 */
#include "doctor.h"

#include <dirent.h>
#include <inttypes.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define CAP_BIT_IPC_LOCK  14
#define CAP_BIT_SYS_ADMIN 21
#define NO_LIMIT          (UINT64_C(1) << 60) /* what version 1 of cgroups writes for "none" is near 2^63 */

#define MAX_CPUS 1024

struct cpus {
	uint64_t bits[MAX_CPUS / 64];
};

struct tree {
	const char *root;
	struct doctor_facts *facts;
	struct cpus allowed;
};

static bool is_there(const struct tree *tree, const char *path)
{
	char *full = cli_text("%s%s", tree->root, path);
	struct stat st;
	bool is = stat(full, &st) == 0;

	cli_free(full);
	return is;
}

static FILE *open_file(const struct tree *tree, const char *path)
{
	char *full = cli_text("%s%s", tree->root, path);
	FILE *file = fopen(full, "re");

	cli_free(full);
	return file;
}

/* The first line, without its end. */
static bool read_line(const struct tree *tree, const char *path, char *out, size_t room)
{
	FILE *file = open_file(tree, path);
	bool is_good = file && fgets(out, (int)room, file) != NULL;

	if (file)
		fclose(file);
	if (!is_good)
		out[0] = '\0';
	out[strcspn(out, "\n")] = '\0';
	return is_good;
}

static bool read_u64(const struct tree *tree, const char *path, uint64_t *out)
{
	char text[64];

	return read_line(tree, path, text, sizeof(text)) && sscanf(text, "%" SCNu64, out) == 1;
}

/* "0-3,8,10-11": how many, and (unless `cpus` is NULL) which. */
static unsigned count_list(const char *text, struct cpus *cpus)
{
	unsigned n = 0;

	text += strspn(text, " \t");
	while (*text >= '0' && *text <= '9') {
		char *end;
		unsigned long first = strtoul(text, &end, 10), last = first;

		if (*end == '-')
			last = strtoul(end + 1, &end, 10);
		for (unsigned long i = first; i <= last && i < MAX_CPUS; i++, n++) {
			if (cpus)
				cpus->bits[i / 64] |= UINT64_C(1) << i % 64;
		}
		text = *end == ',' ? end + 1 : end;
	}
	return n;
}

/* ---- the kernel and this process ---- */

static void status_line(struct tree *tree, const char *line)
{
	struct doctor_facts *facts = tree->facts;
	uint64_t caps;

	if (strncmp(line, "Cpus_allowed_list:", 18) == 0)
		facts->cpus_allowed = count_list(line + 18, &tree->allowed);
	else if (sscanf(line, "Seccomp: %d", &facts->seccomp) == 1)
		return;
	else if (sscanf(line, "CapEff: %" SCNx64, &caps) == 1) {
		facts->may_lock = caps >> CAP_BIT_IPC_LOCK & 1;
		facts->may_admin = caps >> CAP_BIT_SYS_ADMIN & 1;
	}
}

static uint64_t limit_of(const char *text)
{
	uint64_t value;

	text += strspn(text, " ");
	if (strncmp(text, "unlimited", 9) == 0)
		return UINT64_MAX;
	return sscanf(text, "%" SCNu64, &value) == 1 ? value : 0;
}

/* "Max open files            1024                 4096                 files" */
static void limits_line(struct tree *tree, const char *line)
{
	struct doctor_facts *facts = tree->facts;
	static const char memlock[] = "Max locked memory", files[] = "Max open files";

	if (strncmp(line, memlock, strlen(memlock)) == 0) {
		facts->memlock = limit_of(line + strlen(memlock));
		facts->has_memlock = true;
	} else if (strncmp(line, files, strlen(files)) == 0) {
		const char *hard = line + strlen(files);

		facts->files = limit_of(hard);
		hard += strspn(hard, " ");
		facts->files_hard = limit_of(hard + strcspn(hard, " "));
		facts->has_files = true;
	}
}

static void meminfo_line(struct tree *tree, const char *line)
{
	struct doctor_facts *facts = tree->facts;
	uint64_t kib;

	if (sscanf(line, "MemTotal: %" SCNu64, &kib) == 1)
		facts->memory_total = kib << 10;
	else if (sscanf(line, "MemAvailable: %" SCNu64, &kib) == 1)
		facts->memory_available = kib << 10;
}

static void modules_line(struct tree *tree, const char *line)
{
	struct doctor_facts *facts = tree->facts;
	size_t len = strcspn(line, " \n");

	facts->has_modules = true;
	facts->has_nvidia |= len == 6 && strncmp(line, "nvidia", len) == 0;
	facts->has_uvm |= len == 10 && strncmp(line, "nvidia_uvm", len) == 0;
	facts->has_nvidia_fs |= len == 9 && strncmp(line, "nvidia_fs", len) == 0;
	facts->has_ugds |= len == 8 && strncmp(line, "ugds_drv", len) == 0;
	facts->has_nouveau |= len == 7 && strncmp(line, "nouveau", len) == 0;
}

/* "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build ...": the first word of digits and
 * points. */
static void driver_line(struct tree *tree, const char *line)
{
	struct doctor_facts *facts = tree->facts;
	if (strncmp(line, "NVRM version:", 13) != 0)
		return;
	for (const char *word = line; *word; word += strcspn(word, " "), word += strspn(word, " ")) {
		size_t len = strspn(word, "0123456789.");

		if (len >= 3 && (word[len] == ' ' || word[len] == '\n') && memchr(word, '.', len)) {
			snprintf(facts->driver, sizeof(facts->driver), "%.*s", (int)len, word);
			return;
		}
	}
}

static void each_line(struct tree *tree, const char *path, void (*take)(struct tree *, const char *))
{
	FILE *file = open_file(tree, path);
	char *line = NULL;
	size_t room = 0;

	while (file && getline(&line, &room, file) >= 0)
		take(tree, line);
	cli_free(line);
	if (file)
		fclose(file);
}

/* "always [madvise] never" */
static void read_huge_pages(const struct tree *tree)
{
	char text[64];
	const char *open;

	if (!read_line(tree, "/sys/kernel/mm/transparent_hugepage/enabled", text, sizeof(text)))
		return;
	open = strchr(text, '[');
	if (open)
		snprintf(tree->facts->huge_pages, sizeof(tree->facts->huge_pages), "%.*s", (int)strcspn(open + 1, "]"),
			 open + 1);
}

/* Which nodes of memory have a CPU that this process may use. */
static void read_nodes(const struct tree *tree)
{
	struct doctor_facts *facts = tree->facts;
	char text[4096];

	if (read_line(tree, "/sys/devices/system/node/online", text, sizeof(text)))
		facts->n_nodes = count_list(text, NULL);
	for (unsigned node = 0; node < facts->n_nodes && node < 64; node++) {
		char *path = cli_text("/sys/devices/system/node/node%u/cpulist", node);
		struct cpus theirs = {{0}};

		if (read_line(tree, path, text, sizeof(text)))
			count_list(text, &theirs);
		for (size_t i = 0; i < CLI_N(theirs.bits); i++) {
			if (theirs.bits[i] & tree->allowed.bits[i])
				facts->allowed_nodes |= UINT64_C(1) << node;
		}
		cli_free(path);
	}
}

static void read_kernel(struct tree *tree)
{
	struct doctor_facts *facts = tree->facts;
	char text[4096];
	uint64_t value;

	read_line(tree, "/proc/sys/kernel/osrelease", facts->kernel, sizeof(facts->kernel));
	if (read_line(tree, "/sys/devices/system/cpu/online", text, sizeof(text)))
		facts->cpus_online = count_list(text, NULL);
	each_line(tree, "/proc/self/status", status_line);
	each_line(tree, "/proc/self/limits", limits_line);
	each_line(tree, "/proc/meminfo", meminfo_line);
	read_huge_pages(tree);
	read_nodes(tree);
	facts->uring_disabled = -1;
	if (read_u64(tree, "/proc/sys/kernel/io_uring_disabled", &value))
		facts->uring_disabled = (int)value;
}

/* ---- cgroups: a limit at any level holds ---- */

static void limit_cpus(struct doctor_facts *facts, double quota, double period)
{
	if (quota > 0 && period > 0 && (facts->cpu_quota == 0 || quota / period < facts->cpu_quota))
		facts->cpu_quota = quota / period;
}

static void limit_memory(struct doctor_facts *facts, unsigned version, uint64_t limit, uint64_t used)
{
	facts->cgroup_version = version;
	if (limit >= NO_LIMIT || (facts->cgroup_limit && facts->cgroup_limit - facts->cgroup_used <= limit - used))
		return;
	facts->cgroup_limit = limit;
	facts->cgroup_used = used < limit ? used : limit;
}

/* A value of memory.stat: page cache that can be dropped. */
static uint64_t read_inactive(const struct tree *tree, const char *path, const char *field)
{
	FILE *file = open_file(tree, path);
	uint64_t value = 0;
	char line[256];

	while (file && fgets(line, sizeof(line), file)) {
		if (strncmp(line, field, strlen(field)) == 0 && line[strlen(field)] == ' ')
			sscanf(line + strlen(field), "%" SCNu64, &value);
	}
	if (file)
		fclose(file);
	return value;
}

/* The files of one level: version 2 has all in one place, version 1 in a folder for each controller. */
struct level {
	const char *memory, *cpu; /* folders; NULL: look for nothing there */
	unsigned version;
};

static void read_level(const struct tree *tree, const struct level *level)
{
	bool is_new = level->version == 2;
	char *limit_path = cli_text("%s/%s", level->memory ? level->memory : "",
				    is_new ? "memory.max" : "memory.limit_in_bytes");
	char *used_path = cli_text("%s/%s", level->memory ? level->memory : "",
				   is_new ? "memory.current" : "memory.usage_in_bytes");
	char *stat_path = cli_text("%s/memory.stat", level->memory ? level->memory : "");
	uint64_t limit, used = 0, inactive;

	if (level->memory && read_u64(tree, limit_path, &limit)) {
		read_u64(tree, used_path, &used);
		inactive = read_inactive(tree, stat_path, is_new ? "inactive_file" : "total_inactive_file");
		limit_memory(tree->facts, level->version, limit, used > inactive ? used - inactive : 0);
	}
	cli_free(limit_path);
	cli_free(used_path);
	cli_free(stat_path);
}

static void read_cpu_level(const struct tree *tree, const struct level *level)
{
	char *max_path = cli_text("%s/cpu.max", level->cpu);
	char *quota_path = cli_text("%s/cpu.cfs_quota_us", level->cpu);
	char *period_path = cli_text("%s/cpu.cfs_period_us", level->cpu);
	char text[64];
	double quota, period;
	uint64_t value;

	if (level->version == 2) {
		if (read_line(tree, max_path, text, sizeof(text)) && sscanf(text, "%lf %lf", &quota, &period) == 2)
			limit_cpus(tree->facts, quota, period);
	} else if (read_line(tree, quota_path, text, sizeof(text)) && sscanf(text, "%lf", &quota) == 1 &&
		   read_u64(tree, period_path, &value)) {
		limit_cpus(tree->facts, quota, (double)value);
	}
	cli_free(max_path);
	cli_free(quota_path);
	cli_free(period_path);
}

/* Our group below `mount` and all its parents, up to the mount itself, which is all that a container sees. */
static void walk_groups(const struct tree *tree, const char *mount, const char *group, bool is_memory, bool is_cpu)
{
	bool is_new = is_memory && is_cpu;
	char *at = cli_text("%s", strcmp(group, "/") == 0 ? "" : group);

	for (;;) {
		char *folder = cli_text("%s%s", mount, at);
		const struct level level = {is_memory ? folder : NULL, is_cpu ? folder : NULL, is_new ? 2 : 1};
		char *slash = strrchr(at, '/');

		if (is_memory)
			read_level(tree, &level);
		if (is_cpu)
			read_cpu_level(tree, &level);
		cli_free(folder);
		if (!slash)
			break;
		*slash = '\0';
	}
	cli_free(at);
}

static bool has_word(const char *list, size_t len, const char *word)
{
	size_t n = strlen(word);

	for (size_t i = 0; i + n <= len; i++) {
		if (strncmp(list + i, word, n) == 0 && (i == 0 || list[i - 1] == ',') &&
		    (i + n == len || list[i + n] == ','))
			return true;
	}
	return false;
}

/* A line of /proc/self/cgroup: "0::/user.slice/x" (version 2), "4:memory:/x" (version 1). */
static void cgroup_line(struct tree *tree, const char *line)
{
	const char *names = strchr(line, ':');
	const char *group = names ? strchr(names + 1, ':') : NULL;
	char *path;
	size_t len;

	if (!group)
		return;
	len = (size_t)(group - names - 1);
	path = cli_text("%.*s", (int)strcspn(group + 1, "\n"), group + 1);
	if (len == 0 && strncmp(line, "0:", 2) == 0)
		walk_groups(tree, "/sys/fs/cgroup", path, true, true);
	else if (has_word(names + 1, len, "memory"))
		walk_groups(tree, "/sys/fs/cgroup/memory", path, true, false);
	else if (has_word(names + 1, len, "cpu"))
		walk_groups(tree, "/sys/fs/cgroup/cpu", path, false, true);
	cli_free(path);
}

/* ---- containers ---- */

static void read_container(struct tree *tree)
{
	static const struct {
		const char *path, *name;
	} signs[] = {{"/var/run/secrets/kubernetes.io", "kubernetes"},
		     {"/run/.containerenv", "podman"},
		     {"/.dockerenv", "docker"},
		     {"/.singularity.d", "singularity"}};

	for (size_t i = 0; i < CLI_N(signs) && !tree->facts->container[0]; i++) {
		if (is_there(tree, signs[i].path))
			snprintf(tree->facts->container, sizeof(tree->facts->container), "%s", signs[i].name);
	}
	tree->facts->is_wsl = is_there(tree, "/dev/dxg");
}

/* ---- NVIDIA ---- */

#define PCI_NVIDIA  UINT64_C(0x10de)
#define PCI_DISPLAY UINT64_C(0x03) /* class: VGA and 3D controllers */

static uint64_t read_hex(const struct tree *tree, const char *folder, const char *name)
{
	char *path = cli_text("/sys/bus/pci/devices/%s/%s", folder, name);
	char text[64];
	uint64_t value = 0;

	if (read_line(tree, path, text, sizeof(text)))
		value = strtoull(text, NULL, 0);
	cli_free(path);
	return value;
}

/* The second line of "resource": "0x000000c000000000 0x000000dfffffffff 0x000000000014220c". */
static uint64_t read_bar1(const struct tree *tree, const char *address)
{
	char *path = cli_text("/sys/bus/pci/devices/%s/resource", address);
	FILE *file = open_file(tree, path);
	uint64_t first = 0, last = 0;
	char line[128];

	if (!file || !fgets(line, sizeof(line), file) || !fgets(line, sizeof(line), file) ||
	    sscanf(line, "%" SCNx64 " %" SCNx64, &first, &last) != 2)
		last = 0;
	if (file)
		fclose(file);
	cli_free(path);
	return last > first ? last - first + 1 : 0;
}

static void add_gpu(const struct tree *tree, const char *address)
{
	struct doctor_facts *facts = tree->facts;
	struct doctor_gpu *gpu = &facts->gpus[facts->n_gpus];
	char *path = cli_text("/sys/bus/pci/devices/%s/numa_node", address);
	char text[32];

	if (facts->n_gpus < DOCTOR_MAX_GPUS) {
		facts->n_gpus++;
		snprintf(gpu->address, sizeof(gpu->address), "%.15s", address);
		gpu->node = DOCTOR_NO_NODE;
		if (read_line(tree, path, text, sizeof(text)))
			sscanf(text, "%d", &gpu->node);
		gpu->bar1_bytes = read_bar1(tree, address);
		gpu->link_width = (unsigned)read_hex(tree, address, "current_link_width");
		gpu->link_width_max = (unsigned)read_hex(tree, address, "max_link_width");
	}
	cli_free(path);
}

static void each_entry(struct tree *tree, const char *folder, void (*take)(struct tree *, const char *name))
{
	char *full = cli_text("%s%s", tree->root, folder);
	struct dirent **entries = NULL;
	int n = scandir(full, &entries, NULL, alphasort);

	for (int i = 0; i < n; i++) {
		if (entries[i]->d_name[0] != '.')
			take(tree, entries[i]->d_name);
		cli_free(entries[i]);
	}
	cli_free(entries);
	cli_free(full);
}

static void take_pci(struct tree *tree, const char *address)
{
	if (read_hex(tree, address, "vendor") == PCI_NVIDIA && read_hex(tree, address, "class") >> 16 == PCI_DISPLAY)
		add_gpu(tree, address);
}

static void take_device(struct tree *tree, const char *name)
{
	if (strncmp(name, "nvidia", 6) == 0 && name[6] >= '0' && name[6] <= '9')
		tree->facts->n_gpu_devices++;
}

static void read_nvidia(struct tree *tree)
{
	struct doctor_facts *facts = tree->facts;

	each_entry(tree, "/sys/bus/pci/devices", take_pci);
	each_entry(tree, "/dev", take_device);
	each_line(tree, "/proc/modules", modules_line);
	each_line(tree, "/proc/driver/nvidia/version", driver_line);
	facts->has_nvidiactl = is_there(tree, "/dev/nvidiactl");
	facts->has_uvm_device = is_there(tree, "/dev/nvidia-uvm");
	facts->has_nvidia_fs |= is_there(tree, "/proc/driver/nvidia-fs/version");
	facts->has_udev = is_there(tree, "/run/udev/data");
	facts->has_ugds_disk = is_there(tree, "/dev/ugds_drv0");
}

void doctor_files_read(const char *root, struct doctor_facts *facts)
{
	struct tree tree = {.root = root, .facts = facts};

	read_kernel(&tree);
	each_line(&tree, "/proc/self/cgroup", cgroup_line);
	read_container(&tree);
	read_nvidia(&tree);
	doctor_mounts_read(root, facts);
}
