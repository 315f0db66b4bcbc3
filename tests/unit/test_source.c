/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sources that are not files of their own: objects that lie somewhere in a region, side by side, with checksums of
 * their blocks and an owner who is asked whether all is still as it was. A stand-in for a store owns them here, which
 * can present its region as a file or as a block device, and can say that it has changed.
 */
#include "loadtest.h"

#include "core/arith.h"
#include "core/error.h"
#include "core/hash.h"
#include "core/mem.h"
#include "fakes/fake_engine.h"
#include "model/build.h"

#include <fcntl.h>
#include <stdatomic.h>
#include <sys/stat.h>
#include <unistd.h>

#define EXTENT_ALIGN ((uint64_t)64 << 10)
#define N_OBJECTS    3

struct object {
	uint64_t base, bytes, room, header_bytes;
	uint8_t sha256[32]; /* of the header */
	uint32_t *crc;
	uint64_t n_blocks;
};

/* The region "<dir>/region": objects one after the other, the last one's extent ends with the file. */
struct owner {
	char *dir, *path;
	struct object objects[N_OBJECTS];
	int fd, direct_fd;
	uint8_t log2;
	bool direct_only;
	_Atomic int refuses; /* the code that check() gives */
	_Atomic unsigned n_checks, n_open;
	unsigned n_blocks_asked;
};

static struct owner owner;

static int check_owner(const struct hr__source *source)
{
	(void)source;
	owner.n_checks++;
	return owner.refuses ? hr__fail(owner.refuses, "the region is another one now") : 0;
}

static int blocks_of(const struct hr__source *source, struct hr__source_blocks *out)
{
	const struct object *object = &owner.objects[source->number];

	owner.n_blocks_asked++;
	*out = (struct hr__source_blocks){object->crc, object->n_blocks, owner.log2};
	return 0;
}

static int prove_object(const struct hr__source *source, const void *bytes, size_t n)
{
	uint8_t found[32];

	hr__sha256_of(bytes, n, found);
	if (n == source->proven && memcmp(found, owner.objects[source->number].sha256, 32) == 0)
		return 0;
	return hr__fail(HR_E_DIGEST, "the header is another one");
}

static void close_object(struct hr__source *source)
{
	(void)source;
	owner.n_open--;
}

static const struct hr__source_ops ops = {check_owner, prove_object, blocks_of, close_object};

static int open_object(void *ctx, uint32_t number, struct hr__source *out)
{
	(void)ctx;
	*out = (struct hr__source){
		.file = {.fd = owner.fd, .direct_fd = -1},
		.path = hr__format("%s#object-%u", owner.path, number),
		.base = owner.objects[number].base,
		.bytes = owner.objects[number].bytes,
		.room = owner.objects[number].room,
		.ops = &ops,
		.owner = &owner,
		.number = number,
		.proven = owner.objects[number].header_bytes,
	};
	if (hr__os_open_direct(&out->file) == 0) { /* the owner's, so that closing a source closes nothing */
		if (owner.direct_fd < 0)
			owner.direct_fd = out->file.direct_fd;
		else
			close(out->file.direct_fd);
		out->file.direct_fd = owner.direct_fd;
	}
	if (owner.direct_only)
		out->file.fd = -1;
	owner.n_open++;
	return 0;
}

/* ---- the region ---- */

static unsigned char *read_whole(const char *path, uint64_t *bytes)
{
	struct stat st;
	int fd = open(path, O_RDONLY);
	unsigned char *all;

	assert_int_equal(fstat(fd, &st), 0);
	*bytes = (uint64_t)st.st_size;
	all = malloc(*bytes);
	assert_int_equal(read(fd, all, *bytes), *bytes);
	close(fd);
	return all;
}

static void make_crcs(struct object *object, const unsigned char *bytes)
{
	uint64_t block = UINT64_C(1) << owner.log2;

	object->n_blocks = (object->bytes + block - 1) / block;
	object->crc = calloc(object->n_blocks, sizeof(*object->crc));
	for (uint64_t k = 0; k < object->n_blocks; k++)
		object->crc[k] = hr__crc32c(0, bytes + k * block, hr__min_u64(block, object->bytes - k * block));
}

static void put_object(FILE *region, struct object *object, unsigned number, const char *gap)
{
	static const struct test_tensor shapes[] = {
		{"a", "U8", 1}, {"b", "F32", 400004}, {"c", "U8", 65535}, {"d", "BF16", 1300002}, {"e", "U8", 3},
	};
	struct test_tensor tensors[5];
	char names[5][16], *shard = path_in(owner.dir, "shard.safetensors");
	unsigned char *bytes;
	uint64_t n;

	for (int i = 0; i < 5; i++) {
		tensors[i] = shapes[i];
		tensors[i].name = names[i];
		snprintf(names[i], sizeof(names[i]), "%u.%s", number, shapes[i].name);
	}
	write_safetensors(shard, tensors, 5, 100 * number);
	bytes = read_whole(shard, &n);
	fwrite(gap, 1, EXTENT_ALIGN, region);
	*object = (struct object){.base = (uint64_t)ftell(region), .bytes = n, .room = hr__round_up(n, EXTENT_ALIGN)};
	fwrite(bytes, 1, n, region);
	for (uint64_t i = n; i < object->room; i++)
		putc(0xee, region);
	make_crcs(object, bytes);
	for (int i = 7; i >= 0; i--)
		object->header_bytes = object->header_bytes << 8 | bytes[i];
	object->header_bytes += 8;
	hr__sha256_of(bytes, object->header_bytes, object->sha256);
	free(bytes);
	free(shard);
}

static void region_open(uint8_t log2, bool direct_only)
{
	char *gap = calloc(1, EXTENT_ALIGN);
	FILE *region;

	owner = (struct owner){.dir = make_temp_dir(), .log2 = log2, .direct_only = direct_only, .direct_fd = -1};
	owner.path = path_in(owner.dir, "region");
	region = fopen(owner.path, "we");
	memset(gap, 0xdd, EXTENT_ALIGN);
	for (unsigned i = 0; i < N_OBJECTS; i++)
		put_object(region, &owner.objects[i], i, gap);
	fclose(region);
	free(gap);
	owner.fd = open(owner.path, O_RDONLY | O_CLOEXEC);
}

static void region_close(void)
{
	assert_int_equal(owner.n_open, 0);
	close(owner.fd);
	if (owner.direct_fd >= 0)
		close(owner.direct_fd);
	for (int i = 0; i < N_OBJECTS; i++)
		free(owner.objects[i].crc);
	remove_tree(owner.dir);
	free(owner.dir);
	free(owner.path);
}

static hr_model *open_model(void)
{
	hr_model *model;

	assert_ok(hr__model_new(&model));
	assert_ok(hr__model_add(model, N_OBJECTS, &(struct hr__shard_origin){.open = open_object}));
	assert_ok(hr__model_finish(model, NULL, NULL));
	return model;
}

static void damage(unsigned object, uint64_t offset)
{
	int fd = open(owner.path, O_RDWR | O_CLOEXEC);
	unsigned char byte;

	assert_int_equal(pread(fd, &byte, 1, (off_t)(owner.objects[object].base + offset)), 1);
	byte ^= 0x10;
	assert_int_equal(pwrite(fd, &byte, 1, (off_t)(owner.objects[object].base + offset)), 1);
	fsync(fd);
	close(fd);
}

/* What an engine, a device and a way of caching make of it; both with checksums and without. */
static void load_both_ways(hr_model *model, const char *device, const struct hr_loader_opts *opts)
{
	struct bed bed = {.model = hr_model_acquire(model)};
	struct hr_job_opts job = HR_JOB_OPTS_INIT;
	struct hr_feed_opts feed = HR_FEED_OPTS_INIT;
	struct hr_stats stats = HR_STATS_INIT;
	size_t n;

	bed_load(&bed, device, opts);
	assert_ok(load_by_job(bed.loader, model, NULL));
	assert_ok(hr_loader_stats(bed.loader, &stats));
	assert_int_equal(stats.verified_bytes, 0);
	job.flags = HR_JOB_VERIFY;
	assert_ok(load_by_job(bed.loader, model, &job));
	assert_ok(hr_loader_stats(bed.loader, &stats));
	assert_true(stats.verified_bytes >= stats.total_bytes / 2);
	feed.flags = HR_FEED_VERIFY;
	assert_ok(load_by_feed(bed.loader, model, &feed, true, &n));
	assert_int_equal(n, hr_model_n_tensors(model));
	bed_close(&bed);
}

/* ---- tests ---- */

static void an_object_is_read_by_every_engine_as_a_file_is(void **state)
{
	static const char *const engines[] = {"auto", "pread", "uring", "fake", "fake-queue"};
	static const char *const devices[] = {"cpu", "cuda"};

	(void)state;
	for (int direct_only = 0; direct_only < 2; direct_only++) {
		hr_model *model;

		region_open(16, direct_only);
		model = open_model();
		fake_engine_set(&(struct fake_engine_settings){.seed = 3, .short_reads = 1});
		for (size_t i = 0; i < 5 * 2 * 2; i++) {
			struct hr_loader_opts opts = HR_LOADER_OPTS_INIT;
			const char *device = devices[i / 5 % 2];

			opts.engine = engines[i % 5];
			opts.caching = i / 10 ? HR_CACHING_AUTO : HR_CACHING_BYPASS;
			opts.staging_bytes = 1 << 20;
			opts.slot_bytes = 128 << 10;
			if (has_device(device))
				load_both_ways(model, device, &opts);
		}
		fake_engine_set(NULL);
		if (getenv("HR_TEST_ENGINE")) {
			struct hr_loader_opts opts = HR_LOADER_OPTS_INIT;

			opts.staging_bytes = 1 << 20;
			opts.slot_bytes = 128 << 10;
			opts.engine = getenv("HR_TEST_ENGINE");
			load_both_ways(model, "cuda", &opts);
		}
		hr_model_close(model);
		region_close();
	}
}

static void headers_and_digests_of_what_is_direct_only_are_read_around_the_cache(void **state)
{
	struct hr_digest by_file[N_OBJECTS], digest;
	unsigned char two[5000], one[5000];
	hr_model *model;

	(void)state;
	region_open(16, false);
	model = open_model();
	for (uint32_t i = 0; i < N_OBJECTS; i++)
		assert_ok(hr_model_digest(model, i, &by_file[i], NULL, 0));
	assert_ok(hr_model_read_shard(model, 1, 70001, one, sizeof(one)));
	hr_model_close(model);
	owner.direct_only = true;
	model = open_model();
	for (uint32_t i = 0; i < N_OBJECTS; i++) {
		assert_ok(hr_model_digest(model, i, &digest, NULL, 0));
		assert_memory_equal(&digest, &by_file[i], sizeof(digest));
	}
	assert_ok(hr_model_read_shard(model, 1, 70001, two, sizeof(two)));
	assert_memory_equal(one, two, sizeof(one));
	assert_fails(hr_model_read_shard(model, 1, owner.objects[1].bytes - 1, two, 2), HR_E_OPTS);
	hr_model_close(model);
	region_close();
}

/* The first byte of every block, its last, and the very last of the object: each one flipped is found, named, and
 * nothing of its block arrives. */
static void a_flipped_byte_is_found_before_it_arrives(void **state)
{
	struct hr_loader_opts opts = HR_LOADER_OPTS_INIT;
	struct hr_job_opts job_opts = HR_JOB_OPTS_INIT;
	struct bed bed = {.model = NULL};
	struct hr_tensor t = HR_TENSOR_INIT;
	unsigned char *dst;
	uint64_t index;

	(void)state;
	region_open(16, false);
	bed.model = open_model();
	opts.staging_bytes = 1 << 20;
	opts.slot_bytes = 64 << 10;
	bed_load(&bed, "cpu", &opts);
	job_opts.flags = HR_JOB_VERIFY;
	assert_ok(hr_model_find(bed.model, "1.d", HR_STRLEN, &index));
	assert_ok(hr_model_tensor(bed.model, index, &t));
	dst = malloc(t.bytes);
	for (uint64_t at = t.offset; at < t.offset + t.bytes; at += 32768 + 77) {
		uint64_t block = hr__round_down(at, 65536), from = hr__max_u64(block, t.offset);
		uint64_t to = hr__min_u64(block + 65536, t.offset + t.bytes);
		struct hr_read read = {index, 0, UINT64_MAX, dst, t.bytes};
		hr_job *job;

		memset(dst, 0xa5, t.bytes);
		damage(1, at);
		assert_ok(hr_job_start(bed.loader, bed.model, &read, 1, &job_opts, &job));
		assert_fails(hr_job_wait(job, HR_FOREVER), HR_E_DIGEST);
		assert_int_equal(hr_error_last()->offset, block);
		assert_string_equal(hr_error_last()->tensor, "1.d");
		assert_non_null(strstr(hr_error_last()->path, "#object-1"));
		assert_ok(hr_job_close(job, HR_FOREVER));
		for (uint64_t i = from; i < to; i++)
			assert_int_equal(dst[i - t.offset], 0xa5);
		damage(1, at); /* and back */
	}
	assert_ok(load_by_job(bed.loader, bed.model, &job_opts));
	free(dst);
	bed_close(&bed);
	region_close();
}

/* Where slots are on the device, what is verified comes to the host for that. */
static void a_flipped_byte_is_found_in_a_window_of_gpu_memory(void **state)
{
	struct hr_loader_opts opts = HR_LOADER_OPTS_INIT;
	struct hr_job_opts job_opts = HR_JOB_OPTS_INIT;
	struct bed bed = {.model = NULL};
	struct hr_tensor t = HR_TENSOR_INIT;
	uint64_t index;

	(void)state;
	opts.engine = getenv("HR_TEST_ENGINE");
	if (!opts.engine)
		skip_for("HR_TEST_ENGINE names no engine");
	region_open(17, false);
	bed.model = open_model();
	bed.n_tensors = hr_model_n_tensors(bed.model);
	opts.staging_bytes = 1 << 20;
	opts.slot_bytes = 128 << 10;
	bed_load(&bed, "cuda", &opts);
	job_opts.flags = HR_JOB_VERIFY;
	assert_ok(hr_model_find(bed.model, "1.d", HR_STRLEN, &index));
	assert_ok(hr_model_tensor(bed.model, index, &t));
	for (uint64_t at = t.offset; at < t.offset + t.bytes; at += 65536 + 177) {
		damage(1, at);
		assert_fails(load_by_job(bed.loader, bed.model, &job_opts), HR_E_DIGEST);
		assert_int_equal(hr_error_last()->offset, hr__round_down(at, 131072));
		damage(1, at); /* and back */
	}
	hr__fault_arm("cuMemcpyDtoHAsync", 1, 1);
	assert_fails(load_by_job(bed.loader, bed.model, &job_opts), HR_E_DEVICE);
	hr__fault_arm(NULL, 0, 0);
	assert_ok(load_by_job(bed.loader, bed.model, &job_opts));
	bed_close(&bed);
	region_close();
}

/* Nothing of a header is looked at before it was found to be the one that is meant: what is wrong with it is that it
 * is another one, whichever byte of it is flipped. */
static void a_header_is_proven_before_it_is_parsed(void **state)
{
	(void)state;
	region_open(16, true);
	for (uint64_t at = 0; at < owner.objects[1].header_bytes; at += at < 12 ? 1 : 9) {
		hr_model *model;

		damage(1, at);
		assert_ok(hr__model_new(&model));
		assert_fails(hr__model_add(model, N_OBJECTS, &(struct hr__shard_origin){.open = open_object}),
			     HR_E_DIGEST);
		hr_model_close(model);
		damage(1, at);
	}
	hr_model_close(open_model());
	region_close();
}

static void without_checksums_asked_for_a_flipped_byte_arrives(void **state)
{
	struct bed bed = {.model = NULL};
	struct hr_loader_opts opts = HR_LOADER_OPTS_INIT;

	(void)state;
	region_open(16, false);
	damage(2, owner.objects[2].bytes - 1);
	bed.model = open_model();
	bed_load(&bed, "cpu", NULL);
	assert_ok(load_by_job(bed.loader, bed.model, NULL));
	assert_ok(hr_loader_close(bed.loader, 1000));
	opts.flags = HR_LOADER_VERIFY;
	assert_ok(hr_loader_open(bed.device, &opts, &bed.loader));
	assert_fails(load_by_job(bed.loader, bed.model, NULL), HR_E_DIGEST);
	bed_close(&bed);
	region_close();
}

/* Slots of one block, blocks of 1 MiB whose last one is longer than what is left of the extent, slots too small. */
static void blocks_of_every_size_fit_or_are_refused(void **state)
{
	struct hr_job_opts job = HR_JOB_OPTS_INIT;

	(void)state;
	job.flags = HR_JOB_VERIFY;
	for (uint8_t log2 = 16; log2 <= 20; log2++) {
		struct hr_loader_opts opts = HR_LOADER_OPTS_INIT;
		struct bed bed = {.model = NULL};

		region_open(log2, log2 & 1);
		bed.model = open_model();
		opts.staging_bytes = 8 << 20;
		opts.slot_bytes = UINT64_C(1) << log2;
		bed_load(&bed, "cpu", &opts);
		assert_ok(load_by_job(bed.loader, bed.model, &job));
		assert_ok(hr_loader_close(bed.loader, 1000));
		opts.slot_bytes = 192 << 10; /* a multiple of 64 KiB, and of nothing larger */
		assert_ok(hr_loader_open(bed.device, &opts, &bed.loader));
		if (log2 == 16)
			assert_ok(load_by_job(bed.loader, bed.model, &job));
		else
			assert_fails(load_by_job(bed.loader, bed.model, &job), HR_E_OPTS);
		bed_close(&bed);
		region_close();
	}
}

static void plain_files_cannot_be_verified(void **state)
{
	struct hr_job_opts job = HR_JOB_OPTS_INIT;
	struct bed bed;

	(void)state;
	bed_open(&bed, 5, 10, 1000);
	bed_load(&bed, "cpu", NULL);
	job.flags = HR_JOB_VERIFY;
	assert_fails(load_by_job(bed.loader, bed.model, &job), HR_E_UNSUPPORTED);
	bed_close(&bed);
}

static void the_owner_is_asked_once_at_the_end_and_may_refuse(void **state)
{
	struct bed bed = {.model = NULL};
	size_t n = 0;

	(void)state;
	region_open(16, false);
	bed.model = open_model();
	bed_load(&bed, "cpu", NULL);
	owner.n_checks = 0;
	assert_ok(load_by_job(bed.loader, bed.model, NULL)); /* the comparison reads each tensor by itself */
	assert_int_equal(owner.n_checks, 1 + hr_model_n_tensors(bed.model));
	owner.refuses = HR_E_CHANGED;
	assert_fails(load_by_job(bed.loader, bed.model, NULL), HR_E_CHANGED);
	assert_fails(load_by_feed(bed.loader, bed.model, NULL, false, &n), HR_E_CHANGED);
	assert_int_equal(n, 0);
	owner.refuses = 0;
	assert_ok(load_by_job(bed.loader, bed.model, NULL));
	bed_close(&bed);
	region_close();
}

/* What comes back between a read and its verification when a job is cancelled. */
static void a_cancelled_job_settles_with_slots_to_verify(void **state)
{
	struct hr_loader_opts opts = HR_LOADER_OPTS_INIT;
	struct hr_job_opts job_opts = HR_JOB_OPTS_INIT;
	struct bed bed = {.model = NULL};
	struct hr_tensor t = HR_TENSOR_INIT;
	hr_buffer *buffer;
	uint64_t index;

	(void)state;
	region_open(16, false);
	bed.model = open_model();
	opts.staging_bytes = 1 << 20;
	opts.slot_bytes = 64 << 10;
	bed_load(&bed, "cpu", &opts);
	job_opts.flags = HR_JOB_VERIFY;
	assert_ok(hr_model_find(bed.model, "2.d", HR_STRLEN, &index));
	assert_ok(hr_model_tensor(bed.model, index, &t));
	assert_ok(hr_buffer_new(bed.loader, t.bytes, &buffer));
	for (int i = 0; i < 200; i++) {
		struct hr_read read = {index, 0, UINT64_MAX, hr_buffer_data(buffer), t.bytes};
		hr_job *job;

		assert_ok(hr_job_start(bed.loader, bed.model, &read, 1, &job_opts, &job));
		if (i % 3)
			hr__os_sleep_ns((uint64_t)i * 2000);
		assert_ok(hr_job_close(job, 10000));
	}
	hr_buffer_release(buffer);
	bed_close(&bed);
	region_close();
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(an_object_is_read_by_every_engine_as_a_file_is),
		cmocka_unit_test(headers_and_digests_of_what_is_direct_only_are_read_around_the_cache),
		cmocka_unit_test(a_flipped_byte_is_found_before_it_arrives),
		cmocka_unit_test(a_flipped_byte_is_found_in_a_window_of_gpu_memory),
		cmocka_unit_test(a_header_is_proven_before_it_is_parsed),
		cmocka_unit_test(without_checksums_asked_for_a_flipped_byte_arrives),
		cmocka_unit_test(blocks_of_every_size_fit_or_are_refused),
		cmocka_unit_test(plain_files_cannot_be_verified),
		cmocka_unit_test(the_owner_is_asked_once_at_the_end_and_may_refuse),
		cmocka_unit_test(a_cancelled_job_settles_with_slots_to_verify),
	};

	return cmocka_run_group_tests_name("source", tests, NULL, NULL);
}
