/* SPDX-License-Identifier: Apache-2.0 */
/*
 * See faults.h.
 */
#include "faults.h"

#include "json_writer.h"

#include <stdarg.h>
#include <string.h>

static bool is_known(const struct cli_faults *faults, const char *message)
{
	for (size_t i = 0; i < faults->n_kept; i++) {
		if (strcmp(faults->kept[i].message, message) == 0)
			return true;
	}
	return false;
}

void cli_faults_add(struct cli_faults *faults, const struct hr_error *error)
{
	if (is_known(faults, error->message))
		return;
	faults->n++;
	if (faults->n_kept == CLI_MAX_FAULTS)
		return;
	fprintf(stderr, "headrace: %s\n", error->message);
	faults->kept = cli_grow(faults->kept, faults->n_kept + 1, sizeof(*faults->kept));
	faults->kept[faults->n_kept++] = (struct cli_fault){
		.code = error->code,
		.offset = error->offset,
		.stage = cli_text("%s", error->stage),
		.path = cli_text("%s", error->path),
		.tensor = cli_text("%s", error->tensor),
		.message = cli_text("%s", error->message),
	};
	if (faults->n_kept == CLI_MAX_FAULTS)
		cli_warn("there are %d faults; the rest is only counted", CLI_MAX_FAULTS);
}

void cli_faults_add_text(struct cli_faults *faults, int code, const char *path, const char *tensor, const char *format,
			 ...)
{
	char text[2048];
	va_list list;

	va_start(list, format);
	vsnprintf(text, sizeof(text), format, list);
	va_end(list);

	const struct hr_error error = {.code = code,
				       .offset = HR_NO_OFFSET,
				       .stage = "digest",
				       .path = path,
				       .tensor = tensor,
				       .message = text};

	cli_faults_add(faults, &error);
}

static void json_fault(const struct cli_fault *fault, const char *key, struct cli_json *json)
{
	cli_json_object(json, key);
	cli_json_i64(json, "code", fault->code);
	cli_json_text(json, "name", hr_error_name(fault->code));
	cli_json_text(json, "message", fault->message);
	cli_json_text(json, "path", fault->path);
	cli_json_text(json, "tensor", fault->tensor);
	if (fault->offset == HR_NO_OFFSET)
		cli_json_null(json, "offset");
	else
		cli_json_u64(json, "offset", fault->offset);
	cli_json_text(json, "stage", fault->stage);
	cli_json_end(json);
}

void cli_faults_json(const struct cli_faults *faults, struct cli_json *json)
{
	if (faults->n_kept)
		json_fault(&faults->kept[0], "error", json);
	cli_json_array(json, "faults");
	for (size_t i = 0; i < faults->n_kept; i++)
		json_fault(&faults->kept[i], NULL, json);
	cli_json_end(json);
}

void cli_faults_free(struct cli_faults *faults)
{
	for (size_t i = 0; i < faults->n_kept; i++) {
		cli_free(faults->kept[i].stage);
		cli_free(faults->kept[i].path);
		cli_free(faults->kept[i].tensor);
		cli_free(faults->kept[i].message);
	}
	cli_free(faults->kept);
	*faults = (struct cli_faults){0};
}
