/* SPDX-License-Identifier: Apache-2.0 */
/*
 * "headrace bench": our figure and the ceilings beside it, in one run. This file decides which series there
 * are and goes through the rounds; bench.h says where the rest is.
 */
#include "bench.h"

#include <inttypes.h>
#include <string.h>

#define DEFAULT_ROUNDS 5
#define MAX_ROUNDS     1000
#define DEFAULT_DIR    "/var/tmp"

static const struct cli_option options[] = {
	{"synthetic", "SPEC", "make a checkpoint: llama:SIZE, small:NxSIZE[/SHARDS] or one:SIZE", NULL,
	 CLI_FIELD(synthetic), CLI_TEXT, 0},
	{"dir", "DIR", "where to make it, in a new folder that is removed afterwards (default /var/tmp)", NULL,
	 CLI_FIELD(dir), CLI_TEXT, 0},
	{"keep", NULL, "do not remove it", NULL, CLI_FIELD(keep), CLI_FLAG, 0},
	{"rounds", "N", "samples of each series (default 5)", NULL, CLI_FIELD(rounds), CLI_COUNT, 0},
	{"cold", NULL, "only with files out of the page cache (default: cold and warm)", NULL, CLI_FIELD(cold),
	 CLI_FLAG, 0},
	{"warm", NULL, "only with files in the page cache", NULL, CLI_FIELD(warm), CLI_FLAG, 0},
	{"feed", NULL, "also measure a feed, tensor by tensor, every buffer kept", NULL, CLI_FIELD(feed), CLI_FLAG, 0},
	{"open", NULL, "measure only how long opening takes, and its memory", NULL, CLI_FIELD(open), CLI_FLAG, 0},
	{"loop", NULL, "layers through a cache smaller than the model, beside a plain load; warm", NULL,
	 CLI_FIELD(loop), CLI_FLAG, 0},
	{"budget", "SIZE", "with --loop: of the cache (default a quarter of the model)", NULL, CLI_FIELD(budget_bytes),
	 CLI_SIZE, 0},
	{"host-budget", "SIZE", "with --loop: pinned host memory for what was evicted (default none)", NULL,
	 CLI_FIELD(host_budget_bytes), CLI_SIZE, 0},
	{"passes", "N", "with --loop: how often through all layers (default 3)", NULL, CLI_FIELD(passes), CLI_COUNT, 0},
	{"partly", NULL, "files in part in the page cache: 0 to 100 %, by auto and by each engine alone", NULL,
	 CLI_FIELD(partly), CLI_FLAG, 0},
	{"sweep", NULL, "the pool curve: staging from 4 MiB to 512 MiB (default warm)", NULL, CLI_FIELD(sweep),
	 CLI_FLAG, 0},
	{"sweep-slots", NULL, "with every pool, slots from 256 KiB to 8 MiB as well", NULL, CLI_FIELD(sweep_slots),
	 CLI_FLAG, 0},
	CLI_OPTIONS_LOADER,
	CLI_OPTION_ONLY,
	CLI_OPTION_JSON,
	{"help", NULL, "this text", NULL, CLI_FIELD(help), CLI_FLAG, 'h'},
};

/* ---- which series ---- */

static struct bench_series *add_series(struct bench *bench, enum bench_what what, bool is_cold)
{
	struct bench_series *series;

	bench->series = cli_grow(bench->series, bench->n_series + 1, sizeof(*bench->series));
	series = &bench->series[bench->n_series++];
	*series = (struct bench_series){.what = what, .is_cold = is_cold};
	series->samples = cli_alloc(bench->rounds, sizeof(*series->samples));
	return series;
}

static void add_pool(struct bench *bench, bool is_cold, uint64_t staging_bytes, uint64_t slot_bytes)
{
	struct bench_series *series = add_series(bench, BENCH_LOAD, is_cold);

	series->staging_bytes = staging_bytes;
	series->slot_bytes = slot_bytes;
}

static void add_sweep(struct bench *bench, bool is_cold)
{
	for (uint64_t staging = UINT64_C(4) << 20; staging <= UINT64_C(512) << 20; staging *= 2) {
		if (!bench->args->sweep_slots) {
			add_pool(bench, is_cold, staging, bench->args->slot_bytes);
			continue;
		}
		for (uint64_t slot = UINT64_C(256) << 10; slot <= UINT64_C(8) << 20; slot *= 2) {
			if (2 * slot <= staging)
				add_pool(bench, is_cold, staging, slot);
		}
	}
}

static void add_ours(struct bench *bench, bool is_cold)
{
	if (bench->args->sweep || bench->args->sweep_slots) {
		add_sweep(bench, is_cold);
		return;
	}
	add_series(bench, BENCH_LOAD, is_cold);
	if (bench->args->feed)
		add_series(bench, BENCH_FEED, is_cold);
}

static void add_part(struct bench *bench, const char *engine, unsigned percent)
{
	struct bench_series *series = add_series(bench, BENCH_LOAD, percent < 100);

	series->is_partly = true;
	series->percent = percent;
	series->engine = engine;
}

/* An engine that serves this device and these files, whatever it is asked to do. */
static bool is_engine_here(struct bench *bench, const struct hr_probe_row *row)
{
	struct hr_loader_opts opts;
	hr_loader *loader = NULL;
	bool is_here;

	if (strcmp(row->kind, "engine") != 0 || !row->usable)
		return false;
	cli_loader_opts(bench->args, &opts);
	opts.engine = row->name;
	is_here = hr_loader_open(bench->device, &opts, &loader) == 0;
	hr_loader_close(loader, HR_FOREVER);
	return is_here;
}

/* With each share: auto, and beside it every engine alone. */
static void add_partly(struct bench *bench)
{
	size_t n = 0, n_here = 0;

	hr_probe(bench->model, NULL, 0, &n);
	bench->rows = cli_alloc(n, sizeof(*bench->rows));
	if (hr_probe(bench->model, bench->rows, n, &n))
		n = 0;
	for (size_t i = 0; i < n; i++) {
		if (is_engine_here(bench, &bench->rows[i]))
			bench->rows[n_here++] = bench->rows[i];
	}
	for (unsigned percent = 0; percent <= 100; percent += 25) {
		add_part(bench, "auto", percent);
		for (size_t i = 0; i < n_here; i++)
			add_part(bench, bench->rows[i].name, percent);
	}
}

/* All cold ones first, so that a round reads the files into the page cache once. */
static void choose_series(struct bench *bench)
{
	const struct cli_args *args = bench->args;
	bool is_sweep = args->sweep || args->sweep_slots;
	bool is_direct = cli_is_direct_only(bench->model); /* never in the page cache, so there is nothing warm */
	bool with_cold = args->cold || is_direct || (!args->warm && !is_sweep);
	bool with_warm = !is_direct && (args->warm || !args->cold);

	if (args->partly) {
		add_partly(bench);
		return;
	}
	if (with_cold) {
		add_series(bench, BENCH_STORAGE, true);
		add_ours(bench, true);
	}
	if (bench->about.driver || with_warm)
		add_series(bench, BENCH_LINK, !with_warm);
	if (with_warm) {
		add_series(bench, BENCH_MEMORY, false);
		add_series(bench, BENCH_CACHED, false);
		add_ours(bench, false);
	}
}

/* ---- rounds ---- */

static void show_round(const struct bench *bench, size_t round, const struct bench_series *series)
{
	struct cli_progress terminal;

	cli_progress_start(&terminal, "");
	if (terminal.is_on)
		fprintf(stderr, "\rround %zu of %zu: %s %s\033[K", round + 1, bench->rounds,
			series->is_cold ? "cold" : "warm", bench_name(series->what));
}

static void clear_round(void)
{
	struct cli_progress terminal;

	cli_progress_start(&terminal, "");
	terminal.is_drawn = terminal.is_on;
	cli_progress_end(&terminal);
}

static int run_rounds(struct bench *bench)
{
	int status = 0;

	for (size_t round = 0; status == 0 && round < bench->rounds; round++) {
		for (size_t i = 0; status == 0 && i < bench->n_series; i++) {
			show_round(bench, round, &bench->series[i]);
			status = bench_sample_take(bench, &bench->series[i]);
			if (status == 0)
				status = cli_signals_status();
		}
	}
	clear_round();
	return status;
}

static int open_device(struct bench *bench)
{
	uint64_t start_ns = cli_now_ns();
	int status = cli_device_open(bench->args, &bench->device);

	if (status)
		return status;
	bench->device_open_ns = cli_now_ns() - start_ns;
	bench->about = (struct hr_device_info)HR_DEVICE_INFO_INIT;
	if (hr_device_info(bench->device, &bench->about))
		return cli_fail_last(bench->args);
	bench->free_bytes = bench->about.driver ? bench->about.free_bytes : 0;
	return 0;
}

static int open_model(struct bench *bench, const char *const *names, size_t n_names)
{
	int rc = n_names == 1 ? hr_model_open(names[0], NULL, &bench->model)
			      : hr_model_open_files(names, n_names, NULL, &bench->model);

	if (rc)
		return cli_fail_last(bench->args);
	cli_warn_model(bench->model);
	return cli_set_new(bench->args, bench->model, &bench->set);
}

static int measure(struct bench *bench, const char *const *names, size_t n_names)
{
	int status = open_model(bench, names, n_names);

	if (status == 0 && bench->args->warm && cli_is_direct_only(bench->model))
		status = cli_usage(bench->args,
				   "--warm: what lies on a block device is not read through the page cache");
	if (status == 0)
		status = open_device(bench);
	if (status == 0)
		status = bench_prober_open(bench);
	if (status)
		return status;
	if (bench->args->loop)
		return bench_loop_run(bench);
	choose_series(bench);
	status = run_rounds(bench);
	if (status)
		return status;
	if (bench->args->json)
		bench_report_json(bench);
	else
		bench_report_text(bench);
	return 0;
}

static void close_all(struct bench *bench)
{
	bench_prober_close(bench);
	hr_device_close(bench->device);
	cli_set_free(&bench->set);
	hr_model_close(bench->model);
	for (size_t i = 0; i < bench->n_series; i++)
		cli_free(bench->series[i].samples);
	cli_free(bench->series);
	cli_free(bench->rows);
}

static int bench_model(const struct cli_args *args, const char *const *names, size_t n_names)
{
	struct bench bench = {.args = args, .rounds = args->rounds ? args->rounds : DEFAULT_ROUNDS};
	int status;

	if (args->open)
		return bench_open_run(args, names, n_names);
	status = measure(&bench, names, n_names);
	close_all(&bench);
	return status;
}

static int bench_synthetic(const struct cli_args *args)
{
	struct bench_files files = {0};
	int status = bench_synthetic_new(args, args->synthetic, args->dir ? args->dir : DEFAULT_DIR, &files);
	const char *dir = files.dir;

	if (status == 0)
		status = bench_model(args, &dir, 1);
	bench_synthetic_free(&files, args->keep && status == 0);
	return status;
}

static int run(const struct cli_args *args)
{
	int status;

	if (!args->synthetic == !args->n_names)
		return cli_usage(args, "bench: name a model, or make one with --synthetic");
	if (args->partly &&
	    (args->cold || args->warm || args->feed || args->sweep || args->sweep_slots || args->engine))
		return cli_usage(args, "--partly chooses states and engines itself; leave the others out");
	if (args->rounds > MAX_ROUNDS)
		return cli_usage(args, "--rounds takes %d at most", MAX_ROUNDS);
	cli_signals_catch();
	if (args->synthetic)
		status = bench_synthetic(args);
	else
		status = bench_model(args, args->names, args->n_names);
	if (status == cli_signals_status() && status)
		cli_fail(args, HR_E_CANCELLED, "interrupted");
	return status;
}

const struct cli_command cli_cmd_bench = {
	.name = "bench",
	.operands = "NAME...|--synthetic SPEC",
	.summary = "measures loading beside the ceilings of this machine, cold and warm",
	.examples =
		"  headrace bench Llama-3.1-8B\n"
		"  headrace bench --synthetic llama:16GiB --json > result.json\n"
		"  headrace bench --synthetic small:100000x32KiB --warm --feed   very many small tensors\n"
		"  headrace bench --synthetic one:4GiB --warm                    one tensor of that size\n"
		"  headrace bench Llama-3.1-8B --sweep                           speed against the size of the pool\n"
		"  headrace bench Llama-3.1-8B --partly                          with a part of it in the page cache\n"
		"  headrace bench --synthetic small:92000x64/161 --open          only opening\n"
		"  headrace bench Llama-3.1-8B --loop --budget 4GiB              a model larger than its memory\n",
	.remarks =
		"Set-up of the loader is counted, opening the device is not. Cold means: dropped from the page cache\n"
		"and asked; warm: read once and asked. A round where that did not succeed is marked.\n"
		"Ctrl-C removes a synthetic checkpoint too, and ends with status 130.\n",
	.options = options,
	.n_options = CLI_N(options),
	.max_names = SIZE_MAX,
	.run = run,
};
