/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What every file of the command shares: the parsed command line, the table of commands, and the ways to
 * say something to the user. The command uses the library through headrace.h alone.
 *
 * Exit status, everywhere: CLI_OK, CLI_BAD (the data is bad or the operation failed), CLI_USAGE, or
 * 128 + a signal's number. Results go to stdout, everything else to stderr. With --json, stdout holds
 * exactly one object, also after a failure.
 */
#ifndef HR_CLI_CLI_H
#define HR_CLI_CLI_H

#include "headrace.h"

#include <stdbool.h>
#include <stdio.h>

enum cli_status {
	CLI_OK = 0,
	CLI_BAD = 1,
	CLI_USAGE = 2,
	CLI_PIPE = 141, /* nobody reads our output any more: as if SIGPIPE had ended us */
};

#define CLI_MAX_ONLY 16

struct cli_command;

/* All options of all commands; a command's table says which of them it takes. Zero and NULL: not given. */
struct cli_args {
	const struct cli_command *command;
	const char **names; /* operands, in order */
	size_t n_names;
	const char *only[CLI_MAX_ONLY];
	size_t n_only;
	const char *device;
	const char *engine;
	const char *caching;
	const char *cufile;
	const char *digests;
	const char *synthetic;
	const char *dir;
	const char *expect;
	const char *ugds;
	const char *store_name;
	const char *store_as;
	const char *salvage_to;
	uint64_t store_bytes;
	const char *against;
	uint64_t staging_bytes;
	uint64_t slot_bytes;
	uint64_t readers;
	uint64_t rounds;
	uint64_t passes;
	uint64_t budget_bytes;
	uint64_t host_budget_bytes;
	uint64_t window_bytes;
	uint64_t sample_bytes;
	uint64_t seconds;
	bool json;
	bool is_long;
	bool verify;
	bool trial;
	bool force;
	bool shards;
	bool cold;
	bool warm;
	bool feed;
	bool open;
	bool partly;
	bool loop;
	bool sweep;
	bool sweep_slots;
	bool keep;
	bool plan;
	bool replace;
	bool unverified;
	bool all_digests;
	bool repair;
	bool rollback;
	bool salvage;
	bool moved;
	bool help;
};

enum cli_kind {
	CLI_FLAG,   /* bool */
	CLI_TEXT,   /* const char * */
	CLI_STORED, /* const char *; of a model in a store the value can be left out, and is "" then */
	CLI_CHOICE, /* const char *, one of `choices` */
	CLI_SIZE,   /* uint64_t, bytes, more than 0 */
	CLI_COUNT,  /* uint64_t, more than 0 */
	CLI_ONLY,   /* may be given several times: only[] */
};

struct cli_option {
	const char *name;    /* without the dashes */
	const char *value;   /* what its value is called in help; NULL for a flag */
	const char *help;    /* one line, with the default */
	const char *choices; /* "auto|fill|bypass" */
	size_t offset;       /* in struct cli_args */
	enum cli_kind kind;
	char letter; /* 0: no short form */
};

struct cli_command {
	const char *name;
	const char *operands; /* "NAME..." */
	const char *summary;  /* what it does, in one line */
	const char *examples; /* lines "  command   what it is for" */
	const char *remarks;  /* more lines, or NULL */
	const struct cli_option *options;
	size_t n_options;
	size_t min_names;
	size_t max_names;
	int (*run)(const struct cli_args *args);
	bool (*help)(const struct cli_args *args); /* prints help of what the operands name, if it can; or NULL */
};

/* NULL-terminated, in the order in which help shows them. */
extern const struct cli_command *const cli_commands[];
const struct cli_command *cli_command_find(const char *name);

#define CLI_N(array)     (sizeof(array) / sizeof((array)[0]))
#define CLI_FIELD(field) offsetof(struct cli_args, field)

/* Options that several commands take. */
#define CLI_OPTION_JSON                                                                                                \
	{                                                                                                              \
		"json", NULL, "print one JSON object instead of text", NULL, CLI_FIELD(json), CLI_FLAG, 0              \
	}
#define CLI_OPTION_EXPECT                                                                                              \
	{                                                                                                              \
		"expect", "FILE", "of a store: only the generation that this exported manifest describes", NULL,        \
			CLI_FIELD(expect), CLI_TEXT, 0                                                                 \
	}
#define CLI_OPTION_UGDS                                                                                                \
	{                                                                                                              \
		"ugds", "NODE", "of a store whose disk belongs to uGDS: read it through this node (/dev/ugds_drv0)",    \
			NULL, CLI_FIELD(ugds), CLI_TEXT, 0                                                             \
	}
#define CLI_OPTION_ONLY                                                                                                \
	{                                                                                                              \
		"only", "GLOB", "tensors whose name matches (*, ?, [a-z]); may be repeated", NULL, CLI_FIELD(only),    \
			CLI_ONLY, 0                                                                                    \
	}
#define CLI_OPTIONS_LOADER                                                                                              \
	{"device", "D", "cpu, cuda or cuda:N (default: cuda:0 if it can be used, else cpu)", NULL, CLI_FIELD(device),   \
	 CLI_TEXT, 0},                                                                                                  \
		{"staging", "SIZE", "all staging memory there will be (default 64MiB)", NULL, CLI_FIELD(staging_bytes), \
		 CLI_SIZE,  0},                                                                                         \
		{"slot",                                                                                                \
		 "SIZE",                                                                                                \
		 "largest single read (default 2MiB, less in a small pool)",                                            \
		 NULL,                                                                                                  \
		 CLI_FIELD(slot_bytes),                                                                                 \
		 CLI_SIZE,                                                                                              \
		 0},                                                                                                    \
		{"engine",                                                                                              \
		 "E",                                                                                                   \
		 "auto, pread, uring, mapped, cufile, ugds; a named one never falls back (default auto)",                                   \
		 NULL,                                                                                                  \
		 CLI_FIELD(engine),                                                                                     \
		 CLI_TEXT,                                                                                              \
		 0},                                                                                                    \
		{"caching",                                                                                             \
		 "C",                                                                                                   \
		 "auto, fill or bypass the page cache with cold bytes (default auto)",                                  \
		 "auto|fill|bypass",                                                                                    \
		 CLI_FIELD(caching),                                                                                    \
		 CLI_CHOICE,                                                                                            \
		 0},                                                                                                    \
		{"cufile",                                                                                              \
		 "HOW",                                                                                                 \
		 "engine cufile: direct, or compat to allow reads through host memory (default direct)",                \
		 "direct|compat",                                                                                       \
		 CLI_FIELD(cufile),                                                                                     \
		 CLI_CHOICE,                                                                                            \
		 0},                                                                                                    \
	{                                                                                                               \
		"readers", "N", "threads for blocking reads (default: usable CPUs, at most 12)", NULL,                   \
			CLI_FIELD(readers), CLI_COUNT, 0                                                                \
	}

/* ---- args.c ---- */

/* Parses argv[1..] of a command. 0, or CLI_USAGE after saying what is wrong. */
int cli_args_parse(const struct cli_command *command, int n, char **words, struct cli_args *args);
/* "64MiB", "64M" (the same), "1G", "1000MB" (10^6), "4096". */
bool cli_size_parse(const char *text, uint64_t *bytes);
bool cli_count_parse(const char *text, uint64_t *count);
/* The one of `n` words that `word` was probably meant to be, or NULL. */
const char *cli_nearest(const char *word, const char *(*nth)(const void *ctx, size_t i), const void *ctx);

/* ---- help.c ---- */

void cli_help_command(FILE *out, const struct cli_command *command);
void cli_help_all(FILE *out);

/* ---- output.c ---- */

/* An error of our own: "headrace: ..." and, with --json, the object. Gives CLI_BAD; CLI_USAGE for HR_E_OPTS. */
int cli_fail(const struct cli_args *args, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* The same for the library's last error. Gives CLI_BAD. */
int cli_fail_last(const struct cli_args *args);
/* The same for an error that was found on another thread. */
int cli_fail_with(const struct cli_args *args, const struct hr_error *error);
/* The same where the user's options are what is being checked: CLI_USAGE for HR_E_OPTS. */
int cli_fail_setup(const struct cli_args *args);
/* A usage error, with a pointer to the command's help. Gives CLI_USAGE. */
int cli_usage(const struct cli_args *args, const char *format, ...) __attribute__((format(printf, 2, 3)));
void cli_warn(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Prints what the library warned of when the model was opened. */
void cli_warn_model(const hr_model *model);
/* Flushes stdout; a failure to write it turns CLI_OK into CLI_BAD or CLI_PIPE. */
int cli_finish(int status);

/* Writes a name for people: control bytes, bidi controls and bad UTF-8 are escaped. Returns columns used. */
size_t cli_put_name(FILE *out, const char *name, size_t len);
/* The same as text of its own, to be freed. */
char *cli_shown_name(const char *name, size_t len);
size_t cli_name_width(const char *name, size_t len);
void cli_pad(FILE *out, size_t used, size_t width);
/* "14.96 GiB"; `out` needs 32 bytes. Returns it. */
char *cli_human(char *out, uint64_t bytes);
/* "1,234,567"; `out` needs 32 bytes. Returns it. */
char *cli_grouped(char *out, uint64_t n);
void cli_hex(char *out, const uint8_t *bytes, size_t n); /* 2 * n + 1 */

/* ---- memory.c: never NULL; ends the program with a message when memory is out ---- */

void *cli_alloc(size_t n, size_t bytes);
void *cli_grow(void *block, size_t n, size_t bytes);
char *cli_text(const char *format, ...) __attribute__((format(printf, 1, 2)));
void cli_free(void *block);

#endif
