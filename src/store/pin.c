/* SPDX-License-Identifier: Apache-2.0 */
#include "pin.h"

#include "core/error.h"
#include "core/mem.h"
#include "format/json.h"
#include "model/source.h"

#include <fcntl.h>
#include <string.h>

#define MAX_SIDECAR_BYTES (UINT64_C(256) << 20)
#define STAGE             "sidecar"

/* What of a sidecar has been seen. */
struct seen {
	bool format, version, uuid, generation, sha256, path, region;
};

static int digit_of(char c)
{
	return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* Exactly `n` bytes in lower-case hexadecimal; dashes, as a UUID has them, are passed over. */
static bool parse_hex(const char *text, size_t length, uint8_t *out, size_t n)
{
	size_t digits = 0;

	memset(out, 0, n);
	for (size_t i = 0; i < length; i++) {
		int digit = digit_of(text[i]);

		if (text[i] == '-')
			continue;
		if (digit < 0 || digits == 2 * n)
			return false;
		out[digits / 2] = (uint8_t)(out[digits / 2] << 4 | digit);
		digits++;
	}
	return digits == 2 * n;
}

static int take_hex(struct hr__json *json, const char *what, uint8_t *out, size_t n)
{
	struct hr__json_string string;
	int code = hr__json_string(json, what, &string);

	if (!code &&
	    (string.bytes != string.raw_bytes || !parse_hex((const char *)string.raw, string.raw_bytes, out, n)))
		code = hr__json_fail(json, string.raw, HR_E_TYPE, "%s must be %zu hexadecimal digits", what, 2 * n);
	return code;
}

static int take_text(struct hr__json *json, const char *what, char **out)
{
	struct hr__json_string string;
	int code = hr__json_string(json, what, &string);

	if (code)
		return code;
	hr__free(*out);
	*out = hr__malloc(string.bytes + 1);
	if (!*out)
		return HR_E_NOMEM;
	hr__json_decode(&string, *out);
	(*out)[string.bytes] = '\0';
	if (!string.bytes || strlen(*out) != string.bytes)
		return hr__json_fail(json, string.raw, HR_E_TYPE, "%s must be a text without NUL bytes, not empty",
				     what);
	return 0;
}

static int take_format(struct hr__json *json)
{
	struct hr__json_string string;
	int code = hr__json_string(json, "format", &string);

	if (!code && !hr__json_is(&string, "headrace-store-manifest"))
		code = hr__json_fail(json, string.raw, HR_E_FIELD,
				     "this is no manifest of a store: its format must be \"headrace-store-manifest\"");
	return code;
}

static int take_version(struct hr__json *json)
{
	uint64_t version;
	int code = hr__json_u64(json, "version", &version);

	if (!code && version != 1)
		code = hr__fail(HR_E_STORE_VERSION, "the manifest is of version %" PRIu64 ", and this headrace reads 1",
				version);
	return code;
}

/* {"bytes": 1, "lba_bytes": 512, ...}; what is not for reading by is passed over. */
static int take_region(struct hr__json *json, struct hr__pin_region *out)
{
	struct {
		const char *name;
		uint64_t *to;
	} known[] = {{"bytes", &out->bytes},
		     {"base", &out->base},
		     {"device_bytes", &out->device_bytes},
		     {"lba_bytes", &out->lba_bytes}};
	struct hr__json_string key;
	unsigned seen = 0;
	bool more = true;
	int code = hr__json_open(json, HR__JSON_OBJECT, "region");

	while (!code && more) {
		size_t which = 0;

		code = hr__json_member(json, &key, &more);
		if (code || !more)
			break;
		while (which < 4 && !hr__json_is(&key, known[which].name))
			which++;
		if (which < 4 && (seen >> which & 1))
			return hr__json_fail(json, key.raw, HR_E_DUPLICATE, "\"%s\" occurs twice", known[which].name);
		seen |= 1u << which;
		code = which < 4 ? hr__json_u64(json, known[which].name, known[which].to) : hr__json_skip(json);
	}
	return code;
}

static int take_member(struct hr__json *json, const struct hr__json_string *key, struct hr__sidecar *out,
		       struct seen *seen)
{
	struct {
		const char *name;
		bool *seen;
	} known[] = {
		{"format", &seen->format},         {"version", &seen->version},    {"store_uuid", &seen->uuid},
		{"generation", &seen->generation}, {"body_sha256", &seen->sha256}, {"path", &seen->path},
		{"region", &seen->region},
	};
	const size_t n = sizeof(known) / sizeof(known[0]);
	size_t which = 0;

	while (which < n && !hr__json_is(key, known[which].name))
		which++;
	if (which < n && *known[which].seen)
		return hr__json_fail(json, key->raw, HR_E_DUPLICATE, "\"%s\" occurs twice", known[which].name);
	if (which < n)
		*known[which].seen = true;
	switch (which) {
	case 0:
		return take_format(json);
	case 1:
		return take_version(json);
	case 2:
		return take_hex(json, "store_uuid", out->pin.uuid, 16);
	case 3:
		return hr__json_u64(json, "generation", &out->pin.generation);
	case 4:
		return take_hex(json, "body_sha256", out->pin.body_sha256, 32);
	case 5:
		return take_text(json, "path", &out->path);
	case 6:
		return take_region(json, &out->region);
	default:
		return hr__json_skip(json);
	}
}

static int parse(const void *text, size_t bytes, struct hr__sidecar *out)
{
	struct hr__json_string key;
	struct seen seen = {false};
	struct hr__json json;
	bool more = true;
	int code;

	hr__json_start(&json, text, bytes, 0, STAGE);
	code = hr__json_open(&json, HR__JSON_OBJECT, "the manifest");
	while (!code && more) {
		code = hr__json_member(&json, &key, &more);
		if (!code && more)
			code = take_member(&json, &key, out, &seen);
	}
	if (!code)
		code = hr__json_end(&json);
	if (!code && !(seen.format && seen.version && seen.uuid && seen.generation && seen.sha256 && seen.path))
		code = hr__fail(HR_E_FIELD, "the manifest lacks \"%s\"; export it again",
				!seen.format       ? "format"
				: !seen.version    ? "version"
				: !seen.uuid       ? "store_uuid"
				: !seen.generation ? "generation"
				: !seen.sha256     ? "body_sha256"
						   : "path");
	return code;
}

/* "/a/side.json" and "w.img" -> "/a/w.img" */
static int place_path(const char *name, struct hr__sidecar *out)
{
	const char *slash = strrchr(name, '/');
	char *whole;

	if (out->path[0] == '/' || !slash)
		return 0;
	whole = hr__format("%.*s/%s", (int)(slash - name), name, out->path);
	if (!whole)
		return HR_E_NOMEM;
	hr__free(out->path);
	out->path = whole;
	return 0;
}

int hr__sidecar_parse(const char *name, const void *text, size_t bytes, struct hr__sidecar *out)
{
	int code;

	*out = (struct hr__sidecar){.path = NULL};
	code = parse(text, bytes, out);
	if (code)
		hr__error_locate(STAGE, name, NULL, 0);
	else
		code = place_path(name, out);
	if (code)
		hr__sidecar_free(out);
	return code;
}

int hr__sidecar_read(const char *path, struct hr__sidecar *out)
{
	struct hr__source source;
	uint8_t *text = NULL;
	int code = hr__source_open_file(AT_FDCWD, path, path, 0, &source);

	*out = (struct hr__sidecar){.path = NULL};
	if (code)
		return code;
	if (source.bytes > MAX_SIDECAR_BYTES)
		code = hr__fail_at(&(struct hr__where){.stage = STAGE, .path = path, .offset = HR_NO_OFFSET},
				   HR_E_LIMIT, "%s has %" PRIu64 " bytes; a manifest of a store has at most %" PRIu64,
				   path, source.bytes, MAX_SIDECAR_BYTES);
	if (!code) {
		text = hr__malloc((size_t)source.bytes + 1);
		code = text ? hr__source_read(&source, 0, text, (size_t)source.bytes) : HR_E_NOMEM;
	}
	if (!code)
		code = hr__sidecar_parse(path, text, (size_t)source.bytes, out);
	hr__free(text);
	hr__source_close(&source);
	return code;
}

void hr__sidecar_free(struct hr__sidecar *sidecar)
{
	hr__free(sidecar->path);
	sidecar->path = NULL;
}
