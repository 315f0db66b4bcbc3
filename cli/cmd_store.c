/* SPDX-License-Identifier: Apache-2.0 */
/*
 * "headrace store ACTION": one command with a table of actions. The parser takes the options of all of them; which
 * action takes which is said here, and help of one action shows only its own.
 */
#include "store_actions.h"

#include <string.h>

static const struct cli_option options[] = {
	{"size", "SIZE", "init: make a plain file of this size", NULL, CLI_FIELD(store_bytes), CLI_SIZE, 0},
	{"name", "TEXT", "init: what to call the store", NULL, CLI_FIELD(store_name), CLI_TEXT, 0},
	{"as", "MODEL", "import: the model's name in the store (default: that of its folder)", NULL,
	 CLI_FIELD(store_as), CLI_TEXT, 0},
	{"force", NULL, "init: destroy what is there", NULL, CLI_FIELD(force), CLI_FLAG, 0},
	{"plan", NULL, "init, import: say what would happen, and do nothing", NULL, CLI_FIELD(plan), CLI_FLAG, 0},
	{"replace", NULL, "import: switch the model of that name to the new one", NULL, CLI_FIELD(replace), CLI_FLAG,
	 0},
	{"unverified", NULL, "import: do not read back what was written", NULL, CLI_FIELD(unverified), CLI_FLAG, 0},
	{"digests", NULL, "check: read all data and compare it with its digests", NULL, CLI_FIELD(all_digests),
	 CLI_FLAG, 0},
	{"repair", NULL, "check: write records that are missing or torn anew from their other copy", NULL,
	 CLI_FIELD(repair), CLI_FLAG, 0},
	{"rollback", NULL, "check: if the newest generation is damaged, make the one before it the newest", NULL,
	 CLI_FIELD(rollback), CLI_FLAG, 0},
	{"salvage", NULL, "check: look for objects without the manifest, by their footers", NULL, CLI_FIELD(salvage),
	 CLI_FLAG, 0},
	{"to", "FOLDER", "check: write what --salvage finds there", NULL, CLI_FIELD(salvage_to), CLI_TEXT, 0},
	{"moved", NULL, "the store may be on another device than it was made on, as a copy is", NULL, CLI_FIELD(moved),
	 CLI_FLAG, 0},
	CLI_OPTION_JSON,
	{"help", NULL, "this text, or that of one action", NULL, CLI_FIELD(help), CLI_FLAG, 'h'},
};

struct action {
	const char *name, *operands, *summary, *options, *more;
	size_t min, max; /* operands behind the action */
	int (*run)(const struct cli_args *args);
};

static const struct action actions[] = {
	{"init", "PATH", "makes an empty store of a file, a partition or a device", "size name force plan json",
	 "  headrace store init weights.img --size 40G           a plain file: no root, no device\n"
	 "  headrace store init /dev/nvme1n1p1 --plan            what it looks like, and what would be destroyed\n"
	 "  headrace store init /dev/nvme1n1p1 --name pool0\n",
	 1, 1, cli_store_init},
	{"import", "PATH SOURCE", "brings a model in: a folder, an index, or one .safetensors file",
	 "as plan replace unverified moved json",
	 "  headrace store import weights.img Llama-3.1-8B       the whole folder: shards, index, config, tokenizer\n"
	 "  headrace store import weights.img new --as llama --replace   in one step; who reads the old one goes on\n"
	 "\nA model is there wholly or not at all. An import that was interrupted goes on where it was when it is\n"
	 "started again; data that the store already holds is not written twice.\n",
	 2, 2, cli_store_import},
	{"ls", "PATH [MODEL]", "lists models, or the files of one", "moved json",
	 "  headrace store ls weights.img\n"
	 "  headrace store ls weights.img llama\n",
	 1, 2, cli_store_ls},
	{"check", "PATH", "says whether a store is sound", "digests repair rollback salvage to json",
	 "  headrace store check weights.img                     records, manifests, headers: milliseconds\n"
	 "  headrace store check weights.img --digests           and every byte\n"
	 "  headrace store check weights.img --salvage --to out  what can still be found without a manifest\n",
	 1, 1, cli_store_check},
	{"rm", "PATH MODEL", "takes a model out; its space is free once nobody reads it", "moved json",
	 "  headrace store rm weights.img llama\n", 2, 2, cli_store_rm},
	{"reclaim", "PATH", "frees at once what no model and no reader needs any more", "moved json",
	 "  headrace store reclaim weights.img\n", 1, 1, cli_store_reclaim},
	{"export", "PATH", "prints the manifest of the newest generation as JSON", "moved json",
	 "  headrace store export weights.img > weights.json\n"
	 "  headrace load store:weights.json#llama               only if the store is still at that generation\n"
	 "  headrace load store:weights.img#llama --expect weights.json\n",
	 1, 1, cli_store_export},
	{"get", "PATH MODEL FOLDER", "writes the files of a model into a folder, byte for byte", "moved json",
	 "  headrace store get weights.img llama ./llama-8b\n", 3, 3, cli_store_get},
};

static const char *nth_action(const void *ctx, size_t i)
{
	(void)ctx;
	return i < CLI_N(actions) ? actions[i].name : NULL;
}

static const struct action *find_action(const char *name)
{
	for (size_t i = 0; i < CLI_N(actions); i++)
		if (strcmp(actions[i].name, name) == 0)
			return &actions[i];
	return NULL;
}

/* Whether a word is in a list of words. */
static bool is_in(const char *list, const char *word)
{
	size_t len = strlen(word);

	for (const char *at = strstr(list, word); at; at = strstr(at + 1, word))
		if ((at == list || at[-1] == ' ') && (at[len] == ' ' || !at[len]))
			return true;
	return false;
}

static bool is_given(const struct cli_args *args, const struct cli_option *option)
{
	const char *field = (const char *)args + option->offset;

	switch (option->kind) {
	case CLI_FLAG:
		return *(const bool *)field;
	case CLI_TEXT:
		return *(const char *const *)field != NULL;
	default:
		return *(const uint64_t *)field != 0;
	}
}

static int help_action(const struct action *action)
{
	struct cli_option own[CLI_N(options)];
	struct cli_command command;
	char name[32];
	size_t n = 0;

	for (size_t i = 0; i < CLI_N(options); i++)
		if (is_in(action->options, options[i].name) || strcmp(options[i].name, "help") == 0)
			own[n++] = options[i];
	snprintf(name, sizeof(name), "store %s", action->name);
	command = (struct cli_command){.name = name,
				       .operands = action->operands,
				       .summary = action->summary,
				       .examples = action->more,
				       .options = own,
				       .n_options = n};
	cli_help_command(stdout, &command);
	return 0;
}

static int check_action(const struct cli_args *args, const struct action *action)
{
	for (size_t i = 0; i < CLI_N(options); i++)
		if (is_given(args, &options[i]) && !is_in(action->options, options[i].name))
			return cli_usage(args, "store %s takes no --%s; see 'headrace store %s --help'", action->name,
					 options[i].name, action->name);
	if (args->n_names < 1 + action->min || args->n_names > 1 + action->max)
		return cli_usage(args, "it is: headrace store %s %s", action->name, action->operands);
	return 0;
}

static int run(const struct cli_args *args)
{
	const struct action *action = find_action(args->names[0]);
	const char *nearest = action ? NULL : cli_nearest(args->names[0], nth_action, NULL);
	int status;

	if (nearest)
		return cli_usage(args, "store has no action '%s'; did you mean '%s'?", args->names[0], nearest);
	if (!action)
		return cli_usage(args, "store has no action '%s'", args->names[0]);
	status = check_action(args, action);
	return status ? status : action->run(args);
}

/* "headrace store init --help" */
static bool help(const struct cli_args *args)
{
	const struct action *action = args->n_names ? find_action(args->names[0]) : NULL;

	return action && help_action(action) == 0;
}

/* ---- what the actions share ---- */

int cli_store_open(const struct cli_args *args, uint32_t flags, hr_store **store)
{
	struct hr_store_opts opts = HR_STORE_OPTS_INIT;

	opts.flags = flags | (args->moved ? HR_STORE_MOVED : 0);
	return hr_store_open(args->names[1], &opts, store) ? cli_fail_last(args) : 0;
}

void cli_uuid(char out[37], const uint8_t uuid[16])
{
	char hex[33];

	cli_hex(hex, uuid, 16);
	snprintf(out, 37, "%.8s-%.4s-%.4s-%.4s-%.12s", hex, hex + 8, hex + 12, hex + 16, hex + 20);
}

const struct cli_command cli_cmd_store = {
	.name = "store",
	.operands = "ACTION PATH ...",
	.summary = "keeps models as raw objects on a device, a partition or in one file, with no file system",
	.examples = "  headrace store init weights.img --size 40G            a plain file: no root, no device needed\n"
		    "  headrace store import weights.img Llama-3.1-8B --as llama\n"
		    "  headrace store ls weights.img                         models, sizes, free space\n"
		    "  headrace load store:weights.img#llama --verify        by any command that reads models\n"
		    "  headrace store check weights.img --digests            every byte\n"
		    "  headrace store get weights.img llama ./out            the folder again, byte for byte\n",
	.remarks =
		"Actions:\n"
		"  init PATH                makes an empty store of a file, a partition or a device\n"
		"  import PATH SOURCE       brings a model in: a folder, an index, or one .safetensors file\n"
		"  ls PATH [MODEL]          lists models, or the files of one\n"
		"  rm PATH MODEL            takes a model out; its space is free once nobody reads it\n"
		"  reclaim PATH             frees at once what no model and no reader needs any more\n"
		"  export PATH              prints the manifest of the newest generation as JSON\n"
		"  get PATH MODEL FOLDER    writes the files of a model into a folder\n"
		"'headrace store ACTION --help' explains one. A model in a store is named store:PATH#MODEL, with @41\n"
		"behind it for generation 41, or /FILE for one of its files.\n",
	.options = options,
	.n_options = CLI_N(options),
	.min_names = 1,
	.max_names = 4,
	.run = run,
	.help = help,
};
