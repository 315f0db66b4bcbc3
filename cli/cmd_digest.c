/* SPDX-License-Identifier: Apache-2.0 */
/*
 * "headrace digest": SHA-256 of every shard and tensor, in a form that sha256sum and "check --digests" read.
 */
#include "digests.h"
#include "json_writer.h"
#include "work.h"

static const struct cli_option options[] = {
	{"shards", NULL, "whole shards only: half the work", NULL, CLI_FIELD(shards), CLI_FLAG, 0},
	CLI_OPTION_EXPECT,
	CLI_OPTION_UGDS,
	CLI_OPTION_JSON,
	{"help", NULL, "this text", NULL, CLI_FIELD(help), CLI_FLAG, 'h'},
};

struct failure {
	const struct cli_args *args;
	bool is_told; /* with --json there is one object only */
};

static void on_failed(void *ctx, uint32_t shard, const struct hr_error *error)
{
	struct failure *failure = ctx;

	(void)shard;
	if (failure->is_told)
		fprintf(stderr, "headrace: %s\n", error->message);
	else
		cli_fail_with(failure->args, error);
	failure->is_told = true;
}

static void print_text(const hr_model *model, const struct cli_digests *digests)
{
	for (uint32_t s = 0; s < digests->n_shards; s++) {
		struct hr_shard shard = HR_SHARD_INIT;

		hr_model_shard(model, s, &shard);
		cli_digest_put_shard(stdout, &digests->shards[s], shard.path);
	}
	for (uint64_t i = 0; i < digests->n_tensors; i++) {
		struct hr_tensor tensor = HR_TENSOR_INIT;

		hr_model_tensor(model, i, &tensor);
		cli_digest_put_tensor(stdout, &digests->tensors[i], tensor.name, tensor.name_len);
	}
}

static void json_digest(struct cli_json *json, const struct hr_digest *digest)
{
	char hex[65];

	cli_hex(hex, digest->sha256, sizeof(digest->sha256));
	cli_json_text(json, "sha256", hex);
}

static void print_json(const hr_model *model, const struct cli_digests *digests)
{
	struct hr_shard shard = HR_SHARD_INIT;
	struct cli_json json;

	cli_json_start(&json, stdout);
	cli_json_array(&json, "shards");
	for (uint32_t s = 0; s < digests->n_shards; s++) {
		hr_model_shard(model, s, &shard);
		cli_json_object(&json, NULL);
		cli_json_text(&json, "path", shard.path);
		cli_json_u64(&json, "bytes", shard.bytes);
		json_digest(&json, &digests->shards[s]);
		cli_json_end(&json);
	}
	cli_json_end(&json);
	cli_json_array(&json, "tensors");
	for (uint64_t i = 0; i < digests->n_tensors; i++) {
		struct hr_tensor tensor = HR_TENSOR_INIT;

		hr_model_tensor(model, i, &tensor);
		hr_model_shard(model, tensor.shard, &shard);
		cli_json_object(&json, NULL);
		cli_json_bytes(&json, "name", tensor.name, tensor.name_len);
		cli_json_text(&json, "shard", shard.path);
		cli_json_u64(&json, "bytes", tensor.bytes);
		json_digest(&json, &digests->tensors[i]);
		cli_json_end(&json);
	}
	cli_json_end(&json);
	cli_json_finish(&json);
}

static int run(const struct cli_args *args)
{
	struct failure failure = {.args = args};
	struct cli_digests digests;
	hr_model *model;
	int status = cli_model_open(args, args->n_names, &model);

	if (status)
		return status;
	cli_warn_model(model);
	cli_digests_new(model, !args->shards, on_failed, &failure, &digests);
	if (failure.is_told)
		status = CLI_BAD;
	else if (args->json)
		print_json(model, &digests);
	else
		print_text(model, &digests);
	cli_digests_free(&digests);
	hr_model_close(model);
	return status;
}

const struct cli_command cli_cmd_digest = {
	.name = "digest",
	.operands = "NAME...",
	.summary = "prints the SHA-256 of every shard and tensor",
	.examples = "  headrace digest Llama-3.1-8B > Llama.sha256         keep them\n"
		    "  headrace check Llama-3.1-8B --digests Llama.sha256  verify shards and tensors later\n"
		    "  sha256sum -c Llama.sha256                           verify the shards without headrace\n"
		    "  headrace digest model.safetensors --shards          of whole files only\n"
		    "  headrace digest Llama-3.1-8B --json | jq '.tensors[0]'\n",
	.remarks = "Lines are '<hex>  <path>' for shards and '#tensor <hex>  <name>' for tensors; sha256sum takes the\n"
		   "latter for comments. Several shards are hashed at once, with 8 MiB of memory each.\n",
	.options = options,
	.n_options = CLI_N(options),
	.min_names = 1,
	.max_names = SIZE_MAX,
	.run = run,
};
