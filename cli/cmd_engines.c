/* SPDX-License-Identifier: Apache-2.0 */
/*
 * "headrace engines": every engine and device there is, whether it can be used here, and why not. With a
 * name, for the files of that model.
 */
#include "json_writer.h"
#include "work.h"

#include <string.h>

static const struct cli_option options[] = {
	CLI_OPTION_UGDS,
	CLI_OPTION_JSON,
	{"help", NULL, "this text", NULL, CLI_FIELD(help), CLI_FLAG, 'h'},
};

static void print_text(const struct hr_probe_row *rows, size_t n)
{
	printf("%-8s %-8s %-7s %s\n", "KIND", "NAME", "USABLE", "HOW, OR WHY NOT");
	for (size_t i = 0; i < n; i++)
		printf("%-8s %-8s %-7s %s\n", rows[i].kind, rows[i].name, rows[i].usable ? "yes" : "no",
		       rows[i].reason);
}

static void json_kind(struct cli_json *json, const char *key, const char *kind, const struct hr_probe_row *rows,
		      size_t n)
{
	cli_json_array(json, key);
	for (size_t i = 0; i < n; i++) {
		if (strcmp(rows[i].kind, kind) != 0)
			continue;
		cli_json_object(json, NULL);
		cli_json_text(json, "name", rows[i].name);
		cli_json_bool(json, "usable", rows[i].usable);
		cli_json_text(json, "reason", rows[i].reason);
		cli_json_end(json);
	}
	cli_json_end(json);
}

static void print_json(const struct hr_probe_row *rows, size_t n)
{
	struct cli_json json;

	cli_json_start(&json, stdout);
	json_kind(&json, "engines", "engine", rows, n);
	json_kind(&json, "devices", "device", rows, n);
	cli_json_finish(&json);
}

static int run(const struct cli_args *args)
{
	struct hr_probe_row *rows = NULL;
	hr_model *model = NULL;
	size_t n_found = 0;
	size_t n_rows = 0;
	int status = args->n_names ? cli_model_open(args, args->n_names, &model) : 0;

	while (status == 0) {
		if (hr_probe(model, rows, n_rows, &n_found))
			status = cli_fail_last(args);
		if (status || n_found <= n_rows)
			break;
		n_rows = n_found;
		rows = cli_grow(rows, n_rows, sizeof(*rows));
	}
	if (status == 0 && args->json)
		print_json(rows, n_found);
	else if (status == 0)
		print_text(rows, n_found);
	cli_free(rows);
	hr_model_close(model);
	return status;
}

const struct cli_command cli_cmd_engines = {
	.name = "engines",
	.operands = "[NAME...]",
	.summary = "lists engines and devices, and why each can or cannot be used here",
	.examples = "  headrace engines                       on this machine\n"
		    "  headrace engines Llama-3.1-8B          for the files of this model\n"
		    "  headrace engines --json | jq -r '.devices[] | select(.usable).name'\n",
	.options = options,
	.n_options = CLI_N(options),
	.max_names = SIZE_MAX,
	.run = run,
};
