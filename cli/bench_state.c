/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Cold and warm, proved. Cold: written back, dropped with POSIX_FADV_DONTNEED, and then asked whether
 * anything is left. Warm: read once by plain reads, and then asked whether all is there. The asking is the
 * library's own hr_plan() on a loader of its own.
 */
#include "bench.h"

#include <fcntl.h>
#include <unistd.h>

#define BLOCK_BYTES  ((size_t)1 << 20)
#define ATTEMPTS     3
#define STRIPE_BYTES ((uint64_t)64 << 20)
#define TOLERANCE    0.02

int bench_prober_open(struct bench *bench)
{
	const struct hr_loader_opts opts = {.size = sizeof(opts), .staging_bytes = UINT64_C(1) << 20, .readers = 1};

	if (hr_device_open("cpu", &bench->prober_device) || hr_loader_open(bench->prober_device, &opts, &bench->prober))
		return cli_fail_last(bench->args);
	bench->prober_reads = cli_set_reads(&bench->set, 0, bench->set.n, NULL);
	return 0;
}

void bench_prober_close(struct bench *bench)
{
	cli_free(bench->prober_reads);
	hr_loader_close(bench->prober, HR_FOREVER);
	hr_device_close(bench->prober_device);
}

static bool ask(struct bench *bench, struct hr_plan_info *info)
{
	*info = (struct hr_plan_info)HR_PLAN_INFO_INIT;
	return hr_plan(bench->prober, bench->model, bench->prober_reads, bench->set.n, info) == 0;
}

static void drop_shard(const char *path)
{
	char *region = cli_region_of(path);
	int fd = open(region ? region : path, O_RDONLY | O_CLOEXEC);

	cli_free(region);
	if (fd < 0)
		return;
	fdatasync(fd);
	posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
	close(fd);
}

/* Waiting helps: pages under write-back or read-ahead are not dropped. */
bool bench_make_cold(struct bench *bench)
{
	const struct timespec pause = {.tv_nsec = 100000000};
	uint32_t n = hr_model_n_shards(bench->model);
	struct hr_plan_info info;

	for (int attempt = 0; attempt < ATTEMPTS && !cli_signals_status(); attempt++) {
		if (attempt)
			nanosleep(&pause, NULL);
		for (uint32_t s = 0; s < n; s++) {
			struct hr_shard shard = HR_SHARD_INIT;

			if (hr_model_shard(bench->model, s, &shard) == 0)
				drop_shard(shard.path);
		}
		if (ask(bench, &info) && info.resident_bytes == 0)
			return true;
	}
	return false;
}

static void read_shard(const hr_model *model, uint32_t number, char *block)
{
	struct hr_shard shard = HR_SHARD_INIT;
	uint64_t at = 0;

	if (hr_model_shard(model, number, &shard))
		return;
	while (at < shard.bytes && !cli_signals_status()) {
		size_t n = shard.bytes - at < BLOCK_BYTES ? (size_t)(shard.bytes - at) : BLOCK_BYTES;

		if (hr_model_read_shard(model, number, at, block, n))
			return;
		at += n;
	}
}

bool bench_make_warm(struct bench *bench)
{
	uint32_t n = hr_model_n_shards(bench->model);
	char *block = cli_alloc(1, BLOCK_BYTES);
	struct hr_plan_info info;
	bool is_warm = ask(bench, &info) && info.resident_bytes >= info.read_bytes;

	for (int attempt = 1; !is_warm && attempt < ATTEMPTS && !cli_signals_status(); attempt++) {
		for (uint32_t s = 0; s < n; s++)
			read_shard(bench->model, s, block);
		is_warm = ask(bench, &info) && info.resident_bytes >= info.read_bytes;
	}
	cli_free(block);
	return is_warm;
}

/* The first `percent` of every stripe, without read-ahead, which would bring in more. */
static void read_stripes(const struct hr_shard *shard, unsigned percent, char *block)
{
	uint64_t stripe = shard->bytes / 4 < STRIPE_BYTES ? shard->bytes / 4 / 4096 * 4096 : STRIPE_BYTES;
	int fd = open(shard->path, O_RDONLY | O_CLOEXEC);

	if (fd < 0)
		return;
	if (!stripe)
		stripe = 4096;
	posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM);
	for (uint64_t at = 0; at < shard->bytes && !cli_signals_status(); at += stripe) {
		uint64_t left = stripe * percent / 100;

		for (uint64_t done = 0; done < left;) {
			size_t want = left - done < BLOCK_BYTES ? (size_t)(left - done) : BLOCK_BYTES;
			ssize_t got = pread(fd, block, want, (off_t)(at + done));

			if (got <= 0)
				break;
			done += (uint64_t)got;
		}
	}
	close(fd);
}

bool bench_make_partly(struct bench *bench, unsigned percent)
{
	uint32_t n = hr_model_n_shards(bench->model);
	bool is_good = bench_make_cold(bench);
	char *block = cli_alloc(1, BLOCK_BYTES);
	struct hr_plan_info info;

	for (uint32_t s = 0; s < n && percent; s++) {
		struct hr_shard shard = HR_SHARD_INIT;

		if (hr_model_shard(bench->model, s, &shard) == 0)
			read_stripes(&shard, percent, block);
	}
	cli_free(block);
	if (!is_good || !ask(bench, &info))
		return false;

	double share = info.read_bytes ? (double)info.resident_bytes / (double)info.read_bytes : percent / 100.0;

	return share > percent / 100.0 - TOLERANCE && share < percent / 100.0 + TOLERANCE;
}
