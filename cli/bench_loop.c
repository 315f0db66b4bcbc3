/* SPDX-License-Identifier: Apache-2.0 */
/*
 * "headrace bench --loop": a model that does not fit. Its layers pass through a cache again and again, as in
 * generation, under a budget of a quarter of the model; beside it the plain load of the whole model, in the same
 * rounds, so that the loop can be told as a share of it. And what a hit costs.
 *
 * Groups are made from names: all tensors with the same beginning up to their first number ("model.layers.7.") are
 * one, any other tensor is one of its own. A consumer that does no work is the hardest one: nothing hides a wait.
 */
#include "bench.h"
#include "json_writer.h"

#include <inttypes.h>
#include <string.h>

#define DEFAULT_PASSES 3
#define HIT_BATCHES    5
#define HITS           200000

struct loop_sample {
	uint64_t bytes; /* of the groups that were got */
	uint64_t loaded_bytes;
	uint64_t ns, cpu_ns;
	uint64_t device_bytes; /* the most that was missing of the device's free memory, by the driver; 0 on cpu */
	struct hr_cache_stats stats;
};

struct loop_way {
	const char *policy;
	uint32_t number; /* HR_POLICY_* */
	unsigned ahead;  /* groups hinted at before they are wanted */
	struct loop_sample *samples;
	size_t n;
};

struct loop {
	struct bench *bench;
	hr_group **groups;
	size_t n_groups;
	uint64_t budget_bytes, passes;
	struct loop_way ways[4];
	struct bench_series load; /* the plain one */
	double hit_ns[HIT_BATCHES];
};

/* ---- groups ---- */

/* How long the part of a name is that its group shares; 0: it has none. */
static size_t shared_part(const struct hr_tensor *tensor)
{
	for (size_t i = 1; i + 1 < tensor->name_len; i++) {
		size_t end = i;

		if (tensor->name[i - 1] != '.')
			continue;
		while (end < tensor->name_len && tensor->name[end] >= '0' && tensor->name[end] <= '9')
			end++;
		if (end > i && end < tensor->name_len && tensor->name[end] == '.')
			return end + 1;
	}
	return 0;
}

static bool are_together(const struct hr_tensor *a, const struct hr_tensor *b)
{
	size_t length = shared_part(a);

	return length && length == shared_part(b) && memcmp(a->name, b->name, length) == 0;
}

/* All tensors of the first one's group that are not taken yet, in the model's order. */
static size_t take_group(struct bench *bench, size_t first, bool *taken, uint64_t *tensors)
{
	struct hr_tensor head = HR_TENSOR_INIT;
	size_t n = 0;

	hr_model_tensor(bench->model, bench->set.tensors[first], &head);
	for (size_t i = first; i < bench->set.n; i++) {
		struct hr_tensor tensor = HR_TENSOR_INIT;

		hr_model_tensor(bench->model, bench->set.tensors[i], &tensor);
		if (taken[i] || (i != first && !are_together(&head, &tensor)))
			continue;
		taken[i] = true;
		tensors[n++] = bench->set.tensors[i];
	}
	return n;
}

static int make_groups(struct loop *loop)
{
	struct bench *bench = loop->bench;
	bool *taken = cli_alloc(bench->set.n, sizeof(*taken));
	uint64_t *tensors = cli_alloc(bench->set.n, sizeof(*tensors));
	int status = 0;

	loop->groups = cli_alloc(bench->set.n, sizeof(hr_group *));
	for (size_t i = 0; i < bench->set.n && status == 0; i++) {
		size_t n = taken[i] ? 0 : take_group(bench, i, taken, tensors);

		if (n == 0)
			continue;
		if (hr_group_new(bench->model, tensors, n, &loop->groups[loop->n_groups]))
			status = cli_fail_last(bench->args);
		else
			loop->n_groups++;
	}
	cli_free(taken);
	cli_free(tensors);
	return status;
}

/* ---- one sample ---- */

static void look_at_device(const struct bench *bench, uint64_t before, struct loop_sample *sample)
{
	uint64_t left;

	if (!before)
		return;
	left = cli_device_free(bench->device);
	if (left < before && before - left > sample->device_bytes)
		sample->device_bytes = before - left;
}

static int visit(struct loop *loop, hr_cache *cache, const struct loop_way *way, uint64_t step,
		 struct loop_sample *sample)
{
	hr_group *group = loop->groups[step % loop->n_groups];
	hr_buffer *buffer;
	int rc = 0;

	for (uint64_t k = 1; k <= way->ahead && step + k < loop->passes * loop->n_groups && !rc; k++)
		rc = hr_cache_prefetch(cache, loop->groups[(step + k) % loop->n_groups], NULL);
	if (!rc)
		rc = hr_cache_get(cache, group, NULL, &buffer);
	if (rc)
		return rc;
	sample->bytes += hr_group_bytes(group);
	hr_buffer_release(buffer);
	return 0;
}

static int walk(struct loop *loop, hr_cache *cache, const struct loop_way *way, struct loop_sample *sample)
{
	uint64_t before = loop->bench->about.driver ? cli_device_free(loop->bench->device) : 0;
	uint64_t start_cpu_ns = cli_cpu_ns(), start_ns = cli_now_ns();

	for (uint64_t step = 0; step < loop->passes * loop->n_groups; step++) {
		if (visit(loop, cache, way, step, sample))
			return cli_fail_last(loop->bench->args);
		if (cli_signals_status())
			return cli_signals_status();
		look_at_device(loop->bench, before, sample);
	}
	sample->ns = cli_now_ns() - start_ns;
	sample->cpu_ns = cli_cpu_ns() - start_cpu_ns;
	sample->stats = (struct hr_cache_stats)HR_CACHE_STATS_INIT;
	hr_cache_stats(cache, NULL, &sample->stats);
	sample->loaded_bytes = sample->stats.loaded_bytes;
	return 0;
}

static int open_cache(const struct loop *loop, uint32_t policy, hr_loader **loader, hr_cache **cache)
{
	struct hr_cache_opts opts = HR_CACHE_OPTS_INIT;
	struct hr_loader_opts loader_opts;

	cli_loader_opts(loop->bench->args, &loader_opts);
	*cache = NULL;
	if (hr_loader_open(loop->bench->device, &loader_opts, loader))
		return cli_fail_setup(loop->bench->args);
	opts.budget_bytes = loop->budget_bytes;
	opts.host_budget_bytes = loop->bench->args->host_budget_bytes;
	opts.policy = policy;
	return hr_cache_open(*loader, &opts, cache) ? cli_fail_setup(loop->bench->args) : 0;
}

/* The driver keeps what was given back for the next one, and would say that a cache takes nothing: what is kept goes
 * with its device. */
static int renew_device(struct bench *bench)
{
	if (!bench->about.driver)
		return 0;
	hr_device_close(bench->device);
	return cli_device_open(bench->args, &bench->device);
}

static int take_loop(struct loop *loop, struct loop_way *way)
{
	hr_loader *loader = NULL;
	hr_cache *cache = NULL;
	int status = renew_device(loop->bench);

	if (status)
		return status;
	status = open_cache(loop, way->number, &loader, &cache);
	bench_make_warm(loop->bench);
	if (status == 0)
		status = walk(loop, cache, way, &way->samples[way->n]);
	way->n += status == 0;
	hr_cache_close(cache, HR_FOREVER);
	hr_loader_close(loader, HR_FOREVER);
	return status;
}

/* Get and release of a group that is there. */
static int take_hits(struct loop *loop)
{
	hr_loader *loader = NULL;
	hr_cache *cache = NULL;
	hr_group *smallest = loop->groups[0];
	int status = open_cache(loop, HR_POLICY_LRU, &loader, &cache), rc = 0;

	for (size_t i = 1; i < loop->n_groups; i++)
		if (hr_group_bytes(loop->groups[i]) < hr_group_bytes(smallest))
			smallest = loop->groups[i];
	for (size_t batch = 0; batch <= HIT_BATCHES && status == 0; batch++) { /* the first one is not counted */
		uint64_t start_ns = cli_now_ns();
		hr_buffer *buffer;

		for (int i = 0; i < HITS && !rc; i++) {
			rc = hr_cache_get(cache, smallest, NULL, &buffer);
			hr_buffer_release(buffer);
		}
		if (batch > 0)
			loop->hit_ns[batch - 1] = (double)(cli_now_ns() - start_ns) / HITS;
		status = rc ? cli_fail_last(loop->bench->args) : cli_signals_status();
	}
	hr_cache_close(cache, HR_FOREVER);
	hr_loader_close(loader, HR_FOREVER);
	return status;
}

/* ---- the result ---- */

enum figure { DELIVERED, LOADED, CPU };

static struct bench_spread spread_of(const struct loop_way *way, enum figure figure)
{
	double *values = cli_alloc(way->n, sizeof(*values));
	struct bench_spread spread;

	for (size_t i = 0; i < way->n; i++) {
		const struct loop_sample *s = &way->samples[i];

		if (figure == CPU)
			values[i] = s->bytes ? (double)s->cpu_ns / (double)s->bytes : 0;
		else
			values[i] = cli_rate(figure == LOADED ? s->loaded_bytes : s->bytes, s->ns);
	}
	spread = bench_spread_of(values, way->n);
	cli_free(values);
	return spread;
}

static struct bench_spread load_rate(const struct loop *loop)
{
	double *values = cli_alloc(loop->load.n, sizeof(*values));
	struct bench_spread spread;

	for (size_t i = 0; i < loop->load.n; i++)
		values[i] = cli_rate(loop->load.samples[i].bytes, loop->load.samples[i].ns);
	spread = bench_spread_of(values, loop->load.n);
	cli_free(values);
	return spread;
}

static uint64_t peak_device(const struct loop_way *way)
{
	uint64_t peak = 0;

	for (size_t i = 0; i < way->n; i++)
		peak = way->samples[i].device_bytes > peak ? way->samples[i].device_bytes : peak;
	return peak;
}

static void print_text(struct loop *loop)
{
	struct bench_spread load = load_rate(loop), hit = bench_spread_of(loop->hit_ns, HIT_BATCHES);
	char a[32], b[32];

	printf("device         %s (%s)\n", loop->bench->about.spec, loop->bench->about.name);
	printf("model          %zu tensors in %zu groups, %s; budget %s\n", loop->bench->set.n, loop->n_groups,
	       cli_human(a, loop->bench->set.bytes), cli_human(b, loop->budget_bytes));
	printf("rounds         %zu, interleaved, warm; medians (lowest to highest)\n", loop->load.n);
	printf("  plain load       %8.2f GB/s  (%.2f to %.2f)\n", load.median, load.min, load.max);
	for (size_t i = 0; i < CLI_N(loop->ways); i++) {
		const struct loop_way *way = &loop->ways[i];
		struct bench_spread got = spread_of(way, DELIVERED);
		const struct hr_cache_stats *stats = &way->samples[way->n - 1].stats;

		printf("  %-4s %u ahead     %8.2f GB/s  (%.2f to %.2f)  %.2f of plain; loaded at %.2f GB/s (%.2f), "
		       "%" PRIu64 " of %" PRIu64 " hits",
		       way->policy, way->ahead, got.median, got.min, got.max,
		       load.median > 0 ? got.median / load.median : 0, spread_of(way, LOADED).median,
		       load.median > 0 ? spread_of(way, LOADED).median / load.median : 0, stats->n_hits,
		       stats->n_hits + stats->n_joins + stats->n_misses);
		printf(", held %s at most", cli_human(a, stats->peak_bytes));
		if (loop->bench->about.driver)
			printf(" (the driver says %s)", cli_human(a, peak_device(way)));
		putchar('\n');
	}
	printf("  hit              %8.0f ns    (%.0f to %.0f), get and release\n", hit.median, hit.min, hit.max);
}

static void json_samples(struct cli_json *json, const struct loop_way *way)
{
	cli_json_array(json, "samples");
	for (size_t i = 0; i < way->n; i++) {
		const struct loop_sample *s = &way->samples[i];

		cli_json_object(json, NULL);
		cli_json_u64(json, "bytes", s->bytes);
		cli_json_u64(json, "loaded_bytes", s->loaded_bytes);
		cli_json_u64(json, "ns", s->ns);
		cli_json_u64(json, "cpu_ns", s->cpu_ns);
		cli_json_u64(json, "device_taken_bytes", s->device_bytes);
		cli_json_end(json);
	}
	cli_json_end(json);
}

static void json_way(struct cli_json *json, const struct loop_way *way, double load)
{
	const struct hr_cache_stats *stats = &way->samples[way->n - 1].stats;
	struct bench_spread got = spread_of(way, DELIVERED), loaded = spread_of(way, LOADED), cpu = spread_of(way, CPU);

	cli_json_object(json, NULL);
	cli_json_text(json, "policy", way->policy);
	cli_json_u64(json, "ahead", way->ahead);
	bench_spread_json(json, "gb_per_second", &got);
	bench_spread_json(json, "loaded_gb_per_second", &loaded);
	bench_spread_json(json, "cpu_seconds_per_gb", &cpu);
	cli_json_real(json, "share_of_load", load > 0 ? got.median / load : 0);
	cli_json_real(json, "loaded_share_of_load", load > 0 ? loaded.median / load : 0);
	cli_json_u64(json, "hits", stats->n_hits);
	cli_json_u64(json, "joins", stats->n_joins);
	cli_json_u64(json, "misses", stats->n_misses);
	cli_json_u64(json, "evictions", stats->n_evictions);
	cli_json_u64(json, "passed_over", stats->n_passed_over);
	cli_json_u64(json, "host_hits", stats->n_host_hits);
	cli_json_u64(json, "peak_bytes", stats->peak_bytes);
	cli_json_u64(json, "host_peak_bytes", stats->host_peak_bytes);
	cli_json_u64(json, "peak_device_bytes", peak_device(way));
	json_samples(json, way);
	cli_json_end(json);
}

static void print_json(struct loop *loop)
{
	const struct cli_args *args = loop->bench->args;
	struct bench_spread load = load_rate(loop), hit = bench_spread_of(loop->hit_ns, HIT_BATCHES);
	struct hr_shard shard = HR_SHARD_INIT;
	struct cli_json json;

	hr_model_shard(loop->bench->model, 0, &shard);
	cli_json_start(&json, stdout);
	cli_json_text(&json, "kind", "headrace bench loop");
	bench_machine_json(&json, &loop->bench->about, shard.path ? shard.path : ".");
	cli_json_text(&json, "model", args->synthetic ? args->synthetic : args->names[0]);
	cli_json_u64(&json, "tensors", loop->bench->set.n);
	cli_json_u64(&json, "groups", loop->n_groups);
	cli_json_u64(&json, "bytes", loop->bench->set.bytes);
	cli_json_u64(&json, "budget_bytes", loop->budget_bytes);
	cli_json_u64(&json, "host_budget_bytes", args->host_budget_bytes);
	cli_json_u64(&json, "passes", loop->passes);
	cli_json_u64(&json, "rounds", loop->load.n);
	bench_spread_json(&json, "load_gb_per_second", &load);
	bench_spread_json(&json, "hit_ns", &hit);
	cli_json_array(&json, "loops");
	for (size_t i = 0; i < CLI_N(loop->ways); i++)
		json_way(&json, &loop->ways[i], load.median);
	cli_json_end(&json);
	cli_json_finish(&json);
}

/* ---- all of it ---- */

static int run_rounds(struct loop *loop)
{
	int status = 0;

	for (size_t round = 0; round < loop->bench->rounds && status == 0; round++) {
		status = bench_sample_take(loop->bench, &loop->load);
		for (size_t i = 0; i < CLI_N(loop->ways) && status == 0; i++)
			status = take_loop(loop, &loop->ways[i]);
	}
	return status == 0 ? take_hits(loop) : status;
}

int bench_loop_run(struct bench *bench)
{
	struct loop loop = {.bench = bench,
			    .passes = bench->args->passes ? bench->args->passes : DEFAULT_PASSES,
			    .budget_bytes = bench->args->budget_bytes ? bench->args->budget_bytes
								      : bench->set.bytes / 4,
			    .ways = {{.policy = "lru", .number = HR_POLICY_LRU, .ahead = 2},
				     {.policy = "loop", .number = HR_POLICY_LOOP, .ahead = 0},
				     {.policy = "loop", .number = HR_POLICY_LOOP, .ahead = 1},
				     {.policy = "loop", .number = HR_POLICY_LOOP, .ahead = 2}},
			    .load = {.what = BENCH_LOAD}};
	int status = make_groups(&loop);

	loop.load.samples = cli_alloc(bench->rounds, sizeof(*loop.load.samples));
	for (size_t i = 0; i < CLI_N(loop.ways); i++)
		loop.ways[i].samples = cli_alloc(bench->rounds, sizeof(*loop.ways[i].samples));
	if (status == 0)
		status = run_rounds(&loop);
	if (status == 0 && bench->args->json)
		print_json(&loop);
	else if (status == 0)
		print_text(&loop);
	for (size_t i = 0; i < loop.n_groups; i++)
		hr_group_release(loop.groups[i]);
	for (size_t i = 0; i < CLI_N(loop.ways); i++)
		cli_free(loop.ways[i].samples);
	cli_free(loop.load.samples);
	cli_free(loop.groups);
	return status;
}
