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
	{"digests", "FILE", "read all data and compare with the SHA-256 digests in FILE; in a store, its own", NULL,
	 CLI_FIELD(digests), CLI_STORED, 0},
	CLI_OPTION_EXPECT,
	CLI_OPTION_UGDS,
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

/* ---- the command ---- */

static void print_json(const hr_model *model, const struct cli_digest_check *c, uint64_t stored_bytes)
{
	const char *warning;
	struct cli_json json;

	cli_json_start(&json, stdout);
	cli_json_bool(&json, "ok", c->faults->n == 0);
	cli_json_u64(&json, "tensors", model ? hr_model_n_tensors(model) : 0);
	cli_json_u64(&json, "shards", model ? hr_model_n_shards(model) : 0);
	cli_json_u64(&json, "verified_shards", c->n_shards);
	cli_json_u64(&json, "verified_tensors", c->n_tensors);
	if (stored_bytes)
		cli_json_u64(&json, "checksummed_bytes", stored_bytes);
	cli_faults_json(c->faults, &json);
	cli_json_array(&json, "warnings");
	for (size_t i = 0; model && (warning = hr_model_warning(model, i)) != NULL; i++)
		cli_json_text(&json, NULL, warning);
	cli_json_end(&json);
	cli_json_finish(&json);
}

static void print_text(const struct cli_args *args, const hr_model *model, const struct cli_digest_check *c,
		       uint64_t stored_bytes)
{
	char size[32];

	if (c->faults->n) {
		fprintf(stderr, "headrace: %zu fault%s found\n", c->faults->n, c->faults->n == 1 ? "" : "s");
		return;
	}
	fputs("ok: ", stdout);
	cli_put_name(stdout, args->names[0], strlen(args->names[0]));
	printf(": %" PRIu64 " tensors in %" PRIu32 " shard%s, headers sound", hr_model_n_tensors(model),
	       hr_model_n_shards(model), hr_model_n_shards(model) == 1 ? "" : "s");
	if (args->digests && !args->digests[0])
		printf("; the store's checksums of %s agree", cli_human(size, stored_bytes));
	else if (args->digests)
		printf("; digests of %" PRIu64 " shards and %" PRIu64 " tensors agree", c->n_shards, c->n_tensors);
	putchar('\n');
}

/* ---- the digests that a store keeps ---- */

/* All tensors once through a little memory, each block compared before it is copied. Gives the bytes. */
static int read_all(hr_loader *loader, hr_model *model, uint64_t *bytes)
{
	struct hr_feed_opts opts = HR_FEED_OPTS_INIT;
	hr_feed *feed;
	int rc;

	opts.flags = HR_FEED_VERIFY;
	rc = hr_feed_open(loader, model, &opts, &feed);
	while (!rc) {
		struct hr_tensor tensor = HR_TENSOR_INIT;
		hr_buffer *buffer;

		rc = cli_signals_status() ? HR_E_END : hr_feed_next(feed, &tensor, &buffer);
		if (rc)
			break;
		*bytes += tensor.bytes;
		hr_buffer_release(buffer);
	}
	hr_feed_close(feed, HR_FOREVER);
	return rc == HR_E_END ? 0 : rc;
}

static void check_stored(hr_model *model, struct cli_faults *faults, uint64_t *bytes)
{
	struct hr_loader_opts opts = HR_LOADER_OPTS_INIT;
	hr_device *device = NULL;
	hr_loader *loader = NULL;
	int rc = hr_device_open("cpu", &device);

	if (!rc)
		rc = hr_loader_open(device, &opts, &loader);
	if (!rc)
		rc = read_all(loader, model, bytes);
	if (rc)
		cli_faults_add(faults, hr_error_last());
	hr_loader_close(loader, HR_FOREVER);
	hr_device_close(device);
}

static int run(const struct cli_args *args)
{
	struct cli_faults faults = {0};
	struct cli_digest_check c = {.path = args->digests, .faults = &faults};
	struct hr_model_opts opts = HR_MODEL_OPTS_INIT;
	hr_model *model = NULL;
	uint64_t stored_bytes = 0;
	int rc;

	cli_signals_catch();
	if (args->digests && args->digests[0] && !cli_digest_check_open(&c))
		return cli_fail(args, HR_E_NOTFOUND, "cannot open %s: %s", args->digests, strerror(errno));
	opts.expect = args->expect;
	opts.ugds = args->ugds;
	rc = args->n_names == 1 ? hr_model_open(args->names[0], &opts, &model)
				: hr_model_open_files(args->names, args->n_names, &opts, &model);
	if (rc) {
		cli_faults_add(&faults, hr_error_last());
		check_one_by_one(args, &faults);
	} else {
		c.model = model;
		cli_warn_model(model);
		if (c.file)
			cli_digest_check_run(&c);
		else if (args->digests)
			check_stored(model, &faults, &stored_bytes);
	}
	if (args->json)
		print_json(model, &c, stored_bytes);
	else
		print_text(args, model, &c, stored_bytes);
	rc = cli_signals_status() ? cli_signals_status() : faults.n ? CLI_BAD : CLI_OK;
	cli_digest_check_close(&c);
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
		"  headrace check store:weights.img#llama --digests    reads all data, verifies the store's checksums\n"
		"  headrace check Llama-3.1-8B --json || echo broken\n",
	.options = options,
	.n_options = CLI_N(options),
	.min_names = 1,
	.max_names = SIZE_MAX,
	.run = run,
};
