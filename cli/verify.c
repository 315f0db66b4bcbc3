/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What arrived against what was expected: pieces of tensors are read back from the device and compared with a plain
 * pread of the files, opened anew by path. It shares nothing with the way the bytes went. What is in no file of its own
 * (an object of a store) is read by hr_model_read_shard() instead. Several threads take blocks in the order of the
 * pieces; after a difference no more are handed out, so the lowest one found is the first there is.
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
	const struct cli_compare *what;

	pthread_mutex_t lock; /* guards what follows */
	size_t next;          /* piece */
	uint64_t next_offset; /* in that piece */
	uint64_t done_bytes;
	unsigned n_running;
	bool is_over;
	bool is_different;
	size_t bad; /* piece where the first difference is */
	uint64_t bad_offset;
	uint8_t bad_got, bad_expected;
	int code; /* of another failure */
	char message[1200];
};

struct block {
	size_t piece;
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
	const struct cli_compare *what = check->what;
	bool has_one = false;

	pthread_mutex_lock(&check->lock);
	while (check->next < what->n && check->next_offset == what->pieces[check->next].bytes) {
		check->next++;
		check->next_offset = 0;
	}
	if (!check->is_over && check->next < what->n && !cli_signals_status()) {
		uint64_t left = what->pieces[check->next].bytes - check->next_offset;

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

static bool fail_last(struct check *check)
{
	note_failure(check, hr_error_last()->code, hr_error_last()->message);
	return false;
}

static void note_difference(struct reader *reader, const struct block *block)
{
	struct check *check = reader->check;
	size_t i = 0;

	while (reader->got[i] == reader->expected[i])
		i++;
	pthread_mutex_lock(&check->lock);
	if (!check->is_different || block->piece < check->bad ||
	    (block->piece == check->bad && block->offset + i < check->bad_offset)) {
		check->bad = block->piece;
		check->bad_offset = block->offset + i;
		check->bad_got = (uint8_t)reader->got[i];
		check->bad_expected = (uint8_t)reader->expected[i];
	}
	check->is_different = true;
	check->is_over = true;
	pthread_mutex_unlock(&check->lock);
}

/* ---- what is expected ---- */

static int expected_tensor(const struct cli_compare *what, size_t piece, struct hr_tensor *tensor)
{
	uint64_t number = what->pieces[piece].tensor;

	*tensor = (struct hr_tensor)HR_TENSOR_INIT;
	return hr_model_tensor(what->against, what->twins ? what->twins[number] : number, tensor);
}

static bool open_shard(struct reader *reader, uint32_t number)
{
	struct hr_shard shard = HR_SHARD_INIT;
	char text[700];

	if (reader->fd >= 0 && reader->shard == number)
		return true;
	if (reader->fd >= 0)
		close(reader->fd);
	hr_model_shard(reader->check->what->against, number, &shard);
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

	hr_model_shard(reader->check->what->against, reader->shard, &shard);
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

static bool read_expected(struct reader *reader, const struct block *block)
{
	const struct cli_compare *what = reader->check->what;
	struct hr_tensor tensor;
	uint64_t offset;

	if (expected_tensor(what, block->piece, &tensor))
		return fail_last(reader->check);
	offset = tensor.offset + what->pieces[block->piece].start + block->offset;
	if (what->is_plain)
		return open_shard(reader, tensor.shard) && read_plainly(reader, offset, block->bytes);
	if (hr_model_read_shard(what->against, tensor.shard, offset, reader->expected, block->bytes))
		return fail_last(reader->check);
	return true;
}

/* ---- threads ---- */

static bool compare_block(struct reader *reader, const struct block *block)
{
	const struct cli_piece *piece = &reader->check->what->pieces[block->piece];

	if (hr_buffer_read(piece->buffer, piece->offset + block->offset, reader->got, block->bytes))
		return fail_last(reader->check);
	if (!read_expected(reader, block))
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
	const struct cli_compare *what = check->what;
	unsigned n_running;

	do {
		const struct timespec slice = {.tv_nsec = 2000000};
		uint64_t done;

		pthread_mutex_lock(&check->lock);
		n_running = check->n_running;
		done = check->done_bytes;
		pthread_mutex_unlock(&check->lock);
		cli_progress_show(what->progress, what->done_before + done, what->total_bytes);
		if (n_running)
			nanosleep(&slice, NULL);
	} while (n_running);
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

/* ---- the answer ---- */

static int tell_difference(const struct check *check)
{
	const struct cli_compare *what = check->what;
	uint64_t at = what->pieces[check->bad].start + check->bad_offset;
	struct hr_shard shard = HR_SHARD_INIT;
	struct hr_tensor tensor;
	struct hr_error error;
	char *name, *message;

	expected_tensor(what, check->bad, &tensor);
	hr_model_shard(what->against, tensor.shard, &shard);
	name = cli_shown_name(tensor.name, tensor.name_len);
	message = cli_text("tensor '%.300s' differs from %s at byte %" PRIu64 " (%s, byte %" PRIu64
			   "): 0x%02x arrived, %s 0x%02x%s",
			   name, what->model == what->against ? "its file" : "what it is compared with", at, shard.path,
			   tensor.offset + at, check->bad_got,
			   what->model == what->against ? "the file has" : "expected was", check->bad_expected,
			   what->model == what->against ? "; report this, with what 'headrace engines' prints" : "");
	error = (struct hr_error){.code = HR_E_DIGEST,
				  .offset = tensor.offset + at,
				  .stage = "verify",
				  .path = shard.path,
				  .tensor = name,
				  .message = message};
	cli_fail_with(what->args, &error);
	cli_free(message);
	cli_free(name);
	return CLI_BAD;
}

int cli_compare(const struct cli_compare *what)
{
	struct check check = {.what = what};
	struct reader readers[MAX_THREADS];
	unsigned n = cli_cpus() < MAX_THREADS ? cli_cpus() : MAX_THREADS;

	pthread_mutex_init(&check.lock, NULL);
	run_readers(&check, readers, n);
	pthread_mutex_destroy(&check.lock);
	if (check.is_different || check.code || cli_signals_status())
		cli_progress_end(what->progress);
	if (cli_signals_status()) {
		cli_fail(what->args, HR_E_CANCELLED, "interrupted while comparing");
		return cli_signals_status();
	}
	if (check.is_different)
		return tell_difference(&check);
	if (check.code) {
		cli_fail(what->args, check.code, "%s", check.message);
		return CLI_BAD;
	}
	return 0;
}

int cli_verify(const struct cli_args *args, const struct cli_transfer *transfer, uint64_t *elapsed_ns)
{
	const struct cli_set *set = transfer->set;
	struct cli_piece *pieces = cli_alloc(set->n, sizeof(*pieces));
	struct cli_progress progress;
	struct cli_compare what = {.args = args,
				   .model = transfer->model,
				   .against = transfer->model,
				   .is_plain = cli_is_in_files(transfer->model),
				   .pieces = pieces,
				   .n = set->n,
				   .total_bytes = set->bytes,
				   .progress = &progress};
	uint64_t start_ns = cli_now_ns();
	int status;

	for (size_t i = 0; i < set->n; i++)
		pieces[i] = (struct cli_piece){.tensor = set->tensors[i],
					       .bytes = set->sizes[i],
					       .buffer = transfer->buffers[set->part_of[i]],
					       .offset = set->offsets[i]};
	cli_progress_start(&progress, "comparing");
	status = cli_compare(&what);
	cli_progress_end(&progress);
	cli_free(pieces);
	*elapsed_ns = cli_now_ns() - start_ns;
	return status;
}
