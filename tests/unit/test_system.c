/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the system does to a loader: a fork, io_uring or O_DIRECT that is forbidden, a direct read that is turned down,
 * a checkpoint that is larger than memory should be. On every device that is here, where it matters.
 */
#include "loadtest.h"
#include "modeltest.h"

#include "fakes/fake_engine.h"
#include "model/model.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>

static const char *const devices[] = {"cpu", "cuda:0"};

/* ---- fork ---- */

struct family {
	struct bed bed;
	struct hr_tensor t;
	hr_buffer *buffer;
	hr_feed *feed;
	hr_job *job;
	void *dst;
};

/* In the child: every call answers HR_E_FORKED and frees nothing; the model can be read. The line of the first that
 * does not. */
#define MUST(condition)                  \
	do {                             \
		if (!(condition))        \
			return __LINE__; \
	} while (0)
#define FORKED(call) MUST((call) == HR_E_FORKED && hr_error_last()->code == HR_E_FORKED)

static int check_handles(struct family *f)
{
	struct hr_device_info about = HR_DEVICE_INFO_INIT;
	struct hr_tensor t = HR_TENSOR_INIT;
	struct hr_stats stats = HR_STATS_INIT;
	hr_buffer *none;
	char byte;
	int fd;

	FORKED(hr_job_wait(f->job, 0));
	FORKED(hr_job_cancel(f->job));
	FORKED(hr_job_fd(f->job, &fd));
	FORKED(hr_job_stats(f->job, &stats));
	FORKED(hr_job_close(f->job, HR_FOREVER));
	FORKED(hr_feed_next(f->feed, &t, &none));
	FORKED(hr_feed_stats(f->feed, &stats));
	FORKED(hr_feed_close(f->feed, HR_FOREVER));
	FORKED(hr_buffer_read(f->buffer, 0, &byte, 1));
	FORKED(hr_buffer_release_on(f->buffer, &byte));
	FORKED(hr_loader_stats(f->bed.loader, &stats));
	hr_buffer_release(f->buffer); /* has no answer; the parent sees that nothing happened */
	hr_buffer_release(f->buffer);
	FORKED(hr_device_info(f->bed.device, &about));
	return 0;
}

static int check_starts(struct family *f)
{
	struct hr_read read = {f->t.index, 0, UINT64_MAX, f->dst, f->t.bytes};
	struct hr_plan_info info = HR_PLAN_INFO_INIT;
	hr_loader *loader;
	hr_buffer *none;
	hr_feed *feed;
	hr_job *job;

	FORKED(hr_job_start(f->bed.loader, f->bed.model, &read, 1, NULL, &job));
	FORKED(hr_feed_open(f->bed.loader, f->bed.model, NULL, &feed));
	FORKED(hr_plan(f->bed.loader, f->bed.model, &read, 1, &info));
	FORKED(hr_get(f->bed.loader, f->bed.model, 0, &none));
	FORKED(hr_read_into(f->bed.loader, f->bed.model, f->t.index, f->dst, f->t.bytes));
	FORKED(hr_buffer_new(f->bed.loader, 5, &none));
	FORKED(hr_loader_open(f->bed.device, NULL, &loader));
	FORKED(hr_loader_close(f->bed.loader, HR_FOREVER));
	FORKED(hr_device_close(f->bed.device));
	return 0;
}

static int check_model(struct family *f)
{
	struct hr_digest digest;
	unsigned char *bytes;

	bytes = plain_read(f->bed.model, &f->t);
	MUST(bytes);
	MUST(hr_model_digest(f->bed.model, 0, &digest, NULL, 0) == 0);
	free(bytes);
	hr_model_close(f->bed.model);
	return 0;
}

static int child(void *ctx)
{
	int line;

	alarm(30);
	line = check_handles(ctx);
	line = line ? line : check_starts(ctx);
	line = line ? line : check_model(ctx);
	if (line)
		fprintf(stderr, "in the child, line %d: %s %s\n", line, hr_error_name(hr_error_last()->code),
			hr_error_last()->message);
	return line != 0;
}

static void forking(const char *device)
{
	struct hr_loader_opts opts = HR_LOADER_OPTS_INIT;
	struct hr_tensor first = HR_TENSOR_INIT;
	struct family f = {0};
	struct hr_read read;
	hr_buffer *buffer;

	fake_engine_set(&(struct fake_engine_settings){.hang_read = 1});
	opts.engine = "fake";
	opts.readers = 3;
	bed_open(&f.bed, 71, 30, 300000);
	bed_load(&f.bed, device, &opts);
	f.t = (struct hr_tensor)HR_TENSOR_INIT;
	do {
		assert_ok(hr_model_tensor(f.bed.model, f.t.name ? f.t.index + 1 : 0, &f.t));
	} while (f.t.bytes < 100000);
	assert_ok(hr_buffer_new(f.bed.loader, f.t.bytes, &f.buffer));
	f.dst = hr_buffer_data(f.buffer);
	read = (struct hr_read){f.t.index, 0, UINT64_MAX, f.dst, f.t.bytes};
	assert_ok(hr_job_start(f.bed.loader, f.bed.model, &read, 1, NULL, &f.job));
	while (fake_engine_hanging() == 0) /* the fork comes in the middle of a read */
		usleep(500);
	assert_ok(hr_feed_open(f.bed.loader, f.bed.model, NULL, &f.feed));
	assert_ok(hr_feed_next(f.feed, &first, &buffer));
	fflush(NULL);
	assert_int_equal(in_child(child, &f), 0);
	fake_engine_let_go(); /* and the parent goes on */
	assert_ok(hr_job_wait(f.job, HR_FOREVER));
	assert_true(buffer_is_right(f.bed.model, &f.t, f.buffer));
	assert_true(buffer_is_right(f.bed.model, &first, buffer));
	assert_ok(hr_job_close(f.job, 0));
	hr_buffer_release(buffer);
	assert_ok(hr_feed_next(f.feed, &first, &buffer));
	assert_true(buffer_is_right(f.bed.model, &first, buffer));
	hr_buffer_release(buffer);
	hr_buffer_release(f.buffer);
	assert_ok(hr_feed_close(f.feed, HR_FOREVER));
	bed_close(&f.bed);
	fake_engine_set(NULL);
}

static void belongs_to_the_parent_after_a_fork(void **state)
{
	(void)state;
	for (int i = 0; i < 2; i++)
		if (has_device(devices[i]))
			forking(devices[i]);
}

/* ---- io_uring forbidden ---- */

static int forbid_io_uring(void)
{
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = {sizeof(code) / sizeof(code[0]), code};

	return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program);
}

static int load_without_io_uring(void *ctx)
{
	const struct bed *bed = ctx;
	struct hr_loader_opts named = HR_LOADER_OPTS_INIT;
	struct hr_stats stats = HR_STATS_INIT;
	hr_device *device;
	hr_loader *loader;

	if (forbid_io_uring())
		return 77;
	MUST(hr_device_open("cpu", &device) == 0);
	MUST(hr_loader_open(device, NULL, &loader) == 0);
	MUST(load_by_job(loader, bed->model, NULL) == 0);
	MUST(load_by_feed(loader, bed->model, NULL, true, NULL) == 0);
	MUST(hr_loader_stats(loader, &stats) == 0);
	MUST(strstr(stats.note, "uring"));
	MUST(stats.cached_bytes[HR_ENGINE_URING] + stats.direct_bytes[HR_ENGINE_URING] == 0);
	MUST(hr_loader_close(loader, HR_FOREVER) == 0);
	named.engine = "uring";
	MUST(hr_loader_open(device, &named, &loader) == HR_E_UNSUPPORTED);
	MUST(strstr(hr_error_last()->message, "io_uring") && strstr(hr_error_last()->message, "seccomp"));
	MUST(hr_device_close(device) == 0);
	return 0;
}

static int without_io_uring(void *ctx)
{
	int line = load_without_io_uring(ctx);

	if (line && line != 77)
		fprintf(stderr, "in the child, line %d: %s\n", line, hr_error_last()->message);
	return line == 77 ? 77 : line != 0;
}

static void goes_on_without_io_uring_and_says_so(void **state)
{
	struct bed bed;
	int answer;

	(void)state;
	bed_open(&bed, 72, 20, 300000);
	fflush(NULL);
	answer = in_child(without_io_uring, &bed);
	bed_close(&bed);
	if (answer == 77) {
		skip_for("no seccomp filters here");
	}
	assert_int_equal(answer, 0);
}

/* ---- O_DIRECT refused ---- */

static void check_without_direct(hr_model *model, const char *fs)
{
	struct hr_loader_opts bypass = HR_LOADER_OPTS_INIT;
	struct hr_plan_info info = HR_PLAN_INFO_INIT;
	struct hr_read read = {.tensor = 1, .length = UINT64_MAX};
	hr_device *device;
	hr_loader *loader;
	hr_feed *feed;

	assert_ok(hr_device_open("cpu", &device));
	assert_ok(hr_loader_open(device, NULL, &loader));
	assert_ok(load_by_job(loader, model, NULL));
	assert_ok(hr_plan(loader, model, &read, 1, &info));
	assert_non_null(strstr(info.note, "O_DIRECT"));
	assert_non_null(strstr(info.note, fs));
	assert_ok(hr_loader_close(loader, 0));
	bypass.caching = HR_CACHING_BYPASS;
	assert_ok(hr_loader_open(device, &bypass, &loader));
	assert_fails(load_by_job(loader, model, NULL), HR_E_UNSUPPORTED);
	assert_non_null(strstr(hr_error_last()->message, "O_DIRECT"));
	assert_fails(hr_feed_open(loader, model, NULL, &feed), HR_E_UNSUPPORTED);
	assert_ok(hr_loader_close(loader, 0));
	assert_ok(hr_device_close(device));
}

static void goes_on_without_direct_reads_and_says_so(void **state)
{
	struct bed bed;
	hr_model *model;

	(void)state;
	bed_open(&bed, 73, 20, 300000);
	hr__fault_arm("open_direct", 1, EINVAL);
	assert_ok(hr_model_open(bed.paths[0], NULL, &model));
	assert_true(hr__fault_fired());
	hr__fault_arm(NULL, 0, 0);
	check_without_direct(model, "Invalid argument");
	hr_model_close(model);
	bed_close(&bed);
}

static void knows_tmpfs_where_that_has_no_direct_reads(void **state)
{
	char *dir = strdup("/dev/shm/hrtest.XXXXXX"), *path;
	static const struct test_tensor tensors[] = {{"a", "U8", 70000}, {"b", "U8", 50000}};
	hr_model *model;
	int fd;

	(void)state;
	if (!mkdtemp(dir)) {
		free(dir);
		skip_for("no folder can be made in /dev/shm");
	}
	path = path_in(dir, "a.safetensors");
	write_safetensors(path, tensors, 2, 1);
	fd = open(path, O_RDONLY | O_DIRECT);
	assert_ok(hr_model_open(path, NULL, &model));
	if (fd < 0)
		check_without_direct(model, "tmpfs");
	else
		printf("# tmpfs of this kernel takes O_DIRECT\n");
	hr_model_close(model);
	if (fd >= 0)
		close(fd);
	remove_tree(dir);
	free(path);
	free(dir);
}

/* Takes the shards out of the page cache, as far as the kernel lets us. */
static void make_cold(const struct bed *bed)
{
	for (int i = 0; i < 2; i++) {
		int fd = open(bed->paths[i], O_RDONLY);

		fsync(fd);
		posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
		close(fd);
	}
}

static void reads_again_what_a_file_system_turns_down(void **state)
{
	struct hr_loader_opts opts = HR_LOADER_OPTS_INIT;
	struct hr_stats stats = HR_STATS_INIT;
	static const char *const engines[] = {"fake", "fake-queue"};

	(void)state;
	for (int i = 0; i < 2; i++) {
		unsigned char *memory, *want;
		struct hr_tensor t = HR_TENSOR_INIT;
		struct hr_read read;
		struct bed bed;
		hr_job *job;
		int rc;

		fake_engine_set(&(struct fake_engine_settings){.fail_read = 1, .fail_errno = EINVAL});
		opts.engine = engines[i];
		bed_open(&bed, 74, 20, 900000);
		bed_load(&bed, "cpu", &opts);
		do {
			assert_ok(hr_model_tensor(bed.model, t.name ? t.index + 1 : 0, &t));
		} while (t.bytes < 300000);
		want = plain_read(bed.model, &t);
		memory = calloc(1, t.bytes);
		read = (struct hr_read){t.index, 0, UINT64_MAX, memory, t.bytes};
		make_cold(&bed);
		/* of /proc/meminfo: memory is not known to be plenty, so cold bytes go around the cache */
		hr__fault_arm("open", 1, EACCES);
		rc = hr_job_start(bed.loader, bed.model, &read, 1, NULL, &job);
		hr__fault_arm(NULL, 0, 0);
		assert_int_equal(rc, 0);
		rc = hr_job_wait(job, HR_FOREVER);
		assert_ok(hr_job_stats(job, &stats));
		assert_ok(hr_job_close(job, 0));
		if (rc == HR_E_IO)
			printf("# left out: the file could not be taken out of the page cache, or there is no O_DIRECT\n");
		else {
			assert_int_equal(rc, 0);
			assert_memory_equal(memory, want, t.bytes);
			assert_non_null(strstr(stats.note, "EINVAL"));
		}
		free(memory);
		free(want);
		bed_close(&bed);
	}
	fake_engine_set(NULL);
}

/* A file system whose blocks are larger than a slot can hold. */
static void refuses_direct_reads_that_do_not_fit_into_slots(void **state)
{
	static const uint64_t slots[] = {HR_MIN_SLOT_BYTES, HR_MIN_SLOT_BYTES * 3, HR_MIN_SLOT_BYTES * 4};
	struct bed bed;

	(void)state;
	bed_open(&bed, 75, 20, 200000);
	for (int i = 0; i < 3; i++) {
		struct hr_loader_opts opts = HR_LOADER_OPTS_INIT;
		struct hr__file *file = (struct hr__file *)(uintptr_t)&hr__model_source(bed.model, 1)->file;
		hr_feed *feed;

		if (file->direct_fd < 0)
			break;
		file->offset_align = HR_MIN_SLOT_BYTES * 2;
		opts.slot_bytes = slots[i];
		bed_load(&bed, "cpu", &opts);
		assert_ok(load_by_job(bed.loader, bed.model, NULL));
		assert_ok(hr_loader_close(bed.loader, 0));
		opts.caching = HR_CACHING_BYPASS;
		assert_ok(hr_loader_open(bed.device, &opts, &bed.loader));
		if (i < 2) {
			assert_fails(hr_feed_open(bed.loader, bed.model, NULL, &feed), HR_E_UNSUPPORTED);
			assert_string_equal(hr_error_last()->path, bed.paths[1]);
		} else {
			assert_ok(load_by_feed(bed.loader, bed.model, NULL, false, NULL));
		}
		assert_ok(hr_loader_close(bed.loader, 0));
		assert_ok(hr_device_close(bed.device));
	}
	bed.loader = NULL;
	bed.device = NULL;
	bed_close(&bed);
}

/* ---- resident set ---- */

/* The most that the process has of VmRSS, in KiB, while a sparse checkpoint of so many tensors of 16 MiB is fed and
 * dropped. */
static uint64_t most_resident(size_t n)
{
	struct hr_loader_opts opts = HR_LOADER_OPTS_INIT;
	char *dir = make_temp_dir(), *path = path_in(dir, "sparse.safetensors"), header[65536];
	struct hr_tensor t = HR_TENSOR_INIT;
	uint64_t length, most = 0;
	hr_buffer *buffer;
	hr_feed *feed;
	struct bed bed;
	int fd = open(path, O_RDWR | O_CREAT, 0600), at = 8;

	for (size_t i = 0; i < n; i++)
		at += snprintf(header + at, sizeof(header) - (size_t)at,
			       "%s\"t%zu\":{\"dtype\":\"U8\",\"shape\":[16777216],\"data_offsets\":[%zu,%zu]}",
			       i ? "," : "{", i, i << 24, (i + 1) << 24);
	header[at++] = '}';
	length = (uint64_t)at - 8;
	memcpy(header, &length, 8);
	assert_int_equal(write(fd, header, (size_t)at), at);
	assert_int_equal(ftruncate(fd, (off_t)((uint64_t)at + ((uint64_t)n << 24))), 0);
	close(fd);
	opts.staging_bytes = UINT64_C(16) << 20;
	bed_open_model(&bed, path);
	bed_load(&bed, "cpu", &opts);
	assert_ok(hr_feed_open(bed.loader, bed.model, NULL, &feed));
	while (hr_feed_next(feed, &t, &buffer) == 0) {
		uint64_t now = proc_status("VmRSS");

		most = now > most ? now : most;
		hr_buffer_release(buffer);
	}
	assert_int_equal(hr_error_last()->code, HR_E_END);
	assert_ok(hr_feed_close(feed, 0));
	bed_close(&bed);
	remove_tree(dir);
	free(path);
	free(dir);
	return most;
}

static void needs_memory_that_does_not_depend_on_the_models_size(void **state)
{
	uint64_t before = proc_status("VmRSS"), small, large;

	(void)state;
	small = most_resident(8);  /* 128 MiB */
	large = most_resident(64); /* 1 GiB */
	printf("# resident before %llu KiB, at most %llu and %llu\n", (unsigned long long)before,
	       (unsigned long long)small, (unsigned long long)large);
	assert_true(large <= small + (24 << 10));
#ifndef __SANITIZE_THREAD__ /* which shadows each byte with several */
	assert_true(large <= before + (96 << 10));
#endif
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(goes_on_without_io_uring_and_says_so),
		cmocka_unit_test(needs_memory_that_does_not_depend_on_the_models_size),
		cmocka_unit_test(belongs_to_the_parent_after_a_fork),
		cmocka_unit_test(goes_on_without_direct_reads_and_says_so),
		cmocka_unit_test(knows_tmpfs_where_that_has_no_direct_reads),
		cmocka_unit_test(reads_again_what_a_file_system_turns_down),
		cmocka_unit_test(refuses_direct_reads_that_do_not_fit_into_slots),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
