/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Parts of statistics that several commands print: which engine carried how much and whether through the
 * page cache or around it, and what the threads waited for.
 */
#include "json_writer.h"
#include "work.h"

#include <inttypes.h>
#include <string.h>

static uint64_t sum(const uint64_t *cached, const uint64_t *direct)
{
	uint64_t total = 0;

	for (uint32_t i = 0; i < HR_N_ENGINES; i++)
		total += cached[i] + direct[i];
	return total;
}

static const char *engine_name(uint32_t engine)
{
	const char *name = hr_engine_name(engine);

	return name ? name : "?";
}

static bool put_share(FILE *out, bool is_first, uint64_t bytes, uint64_t total, uint32_t engine, const char *way)
{
	if (!bytes)
		return is_first;
	fprintf(out, "%s%s (%s) %.1f %%", is_first ? "" : ", ", engine_name(engine), way,
		100.0 * (double)bytes / (double)total);
	return false;
}

void cli_put_engines(FILE *out, const uint64_t *cached, const uint64_t *direct)
{
	uint64_t total = sum(cached, direct);
	bool is_first = true;

	for (uint32_t i = 0; i < HR_N_ENGINES; i++) {
		is_first = put_share(out, is_first, cached[i], total, i, "page cache");
		is_first = put_share(out, is_first, direct[i], total, i, "direct");
	}
	if (is_first)
		fputs("none, there is nothing to read", out);
}

static void json_share(struct cli_json *json, uint32_t engine, const char *way, uint64_t bytes, uint64_t total)
{
	if (!bytes)
		return;
	cli_json_object(json, NULL);
	cli_json_text(json, "engine", engine_name(engine));
	cli_json_text(json, "way", way);
	cli_json_u64(json, "bytes", bytes);
	cli_json_real(json, "share", (double)bytes / (double)total);
	cli_json_end(json);
}

void cli_json_engines(struct cli_json *json, const uint64_t *cached, const uint64_t *direct)
{
	uint64_t total = sum(cached, direct);

	cli_json_array(json, "engines");
	for (uint32_t i = 0; i < HR_N_ENGINES; i++) {
		json_share(json, i, "page cache", cached[i], total);
		json_share(json, i, "direct", direct[i], total);
	}
	cli_json_end(json);
}

void cli_json_waits(struct cli_json *json, const struct hr_stats *stats)
{
	double total = (double)stats->storage_wait_ns + (double)stats->copy_wait_ns + (double)stats->read_cpu_ns;

	cli_json_object(json, "waiting");
	cli_json_real(json, "storage", total > 0 ? (double)stats->storage_wait_ns / total : 0);
	cli_json_real(json, "copies", total > 0 ? (double)stats->copy_wait_ns / total : 0);
	cli_json_real(json, "cpu", total > 0 ? (double)stats->read_cpu_ns / total : 0);
	cli_json_end(json);
}

uint64_t cli_pinned_bytes(const char *engine, uint32_t driver, const struct hr_stats *stats)
{
	if (!driver)
		return 0;
	if ((engine && strcmp(engine, "cufile") == 0) || stats->direct_bytes[HR_ENGINE_UGDS])
		return (uint64_t)stats->n_slots * 4096 + (uint64_t)stats->n_readers * 65536;
	return stats->staging_bytes;
}
