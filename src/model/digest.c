/* SPDX-License-Identifier: Apache-2.0 */
/*
 * SHA-256 of a shard and of its tensors in one pass. Two blocks of 4 MiB take turns: a helper thread reads one and
 * hashes the tensors in it while the caller's thread hashes the whole file from the other. Where no thread can be had,
 * one does both.
 *
 * The helper makes no error record: it leaves its errno and position for the caller's thread.
 *
 * Lock: run->lock guards `n_filled`, `n_hashed`, `stop`, `read_error`, `read_at`; a block belongs to the helper until
 * it is counted as filled, and may be overwritten once it is counted as hashed.
 */
#include "model.h"

#include "core/arith.h"
#include "core/error.h"
#include "core/hash.h"
#include "core/mem.h"

#include "headrace.h"

#define BLOCK_BYTES (UINT64_C(4) << 20)

struct run {
	const hr_model *model;
	const struct hr__source *source;
	uint8_t *blocks[2];
	uint64_t n_blocks;
	/* the whole file; the caller's thread only */
	hr__sha256 *whole; /* NULL: not wanted */
	/* the tensors; the helper only */
	hr__sha256 *part;
	struct hr_digest *tensors;  /* NULL: not wanted */
	uint64_t tensor, past_last; /* the one being hashed, and the number behind the shard's last */
	uint64_t first;
	/* guarded by lock */
	pthread_mutex_t lock;
	pthread_cond_t moved;
	uint64_t n_filled, n_hashed;
	bool stop;
	int read_error; /* errno, or -1: the file ended too early */
	uint64_t read_at;
	int hash_code;
};

static uint64_t block_bytes(const struct run *run, uint64_t k)
{
	return hr__min_u64(BLOCK_BYTES, run->source->bytes - k * BLOCK_BYTES);
}

/* Reads block k; false after a failure. */
static bool read_block(struct run *run, uint64_t k)
{
	uint64_t want = block_bytes(run, k);
	size_t got;
	int error = hr__source_pread(run->source, k * BLOCK_BYTES, run->blocks[k & 1], (size_t)want, &got);

	if (!error && got == want)
		return true;
	pthread_mutex_lock(&run->lock);
	run->read_error = error ? error : -1;
	run->read_at = k * BLOCK_BYTES + got;
	pthread_mutex_unlock(&run->lock);
	return false;
}

/* Hashes what block k has of the tensors, which follow one another in the file. */
static int hash_tensors(struct run *run, uint64_t k)
{
	uint64_t from = k * BLOCK_BYTES, to = from + block_bytes(run, k);
	int code = 0;

	while (!code && run->tensors && run->tensor < run->past_last) {
		struct hr__extent extent;
		uint64_t begin, end;

		hr__model_extent(run->model, run->tensor, &extent);
		begin = hr__max_u64(extent.offset, from);
		end = hr__min_u64(extent.offset + extent.bytes, to);
		if (extent.offset >= to && extent.bytes > 0)
			break;
		if (begin < end)
			code = hr__sha256_update(run->part, run->blocks[k & 1] + (begin - from), (size_t)(end - begin));
		if (extent.offset + extent.bytes > to)
			break; /* the rest is in the next block */
		if (!code)
			code = hr__sha256_final(run->part, run->tensors[run->tensor - run->first].sha256);
		run->tensor++;
	}
	return code;
}

static int hash_whole(struct run *run, uint64_t k)
{
	return run->whole ? hr__sha256_update(run->whole, run->blocks[k & 1], (size_t)block_bytes(run, k)) : 0;
}

/* Waits until block k may be overwritten; false to stop. */
static bool wait_for_room(struct run *run, uint64_t k)
{
	bool go_on;

	pthread_mutex_lock(&run->lock);
	while (!run->stop && k >= run->n_hashed + 2)
		pthread_cond_wait(&run->moved, &run->lock);
	go_on = !run->stop;
	pthread_mutex_unlock(&run->lock);
	return go_on;
}

static void publish(struct run *run, uint64_t *counter, bool failed)
{
	pthread_mutex_lock(&run->lock);
	if (failed)
		run->stop = true;
	else
		(*counter)++;
	pthread_cond_broadcast(&run->moved);
	pthread_mutex_unlock(&run->lock);
}

static void *help(void *arg)
{
	struct run *run = arg;

	for (uint64_t k = 0; k < run->n_blocks && wait_for_room(run, k); k++) {
		bool good = read_block(run, k);

		publish(run, &run->n_filled, !good);
		if (!good)
			break;
		run->hash_code = hash_tensors(run, k); /* read by the caller's thread after the join */
		if (run->hash_code) {
			publish(run, NULL, true);
			break;
		}
	}
	return NULL;
}

static int run_with_helper(struct run *run, pthread_t helper)
{
	int code = 0;

	for (uint64_t k = 0; k < run->n_blocks && !code; k++) {
		bool is_there;

		pthread_mutex_lock(&run->lock);
		while (!run->stop && run->n_filled <= k)
			pthread_cond_wait(&run->moved, &run->lock);
		is_there = run->n_filled > k;
		pthread_mutex_unlock(&run->lock);
		if (!is_there)
			break;
		code = hash_whole(run, k);
		publish(run, &run->n_hashed, code != 0);
	}
	pthread_join(helper, NULL);
	return code;
}

static int run_alone(struct run *run)
{
	int code = 0;

	for (uint64_t k = 0; k < run->n_blocks && !code && read_block(run, k); k++) {
		code = hash_tensors(run, k);
		if (!code)
			code = hash_whole(run, k);
	}
	return code;
}

static int fail_read(const struct run *run)
{
	struct hr__where at = {.stage = "read", .path = run->source->path, .offset = run->read_at};
	int code;

	if (run->read_error > 0)
		return hr__fail_errno(&at, run->read_error, "read");
	code = hr__source_check(run->source); /* most likely truncated: then say that */
	if (code)
		return code;
	return hr__fail_at(&at, HR_E_SHORT,
			   "%s: storage gave nothing at %" PRIu64 ", although the file has %" PRIu64 " bytes",
			   run->source->path, run->read_at, run->source->bytes);
}

static int digest(struct run *run, struct hr_digest *whole)
{
	pthread_t helper;
	int code;

	if (run->n_blocks > 1 && hr__os_thread(&helper, "hr-digest", help, run) == 0)
		code = run_with_helper(run, helper);
	else
		code = run_alone(run);
	if (!code && run->read_error)
		code = fail_read(run);
	if (!code && run->hash_code) /* said on the helper's thread, if there is one */
		code = hr__fail(run->hash_code, "libcrypto refused to compute SHA-256");
	if (!code)
		code = hr__source_check(run->source);
	if (!code && whole)
		code = hr__sha256_final(run->whole, whole->sha256);
	return code;
}

/* Aligned, for sources that are read around the page cache. */
static int new_block(struct run *run, int i)
{
	size_t bytes = (size_t)block_bytes(run, (uint64_t)i);
	void *memory;

	if (hr__os_map(bytes, &memory))
		return hr__fail_nomem(bytes);
	run->blocks[i] = memory;
	return 0;
}

int hr_model_digest(const hr_model *model, uint32_t shard, struct hr_digest *whole, struct hr_digest *tensors,
		    size_t n_tensors)
{
	struct run run = {.model = model,
			  .tensors = tensors,
			  .lock = PTHREAD_MUTEX_INITIALIZER,
			  .moved = PTHREAD_COND_INITIALIZER};
	uint64_t count;
	int code;

	if (shard >= hr__model_n_sources(model))
		return hr__fail(HR_E_OPTS, "there is no shard %" PRIu32 ": the model has %" PRIu32, shard,
				hr__model_n_sources(model));
	hr__model_shard_tensors(model, shard, &run.first, &count);
	if (tensors && n_tensors < count)
		return hr__fail(HR_E_OPTS,
				"there is room for %zu digests, but shard %" PRIu32 " has %" PRIu64 " tensors",
				n_tensors, shard, count);
	run.source = hr__model_source(model, shard);
	run.tensor = run.first;
	run.past_last = run.first + count;
	run.n_blocks = (run.source->bytes + BLOCK_BYTES - 1) / BLOCK_BYTES;
	code = whole ? hr__sha256_new(&run.whole) : 0;
	if (!code && tensors)
		code = hr__sha256_new(&run.part);
	for (int i = 0; i < 2 && !code && (uint64_t)i < run.n_blocks; i++)
		code = new_block(&run, i);
	if (!code)
		code = digest(&run, whole);
	for (int i = 0; i < 2; i++)
		hr__os_unmap(run.blocks[i], run.blocks[i] ? (size_t)block_bytes(&run, (uint64_t)i) : 0);
	hr__sha256_free(run.part);
	hr__sha256_free(run.whole);
	return code;
}
