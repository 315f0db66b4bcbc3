/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The command: finds what to do, parses its options, does it, and checks that the output was written.
 * SIGPIPE is ignored, so that a reader that goes away is an error to be handled and not a sudden end with
 * reads in flight.
 */
#include "cli.h"

#include <signal.h>
#include <string.h>
#include <sys/stat.h>

extern const struct cli_command cli_cmd_ls, cli_cmd_check, cli_cmd_load, cli_cmd_cat, cli_cmd_digest, cli_cmd_plan,
	cli_cmd_engines, cli_cmd_verify, cli_cmd_doctor, cli_cmd_bench, cli_cmd_store, cli_cmd_help, cli_cmd_version;

const struct cli_command *const cli_commands[] = {
	&cli_cmd_ls,      &cli_cmd_check, &cli_cmd_load,    &cli_cmd_cat,
	&cli_cmd_digest,  &cli_cmd_plan,  &cli_cmd_engines, &cli_cmd_verify,
	&cli_cmd_doctor,  &cli_cmd_bench, &cli_cmd_store,   &cli_cmd_help,
	&cli_cmd_version, NULL,
};

const struct cli_command *cli_command_find(const char *name)
{
	for (const struct cli_command *const *c = cli_commands; *c; c++) {
		if (strcmp((*c)->name, name) == 0)
			return *c;
	}
	return NULL;
}

static const char *nth_command(const void *ctx, size_t i)
{
	(void)ctx;
	return cli_commands[i] ? cli_commands[i]->name : NULL;
}

static int unknown_command(const char *word)
{
	struct stat st;
	const char *nearest;

	if (stat(word, &st) == 0)
		return cli_usage(NULL, "'%s' is not a command; did you mean 'headrace ls %s'?", word, word);
	nearest = cli_nearest(word, nth_command, NULL);
	if (nearest)
		return cli_usage(NULL, "there is no command '%s'; did you mean '%s'?", word, nearest);
	return cli_usage(NULL, "there is no command '%s'", word);
}

static const struct cli_command *pick_command(const char *word)
{
	if (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0)
		return &cli_cmd_help;
	if (strcmp(word, "--version") == 0 || strcmp(word, "-V") == 0)
		return &cli_cmd_version;
	return cli_command_find(word);
}

int main(int argc, char **argv)
{
	const struct cli_command *command;
	struct cli_args args;
	int status;

	signal(SIGPIPE, SIG_IGN);
	if (argc < 2) {
		cli_help_all(stderr);
		return CLI_USAGE;
	}
	command = pick_command(argv[1]);
	if (!command)
		return unknown_command(argv[1]);
	status = cli_args_parse(command, argc - 2, argv + 2, &args);
	if (status == CLI_OK && args.help && command->help && command->help(&args))
		status = CLI_OK;
	else if (status == CLI_OK && args.help)
		cli_help_command(stdout, command);
	else if (status == CLI_OK)
		status = command->run(&args);
	cli_free(args.names);
	return cli_finish(status);
}
