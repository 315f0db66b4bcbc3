/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One sample: a ceiling, a load into one buffer, or a feed whose buffers are all kept. Set-up of the loader
 * counts; opening the device does not. Memory is measured from outside the library.
 */
#include "bench.h"

#include <string.h>

#define LINK_BYTES (UINT64_C(4) << 30)

static const struct {
	const char *name;
	uint32_t ceiling;
} kinds[] = {
	[BENCH_STORAGE] = {"storage", HR_CEILING_STORAGE},
	[BENCH_LINK] = {"link", HR_CEILING_LINK},
	[BENCH_CACHED] = {"cached", HR_CEILING_CACHED},
	[BENCH_MEMORY] = {"memory", HR_CEILING_MEMORY},
	[BENCH_LOAD] = {"load", 0},
	[BENCH_FEED] = {"feed", 0},
};

bool bench_is_ceiling(enum bench_what what)
{
	return what < BENCH_LOAD;
}

const char *bench_name(enum bench_what what)
{
	return kinds[what].name;
}

static void series_opts(const struct bench *bench, const struct bench_series *series, struct hr_loader_opts *opts)
{
	cli_loader_opts(bench->args, opts);
	if (series->engine)
		opts->engine = series->engine;
	if (series->staging_bytes)
		opts->staging_bytes = series->staging_bytes;
	if (series->slot_bytes)
		opts->slot_bytes = series->slot_bytes;
}

static int take_ceiling(struct bench *bench, const struct bench_series *series, struct bench_sample *sample)
{
	struct hr_ceiling ceiling = HR_CEILING_INIT;
	struct hr_loader_opts opts;
	hr_loader *loader = NULL;
	int rc;

	series_opts(bench, series, &opts);
	if (hr_loader_open(bench->device, &opts, &loader))
		return cli_fail_setup(bench->args);
	rc = hr_ceiling(loader, bench->model, kinds[series->what].ceiling,
			series->what == BENCH_LINK && bench->about.driver ? LINK_BYTES : 0, &ceiling);
	if (rc)
		rc = cli_fail_last(bench->args);
	hr_loader_close(loader, HR_FOREVER);
	sample->bytes = ceiling.bytes;
	sample->ns = ceiling.ns;
	sample->cpu_ns = ceiling.cpu_ns;
	return rc;
}

static int take_load(struct bench *bench, struct bench_series *series, struct bench_sample *sample)
{
	struct hr_loader_opts opts;
	struct cli_transfer transfer = {.device = bench->device,
					.model = bench->model,
					.set = &bench->set,
					.opts = &opts,
					.free_bytes = bench->free_bytes};
	int rc;

	series_opts(bench, series, &opts);
	rc = cli_transfer_run(&transfer);
	sample->bytes = bench->set.bytes;
	sample->ns = transfer.elapsed_ns;
	sample->cpu_ns = transfer.cpu_ns;
	sample->first_ns = transfer.first_ns;
	sample->setup_ns = transfer.setup_ns;
	sample->device_bytes = transfer.device_bytes;
	series->stats = transfer.stats;
	if (rc == CLI_INTERRUPTED)
		rc = cli_signals_status();
	else if (rc)
		rc = transfer.loader ? cli_fail_last(bench->args) : cli_fail_setup(bench->args);
	cli_transfer_close(&transfer);
	return rc;
}

/* ---- feed ---- */

struct feeding {
	hr_loader *loader;
	hr_feed *feed;
	hr_buffer **kept;
	size_t n_kept;
};

/* HR_E_END is the good end. */
static int drain_feed(struct bench *bench, struct feeding *f, struct bench_sample *sample, uint64_t start_ns)
{
	for (;;) {
		struct hr_tensor tensor = HR_TENSOR_INIT;
		hr_buffer *buffer = NULL;
		int rc;

		if (cli_signals_status())
			return CLI_INTERRUPTED;
		rc = hr_feed_next(f->feed, &tensor, &buffer);
		if (rc)
			return rc;
		if (!f->n_kept)
			sample->first_ns = cli_now_ns() - start_ns;
		if (f->n_kept < bench->set.n)
			f->kept[f->n_kept++] = buffer;
		sample->bytes += tensor.bytes;
	}
}

static int run_feed(struct bench *bench, struct bench_series *series, struct feeding *f, struct bench_sample *sample)
{
	const struct hr_feed_opts feed_opts = {
		.size = sizeof(feed_opts), .tensors = bench->set.tensors, .n_tensors = bench->set.n};
	uint64_t start_cpu_ns = cli_cpu_ns();
	uint64_t start_ns = cli_now_ns();
	struct hr_loader_opts opts;
	int rc;

	series_opts(bench, series, &opts);
	rc = hr_loader_open(bench->device, &opts, &f->loader);
	if (rc)
		return rc;
	rc = hr_feed_open(f->loader, bench->model, &feed_opts, &f->feed);
	if (rc)
		return rc;
	sample->setup_ns = cli_now_ns() - start_ns;
	rc = drain_feed(bench, f, sample, start_ns);
	sample->ns = cli_now_ns() - start_ns;
	sample->cpu_ns = cli_cpu_ns() - start_cpu_ns;
	series->stats = (struct hr_stats)HR_STATS_INIT;
	hr_feed_stats(f->feed, &series->stats);
	return rc == HR_E_END ? 0 : rc;
}

static int take_feed(struct bench *bench, struct bench_series *series, struct bench_sample *sample)
{
	struct feeding f = {.kept = cli_alloc(bench->set.n, sizeof(*f.kept))};
	int rc = run_feed(bench, series, &f, sample);

	if (bench->free_bytes) {
		uint64_t left = cli_device_free(bench->device);

		sample->device_bytes = left < bench->free_bytes ? bench->free_bytes - left : 0;
	}
	if (rc == CLI_INTERRUPTED)
		rc = cli_signals_status();
	else if (rc)
		rc = f.loader ? cli_fail_last(bench->args) : cli_fail_setup(bench->args);
	hr_feed_close(f.feed, HR_FOREVER);
	for (size_t i = 0; i < f.n_kept; i++)
		hr_buffer_release(f.kept[i]);
	hr_loader_close(f.loader, HR_FOREVER);
	cli_free(f.kept);
	return rc;
}

static bool prepare(struct bench *bench, const struct bench_series *series)
{
	if (series->is_partly)
		return bench_make_partly(bench, series->percent);
	return series->is_cold ? bench_make_cold(bench) : bench_make_warm(bench);
}

int bench_sample_take(struct bench *bench, struct bench_series *series)
{
	struct bench_sample *sample = &series->samples[series->n];
	uint64_t before;
	uint64_t own;
	int status;

	sample->is_prepared = prepare(bench, series);
	if (cli_signals_status())
		return cli_signals_status();
	bench->has_peak_reset = cli_peak_reset();
	before = cli_status_bytes("VmRSS:");
	if (bench_is_ceiling(series->what))
		status = take_ceiling(bench, series, sample);
	else if (series->what == BENCH_FEED)
		status = take_feed(bench, series, sample);
	else
		status = take_load(bench, series, sample);
	sample->resident_bytes = cli_status_bytes("VmHWM:");
	own = before + (bench->about.driver || bench_is_ceiling(series->what) ? 0 : bench->set.bytes);
	sample->beyond_bytes = sample->resident_bytes > own ? sample->resident_bytes - own : 0;
	series->n += status == 0;
	return status;
}
