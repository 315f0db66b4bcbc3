/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The command line. One table of options per command (cli.h) drives parser, help and the test that holds
 * man pages and completions against them. Options and operands may be mixed; "--" ends the options;
 * "--name value" and "--name=value" are the same. Names are not abbreviated: scripts would break when an
 * option is added.
 */
#include "cli.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* ---- numbers ---- */

bool cli_count_parse(const char *text, uint64_t *count)
{
	char *end = NULL;
	unsigned long long value;

	if (text[0] < '0' || text[0] > '9')
		return false;
	errno = 0;
	value = strtoull(text, &end, 10);
	if (errno || *end || value == 0)
		return false;
	*count = value;
	return true;
}

static bool unit_bytes(const char *unit, uint64_t *bytes)
{
	static const char letters[] = "KMGT";
	const char *letter;

	*bytes = 1;
	if (!unit[0] || strcmp(unit, "B") == 0)
		return true;
	letter = strchr(letters, unit[0] == 'k' ? 'K' : unit[0]);
	if (!letter)
		return false;

	bool is_decimal = strcmp(unit + 1, "B") == 0;

	if (!is_decimal && unit[1] && strcmp(unit + 1, "iB") != 0)
		return false;
	for (const char *l = letters; l <= letter; l++)
		*bytes *= is_decimal ? 1000 : 1024;
	return true;
}

bool cli_size_parse(const char *text, uint64_t *bytes)
{
	char *end = NULL;
	unsigned long long value;
	uint64_t unit;

	if (text[0] < '0' || text[0] > '9')
		return false;
	errno = 0;
	value = strtoull(text, &end, 10);
	if (errno || !unit_bytes(end, &unit) || __builtin_mul_overflow((uint64_t)value, unit, bytes))
		return false;
	return *bytes > 0;
}

/* ---- "did you mean" ---- */

#define LONGEST_WORD 32

static size_t smaller(size_t a, size_t b)
{
	return a < b ? a : b;
}

/* Edit distance of two short words. */
static size_t distance(const char *a, const char *b)
{
	size_t n = strlen(a);
	size_t m = strlen(b);
	size_t row[LONGEST_WORD + 1];

	if (n > LONGEST_WORD || m > LONGEST_WORD)
		return SIZE_MAX;
	for (size_t j = 0; j <= m; j++)
		row[j] = j;
	for (size_t i = 1; i <= n; i++) {
		size_t diagonal = row[0];

		row[0] = i;
		for (size_t j = 1; j <= m; j++) {
			size_t above = row[j];
			size_t change = diagonal + (a[i - 1] != b[j - 1]);

			row[j] = smaller(change, smaller(above, row[j - 1]) + 1);
			diagonal = above;
		}
	}
	return row[m];
}

const char *cli_nearest(const char *word, const char *(*nth)(const void *ctx, size_t i), const void *ctx)
{
	const char *best = NULL;
	size_t best_distance = strlen(word) <= 3 ? 2 : 3;

	for (size_t i = 0;; i++) {
		const char *candidate = nth(ctx, i);

		if (!candidate)
			return best;
		if (strlen(word) >= 3 && strncmp(candidate, word, strlen(word)) == 0)
			return candidate;

		size_t d = distance(word, candidate);

		if (d < best_distance) {
			best_distance = d;
			best = candidate;
		}
	}
}

static const char *nth_option(const void *ctx, size_t i)
{
	const struct cli_command *command = ctx;

	return i < command->n_options ? command->options[i].name : NULL;
}

/* ---- options ---- */

struct parser {
	const struct cli_command *command;
	struct cli_args *args;
	char **words;
	int n;
	int at; /* the next word */
};

static const struct cli_option *find_option(const struct cli_command *command, const char *name, size_t len)
{
	for (size_t i = 0; i < command->n_options; i++) {
		const struct cli_option *option = &command->options[i];

		if (strlen(option->name) == len && strncmp(option->name, name, len) == 0)
			return option;
	}
	return NULL;
}

static const struct cli_option *find_letter(const struct cli_command *command, char letter)
{
	for (size_t i = 0; i < command->n_options; i++) {
		if (command->options[i].letter == letter)
			return &command->options[i];
	}
	return NULL;
}

static bool is_choice(const char *choices, const char *value)
{
	size_t len = strlen(value);

	if (strchr(value, '|'))
		return false;
	for (const char *c = choices; len && c; c = strchr(c, '|')) {
		if (*c == '|')
			c++;
		if (strncmp(c, value, len) == 0 && (c[len] == '|' || c[len] == '\0'))
			return true;
	}
	return false;
}

static int set_value(struct parser *p, const struct cli_option *option, const char *value)
{
	struct cli_args *args = p->args;
	void *field = (char *)args + option->offset;

	switch (option->kind) {
	case CLI_FLAG:
		*(bool *)field = true;
		return 0;
	case CLI_CHOICE:
		if (!is_choice(option->choices, value))
			return cli_usage(args, "--%s is one of %s, not '%s'", option->name, option->choices, value);
		*(const char **)field = value;
		return 0;
	case CLI_TEXT:
	case CLI_STORED:
		if (!value[0])
			return cli_usage(args, "--%s needs a value that is not empty", option->name);
		*(const char **)field = value;
		return 0;
	case CLI_SIZE:
		if (cli_size_parse(value, field))
			return 0;
		return cli_usage(args, "--%s takes a size such as 64MiB, 64M, 1G or 65536, not '%s'", option->name,
				 value);
	case CLI_COUNT:
		if (cli_count_parse(value, field))
			return 0;
		return cli_usage(args, "--%s takes a whole number from 1, not '%s'", option->name, value);
	case CLI_ONLY:
		if (args->n_only == CLI_MAX_ONLY)
			return cli_usage(args, "--only may be given %d times at most", CLI_MAX_ONLY);
		args->only[args->n_only++] = value;
		return 0;
	}
	return CLI_USAGE;
}

static int unknown_option(const struct parser *p, const char *word, const char *name)
{
	const char *nearest = name[0] ? cli_nearest(name, nth_option, p->command) : NULL;

	if (nearest)
		return cli_usage(p->args, "unknown option '%s'; did you mean '--%s'?", word, nearest);
	return cli_usage(p->args, "unknown option '%s'", word);
}

static int take_value(struct parser *p, const struct cli_option *option, const char *attached)
{
	if (option->kind == CLI_FLAG) {
		if (attached)
			return cli_usage(p->args, "--%s takes no value", option->name);
		return set_value(p, option, "");
	}
	if (attached)
		return set_value(p, option, attached);
	if (option->kind == CLI_STORED && (p->at == p->n || p->words[p->at][0] == '-') && p->args->n_names > 0 &&
	    strncmp(p->args->names[0], "store:", 6) == 0) {
		*(const char **)((char *)p->args + option->offset) = "";
		return 0;
	}
	if (p->at == p->n)
		return cli_usage(p->args, "--%s needs a value: %s", option->name, option->value);
	return set_value(p, option, p->words[p->at++]);
}

static int parse_long(struct parser *p, const char *word)
{
	const char *name = word + 2;
	const char *equals = strchr(name, '=');
	size_t len = equals ? (size_t)(equals - name) : strlen(name);
	const struct cli_option *option = find_option(p->command, name, len);

	if (!option) {
		char bare[LONGEST_WORD + 1];

		snprintf(bare, sizeof(bare), "%.*s", (int)smaller(len, LONGEST_WORD), name);
		return unknown_option(p, word, bare);
	}
	return take_value(p, option, equals ? equals + 1 : NULL);
}

static int parse_letters(struct parser *p, const char *word)
{
	for (const char *letter = word + 1; *letter; letter++) {
		const struct cli_option *option = find_letter(p->command, *letter);
		int rc;

		if (!option)
			return unknown_option(p, word, "");
		rc = take_value(p, option, NULL);
		if (rc)
			return rc;
	}
	return 0;
}

static int check_operands(const struct cli_args *args)
{
	const struct cli_command *command = args->command;

	if (args->help)
		return 0;
	if (args->n_names < command->min_names)
		return cli_usage(args, "%s: %s is missing", command->name,
				 args->n_names == 0 ? "NAME" : "the last operand");
	if (args->n_names > command->max_names)
		return cli_usage(args, "%s: '%s' is one operand too many", command->name,
				 args->names[command->max_names]);
	return 0;
}

/* Whether the word after this one is its value. */
static bool has_value_behind(const struct cli_command *command, const char *word)
{
	const struct cli_option *option = NULL;

	if (strncmp(word, "--", 2) == 0)
		option = find_option(command, word + 2, strlen(word + 2));
	return option && option->kind != CLI_FLAG;
}

/* Wanted before parsing has come that far, so that a usage error can be told as JSON too. */
static bool wants_json(const struct cli_command *command, int n, char **words)
{
	for (int i = 0; i < n && strcmp(words[i], "--") != 0; i++) {
		if (strcmp(words[i], "--json") == 0)
			return find_option(command, "json", 4) != NULL;
		if (has_value_behind(command, words[i]))
			i++;
	}
	return false;
}

int cli_args_parse(const struct cli_command *command, int n, char **words, struct cli_args *args)
{
	struct parser p = {.command = command, .args = args, .words = words, .n = n};
	bool is_over = false;

	*args = (struct cli_args){.command = command, .json = wants_json(command, n, words)};
	args->names = cli_alloc((size_t)n + 1, sizeof(*args->names));
	while (p.at < n) {
		const char *word = words[p.at++];
		int rc = 0;

		if (is_over || word[0] != '-' || !word[1])
			args->names[args->n_names++] = word;
		else if (strcmp(word, "--") == 0)
			is_over = true;
		else if (word[1] == '-')
			rc = parse_long(&p, word);
		else
			rc = parse_letters(&p, word);
		if (rc)
			return rc;
	}
	return check_operands(args);
}
