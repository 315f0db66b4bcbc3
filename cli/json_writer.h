/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Writes JSON to a stream. Keys are NULL inside arrays. Whatever bytes a text has, what comes out is valid
 * JSON in UTF-8: control characters are escaped, bytes that are not UTF-8 become U+FFFD. Numbers that JSON
 * cannot hold become null. Writing errors are left to cli_finish().
 */
#ifndef HR_CLI_JSON_WRITER_H
#define HR_CLI_JSON_WRITER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#define CLI_JSON_DEPTH 16

struct cli_json {
	FILE *out;
	unsigned depth;
	bool has_items[CLI_JSON_DEPTH];
	char closer[CLI_JSON_DEPTH];
};

void cli_json_start(struct cli_json *json, FILE *out); /* opens the outermost object */
void cli_json_finish(struct cli_json *json);           /* closes whatever is open, ends the line */
void cli_json_object(struct cli_json *json, const char *key);
void cli_json_array(struct cli_json *json, const char *key);
void cli_json_end(struct cli_json *json); /* of the innermost object or array */
void cli_json_text(struct cli_json *json, const char *key, const char *text);
void cli_json_bytes(struct cli_json *json, const char *key, const char *text, size_t len);
/* A pair whose key is not ours. */
void cli_json_pair(struct cli_json *json, const char *key, size_t key_len, const char *text, size_t len);
void cli_json_u64(struct cli_json *json, const char *key, uint64_t value);
void cli_json_i64(struct cli_json *json, const char *key, int64_t value);
void cli_json_real(struct cli_json *json, const char *key, double value);
void cli_json_bool(struct cli_json *json, const char *key, bool value);
void cli_json_null(struct cli_json *json, const char *key);

#endif
