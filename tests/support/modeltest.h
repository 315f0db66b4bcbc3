/* SPDX-License-Identifier: Apache-2.0 */
/* What the tests of models share: text files, counting descriptors, running as somebody who may not read everything. */
#ifndef HR_TESTS_MODELTEST_H
#define HR_TESTS_MODELTEST_H

#include "hrtest.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

/* Writes `text` into "<dir>/<name>". */
static inline void write_text(const char *dir, const char *name, const char *text)
{
	char *path = path_in(dir, name);

	write_file(path, text, strlen(text));
	free(path);
}

/* A shard "<dir>/<name>" with these U8 tensors of 4 bytes each (a NULL ends the list). */
static inline void write_shard(const char *dir, const char *name, const char *const *names)
{
	struct test_tensor tensors[16];
	char *path = path_in(dir, name);
	size_t n = 0;

	for (; names[n]; n++)
		tensors[n] = (struct test_tensor){names[n], "U8", 4};
	write_safetensors(path, tensors, n, 7);
	free(path);
}
#define SHARD(dir, name, ...) write_shard(dir, name, (const char *const[]){__VA_ARGS__, NULL})

/* Not by /proc/self/fd: what was looked up there costs milliseconds when the process ends, and some tests fork
 * thousands. */
static inline int count_open_files(void)
{
	int n = 0;

	for (int fd = 0; fd < 1024; fd++)
		n += fcntl(fd, F_GETFD) >= 0;
	return n;
}

/* Runs `body(ctx)` in a child process and gives its result (0 .. 100); above that the child was killed. */
static inline int in_child(int (*body)(void *ctx), void *ctx)
{
	int status;
	pid_t child = fork();

	if (child == 0)
		_exit(body(ctx));
	if (child < 0 || waitpid(child, &status, 0) != child)
		return 200;
	return WIFEXITED(status) ? WEXITSTATUS(status) : 101 + WTERMSIG(status);
}

#endif
