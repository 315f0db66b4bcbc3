/* SPDX-License-Identifier: Apache-2.0 */
/* Any bytes as a file: the frame, then the header. What is accepted must hold together; what is not must say why. */
#include "fuzz.h"

#include "format/header.h"

static const struct hr__hash_key key = {1, 2};

/* As far as the number of continuation bytes shows. */
static bool is_utf8(const char *text, size_t n)
{
	unsigned due = 0;

	for (size_t i = 0; i < n; i++) {
		unsigned char c = (unsigned char)text[i];

		if ((due > 0) != ((c & 0xc0) == 0x80))
			return false;
		due = due ? due - 1 : c < 0x80 ? 0 : c < 0xe0 ? 1 : c < 0xf0 ? 2 : 3;
	}
	return due == 0;
}

static void check_accepted(const struct hr__header *header, uint64_t data_bytes)
{
	uint64_t end = 0;

	for (size_t i = 0; i < header->n_entries; i++) {
		const struct hr__entry *entry = &header->entries[i];
		uint64_t bits = hr_dtype_bits(entry->dtype);

		fuzz_check(bits > 0 && entry->rank <= HR__MAX_RANK && entry->name_len <= HR__MAX_NAME_BYTES);
		for (unsigned d = 0; d < entry->rank; d++)
			bits *= entry->dims[d];
		fuzz_check(entry->begin == end && entry->end >= end && bits % 8 == 0 &&
			   bits / 8 == entry->end - entry->begin);
		fuzz_check(entry->hash == hr__hash(&key, entry->name, entry->name_len));
		fuzz_check(is_utf8(entry->name, entry->name_len));
		end = entry->end;
	}
	fuzz_check(end == data_bytes);
	for (size_t i = 0; i < header->n_pairs; i++) /* reads all of both, for the sanitizer */
		fuzz_check(is_utf8(header->pairs[i].key, header->pairs[i].key_len) &&
			   is_utf8(header->pairs[i].value, header->pairs[i].value_len));
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n)
{
	struct hr__header header = {.n_entries = 0};
	uint64_t json_bytes;
	uint8_t *file, *json;
	int rc;

	if (n < FUZZ_PREFIX)
		return 0;
	n -= FUZZ_PREFIX;
	file = fuzz_copy(bytes + FUZZ_PREFIX, n < 64 ? n : 64);
	rc = hr__header_frame(file, n < 64 ? n : 64, n, &json_bytes);
	free(file);
	if (rc) {
		fuzz_check_error(rc, "header", n);
		return 0;
	}
	json = fuzz_copy(bytes + FUZZ_PREFIX + 8, (size_t)json_bytes);
	fuzz_arm(bytes);
	rc = hr__header_parse(&key, json, (size_t)json_bytes, n - 8 - json_bytes, &header);
	if (fuzz_fired())
		fuzz_check(rc == HR_E_NOMEM);
	free(json); /* nothing that was returned may point into it */
	if (rc == 0)
		check_accepted(&header, n - 8 - json_bytes);
	else
		fuzz_check(!header.entries && !header.pairs && !header.arena);
	if (rc)
		fuzz_check_error(rc, "header", n);
	hr__header_free(&header);
	return 0;
}

/* Sets the length right half of the time: the header then ends at the last brace. Else nearly all inputs die at the
 * frame. */
size_t LLVMFuzzerCustomMutator(uint8_t *bytes, size_t n, size_t max, unsigned seed)
{
	size_t end;

	n = LLVMFuzzerMutate(bytes, n, max);
	if (n < FUZZ_PREFIX + 8)
		return n;
	if (seed % 4 != 0)
		bytes[0] = bytes[1] = 0; /* most runs without a failing allocation */
	if (seed / 4 % 2 == 0)
		return n;
	for (end = n; end > FUZZ_PREFIX + 8 && bytes[end - 1] != '}'; end--)
		;
	for (size_t i = 0; i < 8; i++)
		bytes[FUZZ_PREFIX + i] = (uint8_t)((uint64_t)(end - FUZZ_PREFIX - 8) >> (8 * i));
	return n;
}
