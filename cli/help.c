/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Help, made from the tables that the parser uses, examples first. The commands "help" and "version" are
 * here as well.
 */
#include "build_id.h"
#include "cli.h"

#include <string.h>

static const char *const exit_text = "Exit status: 0 success; 1 the data is bad or the operation failed; 2 usage";

static void print_option(FILE *out, const struct cli_option *option)
{
	char left[64];
	int n = 0;

	if (option->letter)
		n = snprintf(left, sizeof(left), "-%c, ", option->letter);
	n += snprintf(left + n, sizeof(left) - (size_t)n, "--%s%s%s", option->name, option->value ? " " : "",
		      option->value ? option->value : "");
	fprintf(out, "  %-18s %s%s\n", left, n > 18 ? " " : "", option->help);
}

void cli_help_command(FILE *out, const struct cli_command *command)
{
	fprintf(out, "headrace %s: %s\n\nUsage: headrace %s %s%s\n", command->name, command->summary, command->name,
		command->operands, command->n_options > 1 ? " [OPTION]..." : "");
	fprintf(out, "\nExamples:\n%s", command->examples);
	if (command->n_options) {
		fprintf(out, "\nOptions:\n");
		for (size_t i = 0; i < command->n_options; i++)
			print_option(out, &command->options[i]);
	}
	if (command->remarks)
		fprintf(out, "\n%s", command->remarks);
	fprintf(out, "\n%s.\n", exit_text);
}

void cli_help_all(FILE *out)
{
	fprintf(out,
		"headrace: safetensors weights from files to host or GPU memory, checked, inside a small fixed pool\n\n"
		"Usage: headrace COMMAND NAME... [OPTION]...\n\n"
		"NAME is a directory with a model, its index (....safetensors.index.json), its files, or a model in a\n"
		"store: store:PATH#MODEL.\n\n"
		"Examples:\n"
		"  headrace ls Llama-3.1-8B                what is in it\n"
		"  headrace check Llama-3.1-8B             is it sound\n"
		"  headrace load Llama-3.1-8B --verify     load it, compare every byte, say how fast it was\n"
		"  headrace engines                        what can be used on this machine, and why not\n\n"
		"Commands:\n");
	for (const struct cli_command *const *c = cli_commands; *c; c++)
		fprintf(out, "  %-9s %s\n", (*c)->name, (*c)->summary);
	fprintf(out, "\n'headrace help COMMAND' (or 'headrace COMMAND --help') shows examples and options.\n%s.\n",
		exit_text);
}

static int run_help(const struct cli_args *args)
{
	const struct cli_command *command;

	if (!args->n_names) {
		cli_help_all(stdout);
		return CLI_OK;
	}
	command = cli_command_find(args->names[0]);
	if (!command)
		return cli_usage(NULL, "there is no command '%s'", args->names[0]);
	if (args->n_names == 2) { /* an action of a command */
		const struct cli_args action = {.names = args->names + 1, .n_names = 1};

		if (!command->help || !command->help(&action))
			return cli_usage(NULL, "%s has no action '%s'", command->name, args->names[1]);
		return CLI_OK;
	}
	cli_help_command(stdout, command);
	return CLI_OK;
}

static int run_version(const struct cli_args *args)
{
	(void)args;
	if (strcmp(CLI_BUILD_ID, hr_version()) == 0)
		printf("headrace %s\n", hr_version());
	else
		printf("headrace %s (%s)\n", hr_version(), CLI_BUILD_ID);
	return CLI_OK;
}

static const struct cli_option options[] = {
	{"help", NULL, "this text", NULL, CLI_FIELD(help), CLI_FLAG, 'h'},
};

const struct cli_command cli_cmd_help = {
	.name = "help",
	.operands = "[COMMAND [ACTION]]",
	.summary = "explains the commands by example",
	.examples = "  headrace help              all commands\n"
		    "  headrace help load         one of them\n"
		    "  headrace load --help       the same\n",
	.options = options,
	.n_options = CLI_N(options),
	.max_names = 2,
	.run = run_help,
};

const struct cli_command cli_cmd_version = {
	.name = "version",
	.operands = "",
	.summary = "prints the version",
	.examples = "  headrace version\n"
		    "  headrace --version         the same\n",
	.options = options,
	.n_options = CLI_N(options),
	.run = run_version,
};
