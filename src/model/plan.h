/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The plan: from byte ranges wanted to reads. Pure: no I/O, no allocation, no state but the caller's cursor, so that
 * it can be drawn from under a lock and tested against a slow model.
 *
 * A **span** is a range that somebody wants. Spans are taken in the order given (a job sorts them into file order). A
 * **chunk** is one read: it starts where the cursor stands, crosses from span to span while they follow one another in
 * the same source with gaps of at most max_gap, and ends early enough for its aligned envelope to fit into a slot. A
 * long span becomes many chunks, cut at aligned places so that no byte is read twice; a span that begins before the
 * previous one ends starts a chunk of its own, and so does every change of source. A **piece** is the part of a chunk
 * that belongs to one span.
 *
 * Worked example, alignment 4, slot 8:   spans a = [1,3), b = [3,4), c = [6,21)   max_gap 2
 *   chunk 1: [1,8)   envelope [0,8)    pieces a, b, c[0,2)
 *   chunk 2: [8,16)  envelope [8,16)   piece c[2,10)
 *   chunk 3: [16,21) envelope [16,24)  piece c[10,15); in a source of 22 bytes the last read expects 6
 */
#ifndef HR_MODEL_PLAN_H
#define HR_MODEL_PLAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct hr__span {
	uint64_t offset, bytes; /* in the source; bytes may be 0: then no chunk mentions it */
	uint32_t source;
};

struct hr__plan {
	const struct hr__span *spans;
	size_t n_spans;
	uint64_t slot_bytes; /* a multiple of `align` */
	uint64_t max_gap;    /* bytes worth reading for nothing */
	uint32_t align;      /* of envelopes; a power of two */
	uint32_t max_pieces; /* per chunk; at least 1 */
};

struct hr__cursor {
	size_t span;   /* the next one to read */
	uint64_t done; /* bytes of it already in chunks */
};

struct hr__chunk {
	uint64_t offset, bytes; /* payload with gaps: from the first piece's first byte to the last one's last */
	uint64_t skip;          /* bytes of the first span that earlier chunks hold */
	size_t first;           /* span of the first piece */
	size_t last;            /* span of the last piece; spans of no bytes between them have no piece */
	uint32_t source;
};

struct hr__piece {
	size_t span;
	uint64_t from;  /* in the span */
	uint64_t at;    /* in the chunk */
	uint64_t bytes; /* never 0 */
};

/* Draws the next chunk and moves the cursor; spans from `stop` on are left alone. False when there is nothing
 * before it. */
bool hr__plan_next(const struct hr__plan *plan, struct hr__cursor *cursor, size_t stop, struct hr__chunk *out);

/* The chunk's piece in `span`, which lies in [first, last]; false if that span has no bytes. */
bool hr__chunk_piece(const struct hr__plan *plan, const struct hr__chunk *chunk, size_t span, struct hr__piece *out);

/* The aligned envelope of a chunk: `lead` bytes before the payload, `asked` bytes in all from offset - lead, of
 * which a source of `source_bytes` can give `expected`. It ends at `room` of the source at the latest. */
struct hr__envelope {
	uint64_t offset, lead, asked, expected;
};
void hr__chunk_envelope(const struct hr__chunk *chunk, uint32_t align, uint64_t source_bytes, uint64_t room,
			struct hr__envelope *out);

#endif
