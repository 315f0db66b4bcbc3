/* SPDX-License-Identifier: Apache-2.0 */
/*
 * "headrace store init": makes a store. Says first what is there and what would be destroyed; goes on over other
 * people's data with --force only, and never over what is in use. With --plan it says so and does nothing.
 */
#include "json_writer.h"
#include "store_actions.h"

#include <inttypes.h>
#include <string.h>

static void put_findings(FILE *out, const struct cli_args *args, const struct cli_findings *findings)
{
	const char *path = args->names[1];
	char size[32];

	if (!findings->bytes)
		fprintf(out, "%s: there is no such file; it would be made\n", path);
	else
		fprintf(out, "%s: a %s of %s\n", path, findings->is_block ? "block device" : "file",
			cli_human(size, findings->bytes));
	for (size_t i = 0; i < findings->n_signs; i++)
		fprintf(out, "  destroys   %s\n", findings->signs[i]);
	for (size_t i = 0; i < findings->n_uses; i++)
		fprintf(out, "  in use     %s\n", findings->uses[i]);
	if (findings->bytes && !findings->is_complete)
		fprintf(out, "  not asked  libblkid is not here to tell what may lie there (Debian: libblkid1)\n");
}

static void json_list(struct cli_json *json, const char *key, char *const *list, size_t n)
{
	cli_json_array(json, key);
	for (size_t i = 0; i < n; i++)
		cli_json_text(json, NULL, list[i]);
	cli_json_end(json);
}

static void put_json(const struct cli_args *args, const struct cli_findings *findings, bool is_done)
{
	struct cli_json json;

	cli_json_start(&json, stdout);
	cli_json_text(&json, "path", args->names[1]);
	cli_json_bool(&json, "done", is_done);
	cli_json_bool(&json, "block_device", findings->is_block);
	cli_json_u64(&json, "found_bytes", findings->bytes);
	json_list(&json, "destroys", findings->signs, findings->n_signs);
	json_list(&json, "in_use", findings->uses, findings->n_uses);
	cli_json_bool(&json, "refused", findings->n_uses > 0 || (findings->n_signs > 0 && !args->force));
	cli_json_finish(&json);
}

/* Everything that it looks like, joined for a message. */
static char *joined(char *const *list, size_t n)
{
	char *text = cli_text("%s", n ? list[0] : "");

	for (size_t i = 1; i < n; i++) {
		char *longer = cli_text("%s; %s", text, list[i]);

		cli_free(text);
		text = longer;
	}
	return text;
}

static int refuse(const struct cli_args *args, const struct cli_findings *findings)
{
	char *text = findings->n_uses ? joined(findings->uses, findings->n_uses)
				      : joined(findings->signs, findings->n_signs);
	int status;

	if (findings->n_uses)
		status = cli_fail(args, HR_E_LOCKED, "%s is in use: %s", args->names[1], text);
	else
		status = cli_fail(args, HR_E_FOREIGN,
				  "%s is not empty: %s; with --force all of that is destroyed, without a way back",
				  args->names[1], text);
	cli_free(text);
	return status;
}

static int make(const struct cli_args *args, const struct cli_findings *findings)
{
	struct hr_store_init_opts opts = HR_STORE_INIT_OPTS_INIT;
	struct hr_store_info info = HR_STORE_INFO_INIT;
	hr_store *store = NULL;
	char size[32], uuid[37];
	int status;

	opts.flags = args->force ? HR_STORE_FORCE : 0;
	opts.bytes = args->store_bytes;
	opts.name = args->store_name;
	if (args->force && findings->n_signs && !args->json)
		put_findings(stderr, args, findings);
	if (hr_store_init(args->names[1], &opts))
		return cli_fail_setup(args);
	status = cli_store_open(args, 0, &store);
	if (status)
		return status;
	hr_store_stats(store, &info);
	hr_store_close(store);
	cli_uuid(uuid, info.uuid);
	if (args->json)
		put_json(args, findings, true);
	else
		printf("made a store of %s in %s (%s): %s\n", cli_human(size, info.data_bytes), args->names[1],
		       info.kind, uuid);
	return 0;
}

/* What the size says about the path. */
static int check_size(const struct cli_args *args, const struct cli_findings *findings)
{
	if (!findings->bytes && !args->store_bytes)
		return cli_usage(args, "%s does not exist; --size makes a file of that size", args->names[1]);
	if (findings->bytes && args->store_bytes && findings->is_block)
		return cli_usage(args, "%s is a device of %" PRIu64 " bytes: leave --size out, all of it is taken",
				 args->names[1], findings->bytes);
	return 0;
}

int cli_store_init(const struct cli_args *args)
{
	struct cli_findings findings;
	int status = cli_findings_get(args, args->names[1], &findings);

	if (!status)
		status = check_size(args, &findings);
	if (!status && args->plan && args->json)
		put_json(args, &findings, false);
	else if (!status && args->plan)
		put_findings(stdout, args, &findings);
	else if (!status && (findings.n_uses || (findings.n_signs && !args->force)))
		status = refuse(args, &findings);
	else if (!status)
		status = make(args, &findings);
	cli_findings_free(&findings);
	return status;
}
