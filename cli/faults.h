/* SPDX-License-Identifier: Apache-2.0 */
/* The faults that "check" found: told at once as a line on stderr, and kept for its JSON. */
#ifndef HR_CLI_FAULTS_H
#define HR_CLI_FAULTS_H

#include "cli.h"

/* More than this are counted, not told: a directory of garbage should not scroll for ever. */
#define CLI_MAX_FAULTS 1000

struct cli_fault {
	int32_t code;
	uint64_t offset;
	char *stage, *path, *tensor, *message;
};

struct cli_faults {
	size_t n; /* found */
	size_t n_kept;
	struct cli_fault *kept;
};

struct cli_json;

/* Not twice: a fault with the same message as one that is kept is left out. */
void cli_faults_add(struct cli_faults *faults, const struct hr_error *error);
void cli_faults_add_text(struct cli_faults *faults, int code, const char *path, const char *tensor, const char *format,
			 ...) __attribute__((format(printf, 5, 6)));
/* "error": the first, if any; "faults": all. */
void cli_faults_json(const struct cli_faults *faults, struct cli_json *json);
void cli_faults_free(struct cli_faults *faults);

#endif
