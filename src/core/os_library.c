/* SPDX-License-Identifier: Apache-2.0 */
/* What libraries opened at run time need from the system around them. See os_library.h; the rules are those of os.c. */
#include "os_library.h"

#include "fault.h"
#include "mem.h"
#include "os.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

bool hr__os_is_there(const char *path)
{
	return !HR__FAULT("access") && access(path, F_OK) == 0;
}

int hr__os_dup(int fd, int *out)
{
	HR__FAIL_IF_ARMED("dup");
	*out = fcntl(fd, F_DUPFD_CLOEXEC, 0);
	return *out < 0 ? errno : 0;
}

static int write_all(int fd, const char *text, size_t bytes)
{
	while (bytes > 0) {
		ssize_t n;

		HR__FAIL_IF_ARMED("write");
		n = write(fd, text, bytes);
		if (n < 0 && errno != EINTR)
			return errno;
		text += n > 0 ? n : 0;
		bytes -= n > 0 ? (size_t)n : 0;
	}
	return 0;
}

int hr__os_temp_file(const char *text, char *path, size_t path_bytes)
{
	const char *dir = getenv("TMPDIR");
	int fd, error;

	if (snprintf(path, path_bytes, "%s/headrace-XXXXXX", dir && *dir ? dir : "/tmp") >= (int)path_bytes)
		return ENAMETOOLONG;
	HR__FAIL_IF_ARMED("mkostemp");
	fd = mkostemp(path, O_CLOEXEC);
	if (fd < 0)
		return errno;
	error = write_all(fd, text, strlen(text));
	close(fd);
	if (error)
		unlink(path);
	return error;
}

void hr__os_remove_file(const char *path)
{
	unlink(path);
}

const char *hr__os_variable(const char *name)
{
	return getenv(name);
}

static int change(const char *name, const char *value)
{
	HR__FAIL_IF_ARMED("setenv");
	return (value ? setenv(name, value, 1) : unsetenv(name)) ? errno : 0;
}

int hr__os_environment_set(struct hr__os_setting *settings, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		const char *old = getenv(settings[i].name);
		int error;

		settings[i].saved = old ? hr__strdup(old) : NULL;
		error = old && !settings[i].saved ? ENOMEM : change(settings[i].name, settings[i].value);
		if (error) {
			hr__free(settings[i].saved);
			hr__os_environment_restore(settings, i);
			return error;
		}
	}
	return 0;
}

void hr__os_environment_restore(struct hr__os_setting *settings, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		if (settings[i].saved)
			setenv(settings[i].name, settings[i].saved, 1);
		else
			unsetenv(settings[i].name);
		hr__free(settings[i].saved);
		settings[i].saved = NULL;
	}
}

uint64_t hr__os_resident_set(void)
{
	unsigned long long all, resident;
	char text[128];

	if (!hr__os_text("/proc/self/statm", text, sizeof(text)) || sscanf(text, "%llu %llu", &all, &resident) != 2)
		return 0;
	return resident * hr__os_page_bytes();
}
