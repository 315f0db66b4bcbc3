/* SPDX-License-Identifier: Apache-2.0 */
/* "headrace store ls": what is in a store: its models with their sizes, or the files of one, and the space there is. */
#include "json_writer.h"
#include "store_actions.h"

#include <inttypes.h>
#include <string.h>
#include <time.h>

/* ---- the store ---- */

static void put_store(const struct hr_store_info *info, const char *path)
{
	char uuid[37], free_bytes[32], largest[32], data[32], more[32];

	cli_uuid(uuid, info->uuid);
	printf("store        %s%s%s%s (%s), %s\n", path, info->name[0] ? ", '" : "", info->name,
	       info->name[0] ? "'" : "", info->kind, uuid);
	printf("generation   %" PRIu64 ", of %u model%s in %u objects\n", info->generation, info->n_models,
	       info->n_models == 1 ? "" : "s", info->n_objects);
	printf("free         %s of %s, %s in one piece\n", cli_human(free_bytes, info->free_bytes),
	       cli_human(data, info->data_bytes), cli_human(largest, info->largest_free_bytes));
	if (info->retired_bytes)
		printf("given up     %s; 'headrace store reclaim %s' frees what nobody reads any more\n",
		       cli_human(more, info->retired_bytes), path);
	if (info->n_unbound)
		printf("unfinished   %u object%s of an interrupted import, %s; import again to go on, or reclaim\n",
		       info->n_unbound, info->n_unbound == 1 ? "" : "s", cli_human(more, info->unbound_bytes));
}

static void json_store(struct cli_json *json, const struct hr_store_info *info)
{
	char text[65];

	cli_uuid(text, info->uuid);
	cli_json_text(json, "uuid", text);
	cli_json_text(json, "name", info->name);
	cli_json_text(json, "kind", info->kind);
	cli_json_u64(json, "generation", info->generation);
	cli_json_u64(json, "floor_generation", info->floor_generation);
	cli_hex(text, info->body_sha256, 32);
	cli_json_text(json, "body_sha256", text);
	cli_json_u64(json, "region_bytes", info->region_bytes);
	cli_json_u64(json, "data_bytes", info->data_bytes);
	cli_json_u64(json, "live_bytes", info->live_bytes);
	cli_json_u64(json, "free_bytes", info->free_bytes);
	cli_json_u64(json, "largest_free_bytes", info->largest_free_bytes);
	cli_json_u64(json, "retired_bytes", info->retired_bytes);
	cli_json_u64(json, "unbound_bytes", info->unbound_bytes);
	cli_json_u64(json, "objects", info->n_objects);
	cli_json_u64(json, "unbound_objects", info->n_unbound);
	cli_json_u64(json, "lba_bytes", info->lba_bytes);
}

/* ---- models ---- */

static void put_models(hr_store *store, const struct hr_store_info *info)
{
	struct hr_store_model_info model = HR_STORE_MODEL_INFO_INIT;
	size_t width = 5;
	char size[32];

	for (uint32_t i = 0; i < info->n_models; i++)
		if (hr_store_model(store, i, &model) == 0 && cli_name_width(model.name, model.name_len) > width)
			width = cli_name_width(model.name, model.name_len);
	if (info->n_models)
		printf("\n%-*s  %11s  %6s  %5s  %10s\n", (int)width, "MODEL", "SIZE", "SHARDS", "FILES", "GENERATION");
	for (uint32_t i = 0; i < info->n_models && hr_store_model(store, i, &model) == 0; i++) {
		cli_pad(stdout, cli_put_name(stdout, model.name, model.name_len), width);
		printf("  %11s  %6u  %5u  %10" PRIu64 "\n", cli_human(size, model.bytes), model.n_shards, model.n_files,
		       model.created_generation);
	}
}

static void json_model(struct cli_json *json, const struct hr_store_model_info *model)
{
	char uuid[37];

	cli_uuid(uuid, model->uuid);
	cli_json_bytes(json, "name", model->name, model->name_len);
	cli_json_text(json, "uuid", uuid);
	cli_json_bytes(json, "provenance", model->provenance, model->provenance_len);
	cli_json_u64(json, "bytes", model->bytes);
	cli_json_u64(json, "files", model->n_files);
	cli_json_u64(json, "shards", model->n_shards);
	cli_json_u64(json, "created_generation", model->created_generation);
}

static void json_models(struct cli_json *json, hr_store *store, uint32_t n)
{
	struct hr_store_model_info model = HR_STORE_MODEL_INFO_INIT;

	cli_json_array(json, "models");
	for (uint32_t i = 0; i < n && hr_store_model(store, i, &model) == 0; i++) {
		cli_json_object(json, NULL);
		json_model(json, &model);
		cli_json_end(json);
	}
	cli_json_end(json);
}

/* ---- files of one ---- */

static bool get_file(hr_store *store, uint32_t model, uint32_t i, struct hr_store_file_info *file,
		     struct hr_store_object_info *object)
{
	*file = (struct hr_store_file_info)HR_STORE_FILE_INFO_INIT;
	*object = (struct hr_store_object_info)HR_STORE_OBJECT_INFO_INIT;
	return hr_store_file(store, model, i, file) == 0 && hr_store_object(store, file->object, object) == 0;
}

static void put_files(hr_store *store, uint32_t number, uint32_t n)
{
	struct hr_store_object_info object;
	struct hr_store_file_info file;
	char size[32];

	printf("%15s  %15s  %11s  FILE\n", "OFFSET", "BYTES", "");
	for (uint32_t i = 0; i < n && get_file(store, number, i, &file, &object); i++) {
		printf("%15" PRIu64 "  %15" PRIu64 "  %11s  ", object.offset, object.bytes,
		       cli_human(size, object.bytes));
		cli_put_name(stdout, file.name, file.name_len);
		putchar('\n');
	}
}

static void json_files(struct cli_json *json, hr_store *store, uint32_t number, uint32_t n)
{
	struct hr_store_object_info object;
	struct hr_store_file_info file;
	char text[65];

	cli_json_array(json, "content");
	for (uint32_t i = 0; i < n && get_file(store, number, i, &file, &object); i++) {
		cli_json_object(json, NULL);
		cli_json_bytes(json, "name", file.name, file.name_len);
		cli_json_u64(json, "bytes", object.bytes);
		cli_json_u64(json, "offset", object.offset);
		cli_json_bool(json, "shard", object.is_shard);
		cli_json_u64(json, "tensors", object.n_tensors);
		cli_hex(text, object.sha256, 32);
		cli_json_text(json, "sha256", text);
		cli_json_end(json);
	}
	cli_json_end(json);
}

/* ---- the action ---- */

static int list_model(const struct cli_args *args, hr_store *store)
{
	struct hr_store_model_info model = HR_STORE_MODEL_INFO_INIT;
	struct cli_json json;
	uint32_t number;

	if (hr_store_find(store, args->names[2], &number) || hr_store_model(store, number, &model))
		return cli_fail_last(args);
	if (!args->json) {
		put_files(store, number, model.n_files);
		return 0;
	}
	cli_json_start(&json, stdout);
	json_model(&json, &model);
	json_files(&json, store, number, model.n_files);
	cli_json_finish(&json);
	return 0;
}

static int list_store(const struct cli_args *args, hr_store *store)
{
	struct hr_store_info info = HR_STORE_INFO_INIT;
	struct cli_json json;

	if (hr_store_stats(store, &info))
		return cli_fail_last(args);
	if (!args->json) {
		put_store(&info, args->names[1]);
		put_models(store, &info);
		return 0;
	}
	cli_json_start(&json, stdout);
	cli_json_text(&json, "path", args->names[1]);
	json_store(&json, &info);
	json_models(&json, store, info.n_models);
	cli_json_finish(&json);
	return 0;
}

int cli_store_ls(const struct cli_args *args)
{
	hr_store *store;
	int status = cli_store_open(args, 0, &store);

	if (status)
		return status;
	status = args->n_names > 2 ? list_model(args, store) : list_store(args, store);
	hr_store_close(store);
	return status;
}
