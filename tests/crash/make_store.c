/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Does things to a store, one after the other, and says how each went; for tests that kill it or read what it wrote.
 *
 *     make_store REGION init BYTES | import MODEL SOURCE COMMIT_BYTES | replace MODEL SOURCE COMMIT_BYTES | remove
 *     MODEL
 *                     | reclaim | check | export FILE ...
 *
 * "check" repairs mirrors, then looks at everything, and fails if anything is damaged.
 */
#include "headrace.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int fail(const char *what, int code)
{
	printf("%s: %s: %s\n", what, hr_error_name(code), hr_error_last()->message);
	return code;
}

static int init(const char *region, const char *bytes)
{
	struct hr_store_init_opts opts = HR_STORE_INIT_OPTS_INIT;

	opts.bytes = strtoull(bytes, NULL, 10);
	return hr_store_init(region, &opts);
}

static void report(void *ctx, uint32_t is_bad, const char *sentence)
{
	(void)ctx;
	if (is_bad)
		printf("%s\n", sentence);
}

static int check(const char *region)
{
	struct hr_store_check_opts opts = HR_STORE_CHECK_OPTS_INIT;
	struct hr_store_check_info info = HR_STORE_CHECK_INFO_INIT;
	int code;

	opts.flags = HR_CHECK_REPAIR;
	code = hr_store_check(region, &opts, &info);
	opts.flags = HR_CHECK_DIGESTS;
	opts.report = report;
	if (!code)
		code = hr_store_check(region, &opts, &info);
	if (!code)
		printf("generation %llu, %u objects, %u bad\n", (unsigned long long)info.generation, info.n_objects,
		       info.n_bad);
	return code ? code : info.n_bad ? HR_E_CORRUPT : 0;
}

static int put(void *ctx, const char *text, size_t bytes)
{
	return fwrite(text, 1, bytes, ctx) != bytes;
}

static int export_to(hr_store *store, const char *path)
{
	FILE *file = fopen(path, "w");
	int code = file ? hr_store_export(store, put, file) : HR_E_IO;

	if (file && fclose(file))
		code = HR_E_IO;
	return code;
}

static int import(hr_store *store, char **words, uint32_t flags)
{
	struct hr_store_import_opts opts = HR_STORE_IMPORT_OPTS_INIT;

	opts.flags = flags;
	opts.commit_bytes = strtoull(words[2], NULL, 10);
	return hr_store_import(store, words[1], words[0], &opts, NULL);
}

/* Gives how many words it took. */
static int on_store(hr_store *store, char **words, int *code)
{
	if (strcmp(words[0], "import") == 0 || strcmp(words[0], "replace") == 0) {
		*code = import(store, words + 1, words[0][0] == 'r' ? HR_IMPORT_REPLACE : 0);
		return 4;
	}
	if (strcmp(words[0], "remove") == 0) {
		*code = hr_store_remove(store, words[1]);
		return 2;
	}
	if (strcmp(words[0], "export") == 0) {
		*code = export_to(store, words[1]);
		return 2;
	}
	*code = strcmp(words[0], "reclaim") == 0 ? hr_store_reclaim(store, NULL) : HR_E_OPTS;
	return 1;
}

static int one(const char *region, char **words, int *code)
{
	struct hr_store_opts opts = HR_STORE_OPTS_INIT;
	hr_store *store;
	int n = 1;

	if (strcmp(words[0], "init") == 0) {
		*code = init(region, words[1]);
		return 2;
	}
	if (strcmp(words[0], "check") == 0) {
		*code = check(region);
		return 1;
	}
	opts.flags = HR_STORE_WRITE;
	*code = hr_store_open(region, &opts, &store);
	if (!*code)
		n = on_store(store, words, code);
	hr_store_close(store);
	return n;
}

int main(int argc, char **argv)
{
	int code = 0;

	for (int i = 2; i < argc && !code;) {
		const char *what = argv[i];

		i += one(argv[1], argv + i, &code);
		if (code)
			fail(what, code);
		else
			printf("%s: good\n", what);
		fflush(stdout);
	}
	return code != 0;
}
