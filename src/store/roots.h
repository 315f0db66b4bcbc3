/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Roots: the two places, each with a mirror at either end of the region, where a commit is recorded. Commits alternate
 * between them, so that whatever becomes of a write, the generation before it is still there.
 */
#ifndef HR_STORE_ROOTS_H
#define HR_STORE_ROOTS_H

#include "label.h"

struct hr__root {
	uint64_t generation;
	uint64_t floor_gen;
	uint64_t data_end;
	uint64_t body_len, body_off[2];
	uint8_t body_sha256[32];
	uint32_t n_objects, n_models;
	uint64_t live_bytes;
	uint8_t writer_id[16];
	uint64_t commit_time_ns;
};

/* What the four copies say. */
struct hr__roots {
	struct hr__root roots[2]; /* by slot; generation 0: none that is valid */
	/* By slot and copy: what is there. FOREIGN also: sound, but older than the other copy of its slot. */
	enum hr__record_state states[2][2];
	unsigned newest; /* slot of the highest generation */
};

void hr__root_encode(const struct hr__root *root, const uint8_t uuid[16], uint64_t self_off, void *record);
enum hr__record_state hr__root_decode(const void *record, const struct hr__label *label, uint64_t self_off,
				      struct hr__root *out);
/* Reads all four. HR_E_CORRUPT: none is valid. HR_E_DIVERGED: two different ones of one generation. HR_E_STORE_VERSION.
 * HR_E_IO only if a slot could not be read at either end. */
int hr__roots_read(struct hr__region *region, const struct hr__label *label, struct hr__roots *out);

#endif
