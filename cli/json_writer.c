/* SPDX-License-Identifier: Apache-2.0 */
/*
 * See json_writer.h. Layout: one line for each item of the outer two levels, so that a long listing can be
 * read and compared line by line; what is deeper stays on its line.
 */
#include "json_writer.h"

#include "utf8.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#define LINES_TO_DEPTH 2

static void put_string(FILE *out, const char *text, size_t len)
{
	putc('"', out);
	for (size_t i = 0; i < len;) {
		uint32_t point;
		size_t used = cli_utf8_next(text + i, len - i, &point);

		if (!used) {
			fputs("\\ufffd", out);
			used = 1;
		} else if (point == '"' || point == '\\') {
			putc('\\', out);
			putc((int)point, out);
		} else if (point == '\n') {
			fputs("\\n", out);
		} else if (cli_is_unprintable(point)) {
			fprintf(out, "\\u%04x", (unsigned)point);
		} else {
			fwrite(text + i, 1, used, out);
		}
		i += used;
	}
	putc('"', out);
}

static void begin_item(struct cli_json *json, const char *key, size_t key_len)
{
	unsigned top = json->depth - 1;

	if (json->has_items[top])
		putc(',', json->out);
	if (json->depth <= LINES_TO_DEPTH)
		fprintf(json->out, "\n%*s", (int)(2 * json->depth), "");
	else if (json->has_items[top])
		putc(' ', json->out);
	json->has_items[top] = true;
	if (key) {
		put_string(json->out, key, key_len);
		fputs(": ", json->out);
	}
}

static void begin(struct cli_json *json, const char *key)
{
	begin_item(json, key, key ? strlen(key) : 0);
}

static void open_level(struct cli_json *json, char opener, char closer)
{
	putc(opener, json->out);
	json->has_items[json->depth] = false;
	json->closer[json->depth] = closer;
	json->depth++;
}

void cli_json_start(struct cli_json *json, FILE *out)
{
	*json = (struct cli_json){.out = out};
	open_level(json, '{', '}');
}

void cli_json_object(struct cli_json *json, const char *key)
{
	begin(json, key);
	open_level(json, '{', '}');
}

void cli_json_array(struct cli_json *json, const char *key)
{
	begin(json, key);
	open_level(json, '[', ']');
}

void cli_json_end(struct cli_json *json)
{
	json->depth--;
	if (json->has_items[json->depth] && json->depth < LINES_TO_DEPTH)
		fprintf(json->out, "\n%*s", (int)(2 * json->depth), "");
	putc(json->closer[json->depth], json->out);
}

void cli_json_finish(struct cli_json *json)
{
	while (json->depth)
		cli_json_end(json);
	putc('\n', json->out);
}

void cli_json_bytes(struct cli_json *json, const char *key, const char *text, size_t len)
{
	begin(json, key);
	put_string(json->out, text, len);
}

void cli_json_text(struct cli_json *json, const char *key, const char *text)
{
	cli_json_bytes(json, key, text, strlen(text));
}

void cli_json_pair(struct cli_json *json, const char *key, size_t key_len, const char *text, size_t len)
{
	begin_item(json, key, key_len);
	put_string(json->out, text, len);
}

void cli_json_u64(struct cli_json *json, const char *key, uint64_t value)
{
	begin(json, key);
	fprintf(json->out, "%" PRIu64, value);
}

void cli_json_i64(struct cli_json *json, const char *key, int64_t value)
{
	begin(json, key);
	fprintf(json->out, "%" PRId64, value);
}

void cli_json_real(struct cli_json *json, const char *key, double value)
{
	begin(json, key);
	if (isfinite(value))
		fprintf(json->out, "%.9g", value);
	else
		fputs("null", json->out);
}

void cli_json_bool(struct cli_json *json, const char *key, bool value)
{
	begin(json, key);
	fputs(value ? "true" : "false", json->out);
}

void cli_json_null(struct cli_json *json, const char *key)
{
	begin(json, key);
	fputs("null", json->out);
}
