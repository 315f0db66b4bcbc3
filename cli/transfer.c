/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One load, as "load" does it and "bench" measures it: a loader, and a buffer and a job for each GiB or so, so that
 * memory of the next part is taken while the part before it is read. The clock starts before the loader is opened, so
 * set-up counts; opening the device does not.
 */
#include "work.h"

#include <string.h>

#define SLICE_MS    100
#define PARTS_AHEAD 2 /* jobs at once: one that reads, one behind it */

int cli_job_wait(hr_job *job, void (*tick)(void *ctx), void *ctx)
{
	for (;;) {
		int rc = hr_job_wait(job, SLICE_MS);

		if (rc != HR_E_PENDING)
			return rc;
		if (cli_signals_status()) {
			hr_job_cancel(job);
			hr_job_wait(job, HR_FOREVER);
			return CLI_INTERRUPTED;
		}
		if (tick)
			tick(ctx);
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

static int start_part(struct cli_transfer *t, size_t p)
{
	const struct cli_part *part = &t->set->parts[p];
	struct hr_read *reads = cli_set_reads(t->set, part->first, part->n, hr_buffer_data(t->buffers[p]));
	int rc = hr_job_start(t->loader, t->model, reads, part->n, NULL, &t->jobs[p]);

	cli_free(reads);
	return rc;
}

static void show_progress(void *ctx)
{
	const struct cli_transfer *t = ctx;
	struct hr_stats stats = HR_STATS_INIT;

	if (t->progress && t->progress->is_on && hr_loader_stats(t->loader, &stats) == 0)
		cli_progress_show(t->progress, stats.done_bytes, t->set->bytes);
}

/* Memory of a part is taken before the wait for an older one: that is when it costs nothing. */
static int run_parts(struct cli_transfer *t, uint64_t start_ns)
{
	size_t n = t->set->n_parts;
	int rc = 0;

	for (size_t p = 0; p < n + PARTS_AHEAD && !rc; p++) {
		if (p < n)
			rc = hr_buffer_new(t->loader, t->set->parts[p].bytes, &t->buffers[p]);
		if (!rc && p >= PARTS_AHEAD)
			rc = cli_job_wait(t->jobs[p - PARTS_AHEAD], show_progress, t);
		if (!rc && p < n)
			rc = start_part(t, p);
		if (p == 0)
			t->setup_ns = cli_now_ns() - start_ns;
	}
	return rc;
}

/* What the loader did, with what only a job knows. */
static void take_stats(struct cli_transfer *t)
{
	struct hr_stats first = HR_STATS_INIT;

	t->stats = (struct hr_stats)HR_STATS_INIT;
	hr_loader_stats(t->loader, &t->stats);
	if (t->set->n_parts == 0 || !t->jobs[0] || hr_job_stats(t->jobs[0], &first))
		return;
	t->stats.first_ns = first.first_ns;
	memcpy(t->stats.note, first.note, sizeof(t->stats.note));
}

int cli_transfer_run(struct cli_transfer *t)
{
	uint64_t free_bytes = t->free_bytes ? t->free_bytes : is_cpu(t->device) ? 0 : cli_device_free(t->device);
	uint64_t start_cpu_ns = cli_cpu_ns();
	uint64_t start_ns = cli_now_ns();
	int rc = hr_loader_open(t->device, t->opts, &t->loader);

	if (rc)
		return rc;
	t->buffers = cli_alloc(t->set->n_parts, sizeof(hr_buffer *));
	t->jobs = cli_alloc(t->set->n_parts, sizeof(hr_job *));
	rc = run_parts(t, start_ns);
	cli_progress_end(t->progress);
	t->elapsed_ns = cli_now_ns() - start_ns;
	t->cpu_ns = cli_cpu_ns() - start_cpu_ns;
	take_stats(t);
	t->first_ns = t->setup_ns + t->stats.first_ns;
	if (free_bytes) {
		uint64_t left = cli_device_free(t->device);

		t->device_bytes = left < free_bytes ? free_bytes - left : 0;
	}
	return rc;
}

void cli_transfer_close(struct cli_transfer *t)
{
	for (size_t p = 0; t->jobs && p < t->set->n_parts; p++)
		hr_job_close(t->jobs[p], HR_FOREVER); /* cancels what has not settled, and waits for it */
	for (size_t p = 0; t->buffers && p < t->set->n_parts; p++)
		hr_buffer_release(t->buffers[p]);
	hr_loader_close(t->loader, HR_FOREVER);
	cli_free(t->jobs);
	cli_free(t->buffers);
	t->jobs = NULL;
	t->buffers = NULL;
	t->loader = NULL;
}
