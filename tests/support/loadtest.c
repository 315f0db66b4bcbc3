/* SPDX-License-Identifier: Apache-2.0 */
#include "loadtest.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* ---- models through uGDS ---- */

#undef hr_model_open
#undef hr_model_open_files

#define DISK_BYTES ((off_t)4 << 30) /* with holes */

static char *disk_dir, *disk;
static unsigned n_imported;

bool is_through_ugds(void)
{
	const char *engine = getenv("HR_TEST_ENGINE");

	return engine && strcmp(engine, "ugds") == 0;
}

static void remove_disk(void)
{
	remove_tree(disk_dir);
	free(disk_dir);
	free(disk);
}

static void need_disk(void)
{
	FILE *file;

	if (disk)
		return;
	disk_dir = make_temp_dir();
	disk = path_in(disk_dir, "disk.img");
	file = fopen(disk, "w");
	if (!file || ftruncate(fileno(file), DISK_BYTES) || fclose(file) || atexit(remove_disk))
		abort();
	assert_ok(hr_store_init(disk, NULL));
}

static int put_text(void *ctx, const char *text, size_t bytes)
{
	return fwrite(text, 1, bytes, ctx) != bytes;
}

void write_sidecar(const char *region, const char *path)
{
	FILE *file = fopen(path, "w");
	hr_store *store;

	assert_non_null(file);
	assert_ok(hr_store_open(region, NULL, &store));
	assert_ok(hr_store_export(store, put_text, file));
	hr_store_close(store);
	assert_int_equal(fclose(file), 0);
}

/* The names "store:SIDECAR#MODEL" of imported paths; false: one cannot be imported. */
static bool import_all(const char *const *paths, size_t n, char **names)
{
	struct hr_store_import_opts import = HR_STORE_IMPORT_OPTS_INIT;
	struct hr_store_opts opts = HR_STORE_OPTS_INIT;
	char *sidecar;
	hr_store *store;
	bool good = true;

	need_disk();
	import.flags = HR_IMPORT_NO_READ_BACK;
	opts.flags = HR_STORE_WRITE;
	if (hr_store_open(disk, &opts, &store))
		return false;
	if (asprintf(&sidecar, "%s/%u.json", disk_dir, n_imported) < 0)
		abort();
	for (size_t i = 0; i < n && good; i++) {
		char model[32];

		snprintf(model, sizeof(model), "m%u", n_imported++);
		good = paths[i] && hr_store_import(store, paths[i], model, &import, NULL) == 0;
		if (good && asprintf(&names[i], "store:%s#%s", sidecar, model) < 0)
			abort();
	}
	hr_store_close(store);
	if (good)
		write_sidecar(disk, sidecar);
	free(sidecar);
	return good;
}

int test_model_open_files(const char *const *paths, size_t n, const struct hr_model_opts *opts, hr_model **out)
{
	struct hr_model_opts own = HR_MODEL_OPTS_INIT;
	char **names;
	int rc;

	if (!is_through_ugds() || !paths || !n || opts || strncmp(paths[0], "store:", 6) == 0)
		return hr_model_open_files(paths, n, opts, out);
	names = calloc(n, sizeof(*names));
	if (import_all(paths, n, names)) {
		own.ugds = disk;
		rc = hr_model_open_files((const char *const *)names, n, &own, out);
	} else {
		rc = hr_model_open_files(paths, n, opts, out);
	}
	for (size_t i = 0; i < n; i++)
		free(names[i]);
	free(names);
	return rc;
}

int test_model_open(const char *name, const struct hr_model_opts *opts, hr_model **out)
{
	struct hr_model_opts own = HR_MODEL_OPTS_INIT;
	char *stored = NULL;
	int rc;

	if (!is_through_ugds() || !name || !*name || opts || strncmp(name, "store:", 6) == 0 ||
	    !import_all(&name, 1, &stored)) {
		free(stored);
		return hr_model_open(name, opts, out);
	}
	own.ugds = disk;
	rc = hr_model_open(stored, &own, out);
	free(stored);
	return rc;
}
#define hr_model_open       test_model_open
#define hr_model_open_files test_model_open_files

/* ---- beds ---- */

static const char *const dtypes[] = {"U8", "BF16", "F32", "F64"};
static const uint64_t dtype_bytes[] = {1, 2, 4, 8};

/* Mostly bytes, so that nothing is aligned; now and then an empty one. */
static struct test_tensor random_tensor(struct test_random *random, size_t number, uint64_t max_bytes)
{
	size_t dtype = test_random_below(random, 3) ? 0 : test_random_below(random, 4);
	uint64_t bytes = test_random_below(random, 9) == 0   ? 0
			 : test_random_below(random, 3) == 0 ? test_random_below(random, max_bytes) + 1
							     : test_random_below(random, max_bytes / 16 + 1) + 1;
	char *name;

	if (asprintf(&name, "tensor.%zu.weight", number) < 0)
		abort();
	return (struct test_tensor){name, dtypes[dtype], bytes / dtype_bytes[dtype] * dtype_bytes[dtype]};
}

void set_time_back(const char *path)
{
	const struct timespec times[2] = {{1700000000, 0}, {1700000000, 0}};

	if (utimensat(AT_FDCWD, path, times, 0))
		fail_msg("cannot set the time of %s", path);
}

void bed_open_in(struct bed *bed, char *dir, uint64_t seed, size_t n_tensors, uint64_t max_bytes)
{
	struct test_random random = {seed};
	struct test_tensor *tensors = calloc(n_tensors + 1, sizeof(*tensors));
	size_t first = n_tensors / 2;

	*bed = (struct bed){.dir = dir, .n_tensors = n_tensors};
	bed->paths[0] = path_in(dir, "model-00001-of-00002.safetensors");
	bed->paths[1] = path_in(dir, "model-00002-of-00002.safetensors");
	for (size_t i = 0; i < n_tensors; i++) {
		tensors[i] = random_tensor(&random, i, max_bytes);
		bed->bytes += tensors[i].bytes;
	}
	write_safetensors(bed->paths[0], tensors, first, seed);
	write_safetensors(bed->paths[1], tensors + first, n_tensors - first, seed + first);
	set_time_back(bed->paths[0]);
	set_time_back(bed->paths[1]);
	for (size_t i = 0; i < n_tensors; i++)
		free((char *)(uintptr_t)tensors[i].name);
	free(tensors);
	assert_ok(hr_model_open_files((const char *const *)bed->paths, 2, NULL, &bed->model));
}

void bed_open(struct bed *bed, uint64_t seed, size_t n_tensors, uint64_t max_bytes)
{
	bed_open_in(bed, make_temp_dir(), seed, n_tensors, max_bytes);
}

void bed_open_model(struct bed *bed, const char *name)
{
	*bed = (struct bed){0};
	assert_ok(hr_model_open(name, NULL, &bed->model));
	bed->n_tensors = hr_model_n_tensors(bed->model);
}

#undef hr_loader_open
int test_loader_open(hr_device *device, const struct hr_loader_opts *opts, hr_loader **out)
{
	struct hr_device_info info = HR_DEVICE_INFO_INIT;
	const char *engine = getenv("HR_TEST_ENGINE");
	struct hr_loader_opts own = HR_LOADER_OPTS_INIT;

	if (!engine || !*engine || !device ||
	    (opts && (opts->engine || opts->size != sizeof(own) || opts->caching == HR_CACHING_FILL)) ||
	    hr_device_info(device, &info) || strcmp(info.spec, "cpu") == 0)
		return hr_loader_open(device, opts, out);
	if (opts)
		own = *opts;
	own.engine = engine;
	if (strcmp(engine, "cufile-compat") == 0) { /* over the real library, where it cannot do better */
		own.engine = "cufile";
		own.flags |= HR_LOADER_CUFILE_COMPAT;
	}
	return hr_loader_open(device, &own, out);
}
#define hr_loader_open test_loader_open

void bed_load(struct bed *bed, const char *device, const struct hr_loader_opts *opts)
{
	assert_ok(hr_device_open(device, &bed->device));
	assert_ok(hr_loader_open(bed->device, opts, &bed->loader));
}

void bed_close(struct bed *bed)
{
	assert_ok(hr_loader_close(bed->loader, 20000));
	assert_ok(hr_device_close(bed->device));
	hr_model_close(bed->model);
	if (bed->dir)
		remove_tree(bed->dir);
	free(bed->paths[0]);
	free(bed->paths[1]);
	free(bed->dir);
}

unsigned char *plain_read(const hr_model *model, const struct hr_tensor *tensor)
{
	unsigned char *bytes = malloc(tensor->bytes ? tensor->bytes : 1);

	if (bytes && hr_model_read_shard(model, tensor->shard, tensor->offset, bytes, tensor->bytes)) {
		free(bytes);
		return NULL;
	}
	return bytes;
}

bool buffer_is_right(const hr_model *model, const struct hr_tensor *tensor, hr_buffer *buffer)
{
	unsigned char *want = plain_read(model, tensor), *got = malloc(tensor->bytes ? tensor->bytes : 1);
	bool right = want && got && hr_buffer_bytes(buffer) == tensor->bytes &&
		     hr_buffer_read(buffer, 0, got, tensor->bytes) == 0 && memcmp(want, got, tensor->bytes) == 0;

	free(want);
	free(got);
	return right;
}

static int run_job(hr_loader *loader, hr_model *model, const struct hr_read *reads, size_t n,
		   const struct hr_job_opts *opts)
{
	hr_job *job;
	int rc = hr_job_start(loader, model, reads, n, opts, &job), close_rc;

	if (rc)
		return rc;
	rc = hr_job_wait(job, HR_FOREVER);
	close_rc = hr_job_close(job, HR_FOREVER);
	return rc ? rc : close_rc;
}

int load_by_job(hr_loader *loader, hr_model *model, const struct hr_job_opts *opts)
{
	size_t n = (size_t)hr_model_n_tensors(model);
	struct hr_read *reads = calloc(n + 1, sizeof(*reads));
	hr_buffer **buffers = calloc(n + 1, sizeof(hr_buffer *));
	struct hr_tensor t = HR_TENSOR_INIT;
	int rc = 0;

	for (size_t i = 0; i < n && !rc; i++) {
		rc = hr_model_tensor(model, i, &t);
		if (!rc)
			rc = hr_buffer_new(loader, t.bytes, &buffers[i]);
		if (!rc)
			reads[i] = (struct hr_read){i, 0, UINT64_MAX, hr_buffer_data(buffers[i]), t.bytes};
	}
	if (!rc)
		rc = run_job(loader, model, reads, n, opts);
	for (size_t i = 0; i < n; i++) {
		if (!rc && (hr_model_tensor(model, i, &t) || !buffer_is_right(model, &t, buffers[i])))
			rc = 1;
		hr_buffer_release(buffers[i]);
	}
	free(buffers);
	free(reads);
	return rc;
}

struct kept {
	struct hr_tensor tensor;
	hr_buffer *buffer;
};

/* Draws the feed dry. */
static int drink(hr_feed *feed, hr_model *model, struct kept *kept, size_t *n)
{
	for (*n = 0;; ++*n) {
		struct hr_tensor t = HR_TENSOR_INIT;
		hr_buffer *buffer;
		int rc = hr_feed_next(feed, &t, &buffer);

		if (rc)
			return rc == HR_E_END ? 0 : rc;
		if (kept) {
			kept[*n] = (struct kept){t, buffer};
			continue;
		}
		rc = buffer_is_right(model, &t, buffer) ? 0 : 1;
		hr_buffer_release(buffer);
		if (rc)
			return rc;
	}
}

int load_by_feed(hr_loader *loader, hr_model *model, const struct hr_feed_opts *opts, bool keep, size_t *n_out)
{
	size_t most = opts && opts->tensors ? opts->n_tensors : (size_t)hr_model_n_tensors(model), n = 0;
	struct kept *kept = keep ? calloc(most + 1, sizeof(*kept)) : NULL;
	hr_feed *feed;
	int rc = hr_feed_open(loader, model, opts, &feed), close_rc;

	if (!rc) {
		rc = drink(feed, model, kept, &n);
		close_rc = hr_feed_close(feed, HR_FOREVER); /* what was handed out stays good */
		rc = rc ? rc : close_rc;
	}
	for (size_t i = 0; kept && i < n; i++) {
		if (!rc && !buffer_is_right(model, &kept[i].tensor, kept[i].buffer))
			rc = 1;
		hr_buffer_release(kept[i].buffer);
	}
	free(kept);
	if (n_out)
		*n_out = n;
	return rc;
}

bool has_device(const char *spec)
{
	hr_device *device;

	if (hr_device_open(spec, &device))
		return false;
	hr_device_close(device);
	return true;
}

bool has_engine(const char *spec, const char *engine)
{
	struct hr_loader_opts opts = HR_LOADER_OPTS_INIT;
	hr_loader *loader = NULL;
	hr_device *device;
	bool can;

	if (hr_device_open(spec, &device))
		return false;
	opts.engine = engine;
	can = hr_loader_open(device, &opts, &loader) == 0;
	hr_loader_close(loader, HR_FOREVER);
	hr_device_close(device);
	return can;
}

uint64_t proc_status(const char *field)
{
	FILE *file = fopen("/proc/self/status", "r");
	uint64_t value = 0;
	char line[256];

	while (file && fgets(line, sizeof(line), file))
		if (strncmp(line, field, strlen(field)) == 0 && line[strlen(field)] == ':')
			value = strtoull(line + strlen(field) + 1, NULL, 10);
	if (file)
		fclose(file);
	return value;
}

uint64_t now_ms(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}
