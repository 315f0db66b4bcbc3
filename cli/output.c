/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How the command speaks. Results go to stdout, messages to stderr as "headrace: <one sentence>". With
 * --json, a failure is an object on stdout too, so that a program that reads stdout always finds one.
 * What comes from files or from the command line (a shell's * puts names of files there) is escaped before it reaches a
 * terminal.
 */
#include "cli.h"

#include "json_writer.h"
#include "utf8.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <string.h>

static void report(const struct cli_args *args, const struct hr_error *error)
{
	fflush(stdout);
	fputs("headrace: ", stderr);
	cli_put_name(stderr, error->message, strlen(error->message));
	putc('\n', stderr);
	if (!args || !args->json)
		return;

	struct cli_json json;

	cli_json_start(&json, stdout);
	cli_json_object(&json, "error");
	cli_json_i64(&json, "code", error->code);
	cli_json_text(&json, "name", hr_error_name(error->code));
	cli_json_text(&json, "message", error->message);
	cli_json_text(&json, "path", error->path);
	cli_json_text(&json, "tensor", error->tensor);
	if (error->offset == HR_NO_OFFSET)
		cli_json_null(&json, "offset");
	else
		cli_json_u64(&json, "offset", error->offset);
	cli_json_text(&json, "stage", error->stage);
	cli_json_i64(&json, "system", error->system);
	cli_json_finish(&json);
}

static void report_text(const struct cli_args *args, int code, const char *text)
{
	const struct hr_error error = {
		.code = code, .offset = HR_NO_OFFSET, .stage = "command", .path = "", .tensor = "", .message = text};

	report(args, &error);
}

int cli_fail(const struct cli_args *args, int code, const char *format, ...)
{
	char text[2048];
	va_list list;

	va_start(list, format);
	vsnprintf(text, sizeof(text), format, list);
	va_end(list);
	report_text(args, code, text);
	return code == HR_E_OPTS ? CLI_USAGE : CLI_BAD;
}

int cli_usage(const struct cli_args *args, const char *format, ...)
{
	char text[2048];
	va_list list;

	va_start(list, format);
	vsnprintf(text, sizeof(text), format, list);
	va_end(list);
	report_text(args, HR_E_OPTS, text);
	if (args && args->command)
		fprintf(stderr, "headrace: see 'headrace help %s'\n", args->command->name);
	else
		fprintf(stderr, "headrace: see 'headrace help'\n");
	return CLI_USAGE;
}

int cli_fail_with(const struct cli_args *args, const struct hr_error *error)
{
	report(args, error);
	return CLI_BAD;
}

int cli_fail_last(const struct cli_args *args)
{
	return cli_fail_with(args, hr_error_last());
}

int cli_fail_setup(const struct cli_args *args)
{
	int code = hr_error_last()->code;

	report(args, hr_error_last());
	return code == HR_E_OPTS ? CLI_USAGE : CLI_BAD;
}

void cli_warn(const char *format, ...)
{
	va_list list;

	fflush(stdout);
	fputs("headrace: warning: ", stderr);
	va_start(list, format);
	vfprintf(stderr, format, list);
	va_end(list);
	putc('\n', stderr);
}

void cli_warn_model(const hr_model *model)
{
	for (size_t i = 0;; i++) {
		const char *warning = hr_model_warning(model, i);

		if (!warning)
			break;
		cli_warn("%s", warning);
	}
}

int cli_finish(int status)
{
	errno = 0;
	if (fflush(stdout) == 0 && !ferror(stdout))
		return status;
	if (errno == EPIPE)
		return CLI_PIPE;
	fprintf(stderr, "headrace: cannot write to standard output: %s\n", errno ? strerror(errno) : "it was closed");
	return status == CLI_OK ? CLI_BAD : status;
}

static size_t put_escaped(FILE *out, uint32_t point)
{
	char text[16];
	int n;

	if (point == '\n')
		n = snprintf(text, sizeof(text), "\\n");
	else if (point < 0x100)
		n = snprintf(text, sizeof(text), "\\x%02x", (unsigned)point);
	else
		n = snprintf(text, sizeof(text), "\\u%04x", (unsigned)point);
	if (out)
		fputs(text, out);
	return (size_t)n;
}

/* With no stream it only counts. */
size_t cli_put_name(FILE *out, const char *name, size_t len)
{
	size_t columns = 0;

	for (size_t i = 0; i < len;) {
		uint32_t point;
		size_t used = cli_utf8_next(name + i, len - i, &point);

		if (!used || cli_is_unprintable(point)) {
			columns += put_escaped(out, point);
		} else {
			if (out)
				fwrite(name + i, 1, used, out);
			columns++;
		}
		i += used ? used : 1;
	}
	return columns;
}

char *cli_shown_name(const char *name, size_t len)
{
	char *text = NULL;
	size_t text_len = 0;
	FILE *out = open_memstream(&text, &text_len);

	if (!out)
		return cli_text("?");
	cli_put_name(out, name, len);
	fclose(out);
	return text ? text : cli_text("?");
}

size_t cli_name_width(const char *name, size_t len)
{
	return cli_put_name(NULL, name, len);
}

void cli_pad(FILE *out, size_t used, size_t width)
{
	if (used < width)
		fprintf(out, "%*s", (int)(width - used), "");
}

char *cli_human(char *out, uint64_t bytes)
{
	static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
	double value = (double)bytes;
	size_t unit = 0;

	while (value >= 1024 && unit + 1 < CLI_N(units)) {
		value /= 1024;
		unit++;
	}
	if (unit == 0)
		snprintf(out, 32, "%" PRIu64 " B", bytes);
	else
		snprintf(out, 32, "%.*f %s", value < 10 ? 2 : 1, value, units[unit]);
	return out;
}

char *cli_grouped(char *out, uint64_t n)
{
	char digits[24];
	int len = snprintf(digits, sizeof(digits), "%" PRIu64, n);
	char *to = out;

	for (int i = 0; i < len; i++) {
		if (i && (len - i) % 3 == 0)
			*to++ = ',';
		*to++ = digits[i];
	}
	*to = '\0';
	return out;
}

void cli_hex(char *out, const uint8_t *bytes, size_t n)
{
	static const char digits[] = "0123456789abcdef";

	for (size_t i = 0; i < n; i++) {
		out[2 * i] = digits[bytes[i] >> 4];
		out[2 * i + 1] = digits[bytes[i] & 15];
	}
	out[2 * n] = '\0';
}
