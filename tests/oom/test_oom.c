/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every allocation fails once, and every system and driver call fails once: n = 1, 2, ... until the scenario goes
 * through without meeting the fault. The scenario opens a model, a device and a loader, runs a job, a feed and a get,
 * compares what came, and closes all. What must hold, wherever the fault strikes:
 *
 *  - a call that fails answers a code that fits, the thread's last error says the same, and out-parameters are NULL;
 *  - what succeeds in spite of the fault delivered the right bytes;
 *  - every close works, and nothing is left: descriptors, threads, memory (where LeakSanitizer is there), objects of
 *    the driver;
 *  - nothing hangs.
 *
 * Each run is a process of its own, so that what a failed clean-up call leaves behind (a registration that could not
 * be taken back) does not reach the next. Of the hundreds of calls over a driver only some n are tried, over a real
 * one, whose start takes long, few; HR_OOM_ALL=1 in the environment tries all.
 */
#include "loadtest.h"
#include "modeltest.h"

#include "fakes/fake_cuda.h"
#include "fakes/fake_cufile.h"

#include <errno.h>
#include <sys/stat.h>

#define N_TENSORS 8

int __lsan_do_recoverable_leak_check(void) __attribute__((weak));

struct scenario {
	const char *dir, *device, *engine;
	const char *point; /* of the fault: "malloc", or NULL for all others */
	int errno_value;
	uint64_t n;
	bool is_stored; /* `dir` names a model in a store, which is verified while it is read */
	unsigned char *want[N_TENSORS];
	uint64_t bytes[N_TENSORS];
};

/* Where the child gives up. */
static _Noreturn void wrong(const struct scenario *s, int line, const char *what, int code)
{
	fprintf(stderr, "# %s, engine %s, %s %llu, errno %d: line %d: %s: %s (%d): %s\n", s->device,
		s->engine ? s->engine : "auto", s->point ? s->point : "call", (unsigned long long)s->n, s->errno_value,
		line, what, hr_error_name(code), code, hr_error_last()->message);
	_exit(2);
}
#define WRONG(what, code) wrong(s, __LINE__, what, code)

static bool code_fits(const struct scenario *s, int code)
{
	if (s->point)
		return code == HR_E_NOMEM;
	if (s->errno_value == ENOENT && (code == HR_E_NOTFOUND || code == HR_E_INDEX))
		return true;
	if (s->engine && strcmp(s->engine, "cufile") == 0 && (code == HR_E_GDS || code == HR_E_SHORT))
		return true;
	return code == HR_E_IO || code == HR_E_NOMEM || code == HR_E_UNSUPPORTED || code == HR_E_DEVICE ||
	       code == HR_E_DEVICE_MEMORY;
}

/* Whether the call succeeded; one that failed did so properly. */
static bool went_well(const struct scenario *s, const char *what, int rc, const void *out)
{
	if (rc == 0)
		return true;
	if (!hr__fault_fired())
		WRONG(what, rc);
	if (hr_error_last()->code != rc || !hr_error_last()->message[0] || out || !code_fits(s, rc))
		WRONG(what, rc);
	return false;
}
#define TRY(call, out) went_well(s, #call, (call), (out))
#define CLOSE(call)                                    \
	do {                                           \
		int rc_ = (call);                      \
		if (rc_)                               \
			WRONG(#call, rc_);             \
	} while (0)

static void check_buffer(const struct scenario *s, uint64_t tensor, hr_buffer *buffer)
{
	unsigned char *got = malloc(s->bytes[tensor] + 1);

	if (hr_buffer_bytes(buffer) != s->bytes[tensor])
		WRONG("a buffer has the wrong size", 1);
	if (TRY(hr_buffer_read(buffer, 0, got, s->bytes[tensor]), NULL) &&
	    memcmp(got, s->want[tensor], s->bytes[tensor]) != 0)
		WRONG("wrong bytes", 1);
	free(got);
}

static void run_job(const struct scenario *s, hr_loader *loader, hr_model *model)
{
	struct hr_job_opts opts = HR_JOB_OPTS_INIT;
	hr_buffer *buffers[N_TENSORS] = {NULL};
	struct hr_read reads[N_TENSORS];
	hr_job *job = NULL;
	bool good = true;
	int fd;

	opts.io_timeout_ms = 20000;
	for (uint64_t i = 0; i < N_TENSORS && good; i++) {
		good = TRY(hr_buffer_new(loader, s->bytes[i], &buffers[i]), buffers[i]);
		if (good) /* in reverse, so that they must be sorted */
			reads[N_TENSORS - 1 - i] = (struct hr_read){i, 0, UINT64_MAX, hr_buffer_data(buffers[i]),
								    s->bytes[i]};
	}
	if (good && TRY(hr_job_start(loader, model, reads, N_TENSORS, &opts, &job), job)) {
		TRY(hr_job_fd(job, &fd), NULL);
		if (TRY(hr_job_wait(job, HR_FOREVER), NULL))
			for (uint64_t i = 0; i < N_TENSORS; i++)
				check_buffer(s, i, buffers[i]);
		CLOSE(hr_job_close(job, HR_FOREVER));
	}
	for (int i = 0; i < N_TENSORS; i++)
		hr_buffer_release(buffers[i]);
}

static void run_feed(const struct scenario *s, hr_loader *loader, hr_model *model)
{
	hr_buffer *buffers[N_TENSORS] = {NULL};
	hr_feed *feed = NULL;

	if (!TRY(hr_feed_open(loader, model, NULL, &feed), feed))
		return;
	for (uint64_t i = 0; i < N_TENSORS; i++) {
		struct hr_tensor t = HR_TENSOR_INIT;

		if (!TRY(hr_feed_next(feed, &t, &buffers[i]), buffers[i]))
			break;
	}
	CLOSE(hr_feed_close(feed, HR_FOREVER));
	for (uint64_t i = 0; i < N_TENSORS && buffers[i]; i++) {
		check_buffer(s, i, buffers[i]);
		hr_buffer_release(buffers[i]);
	}
}

static void map_one(const struct scenario *s, hr_model *model)
{
	struct hr_map_opts opts = HR_MAP_OPTS_INIT;
	hr_buffer *buffer = NULL;

	opts.flags = HR_MAP_POPULATE;
	if (TRY(hr_map(model, 5, &opts, &buffer), buffer)) {
		check_buffer(s, 5, buffer);
		hr_buffer_release(buffer);
	}
}

static void use_loader(const struct scenario *s, hr_loader *loader, hr_model *model)
{
	struct hr_stats stats = HR_STATS_INIT;
	struct hr_plan_info info = HR_PLAN_INFO_INIT;
	struct hr_read read = {.tensor = 3, .length = UINT64_MAX};
	hr_buffer *buffer = NULL;

	run_job(s, loader, model);
	run_feed(s, loader, model);
	if (TRY(hr_get(loader, model, 5, &buffer), buffer)) {
		check_buffer(s, 5, buffer);
		hr_buffer_release(buffer);
	}
	if (!s->is_stored)
		map_one(s, model);
	TRY(hr_plan(loader, model, &read, 1, &info), NULL);
	TRY(hr_loader_stats(loader, &stats), NULL);
}

static void play(const struct scenario *s)
{
	struct hr_loader_opts opts = HR_LOADER_OPTS_INIT;
	struct hr_device_info about = HR_DEVICE_INFO_INIT;
	hr_device *device = NULL;
	hr_loader *loader = NULL;
	hr_model *model = NULL;

	opts.staging_bytes = HR_MIN_STAGING_BYTES;
	opts.readers = 2;
	opts.engine = s->engine;
	opts.flags = s->is_stored ? HR_LOADER_VERIFY : 0;
	if (TRY(hr_model_open(s->dir, NULL, &model), model) && TRY(hr_device_open(s->device, &device), device)) {
		TRY(hr_device_info(device, &about), NULL);
		if (TRY(hr_loader_open(device, &opts, &loader), loader))
			use_loader(s, loader, model);
	}
	CLOSE(hr_loader_close(loader, HR_FOREVER));
	CLOSE(hr_device_close(device));
	hr_model_close(model);
}

/* A call that failed may have been one that gives objects back, or the one before it; no other mistake may be made. */
static void check_driver(const struct scenario *s, const struct fake_cuda *fake, int fired)
{
	char text[256] = "";
	unsigned n = fake->errors(text, sizeof(text));

	if (n > (fired && !s->point) || (n && !strstr(text, "objects alive"))) {
		fprintf(stderr, "# %s\n", text);
		WRONG("the look-alike driver complains", (int)n);
	}
	if (fake->live(NULL) > 0 && (!fired || s->point))
		WRONG("objects of the driver are left", (int)fake->live(NULL));
}

static void check_library(const struct scenario *s, const struct fake_cufile *fake, int fired)
{
	char text[256] = "";
	unsigned n = fake->errors(text, sizeof(text));

	if (n > (fired && !s->point)) {
		fprintf(stderr, "# %s\n", text);
		WRONG("the look-alike library complains", (int)n);
	}
	if (fake->live(NULL) > 0 && (!fired || s->point))
		WRONG("the library has handles, memory or the driver open", (int)fake->live(NULL));
}

/* Plays the scenario; 0: the fault was not met, 1: it was and all is well. */
static int run_once(void *ctx)
{
	const struct scenario *s = ctx;
	struct fake_cuda fake = {0};
	struct fake_cufile cufile = {0};
	uint64_t n_threads = proc_status("Threads");
	int fired, n_files;

	alarm(60);
	(void)n_threads;
	if (strcmp(s->device, "cpu") != 0 && fake_cuda_find(&fake)) {
		fake.set("delay_us", 0);
		fake.set("strict", s->point != NULL); /* a driver call that cleans up may be the one that fails */
	}
	if (s->engine && strcmp(s->engine, "cufile") == 0 && fake_cufile_find(&cufile)) {
		cufile.set("delay_us", 0);
		cufile.set("strict", s->point != NULL);
	}
	n_files = count_open_files();
	hr__fault_arm(s->point, s->n, s->errno_value);
	play(s);
	fired = hr__fault_fired();
	hr__fault_arm(NULL, 0, 0);
	if (strcmp(s->device, "cpu") == 0 && count_open_files() != n_files)
		WRONG("descriptors are left", count_open_files() - n_files);
	if (fake.live)
		check_driver(s, &fake, fired);
	if (cufile.live)
		check_library(s, &cufile, fired);
#ifndef __SANITIZE_THREAD__ /* whose own thread comes late */
	if (strcmp(s->device, "cpu") == 0 && proc_status("Threads") > n_threads)
		WRONG("threads are left", (int)proc_status("Threads"));
#endif
	if (__lsan_do_recoverable_leak_check && __lsan_do_recoverable_leak_check())
		WRONG("memory is left", 1);
	return fired;
}

/* ---- the parent ---- */

static int is_there(void *ctx)
{
	struct fake_cuda fake;

	if (!has_device(ctx))
		return 0;
	return strcmp(ctx, "cpu") == 0 || fake_cuda_find(&fake) ? 1 : 2;
}

static void write_index(const struct bed *bed)
{
	char *path = path_in(bed->dir, "model.safetensors.index.json");
	FILE *file = fopen(path, "w");

	fprintf(file, "{\"weight_map\":{");
	for (uint64_t i = 0; i < N_TENSORS; i++) {
		struct hr_tensor t = HR_TENSOR_INIT;

		assert_ok(hr_model_tensor(bed->model, i, &t));
		fprintf(file, "%s\"%.*s\":\"%s\"", i ? "," : "", (int)t.name_len, t.name,
			strrchr(bed->paths[t.shard], '/') + 1);
	}
	fprintf(file, "}}");
	fclose(file);
	free(path);
}

/* Tries every n, or every `step`-th. */
static void until_it_is_not_met(struct scenario *s, uint64_t step)
{
	for (s->n = 1;; s->n += step) {
		int answer;

		fflush(NULL);
		answer = in_child(run_once, s);
		if (answer == 0)
			break;
		if (answer != 1)
			fail_msg("%s, engine %s, %s %llu, errno %d: the child gave %d", s->device,
				 s->engine ? s->engine : "auto", s->point ? s->point : "call", (unsigned long long)s->n,
				 s->errno_value, answer);
	}
	printf("# %s, engine %s, %s: %llu\n", s->device, s->engine ? s->engine : "auto", s->point ? s->point : "calls",
	       (unsigned long long)s->n - 1);
}

static void read_wanted(struct scenario *s, const hr_model *model)
{
	for (uint64_t i = 0; i < N_TENSORS; i++) {
		struct hr_tensor t = HR_TENSOR_INIT;

		assert_ok(hr_model_tensor(model, i, &t));
		s->want[i] = plain_read(model, &t);
		s->bytes[i] = t.bytes;
	}
}

static void on_device(const char *device, const char *point, int errno_value)
{
	const char *engines[] = {NULL, "pread", "uring", "mapped"}, *only = getenv("HR_TEST_ENGINE");
	size_t n_engines = only ? 1 : strcmp(device, "cpu") == 0 ? 3 : 4;
	int there = in_child(is_there, (void *)(uintptr_t)device);
	uint64_t step = getenv("HR_OOM_ALL")                                 ? 1
			: there == 2                                         ? 41
			: there == 1 && !point && strcmp(device, "cpu") != 0 ? 13
									     : 1;
	struct bed bed;

#ifdef __SANITIZE_THREAD__ /* a process takes ten times as long to start */
	step *= 9;
#endif
	if (only && strcmp(device, "cpu") == 0)
		skip_for("engine %s is for GPUs", only);
	if (!there)
		skip_for("%s cannot be opened on this machine", device);
	bed_open(&bed, 3, N_TENSORS, 150000);
	write_index(&bed);
	engines[0] = only;
	for (size_t e = 0; e < n_engines; e++) {
		struct scenario s = {.dir = bed.dir,
				     .device = device,
				     .engine = engines[e],
				     .point = point,
				     .errno_value = errno_value};

		read_wanted(&s, bed.model);
		until_it_is_not_met(&s, step);
		for (int i = 0; i < N_TENSORS; i++)
			free(s.want[i]);
	}
	bed_close(&bed);
}

static void every_allocation_fails_once_on_cpu(void **state)
{
	(void)state;
	on_device("cpu", "malloc", ENOMEM);
}

static void every_system_call_fails_once_on_cpu(void **state)
{
	(void)state;
	on_device("cpu", NULL, EIO);
	on_device("cpu", NULL, ENOMEM);
}

/* The same model out of a store in a plain file, every block compared with its checksum. */
static void on_store(const char *point, int errno_value)
{
	struct hr_store_init_opts init = HR_STORE_INIT_OPTS_INIT;
	struct hr_store_opts writer = HR_STORE_OPTS_INIT;
	struct scenario s = {.device = "cpu", .point = point, .errno_value = errno_value, .is_stored = true};
	char *outside = make_temp_dir(), *image = path_in(outside, "store.img"), name[256];
	hr_store *store;
	struct bed bed;

	bed_open(&bed, 3, N_TENSORS, 150000);
	write_index(&bed);
	init.bytes = UINT64_C(32) << 20;
	writer.flags = HR_STORE_WRITE;
	assert_ok(hr_store_init(image, &init));
	assert_ok(hr_store_open(image, &writer, &store));
	assert_ok(hr_store_import(store, bed.dir, "m", NULL, NULL));
	hr_store_close(store);
	snprintf(name, sizeof(name), "store:%s#m", image);
	s.dir = name;
	read_wanted(&s, bed.model);
	for (int i = 0; i < 2; i++) {
		s.engine = i ? "pread" : NULL;
#ifdef __SANITIZE_THREAD__
		until_it_is_not_met(&s, 9);
#else
		until_it_is_not_met(&s, 1);
#endif
	}
	for (int i = 0; i < N_TENSORS; i++)
		free(s.want[i]);
	bed_close(&bed);
	remove_tree(outside);
	free(outside);
	free(image);
}

static void every_allocation_fails_once_over_a_store(void **state)
{
	(void)state;
	on_store("malloc", ENOMEM);
}

static void every_system_call_fails_once_over_a_store(void **state)
{
	(void)state;
	on_store(NULL, EIO);
}

static void every_allocation_fails_once_on_cuda(void **state)
{
	(void)state;
	on_device("cuda:0", "malloc", ENOMEM);
}

static void every_system_and_driver_call_fails_once_on_cuda(void **state)
{
	(void)state;
	on_device("cuda:0", NULL, EIO);
	on_device("cuda:0", NULL, 2); /* ENOENT, and the driver's code for memory */
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(every_allocation_fails_once_on_cpu),
		cmocka_unit_test(every_system_call_fails_once_on_cpu),
		cmocka_unit_test(every_allocation_fails_once_over_a_store),
		cmocka_unit_test(every_system_call_fails_once_over_a_store),
		cmocka_unit_test(every_allocation_fails_once_on_cuda),
		cmocka_unit_test(every_system_and_driver_call_fails_once_on_cuda),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
