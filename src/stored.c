/* SPDX-License-Identifier: Apache-2.0 */
#include "stored.h"
#include "stored_ugds.h"

#include "core/error.h"
#include "core/mem.h"
#include "core/os_library.h"
#include "store/pin.h"

#include <stdio.h>
#include <string.h>

#define PREFIX "store:"

bool hr__store_name_is(const char *name)
{
	return strncmp(name, PREFIX, strlen(PREFIX)) == 0;
}

/* A name taken apart, as far as that goes without a look at the store. */
struct parts {
	char *path;          /* of the region or the sidecar */
	const char *what;    /* behind the '#'; NULL: there is none */
	uint64_t generation; /* of the '@'; 0: none */
	size_t at, behind;   /* where in `what` the "@41" begins and ends */
	struct hr__snapshot_want want;
	struct hr__ugds_place ugds; /* node NULL: the kernel has the device */
};

/* "@41" that a slash or the end follows; the last such place. */
static void find_generation(struct parts *parts)
{
	const char *what = parts->what;

	for (const char *at = strchr(what, '@'); at; at = strchr(at + 1, '@')) {
		uint64_t value = 0;
		const char *c = at + 1;

		for (; *c >= '0' && *c <= '9' && value < UINT64_C(1) << 59; c++)
			value = value * 10 + (uint64_t)(*c - '0');
		if (c == at + 1 || value == 0 || (*c && *c != '/'))
			continue;
		parts->generation = value;
		parts->at = (size_t)(at - what);
		parts->behind = (size_t)(c - what);
	}
}

/* ---- which model ---- */

static bool find(const struct hr__view *view, const char *name, size_t length, uint32_t *model)
{
	return hr__manifest_find_model(&hr__view_snapshot(view)->manifest, name, length, model);
}

/* The longest beginning of `text`, up to its end or to a slash, that is a model's name. */
static bool find_longest(const struct hr__view *view, const char *text, uint32_t *model, size_t *length)
{
	for (*length = strlen(text); *length > 0; (*length)--)
		if ((text[*length] == '\0' || text[*length] == '/') && find(view, text, *length, model))
			return true;
	return false;
}

/* "a, b, c and 7 more" */
static const char *enumerate(const struct hr__view *view, char *out, size_t out_bytes)
{
	const struct hr__manifest *manifest = &hr__view_snapshot(view)->manifest;
	uint32_t n = manifest->models.n, i;
	size_t used = 0;

	for (i = 0; i < n && i < 6; i++) {
		struct hr__model_record model;
		char name[100];

		hr__manifest_model(manifest, i, &model);
		hr__escape(name, sizeof(name), model.name, model.name_len);
		used += (size_t)snprintf(out + used, out_bytes - used, "%s%s", i ? ", " : "", name);
	}
	if (i < n)
		snprintf(out + used, out_bytes - used, " and %u more", n - i);
	return out;
}

static int fail_model(const struct parts *parts, const struct hr__view *view)
{
	const struct hr__where at = {.stage = "open", .path = parts->path, .offset = HR_NO_OFFSET};
	const struct hr__snapshot *snapshot = hr__view_snapshot(view);
	char names[6 * 102 + 40], shown[128];

	if (snapshot->manifest.models.n == 0)
		return hr__fail_at(&at, HR_E_NOTFOUND,
				   "%s holds no model; `headrace store import %s DIRECTORY --as NAME` brings one in",
				   parts->path, parts->path);
	enumerate(view, names, sizeof(names));
	if (!parts->what || !parts->what[0])
		return hr__fail_at(&at, HR_E_AMBIGUOUS, "%s holds %u models (%s); say which: " PREFIX "%s#MODEL",
				   parts->path, snapshot->manifest.models.n, names, parts->path);
	return hr__fail_at(&at, HR_E_NOTFOUND, "%s has no model '%s' in generation %" PRIu64 "; it has %s", parts->path,
			   hr__escape(shown, sizeof(shown), parts->what, HR_STRLEN), snapshot->root.generation, names);
}

/* ---- opening ---- */

/* Takes over the view. `name` (the model's) and `member` are copied. */
static int fill(const struct parts *parts, struct hr__view *view, uint32_t model, const char *member,
		struct hr__stored *out)
{
	struct hr__model_record record;
	char generation[32] = "";

	hr__manifest_model(&hr__view_snapshot(view)->manifest, model, &record);
	if (parts->generation)
		snprintf(generation, sizeof(generation), "@%" PRIu64, parts->generation);
	out->name = hr__format(PREFIX "%s#%.*s%s", parts->path, (int)record.name_len, record.name, generation);
	out->member = hr__strdup(member);
	hr__folder_of_view(out->name, view, model, &out->folder);
	if (out->name && out->member)
		return 0;
	hr__stored_close(out);
	return HR_E_NOMEM;
}

/* Finds what is meant in a view that is open. False: nothing, and *out is as it was. */
static bool resolve_in(struct parts *parts, struct hr__view *view, const char *text, struct hr__stored *out, int *code)
{
	uint32_t model = 0;
	size_t length = 0;

	if (!text[0] && hr__view_snapshot(view)->manifest.models.n != 1)
		return false;
	if (text[0] && !find_longest(view, text, &model, &length))
		return false;
	*code = fill(parts, view, model, text[length] ? text + length + 1 : "", out);
	return true;
}

/* What is behind the '#' with the generation's number taken out. */
static char *without_generation(const struct parts *parts)
{
	return hr__format("%.*s%s", (int)parts->at, parts->what, parts->what + parts->behind);
}

/* The name as it stands in the newest generation, then, with "@41" read as a generation, in that one. */
static int resolve(struct parts *parts, const char *path, const struct hr__pin *pin, struct hr__stored *out)
{
	uint64_t generation = parts->generation;
	struct hr__view *view;
	char *text;
	bool found;
	int code = hr__view_open(path, &parts->want, pin, &view);

	if (!code && parts->ugds.node) {
		code = hr__ugds_compare(&parts->ugds, hr__view_snapshot(view));
		if (code)
			hr__view_unref(view);
	}
	if (code)
		return code;
	parts->generation = 0;
	if (resolve_in(parts, view, parts->what ? parts->what : "", out, &code))
		return code;
	parts->generation = generation;
	if (!generation || pin) { /* a manifest says which generation */
		code = fail_model(parts, view);
		hr__view_unref(view);
		return code;
	}
	hr__view_unref(view);
	parts->want.generation = generation;
	text = without_generation(parts);
	code = text ? hr__view_open(path, &parts->want, NULL, &view) : HR_E_NOMEM;
	if (!code) {
		found = resolve_in(parts, view, text, out, &code);
		if (!found) {
			code = fail_model(parts, view);
			hr__view_unref(view);
		}
	}
	hr__free(text);
	return code;
}

static bool is_sidecar(const char *path)
{
	size_t length = strlen(path);

	return length > 5 && strcmp(path + length - 5, ".json") == 0;
}

/* A model that is read through uGDS: the exported manifest says where in the disk the store is. The device cannot be
 * recognised so; the manifest's demands stand for that. */
static int prepare_ugds(struct parts *parts, const char *node, const struct hr__sidecar *sidecar)
{
	if (!sidecar->path)
		return hr__fail_at(
			&(struct hr__where){.stage = "open", .path = parts->path, .offset = HR_NO_OFFSET}, HR_E_OPTS,
			"a store is opened through uGDS by its exported manifest, and %s is none: export it while the "
			"kernel has the device (headrace store export), then name " PREFIX "FILE.json#MODEL",
			parts->path);
	parts->ugds = (struct hr__ugds_place){node, parts->path, &sidecar->region};
	parts->want.is_moved = true;
	parts->want.open_region = hr__ugds_region_open;
	parts->want.region_ctx = &parts->ugds;
	return 0;
}

static int fail_region(const struct parts *parts, const char *region)
{
	return hr__fail_at(
		&(struct hr__where){.stage = "open", .path = region, .offset = HR_NO_OFFSET}, HR_E_NOTFOUND,
		"%s, where %s says that its store is, does not exist; if the device belongs to uGDS now, name its "
		"node (ugds, --ugds /dev/ugds_drv0)",
		region, parts->path);
}

static int resolve_parts(struct parts *parts, const struct hr_model_opts *opts, struct hr__stored *out)
{
	struct hr__sidecar sidecar = {.path = NULL}, expected = {.path = NULL};
	const struct hr__pin *pin = NULL;
	int code = 0;

	if (parts->what)
		find_generation(parts);
	if (is_sidecar(parts->path)) {
		code = hr__sidecar_read(parts->path, &sidecar);
		pin = &sidecar.pin;
	}
	if (!code && opts->expect) {
		code = hr__sidecar_read(opts->expect, &expected);
		pin = &expected.pin;
	}
	if (!code && opts->ugds)
		code = prepare_ugds(parts, opts->ugds, &sidecar);
	else if (!code && sidecar.path && !hr__os_is_there(sidecar.path))
		code = fail_region(parts, sidecar.path);
	if (!code)
		code = resolve(parts, sidecar.path ? sidecar.path : parts->path, pin, out);
	hr__sidecar_free(&sidecar);
	hr__sidecar_free(&expected);
	return code;
}

/* With the path up to `hash`, or all of `rest`. */
static int resolve_at(const char *name, const char *rest, const char *hash, const struct hr_model_opts *opts,
		      struct hr__stored *out)
{
	struct parts parts = {.what = hash ? hash + 1 : NULL, .want = {.is_moved = opts->flags & HR_MODEL_MOVED}};
	int code;

	parts.path = hash ? hr__strndup(rest, (size_t)(hash - rest)) : hr__strdup(rest);
	if (!parts.path)
		return HR_E_NOMEM;
	if (parts.path[0])
		code = resolve_parts(&parts, opts, out);
	else
		code = hr__fail(HR_E_OPTS, "'%s' names no store; models in stores are named " PREFIX "PATH#MODEL",
				name);
	hr__free(parts.path);
	return code;
}

int hr__store_resolve(const char *name, const struct hr_model_opts *opts, struct hr__stored *out)
{
	const char *rest = name + strlen(PREFIX), *hash = strchr(rest, '#');
	struct hr__error_record first;
	int code;

	*out = (struct hr__stored){.folder = {.fd = -1}};
	code = resolve_at(name, rest, hash, opts, out);
	if (code != HR_E_NOTFOUND || !hash)
		return code;
	hr__error_save(&first); /* what a path without '#' has to say, if none with one leads anywhere */
	while (code == HR_E_NOTFOUND && hash) {
		hash = strchr(hash + 1, '#');
		if (hash)
			code = resolve_at(name, rest, hash, opts, out);
	}
	return code == HR_E_NOTFOUND ? hr__failed(hr__error_restore(&first)) : code;
}

void hr__stored_close(struct hr__stored *stored)
{
	hr__folder_close(&stored->folder);
	hr__free(stored->name);
	hr__free(stored->member);
	*stored = (struct hr__stored){.folder = {.fd = -1}};
}

/* For a list of files. A model that is one file stands for it. */
struct only_file {
	char *name;
	unsigned n;
	bool is_nomem;
};

static int count_file(void *ctx, const char *name)
{
	struct only_file *only = ctx;
	size_t length = strlen(name);

	if (length < 12 || strcmp(name + length - 12, ".safetensors") != 0)
		return 0;
	if (only->n++ == 0) {
		only->name = hr__strdup(name);
		only->is_nomem = !only->name;
	}
	return only->is_nomem;
}

int hr__store_member(const char *name, const struct hr_model_opts *opts, struct hr__source *out)
{
	struct hr__stored stored;
	struct only_file only = {.name = NULL};
	char *path = NULL;
	int code = hr__store_resolve(name, opts, &stored);

	if (code)
		return code;
	if (!stored.member[0])
		hr__view_list(stored.folder.view, stored.folder.model, count_file, &only);
	if (only.is_nomem)
		code = HR_E_NOMEM;
	else if (!stored.member[0] && only.n != 1)
		code = hr__fail_at(&(struct hr__where){.stage = "open", .path = name, .offset = HR_NO_OFFSET},
				   HR_E_AMBIGUOUS, "%s has %u safetensors files; name the ones you mean: %s/FILE", name,
				   only.n, name);
	if (!code) {
		const char *file = only.name ? only.name : stored.member;

		path = hr__folder_path(&stored.folder, file);
		code = path ? hr__folder_source(&stored.folder, file, path, out) : HR_E_NOMEM;
	}
	hr__free(path);
	hr__free(only.name);
	hr__stored_close(&stored);
	return code;
}
