/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a region is to others, before it becomes a store. What lies on it is asked of libblkid, which is looked for at
 * run time since nothing else here needs it; who uses it is asked of the kernel: mounts, swap, holders (dm, md, loop),
 * of the device, of its partitions, and of the disk that it is part of. Reads only.
 */
#include "store_actions.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/fs.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

static void add(char **list, size_t *n, char *text)
{
	if (*n < CLI_MAX_FINDINGS)
		list[(*n)++] = text;
	else
		cli_free(text);
}

#define ADD_SIGN(findings, ...) add((findings)->signs, &(findings)->n_signs, cli_text(__VA_ARGS__))
#define ADD_USE(findings, ...)  add((findings)->uses, &(findings)->n_uses, cli_text(__VA_ARGS__))

/* ---- what lies on it ---- */

/* The few calls of libblkid that are needed, with its own names. */
struct blkid {
	void *library;
	void *(*new_probe_from_filename)(const char *path);
	int (*probe_enable_superblocks)(void *probe, int enable);
	int (*probe_enable_partitions)(void *probe, int enable);
	int (*do_safeprobe)(void *probe);
	int (*probe_lookup_value)(void *probe, const char *name, const char **data, size_t *len);
	void (*free_probe)(void *probe);
};

static bool blkid_open(struct blkid *blkid)
{
	struct {
		const char *name;
		void *function;
	} wanted[] = {
		{"blkid_new_probe_from_filename", &blkid->new_probe_from_filename},
		{"blkid_probe_enable_superblocks", &blkid->probe_enable_superblocks},
		{"blkid_probe_enable_partitions", &blkid->probe_enable_partitions},
		{"blkid_do_safeprobe", &blkid->do_safeprobe},
		{"blkid_probe_lookup_value", &blkid->probe_lookup_value},
		{"blkid_free_probe", &blkid->free_probe},
	};

	blkid->library = dlopen("libblkid.so.1", RTLD_NOW | RTLD_LOCAL);
	for (size_t i = 0; blkid->library && i < CLI_N(wanted); i++) {
		void *found = dlsym(blkid->library, wanted[i].name);

		memcpy(wanted[i].function, &found, sizeof(found));
		if (found)
			continue;
		dlclose(blkid->library);
		blkid->library = NULL;
	}
	return blkid->library;
}

static const char *lookup(const struct blkid *blkid, void *probe, const char *name)
{
	const char *value = NULL;

	return blkid->probe_lookup_value(probe, name, &value, NULL) == 0 ? value : NULL;
}

static void ask_blkid(const char *path, struct cli_findings *findings)
{
	const char *type, *label, *table;
	struct blkid blkid;
	void *probe;
	int rc;

	findings->is_complete = blkid_open(&blkid);
	if (!findings->is_complete)
		return;
	probe = blkid.new_probe_from_filename(path);
	if (probe) {
		blkid.probe_enable_superblocks(probe, 1);
		blkid.probe_enable_partitions(probe, 1);
		rc = blkid.do_safeprobe(probe);
		type = rc == 0 ? lookup(&blkid, probe, "TYPE") : NULL;
		label = rc == 0 ? lookup(&blkid, probe, "LABEL") : NULL;
		table = rc == 0 ? lookup(&blkid, probe, "PTTYPE") : NULL;
		if (type)
			ADD_SIGN(findings, "it holds %s%s%s%s", type, label ? " labelled '" : "", label ? label : "",
				 label ? "'" : "");
		if (table)
			ADD_SIGN(findings, "it holds a partition table (%s)", table);
		if (rc == -2)
			ADD_SIGN(findings, "it holds the marks of more than one file system or partition table");
		blkid.free_probe(probe);
	}
	dlclose(blkid.library);
}

/* Libraries know nothing of stores. */
static void ask_store(const char *path, struct cli_findings *findings)
{
	struct hr_store_info info = HR_STORE_INFO_INIT;
	struct hr_store_opts opts = HR_STORE_OPTS_INIT;
	hr_store *store = NULL;
	char size[32];
	int rc;

	opts.flags = HR_STORE_MOVED;
	rc = hr_store_open(path, &opts, &store);
	if (rc == 0 && hr_store_stats(store, &info) == 0)
		ADD_SIGN(findings, "it holds a headrace store%s%s%s with %u model%s of %s in all",
			 info.name[0] ? " '" : "", info.name, info.name[0] ? "'" : "", info.n_models,
			 info.n_models == 1 ? "" : "s", cli_human(size, info.live_bytes));
	else if (rc && rc != HR_E_NOT_A_STORE && rc != HR_E_IO)
		ADD_SIGN(findings, "it holds a headrace store that does not open (%s)", hr_error_name(rc));
	hr_store_close(store);
}

/* ---- who uses it ---- */

static bool read_line(const char *path, char *out, size_t out_bytes)
{
	FILE *file = fopen(path, "re");
	bool is_read = file && fgets(out, (int)out_bytes, file);

	if (file)
		fclose(file);
	if (is_read)
		out[strcspn(out, "\n")] = '\0';
	return is_read;
}

/* A block device by its number, and what it is called. */
struct node {
	dev_t number;
	char name[64];
};

/* "nvme0n1p1" by its node in /sys, and all that is inside of it. */
#define MAX_NODES 64
struct family {
	struct node nodes[MAX_NODES]; /* the device itself first */
	size_t n;
};

static void family_add(struct family *family, const char *directory, const char *name)
{
	char path[600], text[64];
	unsigned major_number, minor_number;

	snprintf(path, sizeof(path), "%s/dev", directory);
	if (family->n == MAX_NODES || !read_line(path, text, sizeof(text)) ||
	    sscanf(text, "%u:%u", &major_number, &minor_number) != 2)
		return;
	family->nodes[family->n].number = makedev(major_number, minor_number);
	snprintf(family->nodes[family->n].name, sizeof(family->nodes[0].name), "%s", name);
	family->n++;
}

static const char *base_name(const char *path)
{
	const char *slash = strrchr(path, '/');

	return slash ? slash + 1 : path;
}

/* The device and its partitions. */
static void family_get(dev_t device, struct family *family)
{
	char link[64], real[512], inside[800];
	struct dirent *entry;
	DIR *directory;

	family->n = 0;
	snprintf(link, sizeof(link), "/sys/dev/block/%u:%u", major(device), minor(device));
	if (!realpath(link, real))
		return;
	family_add(family, real, base_name(real));
	directory = opendir(real);
	for (entry = directory ? readdir(directory) : NULL; entry; entry = readdir(directory)) {
		snprintf(inside, sizeof(inside), "%s/%s/partition", real, entry->d_name);
		if (entry->d_name[0] == '.' || access(inside, F_OK))
			continue;
		snprintf(inside, sizeof(inside), "%s/%s", real, entry->d_name);
		family_add(family, inside, entry->d_name);
	}
	if (directory)
		closedir(directory);
}

static const struct node *find_node(const struct family *family, dev_t number)
{
	for (size_t i = 0; i < family->n; i++)
		if (family->nodes[i].number == number)
			return &family->nodes[i];
	return NULL;
}

static void ask_holders(const struct family *family, struct cli_findings *findings)
{
	for (size_t i = 0; i < family->n; i++) {
		char path[64];
		struct dirent *entry;
		DIR *directory;

		snprintf(path, sizeof(path), "/sys/dev/block/%u:%u/holders", major(family->nodes[i].number),
			 minor(family->nodes[i].number));
		directory = opendir(path);
		for (entry = directory ? readdir(directory) : NULL; entry; entry = readdir(directory))
			if (entry->d_name[0] != '.')
				ADD_USE(findings,
					"%s is part of %s (device mapper, RAID, or a cache); take that apart first",
					family->nodes[i].name, entry->d_name);
		if (directory)
			closedir(directory);
	}
}

static void ask_partitions(const struct family *family, struct cli_findings *findings)
{
	for (size_t i = 1; i < family->n; i++)
		ADD_SIGN(findings, "it has the partition %s, with all that is in it", family->nodes[i].name);
}

static void ask_mounts(const struct family *family, struct cli_findings *findings)
{
	FILE *mounts = fopen("/proc/self/mountinfo", "re");
	unsigned major_number, minor_number;
	char *line = NULL, place[512];
	size_t room = 0;

	while (mounts && getline(&line, &room, mounts) > 0) {
		const struct node *node;

		if (sscanf(line, "%*d %*d %u:%u %*s %511s", &major_number, &minor_number, place) != 3)
			continue;
		node = find_node(family, makedev(major_number, minor_number));
		if (node)
			ADD_USE(findings, "%s is mounted at %s%s", node->name, place,
				strcmp(place, "/") == 0 ? ": it is what this system runs on" : "; unmount it first");
	}
	cli_free(line);
	if (mounts)
		fclose(mounts);
}

static void ask_swap(const struct family *family, struct cli_findings *findings)
{
	FILE *swaps = fopen("/proc/swaps", "re");
	char line[512], path[256];

	while (swaps && fgets(line, sizeof(line), swaps)) {
		const struct node *node;
		struct stat st;

		if (sscanf(line, "%255s", path) != 1 || stat(path, &st) || !S_ISBLK(st.st_mode))
			continue;
		node = find_node(family, st.st_rdev);
		if (node)
			ADD_USE(findings, "%s is used for swap; swapoff %s first", node->name, path);
	}
	if (swaps)
		fclose(swaps);
}

/* ---- all of it ---- */

static int ask_size(const struct cli_args *args, const char *path, struct cli_findings *findings, dev_t *device)
{
	struct stat st;
	int fd;

	if (stat(path, &st))
		return errno == ENOENT ? 0 : cli_fail(args, HR_E_IO, "cannot look at %s: %s", path, strerror(errno));
	if (!S_ISREG(st.st_mode) && !S_ISBLK(st.st_mode))
		return cli_fail(args, HR_E_OPTS, "%s is neither a plain file nor a block device", path);
	findings->is_block = S_ISBLK(st.st_mode);
	findings->bytes = (uint64_t)st.st_size;
	*device = st.st_rdev;
	if (!findings->is_block)
		return 0;
	fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
	if (fd < 0 || ioctl(fd, BLKGETSIZE64, &findings->bytes)) {
		int error = errno;

		if (fd >= 0)
			close(fd);
		return cli_fail(args, HR_E_IO, "cannot open %s: %s", path, strerror(error));
	}
	close(fd);
	return 0;
}

int cli_findings_get(const struct cli_args *args, const char *path, struct cli_findings *out)
{
	struct family family;
	dev_t device = 0;
	int status;

	*out = (struct cli_findings){.bytes = 0};
	status = ask_size(args, path, out, &device);
	if (status || out->bytes == 0)
		return status;
	ask_blkid(path, out);
	ask_store(path, out);
	if (!out->is_block)
		return 0;
	family_get(device, &family);
	ask_partitions(&family, out);
	ask_mounts(&family, out);
	ask_swap(&family, out);
	ask_holders(&family, out);
	return 0;
}

void cli_findings_free(struct cli_findings *findings)
{
	for (size_t i = 0; i < findings->n_signs; i++)
		cli_free(findings->signs[i]);
	for (size_t i = 0; i < findings->n_uses; i++)
		cli_free(findings->uses[i]);
	*findings = (struct cli_findings){.bytes = 0};
}
