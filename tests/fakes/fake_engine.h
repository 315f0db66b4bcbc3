/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Engines of test builds, "fake" (blocking) and "fake-queue" (queued), that read the real file and misbehave as told:
 * short reads, an error at a chosen read or byte, reads that hang until they are let go, completions that come late
 * and out of order; and "fake-window", which offers windows as the mapped engine does, and hangs or fails. They are
 * used when asked for by name only. Settings hold for loaders opened afterwards; set them with no loader open.
 */
#ifndef HR_TESTS_FAKE_ENGINE_H
#define HR_TESTS_FAKE_ENGINE_H

#include <stdint.h>

struct fake_engine_settings {
	uint64_t seed;        /* of all random choices below */
	int short_reads;      /* return random parts of what was asked */
	uint64_t fail_read;   /* the n-th read (from 1) fails ... */
	uint64_t fail_offset; /* ... or the one that covers this byte of its file, if not 0 ... */
	int fail_errno;       /* ... with this; 0 = it returns nothing, as at the end of a file */
	uint64_t hang_read;   /* the n-th read does not come back until fake_engine_let_go() ... */
	uint64_t n_hang;      /* ... and so do those that follow it, so many in all; 0 = 1 */
	uint64_t delay_ns;    /* up to this long per read */
};

void fake_engine_set(const struct fake_engine_settings *settings); /* NULL: behave */
void fake_engine_let_go(void);
uint64_t fake_engine_reads(void); /* since fake_engine_set() */
int fake_engine_hanging(void);    /* how many reads hang now */

#endif
