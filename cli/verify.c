/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The check after a load: every tensor is read back from the device and compared with a plain pread of its
 * file, opened anew by path. It shares nothing with the way the bytes went. Several threads take blocks in
 * file order; after a difference no more are handed out, so the lowest one found is the first there is.
 *
 * Lock: `lock` guards all of struct check below the line.
 */
#include "work.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <string.h>
#include <unistd.h>

#define BLOCK_BYTES ((size_t)4 << 20)
#define MAX_THREADS 8

struct check {
	const struct cli_transfer *transfer;
	const struct cli_set *set;

	pthread_mutex_t lock; /* guards what follows */
	size_t next;          /* in the set */
	uint64_t next_offset; /* in that tensor */
	uint64_t done_bytes;
	unsigned n_running;
	bool is_over;
	bool is_different;
	size_t bad; /* in the set: where the first difference is */
	uint64_t bad_offset;
	uint8_t bad_got, bad_expected;
	int code; /* of another failure */
	char message[1200];
};

struct block {
	size_t at; /* in the set */
	uint64_t offset;
	size_t bytes;
};

/* What one thread has of its own. */
struct reader {
	struct check *check;
	int fd;
	uint32_t shard;
	char *expected;
	char *got;
	pthread_t thread;
};

static bool take_block(struct check *check, struct block *block)
{
	bool has_one = false;

	pthread_mutex_lock(&check->lock);
	while (check->next < check->set->n && check->next_offset == check->set->sizes[check->next]) {
		check->next++;
		check->next_offset = 0;
	}
	if (!check->is_over && check->next < check->set->n && !cli_signals_status()) {
		uint64_t left = check->set->sizes[check->next] - check->next_offset;

		*block = (struct block){check->next, check->next_offset, left < BLOCK_BYTES ? left : BLOCK_BYTES};
		check->next_offset += block->bytes;
		has_one = true;
	}
	pthread_mutex_unlock(&check->lock);
	return has_one;
}

static void note_failure(struct check *check, int code, const char *message)
{
	pthread_mutex_lock(&check->lock);
	if (!check->code) {
		check->code = code;
		snprintf(check->message, sizeof(check->message), "%s", message);
	}
	check->is_over = true;
	pthread_mutex_unlock(&check->lock);
}

static void note_difference(struct reader *reader, const struct block *block)
{
	struct check *check = reader->check;
	size_t i = 0;

	while (reader->got[i] == reader->expected[i])
		i++;
	pthread_mutex_lock(&check->lock);
	if (!check->is_different || block->at < check->bad ||
	    (block->at == check->bad && block->offset + i < check->bad_offset)) {
		check->bad = block->at;
		check->bad_offset = block->offset + i;
		check->bad_got = (uint8_t)reader->got[i];
		check->bad_expected = (uint8_t)reader->expected[i];
	}
	check->is_different = true;
	check->is_over = true;
	pthread_mutex_unlock(&check->lock);
}

static bool open_shard(struct reader *reader, uint32_t number)
{
	struct hr_shard shard = HR_SHARD_INIT;
	char text[700];

	if (reader->fd >= 0 && reader->shard == number)
		return true;
	if (reader->fd >= 0)
		close(reader->fd);
	hr_model_shard(reader->check->transfer->model, number, &shard);
	reader->fd = open(shard.path, O_RDONLY | O_CLOEXEC);
	reader->shard = number;
	if (reader->fd >= 0)
		return true;
	snprintf(text, sizeof(text), "cannot open %s again to compare: %s", shard.path, strerror(errno));
	note_failure(reader->check, HR_E_IO, text);
	return false;
}

static bool fail_plainly(struct reader *reader, uint64_t offset, int errno_value)
{
	struct hr_shard shard = HR_SHARD_INIT;
	char text[900];

	hr_model_shard(reader->check->transfer->model, reader->shard, &shard);
	snprintf(text, sizeof(text), "cannot compare: %s at byte %" PRIu64 ": %s", shard.path, offset,
		 errno_value ? strerror(errno_value) : "the file has become shorter since it was loaded");
	note_failure(reader->check, errno_value ? HR_E_IO : HR_E_SHORT, text);
	return false;
}

/* The plain read that everything is compared with. */
static bool read_plainly(struct reader *reader, uint64_t offset, size_t bytes)
{
	size_t done = 0;

	while (done < bytes) {
		ssize_t got = pread(reader->fd, reader->expected + done, bytes - done, (off_t)(offset + done));

		if (got < 0 && errno == EINTR)
			continue;
		if (got <= 0)
			return fail_plainly(reader, offset + done, got ? errno : 0);
		done += (size_t)got;
	}
	return true;
}

static bool compare_block(struct reader *reader, const struct block *block)
{
	const struct cli_transfer *transfer = reader->check->transfer;
	const struct cli_set *set = reader->check->set;
	struct hr_tensor tensor = HR_TENSOR_INIT;

	if (hr_model_tensor(transfer->model, set->tensors[block->at], &tensor) ||
	    hr_buffer_read(transfer->buffers[set->part_of[block->at]], set->offsets[block->at] + block->offset,
			   reader->got, block->bytes)) {
		note_failure(reader->check, hr_error_last()->code, hr_error_last()->message);
		return false;
	}
	if (!open_shard(reader, tensor.shard) || !read_plainly(reader, tensor.offset + block->offset, block->bytes))
		return false;
	if (memcmp(reader->got, reader->expected, block->bytes) != 0)
		note_difference(reader, block);
	return true;
}

static void *run_reader(void *arg)
{
	struct reader *reader = arg;
	struct check *check = reader->check;
	struct block block;

	while (take_block(check, &block) && compare_block(reader, &block)) {
		pthread_mutex_lock(&check->lock);
		check->done_bytes += block.bytes;
		pthread_mutex_unlock(&check->lock);
	}
	if (reader->fd >= 0)
		close(reader->fd);
	pthread_mutex_lock(&check->lock);
	check->n_running--;
	pthread_mutex_unlock(&check->lock);
	return NULL;
}

static void watch(struct check *check)
{
	struct cli_progress progress;
	unsigned n_running;

	cli_progress_start(&progress, "comparing");
	do {
		const struct timespec slice = {.tv_nsec = 5000000};
		uint64_t done;

		pthread_mutex_lock(&check->lock);
		n_running = check->n_running;
		done = check->done_bytes;
		pthread_mutex_unlock(&check->lock);
		cli_progress_show(&progress, done, check->set->bytes);
		if (n_running)
			nanosleep(&slice, NULL);
	} while (n_running);
	cli_progress_end(&progress);
}

static void run_readers(struct check *check, struct reader *readers, unsigned n)
{
	unsigned n_started = 0;

	check->n_running = n;
	for (unsigned i = 0; i < n; i++) {
		readers[i] = (struct reader){.check = check, .fd = -1};
		readers[i].expected = cli_alloc(2, BLOCK_BYTES);
		readers[i].got = readers[i].expected + BLOCK_BYTES;
	}
	for (; n_started < n; n_started++) {
		if (pthread_create(&readers[n_started].thread, NULL, run_reader, &readers[n_started]))
			break;
	}
	for (unsigned i = n_started; i < n; i++) /* no thread to be had: this one does the work */
		run_reader(&readers[i]);
	watch(check);
	for (unsigned i = 0; i < n_started; i++)
		pthread_join(readers[i].thread, NULL);
	for (unsigned i = 0; i < n; i++)
		cli_free(readers[i].expected);
}

static int tell_difference(const struct cli_args *args, const struct check *check)
{
	struct hr_tensor tensor = HR_TENSOR_INIT;
	struct hr_shard shard = HR_SHARD_INIT;
	char *name = NULL;
	size_t name_len = 0;
	FILE *text;
	int status;

	hr_model_tensor(check->transfer->model, check->set->tensors[check->bad], &tensor);
	hr_model_shard(check->transfer->model, tensor.shard, &shard);
	text = open_memstream(&name, &name_len);
	if (text) {
		cli_put_name(text, tensor.name, tensor.name_len);
		fclose(text);
	}
	status = cli_fail(args, HR_E_DIGEST,
			  "tensor '%.300s' differs from its file at byte %" PRIu64 " (%s, byte %" PRIu64
			  "): 0x%02x arrived, the file has 0x%02x; report this, with what 'headrace engines' prints",
			  name ? name : "?", check->bad_offset, shard.path, tensor.offset + check->bad_offset,
			  check->bad_got, check->bad_expected);
	cli_free(name);
	return status;
}

int cli_verify(const struct cli_args *args, const struct cli_transfer *transfer, uint64_t *elapsed_ns)
{
	struct check check = {.transfer = transfer, .set = transfer->set};
	struct reader readers[MAX_THREADS];
	unsigned n = cli_cpus() < MAX_THREADS ? cli_cpus() : MAX_THREADS;
	uint64_t start_ns = cli_now_ns();

	pthread_mutex_init(&check.lock, NULL);
	run_readers(&check, readers, n);
	pthread_mutex_destroy(&check.lock);
	*elapsed_ns = cli_now_ns() - start_ns;
	if (cli_signals_status()) {
		cli_fail(args, HR_E_CANCELLED, "interrupted while comparing");
		return cli_signals_status();
	}
	if (check.is_different)
		return tell_difference(args, &check);
	if (check.code) {
		cli_fail(args, check.code, "%s", check.message);
		return CLI_BAD;
	}
	return 0;
}
