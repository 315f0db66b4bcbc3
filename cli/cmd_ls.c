/* SPDX-License-Identifier: Apache-2.0 */
/*
 * "headrace ls": what is in a model, from its headers alone.
 */
#include "json_writer.h"
#include "work.h"

#include <inttypes.h>
#include <string.h>

static const struct cli_option options[] = {
	{"long", NULL, "also show exact bytes, offset and shard, and the metadata", NULL, CLI_FIELD(is_long), CLI_FLAG,
	 'l'},
	CLI_OPTION_ONLY,
	CLI_OPTION_EXPECT,
	CLI_OPTION_UGDS,
	CLI_OPTION_JSON,
	{"help", NULL, "this text", NULL, CLI_FIELD(help), CLI_FLAG, 'h'},
};

/* ---- JSON ---- */

static const char *shard_path(const hr_model *model, uint32_t number)
{
	struct hr_shard shard = HR_SHARD_INIT;

	return hr_model_shard(model, number, &shard) ? "" : shard.path;
}

static void json_tensor(struct cli_json *json, const hr_model *model, const struct hr_tensor *tensor)
{
	cli_json_object(json, NULL);
	cli_json_bytes(json, "name", tensor->name, tensor->name_len);
	cli_json_text(json, "dtype", hr_dtype_name(tensor->dtype));
	cli_json_array(json, "shape");
	for (uint32_t i = 0; i < tensor->rank; i++)
		cli_json_u64(json, NULL, tensor->dims[i]);
	cli_json_end(json);
	cli_json_u64(json, "bytes", tensor->bytes);
	cli_json_text(json, "shard", shard_path(model, tensor->shard));
	cli_json_u64(json, "offset", tensor->offset);
	cli_json_bool(json, "listed", !(tensor->flags & HR_TENSOR_UNLISTED));
	cli_json_end(json);
}

static void json_metadata(struct cli_json *json, const hr_model *model, uint32_t number, uint64_t n)
{
	cli_json_object(json, "metadata");
	for (uint64_t i = 0; i < n; i++) {
		const char *key, *value;
		size_t key_len, value_len;

		if (hr_model_metadata(model, number, i, &key, &key_len, &value, &value_len) == 0)
			cli_json_pair(json, key, key_len, value, value_len);
	}
	cli_json_end(json);
}

/* The first shard that has metadata speaks for the model. */
static void json_shards(struct cli_json *json, const hr_model *model)
{
	struct hr_shard shard = HR_SHARD_INIT;
	uint32_t n = hr_model_n_shards(model);
	uint32_t speaker = 0;
	uint64_t n_pairs = 0;

	cli_json_array(json, "shards");
	for (uint32_t i = 0; i < n && hr_model_shard(model, i, &shard) == 0; i++) {
		cli_json_object(json, NULL);
		cli_json_text(json, "path", shard.path);
		cli_json_u64(json, "bytes", shard.bytes);
		cli_json_u64(json, "data_offset", shard.data_offset);
		cli_json_u64(json, "tensors", shard.n_tensors);
		json_metadata(json, model, i, shard.n_metadata);
		cli_json_end(json);
		if (!n_pairs && shard.n_metadata) {
			speaker = i;
			n_pairs = shard.n_metadata;
		}
	}
	cli_json_end(json);
	json_metadata(json, model, speaker, n_pairs);
}

static void json_warnings(struct cli_json *json, const hr_model *model)
{
	const char *warning;

	cli_json_array(json, "warnings");
	for (size_t i = 0; (warning = hr_model_warning(model, i)) != NULL; i++)
		cli_json_text(json, NULL, warning);
	cli_json_end(json);
}

static void list_json(const hr_model *model, const struct cli_set *set)
{
	struct cli_json json;

	cli_json_start(&json, stdout);
	cli_json_array(&json, "tensors");
	for (size_t i = 0; i < set->n; i++) {
		struct hr_tensor tensor = HR_TENSOR_INIT;

		if (hr_model_tensor(model, set->tensors[i], &tensor) == 0)
			json_tensor(&json, model, &tensor);
	}
	cli_json_end(&json);
	json_shards(&json, model);
	json_warnings(&json, model);
	cli_json_finish(&json);
}

/* ---- table ---- */

#define WIDEST_NAME 80

struct widths {
	size_t name;
	size_t shape;
};

/* "[4096, 128]"; with no stream it only counts. */
static size_t put_shape(FILE *out, const struct hr_tensor *tensor)
{
	size_t used = 2;
	char text[32];

	if (out)
		putc('[', out);
	for (uint32_t i = 0; i < tensor->rank; i++) {
		used += (size_t)snprintf(text, sizeof(text), "%s%" PRIu64, i ? ", " : "", tensor->dims[i]);
		if (out)
			fputs(text, out);
	}
	if (out)
		putc(']', out);
	return used;
}

static void grow(size_t *width, size_t used)
{
	if (used > *width && used <= WIDEST_NAME)
		*width = used;
}

static struct widths measure(const hr_model *model, const struct cli_set *set)
{
	struct widths widths = {4, 5};

	for (size_t i = 0; i < set->n; i++) {
		struct hr_tensor tensor = HR_TENSOR_INIT;

		if (hr_model_tensor(model, set->tensors[i], &tensor))
			continue;
		grow(&widths.name, cli_name_width(tensor.name, tensor.name_len));
		grow(&widths.shape, put_shape(NULL, &tensor));
	}
	return widths;
}

static void put_row(const hr_model *model, const struct hr_tensor *tensor, const struct widths *widths, bool is_long)
{
	char size[32];

	cli_pad(stdout, cli_put_name(stdout, tensor->name, tensor->name_len), widths->name);
	printf("  %-11s  ", hr_dtype_name(tensor->dtype));
	cli_pad(stdout, put_shape(stdout, tensor), widths->shape);
	if (!is_long) {
		printf("  %11s\n", cli_human(size, tensor->bytes));
		return;
	}

	const char *path = shard_path(model, tensor->shard);

	printf("  %15" PRIu64 "  %15" PRIu64 "  ", tensor->bytes, tensor->offset);
	cli_put_name(stdout, path, strlen(path));
	fputs(tensor->flags & HR_TENSOR_UNLISTED ? "  (not in the index)\n" : "\n", stdout);
}

static void put_header(const struct widths *widths, bool is_long)
{
	printf("%-*s  %-11s  %-*s  ", (int)widths->name, "NAME", "DTYPE", (int)widths->shape, "SHAPE");
	if (is_long)
		printf("%15s  %15s  SHARD\n", "BYTES", "OFFSET");
	else
		printf("%11s\n", "SIZE");
}

static void put_metadata(const hr_model *model)
{
	struct hr_shard shard = HR_SHARD_INIT;
	uint32_t n = hr_model_n_shards(model);

	for (uint32_t s = 0; s < n && hr_model_shard(model, s, &shard) == 0; s++) {
		for (uint64_t i = 0; i < shard.n_metadata; i++) {
			const char *key, *value;
			size_t key_len, value_len;

			if (hr_model_metadata(model, s, i, &key, &key_len, &value, &value_len))
				break;
			fputs("metadata  ", stdout);
			cli_put_name(stdout, shard.path, strlen(shard.path));
			fputs("  ", stdout);
			cli_put_name(stdout, key, key_len);
			fputs(" = ", stdout);
			cli_put_name(stdout, value, value_len);
			putchar('\n');
		}
	}
}

static void list_table(const hr_model *model, const struct cli_set *set, bool is_long)
{
	struct widths widths = measure(model, set);
	char size[32];

	put_header(&widths, is_long);
	for (size_t i = 0; i < set->n; i++) {
		struct hr_tensor tensor = HR_TENSOR_INIT;

		if (hr_model_tensor(model, set->tensors[i], &tensor) == 0)
			put_row(model, &tensor, &widths, is_long);
	}
	if (is_long)
		put_metadata(model);
	printf("%zu tensor%s, %" PRIu32 " shard%s, %s\n", set->n, set->n == 1 ? "" : "s", hr_model_n_shards(model),
	       hr_model_n_shards(model) == 1 ? "" : "s", cli_human(size, set->bytes));
}

static int run(const struct cli_args *args)
{
	struct cli_set set = {0};
	hr_model *model;
	int status = cli_model_open(args, args->n_names, &model);

	if (status)
		return status;
	if (!args->json)
		cli_warn_model(model);
	status = cli_set_new(args, model, &set);
	if (status == 0 && args->json)
		list_json(model, &set);
	else if (status == 0)
		list_table(model, &set, args->is_long);
	cli_set_free(&set);
	hr_model_close(model);
	return status;
}

const struct cli_command cli_cmd_ls = {
	.name = "ls",
	.operands = "NAME...",
	.summary = "lists the tensors of a model",
	.examples = "  headrace ls Llama-3.1-8B                        a directory of shards with their index\n"
		    "  headrace ls model.safetensors --long            with offsets, shards and metadata\n"
		    "  headrace ls Llama-3.1-8B --only '*.mlp.*'       some of them\n"
		    "  headrace ls part-1.safetensors part-2.safetensors   files that form one model\n"
		    "  headrace ls Llama-3.1-8B --json | jq '.tensors[].name'\n",
	.options = options,
	.n_options = CLI_N(options),
	.min_names = 1,
	.max_names = SIZE_MAX,
	.run = run,
};
