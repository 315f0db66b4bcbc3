/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the parts of "headrace store" share. Each action is a function whose first operand, args->names[0], is the
 * action's own name.
 */
#ifndef HR_CLI_STORE_ACTIONS_H
#define HR_CLI_STORE_ACTIONS_H

#include "work.h"

int cli_store_init(const struct cli_args *args);
int cli_store_import(const struct cli_args *args);
int cli_store_ls(const struct cli_args *args);
int cli_store_check(const struct cli_args *args);
int cli_store_rm(const struct cli_args *args);
int cli_store_reclaim(const struct cli_args *args);
int cli_store_export(const struct cli_args *args);
int cli_store_get(const struct cli_args *args);

/* Opens args->names[1]. 0 or an exit status. */
int cli_store_open(const struct cli_args *args, uint32_t flags, hr_store **store);
void cli_uuid(char out[37], const uint8_t uuid[16]);

/* How far long work is, for hr_store_*_opts.progress. Another step starts the bar anew. */
struct cli_store_shown {
	struct cli_progress bar;
	char step[32];
};
int cli_store_tick(void *shown, const struct hr_store_progress *progress);
/* After long work that failed: a signal's status, if it was one. */
int cli_store_fail(const struct cli_args *args);

/* ---- store_used.c: what a region looks like to others ---- */

#define CLI_MAX_FINDINGS 64

/* Facts about a path that is to become a store: lines for people, each a whole sentence without a full stop. */
struct cli_findings {
	char *signs[CLI_MAX_FINDINGS]; /* what would be destroyed: a file system, a partition table, a store */
	size_t n_signs;
	char *uses[CLI_MAX_FINDINGS]; /* why it cannot be had at all: mounted, held, swap, the system's own disk */
	size_t n_uses;
	uint64_t bytes; /* 0: there is nothing at this path */
	bool is_block;
	bool is_complete; /* libblkid was there to ask */
};

/* 0, or an exit status after saying what is wrong with the path itself. Reads only. */
int cli_findings_get(const struct cli_args *args, const char *path, struct cli_findings *out);
void cli_findings_free(struct cli_findings *findings);

#endif
