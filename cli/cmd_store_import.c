/* SPDX-License-Identifier: Apache-2.0 */
/* "headrace store import" and "get": a model into a store, and out again as files. Both show how far they are. */
#include "json_writer.h"
#include "store_actions.h"
#include "work.h"

#include <inttypes.h>
#include <string.h>

/* ---- progress ---- */

int cli_store_tick(void *ctx, const struct hr_store_progress *progress)
{
	struct cli_store_shown *shown = ctx;

	if (strcmp(shown->step, progress->step) != 0) {
		cli_progress_end(&shown->bar);
		snprintf(shown->step, sizeof(shown->step), "%s", progress->step);
		cli_progress_start(&shown->bar, shown->step);
	}
	cli_progress_show(&shown->bar, progress->done_bytes, progress->total_bytes);
	return cli_signals_status();
}

/* After long work that failed: a cancel is the signal's status. */
int cli_store_fail(const struct cli_args *args)
{
	int status = cli_fail_last(args);

	return cli_signals_status() ? cli_signals_status() : status;
}

/* ---- import ---- */

/* "llama-8b" of "./llama-8b/", "model" of "x/model.safetensors" and of "x/model.safetensors.index.json". */
static char *default_name(const char *source)
{
	size_t len = strlen(source), begin, end;
	const char *dot;

	while (len > 1 && source[len - 1] == '/')
		len--;
	for (begin = len; begin > 0 && source[begin - 1] != '/'; begin--)
		;
	end = len;
	dot = strstr(source + begin, ".safetensors");
	if (dot && dot < source + len && dot > source + begin)
		end = (size_t)(dot - source);
	return cli_text("%.*s", (int)(end - begin), source + begin);
}

/* Names that could not be told apart in "store:PATH#MODEL@GENERATION/FILE" afterwards. */
static int check_name(const struct cli_args *args, const char *model)
{
	if (!model[0] || strcmp(model, ".") == 0 || strcmp(model, "..") == 0)
		return cli_usage(args, "'%s' gives no name for the model; use --as MODEL", args->names[2]);
	if (strpbrk(model, "#@"))
		return cli_usage(args, "'%s' cannot be a model's name: '#' and '@' are used to name its generations",
				 model);
	return 0;
}

static void put_import(const struct cli_args *args, const char *model, const struct hr_store_import_info *info,
		       uint64_t elapsed_ns)
{
	char all[32], new[32], shared[32];

	printf("%s '%s': %u file%s, %u of them shards, %s\n", args->plan ? "would import" : "imported", model,
	       info->n_files, info->n_files == 1 ? "" : "s", info->n_shards, cli_human(all, info->bytes));
	if (args->plan) {
		printf("would write %s\n", cli_human(new, info->needed_bytes));
		return;
	}
	printf("wrote %s in %.2f s (%.2f GB/s); %s were there already\n", cli_human(new, info->written_bytes),
	       (double)elapsed_ns / 1e9, cli_rate(info->written_bytes, elapsed_ns),
	       cli_human(shared, info->shared_bytes));
	printf("generation %" PRIu64 ": store:%s#%s\n", info->generation, args->names[1], model);
}

static void json_import(const struct cli_args *args, const char *model, const struct hr_store_import_info *info,
			uint64_t elapsed_ns)
{
	struct cli_json json;

	cli_json_start(&json, stdout);
	cli_json_bool(&json, "done", !args->plan);
	cli_json_text(&json, "model", model);
	cli_json_u64(&json, "generation", info->generation);
	cli_json_u64(&json, "files", info->n_files);
	cli_json_u64(&json, "shards", info->n_shards);
	cli_json_u64(&json, "bytes", info->bytes);
	cli_json_u64(&json, "written_bytes", info->written_bytes);
	cli_json_u64(&json, "shared_bytes", info->shared_bytes);
	cli_json_u64(&json, "needed_bytes", info->needed_bytes);
	cli_json_real(&json, "seconds", (double)elapsed_ns / 1e9);
	cli_json_finish(&json);
}

static int import(const struct cli_args *args, hr_store *store, const char *model)
{
	struct hr_store_import_opts opts = HR_STORE_IMPORT_OPTS_INIT;
	struct hr_store_import_info info = HR_STORE_IMPORT_INFO_INIT;
	struct cli_store_shown shown = {.step = ""};
	uint64_t start_ns = cli_now_ns();
	int rc;

	opts.flags = (args->replace ? HR_IMPORT_REPLACE : 0) | (args->unverified ? HR_IMPORT_NO_READ_BACK : 0) |
		     (args->plan ? HR_IMPORT_PLAN : 0);
	opts.progress = cli_store_tick;
	opts.progress_ctx = &shown;
	rc = hr_store_import(store, args->names[2], model, &opts, &info);
	cli_progress_end(&shown.bar);
	if (rc)
		return cli_store_fail(args);
	if (info.n_skipped && !args->json)
		cli_warn("%u folder%s whose name begins with a dot %s left out", info.n_skipped,
			 info.n_skipped == 1 ? "" : "s", info.n_skipped == 1 ? "was" : "were");
	if (args->json)
		json_import(args, model, &info, cli_now_ns() - start_ns);
	else
		put_import(args, model, &info, cli_now_ns() - start_ns);
	return 0;
}

/* What would not open afterwards is not brought in. A folder without a model may be: it is not called broken here. */
static int check_source(const struct cli_args *args)
{
	hr_model *model;
	int rc = hr_model_open(args->names[2], NULL, &model);

	if (rc && rc != HR_E_NOTFOUND && rc != HR_E_AMBIGUOUS)
		return cli_fail_last(args);
	hr_model_close(model);
	return 0;
}

int cli_store_import(const struct cli_args *args)
{
	char *model = args->store_as ? cli_text("%s", args->store_as) : default_name(args->names[2]);
	int status = check_name(args, model);
	hr_store *store;

	cli_signals_catch();
	if (!status)
		status = check_source(args);
	if (!status)
		status = cli_store_open(args, args->plan ? 0 : HR_STORE_WRITE, &store);
	if (!status) {
		status = import(args, store, model);
		hr_store_close(store);
	}
	cli_free(model);
	return status;
}

/* ---- get ---- */

int cli_store_get(const struct cli_args *args)
{
	struct hr_store_get_opts opts = HR_STORE_GET_OPTS_INIT;
	struct hr_store_model_info model = HR_STORE_MODEL_INFO_INIT;
	struct cli_store_shown shown = {.step = ""};
	struct cli_json json;
	hr_store *store;
	uint32_t number;
	char size[32];
	int rc, status;

	cli_signals_catch();
	status = cli_store_open(args, 0, &store);
	if (status)
		return status;
	opts.progress = cli_store_tick;
	opts.progress_ctx = &shown;
	rc = hr_store_find(store, args->names[2], &number);
	if (!rc)
		rc = hr_store_model(store, number, &model);
	if (!rc)
		rc = hr_store_get(store, args->names[2], args->names[3], &opts);
	cli_progress_end(&shown.bar);
	if (rc) {
		status = cli_store_fail(args);
	} else if (args->json) {
		cli_json_start(&json, stdout);
		cli_json_text(&json, "model", args->names[2]);
		cli_json_text(&json, "folder", args->names[3]);
		cli_json_u64(&json, "files", model.n_files);
		cli_json_u64(&json, "bytes", model.bytes);
		cli_json_finish(&json);
	} else {
		printf("wrote %u file%s, %s, to %s; every digest agrees\n", model.n_files,
		       model.n_files == 1 ? "" : "s", cli_human(size, model.bytes), args->names[3]);
	}
	hr_store_close(store);
	return status;
}
