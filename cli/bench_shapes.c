/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which tensors a synthetic checkpoint has. Sizes come from real models: "llama" has the shapes of a Llama
 * with as many layers as fit, in shards of 2 GiB; "small" has very many equal tensors, as models of many
 * experts do; "one" has a single tensor, to compare the others with.
 */
#include "bench.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define SHARD_BYTES   (UINT64_C(2) << 30)
#define MAX_TENSORS   UINT64_C(4000000)
#define MAX_SHARDS    1000
#define MAX_BYTES     (UINT64_C(1) << 42)
#define ELEMENT_BYTES 2

static struct bench_tensor *add(struct bench_shapes *shapes, char *name, uint64_t rows, uint64_t columns)
{
	struct bench_tensor *tensor;

	if (shapes->n == shapes->room) {
		shapes->room = shapes->room ? 2 * shapes->room : 512;
		shapes->tensors = cli_grow(shapes->tensors, shapes->room, sizeof(*shapes->tensors));
	}
	tensor = &shapes->tensors[shapes->n++];
	*tensor = (struct bench_tensor){.name = name, .dims = {rows, columns}, .rank = columns ? 2 : 1};
	tensor->bytes = rows * (columns ? columns : 1) * ELEMENT_BYTES;
	shapes->bytes += tensor->bytes;
	return tensor;
}

/* ---- llama ---- */

struct llama {
	uint64_t from_bytes; /* for models of this size and more */
	uint64_t hidden, inner, kv, vocabulary;
};

static const struct llama llamas[] = {
	{UINT64_C(12) << 30, 4096, 14336, 1024, 128256},
	{UINT64_C(2) << 30, 2048, 8192, 512, 32000},
	{UINT64_C(128) << 20, 1024, 2816, 256, 8000},
	{UINT64_C(4) << 20, 256, 704, 64, 2000},
};

static void add_layer(struct bench_shapes *shapes, const struct llama *llama, uint64_t layer)
{
	const struct {
		const char *name;
		uint64_t rows, columns;
	} parts[] = {
		{"input_layernorm", llama->hidden, 0},
		{"mlp.down_proj", llama->hidden, llama->inner},
		{"mlp.gate_proj", llama->inner, llama->hidden},
		{"mlp.up_proj", llama->inner, llama->hidden},
		{"post_attention_layernorm", llama->hidden, 0},
		{"self_attn.k_proj", llama->kv, llama->hidden},
		{"self_attn.o_proj", llama->hidden, llama->hidden},
		{"self_attn.q_proj", llama->hidden, llama->hidden},
		{"self_attn.v_proj", llama->kv, llama->hidden},
	};

	for (size_t i = 0; i < CLI_N(parts); i++)
		add(shapes, cli_text("model.layers.%" PRIu64 ".%s.weight", layer, parts[i].name), parts[i].rows,
		    parts[i].columns);
}

/* Fills shards in order up to 2 GiB; a larger tensor has one of its own. */
static void cut_by_size(struct bench_shapes *shapes)
{
	uint64_t used = 0;

	for (size_t i = 0; i < shapes->n; i++) {
		if (used && used + shapes->tensors[i].bytes > SHARD_BYTES) {
			shapes->n_shards++;
			used = 0;
		}
		shapes->tensors[i].shard = shapes->n_shards;
		used += shapes->tensors[i].bytes;
	}
	shapes->n_shards++;
}

static bool make_llama(const char *text, struct bench_shapes *shapes)
{
	const struct llama *llama = llamas;
	uint64_t bytes;

	if (!cli_size_parse(text, &bytes) || bytes < llamas[CLI_N(llamas) - 1].from_bytes || bytes > MAX_BYTES)
		return false;
	while (bytes < llama->from_bytes)
		llama++;
	add(shapes, cli_text("model.embed_tokens.weight"), llama->vocabulary, llama->hidden);
	for (uint64_t layer = 0;; layer++) {
		uint64_t before = shapes->bytes;

		add_layer(shapes, llama, layer);
		if (shapes->bytes + (shapes->bytes - before) + shapes->tensors[0].bytes > bytes)
			break;
	}
	add(shapes, cli_text("model.norm.weight"), llama->hidden, 0);
	add(shapes, cli_text("lm_head.weight"), llama->vocabulary, llama->hidden);
	cut_by_size(shapes);
	return true;
}

/* ---- small, one ---- */

/* "100000x32KiB" or "92000x64/161" */
static bool make_small(const char *text, struct bench_shapes *shapes)
{
	char size[32];
	uint64_t n, bytes;
	uint64_t n_shards = 4;
	char *x = NULL;
	const char *slash = strchr(text, '/');
	size_t len;

	n = strtoull(text, &x, 10);
	if (text[0] < '0' || text[0] > '9' || *x != 'x' || !n || n > MAX_TENSORS)
		return false;
	len = slash ? (size_t)(slash - x - 1) : strlen(x + 1);
	if (len >= sizeof(size) || (slash && (!cli_count_parse(slash + 1, &n_shards) || n_shards > MAX_SHARDS)))
		return false;
	memcpy(size, x + 1, len);
	size[len] = '\0';
	if (!cli_size_parse(size, &bytes) || bytes % ELEMENT_BYTES || bytes > MAX_BYTES / n)
		return false;
	if (n_shards > n)
		n_shards = n;
	for (uint64_t i = 0; i < n; i++)
		add(shapes,
		    cli_text("model.layers.%" PRIu64 ".mlp.experts.%" PRIu64 ".w%" PRIu64 ".weight", i / 384,
			     i % 384 / 3, i % 3 + 1),
		    bytes / ELEMENT_BYTES, 0)
			->shard = (uint32_t)(i * n_shards / n);
	shapes->n_shards = (uint32_t)n_shards;
	return true;
}

static bool make_one(const char *text, struct bench_shapes *shapes)
{
	uint64_t bytes;

	if (!cli_size_parse(text, &bytes) || bytes % ELEMENT_BYTES || bytes > MAX_BYTES)
		return false;
	add(shapes, cli_text("weight"), bytes / ELEMENT_BYTES, 0);
	shapes->n_shards = 1;
	return true;
}

int bench_shapes_new(const struct cli_args *args, const char *spec, struct bench_shapes *shapes)
{
	bool is_good = false;

	*shapes = (struct bench_shapes){0};
	if (strncmp(spec, "llama:", 6) == 0)
		is_good = make_llama(spec + 6, shapes);
	else if (strncmp(spec, "small:", 6) == 0)
		is_good = make_small(spec + 6, shapes);
	else if (strncmp(spec, "one:", 4) == 0)
		is_good = make_one(spec + 4, shapes);
	if (is_good)
		return 0;
	return cli_usage(args,
			 "--synthetic takes 'llama:16GiB' (from 4MiB), 'small:100000x32KiB' (or with shards: "
			 "'small:92000x64/161') or 'one:4GiB'; sizes are even and 4 TiB at most; not '%s'",
			 spec);
}

void bench_shapes_free(struct bench_shapes *shapes)
{
	for (size_t i = 0; i < shapes->n; i++)
		cli_free(shapes->tensors[i].name);
	cli_free(shapes->tensors);
	*shapes = (struct bench_shapes){0};
}
