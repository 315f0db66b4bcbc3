/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What headrace makes of many files, for tests in Python: reads paths from standard input, one a line, and prints one
 * line of JSON for each:
 *
 *     {"code":"HR_OK","tensors":[["t","F32",[2],0,8]],"metadata":[["format","pt"]]}      ranges count from the data's
 *                                                                                        start
 *     {"code":"HR_E_SIZE","offset":9,"stage":"header","tensor":"t","message":"..."}
 *
 * dump_header            parses the bytes in memory (src/format alone)
 * dump_header --api      opens the file with hr_model_open_files()
 * dump_header --count    prints "n_tensors" in place of the tensors, and the milliseconds and KiB of memory that it
 *                        took
 */
#include "format/header.h"

#include "core/error.h"
#include "headrace.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static bool use_api, count_only;

static void put_text(const char *text, size_t n)
{
	putchar('"');
	for (size_t i = 0; i < n; i++) {
		unsigned char c = (unsigned char)text[i];

		if (c < 0x20 || c == '"' || c == '\\')
			printf("\\u%04x", c);
		else
			putchar(c);
	}
	putchar('"');
}

static void put_error(void)
{
	const struct hr_error *error = hr_error_last();

	printf("{\"code\":\"%s\",\"offset\":", hr_error_name(error->code));
	if (error->offset == HR_NO_OFFSET)
		printf("null");
	else
		printf("%" PRIu64, error->offset);
	printf(",\"stage\":");
	put_text(error->stage, strlen(error->stage));
	printf(",\"tensor\":");
	put_text(error->tensor, strlen(error->tensor));
	printf(",\"message\":");
	put_text(error->message, strlen(error->message));
}

static void put_tensor(const char *comma, const char *name, size_t name_len, uint32_t dtype, const uint64_t *dims,
		       uint32_t rank)
{
	printf("%s[", comma);
	put_text(name, name_len);
	printf(",\"%s\",[", hr_dtype_name(dtype));
	for (uint32_t d = 0; d < rank; d++)
		printf("%s%" PRIu64, d ? "," : "", dims[d]);
	printf("],");
}

static void put_header(const struct hr__header *header)
{
	printf("{\"code\":\"HR_OK\",");
	if (count_only) {
		printf("\"n_tensors\":%zu", header->n_entries);
		return;
	}
	printf("\"tensors\":[");
	for (size_t i = 0; i < header->n_entries; i++) {
		const struct hr__entry *e = &header->entries[i];

		put_tensor(i ? "," : "", e->name, e->name_len, e->dtype, e->dims, e->rank);
		printf("%" PRIu64 ",%" PRIu64 "]", e->begin, e->end);
	}
	printf("],\"metadata\":[");
	for (size_t i = 0; i < header->n_pairs; i++) {
		printf("%s[", i ? "," : "");
		put_text(header->pairs[i].key, header->pairs[i].key_len);
		putchar(',');
		put_text(header->pairs[i].value, header->pairs[i].value_len);
		putchar(']');
	}
	putchar(']');
}

static unsigned char *read_all(const char *path, size_t *n)
{
	FILE *file = fopen(path, "rb");
	unsigned char *bytes;
	long size;

	if (!file || fseek(file, 0, SEEK_END) != 0)
		exit(3);
	size = ftell(file);
	rewind(file);
	bytes = malloc(size > 0 ? (size_t)size : 1);
	if (!bytes || fread(bytes, 1, (size_t)size, file) != (size_t)size)
		exit(3);
	fclose(file);
	*n = (size_t)size;
	return bytes;
}

/* A line of /proc/self/status, in KiB. (The peak of getrusage(2) counts what the parent had, too.) */
static long memory_kib(const char *name)
{
	FILE *file = fopen("/proc/self/status", "r");
	char line[256];
	long kib = 0;

	while (file && fgets(line, sizeof(line), file))
		if (strncmp(line, name, strlen(name)) == 0)
			kib = strtol(line + strlen(name), NULL, 10);
	if (file)
		fclose(file);
	return kib;
}

static void dump_parsed(const char *path)
{
	struct hr__header header;
	struct hr__hash_key key;
	struct timespec start, end;
	uint64_t json_bytes;
	size_t n;
	unsigned char *bytes = read_all(path, &n);
	long before = memory_kib("VmRSS:");
	int rc;

	hr__hash_key_new(&key);
	clock_gettime(CLOCK_MONOTONIC, &start);
	rc = hr__header_frame(bytes, n < 64 ? n : 64, n, &json_bytes);
	if (!rc)
		rc = hr__header_parse(&key, bytes + 8, (size_t)json_bytes, n - 8 - json_bytes, &header);
	clock_gettime(CLOCK_MONOTONIC, &end);
	if (rc)
		put_error();
	else
		put_header(&header);
	if (count_only)
		printf(",\"ms\":%ld,\"kib\":%ld",
		       (end.tv_sec - start.tv_sec) * 1000 + (end.tv_nsec - start.tv_nsec) / 1000000,
		       memory_kib("VmHWM:") - before);
	if (!rc)
		hr__header_free(&header);
	free(bytes);
}

static void put_model(const hr_model *model)
{
	struct hr_shard shard = HR_SHARD_INIT;
	struct hr_tensor t = HR_TENSOR_INIT;
	const char *key, *value;
	size_t key_len, value_len;

	if (hr_model_shard(model, 0, &shard) != 0)
		exit(3);
	printf("{\"code\":\"HR_OK\",\"tensors\":[");
	for (uint64_t i = 0; i < hr_model_n_tensors(model); i++) {
		if (hr_model_tensor(model, i, &t) != 0)
			exit(3);
		put_tensor(i ? "," : "", t.name, t.name_len, t.dtype, t.dims, t.rank);
		printf("%" PRIu64 ",%" PRIu64 "]", t.offset - shard.data_offset,
		       t.offset - shard.data_offset + t.bytes);
	}
	printf("],\"metadata\":[");
	for (uint64_t i = 0; i < shard.n_metadata; i++) {
		if (hr_model_metadata(model, 0, i, &key, &key_len, &value, &value_len) != 0)
			exit(3);
		printf("%s[", i ? "," : "");
		put_text(key, key_len);
		putchar(',');
		put_text(value, value_len);
		putchar(']');
	}
	putchar(']');
}

static void dump_opened(const char *path)
{
	hr_model *model;

	if (hr_model_open_files(&path, 1, NULL, &model) != 0) {
		put_error();
		return;
	}
	put_model(model);
	hr_model_close(model);
}

int main(int argc, char **argv)
{
	char path[4096];

	for (int i = 1; i < argc; i++) {
		use_api = use_api || strcmp(argv[i], "--api") == 0;
		count_only = count_only || strcmp(argv[i], "--count") == 0;
	}
	while (fgets(path, sizeof(path), stdin)) {
		path[strcspn(path, "\n")] = '\0';
		if (use_api)
			dump_opened(path);
		else
			dump_parsed(path);
		puts("}");
	}
	return 0;
}
