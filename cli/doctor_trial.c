/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The trial: a bounded sample of the real files, loaded with each setting that can be used, and the best of them.
 *
 * In each round every setting gets one sample, so that a neighbour's noise falls on all of them alike. The size of the
 * sample is chosen so that a few rounds fit into the time allowed. Setting up (pinning the pool) is not in the rates:
 * in a sample it would weigh more than in the whole model. Cold means: dropped from the page cache and asked; warm:
 * read once and asked. A setting that fails is told with its error, and the others go on.
 */
#include "bench.h"
#include "doctor.h"

#include <string.h>

#define DEFAULT_SAMPLE  (UINT64_C(2) << 30)
#define DEFAULT_SECONDS 10
#define FIRST_SAMPLE    (UINT64_C(128) << 20) /* to find out how fast it is */
#define LEAST_SAMPLE    (UINT64_C(32) << 20)
#define ROUNDS_WANTED   3    /* fewer say nothing of noise */
#define CLEARLY         1.10 /* how much faster than auto a setting must be to be worth naming */
#define MOSTLY_WARM     0.9

struct trial {
	struct doctor *d;
	struct cli_set sample;
	struct bench state; /* only what bench_state.c uses */
	uint64_t start_ns, budget_ns;
};

/* ---- which settings ---- */

static void add_series(struct doctor_trial *trial, const char *engine, uint32_t caching, bool is_cold)
{
	trial->series = cli_grow(trial->series, trial->n + 1, sizeof(*trial->series));
	trial->series[trial->n] = (struct doctor_series){.caching = caching, .is_cold = is_cold, .is_prepared = true};
	snprintf(trial->series[trial->n].engine, sizeof(trial->series[trial->n].engine), "%s", engine);
	trial->n++;
}

/* All cold ones first, so that a round fills the page cache once. Reads around the page cache are the same cold and
 * warm. */
static void choose_series(struct doctor *d)
{
	for (int is_cold = 1; is_cold >= 0; is_cold--) {
		add_series(&d->trial, "auto", HR_CACHING_AUTO, is_cold);
		for (size_t i = 0; i < d->n_engines; i++) {
			const struct doctor_engine *engine = &d->engines[i];

			if (engine->works[HR_CACHING_FILL])
				add_series(&d->trial, engine->name, HR_CACHING_FILL, is_cold);
			if (engine->works[HR_CACHING_BYPASS] && is_cold)
				add_series(&d->trial, engine->name, HR_CACHING_BYPASS, true);
		}
	}
}

/* ---- samples ---- */

static bool is_over(const struct trial *t)
{
	return cli_now_ns() - t->start_ns >= t->budget_ns;
}

/* A transfer's rate starts when the first read could: setting up is left out. */
static int take_sample(struct trial *t, struct doctor_series *series, struct doctor_sample *sample)
{
	struct hr_loader_opts opts;
	struct cli_transfer transfer = {.device = t->d->device, .model = t->d->model, .set = &t->sample, .opts = &opts};
	int rc;

	cli_loader_opts(t->d->args, &opts);
	opts.engine = series->engine;
	opts.caching = series->caching;
	if (strcmp(series->engine, "cufile") != 0)
		opts.flags &= ~HR_LOADER_CUFILE_COMPAT;
	series->is_prepared &= series->is_cold ? bench_make_cold(&t->state) : bench_make_warm(&t->state);
	if (cli_signals_status())
		return CLI_INTERRUPTED;
	rc = cli_transfer_run(&transfer);
	if (rc == 0) {
		sample->gb_per_second = cli_rate(t->sample.bytes, transfer.elapsed_ns - transfer.setup_ns);
		sample->cpu_per_gb = (double)transfer.cpu_ns / (double)t->sample.bytes;
		series->pinned_bytes = cli_pinned_bytes(series->engine, t->d->facts.to_gpu, &transfer.stats);
		if (transfer.stats.peak_staging_bytes > series->staging_peak_bytes)
			series->staging_peak_bytes = transfer.stats.peak_staging_bytes;
	} else if (rc != CLI_INTERRUPTED) {
		snprintf(series->error, sizeof(series->error), "%s", hr_error_last()->message);
	}
	cli_transfer_close(&transfer);
	return rc;
}

/* The first round is finished even if it takes longer than allowed. */
static int run_rounds(struct trial *t)
{
	struct doctor_trial *trial = &t->d->trial;

	for (size_t round = 0; round < DOCTOR_MAX_ROUNDS && (round == 0 || !is_over(t)); round++) {
		for (size_t i = 0; i < trial->n; i++) {
			struct doctor_series *series = &trial->series[i];

			if (series->error[0] || (round > 0 && is_over(t)))
				continue;
			if (take_sample(t, series, &series->samples[series->n]) == CLI_INTERRUPTED)
				return cli_signals_status();
			series->n += !series->error[0];
		}
	}
	return 0;
}

/* ---- how much ---- */

static int open_sample(struct trial *t, uint64_t bytes)
{
	cli_set_free(&t->sample);
	cli_set_first(&t->d->set, bytes, &t->sample);
	bench_prober_close(&t->state);
	t->state = (struct bench){.args = t->d->args, .model = t->d->model, .set = t->sample};
	return bench_prober_open(&t->state);
}

/* No more than what fits beside everything else in the memory it goes to. */
static uint64_t most_bytes(const struct doctor *d)
{
	uint64_t most = d->args->sample_bytes ? d->args->sample_bytes : DEFAULT_SAMPLE;
	uint64_t room = (d->facts.to_gpu ? d->facts.device.free_bytes : doctor_memory_left(&d->facts)) / 2;

	return room && room < most ? room : most;
}

/* One small cold sample tells how fast it goes; its second half of the work is the page cache's. */
static int choose_size(struct trial *t)
{
	struct doctor_series first = {.engine = "auto", .is_cold = true};
	struct doctor_sample sample = {0};
	uint64_t most = most_bytes(t->d), bytes;
	size_t n_cold = 0;
	int status = open_sample(t, most < FIRST_SAMPLE ? most : FIRST_SAMPLE);

	if (status)
		return status;
	if (take_sample(t, &first, &sample) == CLI_INTERRUPTED)
		return cli_signals_status();
	if (first.error[0])
		return cli_fail(t->d->args, HR_E_IO, "the trial cannot start: %s", first.error);
	for (size_t i = 0; i < t->d->trial.n; i++)
		n_cold += t->d->trial.series[i].is_cold;
	bytes = (uint64_t)(sample.gb_per_second * (double)t->budget_ns / ROUNDS_WANTED / (double)(n_cold + 1));
	if (bytes < LEAST_SAMPLE)
		bytes = LEAST_SAMPLE;
	return open_sample(t, bytes < most ? bytes : most);
}

/* ---- which is best ---- */

struct bench_spread doctor_rate(const struct doctor_series *series)
{
	double values[DOCTOR_MAX_ROUNDS];

	for (size_t i = 0; i < series->n; i++)
		values[i] = series->samples[i].gb_per_second;
	return series->n ? bench_spread_of(values, series->n) : (struct bench_spread){0};
}

double doctor_cpu(const struct doctor_series *series)
{
	double values[DOCTOR_MAX_ROUNDS];

	for (size_t i = 0; i < series->n; i++)
		values[i] = series->samples[i].cpu_per_gb;
	return series->n ? bench_spread_of(values, series->n).median : 0;
}

/* auto, unless something else is faster in every round than auto in any, and clearly so. */
static void choose_best(struct doctor *d)
{
	const struct doctor_facts *facts = &d->facts;
	bool is_warm = facts->plan_bytes && (double)facts->resident_bytes >= MOSTLY_WARM * (double)facts->plan_bytes;
	const struct doctor_series *best = NULL, *usual = NULL;
	struct bench_spread standard = {0}, fastest = {0};

	for (size_t i = 0; i < d->trial.n; i++) {
		const struct doctor_series *series = &d->trial.series[i];
		struct bench_spread rate = doctor_rate(series);

		if (series->is_cold == is_warm || !series->n)
			continue;
		if (strcmp(series->engine, "auto") == 0) {
			usual = series;
			standard = rate;
		}
		if (!best || rate.median > fastest.median) {
			best = series;
			fastest = rate;
		}
	}
	if (best && best != usual && usual && best->n >= ROUNDS_WANTED && usual->n >= ROUNDS_WANTED &&
	    fastest.median > CLEARLY * standard.median && fastest.min > standard.max) {
		d->best_engine = best->engine;
		d->best_caching = best->caching;
		snprintf(d->best_why, sizeof(d->best_why), "%.2f GB/s %s, and auto %.2f", fastest.median,
			 is_warm ? "warm" : "cold", standard.median);
	} else {
		snprintf(d->best_why, sizeof(d->best_why), "the defaults: %.2f GB/s %s, and %s", standard.median,
			 is_warm ? "warm" : "cold",
			 best && best != usual && best->n < ROUNDS_WANTED
				 ? "too few rounds to name another; allow more --seconds"
				 : "nothing was clearly faster");
	}
}

int doctor_trial_run(struct doctor *d)
{
	struct trial t = {.d = d, .start_ns = cli_now_ns()};
	int status;

	t.budget_ns = (d->args->seconds ? d->args->seconds : DEFAULT_SECONDS) * UINT64_C(1000000000);
	choose_series(d);
	status = choose_size(&t);
	if (status == 0)
		status = run_rounds(&t);
	d->trial.sample_bytes = t.sample.bytes;
	d->trial.seconds = (double)(cli_now_ns() - t.start_ns) / 1e9;
	bench_prober_close(&t.state);
	cli_set_free(&t.sample);
	if (status == 0)
		choose_best(d);
	else if (status == cli_signals_status())
		cli_fail(d->args, HR_E_CANCELLED, "interrupted");
	return status;
}
