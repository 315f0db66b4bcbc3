/* SPDX-License-Identifier: Apache-2.0 */
#include "storetest.h"

#include "core/hash.h"
#include "store/copy_out.h"

char *store_sources;

uint64_t models_fingerprint(const struct hr__manifest *manifest)
{
	static const struct hr__hash_key key = {3, 4};
	uint64_t sum = 0;

	for (uint32_t m = 0; m < manifest->models.n; m++) {
		struct hr__model_record model;

		hr__manifest_model(manifest, m, &model);
		for (uint32_t i = 0; i < model.n_members; i++) {
			uint8_t text[2 * HR__MAX_NAME + 64];
			struct hr__member member;
			struct hr__object object;
			size_t n = 0;

			hr__manifest_member(manifest, model.first_member + i, &member);
			hr__manifest_object(manifest, member.object, &object);
			memcpy(text, model.name, model.name_len);
			n = model.name_len;
			text[n++] = '/';
			memcpy(text + n, member.name, member.name_len);
			n += member.name_len;
			memcpy(text + n, object.payload_sha256, 32);
			sum += hr__hash(&key, text, n + 32);
		}
	}
	return sum;
}

bool objects_are_right(struct hr__snapshot *snapshot)
{
	for (uint32_t i = 0; i < snapshot->manifest.objects.n; i++) {
		struct hr__object object;

		hr__manifest_object(&snapshot->manifest, i, &object);
		if (hr__object_copy(&(struct hr__copy){.region = snapshot->region,
						       .store_uuid = snapshot->label.uuid,
						       .object = &object,
						       .fd = -1}))
			return false;
	}
	return true;
}

static void make_source(const char *name, const char *const *shards, size_t n, uint64_t seed)
{
	char *dir = path_in(store_sources, name), command[600];

	snprintf(command, sizeof(command), "mkdir -p %s", dir);
	assert_int_equal(system(command), 0);
	for (size_t i = 0; i < n; i++) {
		uint64_t more = i == 0 ? 0 : seed + i; /* the first is the same in all */
		const struct test_tensor tensors[] = {{"w", "F32", 4000 + 4 * more}, {"b", "U8", 100 + i}};
		char *path = path_in(dir, shards[i]);

		write_safetensors(path, tensors, 2, more);
		free(path);
	}
	snprintf(command, sizeof(command), "%s/config.json", dir);
	write_file(command, name, strlen(name));
	free(dir);
}

int make_store_sources(void **state)
{
	static const char *const three[] = {"m-1.safetensors", "m-2.safetensors", "m-3.safetensors"};

	(void)state;
	store_sources = make_temp_dir();
	make_source("a", three, 2, 10);
	make_source("b", three, 3, 20);
	make_source("c", three, 2, 30);
	make_source("d", three, 3, 40);
	make_source("e", three, 1, 50);
	return 0;
}

int remove_store_sources(void **state)
{
	(void)state;
	remove_tree(store_sources);
	free(store_sources);
	return 0;
}
