/* SPDX-License-Identifier: Apache-2.0 */
/* The plan at its edges, one by one; tests/prop/prop_plan.c has what must hold always. */
#include "hrtest.h"

#include "model/plan.h"

/* Draws all chunks; answers how many. */
static size_t draw_all(const struct hr__plan *plan, struct hr__chunk *out, size_t most)
{
	struct hr__cursor cursor = {0};
	size_t n = 0;

	while (n < most && hr__plan_next(plan, &cursor, plan->n_spans, &out[n]))
		n++;
	return n;
}

static void is_chunk(const struct hr__chunk *chunk, uint64_t offset, uint64_t bytes, size_t first, size_t last)
{
	assert_int_equal(chunk->offset, offset);
	assert_int_equal(chunk->bytes, bytes);
	assert_int_equal(chunk->first, first);
	assert_int_equal(chunk->last, last);
}

static void gives_nothing_for_nothing(void **state)
{
	static const struct hr__span empty[] = {{100, 0, 0}, {0, 0, 1}, {100, 0, 0}};
	const struct hr__plan none = {NULL, 0, 64, 0, 16, 4}, of_no_bytes = {empty, 3, 64, 0, 16, 4};
	struct hr__chunk chunks[2];

	(void)state;
	assert_int_equal(draw_all(&none, chunks, 2), 0);
	assert_int_equal(draw_all(&of_no_bytes, chunks, 2), 0);
}

static void joins_over_a_gap_up_to_its_limit(void **state)
{
	static const struct hr__span spans[] = {{0, 10, 0}, {15, 10, 0}, {31, 10, 0}};
	const struct hr__plan plan = {spans, 3, 64, 5, 16, 4};
	struct hr__chunk chunks[4];

	(void)state;
	assert_int_equal(draw_all(&plan, chunks, 4), 2);
	is_chunk(&chunks[0], 0, 25, 0, 1);  /* a gap of 5 */
	is_chunk(&chunks[1], 31, 10, 2, 2); /* one of 6 */
}

static void cuts_where_the_envelope_is_full(void **state)
{
	static const struct hr__span spans[] = {{10, 54, 0}, {64, 64, 0}, {128, 1, 0}};
	const struct hr__plan plan = {spans, 3, 64, 0, 16, 4};
	struct hr__chunk chunks[4];
	struct hr__piece piece;

	(void)state;
	assert_int_equal(draw_all(&plan, chunks, 4), 3);
	is_chunk(&chunks[0], 10, 54, 0, 0); /* ends just at the limit: the next span starts a chunk of its own */
	is_chunk(&chunks[1], 64, 64, 1, 1);
	is_chunk(&chunks[2], 128, 1, 2, 2);
	assert_true(hr__chunk_piece(&plan, &chunks[1], 1, &piece));
	assert_int_equal(piece.from, 0);
	assert_int_equal(piece.bytes, 64);
}

static void goes_on_inside_a_span_with_the_next_one_behind_it(void **state)
{
	static const struct hr__span spans[] = {{10, 100, 0}, {110, 3, 0}};
	const struct hr__plan plan = {spans, 2, 64, 0, 16, 4};
	struct hr__chunk chunks[4];
	struct hr__piece piece;

	(void)state;
	assert_int_equal(draw_all(&plan, chunks, 4), 2);
	is_chunk(&chunks[0], 10, 54, 0, 0);
	is_chunk(&chunks[1], 64, 49, 0, 1);
	assert_int_equal(chunks[1].skip, 54);
	assert_true(hr__chunk_piece(&plan, &chunks[1], 0, &piece));
	assert_int_equal(piece.from, 54);
	assert_int_equal(piece.bytes, 46);
	assert_true(hr__chunk_piece(&plan, &chunks[1], 1, &piece));
	assert_int_equal(piece.at, 46);
	assert_int_equal(piece.from, 0);
}

static void takes_no_more_pieces_than_it_may(void **state)
{
	static const struct hr__span spans[] = {{0, 1, 0}, {1, 1, 0}, {2, 0, 0}, {2, 1, 0}, {3, 1, 0}};
	const struct hr__plan plan = {spans, 5, 64, 0, 16, 3};
	struct hr__chunk chunks[4];

	(void)state;
	assert_int_equal(draw_all(&plan, chunks, 4), 2);
	is_chunk(&chunks[0], 0, 3, 0, 3); /* the empty one does not count */
	is_chunk(&chunks[1], 3, 1, 4, 4);
}

static void starts_anew_at_an_overlap_and_at_another_source(void **state)
{
	static const struct hr__span spans[] = {{0, 10, 0}, {9, 5, 0}, {14, 5, 1}, {0, 1, 1}};
	const struct hr__plan plan = {spans, 4, 64, 100, 16, 4};
	struct hr__chunk chunks[5];

	(void)state;
	assert_int_equal(draw_all(&plan, chunks, 5), 4);
	is_chunk(&chunks[1], 9, 5, 1, 1);
	is_chunk(&chunks[2], 14, 5, 2, 2);
	assert_int_equal(chunks[2].source, 1);
	is_chunk(&chunks[3], 0, 1, 3, 3);
}

static void leaves_alone_what_lies_behind_the_stop(void **state)
{
	static const struct hr__span spans[] = {{0, 10, 0}, {10, 10, 0}, {20, 10, 0}};
	const struct hr__plan plan = {spans, 3, 64, 0, 16, 4};
	struct hr__cursor cursor = {0};
	struct hr__chunk chunk;

	(void)state;
	assert_false(hr__plan_next(&plan, &cursor, 0, &chunk));
	assert_true(hr__plan_next(&plan, &cursor, 2, &chunk));
	is_chunk(&chunk, 0, 20, 0, 1);
	assert_false(hr__plan_next(&plan, &cursor, 2, &chunk));
	assert_true(hr__plan_next(&plan, &cursor, 3, &chunk));
	is_chunk(&chunk, 20, 10, 2, 2);
	assert_false(hr__plan_next(&plan, &cursor, 3, &chunk));
}

static void expects_exactly_what_the_last_block_has(void **state)
{
	struct hr__chunk chunk = {.offset = 8000, .bytes = 193};
	struct hr__envelope e;

	(void)state;
	hr__chunk_envelope(&chunk, 4096, 8193, UINT64_MAX, &e);
	assert_int_equal(e.offset, 4096);
	assert_int_equal(e.lead, 3904);
	assert_int_equal(e.asked, 8192);
	assert_int_equal(e.expected, 4097);
	hr__chunk_envelope(&chunk, 512, 8704, UINT64_MAX, &e); /* a file that ends with a block */
	assert_int_equal(e.asked, 8704 - 7680);
	assert_int_equal(e.expected, e.asked);
}

static void plans_sources_of_any_size(void **state)
{
	static const struct hr__span spans[] = {{UINT64_C(1) << 62, UINT64_C(1) << 40, 0}};
	const struct hr__plan plan = {spans, 1, UINT64_C(2) << 20, 0, 4096, 4};
	struct hr__cursor cursor = {0, (UINT64_C(1) << 40) - 1000};
	struct hr__chunk chunk;

	(void)state;
	assert_true(hr__plan_next(&plan, &cursor, 1, &chunk));
	is_chunk(&chunk, (UINT64_C(1) << 62) + (UINT64_C(1) << 40) - 1000, 1000, 0, 0);
	assert_false(hr__plan_next(&plan, &cursor, 1, &chunk));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(gives_nothing_for_nothing),
		cmocka_unit_test(joins_over_a_gap_up_to_its_limit),
		cmocka_unit_test(cuts_where_the_envelope_is_full),
		cmocka_unit_test(goes_on_inside_a_span_with_the_next_one_behind_it),
		cmocka_unit_test(takes_no_more_pieces_than_it_may),
		cmocka_unit_test(starts_anew_at_an_overlap_and_at_another_source),
		cmocka_unit_test(leaves_alone_what_lies_behind_the_stop),
		cmocka_unit_test(expects_exactly_what_the_last_block_has),
		cmocka_unit_test(plans_sources_of_any_size),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
