/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A model's shards and tensors against a list of SHA-256 digests, as "digest" and sha256sum write it. The list is
 * walked twice: first to see what it asks for and whether each line can be understood, before any data is read, then
 * to compare.
 */
#include "digests.h"
#include "faults.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>

static void on_failed(void *ctx, uint32_t shard, const struct hr_error *error)
{
	struct cli_digest_check *c = ctx;

	(void)shard;
	cli_faults_add(c->faults, error);
}

static const char *base_name(const char *path)
{
	const char *slash = strrchr(path, '/');

	return slash ? slash + 1 : path;
}

/* The shard with that path; if there is none, the only one with that file name. -1: none. */
static int64_t find_shard(const hr_model *model, const char *path)
{
	uint32_t n = hr_model_n_shards(model);
	int64_t found = -1;
	unsigned n_found = 0;

	for (uint32_t s = 0; s < n; s++) {
		struct hr_shard shard = HR_SHARD_INIT;

		if (hr_model_shard(model, s, &shard))
			continue;
		if (strcmp(shard.path, path) == 0)
			return s;
		if (strcmp(base_name(shard.path), base_name(path)) == 0) {
			found = s;
			n_found++;
		}
	}
	return n_found == 1 ? found : -1;
}

static void tell_difference(struct cli_digest_check *c, const char *path, const char *tensor,
			    const struct hr_digest *expected, const struct hr_digest *got)
{
	char expected_hex[65], got_hex[65];

	cli_hex(expected_hex, expected->sha256, sizeof(expected->sha256));
	cli_hex(got_hex, got->sha256, sizeof(got->sha256));
	cli_faults_add_text(c->faults, HR_E_DIGEST, path, tensor,
			    "%s%s%s%s: SHA-256 is %s, %s says %s; the data is damaged, fetch the file again", path,
			    tensor[0] ? ": tensor '" : "", tensor, tensor[0] ? "'" : "", got_hex, c->path,
			    expected_hex);
}

static void compare_shard(struct cli_digest_check *c, const struct cli_digest_line *line)
{
	char *path = cli_text("%.*s", (int)line->name_len, line->name);
	int64_t shard = find_shard(c->model, path);

	if (shard < 0) {
		cli_faults_add_text(c->faults, HR_E_NOTFOUND, path, "",
				    "%s:%" PRIu64 ": the model has no shard '%s' (or several of that name)", c->path,
				    c->line, path);
	} else if (!c->digests.failed[shard]) {
		struct hr_shard about = HR_SHARD_INIT;

		hr_model_shard(c->model, (uint32_t)shard, &about);
		if (memcmp(&line->digest, &c->digests.shards[shard], sizeof(line->digest)) == 0)
			c->n_shards++;
		else
			tell_difference(c, about.path, "", &line->digest, &c->digests.shards[shard]);
	}
	cli_free(path);
}

static void compare_tensor(struct cli_digest_check *c, const struct cli_digest_line *line)
{
	char *name = cli_shown_name(line->name, line->name_len);
	struct hr_tensor tensor = HR_TENSOR_INIT;
	uint64_t index;

	if (hr_model_find(c->model, line->name, line->name_len, &index) || hr_model_tensor(c->model, index, &tensor)) {
		cli_faults_add_text(c->faults, HR_E_NOTFOUND, c->path, name,
				    "%s:%" PRIu64 ": the model has no tensor '%s'", c->path, c->line, name);
	} else if (!c->digests.failed[tensor.shard]) {
		struct hr_shard shard = HR_SHARD_INIT;

		hr_model_shard(c->model, tensor.shard, &shard);
		if (memcmp(&line->digest, &c->digests.tensors[index], sizeof(line->digest)) == 0)
			c->n_tensors++;
		else
			tell_difference(c, shard.path, name, &line->digest, &c->digests.tensors[index]);
	}
	cli_free(name);
}

/* Calls `each` for every line; false if the file cannot be read. */
static bool walk_lines(struct cli_digest_check *c,
		       void (*each)(struct cli_digest_check *c, struct cli_digest_line *line))
{
	char *text = NULL;
	size_t room = 0;
	ssize_t len;
	bool is_good;

	rewind(c->file);
	c->line = 0;
	for (;;) {
		struct cli_digest_line line;

		len = getline(&text, &room, c->file);
		if (len < 0)
			break;
		c->line++;
		cli_digest_line_parse(text, (size_t)len, &line);
		each(c, &line);
	}
	is_good = !ferror(c->file);
	cli_free(text);
	return is_good;
}

/* What the file asks for, counted before any data is read. */
static void count_line(struct cli_digest_check *c, struct cli_digest_line *line)
{
	c->n_shards += line->kind == CLI_LINE_SHARD;
	c->n_tensors += line->kind == CLI_LINE_TENSOR;
	if (line->kind == CLI_LINE_BAD)
		cli_faults_add_text(c->faults, HR_E_OPTS, c->path, "",
				    "%s:%" PRIu64
				    ": neither '<64 hex digits>  <path>' nor '#tensor <64 hex digits>  <name>'",
				    c->path, c->line);
}

static void compare_line(struct cli_digest_check *c, struct cli_digest_line *line)
{
	if (line->kind == CLI_LINE_SHARD)
		compare_shard(c, line);
	else if (line->kind == CLI_LINE_TENSOR)
		compare_tensor(c, line);
}

void cli_digest_check_run(struct cli_digest_check *c)
{
	bool with_tensors;

	if (!walk_lines(c, count_line)) {
		cli_faults_add_text(c->faults, HR_E_IO, c->path, "", "cannot read %s: %s", c->path, strerror(errno));
		return;
	}
	if (!c->n_shards && !c->n_tensors) {
		cli_faults_add_text(c->faults, HR_E_OPTS, c->path, "",
				    "%s holds no digests; 'headrace digest' makes them", c->path);
		return;
	}
	with_tensors = c->n_tensors > 0;
	c->n_shards = c->n_tensors = 0;
	cli_digests_new(c->model, with_tensors, on_failed, c, &c->digests);
	walk_lines(c, compare_line);
}

bool cli_digest_check_open(struct cli_digest_check *c)
{
	c->file = fopen(c->path, "re");
	return c->file != NULL;
}

void cli_digest_check_close(struct cli_digest_check *c)
{
	if (c->file)
		fclose(c->file);
	c->file = NULL;
	cli_digests_free(&c->digests);
}
