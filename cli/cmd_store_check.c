/* SPDX-License-Identifier: Apache-2.0 */
/*
 * "headrace store check": what is damaged in a store, one line a finding. Exit status 0: sound (or made sound by what
 * was asked for), 1: damaged.
 */
#include "json_writer.h"
#include "store_actions.h"
#include "work.h"

#include <inttypes.h>
#include <string.h>

struct finding {
	char *text;
	bool is_bad;
};

struct findings {
	const struct cli_args *args;
	struct finding *list; /* for JSON; text is printed as it comes */
	size_t n;
	struct cli_store_shown shown;
};

static void report(void *ctx, uint32_t is_bad, const char *sentence)
{
	struct findings *findings = ctx;

	cli_progress_end(&findings->shown.bar);
	if (!findings->args->json) {
		FILE *out = is_bad ? stderr : stdout;

		fputs(is_bad ? "headrace: " : "", out);
		cli_put_name(out, sentence, strlen(sentence));
		putc('\n', out);
		return;
	}
	findings->list = cli_grow(findings->list, findings->n + 1, sizeof(*findings->list));
	findings->list[findings->n++] = (struct finding){cli_text("%s", sentence), is_bad};
}

static int tick(void *ctx, const struct hr_store_progress *progress)
{
	return cli_store_tick(&((struct findings *)ctx)->shown, progress);
}

static void put_text(const struct cli_args *args, const struct hr_store_check_info *info)
{
	const char *verdict = info->n_bad ? "damaged" : info->n_repaired ? "repaired" : "ok";
	char size[32];

	printf("%s: %s: ", verdict, args->names[1]);
	if (info->n_bad)
		printf("%u thing%s damaged, ", info->n_bad, info->n_bad == 1 ? " is" : "s are");
	if (info->n_repaired)
		printf("%u written anew, ", info->n_repaired);
	printf("generation %" PRIu64 ", %u object%s looked at", info->generation, info->n_objects,
	       info->n_objects == 1 ? "" : "s");
	if (info->checked_bytes)
		printf(", %s read and compared", cli_human(size, info->checked_bytes));
	if (info->n_salvaged)
		printf(", %u file%s written to %s", info->n_salvaged, info->n_salvaged == 1 ? "" : "s",
		       args->salvage_to);
	putchar('\n');
}

static void put_json(const struct findings *findings, const struct hr_store_check_info *info)
{
	struct cli_json json;

	cli_json_start(&json, stdout);
	cli_json_bool(&json, "ok", info->n_bad == 0);
	cli_json_text(&json, "verdict", info->n_bad ? "damaged" : info->n_repaired ? "repaired" : "clean");
	cli_json_u64(&json, "generation", info->generation);
	cli_json_u64(&json, "objects", info->n_objects);
	cli_json_u64(&json, "checked_bytes", info->checked_bytes);
	cli_json_u64(&json, "damaged", info->n_bad);
	cli_json_u64(&json, "repaired", info->n_repaired);
	cli_json_u64(&json, "salvaged", info->n_salvaged);
	cli_json_array(&json, "findings");
	for (size_t i = 0; i < findings->n; i++) {
		cli_json_object(&json, NULL);
		cli_json_bool(&json, "damage", findings->list[i].is_bad);
		cli_json_text(&json, "text", findings->list[i].text);
		cli_json_end(&json);
	}
	cli_json_end(&json);
	cli_json_finish(&json);
}

static uint32_t flags_of(const struct cli_args *args)
{
	return (args->all_digests ? HR_CHECK_DIGESTS : 0) | (args->repair ? HR_CHECK_REPAIR : 0) |
	       (args->rollback ? HR_CHECK_ROLLBACK : 0) | (args->salvage ? HR_CHECK_SALVAGE : 0);
}

int cli_store_check(const struct cli_args *args)
{
	struct hr_store_check_info info = HR_STORE_CHECK_INFO_INIT;
	struct hr_store_check_opts opts = HR_STORE_CHECK_OPTS_INIT;
	struct findings findings = {.args = args};
	int rc;

	if (args->salvage_to && !args->salvage)
		return cli_usage(args, "--to says where --salvage writes what it finds; it means nothing without that");
	cli_signals_catch();
	opts.flags = flags_of(args);
	opts.report = report;
	opts.report_ctx = &findings;
	opts.salvage_to = args->salvage_to;
	opts.progress = tick;
	opts.progress_ctx = &findings;
	rc = hr_store_check(args->names[1], &opts, &info);
	cli_progress_end(&findings.shown.bar);
	if (rc)
		rc = cli_store_fail(args);
	else if (args->json)
		put_json(&findings, &info);
	else
		put_text(args, &info);
	for (size_t i = 0; i < findings.n; i++)
		cli_free(findings.list[i].text);
	cli_free(findings.list);
	return rc ? rc : info.n_bad ? CLI_BAD : CLI_OK;
}
