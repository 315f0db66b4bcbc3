/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the tests of the cache share: a model of equal groups (a weight, and a norm of odd size), a loader and a cache
 * over it, and a comparison of a lease's bytes with a plain read. Each program includes this once.
 */
#ifndef HR_TESTS_CACHETEST_H
#define HR_TESTS_CACHETEST_H

#include "loadtest.h"

#define N_GROUPS 8
#define LAYER    100000 /* bytes of a layer's weight; the norm beside it is odd */

struct kit {
	char *dir;
	hr_model *model;
	hr_device *device;
	hr_loader *loader;
	hr_cache *cache;
	hr_group *groups[N_GROUPS]; /* equal ones: a weight and a norm */
	hr_group *large;            /* all tensors */
};

static void open_groups(struct kit *kit)
{
	struct test_tensor tensors[2 * N_GROUPS];
	char names[2 * N_GROUPS][40];
	uint64_t all[2 * N_GROUPS];
	char *path;

	kit->dir = make_temp_dir();
	for (size_t i = 0; i < N_GROUPS; i++) {
		snprintf(names[2 * i], 40, "layers.%zu.norm", i);
		snprintf(names[2 * i + 1], 40, "layers.%zu.weight", i);
		tensors[2 * i] = (struct test_tensor){names[2 * i], "U8", 333};
		tensors[2 * i + 1] = (struct test_tensor){names[2 * i + 1], "U8", LAYER};
	}
	path = path_in(kit->dir, "model.safetensors");
	write_safetensors(path, tensors, 2 * N_GROUPS, 5);
	set_time_back(path);
	assert_ok(hr_model_open(path, NULL, &kit->model));
	free(path);
	for (uint64_t i = 0; i < N_GROUPS; i++) {
		const uint64_t pair[2] = {2 * i + 1, 2 * i}; /* not in the model's order */

		all[2 * i] = 2 * i;
		all[2 * i + 1] = 2 * i + 1;
		assert_ok(hr_group_new(kit->model, pair, 2, &kit->groups[i]));
	}
	assert_ok(hr_group_new(kit->model, all, (size_t)2 * N_GROUPS, &kit->large));
}

static void kit_open(struct kit *kit, const char *device, const char *engine, const struct hr_cache_opts *opts)
{
	struct hr_loader_opts loader_opts = HR_LOADER_OPTS_INIT;

	*kit = (struct kit){0};
	open_groups(kit);
	loader_opts.engine = engine;
	loader_opts.staging_bytes = 2 << 20;
	assert_ok(hr_device_open(device, &kit->device));
	assert_ok(hr_loader_open(kit->device, &loader_opts, &kit->loader));
	assert_ok(hr_cache_open(kit->loader, opts, &kit->cache));
}

static void kit_close(struct kit *kit)
{
	assert_ok(hr_cache_close(kit->cache, 20000));
	for (size_t i = 0; i < N_GROUPS; i++)
		hr_group_release(kit->groups[i]);
	hr_group_release(kit->large);
	hr_model_close(kit->model);
	assert_ok(hr_loader_close(kit->loader, 20000));
	assert_ok(hr_device_close(kit->device));
	remove_tree(kit->dir);
	free(kit->dir);
}

/* Room for n of the equal groups, and no byte more. */
static uint64_t room_for(uint64_t n)
{
	return n * ((333 + 255) / 256 * 256 + LAYER + 511) / 512 * 512 + n * 512;
}

static struct hr_cache_opts budget_for(uint64_t n)
{
	struct hr_cache_opts opts = HR_CACHE_OPTS_INIT;

	opts.budget_bytes = room_for(n);
	return opts;
}

static struct hr_cache_stats stats_of(hr_cache *cache)
{
	struct hr_cache_stats stats = HR_CACHE_STATS_INIT;

	assert_ok(hr_cache_stats(cache, NULL, &stats));
	assert_true(stats.used_bytes <= stats.budget_bytes);
	assert_true(stats.peak_bytes <= stats.budget_bytes);
	return stats;
}

/* Whether every member lies where the group says, with its own bytes. */
static bool lease_is_right(const hr_model *model, const hr_group *group, hr_buffer *buffer)
{
	bool right = hr_buffer_bytes(buffer) == hr_group_bytes(group);

	for (size_t i = 0; right && i < hr_group_n_tensors(group); i++) {
		struct hr_tensor t = HR_TENSOR_INIT;
		unsigned char *want, *got;
		uint64_t tensor, offset;

		right = hr_group_tensor(group, i, &tensor, &offset) == 0 && hr_model_tensor(model, tensor, &t) == 0;
		want = plain_read(model, &t);
		got = malloc(t.bytes + 1);
		right = right && offset % 256 == 0 && hr_buffer_read(buffer, offset, got, t.bytes) == 0 &&
			memcmp(want, got, t.bytes) == 0;
		free(want);
		free(got);
	}
	return right;
}

/* Gets, compares, releases. */
static inline void visit(struct kit *kit, size_t i)
{
	hr_buffer *buffer;

	assert_ok(hr_cache_get(kit->cache, kit->groups[i], NULL, &buffer));
	assert_true(lease_is_right(kit->model, kit->groups[i], buffer));
	hr_buffer_release(buffer);
}

#endif
