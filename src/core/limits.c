/* SPDX-License-Identifier: Apache-2.0 */
/* See limits.h. Files are read through core/os.h, so that each read can be made to fail. */
#include "limits.h"

#include "arith.h"
#include "os.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What a walk through the groups looks for: the answer so far, lowered at each level. */
struct walk {
	const char *root;
	const char *controller; /* "cpu", "memory": its name in version 1 */
	void (*visit)(const struct walk *walk, const char *group, int version);
	unsigned *cpus;
	uint64_t *memory;
};

/* A file of a group: in version 2 all controllers' are in one folder, in version 1 each has its own. */
static bool read_group(const struct walk *walk, const char *group, int version, const char *file, char *out,
		       size_t out_bytes)
{
	char path[1024];

	if (version == 2)
		snprintf(path, sizeof(path), "%s/sys/fs/cgroup%s/%s", walk->root, group, file);
	else
		snprintf(path, sizeof(path), "%s/sys/fs/cgroup/%s%s/%s", walk->root, walk->controller, group, file);
	return hr__os_text(path, out, out_bytes);
}

/* A group and all its parents, up to the root as a container sees it; `group` is taken apart. */
static void walk_up(const struct walk *walk, char *group, int version)
{
	for (;;) {
		char *slash = strrchr(group, '/');

		walk->visit(walk, strcmp(group, "/") == 0 ? "" : group, version);
		if (!slash || strcmp(group, "/") == 0)
			return;
		slash[slash == group ? 1 : 0] = '\0';
	}
}

/* Whether a line of /proc/self/cgroup ("4:cpu,cpuacct:/x") is of this controller. */
static bool has_controller(const char *names, const char *controller)
{
	size_t length = strlen(controller);

	while (*names && *names != ':') {
		size_t n = strcspn(names, ",:");

		if (n == length && strncmp(names, controller, n) == 0)
			return true;
		names += n;
		names += *names == ',';
	}
	return false;
}

static void walk_groups(const struct walk *walk)
{
	char text[4096], path[512], *line = text;

	snprintf(path, sizeof(path), "%s/proc/self/cgroup", walk->root);
	if (!hr__os_text(path, text, sizeof(text)))
		return;
	while (*line) {
		size_t length = strcspn(line, "\n");
		char *next = line + length + (line[length] == '\n');
		char *names, *group;

		line[length] = '\0';
		names = strchr(line, ':');
		group = names ? strchr(names + 1, ':') : NULL;
		if (group && strncmp(line, "0::/", 4) == 0)
			walk_up(walk, group + 1, 2);
		else if (group && group[1] == '/' && has_controller(names + 1, walk->controller))
			walk_up(walk, group + 1, 1);
		line = next;
	}
}

/* ---- CPU time ---- */

static void limit_cpus(const struct walk *walk, const char *group, int version)
{
	long long quota = 0, period = 0;
	char text[64];

	if (version == 2) {
		if (!read_group(walk, group, 2, "cpu.max", text, sizeof(text)) ||
		    sscanf(text, "%lld %lld", &quota, &period) != 2)
			return;
	} else {
		if (!read_group(walk, group, 1, "cpu.cfs_quota_us", text, sizeof(text)) ||
		    sscanf(text, "%lld", &quota) != 1 ||
		    !read_group(walk, group, 1, "cpu.cfs_period_us", text, sizeof(text)) ||
		    sscanf(text, "%lld", &period) != 1)
			return;
	}
	if (quota > 0 && period > 0 && (quota - 1) / period + 1 < *walk->cpus)
		*walk->cpus = (unsigned)((quota - 1) / period + 1);
}

unsigned hr__limits_cpus(const char *root, unsigned cpus)
{
	const struct walk walk = {.root = root, .controller = "cpu", .visit = limit_cpus, .cpus = &cpus};

	walk_groups(&walk);
	return cpus;
}

/* ---- memory ---- */

static bool read_number(const struct walk *walk, const char *group, int version, const char *file, uint64_t *out)
{
	unsigned long long value;
	char text[64];

	if (!read_group(walk, group, version, file, text, sizeof(text)) || sscanf(text, "%llu", &value) != 1)
		return false;
	*out = value;
	return true;
}

static void limit_memory(const struct walk *walk, const char *group, int version)
{
	const char *field = version == 2 ? "\ninactive_file " : "\ntotal_inactive_file ";
	uint64_t limit, used, inactive = 0;
	char text[8192], *at;

	if (!read_number(walk, group, version, version == 2 ? "memory.max" : "memory.limit_in_bytes", &limit) ||
	    !read_number(walk, group, version, version == 2 ? "memory.current" : "memory.usage_in_bytes", &used))
		return;
	/* Page cache of the group itself can be dropped to make room. */
	at = read_group(walk, group, version, "memory.stat", text, sizeof(text)) ? strstr(text, field) : NULL;
	if (at)
		inactive = strtoull(at + strlen(field), NULL, 10);
	used = used > inactive ? used - inactive : 0;
	*walk->memory = hr__min_u64(*walk->memory, limit > used ? limit - used : 0);
}

uint64_t hr__limits_memory(const char *root)
{
	char text[1024], path[512], *at;
	uint64_t available;
	const struct walk walk = {.root = root, .controller = "memory", .visit = limit_memory, .memory = &available};

	snprintf(path, sizeof(path), "%s/proc/meminfo", root);
	at = hr__os_text(path, text, sizeof(text)) ? strstr(text, "MemAvailable:") : NULL;
	if (!at)
		return 0;
	available = strtoull(at + strlen("MemAvailable:"), NULL, 10) << 10;
	walk_groups(&walk);
	return available;
}
