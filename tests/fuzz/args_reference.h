/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What fuzz_args.c compares the command's answers with: sizes, globs and the parser once more, written for being short
 * and obviously right, without regard to time. Nothing here calls the code under test; the tables of options are
 * shared.
 */
#ifndef HR_TESTS_ARGS_REFERENCE_H
#define HR_TESTS_ARGS_REFERENCE_H

#include "fuzz.h"

#include "cli.h"

#define MAX_WORDS 40

struct line {
	int n;
	char *words[MAX_WORDS + 1];
};

__extension__ typedef unsigned __int128 wide;

/* ---- numbers ---- */

static inline bool reference_size(const char *text, bool has_unit, uint64_t *bytes)
{
	static const char letters[] = "KMGT";
	wide value = 0;
	unsigned base = 1;
	size_t digits = strspn(text, "0123456789"), power = 0;
	const char *unit = text + digits;

	for (size_t i = 0; i < digits && value <= UINT64_MAX; i++)
		value = value * 10 + (unsigned)(text[i] - '0');
	if (*unit && has_unit && strcmp(unit, "B") != 0) {
		while (letters[power] && letters[power] != (*unit == 'k' ? 'K' : *unit))
			power++;
		base = strcmp(unit + 1, "B") == 0 ? 1000 : unit[1] == '\0' || strcmp(unit + 1, "iB") == 0 ? 1024 : 0;
		if (!letters[power++])
			return false;
	} else if (*unit && !has_unit) {
		return false;
	}
	for (; power > 0 && value <= UINT64_MAX; power--)
		value *= base;
	*bytes = (uint64_t)value;
	return digits > 0 && value > 0 && value <= UINT64_MAX;
}

/* ---- globs ---- */

/* One step of a pattern: what bytes it takes, or a star. Gives how long it is. */
static inline size_t reference_step(const char *p, bool *is_star, bool takes[256])
{
	size_t at = 1, first;
	bool is_not;

	*is_star = *p == '*';
	memset(takes, *p == '?', 256);
	if (*p == '*' || *p == '?')
		return 1;
	if (*p == '\\' && p[1]) {
		takes[(unsigned char)p[1]] = true;
		return 2;
	}
	takes[(unsigned char)*p] = true;
	is_not = p[1] == '!' || p[1] == '^';
	first = at += is_not;
	if (*p != '[' || !p[first] || !strchr(p + first + 1, ']'))
		return 1;
	memset(takes, is_not, 256);
	for (; at == first || p[at] != ']'; at++) {
		unsigned low = (unsigned char)p[at], high = low;

		if (p[at + 1] == '-' && p[at + 2] != ']') {
			high = (unsigned char)p[at + 2];
			at += 2;
		}
		for (unsigned byte = low; byte <= high; byte++)
			takes[byte] = !is_not;
	}
	return at + 1;
}

/* Which prefixes of the name the pattern so far takes, step by step. */
static inline bool reference_glob(const char *pattern, const char *name, size_t n)
{
	bool *taken = calloc(n + 1, 1), takes[256], is_star, answer;

	if (!taken)
		abort();
	taken[0] = true;
	while (*pattern) {
		pattern += reference_step(pattern, &is_star, takes);
		for (size_t i = 1; is_star && i <= n; i++)
			taken[i] |= taken[i - 1];
		for (size_t i = n; !is_star && i > 0; i--)
			taken[i] = taken[i - 1] && takes[(unsigned char)name[i - 1]];
		taken[0] &= is_star;
	}
	answer = taken[n];
	free(taken);
	return answer;
}

/* ---- the parser ---- */

static inline const struct cli_option *reference_option(const struct cli_command *command, const char *name, size_t n)
{
	for (size_t i = 0; i < command->n_options; i++) {
		const struct cli_option *o = &command->options[i];

		if (strlen(o->name) == n && memcmp(o->name, name, n) == 0)
			return o;
	}
	return NULL;
}

/* All letters that have an option are flags. */
static inline bool reference_letters(const struct cli_command *command, const char *letters, struct cli_args *args)
{
	for (; *letters; letters++) {
		const struct cli_option *option = NULL;

		for (size_t i = 0; i < command->n_options; i++)
			if (command->options[i].letter == *letters)
				option = &command->options[i];
		if (!option)
			return false;
		fuzz_check(option->kind == CLI_FLAG);
		*(bool *)((char *)args + option->offset) = true;
	}
	return true;
}

static inline bool reference_choice(const char *choices, const char *value)
{
	char all[128], one[128];

	if (!value[0] || strchr(value, '|') || strlen(value) > 60)
		return false;
	snprintf(all, sizeof(all), "|%s|", choices);
	snprintf(one, sizeof(one), "|%s|", value);
	return strstr(all, one) != NULL;
}

static inline bool reference_set(struct cli_args *args, const struct cli_option *option, const char *value)
{
	void *field = (char *)args + option->offset;

	switch (option->kind) {
	case CLI_FLAG:
		*(bool *)field = true;
		return true;
	case CLI_TEXT:
	case CLI_STORED:
	case CLI_CHOICE:
		*(const char **)field = value;
		return option->kind == CLI_CHOICE ? reference_choice(option->choices, value) : value[0] != '\0';
	case CLI_SIZE:
	case CLI_COUNT:
		return reference_size(value, option->kind == CLI_SIZE, field);
	default:
		if (args->n_only == CLI_MAX_ONLY)
			return false;
		args->only[args->n_only++] = value;
		return true;
	}
}

/* "--name", "--name=value" or "--name value"; *i goes to the last word that was used. */
static inline bool reference_long(const struct line *line, int *i, struct cli_args *args)
{
	const char *word = line->words[*i] + 2, *attached = strchr(word, '=');
	const struct cli_option *option = reference_option(args->command, word, strcspn(word, "="));

	if (!option)
		return false;
	if (option->kind == CLI_FLAG)
		return !attached && reference_set(args, option, "");
	if (attached)
		return reference_set(args, option, attached + 1);
	if (option->kind == CLI_STORED && args->n_names && strncmp(args->names[0], "store:", 6) == 0 &&
	    (*i + 1 == line->n || line->words[*i + 1][0] == '-')) {
		*(const char **)((char *)args + option->offset) = "";
		return true;
	}
	return ++*i < line->n && reference_set(args, option, line->words[*i]);
}

/* False: a usage error. */
static inline bool reference_parse(const struct line *line, struct cli_args *args)
{
	bool is_over = false;

	for (int i = 1; i < line->n; i++) {
		const char *word = line->words[i];

		if (is_over || word[0] != '-' || !word[1])
			args->names[args->n_names++] = word;
		else if (strcmp(word, "--") == 0)
			is_over = true;
		else if (word[1] == '-' ? !reference_long(line, &i, args)
					: !reference_letters(args->command, word + 1, args))
			return false;
	}
	return args->help || (args->n_names >= args->command->min_names && args->n_names <= args->command->max_names);
}

#endif
