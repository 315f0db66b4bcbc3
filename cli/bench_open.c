/* SPDX-License-Identifier: Apache-2.0 */
/*
 * "headrace bench --open": how long it takes to open a model (every header read and checked), and how much
 * memory that needs beside the bytes of the headers.
 */
#include "bench.h"
#include "json_writer.h"

#include <inttypes.h>
#include <malloc.h>

struct opening {
	uint64_t tensors, shards, header_bytes;
	uint64_t peak_bytes; /* grown by, at most */
	double *ms;
	size_t n;
};

static int open_once(const struct cli_args *args, const char *const *names, size_t n_names, struct opening *o)
{
	hr_model *model = NULL;
	uint64_t before, peak, start_ns;
	int rc;

	malloc_trim(0); /* what an earlier round left would hide what this one needs */
	cli_peak_reset();
	before = cli_status_bytes("VmRSS:");
	start_ns = cli_now_ns();
	rc = n_names == 1 ? hr_model_open(names[0], NULL, &model) : hr_model_open_files(names, n_names, NULL, &model);
	o->ms[o->n] = (double)(cli_now_ns() - start_ns) / 1e6;
	if (rc)
		return cli_fail_last(args);
	peak = cli_status_bytes("VmHWM:");
	if (peak > before && peak - before > o->peak_bytes)
		o->peak_bytes = peak - before;
	o->n++;
	o->tensors = hr_model_n_tensors(model);
	o->shards = hr_model_n_shards(model);
	o->header_bytes = 0;
	for (uint32_t s = 0; s < o->shards; s++) {
		struct hr_shard shard = HR_SHARD_INIT;

		if (hr_model_shard(model, s, &shard) == 0)
			o->header_bytes += shard.data_offset;
	}
	hr_model_close(model);
	return 0;
}

static void print_text(const struct opening *o, const struct bench_spread *ms)
{
	char header[32], peak[32];

	printf("tensors        %" PRIu64 " in %" PRIu64 " shards\n", o->tensors, o->shards);
	printf("headers        %s\n", cli_human(header, o->header_bytes));
	printf("open           %.2f ms (%.2f to %.2f in %zu rounds), files warm\n", ms->median, ms->min, ms->max, o->n);
	printf("memory         %s at most (%.2f times the headers)\n", cli_human(peak, o->peak_bytes),
	       o->header_bytes ? (double)o->peak_bytes / (double)o->header_bytes : 0);
}

static void print_json(const struct opening *o, const struct bench_spread *ms, const char *path)
{
	struct cli_json json;

	cli_json_start(&json, stdout);
	cli_json_text(&json, "kind", "headrace bench open");
	bench_machine_json(&json, NULL, path);
	cli_json_u64(&json, "tensors", o->tensors);
	cli_json_u64(&json, "shards", o->shards);
	cli_json_u64(&json, "header_bytes", o->header_bytes);
	cli_json_u64(&json, "rounds", o->n);
	bench_spread_json(&json, "open_ms", ms);
	cli_json_u64(&json, "peak_memory_bytes", o->peak_bytes);
	cli_json_finish(&json);
}

int bench_open_run(const struct cli_args *args, const char *const *names, size_t n_names)
{
	size_t rounds = args->rounds ? args->rounds : 5;
	struct opening o = {.ms = cli_alloc(rounds + 1, sizeof(*o.ms))};
	int status = open_once(args, names, n_names, &o);

	o.n = 0; /* the first one brought the headers into the page cache */
	while (status == 0 && o.n < rounds && !cli_signals_status())
		status = open_once(args, names, n_names, &o);
	if (status == 0 && cli_signals_status())
		status = cli_signals_status();
	if (status == 0) {
		struct bench_spread ms = bench_spread_of(o.ms, o.n);

		if (args->json)
			print_json(&o, &ms, names[0]);
		else
			print_text(&o, &ms);
	}
	cli_free(o.ms);
	return status;
}
