/* SPDX-License-Identifier: Apache-2.0 */
/*
 * "headrace cat": the raw bytes of one tensor, in blocks, so that a tensor larger than memory passes. While
 * one block is written the next is read. A reader that goes away ends it quietly.
 */
#include "work.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#define BLOCK_BYTES   ((size_t)4 << 20)
#define STAGING_BYTES (UINT64_C(8) << 20)

static const struct cli_option options[] = {
	{"force", NULL, "write raw bytes to a terminal too", NULL, CLI_FIELD(force), CLI_FLAG, 0},
	CLI_OPTION_EXPECT,
	CLI_OPTION_UGDS,
	{"help", NULL, "this text", NULL, CLI_FIELD(help), CLI_FLAG, 'h'},
};

struct stream {
	const struct cli_args *args;
	hr_model *model;
	hr_device *device;
	hr_loader *loader;
	struct hr_tensor tensor;
	char *blocks[2];
	hr_job *jobs[2];
	size_t lengths[2];
};

static int start_block(struct stream *s, unsigned which, uint64_t offset)
{
	uint64_t left = s->tensor.bytes - offset;

	s->lengths[which] = left < BLOCK_BYTES ? left : BLOCK_BYTES;

	const struct hr_read read = {
		.tensor = s->tensor.index,
		.offset = offset,
		.length = s->lengths[which],
		.dst = s->blocks[which],
		.dst_bytes = BLOCK_BYTES,
	};

	return hr_job_start(s->loader, s->model, &read, 1, NULL, &s->jobs[which]) ? cli_fail_last(s->args) : 0;
}

static int await_block(struct stream *s, unsigned which)
{
	int rc = cli_job_wait(s->jobs[which], NULL, NULL);

	if (rc == CLI_INTERRUPTED)
		return cli_signals_status();
	if (rc)
		return cli_fail_last(s->args);
	rc = hr_job_close(s->jobs[which], HR_FOREVER);
	s->jobs[which] = NULL;
	return rc ? cli_fail_last(s->args) : 0;
}

static int write_block(const struct stream *s, const char *bytes, size_t n)
{
	size_t done = 0;

	while (done < n) {
		ssize_t put = cli_signals_status() ? -1 : write(STDOUT_FILENO, bytes + done, n - done);

		if (cli_signals_status())
			return cli_signals_status();
		if (put < 0 && errno == EINTR)
			continue;
		if (put < 0 && errno == EPIPE)
			return CLI_PIPE;
		if (put < 0)
			return cli_fail(s->args, HR_E_IO, "cannot write to standard output: %s", strerror(errno));
		done += (size_t)put;
	}
	return 0;
}

static int copy_tensor(struct stream *s)
{
	uint64_t offset = 0;
	unsigned which = 0;
	int status = s->tensor.bytes ? start_block(s, 0, 0) : 0;

	while (status == 0 && offset < s->tensor.bytes) {
		uint64_t next = offset + s->lengths[which];

		status = await_block(s, which);
		if (status == 0 && next < s->tensor.bytes)
			status = start_block(s, !which, next);
		if (status == 0)
			status = write_block(s, s->blocks[which], s->lengths[which]);
		offset = next;
		which = !which;
	}
	return status;
}

static int find_tensor(struct stream *s)
{
	const char *name = s->args->names[s->args->n_names - 1];
	uint64_t index;

	if (hr_model_find(s->model, name, HR_STRLEN, &index) || hr_model_tensor(s->model, index, &s->tensor))
		return cli_fail_last(s->args);
	return 0;
}

static int open_all(struct stream *s)
{
	const struct hr_loader_opts opts = {.size = sizeof(opts), .staging_bytes = STAGING_BYTES};

	if (hr_device_open("cpu", &s->device) || hr_loader_open(s->device, &opts, &s->loader))
		return cli_fail_last(s->args);
	s->blocks[0] = cli_alloc(2, BLOCK_BYTES);
	s->blocks[1] = s->blocks[0] + BLOCK_BYTES;
	return 0;
}

static int run(const struct cli_args *args)
{
	struct stream s = {.args = args, .tensor = HR_TENSOR_INIT};
	int status;

	if (isatty(STDOUT_FILENO) && !args->force)
		return cli_usage(args,
				 "standard output is a terminal, and these are raw bytes; send them to a file or a "
				 "program (| xxd | less), or insist with --force");
	cli_signals_catch();
	status = cli_model_open(args, args->n_names - 1, &s.model);
	if (status == 0)
		status = find_tensor(&s);
	if (status == 0)
		status = open_all(&s);
	if (status == 0)
		status = copy_tensor(&s);
	hr_job_close(s.jobs[0], HR_FOREVER);
	hr_job_close(s.jobs[1], HR_FOREVER);
	hr_loader_close(s.loader, HR_FOREVER);
	hr_device_close(s.device);
	hr_model_close(s.model);
	cli_free(s.blocks[0]);
	return status;
}

const struct cli_command cli_cmd_cat = {
	.name = "cat",
	.operands = "NAME... TENSOR",
	.summary = "writes the raw bytes of one tensor to standard output",
	.examples = "  headrace cat Llama-3.1-8B model.norm.weight > norm.bf16\n"
		    "  headrace cat Llama-3.1-8B model.norm.weight | xxd | head\n"
		    "  headrace cat Llama-3.1-8B lm_head.weight | sha256sum\n"
		    "  headrace cat part-1.safetensors part-2.safetensors lm_head.weight | wc -c\n"
		    "  headrace cat model.safetensors -- -odd-name- > odd.bin    a name that starts with a dash\n",
	.remarks = "Bytes come as they are in the file: row-major, little-endian, no header.\n"
		   "When the reader goes away early the status is 141, as with other tools.\n",
	.options = options,
	.n_options = CLI_N(options),
	.min_names = 2,
	.max_names = SIZE_MAX,
	.run = run,
};
