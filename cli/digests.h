/* SPDX-License-Identifier: Apache-2.0 */
/*
 * SHA-256 digests of a model's shards and tensors, computed on several threads, and the text form in which
 * "digest" prints them and "check --digests" reads them:
 *
 *     <64 hex digits>  <path>              a shard: what sha256sum prints and verifies
 *     #tensor <64 hex digits>  <name>      a tensor: a comment to sha256sum
 *     # anything else                      a comment to both
 *
 * In a path, backslash, newline and carriage return are written \\, \n and \r and the line starts with a backslash, as
 * sha256sum does it. In a tensor's name, backslash and newline are written \\ and \n, what a terminal must not get
 * byte by byte as \xHH.
 */
#ifndef HR_CLI_DIGESTS_H
#define HR_CLI_DIGESTS_H

#include "cli.h"

/* Several threads with 8 MiB each: so many that a digest stays below 128 MiB. */
#define CLI_DIGEST_MAX_THREADS 8

struct cli_digests {
	uint32_t n_shards;
	uint64_t n_tensors; /* 0 if only shards were asked for */
	struct hr_digest *shards;
	struct hr_digest *tensors; /* by number in the model */
	uint64_t *first;           /* first tensor of each shard, one more at the end */
	bool *failed;              /* by shard */
};

/* Why a shard could not be hashed; strings live during the call. */
typedef void cli_digest_failed(void *ctx, uint32_t shard, const struct hr_error *error);

/* Computes all; `failed` is called on the caller's thread, once for every shard that could not be read. */
void cli_digests_new(const hr_model *model, bool with_tensors, cli_digest_failed *failed, void *ctx,
		     struct cli_digests *out);
void cli_digests_free(struct cli_digests *digests);

void cli_digest_put_shard(FILE *out, const struct hr_digest *digest, const char *path);
void cli_digest_put_tensor(FILE *out, const struct hr_digest *digest, const char *name, size_t len);

enum cli_digest_line_kind { CLI_LINE_BAD, CLI_LINE_COMMENT, CLI_LINE_SHARD, CLI_LINE_TENSOR };

struct cli_digest_line {
	enum cli_digest_line_kind kind;
	struct hr_digest digest;
	char *name; /* path or tensor name, inside the text that was parsed; not terminated */
	size_t name_len;
};

/* Takes one line apart, in place. */
void cli_digest_line_parse(char *text, size_t len, struct cli_digest_line *line);

/* ---- digest_check.c ---- */

struct cli_faults;

/* One comparison of a model with a list of digests. */
struct cli_digest_check {
	/* given */
	const char *path; /* of the list */
	const hr_model *model;
	struct cli_faults *faults;
	/* found */
	uint64_t n_shards; /* that agree */
	uint64_t n_tensors;
	/* its own */
	struct cli_digests digests;
	FILE *file;
	uint64_t line;
};

/* Opens the list; false if that fails, with errno. */
bool cli_digest_check_open(struct cli_digest_check *check);
/* Reads all data that the list asks for; what does not agree is a fault. */
void cli_digest_check_run(struct cli_digest_check *check);
void cli_digest_check_close(struct cli_digest_check *check);

#endif
