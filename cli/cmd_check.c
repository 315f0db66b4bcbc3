/* SPDX-License-Identifier: Apache-2.0 */
/*
 * "headrace check": is a model sound? Opening it checks every header and the index. If that fails, its files
 * are opened one by one, so that all faults are told and not only the first. Data is read with --digests
 * alone.
 */
#include "digests.h"
#include "faults.h"
#include "json_writer.h"
#include "work.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static const struct cli_option options[] = {
	{"digests", "FILE", "read all data and compare with the SHA-256 digests in FILE", NULL, CLI_FIELD(digests),
	 CLI_TEXT, 0},
	CLI_OPTION_JSON,
	{"help", NULL, "this text", NULL, CLI_FIELD(help), CLI_FLAG, 'h'},
};

/* ---- the files of a model that does not open ---- */

static void check_file(const char *path, struct cli_faults *faults)
{
	hr_model *model = NULL;

	if (hr_model_open_files(&path, 1, NULL, &model))
		cli_faults_add(faults, hr_error_last());
	hr_model_close(model);
}

static int is_shard_name(const struct dirent *entry)
{
	static const char suffix[] = ".safetensors";
	size_t len = strlen(entry->d_name);

	return len >= strlen(suffix) && strcmp(entry->d_name + len - strlen(suffix), suffix) == 0;
}

static void check_directory(const char *path, struct cli_faults *faults)
{
	struct dirent **entries = NULL;
	int n = scandir(path, &entries, is_shard_name, alphasort);

	for (int i = 0; i < n; i++) {
		char *file = cli_text("%s/%s", path, entries[i]->d_name);

		check_file(file, faults);
		cli_free(file);
		cli_free(entries[i]);
	}
	cli_free(entries);
}

static void check_around_index(const char *path, struct cli_faults *faults)
{
	const char *slash = strrchr(path, '/');
	char *directory = slash ? cli_text("%.*s", (int)(slash - path), path) : cli_text(".");

	check_directory(directory[0] ? directory : "/", faults);
	cli_free(directory);
}

static void check_one_by_one(const struct cli_args *args, struct cli_faults *faults)
{
	struct stat st;

	for (size_t i = 0; i < args->n_names; i++) {
		const char *name = args->names[i];
		size_t len = strlen(name);

		if (stat(name, &st))
			continue;
		if (S_ISDIR(st.st_mode))
			check_directory(name, faults);
		else if (len > 5 && strcmp(name + len - 5, ".json") == 0)
			check_around_index(name, faults);
		else if (args->n_names > 1)
			check_file(name, faults);
	}
}

/* ---- digests ---- */

struct comparison {
	const struct cli_args *args;
	const hr_model *model;
	struct cli_faults *faults;
	struct cli_digests digests;
	FILE *file;
	uint64_t n_shards; /* that agree */
	uint64_t n_tensors;
	uint64_t line;
};

static void on_failed(void *ctx, uint32_t shard, const struct hr_error *error)
{
	struct comparison *c = ctx;

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

static void tell_difference(struct comparison *c, const char *path, const char *tensor,
			    const struct hr_digest *expected, const struct hr_digest *got)
{
	char expected_hex[65], got_hex[65];

	cli_hex(expected_hex, expected->sha256, sizeof(expected->sha256));
	cli_hex(got_hex, got->sha256, sizeof(got->sha256));
	cli_faults_add_text(c->faults, HR_E_DIGEST, path, tensor,
			    "%s%s%s%s: SHA-256 is %s, %s says %s; the data is damaged, fetch the file again", path,
			    tensor[0] ? ": tensor '" : "", tensor, tensor[0] ? "'" : "", got_hex, c->args->digests,
			    expected_hex);
}

static void compare_shard(struct comparison *c, const struct cli_digest_line *line)
{
	char *path = cli_text("%.*s", (int)line->name_len, line->name);
	int64_t shard = find_shard(c->model, path);

	if (shard < 0) {
		cli_faults_add_text(c->faults, HR_E_NOTFOUND, path, "",
				    "%s:%" PRIu64 ": the model has no shard '%s' (or several of that name)",
				    c->args->digests, c->line, path);
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

static char *shown_name(const char *name, size_t len)
{
	char *text = NULL;
	size_t text_len = 0;
	FILE *out = open_memstream(&text, &text_len);

	if (!out)
		return cli_text("?");
	cli_put_name(out, name, len);
	fclose(out);
	return text ? text : cli_text("?");
}

static void compare_tensor(struct comparison *c, const struct cli_digest_line *line)
{
	char *name = shown_name(line->name, line->name_len);
	struct hr_tensor tensor = HR_TENSOR_INIT;
	uint64_t index;

	if (hr_model_find(c->model, line->name, line->name_len, &index) || hr_model_tensor(c->model, index, &tensor)) {
		cli_faults_add_text(c->faults, HR_E_NOTFOUND, c->args->digests, name,
				    "%s:%" PRIu64 ": the model has no tensor '%s'", c->args->digests, c->line, name);
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
static bool walk_lines(struct comparison *c, void (*each)(struct comparison *c, struct cli_digest_line *line))
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
static void count_line(struct comparison *c, struct cli_digest_line *line)
{
	c->n_shards += line->kind == CLI_LINE_SHARD;
	c->n_tensors += line->kind == CLI_LINE_TENSOR;
	if (line->kind == CLI_LINE_BAD)
		cli_faults_add_text(c->faults, HR_E_OPTS, c->args->digests, "",
				    "%s:%" PRIu64
				    ": neither '<64 hex digits>  <path>' nor '#tensor <64 hex digits>  <name>'",
				    c->args->digests, c->line);
}

static void compare_line(struct comparison *c, struct cli_digest_line *line)
{
	if (line->kind == CLI_LINE_SHARD)
		compare_shard(c, line);
	else if (line->kind == CLI_LINE_TENSOR)
		compare_tensor(c, line);
}

static void compare_all(struct comparison *c)
{
	bool with_tensors;

	if (!walk_lines(c, count_line)) {
		cli_faults_add_text(c->faults, HR_E_IO, c->args->digests, "", "cannot read %s: %s", c->args->digests,
				    strerror(errno));
		return;
	}
	if (!c->n_shards && !c->n_tensors) {
		cli_faults_add_text(c->faults, HR_E_OPTS, c->args->digests, "",
				    "%s holds no digests; 'headrace digest' makes them", c->args->digests);
		return;
	}
	with_tensors = c->n_tensors > 0;
	c->n_shards = c->n_tensors = 0;
	cli_digests_new(c->model, with_tensors, on_failed, c, &c->digests);
	walk_lines(c, compare_line);
}

/* ---- the command ---- */

static void print_json(const hr_model *model, const struct comparison *c)
{
	const char *warning;
	struct cli_json json;

	cli_json_start(&json, stdout);
	cli_json_bool(&json, "ok", c->faults->n == 0);
	cli_json_u64(&json, "tensors", model ? hr_model_n_tensors(model) : 0);
	cli_json_u64(&json, "shards", model ? hr_model_n_shards(model) : 0);
	cli_json_u64(&json, "verified_shards", c->n_shards);
	cli_json_u64(&json, "verified_tensors", c->n_tensors);
	cli_faults_json(c->faults, &json);
	cli_json_array(&json, "warnings");
	for (size_t i = 0; model && (warning = hr_model_warning(model, i)) != NULL; i++)
		cli_json_text(&json, NULL, warning);
	cli_json_end(&json);
	cli_json_finish(&json);
}

static void print_text(const hr_model *model, const struct comparison *c)
{
	if (c->faults->n) {
		fprintf(stderr, "headrace: %zu fault%s found\n", c->faults->n, c->faults->n == 1 ? "" : "s");
		return;
	}
	fputs("ok: ", stdout);
	cli_put_name(stdout, c->args->names[0], strlen(c->args->names[0]));
	printf(": %" PRIu64 " tensors in %" PRIu32 " shard%s, headers sound", hr_model_n_tensors(model),
	       hr_model_n_shards(model), hr_model_n_shards(model) == 1 ? "" : "s");
	if (c->args->digests)
		printf("; digests of %" PRIu64 " shards and %" PRIu64 " tensors agree", c->n_shards, c->n_tensors);
	putchar('\n');
}

static int run(const struct cli_args *args)
{
	struct cli_faults faults = {0};
	struct comparison c = {.args = args, .faults = &faults};
	hr_model *model = NULL;
	int rc;

	if (args->digests) {
		c.file = fopen(args->digests, "re");
		if (!c.file)
			return cli_fail(args, HR_E_NOTFOUND, "cannot open %s: %s", args->digests, strerror(errno));
	}
	rc = args->n_names == 1 ? hr_model_open(args->names[0], NULL, &model)
				: hr_model_open_files(args->names, args->n_names, NULL, &model);
	if (rc) {
		cli_faults_add(&faults, hr_error_last());
		check_one_by_one(args, &faults);
	} else {
		c.model = model;
		cli_warn_model(model);
		if (c.file)
			compare_all(&c);
	}
	if (args->json)
		print_json(model, &c);
	else
		print_text(model, &c);
	rc = faults.n ? CLI_BAD : CLI_OK;
	if (c.file)
		fclose(c.file);
	cli_digests_free(&c.digests);
	cli_faults_free(&faults);
	hr_model_close(model);
	return rc;
}

const struct cli_command cli_cmd_check = {
	.name = "check",
	.operands = "NAME...",
	.summary = "says whether a model is sound, one line per fault",
	.examples =
		"  headrace check Llama-3.1-8B                         headers and index, no data: milliseconds\n"
		"  headrace check model.safetensors                    one file\n"
		"  headrace digest Llama-3.1-8B > Llama.sha256\n"
		"  headrace check Llama-3.1-8B --digests Llama.sha256  reads all data, verifies shards and tensors\n"
		"  headrace check Llama-3.1-8B --digests SHA256SUMS    what sha256sum wrote does as well\n"
		"  headrace check Llama-3.1-8B --json || echo broken\n",
	.options = options,
	.n_options = CLI_N(options),
	.min_names = 1,
	.max_names = SIZE_MAX,
	.run = run,
};
