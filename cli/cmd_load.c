/* SPDX-License-Identifier: Apache-2.0 */
/*
 * "headrace load": a model, or a part of it, into memory of a device, with a table of what that took.
 * The clock covers loader, buffer and job; opening the device is told apart from it.
 */
#include "json_writer.h"
#include "work.h"

#include <inttypes.h>
#include <string.h>

static const struct cli_option options[] = {
	CLI_OPTIONS_LOADER,
	CLI_OPTION_ONLY,
	{"verify", NULL, "compare every byte on the device with a plain read; in a store, checksums first", NULL,
	 CLI_FIELD(verify), CLI_FLAG, 0},
	CLI_OPTION_EXPECT,
	CLI_OPTION_UGDS,
	CLI_OPTION_JSON,
	{"help", NULL, "this text", NULL, CLI_FIELD(help), CLI_FLAG, 'h'},
};

/* Everything the closing table tells. */
struct load {
	const struct cli_args *args;
	struct cli_transfer transfer;
	struct cli_set set;
	struct hr_device_info about;
	uint64_t device_open_ns;
	uint64_t model_open_ns, model_open_cpu_ns; /* headers read and checked, tensors chosen */
	uint64_t verify_ns;
	uint64_t resident_bytes; /* VmHWM */
	bool is_verified;
};

static double seconds(uint64_t ns)
{
	return (double)ns / 1e9;
}

static double cpu_per_gb(const struct load *load)
{
	return load->set.bytes ? (double)load->transfer.cpu_ns / (double)load->set.bytes : 0;
}

/* ---- table ---- */

static void put_waits(const struct hr_stats *stats)
{
	double total = (double)stats->storage_wait_ns + (double)stats->copy_wait_ns + (double)stats->read_cpu_ns;

	if (total <= 0) {
		printf("waiting        not measurable, too short\n");
		return;
	}
	printf("waiting        storage %.1f %%, copies %.1f %%, CPU %.1f %% (of the threads' time)\n",
	       100 * (double)stats->storage_wait_ns / total, 100 * (double)stats->copy_wait_ns / total,
	       100 * (double)stats->read_cpu_ns / total);
}

static void put_memory(const struct load *load)
{
	const struct hr_stats *stats = &load->transfer.stats;
	char a[32], b[32];

	uint64_t pinned = cli_pinned_bytes(load->args->engine, load->about.driver, stats);

	printf("staging peak   %s of %s%s\n", cli_human(a, stats->peak_staging_bytes),
	       cli_human(b, stats->staging_bytes),
	       !pinned                         ? ""
	       : pinned < stats->staging_bytes ? ", GPU memory"
					       : ", pinned");
	printf("resident peak  %s (VmHWM, the whole process%s)\n", cli_human(a, load->resident_bytes),
	       load->about.driver ? "" : ", the tensors included");
	printf("device memory  %s for tensors", cli_human(a, load->set.buffer_bytes));
	if (load->transfer.device_bytes)
		printf(", %s taken in all", cli_human(b, load->transfer.device_bytes));
	putchar('\n');
}

static void print_text(const struct load *load)
{
	const struct cli_transfer *t = &load->transfer;
	char bytes[32], human[32];

	printf("device         %s (%s), opened in %.3f s, not counted\n", load->about.spec, load->about.name,
	       seconds(load->device_open_ns));
	printf("opening        %.1f ms for all headers, not counted\n", seconds(load->model_open_ns) * 1000);
	printf("tensors        %zu\n", load->set.n);
	printf("bytes          %s (%s)\n", cli_grouped(bytes, load->set.bytes), cli_human(human, load->set.bytes));
	printf("seconds        %.3f, of them %.3f for setting up\n", seconds(t->elapsed_ns), seconds(t->setup_ns));
	printf("speed          %.2f GB/s\n", cli_rate(load->set.bytes, t->elapsed_ns));
	printf("first tensor   %.1f ms\n", seconds(t->first_ns) * 1000);
	fputs("engines        ", stdout);
	cli_put_engines(stdout, t->stats.cached_bytes, t->stats.direct_bytes);
	putchar('\n');
	put_waits(&t->stats);
	printf("CPU            %.3f s per GB\n", cpu_per_gb(load));
	put_memory(load);
	if (t->stats.note[0])
		printf("note           %s\n", t->stats.note);
	if (t->stats.verified_bytes)
		printf("checksums      %s compared before they were copied\n",
		       cli_human(human, t->stats.verified_bytes));
	if (load->is_verified)
		printf("every byte verified (in %.3f s)\n", seconds(load->verify_ns));
}

/* ---- JSON ---- */

static void json_memory(struct cli_json *json, const struct load *load)
{
	const struct cli_transfer *t = &load->transfer;

	cli_json_object(json, "memory");
	cli_json_u64(json, "staging_bytes", t->stats.staging_bytes);
	cli_json_u64(json, "peak_staging_bytes", t->stats.peak_staging_bytes);
	cli_json_u64(json, "peak_pinned_bytes", cli_pinned_bytes(load->args->engine, load->about.driver, &t->stats));
	cli_json_u64(json, "peak_resident_bytes", load->resident_bytes);
	cli_json_u64(json, "buffer_bytes", load->set.buffer_bytes);
	cli_json_u64(json, "device_taken_bytes", t->device_bytes);
	cli_json_end(json);
}

static void print_json(const struct load *load)
{
	const struct cli_transfer *t = &load->transfer;
	struct cli_json json;

	cli_json_start(&json, stdout);
	cli_json_object(&json, "device");
	cli_json_text(&json, "spec", load->about.spec);
	cli_json_text(&json, "name", load->about.name);
	cli_json_real(&json, "open_seconds", seconds(load->device_open_ns));
	cli_json_end(&json);
	cli_json_object(&json, "model");
	cli_json_real(&json, "open_seconds", seconds(load->model_open_ns));
	cli_json_real(&json, "open_cpu_seconds", seconds(load->model_open_cpu_ns));
	cli_json_end(&json);
	cli_json_u64(&json, "tensors", load->set.n);
	cli_json_u64(&json, "bytes", load->set.bytes);
	cli_json_real(&json, "seconds", seconds(t->elapsed_ns));
	cli_json_real(&json, "setup_seconds", seconds(t->setup_ns));
	cli_json_real(&json, "gb_per_second", cli_rate(load->set.bytes, t->elapsed_ns));
	cli_json_real(&json, "first_tensor_seconds", seconds(t->first_ns));
	cli_json_engines(&json, t->stats.cached_bytes, t->stats.direct_bytes);
	cli_json_waits(&json, &t->stats);
	cli_json_real(&json, "cpu_seconds_per_gb", cpu_per_gb(load));
	cli_json_u64(&json, "read_bytes", t->stats.read_bytes);
	cli_json_u64(&json, "reads", t->stats.n_chunks);
	cli_json_u64(&json, "copies", t->stats.n_copies);
	cli_json_u64(&json, "copy_calls", t->stats.n_batches);
	cli_json_u64(&json, "readers", t->stats.n_readers);
	json_memory(&json, load);
	cli_json_text(&json, "note", t->stats.note);
	cli_json_bool(&json, "verified", load->is_verified);
	if (load->is_verified)
		cli_json_real(&json, "verify_seconds", seconds(load->verify_ns));
	cli_json_finish(&json);
}

/* ---- the command ---- */

/* On cpu the tensors take host memory: refuse in words what would otherwise end in the kernel killing somebody. */
static int check_room(const struct load *load)
{
	char a[32], b[32];

	if (load->about.driver || !load->about.free_bytes || load->set.buffer_bytes <= load->about.free_bytes)
		return 0;
	return cli_fail(load->args, HR_E_DEVICE_MEMORY,
			"the tensors need %s, but only %s of memory can be had; choose some with --only",
			cli_human(a, load->set.buffer_bytes), cli_human(b, load->about.free_bytes));
}

static int transfer(struct load *load)
{
	struct cli_progress progress;
	int rc;

	cli_progress_start(&progress, "loading");
	load->transfer.progress = &progress;
	rc = cli_transfer_run(&load->transfer);
	load->resident_bytes = cli_status_bytes("VmHWM:");
	cli_progress_end(&progress);
	if (rc == CLI_INTERRUPTED) {
		cli_fail(load->args, HR_E_CANCELLED, "interrupted; nothing is in flight any more");
		return cli_signals_status();
	}
	if (rc)
		return load->transfer.loader ? cli_fail_last(load->args) : cli_fail_setup(load->args);
	if (load->args->verify) {
		rc = cli_verify(load->args, &load->transfer, &load->verify_ns);
		load->is_verified = rc == 0;
	}
	return rc;
}

static int open_and_load(struct load *load)
{
	uint64_t start_ns = cli_now_ns();
	struct hr_loader_opts opts;
	int status = cli_device_open(load->args, &load->transfer.device);

	if (status)
		return status;
	load->device_open_ns = cli_now_ns() - start_ns;
	load->about = (struct hr_device_info)HR_DEVICE_INFO_INIT;
	if (hr_device_info(load->transfer.device, &load->about))
		return cli_fail_last(load->args);
	status = check_room(load);
	if (status)
		return status;
	cli_loader_opts(load->args, &opts);
	if (load->args->verify && cli_is_in_store(load->transfer.model))
		opts.flags |= HR_LOADER_VERIFY;
	load->transfer.set = &load->set;
	load->transfer.opts = &opts;
	status = transfer(load);
	if (status == 0 && load->args->json)
		print_json(load);
	else if (status == 0)
		print_text(load);
	return status;
}

static int run(const struct cli_args *args)
{
	struct load load = {.args = args};
	uint64_t start_ns = cli_now_ns(), start_cpu_ns = cli_cpu_ns();
	int status;

	cli_signals_catch();
	status = cli_model_open(args, args->n_names, &load.transfer.model);
	if (status)
		return status;
	cli_warn_model(load.transfer.model);
	status = cli_set_new(args, load.transfer.model, &load.set);
	load.model_open_ns = cli_now_ns() - start_ns;
	load.model_open_cpu_ns = cli_cpu_ns() - start_cpu_ns;
	if (status == 0)
		status = open_and_load(&load);
	cli_transfer_close(&load.transfer);
	cli_set_free(&load.set);
	hr_device_close(load.transfer.device);
	hr_model_close(load.transfer.model);
	return status;
}

const struct cli_command cli_cmd_load = {
	.name = "load",
	.operands = "NAME...",
	.summary = "loads a model into host or GPU memory and says what that took",
	.examples =
		"  headrace load Llama-3.1-8B                           to cuda:0 if it can be used, else to cpu\n"
		"  headrace load Llama-3.1-8B --device cuda:1 --verify  compare every byte afterwards\n"
		"  headrace load Llama-3.1-8B --only '*.layers.0.*'     a part of it\n"
		"  headrace load Llama-3.1-8B --staging 16M --slot 512K a smaller pool\n"
		"  headrace load Llama-3.1-8B --engine uring --caching bypass   from the disk, page cache left alone\n"
		"  headrace load Llama-3.1-8B --json | jq .gb_per_second\n",
	.remarks = "SIZE is 64MiB or 64M (both 2^20), 1G, 1000MB (10^6), or plain bytes.\n"
		   "Ctrl-C cancels, waits for what is in flight, and ends with status 130 (SIGTERM: 143).\n",
	.options = options,
	.n_options = CLI_N(options),
	.min_names = 1,
	.max_names = SIZE_MAX,
	.run = run,
};
