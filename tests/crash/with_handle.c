/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What takes more than one call on one handle, for tests over storage that fails or hangs. Each call gets a line:
 * what it was, the name of its error ("HR_OK" if none), the offset of the error and its sentence, with tabs between.
 *
 *     with_handle writes REGION MODEL SOURCE DIR     imports twice over one handle, then gets MODEL into DIR with it
 *     with_handle reads NAME TENSOR ENGINE MS        reads a tensor with a deadline, closes while a read hangs, reads
 *                                                    again, and once more when what hung has come back, and closes
 *
 * The end status is 0 whatever the calls said; an alarm ends what does not end.
 */
#include "headrace.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define ALARM_S     30
#define SHORT_MS    10
#define LONG_MS     10000
#define STAGING     (UINT64_C(8) * HR_MIN_SLOT_BYTES)
#define NO_DEADLINE 0

static int told(const char *what, int code)
{
	const struct hr_error *error = hr_error_last();

	if (code)
		printf("%s\t%s\t%lld\t%s\n", what, hr_error_name(code), (long long)error->offset, error->message);
	else
		printf("%s\tHR_OK\t-1\t\n", what);
	fflush(stdout);
	return code;
}

static void writes(char **words)
{
	struct hr_store_import_opts opts = HR_STORE_IMPORT_OPTS_INIT;
	struct hr_store_opts how = HR_STORE_OPTS_INIT;
	hr_store *store;

	how.flags = HR_STORE_WRITE;
	opts.flags = HR_IMPORT_REPLACE;
	if (told("open", hr_store_open(words[0], &how, &store)))
		return;
	told("import", hr_store_import(store, words[2], words[1], &opts, NULL));
	told("import", hr_store_import(store, words[2], words[1], &opts, NULL));
	told("get", hr_store_get(store, words[1], words[3], NULL));
	hr_store_close(store);
}

/* The tensor, into memory that the library need not leave alone unless it said so. */
static void read_one(hr_loader *loader, hr_model *model, uint64_t number, uint32_t io_timeout_ms)
{
	struct hr_tensor tensor = HR_TENSOR_INIT;
	struct hr_job_opts opts = HR_JOB_OPTS_INIT;
	struct hr_read read = {.tensor = number, .length = UINT64_MAX};
	hr_job *job;

	opts.io_timeout_ms = io_timeout_ms;
	opts.flags = HR_JOB_VERIFY;
	if (hr_model_tensor(model, number, &tensor))
		return;
	read.dst = malloc((size_t)tensor.bytes);
	read.dst_bytes = tensor.bytes;
	if (!told("start", hr_job_start(loader, model, &read, 1, &opts, &job))) {
		told("wait", hr_job_wait(job, LONG_MS));
		told("close job", hr_job_close(job, 0));
	}
	free(read.dst);
}

/* Until what hung has come back. */
static void wait_until_found(hr_loader *loader)
{
	struct hr_stats stats = HR_STATS_INIT;

	while (!hr_loader_stats(loader, &stats) && stats.lost_bytes > 0)
		usleep(1000);
}

static void reads(char **words)
{
	struct hr_loader_opts opts = HR_LOADER_OPTS_INIT;
	uint64_t number = strtoull(words[1], NULL, 10);
	hr_loader *loader;
	hr_device *device;
	hr_model *model;

	opts.engine = words[2];
	opts.staging_bytes = STAGING;
	opts.slot_bytes = HR_MIN_SLOT_BYTES;
	opts.readers = 2;
	if (told("open", hr_model_open(words[0], NULL, &model)) || told("device", hr_device_open("cpu", &device)))
		return;
	if (!told("loader", hr_loader_open(device, &opts, &loader))) {
		read_one(loader, model, number, (uint32_t)strtoul(words[3], NULL, 10));
		if (!told("close", hr_loader_close(loader, SHORT_MS)))
			exit(0);
		read_one(loader, model, number, NO_DEADLINE);
		wait_until_found(loader);
		read_one(loader, model, number, NO_DEADLINE);
		told("close", hr_loader_close(loader, LONG_MS));
	}
	hr_device_close(device);
	hr_model_close(model);
}

int main(int argc, char **argv)
{
	if (argc != 6)
		return 2;
	alarm(ALARM_S);
	if (argv[1][0] == 'w')
		writes(argv + 2);
	else
		reads(argv + 2);
	return 0;
}
