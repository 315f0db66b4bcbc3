/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The seam to the operating system, for libraries that are opened at run time and take their settings from the
 * environment and from files at the moment they start. Convention as in os.h: 0 or a positive errno value.
 */
#ifndef HR_CORE_OS_LIBRARY_H
#define HR_CORE_OS_LIBRARY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Whether there is something of this name. */
bool hr__os_is_there(const char *path);
/* One more descriptor of the same open file, closed on exec. */
int hr__os_dup(int fd, int *out);

/* A new file with this text that only this user may read, in $TMPDIR or /tmp; `path` gets its name. */
int hr__os_temp_file(const char *text, char *path, size_t path_bytes);
void hr__os_remove_file(const char *path);

/* A variable of the environment; NULL if there is none. */
const char *hr__os_variable(const char *name);
/* Sets variables of the environment (value NULL: takes it away), keeping what was there, and puts that back.
 *
 * The environment belongs to the whole process: another thread that calls getenv() at the same moment may read
 * freed memory in C libraries that do not lock it (glibc before 2.41), and one that calls setenv() or starts a
 * process may see the change. There is no other way to tell such a library, so it is done once and for as short a
 * time as that takes. */
struct hr__os_setting {
	const char *name;
	const char *value;
	char *saved; /* hr__os_environment_set's */
};
int hr__os_environment_set(struct hr__os_setting *settings, size_t n);
void hr__os_environment_restore(struct hr__os_setting *settings, size_t n);

/* Bytes of this process's memory that are in RAM; 0 = not known. */
uint64_t hr__os_resident_set(void);

#endif
