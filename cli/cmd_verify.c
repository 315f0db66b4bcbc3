/* SPDX-License-Identifier: Apache-2.0 */
/*
 * "headrace verify": loads through the engine that is asked for, reads back from the device, and compares every byte.
 *
 * It works in windows of bounded memory: two buffers on the device, one of which is filled while the other is compared,
 * so that a model larger than the device's memory passes through. Each window is a job over slices of tensors that
 * follow one another in the files. What the bytes are compared with is a plain read of the same files, or those of
 * another copy of the model; a list of digests says in addition whether the files themselves are right.
 */
#include "digests.h"
#include "faults.h"
#include "json_writer.h"
#include "work.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <sys/stat.h>

#define ALIGN             256
#define N_WINDOWS         2
#define MIN_WINDOW        (UINT64_C(64) << 10)
#define DEFAULT_WINDOW    (UINT64_C(128) << 20)
#define DEFAULT_WINDOW_IN "128MiB"

static const struct cli_option options[] = {
	{"against", "WHAT", "another copy of the model, or a list of digests (default: the files of NAME)", NULL,
	 CLI_FIELD(against), CLI_TEXT, 0},
	{"window", "SIZE", "device memory for the bytes under comparison, taken twice (default " DEFAULT_WINDOW_IN ")",
	 NULL, CLI_FIELD(window_bytes), CLI_SIZE, 0},
	CLI_OPTIONS_LOADER,
	CLI_OPTION_ONLY,
	CLI_OPTION_EXPECT,
	CLI_OPTION_UGDS,
	CLI_OPTION_JSON,
	{"help", NULL, "this text", NULL, CLI_FIELD(help), CLI_FLAG, 'h'},
};

/* One part of the device's memory and what is in it, or on its way there. */
struct window {
	hr_buffer *buffer;
	hr_job *job;
	struct cli_piece *pieces;
	size_t n;
	uint64_t bytes;
};

struct verify {
	const struct cli_args *args;
	hr_model *model;
	hr_model *against; /* the same, unless another copy is named */
	uint64_t *twins;
	struct cli_digest_check digests;
	struct cli_faults faults;
	hr_device *device;
	hr_loader *loader;
	struct hr_device_info about;
	struct cli_set set;
	struct cli_progress progress;
	struct window windows[N_WINDOWS];
	uint64_t window_bytes;
	uint64_t n_windows; /* that were filled */
	size_t next;        /* in the set: where the next window begins */
	uint64_t next_start;
	uint64_t done_bytes;
	uint64_t elapsed_ns;
	struct hr_stats stats;
};

/* ---- what to compare with ---- */

static bool is_model_name(const char *name)
{
	struct stat st;
	size_t len = strlen(name);

	if (cli_is_store(name) || (stat(name, &st) == 0 && S_ISDIR(st.st_mode)))
		return true;
	return (len > 12 && strcmp(name + len - 12, ".safetensors") == 0) ||
	       (len > 5 && strcmp(name + len - 5, ".json") == 0);
}

static bool is_alike(const struct hr_tensor *a, const struct hr_tensor *b)
{
	return a->dtype == b->dtype && a->rank == b->rank && a->bytes == b->bytes &&
	       (a->rank == 0 || memcmp(a->dims, b->dims, a->rank * sizeof(*a->dims)) == 0);
}

/* The tensor of the other copy. 0 or an exit status. */
static int find_twin(struct verify *v, uint64_t number)
{
	struct hr_tensor ours = HR_TENSOR_INIT, theirs = HR_TENSOR_INIT;
	const char *problem = NULL;
	char *name;

	if (hr_model_tensor(v->model, number, &ours))
		return cli_fail_last(v->args);
	if (hr_model_find(v->against, ours.name, ours.name_len, &v->twins[number]) ||
	    hr_model_tensor(v->against, v->twins[number], &theirs))
		problem = "is missing";
	else if (!is_alike(&ours, &theirs))
		problem = "has another dtype or shape";
	if (!problem)
		return 0;
	name = cli_shown_name(ours.name, ours.name_len);
	cli_fail(v->args, HR_E_DIGEST, "the tensor '%.300s' of %s %s in %s: these are not copies of one model", name,
		 v->args->names[0], problem, v->args->against);
	cli_free(name);
	return CLI_BAD;
}

/* A tensor that only the other copy has. 0 or an exit status. */
static int find_surplus(struct verify *v)
{
	uint64_t n = hr_model_n_tensors(v->against), number;

	for (uint64_t i = 0; i < n; i++) {
		struct hr_tensor theirs = HR_TENSOR_INIT;
		char *name;

		if (hr_model_tensor(v->against, i, &theirs))
			return cli_fail_last(v->args);
		if (hr_model_find(v->model, theirs.name, theirs.name_len, &number) == 0)
			continue;
		name = cli_shown_name(theirs.name, theirs.name_len);
		cli_fail(v->args, HR_E_DIGEST,
			 "the tensor '%.300s' of %s is missing in %s: these are not copies of one model", name,
			 v->args->against, v->args->names[0]);
		cli_free(name);
		return CLI_BAD;
	}
	return 0;
}

static int pair_with_copy(struct verify *v)
{
	int status = 0;

	if (hr_model_open(v->args->against, NULL, &v->against))
		return cli_fail_last(v->args);
	v->twins = cli_alloc(hr_model_n_tensors(v->model), sizeof(*v->twins));
	for (size_t i = 0; status == 0 && i < v->set.n; i++)
		status = find_twin(v, v->set.tensors[i]);
	return status || v->args->n_only ? status : find_surplus(v);
}

static int open_expected(struct verify *v)
{
	const char *against = v->args->against;

	if (against && is_model_name(against))
		return pair_with_copy(v);
	v->against = hr_model_acquire(v->model);
	if (!against)
		return 0;
	v->digests = (struct cli_digest_check){.path = against, .model = v->model, .faults = &v->faults};
	if (cli_digest_check_open(&v->digests))
		return 0;
	return cli_fail(v->args, HR_E_NOTFOUND, "cannot open %s: %s", against, strerror(errno));
}

/* ---- windows ---- */

static void add_piece(struct verify *v, struct window *w, uint64_t at, uint64_t bytes)
{
	w->pieces = cli_grow(w->pieces, w->n + 1, sizeof(*w->pieces));
	w->pieces[w->n++] = (struct cli_piece){.tensor = v->set.tensors[v->next],
					       .start = v->next_start,
					       .bytes = bytes,
					       .buffer = w->buffer,
					       .offset = at};
	w->bytes += bytes;
}

/* Takes as much of what is next as there is room for; false if nothing is left. */
static bool choose_pieces(struct verify *v, struct window *w)
{
	uint64_t used = 0;

	w->n = 0;
	w->bytes = 0;
	while (v->next < v->set.n && used + ALIGN <= v->window_bytes) {
		uint64_t left = v->set.sizes[v->next] - v->next_start;
		uint64_t bytes = left < v->window_bytes - used ? left : v->window_bytes - used;

		if (bytes > 0)
			add_piece(v, w, used, bytes);
		used += (bytes + ALIGN - 1) / ALIGN * ALIGN;
		v->next_start += bytes;
		if (bytes == left) {
			v->next++;
			v->next_start = 0;
		}
	}
	return w->n > 0;
}

/* 0 or an exit status; w->job stays NULL if there was nothing left. */
static int start_window(struct verify *v, struct window *w)
{
	struct hr_read *reads;
	char *base;
	int rc;

	if (v->next < v->set.n && !w->buffer && hr_buffer_new(v->loader, v->window_bytes, &w->buffer))
		return cli_fail_last(v->args);
	if (!choose_pieces(v, w))
		return 0;
	base = hr_buffer_data(w->buffer);
	reads = cli_alloc(w->n, sizeof(*reads));
	for (size_t i = 0; i < w->n; i++)
		reads[i] = (struct hr_read){.tensor = w->pieces[i].tensor,
					    .offset = w->pieces[i].start,
					    .length = w->pieces[i].bytes,
					    .dst = base + w->pieces[i].offset,
					    .dst_bytes = v->window_bytes - w->pieces[i].offset};
	rc = hr_job_start(v->loader, v->model, reads, w->n, NULL, &w->job);
	cli_free(reads);
	v->n_windows += rc == 0;
	return rc ? cli_fail_last(v->args) : 0;
}

static int finish_window(struct verify *v, struct window *w)
{
	struct cli_compare what = {.args = v->args,
				   .model = v->model,
				   .against = v->against,
				   .twins = v->twins,
				   .is_plain = cli_is_in_files(v->against),
				   .pieces = w->pieces,
				   .n = w->n,
				   .progress = &v->progress,
				   .done_before = v->done_bytes,
				   .total_bytes = v->set.bytes};
	int status = cli_job_wait(w->job, NULL, NULL);

	if (status) {
		cli_progress_end(&v->progress);
		if (status != CLI_INTERRUPTED)
			return cli_fail_last(v->args);
		cli_fail(v->args, HR_E_CANCELLED, "interrupted; nothing is in flight any more");
		return cli_signals_status();
	}
	hr_job_close(w->job, HR_FOREVER);
	w->job = NULL;
	status = cli_compare(&what);
	v->done_bytes += w->bytes;
	return status;
}

static int run_windows(struct verify *v)
{
	int status = start_window(v, &v->windows[0]);

	for (unsigned i = 0; status == 0 && v->windows[i].job; i = (i + 1) % N_WINDOWS) {
		status = start_window(v, &v->windows[(i + 1) % N_WINDOWS]);
		if (status == 0)
			status = finish_window(v, &v->windows[i]);
	}
	return status;
}

/* ---- the answer ---- */

static const char *expected_name(const struct verify *v)
{
	if (v->args->against && !v->digests.path)
		return v->args->against;
	return cli_is_in_files(v->model) ? "a plain read of the same files"
					 : "a read of the same store without a loader";
}

static void print_text(const struct verify *v)
{
	char a[32], b[32];

	printf("device         %s (%s)\n", v->about.spec, v->about.name);
	fputs("compared with  ", stdout);
	cli_put_name(stdout, expected_name(v), strlen(expected_name(v)));
	printf("\ntensors        %zu\n", v->set.n);
	printf("bytes          %s (%s)\n", cli_grouped(a, v->done_bytes), cli_human(b, v->done_bytes));
	printf("windows        %" PRIu64 " of %s, %d at once\n", v->n_windows, cli_human(a, v->window_bytes),
	       N_WINDOWS);
	fputs("engines        ", stdout);
	cli_put_engines(stdout, v->stats.cached_bytes, v->stats.direct_bytes);
	printf("\nseconds        %.3f, %.2f GB/s (both reads and the comparison)\n", (double)v->elapsed_ns / 1e9,
	       cli_rate(v->done_bytes, v->elapsed_ns));
	printf("resident peak  %s\n", cli_human(a, cli_status_bytes("VmHWM:")));
	if (v->stats.note[0])
		printf("note           %s\n", v->stats.note);
	puts("every byte is right");
	if (v->digests.path)
		printf("digests of %" PRIu64 " shards and %" PRIu64 " tensors agree\n", v->digests.n_shards,
		       v->digests.n_tensors);
}

static void print_json(const struct verify *v)
{
	struct cli_json json;

	cli_json_start(&json, stdout);
	cli_json_bool(&json, "ok", true);
	cli_json_object(&json, "device");
	cli_json_text(&json, "spec", v->about.spec);
	cli_json_text(&json, "name", v->about.name);
	cli_json_end(&json);
	cli_json_text(&json, "compared_with", expected_name(v));
	cli_json_u64(&json, "tensors", v->set.n);
	cli_json_u64(&json, "bytes", v->done_bytes);
	cli_json_real(&json, "seconds", (double)v->elapsed_ns / 1e9);
	cli_json_real(&json, "gb_per_second", cli_rate(v->done_bytes, v->elapsed_ns));
	cli_json_u64(&json, "windows", v->n_windows);
	cli_json_u64(&json, "window_bytes", v->window_bytes);
	cli_json_engines(&json, v->stats.cached_bytes, v->stats.direct_bytes);
	cli_json_u64(&json, "peak_staging_bytes", v->stats.peak_staging_bytes);
	cli_json_u64(&json, "peak_resident_bytes", cli_status_bytes("VmHWM:"));
	cli_json_u64(&json, "verified_shards", v->digests.n_shards);
	cli_json_u64(&json, "verified_tensors", v->digests.n_tensors);
	cli_json_text(&json, "note", v->stats.note);
	cli_json_finish(&json);
}

/* Each fault has been told on stderr. */
static int tell_faults(const struct verify *v)
{
	struct cli_json json;

	if (v->args->json) {
		cli_json_start(&json, stdout);
		cli_faults_json(&v->faults, &json);
		cli_json_finish(&json);
	} else {
		fprintf(stderr, "headrace: the bytes arrived as they are in the files, but %zu digest%s\n", v->faults.n,
			v->faults.n == 1 ? " is wrong" : "s are wrong");
	}
	return CLI_BAD;
}

static int answer(struct verify *v)
{
	v->stats = (struct hr_stats)HR_STATS_INIT;
	hr_loader_stats(v->loader, &v->stats);
	if (v->digests.path)
		cli_digest_check_run(&v->digests);
	if (v->faults.n)
		return tell_faults(v);
	if (v->args->json)
		print_json(v);
	else
		print_text(v);
	return 0;
}

/* ---- the command ---- */

static int open_loader(struct verify *v)
{
	struct hr_loader_opts opts;
	int status = cli_device_open(v->args, &v->device);

	if (status)
		return status;
	v->about = (struct hr_device_info)HR_DEVICE_INFO_INIT;
	if (hr_device_info(v->device, &v->about))
		return cli_fail_last(v->args);
	cli_loader_opts(v->args, &opts);
	if (hr_loader_open(v->device, &opts, &v->loader))
		return cli_fail_setup(v->args);
	v->window_bytes = v->args->window_bytes ? v->args->window_bytes / ALIGN * ALIGN : DEFAULT_WINDOW;
	if (v->window_bytes > v->set.buffer_bytes)
		v->window_bytes = v->set.buffer_bytes ? v->set.buffer_bytes : ALIGN;
	return 0;
}

static int verify_all(struct verify *v)
{
	uint64_t start_ns;
	int status = open_expected(v);

	if (status == 0)
		status = open_loader(v);
	if (status)
		return status;
	start_ns = cli_now_ns();
	cli_progress_start(&v->progress, "verifying");
	status = run_windows(v);
	cli_progress_end(&v->progress);
	v->elapsed_ns = cli_now_ns() - start_ns;
	return status ? status : answer(v);
}

static void close_all(struct verify *v)
{
	for (unsigned i = 0; i < N_WINDOWS; i++) {
		hr_job_close(v->windows[i].job, HR_FOREVER);
		hr_buffer_release(v->windows[i].buffer);
		cli_free(v->windows[i].pieces);
	}
	hr_loader_close(v->loader, HR_FOREVER);
	hr_device_close(v->device);
	cli_digest_check_close(&v->digests);
	cli_faults_free(&v->faults);
	cli_free(v->twins);
	cli_set_free(&v->set);
	hr_model_close(v->against);
	hr_model_close(v->model);
}

static int run(const struct cli_args *args)
{
	struct verify v = {.args = args};
	int status;

	if (args->window_bytes && args->window_bytes < MIN_WINDOW)
		return cli_usage(args, "--window takes 64KiB at least");
	cli_signals_catch();
	status = cli_model_open(args, args->n_names, &v.model);
	if (status)
		return status;
	cli_warn_model(v.model);
	status = cli_set_new(args, v.model, &v.set);
	if (status == 0)
		status = verify_all(&v);
	close_all(&v);
	return status;
}

const struct cli_command cli_cmd_verify = {
	.name = "verify",
	.operands = "NAME...",
	.summary = "loads a model, reads it back from the device, and compares every byte",
	.examples = "  headrace verify Llama-3.1-8B                         with a plain read of the same files\n"
		    "  headrace verify Llama-3.1-8B --device cuda:0 --engine uring --caching bypass\n"
		    "  headrace verify Llama-3.1-8B --against /mnt/copy/Llama-3.1-8B   with another copy\n"
		    "  headrace verify Llama-3.1-8B --against Llama.sha256  and the files with a list of digests\n"
		    "  headrace verify Llama-3.1-8B --window 16M            with less memory on the device\n"
		    "  headrace verify Llama-3.1-8B --json || echo broken\n",
	.remarks = "A window is filled on the device while the one before it is compared, so a model larger than the\n"
		   "device's memory passes too. The first difference is told with tensor and byte; the status is 1.\n"
		   "WHAT is a directory, an index, a *.safetensors file, store:PATH#MODEL, or a list of digests as\n"
		   "'headrace digest' or sha256sum writes it.\n",
	.options = options,
	.n_options = CLI_N(options),
	.min_names = 1,
	.max_names = SIZE_MAX,
	.run = run,
};
