/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One load, as "load" does it and "bench" measures it: a loader, one buffer for all tensors, one job. The
 * clock starts before the loader is opened, so set-up counts; opening the device does not.
 */
#include "work.h"

#define SLICE_MS 100

int cli_job_wait(hr_job *job, struct cli_progress *progress)
{
	for (;;) {
		struct hr_stats stats = HR_STATS_INIT;
		int rc = hr_job_wait(job, SLICE_MS);

		if (rc != HR_E_PENDING) {
			cli_progress_end(progress);
			return rc;
		}
		if (cli_signals_status()) {
			cli_progress_end(progress);
			hr_job_cancel(job);
			hr_job_wait(job, HR_FOREVER);
			return CLI_INTERRUPTED;
		}
		if (progress && progress->is_on && hr_job_stats(job, &stats) == 0)
			cli_progress_show(progress, stats.done_bytes, stats.total_bytes);
	}
}

uint64_t cli_device_free(hr_device *device)
{
	struct hr_device_info about = HR_DEVICE_INFO_INIT;

	return hr_device_info(device, &about) ? 0 : about.free_bytes;
}

static bool is_cpu(hr_device *device)
{
	struct hr_device_info about = HR_DEVICE_INFO_INIT;

	return hr_device_info(device, &about) || about.driver == 0;
}

static int run_job(struct cli_transfer *t)
{
	struct hr_read *reads = cli_set_reads(t->set, hr_buffer_data(t->buffer));
	hr_job *job = NULL;
	int rc = hr_job_start(t->loader, t->model, reads, t->set->n, NULL, &job);

	cli_free(reads);
	if (rc)
		return rc;
	rc = cli_job_wait(job, t->progress);
	t->stats = (struct hr_stats)HR_STATS_INIT;
	hr_job_stats(job, &t->stats);
	if (rc == 0)
		rc = hr_job_close(job, HR_FOREVER);
	else
		hr_job_close(job, HR_FOREVER);
	return rc;
}

int cli_transfer_run(struct cli_transfer *t)
{
	uint64_t free_bytes = t->free_bytes ? t->free_bytes : is_cpu(t->device) ? 0 : cli_device_free(t->device);
	uint64_t start_cpu_ns = cli_cpu_ns();
	uint64_t start_ns = cli_now_ns();
	int rc = hr_loader_open(t->device, t->opts, &t->loader);

	if (rc)
		return rc;
	rc = hr_buffer_new(t->loader, t->set->buffer_bytes, &t->buffer);
	if (rc)
		return rc;
	t->setup_ns = cli_now_ns() - start_ns;
	rc = run_job(t);
	t->elapsed_ns = cli_now_ns() - start_ns;
	t->cpu_ns = cli_cpu_ns() - start_cpu_ns;
	t->first_ns = t->setup_ns + t->stats.first_ns;
	if (free_bytes) {
		uint64_t left = cli_device_free(t->device);

		t->device_bytes = left < free_bytes ? free_bytes - left : 0;
	}
	return rc;
}

void cli_transfer_close(struct cli_transfer *t)
{
	hr_buffer_release(t->buffer);
	hr_loader_close(t->loader, HR_FOREVER);
	t->buffer = NULL;
	t->loader = NULL;
}
