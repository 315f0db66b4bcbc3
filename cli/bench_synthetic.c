/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Writes a synthetic checkpoint: shards in the layout that the official writer gives, an index if there are
 * several, and noise for data, so that no file system or disk gains by compressing it. The noise repeats,
 * at another phase in each shard. Files are written back to the disk before they are measured.
 */
#include "bench.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

/* A prime number of 64-byte lines, near 8 MiB: it does not fall in step with blocks or slots. */
#define NOISE_BYTES ((size_t)131071 * 64)

struct writer {
	const struct cli_args *args;
	const struct bench_shapes *shapes;
	struct bench_files *files;
	struct cli_progress progress;
	char *noise;
	uint64_t done_bytes;
};

static char *make_noise(void)
{
	uint64_t *noise = cli_alloc(1, NOISE_BYTES);
	uint64_t state = UINT64_C(0x9e3779b97f4a7c15);

	for (size_t i = 0; i < NOISE_BYTES / sizeof(*noise); i++) {
		state ^= state << 13;
		state ^= state >> 7;
		state ^= state << 17;
		noise[i] = state;
	}
	return (char *)noise;
}

static int fail_file(const struct writer *w, const char *doing, const char *path)
{
	return cli_fail(w->args, HR_E_IO, "cannot %s %s: %s", doing, path, strerror(errno));
}

static bool write_all(int fd, const char *bytes, size_t n)
{
	size_t done = 0;

	while (done < n) {
		ssize_t put = write(fd, bytes + done, n - done);

		if (put < 0 && errno == EINTR)
			continue;
		if (put < 0)
			return false;
		done += (size_t)put;
	}
	return true;
}

/* ---- headers ---- */

static void put_tensor(FILE *out, const struct bench_tensor *tensor, uint64_t begin)
{
	fprintf(out, ",\"%s\":{\"dtype\":\"BF16\",\"shape\":[%" PRIu64, tensor->name, tensor->dims[0]);
	if (tensor->rank == 2)
		fprintf(out, ",%" PRIu64, tensor->dims[1]);
	fprintf(out, "],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}", begin, begin + tensor->bytes);
}

/* Length field and JSON, padded so that data starts at a multiple of 8. */
static char *make_header(const struct bench_shapes *shapes, uint32_t shard, size_t *len, uint64_t *data_bytes)
{
	char *text = NULL;
	FILE *out = open_memstream(&text, len);
	uint64_t n;

	if (!out)
		return NULL;
	*data_bytes = 0;
	fwrite("\0\0\0\0\0\0\0\0", 1, 8, out);
	fputs("{\"__metadata__\":{\"format\":\"pt\"}", out);
	for (size_t i = 0; i < shapes->n; i++) {
		if (shapes->tensors[i].shard != shard)
			continue;
		put_tensor(out, &shapes->tensors[i], *data_bytes);
		*data_bytes += shapes->tensors[i].bytes;
	}
	putc('}', out);
	while (ftell(out) % 8)
		putc(' ', out);
	if (fclose(out))
		return NULL;
	n = *len - 8;
	for (int i = 0; i < 8; i++)
		text[i] = (char)(n >> (8 * i));
	return text;
}

/* ---- files ---- */

static char *shard_name(const struct bench_shapes *shapes, uint32_t shard)
{
	if (shapes->n_shards == 1)
		return cli_text("model.safetensors");
	return cli_text("model-%05" PRIu32 "-of-%05" PRIu32 ".safetensors", shard + 1, shapes->n_shards);
}

static char *new_path(struct writer *w, const char *name)
{
	struct bench_files *files = w->files;

	files->paths = cli_grow(files->paths, files->n + 1, sizeof(*files->paths));
	files->paths[files->n] = cli_text("%s/%s", files->dir, name);
	return files->paths[files->n++];
}

static int write_noise(struct writer *w, int fd, const char *path, uint32_t shard, uint64_t bytes)
{
	size_t at = (size_t)shard * 4096 % NOISE_BYTES;

	while (bytes) {
		size_t n = NOISE_BYTES - at < bytes ? NOISE_BYTES - at : (size_t)bytes;

		if (cli_signals_status())
			return cli_signals_status();
		if (!write_all(fd, w->noise + at, n))
			return fail_file(w, "write", path);
		at = 0;
		bytes -= n;
		w->done_bytes += n;
		cli_progress_show(&w->progress, w->done_bytes, w->shapes->bytes);
	}
	return 0;
}

static int write_shard(struct writer *w, uint32_t shard)
{
	char *name = shard_name(w->shapes, shard);
	char *path = new_path(w, name);
	uint64_t data_bytes = 0;
	size_t len = 0;
	char *header = make_header(w->shapes, shard, &len, &data_bytes);
	int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
	int status = 0;

	if (fd < 0)
		status = fail_file(w, "create", path);
	else if (!header || !write_all(fd, header, len))
		status = fail_file(w, "write", path);
	if (status == 0)
		status = write_noise(w, fd, path, shard, data_bytes);
	if (status == 0 && fsync(fd))
		status = fail_file(w, "write back", path);
	if (fd >= 0 && close(fd) && status == 0)
		status = fail_file(w, "close", path);
	cli_free(header);
	cli_free(name);
	return status;
}

static int write_index(struct writer *w)
{
	const char *path = new_path(w, "model.safetensors.index.json");
	FILE *out = fopen(path, "wxe");

	if (!out)
		return fail_file(w, "create", path);
	fprintf(out, "{\"metadata\":{\"total_size\":%" PRIu64 "},\"weight_map\":{", w->shapes->bytes);
	for (size_t i = 0; i < w->shapes->n; i++) {
		char *name = shard_name(w->shapes, w->shapes->tensors[i].shard);

		fprintf(out, "%s\n\"%s\":\"%s\"", i ? "," : "", w->shapes->tensors[i].name, name);
		cli_free(name);
	}
	fputs("\n}}\n", out);
	return fclose(out) ? fail_file(w, "write", path) : 0;
}

static int check_space(const struct writer *w, const char *parent)
{
	struct statvfs fs;
	char need[32], have[32];

	if (statvfs(parent, &fs))
		return fail_file(w, "use", parent);

	uint64_t free_bytes = (uint64_t)fs.f_bavail * fs.f_frsize;

	if (free_bytes > w->shapes->bytes + w->shapes->bytes / 64)
		return 0;
	return cli_fail(w->args, HR_E_SPACE, "the checkpoint needs %s, but %s has %s; name another folder with --dir",
			cli_human(need, w->shapes->bytes), parent, cli_human(have, free_bytes));
}

static int write_files(struct writer *w, const char *parent)
{
	int status = check_space(w, parent);

	if (status)
		return status;
	w->files->dir = cli_text("%s/headrace-bench-XXXXXX", parent);
	if (!mkdtemp(w->files->dir)) {
		status = fail_file(w, "make a folder like", w->files->dir);
		cli_free(w->files->dir);
		w->files->dir = NULL;
		return status;
	}
	fprintf(stderr, "headrace: writing a synthetic checkpoint to %s\n", w->files->dir);
	cli_progress_start(&w->progress, "writing");
	for (uint32_t s = 0; status == 0 && s < w->shapes->n_shards; s++)
		status = write_shard(w, s);
	cli_progress_end(&w->progress);
	if (status == 0 && w->shapes->n_shards > 1)
		status = write_index(w);
	return status;
}

int bench_synthetic_new(const struct cli_args *args, const char *spec, const char *parent, struct bench_files *files)
{
	struct bench_shapes shapes;
	struct writer w = {.args = args, .shapes = &shapes, .files = files};
	int status = bench_shapes_new(args, spec, &shapes);

	if (status == 0) {
		w.noise = make_noise();
		status = write_files(&w, parent);
		cli_free(w.noise);
	}
	bench_shapes_free(&shapes);
	return status;
}

void bench_synthetic_free(struct bench_files *files, bool keep)
{
	if (files->dir && keep)
		fprintf(stderr, "headrace: kept %s\n", files->dir);
	for (size_t i = 0; i < files->n; i++) {
		if (!keep)
			unlink(files->paths[i]);
		cli_free(files->paths[i]);
	}
	if (files->dir && !keep)
		rmdir(files->dir);
	cli_free(files->paths);
	cli_free(files->dir);
	*files = (struct bench_files){0};
}
