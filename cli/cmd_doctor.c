/* SPDX-License-Identifier: Apache-2.0 */
/*
 * "headrace doctor": what works on this machine and for this model, why the rest does not, and what to do about it.
 */
#include "doctor.h"

static const struct cli_option options[] = {
	{"device", "D", "cpu, cuda or cuda:N (default: cuda:0 if it can be used, else cpu)", NULL, CLI_FIELD(device),
	 CLI_TEXT, 0},
	{"staging", "SIZE", "the staging memory that is planned with (default 64MiB)", NULL, CLI_FIELD(staging_bytes),
	 CLI_SIZE, 0},
	{"cufile", "HOW", "engine cufile: direct, or compat to allow reads through host memory (default direct)",
	 "direct|compat", CLI_FIELD(cufile), CLI_CHOICE, 0},
	{"trial", NULL, "also load a sample of the model in every way, and say which is best", NULL, CLI_FIELD(trial),
	 CLI_FLAG, 0},
	{"sample", "SIZE", "how much of it at most, in one go (default 2GiB)", NULL, CLI_FIELD(sample_bytes), CLI_SIZE,
	 0},
	{"seconds", "N", "how long the trial may take (default 10)", NULL, CLI_FIELD(seconds), CLI_COUNT, 0},
	CLI_OPTION_JSON,
	{"help", NULL, "this text", NULL, CLI_FIELD(help), CLI_FLAG, 'h'},
};

static int run_doctor(struct doctor *doctor)
{
	int status = doctor_ask(doctor);

	if (status)
		return status;
	snprintf(doctor->best_why, sizeof(doctor->best_why),
		 "the defaults; --trial measures whether another is faster");
	if (doctor->args->trial && doctor->set.bytes)
		status = doctor_trial_run(doctor);
	if (status)
		return status;
	return doctor_report(doctor) ? CLI_OK : CLI_BAD;
}

static int run(const struct cli_args *args)
{
	struct doctor doctor = {.args = args};
	int status;

	if (args->trial && !args->n_names)
		return cli_usage(args, "--trial needs a model to load from");
	if ((args->sample_bytes || args->seconds) && !args->trial)
		return cli_usage(args, "--sample and --seconds are for --trial");
	if (args->seconds > 86400)
		return cli_usage(args, "--seconds takes a day at most");
	cli_signals_catch();
	status = run_doctor(&doctor);
	doctor_free(&doctor);
	return status;
}

const struct cli_command cli_cmd_doctor = {
	.name = "doctor",
	.operands = "[NAME...]",
	.summary = "says what works on this machine and for a model, why the rest does not, and what to do",
	.examples = "  headrace doctor                                  this machine\n"
		    "  headrace doctor Llama-3.1-8B                     and this model, where it lies\n"
		    "  headrace doctor Llama-3.1-8B --device cuda:0     status 1 if the GPU cannot be used\n"
		    "  headrace doctor Llama-3.1-8B --trial             measures, and prints the best setting\n"
		    "  headrace doctor --json | jq -r '.checks[] | select(.verdict == \"fail\").advice'\n",
	.remarks =
		"Status 1 means that a line says 'fail': something will not work. Lines that say 'warn' work, but not\n"
		"as well as they could. A trial drops its sample from the page cache and reads it anew.\n"
		"docs/doctor.md describes every check by its name.\n",
	.options = options,
	.n_options = CLI_N(options),
	.max_names = SIZE_MAX,
	.run = run,
};
