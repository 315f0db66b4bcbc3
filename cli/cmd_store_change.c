/* SPDX-License-Identifier: Apache-2.0 */
/* "headrace store rm", "reclaim" and "export": one commit each, or none. */
#include "json_writer.h"
#include "store_actions.h"

#include <inttypes.h>

int cli_store_rm(const struct cli_args *args)
{
	struct hr_store_info info = HR_STORE_INFO_INIT;
	struct cli_json json;
	hr_store *store;
	int status = cli_store_open(args, HR_STORE_WRITE, &store);

	if (status)
		return status;
	if (hr_store_remove(store, args->names[2]) || hr_store_stats(store, &info)) {
		status = cli_fail_last(args);
	} else if (args->json) {
		cli_json_start(&json, stdout);
		cli_json_text(&json, "model", args->names[2]);
		cli_json_u64(&json, "generation", info.generation);
		cli_json_u64(&json, "retired_bytes", info.retired_bytes);
		cli_json_finish(&json);
	} else {
		printf("took out '%s': generation %" PRIu64 " is without it\n", args->names[2], info.generation);
	}
	hr_store_close(store);
	return status;
}

int cli_store_reclaim(const struct cli_args *args)
{
	struct hr_store_reclaim_info info = HR_STORE_RECLAIM_INFO_INIT;
	struct cli_json json;
	char size[32];
	hr_store *store;
	int status = cli_store_open(args, HR_STORE_WRITE, &store);

	if (status)
		return status;
	if (hr_store_reclaim(store, &info)) {
		status = cli_fail_last(args);
	} else if (args->json) {
		cli_json_start(&json, stdout);
		cli_json_u64(&json, "generation", info.generation);
		cli_json_u64(&json, "freed_bytes", info.freed_bytes);
		cli_json_u64(&json, "held_bytes", info.held_bytes);
		cli_json_u64(&json, "held_generation", info.held_generation);
		cli_json_finish(&json);
	} else {
		printf("freed %s\n", cli_human(size, info.freed_bytes));
		if (info.held_bytes)
			printf("%s stay: somebody reads generation %" PRIu64 "\n", cli_human(size, info.held_bytes),
			       info.held_generation);
	}
	hr_store_close(store);
	return status;
}

static int write_piece(void *ctx, const char *text, size_t bytes)
{
	return fwrite(text, 1, bytes, ctx) != bytes;
}

int cli_store_export(const struct cli_args *args)
{
	hr_store *store;
	int status = cli_store_open(args, 0, &store);

	if (status)
		return status;
	if (hr_store_export(store, write_piece, stdout) && !ferror(stdout))
		status = cli_fail_last(args);
	hr_store_close(store);
	return status;
}
