/* SPDX-License-Identifier: Apache-2.0 */
/*
 * See digests.h. Threads take shards in order; each has 8 MiB in the library. Results go to places of their
 * own, errors are kept by shard and told on the caller's thread, in order.
 */
#include "digests.h"

#include "utf8.h"
#include "work.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* A copy of a worker's last error: that is the worker's own. */
struct kept_error {
	int32_t code, system;
	uint64_t offset;
	char *stage, *path, *tensor, *message;
};

struct work {
	const hr_model *model;
	struct cli_digests *out;
	struct kept_error *errors; /* by shard; only the thread that has the shard writes it */
	atomic_uint next;
};

static void count_tensors(const hr_model *model, struct cli_digests *out)
{
	uint64_t n = hr_model_n_tensors(model);

	for (uint64_t i = 0; i < n; i++) {
		struct hr_tensor tensor = HR_TENSOR_INIT;

		if (hr_model_tensor(model, i, &tensor) == 0 && tensor.shard < out->n_shards)
			out->first[tensor.shard + 1]++;
	}
	for (uint32_t s = 0; s < out->n_shards; s++)
		out->first[s + 1] += out->first[s];
}

static void keep_error(struct kept_error *kept)
{
	const struct hr_error *error = hr_error_last();

	kept->code = error->code;
	kept->system = error->system;
	kept->offset = error->offset;
	kept->stage = cli_text("%s", error->stage);
	kept->path = cli_text("%s", error->path);
	kept->tensor = cli_text("%s", error->tensor);
	kept->message = cli_text("%s", error->message);
}

static void hash_shard(struct work *work, uint32_t shard)
{
	struct cli_digests *out = work->out;
	struct hr_digest *tensors = out->tensors ? out->tensors + out->first[shard] : NULL;
	size_t n = out->tensors ? out->first[shard + 1] - out->first[shard] : 0;

	if (hr_model_digest(work->model, shard, &out->shards[shard], tensors, n)) {
		keep_error(&work->errors[shard]);
		out->failed[shard] = true;
	}
}

static void *run_worker(void *arg)
{
	struct work *work = arg;

	for (;;) {
		unsigned shard = atomic_fetch_add(&work->next, 1);

		if (shard >= work->out->n_shards)
			return NULL;
		hash_shard(work, shard);
	}
}

static void run_workers(struct work *work)
{
	pthread_t threads[CLI_DIGEST_MAX_THREADS];
	unsigned n = cli_cpus() < CLI_DIGEST_MAX_THREADS ? cli_cpus() : CLI_DIGEST_MAX_THREADS;
	unsigned n_started = 0;

	if (n > work->out->n_shards)
		n = work->out->n_shards;
	while (n_started + 1 < n && pthread_create(&threads[n_started], NULL, run_worker, work) == 0)
		n_started++;
	run_worker(work);
	for (unsigned i = 0; i < n_started; i++)
		pthread_join(threads[i], NULL);
}

static void tell_errors(struct work *work, cli_digest_failed *failed, void *ctx)
{
	for (uint32_t s = 0; s < work->out->n_shards; s++) {
		struct kept_error *kept = &work->errors[s];

		if (work->out->failed[s]) {
			const struct hr_error error = {kept->code, kept->system, kept->offset, kept->stage,
						       kept->path, kept->tensor, kept->message};

			failed(ctx, s, &error);
		}
		cli_free(kept->stage);
		cli_free(kept->path);
		cli_free(kept->tensor);
		cli_free(kept->message);
	}
}

void cli_digests_new(const hr_model *model, bool with_tensors, cli_digest_failed *failed, void *ctx,
		     struct cli_digests *out)
{
	struct work work = {.model = model, .out = out};

	*out = (struct cli_digests){.n_shards = hr_model_n_shards(model)};
	out->shards = cli_alloc(out->n_shards, sizeof(*out->shards));
	out->failed = cli_alloc(out->n_shards, sizeof(*out->failed));
	out->first = cli_alloc((size_t)out->n_shards + 1, sizeof(*out->first));
	count_tensors(model, out);
	if (with_tensors) {
		out->n_tensors = hr_model_n_tensors(model);
		out->tensors = cli_alloc(out->n_tensors, sizeof(*out->tensors));
	}
	work.errors = cli_alloc(out->n_shards, sizeof(*work.errors));
	run_workers(&work);
	tell_errors(&work, failed, ctx);
	cli_free(work.errors);
}

void cli_digests_free(struct cli_digests *digests)
{
	cli_free(digests->shards);
	cli_free(digests->tensors);
	cli_free(digests->first);
	cli_free(digests->failed);
	*digests = (struct cli_digests){0};
}

/* ---- text form ---- */

static void put_hex(FILE *out, const struct hr_digest *digest)
{
	char hex[65];

	cli_hex(hex, digest->sha256, sizeof(digest->sha256));
	fputs(hex, out);
}

void cli_digest_put_shard(FILE *out, const struct hr_digest *digest, const char *path)
{
	if (strpbrk(path, "\\\n\r"))
		putc('\\', out);
	put_hex(out, digest);
	fputs("  ", out);
	for (const char *c = path; *c; c++) {
		if (*c == '\\')
			fputs("\\\\", out);
		else if (*c == '\n')
			fputs("\\n", out);
		else if (*c == '\r')
			fputs("\\r", out);
		else
			putc(*c, out);
	}
	putc('\n', out);
}

/* Bytes that a terminal must not get are written in hex, one by one, so that reading them back needs no more rules. */
static void put_hex_bytes(FILE *out, const char *bytes, size_t n)
{
	for (size_t i = 0; i < n; i++)
		fprintf(out, "\\x%02x", (unsigned char)bytes[i]);
}

void cli_digest_put_tensor(FILE *out, const struct hr_digest *digest, const char *name, size_t len)
{
	fputs("#tensor ", out);
	put_hex(out, digest);
	fputs("  ", out);
	for (size_t i = 0; i < len;) {
		uint32_t point;
		size_t used = cli_utf8_next(name + i, len - i, &point);

		if (point == '\\')
			fputs("\\\\", out);
		else if (point == '\n')
			fputs("\\n", out);
		else if (!used || cli_is_unprintable(point))
			put_hex_bytes(out, name + i, used ? used : 1);
		else
			fwrite(name + i, 1, used, out);
		i += used ? used : 1;
	}
	putc('\n', out);
}

static int hex_value(char c)
{
	if (c >= '0' && c <= '9')
		return c - '0';
	if (c >= 'a' && c <= 'f')
		return c - 'a' + 10;
	if (c >= 'A' && c <= 'F')
		return c - 'A' + 10;
	return -1;
}

static bool parse_hex(const char *text, struct hr_digest *digest)
{
	for (size_t i = 0; i < sizeof(digest->sha256); i++) {
		int high = hex_value(text[2 * i]);
		int low = high < 0 ? -1 : hex_value(text[2 * i + 1]);

		if (low < 0)
			return false;
		digest->sha256[i] = (uint8_t)(high << 4 | low);
	}
	return true;
}

/* Takes the escapes out, in place; false where there is one that is none. */
static bool unescape(char *text, size_t *len)
{
	size_t to = 0;

	for (size_t i = 0; i < *len; i++) {
		char c = text[i];

		if (c == '\\') {
			if (++i == *len)
				return false;
			if (text[i] == 'n') {
				c = '\n';
			} else if (text[i] == 'r') {
				c = '\r';
			} else if (text[i] == 'x' && i + 2 < *len && hex_value(text[i + 1]) >= 0 &&
				   hex_value(text[i + 2]) >= 0) {
				c = (char)(hex_value(text[i + 1]) << 4 | hex_value(text[i + 2]));
				i += 2;
			} else if (text[i] != '\\') {
				return false;
			}
		}
		text[to++] = c;
	}
	*len = to;
	return true;
}

void cli_digest_line_parse(char *text, size_t len, struct cli_digest_line *line)
{
	static const char tag[] = "#tensor ";
	bool is_escaped = false;

	*line = (struct cli_digest_line){.kind = CLI_LINE_SHARD};
	while (len && (text[len - 1] == '\n' || text[len - 1] == '\r'))
		len--;
	if (len > strlen(tag) && memcmp(text, tag, strlen(tag)) == 0) {
		line->kind = CLI_LINE_TENSOR;
		is_escaped = true;
		text += strlen(tag);
		len -= strlen(tag);
	} else if (!len || text[0] == '#') {
		line->kind = CLI_LINE_COMMENT;
		return;
	} else if (text[0] == '\\') {
		is_escaped = true;
		text++;
		len--;
	}
	line->name = text + 66;
	line->name_len = len - 66;
	if (len < 66 || text[64] != ' ' || (text[65] != ' ' && text[65] != '*') || !parse_hex(text, &line->digest) ||
	    (is_escaped && !unescape(line->name, &line->name_len)))
		line->kind = CLI_LINE_BAD;
}
