/* SPDX-License-Identifier: Apache-2.0 */
/*
 * From the command line to a model, a device, a loader's options, and the tensors that are meant.
 */
#include "work.h"

#include <inttypes.h>
#include <string.h>
#include <sys/stat.h>

#define ALIGN      256
#define PART_BYTES (UINT64_C(1) << 30)

int cli_model_open(const struct cli_args *args, size_t n_names, hr_model **model)
{
	struct hr_model_opts opts = HR_MODEL_OPTS_INIT;
	int rc;

	*model = NULL;
	opts.expect = args->expect;
	opts.ugds = args->ugds;
	for (size_t i = 0; n_names > 1 && i < n_names; i++) {
		struct stat st;

		if (stat(args->names[i], &st) == 0 && S_ISDIR(st.st_mode))
			return cli_usage(args, "'%s' is a directory; several names must be the files of one model",
					 args->names[i]);
	}
	if (n_names == 1)
		rc = hr_model_open(args->names[0], &opts, model);
	else
		rc = hr_model_open_files(args->names, n_names, &opts, model);
	return rc ? cli_fail_last(args) : 0;
}

bool cli_is_in_store(const hr_model *model)
{
	struct hr_shard shard = HR_SHARD_INIT;

	return hr_model_shard(model, 0, &shard) == 0 && strncmp(shard.path, "store:", 6) == 0;
}

char *cli_region_of(const char *path)
{
	const char *end = strncmp(path, "store:", 6) == 0 ? strchr(path, '#') : NULL;

	for (; end; end = strchr(end + 1, '#')) {
		char *region = cli_text("%.*s", (int)(end - path - 6), path + 6);
		struct stat st;

		if (stat(region, &st) == 0)
			return region;
		cli_free(region);
	}
	return NULL;
}

bool cli_is_direct_only(const hr_model *model)
{
	struct hr_shard shard = HR_SHARD_INIT;
	char *region = hr_model_shard(model, 0, &shard) ? NULL : cli_region_of(shard.path);
	struct stat st;
	bool is_block = region && stat(region, &st) == 0 && S_ISBLK(st.st_mode);

	cli_free(region);
	return is_block;
}

bool cli_is_store(const char *name)
{
	return strncmp(name, CLI_STORE, strlen(CLI_STORE)) == 0;
}

bool cli_is_in_files(const hr_model *model)
{
	uint32_t n = hr_model_n_shards(model);

	for (uint32_t i = 0; i < n; i++) {
		struct hr_shard shard = HR_SHARD_INIT;
		struct stat st;

		if (hr_model_shard(model, i, &shard) || stat(shard.path, &st) || !S_ISREG(st.st_mode))
			return false;
	}
	return true;
}

static bool is_device_usable(const char *spec)
{
	struct hr_probe_row rows[64];
	size_t n = 0;

	if (hr_probe(NULL, rows, CLI_N(rows), &n))
		return false;
	for (size_t i = 0; i < n && i < CLI_N(rows); i++) {
		if (strcmp(rows[i].kind, "device") == 0 && strcmp(rows[i].name, spec) == 0)
			return rows[i].usable;
	}
	return false;
}

int cli_device_open(const struct cli_args *args, hr_device **device)
{
	const char *spec = args->device;

	if (!spec)
		spec = is_device_usable("cuda:0") ? "cuda:0" : "cpu";
	return hr_device_open(spec, device) ? cli_fail_setup(args) : 0;
}

void cli_loader_opts(const struct cli_args *args, struct hr_loader_opts *opts)
{
	*opts = (struct hr_loader_opts)HR_LOADER_OPTS_INIT;
	opts->staging_bytes = args->staging_bytes;
	opts->slot_bytes = args->slot_bytes;
	opts->engine = args->engine;
	/* What is read through uGDS goes straight to a GPU, if it is to go to one. */
	if (args->ugds && !args->engine && !(args->device && strcmp(args->device, "cpu") == 0))
		opts->engine = "ugds";
	opts->readers = args->readers > UINT32_MAX ? UINT32_MAX : (uint32_t)args->readers;
	if (args->caching && strcmp(args->caching, "fill") == 0)
		opts->caching = HR_CACHING_FILL;
	else if (args->caching && strcmp(args->caching, "bypass") == 0)
		opts->caching = HR_CACHING_BYPASS;
	if (args->cufile && strcmp(args->cufile, "compat") == 0)
		opts->flags |= HR_LOADER_CUFILE_COMPAT;
}

/* ---- glob ---- */

/* One [...] at `p` against a byte; *next is what follows it. A '[' that is never closed is itself: `closer` is the
 * last ']' of the whole pattern, or NULL, so that no '[' has to look for one that is not there. */
static bool match_class(const char *p, const char *closer, unsigned char byte, const char **next)
{
	const char *end = p + 1;
	bool is_not = *end == '!' || *end == '^';
	bool is_in = false;

	end += is_not;
	if (!closer || closer <= end) {
		*next = p + 1;
		return byte == '[';
	}
	for (const char *first = end; *end != ']' || end == first; end++) {
		unsigned char low = (unsigned char)*end;
		unsigned char high = low;

		if (end[1] == '-' && end[2] != ']') {
			high = (unsigned char)end[2];
			end += 2;
		}
		is_in |= low <= byte && byte <= high;
	}
	*next = end + 1;
	return is_in != is_not;
}

/* One step of a pattern, not '*', against one byte. */
static bool match_one(const char *p, const char *closer, unsigned char byte, const char **next)
{
	*next = p + 1;
	if (*p == '?')
		return true;
	if (*p == '[')
		return match_class(p, closer, byte, next);
	if (*p == '\\' && p[1]) {
		*next = p + 2;
		return (unsigned char)p[1] == byte;
	}
	return *p && (unsigned char)*p == byte;
}

/* When a step fails, only the last '*' need take one byte more: time is at most the product of the lengths. */
bool cli_glob(const char *pattern, const char *name, size_t len)
{
	const char *closer = strrchr(pattern, ']');
	const char *p = pattern;
	const char *after_star = NULL;
	size_t star_at = 0;
	size_t i = 0;

	while (i < len) {
		const char *next;

		if (*p == '*') {
			after_star = ++p;
			star_at = i;
		} else if (match_one(p, closer, (unsigned char)name[i], &next)) {
			p = next;
			i++;
		} else if (after_star) {
			p = after_star;
			i = ++star_at;
		} else {
			return false;
		}
	}
	while (*p == '*')
		p++;
	return !*p;
}

/* ---- set ---- */

static bool is_wanted(const struct cli_args *args, const struct hr_tensor *tensor)
{
	for (size_t i = 0; i < args->n_only; i++) {
		if (cli_glob(args->only[i], tensor->name, tensor->name_len))
			return true;
	}
	return args->n_only == 0;
}

/* Its first `bytes`, behind what is there. */
static void add_tensor(struct cli_set *set, uint64_t number, uint64_t bytes)
{
	uint64_t room = (bytes + ALIGN - 1) / ALIGN * ALIGN;
	struct cli_part *part = set->n_parts ? &set->parts[set->n_parts - 1] : NULL;

	if (!part || part->bytes >= PART_BYTES) {
		set->parts = cli_grow(set->parts, set->n_parts + 1, sizeof(*set->parts));
		part = &set->parts[set->n_parts++];
		*part = (struct cli_part){.first = set->n};
	}
	set->tensors[set->n] = number;
	set->sizes[set->n] = bytes;
	set->offsets[set->n] = part->bytes;
	set->part_of[set->n] = (uint32_t)(set->n_parts - 1);
	set->bytes += bytes;
	set->buffer_bytes += room;
	part->bytes += room;
	part->n++;
	set->n++;
}

static void make_room(struct cli_set *set, size_t n)
{
	*set = (struct cli_set){0};
	set->tensors = cli_alloc(n, sizeof(*set->tensors));
	set->offsets = cli_alloc(n, sizeof(*set->offsets));
	set->sizes = cli_alloc(n, sizeof(*set->sizes));
	set->part_of = cli_alloc(n, sizeof(*set->part_of));
}

void cli_set_first(const struct cli_set *all, uint64_t bytes, struct cli_set *set)
{
	make_room(set, all->n);
	for (size_t i = 0; i < all->n && set->bytes < bytes; i++) {
		uint64_t left = bytes - set->bytes;

		add_tensor(set, all->tensors[i], all->sizes[i] < left ? all->sizes[i] : left);
	}
}

int cli_set_new(const struct cli_args *args, hr_model *model, struct cli_set *set)
{
	uint64_t n = hr_model_n_tensors(model);

	make_room(set, n);
	for (uint64_t i = 0; i < n; i++) {
		struct hr_tensor tensor = HR_TENSOR_INIT;

		if (hr_model_tensor(model, i, &tensor))
			return cli_fail_last(args);
		if (is_wanted(args, &tensor))
			add_tensor(set, tensor.index, tensor.bytes);
	}
	if (!set->n && args->n_only)
		return cli_fail(args, HR_E_NOTFOUND,
				"no tensor's name matches '%s'; 'headrace ls %s' lists the %" PRIu64 " there are",
				args->only[0], args->names[0], n);
	return 0;
}

void cli_set_free(struct cli_set *set)
{
	cli_free(set->tensors);
	cli_free(set->offsets);
	cli_free(set->sizes);
	cli_free(set->part_of);
	cli_free(set->parts);
	*set = (struct cli_set){0};
}

struct hr_read *cli_set_reads(const struct cli_set *set, size_t first, size_t n, void *base)
{
	struct hr_read *reads = cli_alloc(n, sizeof(*reads));

	for (size_t i = 0; i < n; i++)
		reads[i] = (struct hr_read){
			.tensor = set->tensors[first + i],
			.length = set->sizes[first + i],
			.dst = base ? (char *)base + set->offsets[first + i] : NULL,
			.dst_bytes = set->parts[set->part_of[first + i]].bytes - set->offsets[first + i],
		};
	return reads;
}
