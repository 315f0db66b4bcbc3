/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tells what a benchmark found: every figure as median and spread, as a share of each ceiling of the same
 * run and state, and of the one that bounds it. The JSON holds every sample, so that nothing is lost by
 * summing up.
 */
#include "bench.h"
#include "json_writer.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

static int compare_doubles(const void *a, const void *b)
{
	double x = *(const double *)a;
	double y = *(const double *)b;

	return (x > y) - (x < y);
}

struct bench_spread bench_spread_of(double *values, size_t n)
{
	if (!n)
		return (struct bench_spread){0};
	qsort(values, n, sizeof(*values), compare_doubles);
	return (struct bench_spread){
		.median = n % 2 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2,
		.min = values[0],
		.max = values[n - 1],
	};
}

void bench_spread_json(struct cli_json *json, const char *key, const struct bench_spread *spread)
{
	cli_json_object(json, key);
	cli_json_real(json, "median", spread->median);
	cli_json_real(json, "min", spread->min);
	cli_json_real(json, "max", spread->max);
	cli_json_end(json);
}

/* ---- figures of a series ---- */

typedef double figure(const struct bench_sample *sample);

static double figure_rate(const struct bench_sample *sample)
{
	return cli_rate(sample->bytes, sample->ns);
}

static double figure_seconds(const struct bench_sample *sample)
{
	return (double)sample->ns / 1e9;
}

static double figure_cpu(const struct bench_sample *sample)
{
	return sample->bytes ? (double)sample->cpu_ns / (double)sample->bytes : 0;
}

static double figure_first_ms(const struct bench_sample *sample)
{
	return (double)sample->first_ns / 1e6;
}

static double figure_setup_ms(const struct bench_sample *sample)
{
	return (double)sample->setup_ns / 1e6;
}

static struct bench_spread spread(const struct bench_series *series, figure *of)
{
	double *values = cli_alloc(series->n, sizeof(*values));
	struct bench_spread found;

	for (size_t i = 0; i < series->n; i++)
		values[i] = of(&series->samples[i]);
	found = bench_spread_of(values, series->n);
	cli_free(values);
	return found;
}

static size_t unprepared(const struct bench_series *series)
{
	size_t n = 0;

	for (size_t i = 0; i < series->n; i++)
		n += !series->samples[i].is_prepared;
	return n;
}

static const struct bench_series *find_ceiling(const struct bench *bench, enum bench_what what)
{
	for (size_t i = 0; i < bench->n_series; i++) {
		if (bench->series[i].what == what && bench->series[i].n)
			return &bench->series[i];
	}
	return NULL;
}

static double ceiling_rate(const struct bench *bench, enum bench_what what)
{
	const struct bench_series *series = find_ceiling(bench, what);

	return series ? spread(series, figure_rate).median : 0;
}

/* What bounds a result: cold the storage, warm on cpu the memory, warm on a GPU the page cache; and the link to a
 * GPU. */
static enum bench_what bounding(const struct bench *bench, const struct bench_series *series)
{
	enum bench_what what = BENCH_MEMORY;
	double link = ceiling_rate(bench, BENCH_LINK);

	if (series->is_cold)
		what = BENCH_STORAGE;
	else if (bench->about.driver)
		what = BENCH_CACHED;
	if (bench->about.driver && link > 0 && link < ceiling_rate(bench, what))
		what = BENCH_LINK;
	return what;
}

static double share_of(const struct bench *bench, const struct bench_series *series, enum bench_what what)
{
	double ceiling = ceiling_rate(bench, what);

	return ceiling > 0 ? spread(series, figure_rate).median / ceiling : 0;
}

static const char *state_name(const struct bench_series *series)
{
	return series->is_partly ? "partly" : series->is_cold ? "cold" : "warm";
}

/* ---- text ---- */

static void put_unprepared(const struct bench_series *series)
{
	size_t n = unprepared(series);

	if (n)
		printf("  (%zu of %zu rounds not proved %s)", n, series->n, state_name(series));
}

static void put_ceiling(const struct bench_series *series)
{
	struct bench_spread rate = spread(series, figure_rate);

	printf("  %-8s %8.2f GB/s  (%.2f to %.2f)  %.3f CPU-s/GB", bench_name(series->what), rate.median, rate.min,
	       rate.max, spread(series, figure_cpu).median);
	if (series->what == BENCH_CACHED || series->what == BENCH_STORAGE)
		put_unprepared(series);
	putchar('\n');
}

static void put_memory(const struct bench *bench, const struct bench_series *series)
{
	const struct bench_sample *last = &series->samples[series->n - 1];
	char a[32], b[32];

	printf("             pool %s", cli_human(a, series->stats.staging_bytes));
	if (series->slot_bytes)
		printf(" in slots of %s", cli_human(a, series->slot_bytes));
	printf(", %s of it used; host memory beyond tensors %s", cli_human(a, series->stats.peak_staging_bytes),
	       cli_human(b, last->beyond_bytes));
	if (bench->about.driver)
		printf("; device memory taken %s for %s", cli_human(a, last->device_bytes),
		       cli_human(b, bench->set.bytes));
	putchar('\n');
}

static void put_result(const struct bench *bench, const struct bench_series *series)
{
	struct bench_spread rate = spread(series, figure_rate);
	enum bench_what bound = bounding(bench, series);

	printf("  %-4s %-4s %8.2f GB/s  (%.2f to %.2f)", bench_name(series->what), state_name(series), rate.median,
	       rate.min, rate.max);
	if (ceiling_rate(bench, bound) > 0)
		printf("  %.2f of %s", share_of(bench, series, bound), bench_name(bound));
	printf("  %.3f CPU-s/GB  first tensor %.1f ms", spread(series, figure_cpu).median,
	       spread(series, figure_first_ms).median);
	put_unprepared(series);
	putchar('\n');
	put_memory(bench, series);
	fputs("             ", stdout);
	cli_put_engines(stdout, series->stats.cached_bytes, series->stats.direct_bytes);
	if (series->stats.note[0])
		printf("; %s", series->stats.note);
	putchar('\n');
}

/* ---- partly cached ---- */

/* The best of the engines alone with the same share of the files in the page cache. */
static double best_alone(const struct bench *bench, unsigned percent)
{
	double best = 0;

	for (size_t i = 0; i < bench->n_series; i++) {
		const struct bench_series *series = &bench->series[i];
		double rate = series->n ? spread(series, figure_rate).median : 0;

		if (series->percent == percent && strcmp(series->engine, "auto") != 0 && rate > best)
			best = rate;
	}
	return best;
}

static void put_partly(const struct bench *bench)
{
	for (size_t i = 0; i < bench->n_series; i++) {
		const struct bench_series *series = &bench->series[i];
		struct bench_spread rate = spread(series, figure_rate);
		double best = best_alone(bench, series->percent);

		if (!series->n)
			continue;
		printf("  %3u %%  %-8s %8.2f GB/s  (%.2f to %.2f)  %.3f CPU-s/GB", series->percent, series->engine,
		       rate.median, rate.min, rate.max, spread(series, figure_cpu).median);
		if (strcmp(series->engine, "auto") == 0 && best > 0)
			printf("  %.2f of the better engine alone", rate.median / best);
		put_unprepared(series);
		putchar('\n');
	}
}

void bench_report_text(const struct bench *bench)
{
	char bytes[32];

	printf("device         %s (%s)\n", bench->about.spec, bench->about.name);
	printf("model          %zu tensors, %s, %" PRIu32 " shard%s\n", bench->set.n,
	       cli_human(bytes, bench->set.bytes), hr_model_n_shards(bench->model),
	       hr_model_n_shards(bench->model) == 1 ? "" : "s");
	printf("rounds         %zu, interleaved; medians (lowest to highest), set-up counted\n", bench->rounds);
	if (bench->args->partly) {
		put_partly(bench);
		return;
	}
	puts("ceilings");
	for (size_t i = 0; i < bench->n_series; i++) {
		if (bench_is_ceiling(bench->series[i].what) && bench->series[i].n)
			put_ceiling(&bench->series[i]);
	}
	printf("results\n");
	for (size_t i = 0; i < bench->n_series; i++) {
		if (!bench_is_ceiling(bench->series[i].what) && bench->series[i].n)
			put_result(bench, &bench->series[i]);
	}
}

/* ---- JSON ---- */

static void json_samples(struct cli_json *json, const struct bench_series *series)
{
	cli_json_array(json, "samples");
	for (size_t i = 0; i < series->n; i++) {
		const struct bench_sample *sample = &series->samples[i];

		cli_json_object(json, NULL);
		cli_json_u64(json, "bytes", sample->bytes);
		cli_json_u64(json, "ns", sample->ns);
		cli_json_u64(json, "cpu_ns", sample->cpu_ns);
		if (!bench_is_ceiling(series->what)) {
			cli_json_u64(json, "setup_ns", sample->setup_ns);
			cli_json_u64(json, "first_ns", sample->first_ns);
			cli_json_u64(json, "peak_resident_bytes", sample->resident_bytes);
			cli_json_u64(json, "beyond_tensors_bytes", sample->beyond_bytes);
			cli_json_u64(json, "device_taken_bytes", sample->device_bytes);
		}
		cli_json_bool(json, "prepared", sample->is_prepared);
		cli_json_end(json);
	}
	cli_json_end(json);
}

static void json_figure(struct cli_json *json, const char *key, const struct bench_series *series, figure *of)
{
	struct bench_spread found = spread(series, of);

	bench_spread_json(json, key, &found);
}

static void json_common(struct cli_json *json, const struct bench_series *series)
{
	json_figure(json, "gb_per_second", series, figure_rate);
	json_figure(json, "seconds", series, figure_seconds);
	json_figure(json, "cpu_seconds_per_gb", series, figure_cpu);
	cli_json_u64(json, "rounds_not_prepared", unprepared(series));
}

static void json_shares(struct cli_json *json, const struct bench *bench, const struct bench_series *series)
{
	const struct bench_series *cached = find_ceiling(bench, BENCH_CACHED);
	enum bench_what bound = bounding(bench, series);

	cli_json_text(json, "bound", bench_name(bound));
	cli_json_object(json, "share_of");
	for (enum bench_what what = BENCH_STORAGE; what <= BENCH_MEMORY; what++) {
		if (find_ceiling(bench, what))
			cli_json_real(json, bench_name(what), share_of(bench, series, what));
	}
	cli_json_end(json);
	if (cached && spread(cached, figure_cpu).median > 0)
		cli_json_real(json, "cpu_of_cached",
			      spread(series, figure_cpu).median / spread(cached, figure_cpu).median);
}

static void json_result(struct cli_json *json, const struct bench *bench, const struct bench_series *series)
{
	const struct hr_stats *stats = &series->stats;

	cli_json_object(json, NULL);
	cli_json_text(json, "what", bench_name(series->what));
	cli_json_text(json, "state", state_name(series));
	if (series->is_partly) {
		double best = best_alone(bench, series->percent);

		cli_json_u64(json, "resident_percent", series->percent);
		cli_json_text(json, "engine", series->engine);
		cli_json_real(json, "of_best_alone", best > 0 ? spread(series, figure_rate).median / best : 0);
	}
	cli_json_u64(json, "staging_bytes", stats->staging_bytes);
	cli_json_u64(json, "slots", stats->n_slots);
	cli_json_u64(json, "peak_staging_bytes", stats->peak_staging_bytes);
	cli_json_u64(json, "peak_pinned_bytes", cli_pinned_bytes(bench->args->engine, bench->about.driver, stats));
	cli_json_u64(json, "readers", stats->n_readers);
	json_common(json, series);
	json_figure(json, "first_tensor_ms", series, figure_first_ms);
	json_figure(json, "setup_ms", series, figure_setup_ms);
	json_shares(json, bench, series);
	cli_json_engines(json, stats->cached_bytes, stats->direct_bytes);
	cli_json_waits(json, stats);
	cli_json_u64(json, "reads", stats->n_chunks);
	cli_json_u64(json, "copies", stats->n_copies);
	cli_json_u64(json, "copy_calls", stats->n_batches);
	cli_json_text(json, "note", stats->note);
	json_samples(json, series);
	cli_json_end(json);
}

static void json_ceilings(struct cli_json *json, const struct bench *bench)
{
	cli_json_object(json, "ceilings");
	for (size_t i = 0; i < bench->n_series; i++) {
		const struct bench_series *series = &bench->series[i];

		if (!bench_is_ceiling(series->what) || !series->n)
			continue;
		cli_json_object(json, bench_name(series->what));
		json_common(json, series);
		json_samples(json, series);
		cli_json_end(json);
	}
	cli_json_end(json);
}

static void json_options(struct cli_json *json, const struct cli_args *args)
{
	cli_json_object(json, "options");
	cli_json_u64(json, "staging_bytes", args->staging_bytes);
	cli_json_u64(json, "slot_bytes", args->slot_bytes);
	cli_json_text(json, "engine", args->engine ? args->engine : "auto");
	cli_json_text(json, "caching", args->caching ? args->caching : "auto");
	cli_json_u64(json, "readers", args->readers);
	cli_json_end(json);
}

static void json_model(struct cli_json *json, const struct bench *bench)
{
	const struct cli_args *args = bench->args;

	cli_json_object(json, "model");
	cli_json_text(json, "name", args->synthetic ? args->synthetic : args->names[0]);
	cli_json_bool(json, "synthetic", args->synthetic != NULL);
	cli_json_u64(json, "tensors", bench->set.n);
	cli_json_u64(json, "shards", hr_model_n_shards(bench->model));
	cli_json_u64(json, "bytes", bench->set.bytes);
	cli_json_end(json);
}

void bench_report_json(const struct bench *bench)
{
	struct hr_shard shard = HR_SHARD_INIT;
	struct cli_json json;

	hr_model_shard(bench->model, 0, &shard);
	cli_json_start(&json, stdout);
	cli_json_text(&json, "kind",
		      bench->args->sweep    ? "headrace bench sweep"
		      : bench->args->partly ? "headrace bench partly"
					    : "headrace bench");
	bench_machine_json(&json, &bench->about, shard.path ? shard.path : ".");
	json_model(&json, bench);
	json_options(&json, bench->args);
	cli_json_u64(&json, "rounds", bench->rounds);
	cli_json_bool(&json, "peak_resident_is_per_sample", bench->has_peak_reset);
	cli_json_real(&json, "device_open_seconds", (double)bench->device_open_ns / 1e9);
	json_ceilings(&json, bench);
	cli_json_array(&json, "results");
	for (size_t i = 0; i < bench->n_series; i++) {
		if (!bench_is_ceiling(bench->series[i].what) && bench->series[i].n)
			json_result(&json, bench, &bench->series[i]);
	}
	cli_json_end(&json);
	cli_json_finish(&json);
}
