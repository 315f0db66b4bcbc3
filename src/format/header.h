/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The safetensors header: bytes to checked tensor table. No I/O. What is accepted is a subset of what the official
 * parser accepts, and means the same; docs/format.md lists the differences.
 *
 * A file is: u64 little-endian header length N, N bytes of JSON, data. Ranges in the JSON count from the start of the
 * data. Every error has the byte position in the file (8 bytes are before the JSON).
 */
#ifndef HR_FORMAT_HEADER_H
#define HR_FORMAT_HEADER_H

#include "core/hash.h"

#include <stddef.h>
#include <stdint.h>

#define HR__HEADER_MAX_BYTES UINT64_C(100000000) /* the official cap */
#define HR__MAX_RANK         64
#define HR__MAX_NAME_BYTES   65536
#define HR__MAX_SKIP_DEPTH   16
#define HR__FRAME_BYTES      8

/* A tensor as the header describes it. Strings and dims live in the header's arena. */
struct hr__entry {
	const char *name; /* decoded UTF-8, may hold NUL */
	const uint64_t *dims;
	uint64_t begin, end; /* in the data */
	uint64_t hash;       /* hr__hash(key, name, name_len) */
	uint32_t name_len;
	uint8_t rank;
	uint8_t dtype; /* HR_DTYPE_* */
	uint8_t mark;  /* 0; for whoever owns the header */
};

struct hr__pair {
	const char *key, *value;
	uint32_t key_len, value_len;
};

struct hr__header {
	struct hr__entry *entries; /* sorted by (begin, end), gapless from 0 to data_bytes */
	size_t n_entries;
	struct hr__pair *pairs; /* __metadata__, in header order */
	size_t n_pairs;
	void *arena; /* owns names, dims and metadata */
};

/* Checks the first bytes of a file of `file_bytes` (`got` of them were there to read, up to 64 are of use: they
 * give a hint about what else it could be). Sets *json_bytes. HR_E_SMALL, HR_E_HEADER_LARGE, HR_E_HEADER_LENGTH. */
int hr__header_frame(const uint8_t *first, size_t got, uint64_t file_bytes, uint64_t *json_bytes);

/* Parses `json`; `data_bytes` is what follows it in the file. `out` is empty after a failure. Errors have stage
 * "header" and positions in the file, but no path: the caller adds it with hr__error_locate(). */
int hr__header_parse(const struct hr__hash_key *key, const uint8_t *json, size_t json_bytes, uint64_t data_bytes,
		     struct hr__header *out);
void hr__header_free(struct hr__header *header);

#endif
