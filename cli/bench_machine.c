/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where a result was measured: enough to understand it later. Read from /proc and uname; what is not to be
 * had is left empty.
 */
#include "bench.h"
#include "build_id.h"
#include "json_writer.h"

#include <inttypes.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/utsname.h>
#include <unistd.h>

static void cpu_model(char *out, size_t room)
{
	FILE *file = fopen("/proc/cpuinfo", "re");
	char line[512];

	out[0] = '\0';
	if (!file)
		return;
	while (!out[0] && fgets(line, sizeof(line), file)) {
		const char *colon = strchr(line, ':');

		if (strncmp(line, "model name", 10) == 0 && colon)
			snprintf(out, room, "%.*s", (int)strcspn(colon + 2, "\n"), colon + 2);
	}
	fclose(file);
}

/* The type of the file system that `path` is on, from mountinfo: "ext4". */
static void fs_type(const char *path, char *out, size_t room)
{
	FILE *file = fopen("/proc/self/mountinfo", "re");
	struct stat st;
	char line[4096];

	out[0] = '\0';
	if (file && stat(path, &st) == 0) {
		while (fgets(line, sizeof(line), file)) {
			const char *dash = strstr(line, " - ");
			unsigned major_number, minor_number;
			char type[64];

			if (!dash || sscanf(line, "%*d %*d %u:%u", &major_number, &minor_number) != 2 ||
			    sscanf(dash + 3, "%63s", type) != 1)
				continue;
			if (makedev(major_number, minor_number) == st.st_dev)
				snprintf(out, room, "%s", type);
		}
	}
	if (file)
		fclose(file);
}

static uint64_t memory_bytes(void)
{
	long pages = sysconf(_SC_PHYS_PAGES);
	long page = sysconf(_SC_PAGESIZE);

	return pages > 0 && page > 0 ? (uint64_t)pages * (uint64_t)page : 0;
}

void bench_machine_json(struct cli_json *json, const struct hr_device_info *about, const char *path)
{
	struct utsname system;
	char text[256];
	time_t now = time(NULL);
	struct tm utc;

	cli_json_object(json, "machine");
	cpu_model(text, sizeof(text));
	cli_json_text(json, "cpu", text);
	cli_json_u64(json, "cores", cli_cpus());
	cli_json_u64(json, "memory_bytes", memory_bytes());
	cli_json_text(json, "kernel", uname(&system) ? "" : system.release);
	cli_json_text(json, "architecture", uname(&system) ? "" : system.machine);
	fs_type(path, text, sizeof(text));
	cli_json_text(json, "file_system", text);
	if (about) {
		cli_json_text(json, "device", about->spec);
		cli_json_text(json, "device_name", about->name);
		cli_json_u64(json, "driver", about->driver);
		cli_json_bool(json, "batch_copy", about->flags & HR_DEVICE_BATCH_COPY);
	}
	cli_json_text(json, "headrace", hr_version());
	cli_json_text(json, "build", CLI_BUILD_ID);
	gmtime_r(&now, &utc);
	strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", &utc);
	cli_json_text(json, "date", text);
	cli_json_end(json);
}
