/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every engine, on every device that is here, through and around the page cache: the same bytes, and for the same
 * broken input the same error code. A new engine is tested by its row in the table. Set HR_CHECKPOINT to a real
 * checkpoint's directory or file to load that too.
 */
#include "loadtest.h"

#include "engine/engine.h"
#include "fakes/fake_engine.h"

#include <fcntl.h>
#include <unistd.h>

static const char *const devices[] = {"cpu", "cuda:0"};
static const char *const cachings[] = {"auto", "fill", "bypass"};

struct combination {
	const char *device, *engine; /* NULL = auto */
	uint32_t caching;
};

/* Walks all combinations; `body` gets the bed with a loader that is open. Combinations that cannot be had here are
 * named. */
static void on_all(struct bed *bed, const struct hr_loader_opts *base,
		   void (*body)(struct bed *bed, const struct combination *c))
{
	for (size_t d = 0; d < 2; d++) {
		const struct hr__engine_ops *const *ops = hr__engines();

		if (!has_device(devices[d])) {
			printf("# no %s here\n", devices[d]);
			continue;
		}
		for (size_t e = 0; e == 0 || ops[e - 1]; e++)
			for (uint32_t caching = 0; caching < 3; caching++) {
				struct combination c = {devices[d], e ? ops[e - 1]->name : NULL, caching};
				struct hr_loader_opts opts = *base;
				int rc;

				if (e && (ops[e - 1]->caps & HR__ENGINE_RAW_ONLY))
					continue; /* it does not read files */
				fake_engine_set(&(struct fake_engine_settings){.seed = e, .short_reads = 1});
				opts.engine = c.engine;
				opts.caching = caching;
				assert_ok(hr_device_open(c.device, &bed->device));
				rc = hr_loader_open(bed->device, &opts, &bed->loader);
				if (rc == HR_E_UNSUPPORTED)
					printf("# %s is left out: %s\n", c.engine, hr_error_last()->message);
				else
					assert_int_equal(rc, 0);
				if (!rc)
					body(bed, &c);
				assert_ok(hr_loader_close(bed->loader, HR_FOREVER));
				assert_ok(hr_device_close(bed->device));
			}
	}
	bed->loader = NULL;
	bed->device = NULL;
	fake_engine_set(NULL);
}

static void name_it(const struct combination *c, int rc)
{
	if (rc)
		printf("# on %s by %s, caching %s: %s: %s\n", c->device, c->engine ? c->engine : "auto",
		       cachings[c->caching], hr_error_name(rc), hr_error_last()->message);
}

/* Whether O_DIRECT is refused where the test's files are, and that is the whole trouble. */
static bool is_refused(const struct combination *c, int rc)
{
	name_it(c, rc);
	return rc == HR_E_UNSUPPORTED && c->caching == HR_CACHING_BYPASS;
}

static void check_share(const struct bed *bed, const struct combination *c)
{
	struct hr_stats stats = HR_STATS_INIT;
	uint64_t cached = 0, direct = 0;

	assert_ok(hr_loader_stats(bed->loader, &stats));
	for (int i = 0; i < HR_N_ENGINES; i++) {
		cached += stats.cached_bytes[i];
		direct += stats.direct_bytes[i];
		/* asked for by name, it alone may read */
		if (c->engine && hr__engine_find(c->engine)->id != (uint32_t)i)
			assert_int_equal(stats.cached_bytes[i] + stats.direct_bytes[i], 0);
	}
	if (c->caching == HR_CACHING_FILL)
		assert_int_equal(direct, 0);
	if (c->caching == HR_CACHING_BYPASS)
		assert_int_equal(cached, 0);
}

static void same_bytes(struct bed *bed, const struct combination *c)
{
	static const struct hr_job_opts timed = {sizeof(timed), 60000, 0, NULL, NULL};
	int rc = load_by_job(bed->loader, bed->model, NULL);

	if (is_refused(c, rc))
		return;
	assert_int_equal(rc, 0);
	rc = load_by_job(bed->loader, bed->model, &timed); /* which go through slots everywhere */
	name_it(c, rc);
	assert_int_equal(rc, 0);
	rc = load_by_feed(bed->loader, bed->model, NULL, true, NULL);
	name_it(c, rc);
	assert_int_equal(rc, 0);
	check_share(bed, c);
}

static void all_give_the_same_bytes(void **state)
{
	struct hr_loader_opts base = HR_LOADER_OPTS_INIT;
	struct bed bed;

	(void)state;
	base.staging_bytes = UINT64_C(1) << 20;
	bed_open(&bed, 51, 60, 400000);
	on_all(&bed, &base, same_bytes);
	bed_close(&bed);
}

static void same_bytes_once(struct bed *bed, const struct combination *c)
{
	int rc;

	if (c->caching != HR_CACHING_AUTO && c->engine != NULL)
		return;
	rc = load_by_job(bed->loader, bed->model, NULL);
	if (!is_refused(c, rc))
		assert_int_equal(rc, 0);
}

static void all_load_a_real_checkpoint(void **state)
{
	struct hr_loader_opts base = HR_LOADER_OPTS_INIT;
	const char *name = getenv("HR_CHECKPOINT");
	struct bed bed;

	(void)state;
	if (!name || !*name) {
		skip_for("HR_CHECKPOINT is not set");
	}
	bed_open_model(&bed, name);
	on_all(&bed, &base, same_bytes_once);
	bed_close(&bed);
}

/* ---- broken input ---- */

#define N_BROKEN 5

static struct {
	int codes[N_BROKEN];
	bool known;
} first;

static int read_all(struct bed *bed, hr_model *model)
{
	return load_by_job(bed->loader, model, NULL);
}

/* Opens a copy of the first shard, does something to it, and loads. */
static int load_broken(struct bed *bed, void (*harm)(const char *path))
{
	char *path = path_in(bed->dir, "broken.safetensors");
	struct hr_shard shard = HR_SHARD_INIT;
	unsigned char *bytes;
	hr_model *model;
	int rc;

	assert_ok(hr_model_shard(bed->model, 0, &shard));
	bytes = malloc(shard.bytes);
	assert_ok(hr_model_read_shard(bed->model, 0, 0, bytes, shard.bytes));
	write_file(path, bytes, shard.bytes);
	free(bytes);
	set_time_back(path);
	assert_ok(hr_model_open(path, NULL, &model));
	harm(path);
	rc = read_all(bed, model);
	hr_model_close(model);
	unlink(path);
	free(path);
	return rc;
}

static void cut(const char *path)
{
	assert_int_equal(truncate(path, 300000), 0);
}

static void overwrite(const char *path)
{
	int fd = open(path, O_WRONLY);

	assert_int_equal(pwrite(fd, "xyz", 3, 200000), 3);
	close(fd);
}

static void remove_it(const char *path)
{
	assert_int_equal(unlink(path), 0);
}

static void same_codes(struct bed *bed, const struct combination *c)
{
	struct hr_read read = {.tensor = 1, .offset = 0, .length = UINT64_MAX, .dst = bed, .dst_bytes = 0};
	int codes[N_BROKEN];
	hr_job *job;

	if (is_refused(c, read_all(bed, bed->model)))
		return;
	codes[0] = load_broken(bed, cut);
	codes[1] = load_broken(bed, overwrite);
	codes[2] = load_broken(bed, remove_it);
	codes[3] = hr_job_start(bed->loader, bed->model, &read, 1, NULL, &job);
	read.tensor = UINT64_MAX;
	codes[4] = hr_job_start(bed->loader, bed->model, &read, 1, NULL, &job);
	if (!first.known) {
		memcpy(first.codes, codes, sizeof(codes));
		first.known = true;
	}
	for (int i = 0; i < N_BROKEN; i++) {
		if (codes[i] != first.codes[i])
			name_it(c, codes[i]);
		assert_int_equal(codes[i], first.codes[i]);
	}
}

static void all_give_the_same_error(void **state)
{
	static const int expected[N_BROKEN] = {HR_E_CHANGED, HR_E_CHANGED, HR_E_CHANGED, HR_E_SPACE, HR_E_OPTS};
	struct hr_loader_opts base = HR_LOADER_OPTS_INIT;
	struct bed bed;

	(void)state;
	base.staging_bytes = UINT64_C(1) << 20;
	bed_open(&bed, 52, 40, 200000);
	on_all(&bed, &base, same_codes);
	for (int i = 0; i < N_BROKEN; i++)
		assert_int_equal(first.codes[i], expected[i]);
	bed_close(&bed);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(all_give_the_same_bytes),
		cmocka_unit_test(all_give_the_same_error),
		cmocka_unit_test(all_load_a_real_checkpoint),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
