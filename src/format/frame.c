/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The first eight bytes of a file: how long its header is, and whether that can be. safetensors has no magic number,
 * so a file of another kind shows here as an absurd length. Only then are its first bytes compared with those of other
 * formats, to say what it may be: a valid file may begin with any of them.
 */
#include "core/error.h"
#include "header.h"

#include <string.h>

static const struct {
	const char *bytes;
	size_t n;
	const char *hint;
} others[] = {
	{"version https://git-lfs", 23, "this is a git-lfs pointer, not the file itself: run \"git lfs pull\""},
	{"PK\3\4", 4, "this is a zip archive, perhaps a PyTorch checkpoint (.bin, .pt)"},
	{"GGUF", 4, "this is a GGUF file"},
	{"\x28\xb5\x2f\xfd", 4, "this is compressed with zstd: decompress it first"},
	{"\x1f\x8b", 2, "this is compressed with gzip: decompress it first"},
	{"\x89HDF", 4, "this is an HDF5 file"},
	{"\x80\2", 2, "this is a pickle, perhaps a PyTorch checkpoint (.bin, .pt)"},
	{"\x80\3", 2, "this is a pickle, perhaps a PyTorch checkpoint (.bin, .pt)"},
	{"\x80\4", 2, "this is a pickle, perhaps a PyTorch checkpoint (.bin, .pt)"},
	{"\x80\5", 2, "this is a pickle, perhaps a PyTorch checkpoint (.bin, .pt)"},
	{"<", 1, "this is HTML or XML, perhaps an error page: download the file again"},
	{"{", 1, "this is JSON without the 8 bytes of length before it"},
};

static uint64_t le64(const uint8_t *bytes)
{
	uint64_t value = 0;

	for (int i = 7; i >= 0; i--)
		value = value << 8 | bytes[i];
	return value;
}

/* What else the file could be. Never NULL. */
static const char *hint_of(const uint8_t *first, size_t got, uint64_t file_bytes)
{
	uint64_t swapped = __builtin_bswap64(le64(first));
	size_t skipped = 0;

	for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++)
		if (got >= others[i].n && memcmp(first, others[i].bytes, others[i].n) == 0)
			return others[i].hint;
	while (skipped < got && strchr(" \t\r\n", first[skipped]) && first[skipped])
		skipped++;
	if (skipped > 0 && skipped < got && (first[skipped] == '<' || first[skipped] == '{'))
		return "this is text (HTML or JSON), not safetensors";
	if (swapped <= HR__HEADER_MAX_BYTES && swapped + HR__FRAME_BYTES <= file_bytes)
		return "the length looks big-endian; safetensors has it little-endian";
	return "this is not a safetensors file, or its beginning is damaged";
}

int hr__header_frame(const uint8_t *first, size_t got, uint64_t file_bytes, uint64_t *json_bytes)
{
	const struct hr__where where = {.stage = "header", .offset = 0};
	uint64_t n;

	*json_bytes = 0;
	if (file_bytes < HR__FRAME_BYTES || got < HR__FRAME_BYTES)
		return hr__fail_at(&where, HR_E_SMALL,
				   "the file has %" PRIu64 " bytes, safetensors has at least 8: download it again",
				   got < file_bytes ? (uint64_t)got : file_bytes);
	n = le64(first);
	if (n > HR__HEADER_MAX_BYTES)
		return hr__fail_at(&where, HR_E_HEADER_LARGE,
				   "the header length at byte 0 is %" PRIu64
				   ", more than 100000000 are not allowed: %s",
				   n, hint_of(first, got, file_bytes));
	if (n <= file_bytes - HR__FRAME_BYTES) {
		*json_bytes = n;
		return 0;
	}
	/* Behind a plausible length, the opening brace tells a file cut short from one of another kind. */
	if (got > HR__FRAME_BYTES && first[HR__FRAME_BYTES] == '{')
		return hr__fail_at(&where, HR_E_HEADER_LENGTH,
				   "the header length at byte 0 is %" PRIu64 ", but the file ends after %" PRIu64
				   " bytes: it is truncated, download it again",
				   n, file_bytes);
	return hr__fail_at(&where, HR_E_HEADER_LENGTH,
			   "the header length at byte 0 is %" PRIu64 ", but the file ends after %" PRIu64 " bytes: %s",
			   n, file_bytes, hint_of(first, got, file_bytes));
}
