/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The plan against a slow model: a picture of every source, one number a byte. Spans come in any shape (sorted or not,
 * overlapping, repeated, empty, in several sources), and the cursor is stopped and let on as a feed does. What must
 * hold, always:
 *
 *  - every wanted byte is in exactly one piece, pieces of a span come in order, and none is empty;
 *  - a chunk's envelope is aligned, fits into a slot, holds the chunk, and expects exactly what the source has there;
 *  - a chunk has at most max_pieces pieces, and no gap in it is larger than max_gap;
 *  - no byte of sorted, disjoint spans is read twice as payload, and the spans from `stop` on are left alone.
 */
#include "hrtest.h"

#include "model/plan.h"

#define MAX_SPANS        40
#define MAX_SOURCES      3
#define MAX_SOURCE_BYTES 3000

struct world {
	struct hr__span spans[MAX_SPANS];
	struct hr__plan plan;
	uint64_t source_bytes[MAX_SOURCES];
	uint32_t n_sources;
	bool is_disjoint; /* sorted and without overlap */
	/* The picture. */
	uint64_t arrived[MAX_SPANS];                       /* bytes of the span so far: its pieces come in order */
	unsigned char read[MAX_SOURCES][MAX_SOURCE_BYTES]; /* how often as a piece */
};

static void make_sorted(struct world *w, struct test_random *random)
{
	uint32_t source = 0;
	uint64_t at = 0;

	for (size_t i = 0; i < w->plan.n_spans; i++) {
		if (test_random_below(random, 8) == 0 && source + 1 < w->n_sources) {
			source++;
			at = 0;
		}
		if (test_random_below(random, 2))
			at += test_random_below(random, w->plan.max_gap * 2 + 2);
		if (at > w->source_bytes[source])
			at = w->source_bytes[source];
		w->spans[i].source = source;
		w->spans[i].offset = at;
		w->spans[i].bytes = test_random_below(random, 4) ? test_random_below(random, 200) : 0;
		if (w->spans[i].bytes > w->source_bytes[source] - at)
			w->spans[i].bytes = w->source_bytes[source] - at;
		at += w->spans[i].bytes;
	}
}

static void make_any(struct world *w, struct test_random *random)
{
	for (size_t i = 0; i < w->plan.n_spans; i++) {
		struct hr__span *span = &w->spans[i];

		span->source = (uint32_t)test_random_below(random, w->n_sources);
		span->offset = test_random_below(random, w->source_bytes[span->source] + 1);
		span->bytes = test_random_below(random, w->source_bytes[span->source] - span->offset + 1);
		if (test_random_below(random, 3) == 0)
			span->bytes = 0;
		if (i > 0 && test_random_below(random, 4) == 0)
			*span = w->spans[i - 1];
	}
}

static void make_world(struct world *w, struct test_random *random)
{
	uint32_t align = UINT32_C(1) << test_random_below(random, 7);

	memset(w, 0, sizeof(*w));
	w->n_sources = 1 + (uint32_t)test_random_below(random, MAX_SOURCES);
	for (uint32_t s = 0; s < w->n_sources; s++)
		w->source_bytes[s] = 1 + test_random_below(random, MAX_SOURCE_BYTES);
	w->plan = (struct hr__plan){.spans = w->spans,
				    .n_spans = test_random_below(random, MAX_SPANS + 1),
				    .slot_bytes = align * (1 + test_random_below(random, 12)),
				    .max_gap = test_random_below(random, 3) ? test_random_below(random, 60) : 0,
				    .align = align,
				    .max_pieces = 1 + (uint32_t)test_random_below(random, 6)};
	w->is_disjoint = test_random_below(random, 2);
	if (w->is_disjoint)
		make_sorted(w, random);
	else
		make_any(w, random);
}

static void check_envelope(const struct world *w, const struct hr__chunk *chunk)
{
	uint64_t size = w->source_bytes[chunk->source];
	struct hr__envelope e, plain;

	hr__chunk_envelope(chunk, w->plan.align, size, UINT64_MAX, &e);
	assert_int_equal(e.offset % w->plan.align, 0);
	assert_int_equal(e.asked % w->plan.align, 0);
	assert_true(e.asked <= w->plan.slot_bytes);
	assert_int_equal(e.offset + e.lead, chunk->offset);
	assert_true(e.lead + chunk->bytes <= e.expected);
	assert_true(e.expected <= e.asked);
	/* Exactly what the source has: all of it, or up to the source's end. */
	assert_int_equal(e.expected, e.offset + e.asked <= size ? e.asked : size - e.offset);
	assert_true(e.lead < w->plan.align && e.asked - e.lead - chunk->bytes < w->plan.align);

	hr__chunk_envelope(chunk, 1, size, UINT64_MAX, &plain);
	assert_int_equal(plain.lead, 0);
	assert_int_equal(plain.offset, chunk->offset);
	assert_int_equal(plain.asked, chunk->bytes);
	assert_int_equal(plain.expected, chunk->bytes);
}

static void check_piece(struct world *w, const struct hr__chunk *chunk, const struct hr__piece *piece)
{
	const struct hr__span *span = &w->spans[piece->span];

	assert_true(piece->bytes > 0);
	assert_int_equal(span->source, chunk->source);
	assert_int_equal(piece->from, w->arrived[piece->span]);
	assert_true(piece->from + piece->bytes <= span->bytes);
	assert_true(piece->at + piece->bytes <= chunk->bytes);
	assert_int_equal(chunk->offset + piece->at, span->offset + piece->from);
	w->arrived[piece->span] += piece->bytes;
	for (uint64_t i = 0; i < piece->bytes; i++)
		w->read[span->source][span->offset + piece->from + i]++;
}

static void check_chunk(struct world *w, const struct hr__chunk *chunk, size_t stop)
{
	uint64_t end = 0;
	uint32_t pieces = 0;

	assert_true(chunk->bytes > 0);
	assert_true(chunk->first <= chunk->last && chunk->last < stop);
	assert_int_equal(chunk->skip, w->arrived[chunk->first]);
	check_envelope(w, chunk);
	for (size_t span = chunk->first; span <= chunk->last; span++) {
		struct hr__piece piece;

		if (!hr__chunk_piece(&w->plan, chunk, span, &piece)) {
			assert_int_equal(w->spans[span].bytes, 0);
			continue;
		}
		check_piece(w, chunk, &piece);
		assert_true(piece.at >= end && piece.at - end <= (pieces ? w->plan.max_gap : 0));
		end = piece.at + piece.bytes;
		pieces++;
	}
	assert_int_equal(end, chunk->bytes);
	assert_true(pieces >= 1 && pieces <= w->plan.max_pieces);
}

/* Whether the chunk had to end where it did: nothing that could have joined was left for another read. */
static void check_greedy(const struct world *w, const struct hr__chunk *chunk, const struct hr__cursor *cursor,
			 size_t stop)
{
	uint64_t limit = chunk->offset / w->plan.align * w->plan.align + w->plan.slot_bytes,
		 end = chunk->offset + chunk->bytes;
	const struct hr__span *next = &w->spans[cursor->span];
	uint32_t pieces = 0;

	if (cursor->span >= stop || cursor->done > 0 || next->bytes == 0)
		return;
	for (size_t span = chunk->first; span <= chunk->last; span++)
		pieces += w->spans[span].bytes > 0;
	assert_true(pieces == w->plan.max_pieces || next->source != chunk->source || next->offset < end ||
		    next->offset - end > w->plan.max_gap || next->offset >= limit);
}

static void run_plan(struct world *w, struct test_random *random)
{
	struct hr__cursor cursor = {0};
	struct hr__chunk chunk;
	size_t stop = 0, n = w->plan.n_spans;

	for (;;) {
		if (hr__plan_next(&w->plan, &cursor, stop, &chunk)) {
			check_chunk(w, &chunk, stop);
			check_greedy(w, &chunk, &cursor, stop);
			continue;
		}
		for (size_t span = 0; span < n; span++)
			assert_int_equal(w->arrived[span], span < stop ? w->spans[span].bytes : 0);
		if (stop == n)
			return;
		stop += 1 + test_random_below(random, n - stop);
	}
}

static void check_picture(const struct world *w)
{
	for (size_t i = 0; i < w->plan.n_spans; i++)
		for (uint64_t at = 0; at < w->spans[i].bytes; at++) {
			unsigned times = w->read[w->spans[i].source][w->spans[i].offset + at];

			assert_true(w->is_disjoint ? times == 1 : times >= 1);
		}
}

static void covers_every_wanted_byte_once(void **state)
{
	struct test_random random;
	static struct world w;

	(void)state;
	test_random_start(&random, 20260101);
	for (int round = 0; round < 20000; round++) {
		make_world(&w, &random);
		run_plan(&w, &random);
		check_picture(&w);
	}
}

static void draws_the_worked_example_of_its_header(void **state)
{
	static const struct hr__span spans[] = {{1, 2, 0}, {3, 1, 0}, {6, 15, 0}};
	const struct hr__plan plan = {spans, 3, 8, 2, 4, 16};
	struct hr__cursor cursor = {0};
	struct hr__envelope e;
	struct hr__chunk c;

	(void)state;
	assert_true(hr__plan_next(&plan, &cursor, 3, &c));
	assert_true(c.offset == 1 && c.bytes == 7 && c.first == 0 && c.last == 2);
	assert_true(hr__plan_next(&plan, &cursor, 3, &c));
	assert_true(c.offset == 8 && c.bytes == 8 && c.first == 2 && c.last == 2 && c.skip == 2);
	assert_true(hr__plan_next(&plan, &cursor, 3, &c));
	assert_true(c.offset == 16 && c.bytes == 5 && c.skip == 10);
	hr__chunk_envelope(&c, 4, 22, UINT64_MAX, &e);
	assert_true(e.offset == 16 && e.asked == 8 && e.expected == 6);
	assert_false(hr__plan_next(&plan, &cursor, 3, &c));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(draws_the_worked_example_of_its_header),
		cmocka_unit_test(covers_every_wanted_byte_once),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
