/* SPDX-License-Identifier: Apache-2.0 */
/*
 * "headrace plan": what "load" with the same options would read, how, and with how much memory. Reads
 * headers, asks what is in the page cache, and moves no data.
 */
#include "json_writer.h"
#include "work.h"

#include <inttypes.h>

static const struct cli_option options[] = {
	CLI_OPTIONS_LOADER, CLI_OPTION_ONLY, CLI_OPTION_EXPECT,
	CLI_OPTION_UGDS,    CLI_OPTION_JSON, {"help", NULL, "this text", NULL, CLI_FIELD(help), CLI_FLAG, 'h'},
};

struct plan {
	const struct cli_args *args;
	hr_model *model;
	hr_device *device;
	hr_loader *loader;
	struct cli_set set;
	struct hr_device_info about;
	struct hr_plan_info info;
};

static void print_text(const struct plan *plan)
{
	const struct hr_plan_info *info = &plan->info;
	char a[32], b[32];

	printf("device         %s (%s)\n", plan->about.spec, plan->about.name);
	printf("tensors        %zu\n", plan->set.n);
	printf("payload        %s (%s)\n", cli_grouped(a, info->payload_bytes), cli_human(b, info->payload_bytes));
	printf("to read        %s (%s) in %" PRIu64 " reads\n", cli_grouped(a, info->read_bytes),
	       cli_human(b, info->read_bytes), info->n_chunks);
	printf("copies         %" PRIu64 " before neighbours are merged\n", info->n_pieces);
	printf("in page cache  %s (%.1f %%)\n", cli_human(a, info->resident_bytes),
	       info->read_bytes ? 100.0 * (double)info->resident_bytes / (double)info->read_bytes : 0);
	fputs("engines        ", stdout);
	cli_put_engines(stdout, info->cached_bytes, info->direct_bytes);
	printf("\nstaging        %s\n", cli_human(a, info->staging_bytes));
	printf("device memory  %s\n", cli_human(a, plan->set.buffer_bytes));
	if (info->note[0])
		printf("note           %s\n", info->note);
}

static void print_json(const struct plan *plan)
{
	const struct hr_plan_info *info = &plan->info;
	struct cli_json json;

	cli_json_start(&json, stdout);
	cli_json_object(&json, "device");
	cli_json_text(&json, "spec", plan->about.spec);
	cli_json_text(&json, "name", plan->about.name);
	cli_json_end(&json);
	cli_json_u64(&json, "tensors", plan->set.n);
	cli_json_u64(&json, "payload_bytes", info->payload_bytes);
	cli_json_u64(&json, "read_bytes", info->read_bytes);
	cli_json_u64(&json, "reads", info->n_chunks);
	cli_json_u64(&json, "pieces", info->n_pieces);
	cli_json_u64(&json, "resident_bytes", info->resident_bytes);
	cli_json_engines(&json, info->cached_bytes, info->direct_bytes);
	cli_json_u64(&json, "staging_bytes", info->staging_bytes);
	cli_json_u64(&json, "device_bytes", plan->set.buffer_bytes);
	cli_json_text(&json, "note", info->note);
	cli_json_finish(&json);
}

static int make_plan(struct plan *plan)
{
	struct hr_loader_opts opts;
	struct hr_read *reads;
	int rc;

	cli_loader_opts(plan->args, &opts);
	plan->about = (struct hr_device_info)HR_DEVICE_INFO_INIT;
	if (hr_device_info(plan->device, &plan->about))
		return cli_fail_last(plan->args);
	if (hr_loader_open(plan->device, &opts, &plan->loader))
		return cli_fail_setup(plan->args);
	plan->info = (struct hr_plan_info)HR_PLAN_INFO_INIT;
	reads = cli_set_reads(&plan->set, 0, plan->set.n, NULL);
	rc = hr_plan(plan->loader, plan->model, reads, plan->set.n, &plan->info);
	cli_free(reads);
	return rc ? cli_fail_last(plan->args) : 0;
}

static int run(const struct cli_args *args)
{
	struct plan plan = {.args = args};
	int status = cli_model_open(args, args->n_names, &plan.model);

	if (status)
		return status;
	cli_warn_model(plan.model);
	status = cli_set_new(args, plan.model, &plan.set);
	if (status == 0)
		status = cli_device_open(args, &plan.device);
	if (status == 0)
		status = make_plan(&plan);
	if (status == 0 && args->json)
		print_json(&plan);
	else if (status == 0)
		print_text(&plan);
	hr_loader_close(plan.loader, HR_FOREVER);
	hr_device_close(plan.device);
	cli_set_free(&plan.set);
	hr_model_close(plan.model);
	return status;
}

const struct cli_command cli_cmd_plan = {
	.name = "plan",
	.operands = "NAME...",
	.summary = "says what load would read, by which engine, with how much memory; reads no data",
	.examples = "  headrace plan Llama-3.1-8B\n"
		    "  headrace plan Llama-3.1-8B --device cpu --staging 16M\n"
		    "  headrace plan Llama-3.1-8B --only '*.mlp.*'       a part of it\n"
		    "  headrace plan Llama-3.1-8B --caching bypass       how much would go around the page cache\n"
		    "  headrace plan Llama-3.1-8B --json | jq .resident_bytes\n",
	.remarks = "SIZE is 64MiB or 64M (both 2^20), 1G, 1000MB (10^6), or plain bytes.\n",
	.options = options,
	.n_options = CLI_N(options),
	.min_names = 1,
	.max_names = SIZE_MAX,
	.run = run,
};
