/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Models of a store whose disk belongs to uGDS, and engine ugds, over the look-alike library: right bytes by the
 * window and by way of the host, no slot used again too early, what is checked of the store through uGDS, and each
 * failure with its error, nothing left and nothing handed out. A plain file stands for the disk and its node.
 *
 * After a read that failed a process is done with uGDS, so those tests run in a child each, which alone touches the
 * GPU.
 */
#include "loadtest.h"

#include "engine/ugds_syms.h"
#include "fakes/fake_cuda.h"
#include "fakes/fake_ugds.h"
#include "store/label.h"
#include "store/snapshot.h"
#include "stored_ugds.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#undef hr_loader_open
#undef hr_model_open
#undef hr_model_open_files

#define MIB (UINT64_C(1) << 20)

static struct fake_cuda cuda;
static struct fake_ugds ugds;

/* A store with one model in an image, its manifest, and the model as a file, to compare with. */
static char *dir, *disk, *sidecar, *source, *name;

static int reset_fakes(void **state)
{
	(void)state;
	ugds.reset();
	cuda.reset();
	hr__fault_arm(NULL, 0, 0);
	return 0;
}

static int make_store(void **state)
{
	struct hr_store_init_opts init = HR_STORE_INIT_OPTS_INIT;
	struct hr_store_opts opts = HR_STORE_OPTS_INIT;
	struct test_tensor tensors[24];
	char names[24][16];
	hr_store *store;

	(void)state;
	dir = make_temp_dir();
	disk = path_in(dir, "disk.img");
	sidecar = path_in(dir, "side.json");
	source = path_in(dir, "m.safetensors");
	for (size_t i = 0; i < 24; i++) {
		snprintf(names[i], sizeof(names[i]), "t%zu", i);
		tensors[i] = (struct test_tensor){names[i], "U8", i % 7 == 3 ? 3000001 : 1 + 41003 * i};
	}
	write_safetensors(source, tensors, 24, 77);
	init.bytes = 64 * MIB;
	opts.flags = HR_STORE_WRITE;
	if (hr_store_init(disk, &init) || hr_store_open(disk, &opts, &store) ||
	    hr_store_import(store, source, "m", NULL, NULL))
		return -1;
	hr_store_close(store);
	write_sidecar(disk, sidecar);
	return asprintf(&name, "store:%s#m", sidecar) < 0;
}

static int remove_store(void **state)
{
	(void)state;
	remove_tree(dir);
	free(name);
	free(source);
	free(sidecar);
	free(disk);
	free(dir);
	return 0;
}

static int open_model(const char *what, hr_model **out)
{
	struct hr_model_opts opts = HR_MODEL_OPTS_INIT;

	opts.ugds = disk;
	return hr_model_open(what, &opts, out);
}

static struct hr_loader_opts window_of(uint64_t slot_bytes, uint64_t n_slots)
{
	struct hr_loader_opts opts = HR_LOADER_OPTS_INIT;

	opts.engine = "ugds";
	opts.slot_bytes = slot_bytes;
	opts.staging_bytes = slot_bytes * n_slots;
	return opts;
}

static void open_both(struct bed *bed, const struct hr_loader_opts *opts)
{
	*bed = (struct bed){0};
	assert_ok(open_model(name, &bed->model));
	assert_ok(hr_device_open("cuda:0", &bed->device));
	assert_ok(hr_loader_open(bed->device, opts, &bed->loader));
}

static void assert_no_complaint(void)
{
	char text[256] = "";

	if (ugds.errors(text, sizeof(text)))
		fail_msg("the look-alike uGDS complains: %s", text);
	if (cuda.errors(text, sizeof(text)))
		fail_msg("the look-alike driver complains: %s", text);
	assert_int_equal(ugds.live(NULL), 0);
	assert_int_equal(cuda.live(NULL), 0);
}

/* A load's bytes are compared with a read of the model by way of the host; this compares that with the file. */
static void the_model_has_the_files_bytes(const hr_model *model)
{
	struct hr_shard shard = HR_SHARD_INIT;
	unsigned char *got, *want;
	FILE *file = fopen(source, "r");

	assert_non_null(file);
	assert_ok(hr_model_shard(model, 0, &shard));
	got = malloc(shard.bytes);
	want = malloc(shard.bytes);
	assert_int_equal(fread(want, 1, shard.bytes, file), shard.bytes);
	fclose(file);
	assert_ok(hr_model_read_shard(model, 0, 0, got, shard.bytes));
	assert_memory_equal(got, want, shard.bytes);
	assert_ok(hr_model_read_shard(model, 0, 4095, got, 100003));
	assert_memory_equal(got, want + 4095, 100003);
	free(got);
	free(want);
}

/* ---- right bytes ---- */

static void delivers_right_bytes_and_says_how(void **state)
{
	static const struct hr_job_opts verify = {sizeof(verify), 0, HR_JOB_VERIFY, NULL, NULL};
	struct hr_loader_opts opts = window_of(512 << 10, 8);
	struct hr_stats stats = HR_STATS_INIT;
	struct bed bed;

	(void)state;
	open_both(&bed, &opts);
	the_model_has_the_files_bytes(bed.model);
	assert_ok(load_by_job(bed.loader, bed.model, NULL));
	assert_ok(load_by_job(bed.loader, bed.model, &verify));
	assert_ok(load_by_feed(bed.loader, bed.model, NULL, true, NULL));
	assert_ok(hr_loader_stats(bed.loader, &stats));
	for (int i = 0; i < HR_N_ENGINES; i++) {
		assert_int_equal(stats.cached_bytes[i], 0);
		assert_true((stats.direct_bytes[i] > 0) == (i == HR_ENGINE_UGDS));
	}
	assert_true(stats.verified_bytes > 0);
	assert_non_null(strstr(stats.note, "uGDS, 0.1 GB disk with sectors of 512 bytes"));
	assert_int_equal(ugds.calls("uGDSHandleRegister"), 1);
	assert_int_equal(ugds.calls("uGDSBufRegister"), 2); /* the window and the bounce */
	bed_close(&bed);
	assert_no_complaint();
}

/* The same store as one that was made on a disk with sectors of 4096 bytes. */
static void make_large_sectors(const char *path, const char *manifest)
{
	struct hr__label label;
	unsigned char *record = malloc(4096);
	char *bytes = malloc(64 * MIB);
	FILE *file = fopen(disk, "r");

	assert_int_equal(fread(bytes, 1, 64 * MIB, file), 64 * MIB);
	fclose(file);
	for (unsigned copy = 0; copy < 2; copy++) {
		uint64_t at = hr__label_off(64 * MIB, copy);

		assert_int_equal(hr__label_decode((unsigned char *)bytes + at, at, &label), HR__RECORD_GOOD);
		label.lba_bytes = label.phys_bytes = 4096;
		hr__label_encode(&label, at, record);
		memcpy(bytes + at, record, 4096);
	}
	write_file(path, bytes, 64 * MIB);
	write_sidecar(path, manifest);
	free(bytes);
	free(record);
}

static void sectors_of_4096_bytes_are_found_out_and_kept_to(void **state)
{
	char *large = path_in(dir, "large.img"), *manifest = path_in(dir, "large.json"), *what;
	struct hr_loader_opts window = window_of(256 << 10, 4);
	struct hr_model_opts opts = HR_MODEL_OPTS_INIT;
	struct bed bed = {0};

	(void)state;
	make_large_sectors(large, manifest);
	if (asprintf(&what, "store:%s#m", manifest) < 0)
		abort();
	opts.ugds = large;
	assert_fails(hr_model_open(what, &opts, &bed.model), HR_E_GEOMETRY); /* the disk has 512 */
	opts.ugds = disk;
	assert_fails(hr_model_open(what, &opts, &bed.model), HR_E_GEOMETRY);
	ugds.set("lba", 4096);
	assert_fails(open_model(name, &bed.model), HR_E_GEOMETRY);
	assert_non_null(strstr(hr_error_last()->message, "sectors of 4096 bytes"));
	/* the manifest agrees, the label does not */
	assert_fails(hr_model_open(what, &opts, &bed.model), HR_E_GEOMETRY);
	opts.ugds = large;
	assert_ok(hr_model_open(what, &opts, &bed.model));
	assert_ok(hr_device_open("cuda:0", &bed.device));
	assert_ok(hr_loader_open(bed.device, &window, &bed.loader));
	the_model_has_the_files_bytes(bed.model);
	assert_ok(load_by_job(bed.loader, bed.model, NULL));
	assert_ok(load_by_feed(bed.loader, bed.model, NULL, false, NULL));
	bed_close(&bed);
	assert_int_equal(unlink(large), 0);
	free(what);
	free(manifest);
	free(large);
	assert_no_complaint();
}

/* A region that begins inside the disk: everything is read from there on. */
static void a_region_may_begin_anywhere_in_the_disk(void **state)
{
	char *whole = path_in(dir, "whole.img"), *bytes = malloc(64 * MIB);
	struct hr__pin_region where = {.bytes = 64 * MIB, .base = 3 * MIB, .device_bytes = 67 * MIB, .lba_bytes = 512};
	struct hr__ugds_place place = {whole, "side.json", &where};
	struct hr__snapshot_want want = {.is_moved = true, .open_region = hr__ugds_region_open, .region_ctx = &place};
	struct hr__source object;
	struct hr__view *view;
	unsigned char head[64], *got;
	uint32_t model;
	FILE *file;

	(void)state;
	file = fopen(disk, "r");
	assert_int_equal(fread(bytes, 1, 64 * MIB, file), 64 * MIB);
	fclose(file);
	file = fopen(whole, "w");
	assert_int_equal(fseek(file, 3 * MIB, SEEK_SET), 0);
	assert_int_equal(fwrite(bytes, 1, 64 * MIB, file), 64 * MIB);
	fclose(file);
	free(bytes);
	assert_ok(hr__view_open("unused", &want, NULL, &view));
	assert_fails(hr__ugds_compare(&place, hr__view_snapshot(view)), HR_E_PIN); /* the label says 0 */
	assert_true(hr__manifest_find_model(&hr__view_snapshot(view)->manifest, "m", 1, &model));
	assert_ok(hr__view_source(view, model, "m.safetensors", "m", &object));
	got = malloc(object.bytes);
	assert_ok(hr__source_read(&object, 0, got, object.bytes));
	file = fopen(source, "r");
	assert_int_equal(fread(head, 1, 64, file), 64);
	fclose(file);
	assert_memory_equal(got, head, 64);
	assert_ok(hr__source_check(&object));
	free(got);
	hr__source_close(&object);
	hr__view_unref(view);
	assert_int_equal(unlink(whole), 0);
	free(whole);
	assert_no_complaint();
}

static void the_loader_may_be_opened_first_and_serve_several_models(void **state)
{
	struct hr_loader_opts opts = window_of(256 << 10, 4);
	hr_model *first, *second;
	hr_device *device;
	hr_loader *loader;

	(void)state;
	assert_ok(hr_device_open("cuda:0", &device));
	assert_ok(hr_loader_open(device, &opts, &loader));
	assert_int_equal(ugds.live(NULL), 0);
	assert_ok(open_model(name, &first));
	assert_ok(open_model(name, &second));
	assert_int_equal(ugds.calls("uGDSHandleRegister"), 1);
	assert_ok(load_by_job(loader, first, NULL));
	hr_model_close(first);
	assert_ok(load_by_job(loader, second, NULL));
	hr_model_close(second); /* the loader still holds the disk */
	assert_int_equal(ugds.live("handles"), 1);
	assert_ok(hr_loader_close(loader, HR_FOREVER));
	assert_int_equal(ugds.live(NULL), 0);
	hr_device_close(device);
	assert_no_complaint();
}

static void other_devices_and_engines_read_by_way_of_the_host_or_say_why_not(void **state)
{
	static const struct {
		const char *device, *engine;
		int code;
	} table[] = {{"cpu", NULL, 0},      {"cpu", "pread", 0},      {"cuda:0", NULL, 0},      {"cuda:0", "pread", 0},
		     {"cpu", "uring", -12}, {"cuda:0", "uring", -12}, {"cuda:0", "mapped", -12}};

	(void)state;
	for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++) {
		struct hr_loader_opts opts = HR_LOADER_OPTS_INIT;
		struct bed bed = {0};
		int rc;

		opts.engine = table[i].engine;
		assert_ok(open_model(name, &bed.model));
		assert_ok(hr_device_open(table[i].device, &bed.device));
		if (hr_loader_open(bed.device, &opts, &bed.loader) == 0) { /* io_uring may not be allowed */
			rc = load_by_job(bed.loader, bed.model, NULL);
			assert_int_equal(rc, table[i].code);
			if (rc)
				assert_non_null(strstr(hr_error_last()->message, "engine ugds"));
		}
		bed_close(&bed);
	}
	assert_no_complaint();
}

static void engine_ugds_reads_nothing_else(void **state)
{
	struct hr_loader_opts opts = window_of(256 << 10, 4);
	struct bed bed = {0};

	(void)state;
	assert_ok(hr_model_open(source, NULL, &bed.model));
	assert_ok(hr_device_open("cuda:0", &bed.device));
	assert_ok(hr_loader_open(bed.device, &opts, &bed.loader));
	assert_fails(load_by_job(bed.loader, bed.model, NULL), HR_E_UNSUPPORTED);
	assert_non_null(strstr(hr_error_last()->message, "was not opened through uGDS"));
	assert_ok(hr_loader_close(bed.loader, HR_FOREVER));
	opts.slot_bytes = 9 * MIB;
	opts.staging_bytes = 18 * MIB;
	assert_fails(hr_loader_open(bed.device, &opts, &bed.loader), HR_E_UNSUPPORTED);
	hr_device_close(bed.device);
	assert_ok(hr_device_open("cpu", &bed.device));
	opts = window_of(256 << 10, 4);
	assert_fails(hr_loader_open(bed.device, &opts, &bed.loader), HR_E_UNSUPPORTED);
	bed_close(&bed);
	assert_no_complaint();
}

/* ---- no slot is used again too early ---- */

static void no_slot_is_used_again_before_its_read_and_its_copy_are_over(void **state)
{
	static const uint64_t sizes[] = {2, 3, 16};

	(void)state;
	for (size_t i = 0; i < 3; i++)
		for (long long seed = 1; seed < 4; seed++) {
			struct hr_loader_opts opts = window_of(256 << 10, sizes[i]);
			struct bed bed;

			reset_fakes(NULL);
			cuda.set("seed", seed);
			ugds.set("seed", seed);
			opts.readers = 8;
			open_both(&bed, &opts);
			cuda.set("delay_us", 2000);
			ugds.set("delay_us", 1000);
			assert_ok(load_by_feed(bed.loader, bed.model, NULL, false, NULL));
			cuda.set("delay_us", 50);
			ugds.set("delay_us", 200);
			assert_ok(load_by_job(bed.loader, bed.model, NULL));
			assert_true(ugds.live("peak_reads") <= (long long)sizes[i] + 1); /* and the bounce */
			if (sizes[i] > 2)
				assert_true(ugds.live("peak_reads") > 1);
			bed_close(&bed);
			assert_no_complaint();
		}
}

/* ---- what is checked of the store ---- */

static void what_is_missing_or_in_the_way_is_told(void **state)
{
	struct hr_model_opts opts = HR_MODEL_OPTS_INIT;
	char *stored, *lost = path_in(dir, "lost.img"), *other = path_in(dir, "other.img");
	hr_model *model, *second;
	int fd;

	(void)state;
	if (asprintf(&stored, "store:%s#m", disk) < 0)
		abort();
	assert_fails(open_model(stored, &model), HR_E_OPTS); /* the store itself, not its manifest */
	assert_non_null(strstr(hr_error_last()->message, "headrace store export"));
	assert_fails(open_model(source, &model), HR_E_OPTS);
	opts.ugds = lost;
	assert_fails(hr_model_open(name, &opts, &model), HR_E_NOTFOUND);
	assert_non_null(strstr(hr_error_last()->message, "ugds_drv"));
	/* without a word of uGDS, where the region is gone */
	assert_int_equal(rename(disk, lost), 0);
	assert_fails(hr_model_open(name, NULL, &model), HR_E_NOTFOUND);
	assert_non_null(strstr(hr_error_last()->message, "--ugds"));
	assert_ok(hr_model_open(name, &opts, &model)); /* which now is the disk's name */
	opts.ugds = other;
	write_file(other, "x", 1);
	assert_fails(hr_model_open(name, &opts, &second), HR_E_BUSY); /* one disk at a time */
	assert_non_null(strstr(hr_error_last()->message, lost));
	hr_model_close(model);
	assert_int_equal(rename(lost, disk), 0);
	/* another process has it */
	fd = open(disk, O_RDWR | O_CLOEXEC);
	assert_int_equal(hr__os_lock(fd, HR__OS_LOCK_ALONE, 0, 1), 0);
	assert_fails(open_model(name, &model), HR_E_LOCKED);
	close(fd);
	ugds.set("capacity_mib", 63);
	assert_fails(open_model(name, &model), HR_E_GEOMETRY);
	assert_non_null(strstr(hr_error_last()->message, "another disk"));
	ugds.set("capacity_mib", 0);
	assert_int_equal(unlink(other), 0);
	free(stored);
	free(lost);
	free(other);
	assert_no_complaint();
}

/* The manifest with `from` replaced; both texts of any length. */
static void write_changed(const char *path, const char *from, const char *to)
{
	char *text = malloc(1 << 20), *out = malloc(1 << 20), *at;
	FILE *file = fopen(sidecar, "r");
	size_t n;

	assert_non_null(file);
	n = fread(text, 1, (1 << 20) - 1, file);
	fclose(file);
	text[n] = '\0';
	at = strstr(text, from);
	assert_non_null(at);
	n = (size_t)snprintf(out, 1 << 20, "%.*s%s%s", (int)(at - text), text, to, at + strlen(from));
	write_file(path, out, n);
	free(out);
	free(text);
}

static void a_manifest_that_does_not_fit_the_disk_is_refused(void **state)
{
	static const struct {
		const char *from, *to;
		int code;
	} table[] = {
		{"\"region\": {", "\"area\": {", HR_E_FIELD},
		{"\"lba_bytes\": 512", "\"lba_bytes\": 0", HR_E_FIELD},
		{"\"lba_bytes\": 512", "\"lba_bytes\": \"512\"", HR_E_TYPE},
		{"\"lba_bytes\": 512", "\"lba_bytes\": 512, \"lba_bytes\": 512", HR_E_DUPLICATE},
		{"\"lba_bytes\": 512", "\"lba_bytes\": 1024", HR_E_GEOMETRY},
		{"\"base\": 0", "\"base\": 512", HR_E_GEOMETRY},
		{"\"base\": 0", "\"base\": 18446744073709486080", HR_E_GEOMETRY},
		{"\"base\": 0", "\"base\": 65536", HR_E_GEOMETRY}, /* it would end behind the disk */
		{"\"device_bytes\": 67108864", "\"device_bytes\": 67108865", HR_E_GEOMETRY},
		{"\"device_bytes\": 67108864", "\"device_bytes\": 67108863", HR_E_PIN}, /* the label says more */
		{"\"bytes\": 67108864", "\"bytes\": 33554432", HR_E_GEOMETRY},          /* smaller than the label's */
		{"\"bytes\": 67108864", "\"bytes\": 1048576", HR_E_NOT_A_STORE},
		{"\"generation\": 2", "\"generation\": 3", HR_E_NOTFOUND},
		{"\"body_sha256\": \"", "\"body_sha256\": \"00", HR_E_TYPE},
		{"\"store_uuid\": \"", "\"store_uuid\": \"00000000000000000000000000000000\", \"x\": \"", HR_E_PIN},
		{"\"body_sha256\": \"",
		 "\"body_sha256\": \"0000000000000000000000000000000000000000000000000000000000000000\", \"x\": \"",
		 HR_E_PIN},
	};
	char *changed = path_in(dir, "changed.json"), *what;
	hr_model *model;

	(void)state;
	if (asprintf(&what, "store:%s#m", changed) < 0)
		abort();
	for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++) {
		int rc;

		write_changed(changed, table[i].from, table[i].to);
		rc = open_model(what, &model);
		if (rc != table[i].code)
			fail_msg("%s instead of %s: %s, not %s: %s", table[i].to, table[i].from, hr_error_name(rc),
				 hr_error_name(table[i].code), hr_error_last()->message);
		assert_no_complaint();
	}
	free(what);
	free(changed);
}

static void write_at(uint64_t offset, const void *bytes, size_t n)
{
	int fd = open(disk, O_WRONLY | O_CLOEXEC);

	assert_int_equal(pwrite(fd, bytes, n, (off_t)offset), n);
	close(fd);
}

/* The store is taken away under a model that is open: the check after the next load finds it. */
static void a_store_that_goes_away_is_noticed_through_ugds(void **state)
{
	struct hr_loader_opts opts = window_of(256 << 10, 4);
	unsigned char saved[2][4096], zeros[4096] = {0};
	static const uint64_t at[2] = {64 << 10, 63 * MIB};
	int fd = open(disk, O_RDONLY | O_CLOEXEC);
	struct bed bed;

	(void)state;
	for (int i = 0; i < 2; i++)
		assert_int_equal(pread(fd, saved[i], 4096, (off_t)at[i]), 4096);
	close(fd);
	open_both(&bed, &opts);
	assert_ok(load_by_job(bed.loader, bed.model, NULL));
	for (int i = 0; i < 2; i++)
		write_at(at[i], zeros, 4096);
	assert_fails(load_by_job(bed.loader, bed.model, NULL), HR_E_REGION_CHANGED);
	for (int i = 0; i < 2; i++)
		write_at(at[i], saved[i], 4096);
	bed_close(&bed);
	assert_no_complaint();
}

/* ---- failures that a process survives ---- */

struct failure {
	const char *function;
	unsigned n;
	int code; /* what the library answers */
	int expected;
	const char *says;
};

static void a_disk_that_cannot_be_opened_leaves_nothing(void **state)
{
	static const struct failure table[] = {
		{"uGDSDriverOpen", 1, HR__UG_DRIVER_VERSION_MISMATCH, HR_E_GDS, "another version (5004)"},
		{"uGDSHandleRegister", 1, HR__UG_PERMISSION_DENIED, HR_E_GDS, "(5025)"},
		{"uGDSHandleRegister", 1, HR__UG_INVALID_FILE_TYPE, HR_E_GDS, "(5018)"},
		{"uGDSGetDeviceCapacity", 1, HR__UG_INTERNAL_ERROR, HR_E_GDS, "(5030)"},
		{"uGDSBufRegister", 1, HR__UG_GPU_MEMORY_PINNING_FAILED, HR_E_GDS, "could not be pinned (5036)"},
		{"uGDSBufRegister", 1, HR__UG_CUDA_DRIVER_ERROR, HR_E_GDS, "(5011)"},
		{"uGDSHandleRegister", 1, 5099, HR_E_GDS, "error 5099"},
	};
	hr_model *model;

	(void)state;
	for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++) {
		ugds.arm(table[i].function, table[i].n, table[i].code);
		assert_fails(open_model(name, &model), table[i].expected);
		assert_int_equal(hr_error_last()->system, table[i].code);
		if (!strstr(hr_error_last()->message, table[i].says))
			fail_msg("\"%s\" does not say \"%s\"", hr_error_last()->message, table[i].says);
		assert_no_complaint();
	}
	assert_ok(open_model(name, &model));
	hr_model_close(model);
	assert_no_complaint();
}

static void a_read_that_is_refused_or_short_fails_the_job_alone(void **state)
{
	struct hr_loader_opts opts = window_of(128 << 10, 4);
	struct bed bed;

	(void)state;
	open_both(&bed, &opts);
	ugds.arm("uGDSRead", 7, EINVAL);
	assert_fails(load_by_job(bed.loader, bed.model, NULL), HR_E_GDS);
	assert_non_null(strstr(hr_error_last()->message, "other sectors"));
	ugds.set("short_every", 5);
	assert_int_equal(load_by_job(bed.loader, bed.model, NULL), HR_E_SHORT);
	ugds.set("short_every", 0);
	assert_ok(load_by_job(bed.loader, bed.model, NULL));
	ugds.set("busy", 3); /* and what is busy for a moment is waited for */
	bed_close(&bed);
	assert_no_complaint();
}

static void a_window_that_does_not_fit_is_made_smaller(void **state)
{
	struct hr_loader_opts opts = window_of(256 << 10, 16);
	struct hr_stats stats = HR_STATS_INIT;
	struct bed bed;

	(void)state;
	ugds.set("room_kib", 1024 + 2048);
	open_both(&bed, &opts);
	assert_ok(hr_loader_stats(bed.loader, &stats));
	assert_int_equal(stats.n_slots, 8);
	assert_non_null(strstr(stats.note, "window 2.0 of 4.0 MiB"));
	assert_ok(load_by_job(bed.loader, bed.model, NULL));
	bed_close(&bed);
	assert_no_complaint();
}

/* Every system call, allocation and library call of an opening and a load fails once; each is told and leaves
 * nothing. */
static void every_call_that_fails_is_told_and_leaves_nothing(void **state)
{
	static const struct {
		const char *point;
		int code;
	} table[] = {{"malloc", ENOMEM},
		     {"open", EMFILE},
		     {"fork_mark", ENOMEM},
		     {"cuMemAlloc", 2},
		     {"cuMemcpyDtoHAsync", 1},
		     {"uGDSDriverOpen", HR__UG_INTERNAL_ERROR},
		     {"uGDSHandleRegister", HR__UG_INTERNAL_ERROR},
		     {"uGDSGetDeviceCapacity", HR__UG_INTERNAL_ERROR},
		     {"uGDSBufRegister", HR__UG_INTERNAL_ERROR},
		     {"uGDSRead", EINVAL}};

	(void)state;
	for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++) {
		bool fired = true;

		for (uint64_t n = 1; fired; n++) {
			hr_model *model = NULL;
			int rc;

			hr__fault_arm(table[i].point, n, table[i].code);
			rc = open_model(name, &model);
			fired = hr__fault_fired();
			hr__fault_arm(NULL, 0, 0);
			if (rc)
				assert_int_equal(hr_error_last()->code, rc);
			hr_model_close(model);
			assert_no_complaint();
		}
	}
}

/* ---- failures after which the process is done with uGDS ---- */

/* In a child: what a test found wrong, as a line's number. */
#define NEED(what)                                                                                                     \
	do {                                                                                                           \
		if (!(what)) {                                                                                         \
			fprintf(stderr, "%s:%d: %s: %s\n", __func__, __LINE__, #what, hr_error_last()->message);       \
			return 1;                                                                                      \
		}                                                                                                      \
	} while (0)

static void in_a_child(int (*run)(void))
{
	int status;
	pid_t child;

	fflush(stdout);
	child = fork();
	if (child == 0)
		_exit(run());
	assert_int_equal(waitpid(child, &status, 0), child);
	assert_int_equal(status, 0);
}

static int lose_the_disk(int expected_first)
{
	struct hr_loader_opts opts = window_of(128 << 10, 4);
	struct bed bed = {0};
	hr_model *again;

	ugds.set("strict", 1);
	NEED(open_model(name, &bed.model) == 0 && hr_device_open("cuda:0", &bed.device) == 0);
	NEED(hr_loader_open(bed.device, &opts, &bed.loader) == 0);
	if (expected_first == EIO)
		ugds.set("wedge_after", 9);
	else
		ugds.arm("uGDSRead", 9, expected_first);
	NEED(load_by_job(bed.loader, bed.model, NULL) == HR_E_GDS);
	NEED(strstr(hr_error_last()->message, "restart the process"));
	NEED(load_by_job(bed.loader, bed.model, NULL) == HR_E_GDS);
	NEED(strstr(hr_error_last()->message, "restart the process"));
	NEED(open_model(name, &again) == HR_E_GDS && strstr(hr_error_last()->message, "restart the process"));
	NEED(hr_loader_close(bed.loader, 20000) == 0); /* what the disk may still write to is kept */
	hr_model_close(bed.model);
	hr_device_close(bed.device);
	NEED(ugds.live("buffers") == 2 && ugds.live("handles") == 1 && ugds.calls("uGDSBufDeregister") == 0);
	NEED(cuda.live("memory") >= 2);
	NEED(ugds.errors(NULL, 0) == 0 && cuda.errors(NULL, 0) == 0);
	NEED(open_model(name, &again) == HR_E_GDS);
	return 0;
}

static int lose_by_a_time_out(void)
{
	return lose_the_disk(EIO);
}

static int lose_by_ebadf(void)
{
	return lose_the_disk(EBADF);
}

static void a_lost_disk_is_told_for_ever_and_its_memory_kept(void **state)
{
	(void)state;
	in_a_child(lose_by_a_time_out);
	in_a_child(lose_by_ebadf);
}

static int stay_busy(void)
{
	struct hr_loader_opts opts = window_of(128 << 10, 4);
	struct bed bed = {0};
	hr_model *again;

	NEED(open_model(name, &bed.model) == 0 && hr_device_open("cuda:0", &bed.device) == 0);
	NEED(hr_loader_open(bed.device, &opts, &bed.loader) == 0);
	NEED(load_by_job(bed.loader, bed.model, NULL) == 0);
	ugds.set("busy", 1000000);
	NEED(hr_loader_close(bed.loader, 20000) == 0);
	NEED(cuda.live("memory") >= 2 && ugds.live("buffers") == 2); /* not freed under the library */
	hr_model_close(bed.model);
	hr_device_close(bed.device);
	NEED(open_model(name, &again) == HR_E_GDS);
	return 0;
}

static void memory_that_stays_busy_is_never_freed(void **state)
{
	(void)state;
	in_a_child(stay_busy);
}

static int fork_again(void)
{
	hr_model *model, *again;
	unsigned char byte;
	int status;
	pid_t child;

	NEED(open_model(name, &model) == 0);
	child = fork();
	if (child == 0) {
		bool good = hr_model_read_shard(model, 0, 0, &byte, 1) == HR_E_FORKED &&
			    open_model(name, &again) == HR_E_FORKED;

		hr_model_close(model);
		_exit(!good);
	}
	waitpid(child, &status, 0);
	NEED(status == 0);
	NEED(hr_model_read_shard(model, 0, 0, &byte, 1) == 0); /* the parent's goes on */
	hr_model_close(model);
	NEED(ugds.live(NULL) == 0 && ugds.errors(NULL, 0) == 0);
	return 0;
}

static void a_forked_child_makes_no_call(void **state)
{
	(void)state;
	in_a_child(fork_again);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		/* first, while this process has not touched the GPU */
		cmocka_unit_test(a_lost_disk_is_told_for_ever_and_its_memory_kept),
		cmocka_unit_test(memory_that_stays_busy_is_never_freed),
		cmocka_unit_test(a_forked_child_makes_no_call),
		cmocka_unit_test_setup(delivers_right_bytes_and_says_how, reset_fakes),
		cmocka_unit_test_setup(sectors_of_4096_bytes_are_found_out_and_kept_to, reset_fakes),
		cmocka_unit_test_setup(a_region_may_begin_anywhere_in_the_disk, reset_fakes),
		cmocka_unit_test_setup(the_loader_may_be_opened_first_and_serve_several_models, reset_fakes),
		cmocka_unit_test_setup(other_devices_and_engines_read_by_way_of_the_host_or_say_why_not, reset_fakes),
		cmocka_unit_test_setup(engine_ugds_reads_nothing_else, reset_fakes),
		cmocka_unit_test_setup(no_slot_is_used_again_before_its_read_and_its_copy_are_over, reset_fakes),
		cmocka_unit_test_setup(what_is_missing_or_in_the_way_is_told, reset_fakes),
		cmocka_unit_test_setup(a_manifest_that_does_not_fit_the_disk_is_refused, reset_fakes),
		cmocka_unit_test_setup(a_store_that_goes_away_is_noticed_through_ugds, reset_fakes),
		cmocka_unit_test_setup(a_disk_that_cannot_be_opened_leaves_nothing, reset_fakes),
		cmocka_unit_test_setup(a_read_that_is_refused_or_short_fails_the_job_alone, reset_fakes),
		cmocka_unit_test_setup(a_window_that_does_not_fit_is_made_smaller, reset_fakes),
		cmocka_unit_test_setup(every_call_that_fails_is_told_and_leaves_nothing, reset_fakes),
	};

	if (!fake_cuda_find(&cuda) || !fake_ugds_find(&ugds)) {
		printf("1..0 # SKIP the look-alikes of the CUDA driver and of uGDS are not here\n");
		return 0;
	}
	return cmocka_run_group_tests(tests, make_store, remove_store);
}
