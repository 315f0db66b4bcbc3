/* SPDX-License-Identifier: Apache-2.0 */
/* What can be used here, and why not: the rows of `headrace engines`. Opens nothing for longer than it takes to ask. */
#include "loader.h"

#include <stdio.h>
#include <string.h>

#define MAX_DEVICES 16

struct rows {
	struct hr_probe_row *rows;
	size_t n_rows, n_found;
};

static void add(struct rows *rows, const char *kind, const char *name, bool usable, const char *reason)
{
	if (rows->n_found < rows->n_rows) {
		struct hr_probe_row *row = &rows->rows[rows->n_found];

		*row = (struct hr_probe_row){.usable = usable};
		snprintf(row->kind, sizeof(row->kind), "%s", kind);
		snprintf(row->name, sizeof(row->name), "%s", name);
		snprintf(row->reason, sizeof(row->reason), "%.*s", (int)sizeof(row->reason) - 1, reason);
	}
	rows->n_found++;
}

/* Whether there is a device that is no host memory; if not, why. */
static bool has_gpu(char *reason, size_t reason_bytes)
{
	struct hr__device_error error = {.reason = "no device of another kind than cpu is there"};
	int n = 0;

	for (const struct hr__device_ops *const *ops = hr__devices(); *ops; ops++)
		if (!((*ops)->caps & HR__DEVICE_HOST) && (*ops)->probe(&n, NULL, 0, &error) == 0)
			return true;
	snprintf(reason, reason_bytes, "it feeds GPUs only: %.180s", error.reason);
	return false;
}

/* What an engine does here, with the model's first file in view. */
static void describe_engine(const struct hr__engine_ops *ops, const struct hr__file *file, char *out, size_t out_bytes)
{
	const char *kind = ops->caps & HR__ENGINE_QUEUED ? "queued reads by one thread, for cold bytes"
							 : "blocking reads by several threads";
	const char *fs = file ? hr__os_fs_name(file->fs_magic) : NULL;
	char text[64];

	if (ops->staging == HR__STAGING_WINDOW)
		snprintf(
			out, out_bytes,
			"only when asked for: one core registers the page cache's own pages with the GPU, which fetches them, and "
			"whose other users wait meanwhile");
	else if (ops->caps & HR__ENGINE_RAW_ONLY)
		snprintf(out, out_bytes,
			 "for models opened through uGDS: straight from their disk into a window of GPU memory");
	else if (ops->staging == HR__STAGING_DEVICE)
		snprintf(out, out_bytes,
			 "only when asked for: straight from storage into a window of GPU memory, registered once");
	else if (!file)
		snprintf(out, out_bytes, "%s; this process may use %u CPUs", kind, hr__os_cpus());
	else if (file->raw)
		snprintf(out, out_bytes, "%s; through uGDS, by way of GPU and host memory", kind);
	else if (file->direct_fd >= 0)
		snprintf(out, out_bytes, "%s; O_DIRECT with %u byte blocks on %s", kind, file->offset_align,
			 fs ? fs : "this file system");
	else
		snprintf(out, out_bytes, "%s; through the page cache only: O_DIRECT is refused by %s (%s)", kind,
			 fs ? fs : "the file system", strerror_r(file->direct_errno, text, sizeof(text)));
}

static void add_engines(struct rows *rows, const struct hr__file *file)
{
	for (const struct hr__engine_ops *const *ops = hr__engines(); *ops; ops++) {
		char reason[240] = "";
		bool usable = (*ops)->probe(file, reason, sizeof(reason)) == 0;

		if (!hr_engine_name((*ops)->id) || strcmp(hr_engine_name((*ops)->id), (*ops)->name) != 0)
			continue; /* a test's */
		if (usable && file && file->raw && !((*ops)->caps & HR__ENGINE_RAW)) {
			usable = false;
			snprintf(reason, sizeof(reason),
				 "the model was opened through uGDS, which this engine cannot read");
		}
		if (usable && (*ops)->staging != HR__STAGING_HOST)
			usable = has_gpu(reason, sizeof(reason));
		if (usable && !reason[0])
			describe_engine(*ops, file, reason, sizeof(reason));
		add(rows, "engine", (*ops)->name, usable, reason);
	}
}

static void add_devices(struct rows *rows)
{
	for (const struct hr__device_ops *const *ops = hr__devices(); *ops; ops++) {
		char about[MAX_DEVICES][240];
		struct hr__device_error error = {0};
		char name[16];
		int n = 0;

		memset(about, 0, sizeof(about));
		if ((*ops)->probe(&n, about, MAX_DEVICES, &error)) {
			add(rows, "device", (*ops)->name, false, error.reason);
			continue;
		}
		for (int i = 0; i < n && i < MAX_DEVICES; i++) {
			if ((*ops)->caps & HR__DEVICE_HOST)
				snprintf(name, sizeof(name), "%s", (*ops)->name);
			else
				snprintf(name, sizeof(name), "%s:%d", (*ops)->name, i);
			add(rows, "device", name, true, about[i]);
		}
	}
}

int hr_probe(hr_model *model, struct hr_probe_row *rows, size_t n_rows, size_t *n_found)
{
	struct rows own = {rows, n_rows, 0};
	const struct hr__file *file = NULL;

	if (!n_found || (!rows && n_rows))
		return hr__fail(HR_E_OPTS, "hr_probe: %s is NULL", n_found ? "rows" : "n_found");
	if (model && hr__model_n_sources(model) > 0)
		file = &hr__model_source(model, 0)->file;
	add_engines(&own, file);
	add_devices(&own);
	*n_found = own.n_found;
	return 0;
}
