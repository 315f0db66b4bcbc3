/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The bytes as a command line: words that end with NUL, the first of them the command. It goes through the real table
 * of commands and the real parser, then through everything that looks at options before a model is opened: sizes,
 * globs, names of devices and engines, shapes of synthetic checkpoints. Each answer is compared with a slow and simple
 * one (args_reference.h).
 *
 * Commands are never run, except "help" and "version" and those that the parser refuses. The main() of the command is
 * cli_main() here; stdout and stderr are caught. The failing allocation (fuzz.h) is one of the library's: the
 * command's own end the process.
 */
#include "fuzz.h"

#include "args_reference.h"
#include "bench.h"
#include "engine/engine.h"
#include "format/json.h"
#include "utf8.h"

#define MAX_SMALL        500                  /* tensors of a synthetic checkpoint; more only take longer */
#define MAX_LLAMA        ((uint64_t)20 << 30) /* bytes of one, for the same reason */
#define MAX_SYNTHETIC    ((uint64_t)1 << 42)
#define MAX_STAGING      (1u << 20) /* pools that are made only to be refused by the engine's name */
#define MAX_GLOB_PRODUCT (1u << 12) /* beyond it the slow matcher is left out */

int cli_main(int argc, char **argv);

/* Each word in memory of its own, so that a read past its end is seen. The last one may lack its NUL. */
static void line_split(struct line *line, const uint8_t *bytes, size_t n)
{
	for (size_t at = 0; at < n && line->n < MAX_WORDS;) {
		size_t length = strnlen((const char *)bytes + at, n - at);
		char *word = malloc(length + 1);

		if (!word)
			abort();
		memcpy(word, bytes + at, length);
		word[length] = '\0';
		line->words[line->n++] = word;
		at += length + 1;
	}
}

static void line_free(struct line *line)
{
	for (int i = 0; i < line->n; i++)
		free(line->words[i]);
}

/* ---- what is printed ---- */

struct capture {
	FILE *real[2], *own[2];
	char *text[2]; /* stdout, stderr */
	size_t bytes[2];
};

static void capture_start(struct capture *c)
{
	*c = (struct capture){.real = {stdout, stderr}};
	for (int i = 0; i < 2; i++) {
		c->own[i] = open_memstream(&c->text[i], &c->bytes[i]);
		if (!c->own[i])
			abort();
	}
	stdout = c->own[0];
	stderr = c->own[1];
}

static void capture_end(struct capture *c)
{
	stdout = c->real[0];
	stderr = c->real[1];
	for (int i = 0; i < 2; i++)
		if (fclose(c->own[i]))
			abort();
}

static void capture_free(struct capture *c)
{
	free(c->text[0]);
	free(c->text[1]);
}

/* One message of whole lines that start with our name, with nothing that a terminal would obey. */
static void check_message(const struct capture *c, int n_lines)
{
	const char *text = c->text[1];
	int lines = 0;

	for (size_t i = 0; i < c->bytes[1];) {
		uint32_t point;
		size_t used = cli_utf8_next(text + i, c->bytes[1] - i, &point);

		if (i == 0 || text[i - 1] == '\n')
			fuzz_check(strncmp(text + i, "headrace: ", 10) == 0);
		fuzz_check(used > 0 && (point == '\n' || !cli_is_unprintable(point)));
		lines += point == '\n';
		i += used;
	}
	fuzz_check(lines == n_lines && text[c->bytes[1] - 1] == '\n');
}

static void check_json(const struct capture *c)
{
	struct hr__json json;

	hr__json_start(&json, c->text[0], c->bytes[0], 0, "output");
	fuzz_check(c->bytes[0] > 0 && c->text[0][0] == '{');
	fuzz_check(hr__json_skip(&json) == 0 && hr__json_end(&json) == 0);
}

static void check_refused(const struct capture *c, bool json, int n_lines)
{
	check_message(c, n_lines);
	if (json)
		check_json(c);
	else
		fuzz_check(c->bytes[0] == 0);
}

/* ---- numbers ---- */

static void check_numbers(const char *word)
{
	uint64_t got = 0, expected = 0;
	bool is_good = reference_size(word, true, &expected);

	fuzz_check(cli_size_parse(word, &got) == is_good && (!is_good || got == expected));
	is_good = reference_size(word, false, &expected);
	fuzz_check(cli_count_parse(word, &got) == is_good && (!is_good || got == expected));
}

/* ---- globs ---- */

static void check_glob(const char *pattern, const char *name)
{
	size_t n = strlen(name);
	bool is_match = cli_glob(pattern, name, n);

	if (strlen(pattern) * n <= MAX_GLOB_PRODUCT)
		fuzz_check(is_match == reference_glob(pattern, name, n));
}

/* ---- the parser ---- */

static void check_same(const struct cli_args *got, const struct cli_args *expected)
{
	fuzz_check(got->n_names == expected->n_names && got->n_only == expected->n_only);
	for (size_t i = 0; i < got->n_names; i++)
		fuzz_check(got->names[i] == expected->names[i]);
	for (size_t i = 0; i < got->n_only; i++)
		fuzz_check(got->only[i] == expected->only[i]);
	fuzz_check(got->device == expected->device && got->engine == expected->engine);
	fuzz_check(got->caching == expected->caching && got->cufile == expected->cufile &&
		   (got->digests == expected->digests ||
		    (got->digests && expected->digests && !got->digests[0] && !expected->digests[0])));
	fuzz_check(got->synthetic == expected->synthetic && got->dir == expected->dir);
	fuzz_check(got->staging_bytes == expected->staging_bytes && got->slot_bytes == expected->slot_bytes);
	fuzz_check(got->readers == expected->readers && got->rounds == expected->rounds);
	fuzz_check(got->json == expected->json && got->help == expected->help && got->verify == expected->verify);
	fuzz_check(got->is_long == expected->is_long && got->shards == expected->shards && got->open == expected->open);
	fuzz_check(got->cold == expected->cold && got->warm == expected->warm && got->feed == expected->feed);
	fuzz_check(got->sweep == expected->sweep && got->sweep_slots == expected->sweep_slots);
	fuzz_check(got->force == expected->force && got->keep == expected->keep);
}

/* ---- what options mean before a model is opened ---- */

static bool is_cuda(const char *spec)
{
	size_t digits;

	if (strncmp(spec, "cuda", 4) != 0)
		return false;
	if (!spec[4])
		return true;
	digits = strspn(spec + 5, "0123456789");
	return spec[4] == ':' && !spec[5 + digits] && digits > 0 && digits <= 4 && (spec[5] != '0' || digits == 1);
}

/* A GPU is not opened: whether there is one is no matter of words. */
static void check_device(const struct cli_args *args, const uint8_t *fault)
{
	hr_device *device = NULL;
	struct capture c;
	int status;

	if (!args->device || is_cuda(args->device))
		return;
	capture_start(&c);
	fuzz_arm(fault);
	status = cli_device_open(args, &device);
	capture_end(&c);
	if (fuzz_fired())
		fuzz_check(status == CLI_BAD);
	else
		fuzz_check(status == (strcmp(args->device, "cpu") == 0 ? CLI_OK : CLI_USAGE));
	if (status)
		check_refused(&c, args->json, 1);
	fuzz_check((device != NULL) == (status == CLI_OK));
	hr_device_close(device);
	capture_free(&c);
}

static bool is_good_pool(const struct cli_args *args)
{
	uint64_t staging = args->staging_bytes ? args->staging_bytes : (uint64_t)64 << 20;
	uint64_t slot = args->slot_bytes;

	if (args->readers > 64 || staging < HR_MIN_STAGING_BYTES || staging > (uint64_t)1 << 40)
		return false;
	return !slot || (slot % HR_MIN_SLOT_BYTES == 0 && slot <= staging / 2 && slot <= (uint64_t)1 << 30);
}

/* Only loaders that must be refused are opened: a pool and threads for each input would be slow. */
static void check_loader(const struct cli_args *args, const uint8_t *fault)
{
	static hr_device *cpu;
	struct hr_loader_opts opts;
	hr_loader *loader = NULL;
	bool is_good = is_good_pool(args);
	int rc;

	cli_loader_opts(args, &opts);
	if (is_good && (!opts.engine || strcmp(opts.engine, "auto") == 0 || hr__engine_find(opts.engine)))
		return;
	if (is_good && (opts.staging_bytes == 0 || opts.staging_bytes > MAX_STAGING))
		return;
	if (!cpu)
		fuzz_check(hr_device_open("cpu", &cpu) == 0);
	fuzz_arm(fault);
	rc = hr_loader_open(cpu, &opts, &loader);
	fuzz_check(rc == (fuzz_fired() ? HR_E_NOMEM : HR_E_OPTS) && !loader);
	for (const char *at = hr_error_last()->message; *at; at++)
		fuzz_check((unsigned char)*at >= 0x20);
}

static void check_shapes(const struct bench_shapes *shapes)
{
	uint64_t bytes = 0;
	uint32_t shard = 0;

	for (size_t i = 0; i < shapes->n; i++) {
		const struct bench_tensor *t = &shapes->tensors[i];

		fuzz_check(t->bytes > 0 && t->bytes == 2 * t->dims[0] * (t->rank == 2 ? t->dims[1] : 1));
		fuzz_check(t->shard == shard || t->shard == shard + 1);
		shard = t->shard;
		bytes += t->bytes;
	}
	fuzz_check(shapes->n > 0 && shapes->tensors[0].shard == 0 && shard + 1 == shapes->n_shards);
	fuzz_check(bytes == shapes->bytes && bytes <= MAX_SYNTHETIC);
}

static bool is_slow(const char *spec)
{
	uint64_t bytes;

	if (strncmp(spec, "small:", 6) == 0)
		return strtoull(spec + 6, NULL, 10) > MAX_SMALL;
	return strncmp(spec, "llama:", 6) == 0 && reference_size(spec + 6, true, &bytes) && bytes > MAX_LLAMA &&
	       bytes <= MAX_SYNTHETIC;
}

static void check_synthetic(const struct cli_args *args)
{
	const char *spec = args->synthetic;
	struct bench_shapes shapes;
	struct capture c;
	int status;

	if (!spec || is_slow(spec))
		return;
	capture_start(&c);
	status = bench_shapes_new(args, spec, &shapes);
	capture_end(&c);
	if (status) {
		fuzz_check(status == CLI_USAGE);
		check_refused(&c, args->json, 2);
	} else {
		fuzz_check(c.bytes[0] == 0 && c.bytes[1] == 0);
		check_shapes(&shapes);
	}
	bench_shapes_free(&shapes);
	capture_free(&c);
}

/* ---- all of it ---- */

/* The whole command on a line that does nothing: it is refused, or asks for help. */
static void check_main(const struct line *line, int expected, bool json)
{
	char *argv[MAX_WORDS + 2] = {(char[]){"headrace"}};
	struct capture c;
	int status;

	memcpy(argv + 1, line->words, (size_t)line->n * sizeof(char *));
	capture_start(&c);
	status = cli_main(line->n + 1, argv);
	capture_end(&c);
	if (expected >= 0)
		fuzz_check(status == expected);
	if (line->n == 0)
		fuzz_check(status == CLI_USAGE);
	else if (status == CLI_USAGE)
		check_refused(&c, json, 2);
	else
		fuzz_check(status == CLI_OK && c.bytes[0] > 0 && c.bytes[1] == 0);
	capture_free(&c);
}

static void check_line(const struct cli_command *command, struct line *line, const uint8_t *fault)
{
	struct cli_args args, expected = {.command = command};
	const char *names[MAX_WORDS];
	struct capture c;
	bool is_good;
	int status;

	expected.names = names;
	is_good = reference_parse(line, &expected);
	capture_start(&c);
	status = cli_args_parse(command, line->n - 1, line->words + 1, &args);
	capture_end(&c);
	fuzz_check(status == (is_good ? CLI_OK : CLI_USAGE));
	if (status) {
		check_refused(&c, args.json, 2);
	} else {
		fuzz_check(c.bytes[0] == 0 && c.bytes[1] == 0);
		check_same(&args, &expected);
		check_device(&args, fault);
		check_loader(&args, fault);
		check_synthetic(&args);
	}
	if (status || args.help)
		check_main(line, status, args.json);
	cli_free(args.names);
	capture_free(&c);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n)
{
	const struct cli_command *command = NULL;
	struct line line = {0};

	if (n < FUZZ_PREFIX)
		return 0;
	line_split(&line, bytes + FUZZ_PREFIX, n - FUZZ_PREFIX);
	for (int i = 0; i < line.n; i++) {
		check_numbers(line.words[i]);
		if (i > 0)
			check_glob(line.words[i - 1], line.words[i]);
	}
	if (line.n)
		command = cli_command_find(line.words[0]);
	if (command && strcmp(command->name, "help") != 0 && strcmp(command->name, "version") != 0)
		check_line(command, &line, bytes);
	else
		check_main(&line, -1, false);
	line_free(&line);
	return 0;
}
