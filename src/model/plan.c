/* SPDX-License-Identifier: Apache-2.0 */
/* The plan; plan.h has the theory. All offsets were checked against the size of their source before they came here. */
#include "plan.h"

#include "core/arith.h"

/* Moves past spans of no bytes and spans that are used up. */
static void skip_empty(const struct hr__plan *plan, struct hr__cursor *cursor, size_t stop)
{
	while (cursor->span < stop && cursor->done == plan->spans[cursor->span].bytes) {
		cursor->span++;
		cursor->done = 0;
	}
}

/* Whether a chunk that ends at `end` may go on into `span`, and into how much of it. */
static bool may_follow(const struct hr__plan *plan, const struct hr__span *span, const struct hr__chunk *chunk,
		       uint64_t limit)
{
	uint64_t end = chunk->offset + chunk->bytes;

	return span->source == chunk->source && span->offset >= end && span->offset - end <= plan->max_gap &&
	       span->offset < limit;
}

bool hr__plan_next(const struct hr__plan *plan, struct hr__cursor *cursor, size_t stop, struct hr__chunk *out)
{
	const struct hr__span *span;
	uint64_t limit; /* where the envelope stops fitting into a slot */
	uint32_t pieces = 1;

	skip_empty(plan, cursor, stop);
	if (cursor->span >= stop)
		return false;
	span = &plan->spans[cursor->span];
	*out = (struct hr__chunk){.source = span->source,
				  .first = cursor->span,
				  .last = cursor->span,
				  .skip = cursor->done,
				  .offset = span->offset + cursor->done};
	limit = hr__round_down(out->offset, plan->align) + plan->slot_bytes;
	for (;;) {
		uint64_t begin = span->offset + cursor->done;
		uint64_t end = hr__min_u64(span->offset + span->bytes, limit);

		out->last = cursor->span;
		out->bytes = end - out->offset;
		cursor->done += end - begin;
		skip_empty(plan, cursor, stop);
		if (cursor->span >= stop || cursor->done > 0 || pieces == plan->max_pieces)
			return true;
		span = &plan->spans[cursor->span];
		if (!may_follow(plan, span, out, limit))
			return true;
		pieces++;
	}
}

bool hr__chunk_piece(const struct hr__plan *plan, const struct hr__chunk *chunk, size_t span, struct hr__piece *out)
{
	const struct hr__span *s = &plan->spans[span];
	uint64_t begin = span == chunk->first ? chunk->offset : s->offset;
	uint64_t end = hr__min_u64(s->offset + s->bytes, chunk->offset + chunk->bytes);

	if (s->bytes == 0 || end <= begin)
		return false;
	*out = (struct hr__piece){
		.span = span, .from = begin - s->offset, .at = begin - chunk->offset, .bytes = end - begin};
	return true;
}

void hr__chunk_envelope(const struct hr__chunk *chunk, uint32_t align, uint64_t source_bytes, uint64_t room,
			struct hr__envelope *out)
{
	uint64_t end = hr__min_u64(hr__round_up(chunk->offset + chunk->bytes, align), room);

	out->offset = hr__round_down(chunk->offset, align);
	out->lead = chunk->offset - out->offset;
	out->asked = end - out->offset;
	out->expected = hr__min_u64(end, source_bytes) - out->offset;
}
