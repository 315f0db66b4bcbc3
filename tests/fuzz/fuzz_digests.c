/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Any bytes as one line of a file of digests (what "digest" and sha256sum write and "check --digests" reads), and as a
 * name that is written into such a line: read back, it must be the same. A line is taken apart in place, so nothing
 * outside it may be touched.
 */
#include "fuzz.h"

#include "digests.h"

/* What is written for a name, parsed again. `text` gets the line, to be freed. */
static void write_and_parse(const struct cli_digest_line *from, char **text, struct cli_digest_line *line)
{
	size_t n = 0;
	FILE *out = open_memstream(text, &n);

	if (!out)
		abort();
	if (from->kind == CLI_LINE_TENSOR)
		cli_digest_put_tensor(out, &from->digest, from->name, from->name_len);
	else
		cli_digest_put_shard(out, &from->digest, from->name);
	if (fclose(out))
		abort();
	fuzz_check(n > 0 && !memchr(*text, '\n', n - 1) && (*text)[n - 1] == '\n');
	cli_digest_line_parse(*text, n, line);
}

/* A copy that ends with NUL. */
static char *terminated(const void *bytes, size_t n)
{
	char *copy = malloc(n + 1);

	if (!copy)
		abort();
	if (n)
		memcpy(copy, bytes, n);
	copy[n] = '\0';
	return copy;
}

/* A path ends at its NUL, the name of a tensor may have some. */
static void check_name(enum cli_digest_line_kind kind, const struct hr_digest *digest, const void *bytes, size_t n)
{
	char *name = terminated(bytes, n), *text = NULL;
	struct cli_digest_line from = {kind, *digest, name, kind == CLI_LINE_SHARD ? strlen(name) : n}, line;

	write_and_parse(&from, &text, &line);
	fuzz_check(line.kind == kind && memcmp(&line.digest, digest, sizeof(*digest)) == 0);
	fuzz_check(line.name_len == from.name_len && memcmp(line.name, name, line.name_len) == 0);
	free(text);
	free(name);
}

static void check_line(const uint8_t *bytes, size_t n)
{
	char *text = (char *)fuzz_copy(bytes, n);
	struct cli_digest_line line;

	cli_digest_line_parse(text, n, &line);
	if (line.kind == CLI_LINE_SHARD || line.kind == CLI_LINE_TENSOR) {
		fuzz_check(line.name >= text + 66 && line.name <= text + n);
		fuzz_check(line.name_len <= n - (size_t)(line.name - text));
		check_name(line.kind, &line.digest, line.name, line.name_len);
	}
	free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n)
{
	static const struct hr_digest some = {.sha256 = {0x00, 0x9f, 0xff, 0x0a}};

	if (n < FUZZ_PREFIX)
		return 0;
	check_line(bytes + FUZZ_PREFIX, n - FUZZ_PREFIX);
	check_name(CLI_LINE_SHARD, &some, bytes + FUZZ_PREFIX, n - FUZZ_PREFIX);
	check_name(CLI_LINE_TENSOR, &some, bytes + FUZZ_PREFIX, n - FUZZ_PREFIX);
	return 0;
}
