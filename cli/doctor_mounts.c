/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Facts about the place where the model lies: the mount that its path is on, and the disk below that. As in
 * doctor_files.c all paths are below a root, and nothing fails.
 */
#include "doctor.h"

#include <inttypes.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* One line of /proc/self/mountinfo, as far as it matters. */
struct mount {
	char device[32]; /* "8:1" */
	char point[512], options[512], type[32], source[512], super[512];
};

/* "\040": how a space, a tab, a newline and a backslash are written. */
static bool is_escape(const char *text)
{
	return text[0] == '\\' && text[1] >= '0' && text[1] <= '3' && text[2] >= '0' && text[2] <= '7' &&
	       text[3] >= '0' && text[3] <= '7';
}

static void unescape(char *text)
{
	char *to = text;

	for (const char *from = text; *from; to++) {
		if (is_escape(from)) {
			*to = (char)((unsigned)(from[1] - '0') << 6 | (unsigned)(from[2] - '0') << 3 |
				     (unsigned)(from[3] - '0'));
			from += 4;
		} else {
			*to = *from++;
		}
	}
	*to = '\0';
}

/* "27 1 254:0 / /mnt rw,relatime shared:1 - ext4 /dev/vda rw,discard" */
static bool parse_mount(const char *line, struct mount *mount)
{
	const char *dash = strstr(line, " - ");

	memset(mount, 0, sizeof(*mount));
	if (!dash || sscanf(line, "%*s %*s %31s %*s %511s %511s", mount->device, mount->point, mount->options) != 3 ||
	    sscanf(dash + 3, "%31s %511s %511s", mount->type, mount->source, mount->super) < 2)
		return false;
	unescape(mount->point);
	return true;
}

/* Whether a path is at or below a mount point. */
static bool is_below(const char *path, const char *point)
{
	size_t len = strlen(point);

	if (strcmp(point, "/") == 0)
		return true;
	return strncmp(path, point, len) == 0 && (path[len] == '/' || path[len] == '\0');
}

/* ---- the disk ---- */

static bool read_number(const char *folder, const char *name, long *out)
{
	char *path = cli_text("%s/%s", folder, name);
	FILE *file = fopen(path, "re");
	bool is_good = file && fscanf(file, "%ld", out) == 1;

	if (file)
		fclose(file);
	cli_free(path);
	return is_good;
}

static bool has_entry(const char *folder, const char *name)
{
	char *path = cli_text("%s/%s", folder, name);
	bool is = access(path, F_OK) == 0;

	cli_free(path);
	return is;
}

/* From a partition's folder in /sys upwards: its disk, and the PCI device above that, which knows its node. */
static void climb(const char *root, char *folder, struct doctor_facts *facts)
{
	size_t stop = strlen(root);
	bool has_queue = false;
	long value;

	for (;;) {
		char *slash;

		if (!has_queue && read_number(folder, "queue/rotational", &value)) {
			facts->is_rotational = value == 1;
			has_queue = true;
		}
		facts->is_stacked |= has_entry(folder, "dm") || has_entry(folder, "md") || has_entry(folder, "loop");
		if (read_number(folder, "numa_node", &value)) {
			facts->disk_node = (int)value;
			return;
		}
		slash = strrchr(folder, '/');
		if (!slash || (size_t)(slash - folder) <= stop)
			return;
		*slash = '\0';
	}
}

static void read_disk(const char *root, const struct mount *mount, struct doctor_facts *facts)
{
	char *link = cli_text("%s/sys/dev/block/%s", root, mount->device);
	char folder[PATH_MAX], top[PATH_MAX];
	const char *name;

	if (!realpath(link, folder)) {
		/* File systems with device numbers of their own (btrfs) name their first disk. */
		const char *source = strncmp(mount->source, "/dev/", 5) == 0 ? strrchr(mount->source, '/') + 1 : "";

		cli_free(link);
		link = cli_text("%s/sys/class/block/%s", root, source);
		if (!source[0] || !realpath(link, folder))
			folder[0] = '\0';
	}
	cli_free(link);
	if (!folder[0])
		return;
	name = strrchr(folder, '/');
	snprintf(facts->disk, sizeof(facts->disk), "%.63s", name ? name + 1 : folder);
	facts->is_disk_known = true;
	if (!realpath(root[0] ? root : "/", top))
		top[0] = '\0';
	climb(strcmp(top, "/") == 0 ? "" : top, folder, facts);
}

void doctor_mounts_read(const char *root, struct doctor_facts *facts)
{
	char *path = cli_text("%s/proc/self/mountinfo", root);
	FILE *file = fopen(path, "re");
	struct mount mount, best = {.point = ""};
	char *line = NULL;
	size_t room = 0;

	facts->disk_node = DOCTOR_NO_NODE;
	if (facts->block[0]) {
		snprintf(best.device, sizeof(best.device), "%s", facts->block);
		read_disk(root, &best, facts);
	}
	while (file && getline(&line, &room, file) >= 0) {
		if (!parse_mount(line, &mount))
			continue;
		if (strcmp(mount.point, "/") == 0)
			facts->is_root_overlay = strcmp(mount.type, "overlay") == 0;
		/* The last one of the same point lies on top. */
		if (facts->path[0] && is_below(facts->path, mount.point) && strlen(mount.point) >= strlen(best.point))
			best = mount;
	}
	if (best.point[0] && !facts->block[0]) {
		snprintf(facts->fs, sizeof(facts->fs), "%s", best.type);
		snprintf(facts->mount, sizeof(facts->mount), "%s", best.point);
		snprintf(facts->mount_options, sizeof(facts->mount_options), "%s", best.super);
		read_disk(root, &best, facts);
	}
	cli_free(line);
	cli_free(path);
	if (file)
		fclose(file);
}
