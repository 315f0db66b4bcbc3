/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The second half of reading a header: what can be told only when all entries are there. header.c reads them,
 * header_rules.c checks that names are distinct, sorts by (begin, end), and checks ranges and sizes.
 */
#ifndef HR_FORMAT_HEADER_RULES_H
#define HR_FORMAT_HEADER_RULES_H

#include "header.h"

#include <string.h>

/* The text that the entries came from. */
struct hr__header_text {
	const uint8_t *json;
	size_t json_bytes;
	uint64_t data_bytes; /* that follow it in the file */
};

/* Where a tensor's name or a metadata key stands in the file: header.c keeps that in the four bytes before the
 * string. */
static inline uint64_t hr__header_position(const char *name)
{
	uint32_t in_json;

	memcpy(&in_json, name - sizeof(in_json), sizeof(in_json));
	return (uint64_t)HR__FRAME_BYTES + in_json;
}

/* HR_E_DUPLICATE, HR_E_OFFSET, HR_E_OVERFLOW, HR_E_SUBBYTE, HR_E_SIZE, HR_E_COVER, HR_E_NOMEM. Metadata keys are
 * hashed with `key` here; entries bring their hash. */
int hr__header_check(const struct hr__header_text *text, const struct hr__hash_key *key, struct hr__header *header);

#endif
