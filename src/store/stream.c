/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A ring of pieces. The caller's thread hashes them in order, since SHA-256 has no other way; helpers read, take the
 * CRC-32C of digest blocks, and write, whichever is wanted next, so several O_DIRECT writes are in flight and the
 * slower of hash and device sets the pace. A piece goes empty, reading, full, and is empty again once it is hashed and
 * written. Where no helper can be had, the caller's thread does it all in turn.
 *
 * Reading back. Whenever helpers have nothing else to do, what was written before a flush is read again and compared
 * with its digests; so the device is asked for it while the caller's thread is busy with hashing, and a device that is
 * the slower one loses nothing. One helper at a time flushes, and one reads back. What is left when all is written is
 * the commit's to read back. Helpers alone do that: without them it would only stand in line.
 *
 * Helpers make no error record: they leave errno and position. Lock: stream->lock guards all but the bytes of pieces,
 * which belong to whoever took them.
 */
#include "stream.h"

#include "core/arith.h"
#include "core/error.h"
#include "core/hash.h"
#include "core/mem.h"
#include "layout.h"
#include "readback.h"

#include <errno.h>
#include <string.h>

#define PIECE_BYTES (UINT64_C(4) << 20) /* whole digest blocks of any size */
#define N_PIECES    8u

enum piece_state {
	PIECE_EMPTY,
	PIECE_READING,
	PIECE_FULL,
};

struct piece {
	uint8_t *bytes;
	enum piece_state state;
	bool is_hashed, is_taken, is_written;
};

/* What a helper was at when it failed. */
enum doing {
	DOING_READ,
	DOING_WRITE,
	DOING_FLUSH,
	DOING_READ_BACK,
};

struct run {
	struct hr__stream *stream;
	uint8_t *memory, *back; /* back: for the piece that is read back; NULL: none is */
	size_t memory_bytes;
	uint64_t n_pieces;
	hr__sha256 *sha, *head_sha;
	pthread_mutex_t lock;
	pthread_cond_t moved;
	/* guarded by lock */
	struct piece pieces[N_PIECES];
	uint64_t n_reading, n_hashed, n_written; /* pieces, from the first on; n_written counts in any order */
	uint64_t n_flushed, n_back;              /* pieces, from the first on: before a flush; read back */
	bool is_flushing, is_reading_back;
	int error, code; /* errno of a helper; code of the caller's */
	enum doing doing;
	uint64_t error_at;
	struct hr__read_back bad; /* what was read back wrong */
};

static uint64_t piece_bytes(const struct run *run, uint64_t k)
{
	return hr__min_u64(PIECE_BYTES, run->stream->source->bytes - k * PIECE_BYTES);
}

static bool is_over(const struct run *run)
{
	return run->error || run->code || (run->n_hashed == run->n_pieces && run->n_written == run->n_pieces);
}

/* ---- what helpers do; called under lock, which is given up meanwhile ---- */

static void fail(struct run *run, int error, enum doing doing, uint64_t at)
{
	run->stream->is_flush_lost |= doing == DOING_FLUSH;
	if (run->error)
		return;
	run->error = error;
	run->doing = doing;
	run->error_at = at;
}

static void empty_if_done(struct piece *piece)
{
	if (piece->is_hashed && piece->is_written)
		*piece = (struct piece){.bytes = piece->bytes};
}

static void take_digests(struct run *run, uint64_t k, const uint8_t *bytes, uint64_t n)
{
	uint64_t block = UINT64_C(1) << run->stream->block_log2, first = k * PIECE_BYTES >> run->stream->block_log2;

	for (uint64_t at = 0; at < n; at += block)
		run->stream->digests[first + at / block] = hr__crc32c(0, bytes + at,
								      (size_t)hr__min_u64(block, n - at));
}

static void read_piece(struct run *run, uint64_t k)
{
	struct piece *piece = &run->pieces[k % N_PIECES];
	uint64_t want = piece_bytes(run, k);
	size_t got;
	int error;

	piece->state = PIECE_READING;
	run->n_reading++;
	pthread_mutex_unlock(&run->lock);
	error = hr__source_pread(run->stream->source, k * PIECE_BYTES, piece->bytes, (size_t)want, &got);
	if (!error && got < want)
		error = ENODATA;
	if (!error) {
		take_digests(run, k, piece->bytes, want);
		memset(piece->bytes + want, 0, (size_t)(hr__round_up(want, HR__RECORD_BYTES) - want));
	}
	pthread_mutex_lock(&run->lock);
	if (error)
		fail(run, error, DOING_READ, k * PIECE_BYTES + got);
	piece->state = PIECE_FULL;
	if (!run->stream->region) {
		piece->is_taken = true;
		piece->is_written = true;
		run->n_written++;
	}
}

static void write_piece(struct run *run, uint64_t k)
{
	struct piece *piece = &run->pieces[k % N_PIECES];
	uint64_t at = run->stream->to + k * PIECE_BYTES;
	int error;

	piece->is_taken = true;
	pthread_mutex_unlock(&run->lock);
	error = run->stream->region->ops->write(run->stream->region, at, piece->bytes,
						(size_t)hr__round_up(piece_bytes(run, k), HR__RECORD_BYTES));
	pthread_mutex_lock(&run->lock);
	if (error)
		fail(run, error, DOING_WRITE, at);
	piece->is_written = true;
	run->n_written++;
	empty_if_done(piece);
}

/* A slot holds the last piece that was read into it, so the last N_PIECES are all that can be on their way. */
static uint64_t oldest_piece(const struct run *run)
{
	return run->n_reading > N_PIECES ? run->n_reading - N_PIECES : 0;
}

/* All before this one are written. */
static uint64_t first_unwritten(const struct run *run)
{
	uint64_t k = oldest_piece(run);

	while (k < run->n_reading &&
	       (run->pieces[k % N_PIECES].state == PIECE_EMPTY || run->pieces[k % N_PIECES].is_written))
		k++;
	return k;
}

static bool flush_if_due(struct run *run)
{
	uint64_t n_written = first_unwritten(run);
	int error;

	if (run->is_flushing || (n_written - run->n_flushed) * PIECE_BYTES < run->stream->flush_bytes)
		return false;
	run->is_flushing = true;
	pthread_mutex_unlock(&run->lock);
	error = run->stream->region->ops->flush(run->stream->region);
	pthread_mutex_lock(&run->lock);
	run->is_flushing = false;
	if (error)
		fail(run, error, DOING_FLUSH, run->stream->to);
	else
		run->n_flushed = n_written;
	return true;
}

static bool read_a_piece_back(struct run *run)
{
	const struct hr__stream *stream = run->stream;
	uint64_t k = run->n_back;
	struct hr__read_back back = {.region = stream->region,
				     .at = stream->to + k * PIECE_BYTES,
				     .block_log2 = stream->block_log2,
				     .memory = run->back};
	int error;

	if (run->is_reading_back || k >= run->n_flushed)
		return false;
	back.bytes = piece_bytes(run, k);
	back.digests = stream->digests + (k * PIECE_BYTES >> stream->block_log2);
	run->is_reading_back = true;
	pthread_mutex_unlock(&run->lock);
	error = hr__read_back(&back);
	pthread_mutex_lock(&run->lock);
	run->is_reading_back = false;
	run->n_back += error == 0;
	if (error == EBADMSG)
		run->bad = back;
	if (error)
		fail(run, error, DOING_READ_BACK, back.at);
	return true;
}

/* One thing that is to be done; false if there is none now. */
static bool help_once(struct run *run)
{
	for (uint64_t k = oldest_piece(run); k < run->n_reading; k++) {
		struct piece *piece = &run->pieces[k % N_PIECES];

		if (piece->state == PIECE_FULL && !piece->is_taken) {
			write_piece(run, k);
			return true;
		}
	}
	if (run->n_reading < run->n_pieces && run->pieces[run->n_reading % N_PIECES].state == PIECE_EMPTY) {
		read_piece(run, run->n_reading);
		return true;
	}
	return run->back && (flush_if_due(run) || read_a_piece_back(run));
}

static void *help(void *ctx)
{
	struct run *run = ctx;

	pthread_mutex_lock(&run->lock);
	while (!is_over(run)) {
		if (help_once(run))
			pthread_cond_broadcast(&run->moved);
		else
			pthread_cond_wait(&run->moved, &run->lock);
	}
	pthread_cond_broadcast(&run->moved);
	pthread_mutex_unlock(&run->lock);
	return NULL;
}

/* ---- what the caller's thread does ---- */

static int hash_bytes(struct run *run, uint64_t k, const uint8_t *bytes, size_t n)
{
	uint64_t done = k * PIECE_BYTES, head = run->stream->head_bytes;
	int code = hr__sha256_update(run->sha, bytes, n);

	if (!code && done < head)
		code = hr__sha256_update(run->head_sha, bytes, (size_t)hr__min_u64(n, head - done));
	if (!code && run->stream->progress && run->stream->progress(run->stream->ctx, n))
		code = hr__fail(HR_E_CANCELLED, "cancelled by the caller");
	return code;
}

static bool hash_once(struct run *run)
{
	uint64_t k = run->n_hashed;
	struct piece *piece = &run->pieces[k % N_PIECES];
	int code;

	if (k >= run->n_reading || piece->state != PIECE_FULL || run->error)
		return false;
	pthread_mutex_unlock(&run->lock);
	code = hash_bytes(run, k, piece->bytes, (size_t)piece_bytes(run, k));
	pthread_mutex_lock(&run->lock);
	run->code = code;
	run->n_hashed++;
	piece->is_hashed = true;
	empty_if_done(piece);
	return true;
}

static void drive(struct run *run)
{
	struct hr__os_team team;

	hr__os_team_start(&team, run->n_pieces > 1 ? run->stream->n_helpers : 0, "hr-import", help, run);
	pthread_mutex_lock(&run->lock);
	while (!is_over(run)) {
		bool moved = hash_once(run);

		if (!moved && team.n == 0)
			moved = help_once(run);
		if (moved)
			pthread_cond_broadcast(&run->moved);
		else
			pthread_cond_wait(&run->moved, &run->lock);
	}
	pthread_cond_broadcast(&run->moved);
	pthread_mutex_unlock(&run->lock);
	hr__os_team_join(&team);
}

static int tell(struct run *run)
{
	const struct hr__stream *stream = run->stream;
	struct hr__where at = {.stage = "import", .path = stream->source->path, .offset = run->error_at};
	char text[128];

	if (run->code || !run->error)
		return run->code;
	at.system = run->error;
	if (run->doing == DOING_READ && run->error == ENODATA)
		return hr__fail_at(&at, HR_E_SHORT, "%s ended at %" PRIu64 ", although it has %" PRIu64 " bytes",
				   at.path, run->error_at, stream->source->bytes);
	if (run->doing == DOING_READ)
		return hr__fail_errno(&at, run->error, "read");
	at.path = stream->region->path;
	if (run->doing == DOING_READ_BACK && run->error == EBADMSG)
		return hr__fail_read_back(&run->bad, stream->to);
	if (run->doing == DOING_READ_BACK)
		return hr__region_fail(stream->region, run->error, run->error_at, "read back", "an object");
	if (run->doing == DOING_FLUSH)
		return hr__fail_errno(&at, run->error, "flush");
	return hr__fail_at(&at, HR_E_IO, "%s: cannot write an object at %" PRIu64 ": %s", at.path, run->error_at,
			   strerror_r(run->error, text, sizeof(text)));
}

static bool may_read_back(const struct run *run)
{
	const struct hr__stream *stream = run->stream;

	return stream->region && stream->n_helpers > 0 && stream->flush_bytes &&
	       stream->source->bytes >= stream->flush_bytes;
}

/* A small file gets no more memory than it has bytes. */
static int begin(struct run *run)
{
	size_t n = (size_t)hr__max_u64(1, hr__min_u64(N_PIECES, run->n_pieces)), n_back = may_read_back(run);
	size_t room = (size_t)hr__round_up(hr__min_u64(PIECE_BYTES, run->stream->source->bytes + 1), HR__RECORD_BYTES);
	void *memory;
	int code = hr__region_memory((n + n_back) * room, &memory);

	if (code)
		return code;
	run->memory = memory;
	run->memory_bytes = (n + n_back) * room;
	if (n_back)
		run->back = run->memory + n * room;
	for (unsigned i = 0; i < n; i++)
		run->pieces[i].bytes = run->memory + i * room;
	code = hr__sha256_new(&run->sha);
	return code ? code : hr__sha256_new(&run->head_sha);
}

int hr__stream_run(struct hr__stream *stream)
{
	struct run run = {.stream = stream,
			  .n_pieces = stream->source->bytes / PIECE_BYTES + (stream->source->bytes % PIECE_BYTES != 0),
			  .lock = PTHREAD_MUTEX_INITIALIZER,
			  .moved = PTHREAD_COND_INITIALIZER};
	int code = begin(&run);

	if (!code) {
		drive(&run);
		code = tell(&run);
		stream->read_back = hr__min_u64(run.n_back * PIECE_BYTES, stream->source->bytes);
	}
	if (!code)
		code = hr__sha256_final(run.sha, stream->sha256);
	if (!code)
		code = hr__sha256_final(run.head_sha, stream->head_sha256);
	hr__sha256_free(run.sha);
	hr__sha256_free(run.head_sha);
	hr__region_memory_free(run.memory, run.memory_bytes);
	pthread_cond_destroy(&run.moved);
	pthread_mutex_destroy(&run.lock);
	return code;
}
