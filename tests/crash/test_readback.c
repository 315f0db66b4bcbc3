/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reading back behind the writing: over a real region in a plain file, whose calls can be made to go wrong. Nothing is
 * read back before a flush that came after its write, whatever comes back wrong is told, and a flush that failed leaves
 * the handle of no use.
 */
#include "storetest.h"

#include "core/hash.h"
#include "store/stream.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#define MIB    ((uint64_t)1 << 20)
#define PIECE  (4 * MIB)
#define AT     (8 * MIB) /* where the stream writes */
#define BLOCK  65536u
#define LENGTH (15 * PIECE + 12345)
#define N      ((size_t)(LENGTH / PIECE + 1))

/* What goes wrong, by the offset in the region; UINT64_MAX: nothing does. */
static struct {
	const struct hr__region_ops *real;
	uint64_t flip_at, fail_read_at;
	int read_error;
	bool flush_fails;
	pthread_mutex_t lock;
	/* guarded by lock */
	bool is_written[N], is_durable[N];
	uint64_t n_flushes, n_read, n_large_reads, n_too_early;
	uint64_t n_past_the_end;      /* times that progress was more than there is */
	uint64_t n_hashed, wait_from; /* pieces; the caller's thread alone */
	uint64_t flip_write;          /* the write of a whole piece that goes wrong: 1, 2 ...; 0: none */
} trap = {.lock = PTHREAD_MUTEX_INITIALIZER};

static char *dir, *source_path;
static uint8_t *content;

static size_t piece_of(uint64_t off)
{
	return off >= AT && off < AT + LENGTH ? (size_t)((off - AT) / PIECE) : N;
}

static int trap_write(struct hr__region *region, uint64_t off, const void *src, size_t bytes)
{
	bool is_wrong = trap.flip_at >= off && trap.flip_at < off + bytes;
	uint8_t *copy = NULL;
	int error;

	pthread_mutex_lock(&trap.lock);
	if (bytes == PIECE && trap.flip_write > 0)
		is_wrong |= --trap.flip_write == 0;
	pthread_mutex_unlock(&trap.lock);
	if (is_wrong) {
		void *memory;

		assert_int_equal(hr__region_memory(bytes, &memory), 0);
		copy = memory;
		memcpy(copy, src, bytes);
		copy[trap.flip_at == UINT64_MAX ? 99 : trap.flip_at - off] ^= 0x10;
	}
	error = trap.real->write(region, off, copy ? copy : src, bytes);
	hr__region_memory_free(copy, bytes);
	pthread_mutex_lock(&trap.lock);
	if (piece_of(off) < N)
		trap.is_written[piece_of(off)] = true;
	pthread_mutex_unlock(&trap.lock);
	return error;
}

static int trap_read(struct hr__region *region, uint64_t off, void *dst, size_t bytes)
{
	pthread_mutex_lock(&trap.lock);
	trap.n_read++;
	trap.n_large_reads += bytes == PIECE;
	if (piece_of(off) < N)
		trap.n_too_early += !trap.is_durable[piece_of(off)];
	pthread_mutex_unlock(&trap.lock);
	if (trap.fail_read_at >= off && trap.fail_read_at < off + bytes)
		return trap.read_error;
	return trap.real->read(region, off, dst, bytes);
}

static int trap_flush(struct hr__region *region)
{
	bool before[N];
	int error;

	pthread_mutex_lock(&trap.lock);
	memcpy(before, trap.is_written, sizeof(before));
	trap.n_flushes++;
	pthread_mutex_unlock(&trap.lock);
	error = trap.flush_fails ? EIO : trap.real->flush(region);
	pthread_mutex_lock(&trap.lock);
	for (size_t i = 0; i < N && !error; i++)
		trap.is_durable[i] |= before[i];
	pthread_mutex_unlock(&trap.lock);
	return error;
}

/* A region in a new file, with the traps in its calls. */
static struct hr__region *open_trapped(char *path)
{
	static struct hr__region_ops ops;
	struct hr__region *region;

	assert_ok(hr__region_open(path, true, &region));
	trap.real = region->ops;
	trap.flip_at = trap.fail_read_at = UINT64_MAX;
	trap.flush_fails = false;
	memset(trap.is_written, 0, sizeof(trap.is_written));
	memset(trap.is_durable, 0, sizeof(trap.is_durable));
	trap.n_flushes = trap.n_read = trap.n_large_reads = trap.n_too_early = trap.flip_write = 0;
	trap.n_hashed = 0;
	trap.wait_from = 4;
	ops = *region->ops;
	ops.read = trap_read;
	ops.write = trap_write;
	ops.flush = trap_flush;
	region->ops = &ops;
	return region;
}

static int make_source(void **state)
{
	char *folder;

	(void)state;
	dir = make_temp_dir();
	folder = path_in(dir, "model");
	assert_int_equal(mkdir(folder, 0700), 0);
	source_path = path_in(folder, "weights.bin");
	content = malloc(LENGTH);
	assert_non_null(content);
	for (uint64_t i = 0; i < LENGTH; i++)
		content[i] = (uint8_t)(i * 31 + (i >> 13));
	write_file(source_path, content, LENGTH);
	free(folder);
	return 0;
}

static int remove_source(void **state)
{
	(void)state;
	remove_tree(dir);
	free(dir);
	free(source_path);
	free(content);
	return 0;
}

/* ---- one stream ---- */

/* As if hashing took longer than the device does, so that helpers have time: it goes on once they have begun to read
 * back, or cannot. */
static bool have_helpers_begun(void)
{
	bool yes;

	pthread_mutex_lock(&trap.lock);
	yes = trap.n_large_reads >= 2 || (trap.flush_fails && trap.n_flushes > 0);
	pthread_mutex_unlock(&trap.lock);
	return yes;
}

static int dawdle(void *ctx, uint64_t bytes)
{
	(void)ctx;
	(void)bytes;
	trap.n_hashed++;
	for (int i = 0; i < 10000 && trap.n_hashed > trap.wait_from && !have_helpers_begun(); i++)
		usleep(1000);
	return 0;
}

static int stop(void *ctx, uint64_t bytes)
{
	uint64_t *left = ctx;

	usleep(4000);
	*left -= bytes < *left ? bytes : *left;
	return *left == 0;
}

struct bench {
	char *path;
	struct hr__region *region;
	struct hr__source source;
	struct hr__stream stream;
};

static void bench_open(struct bench *b, unsigned n_helpers)
{
	int fd;

	memset(b, 0, sizeof(*b));
	b->path = path_in(dir, "region.img");
	fd = open(b->path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	assert_true(fd >= 0 && ftruncate(fd, (off_t)(AT + LENGTH + PIECE)) == 0);
	close(fd);
	b->region = open_trapped(b->path);
	assert_ok(hr__source_open_file(AT_FDCWD, source_path, source_path, 0, &b->source));
	b->stream = (struct hr__stream){.source = &b->source,
					.region = b->region,
					.to = AT,
					.block_log2 = 16,
					.n_helpers = n_helpers,
					.flush_bytes = 2 * PIECE,
					.progress = dawdle,
					.digests = malloc((size_t)(LENGTH / BLOCK + 1) * sizeof(uint32_t))};
}

static void bench_close(struct bench *b)
{
	free(b->stream.digests);
	hr__source_close(&b->source);
	hr__region_close(b->region);
	remove(b->path);
	free(b->path);
	assert_int_equal(trap.n_too_early, 0);
}

static void what_is_written_is_read_back_after_a_flush(void **state)
{
	uint8_t sha256[32];
	struct bench b;

	(void)state;
	hr__sha256_of(content, LENGTH, sha256);
	for (unsigned n_helpers = 1; n_helpers <= 4; n_helpers++) {
		bench_open(&b, n_helpers);
		assert_ok(hr__stream_run(&b.stream));
		assert_memory_equal(b.stream.sha256, sha256, 32);
		assert_true(b.stream.read_back >= 2 * PIECE && b.stream.read_back <= LENGTH);
		assert_true(b.stream.read_back % PIECE == 0 || b.stream.read_back == LENGTH);
		assert_true(trap.n_flushes > 0 && trap.n_read >= b.stream.read_back / PIECE);
		assert_false(b.stream.is_flush_lost);
		bench_close(&b);
	}
}

static void nothing_is_read_back_without_helpers_or_when_not_asked_for(void **state)
{
	struct bench b;

	(void)state;
	for (int i = 0; i < 2; i++) {
		bench_open(&b, i ? 2 : 0);
		b.stream.flush_bytes = i ? 0 : PIECE;
		b.stream.progress = NULL;
		assert_ok(hr__stream_run(&b.stream));
		assert_int_equal(b.stream.read_back, 0);
		assert_int_equal(trap.n_flushes + trap.n_read, 0);
		bench_close(&b);
	}
}

static void a_wrong_bit_is_found_and_told_with_its_place(void **state)
{
	uint64_t at = AT + PIECE + 5 * BLOCK + 17;
	struct bench b;

	(void)state;
	bench_open(&b, 3);
	trap.flip_at = at;
	assert_fails(hr__stream_run(&b.stream), HR_E_DIGEST);
	assert_int_equal(hr_error_last()->offset, AT + PIECE + 5 * BLOCK);
	assert_string_equal(hr_error_last()->path, b.path);
	bench_close(&b);
}

static void a_read_that_fails_is_told(void **state)
{
	const int errors[] = {EIO, ENODATA}, codes[] = {HR_E_IO, HR_E_REGION_CHANGED};
	struct bench b;

	(void)state;
	for (size_t i = 0; i < 2; i++) {
		bench_open(&b, 2);
		trap.fail_read_at = AT + PIECE;
		trap.read_error = errors[i];
		assert_fails(hr__stream_run(&b.stream), codes[i]);
		assert_false(b.stream.is_flush_lost);
		bench_close(&b);
	}
}

static void a_flush_that_fails_is_told(void **state)
{
	struct bench b;

	(void)state;
	bench_open(&b, 2);
	trap.flush_fails = true;
	assert_fails(hr__stream_run(&b.stream), HR_E_IO);
	assert_true(b.stream.is_flush_lost);
	assert_int_equal(b.stream.read_back, 0);
	bench_close(&b);
}

static void it_can_be_cancelled_meanwhile(void **state)
{
	uint64_t left;
	struct bench b;

	(void)state;
	for (left = PIECE; left < LENGTH; left += 3 * PIECE) {
		uint64_t own = left;

		bench_open(&b, 3);
		b.stream.progress = stop;
		b.stream.ctx = &own;
		assert_fails(hr__stream_run(&b.stream), HR_E_CANCELLED);
		bench_close(&b);
	}
}

/* ---- a whole import ---- */

static int dawdle_along(void *ctx, const struct hr_store_progress *progress)
{
	trap.n_past_the_end += progress->done_bytes > progress->total_bytes;
	return dawdle(ctx, 0);
}

static int import_slowly(hr_store *store, const char *model)
{
	struct hr_store_import_opts opts = HR_STORE_IMPORT_OPTS_INIT;
	char *folder = path_in(dir, "large");
	int code;

	opts.progress = dawdle_along;
	trap.n_hashed = 0;
	trap.wait_from = 34; /* 128 MiB are written by then */
	trap.n_large_reads = 0;
	trap.n_past_the_end = 0;
	code = hr_store_import(store, folder, model, &opts, NULL);
	assert_int_equal(trap.n_past_the_end, 0);
	free(folder);
	return code;
}

struct pool {
	char *path;
	hr_store *store;
};

/* A store with the traps in its calls, and a model of 192 MiB to be imported. */
static void pool_open(struct pool *p)
{
	struct hr_store_init_opts opts = HR_STORE_INIT_OPTS_INIT;
	char *folder = path_in(dir, "large"), *file = path_in(folder, "model.safetensors");
	char header[8 + 128];
	int fd, n;

	assert_true(mkdir(folder, 0700) == 0 || errno == EEXIST);
	memset(header, ' ', sizeof(header));
	memcpy(header, "\x80\0\0\0\0\0\0", 8); /* 128 bytes of JSON */
	n = snprintf(header + 8, 128, "{\"w\":{\"dtype\":\"U8\",\"shape\":[%llu],\"data_offsets\":[0,%llu]}}",
		     (unsigned long long)(192 * MIB - sizeof(header)),
		     (unsigned long long)(192 * MIB - sizeof(header)));
	header[8 + n] = ' ';
	fd = open(file, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	assert_true(fd >= 0 && pwrite(fd, header, sizeof(header), 0) == (ssize_t)sizeof(header) &&
		    ftruncate(fd, (off_t)(192 * MIB)) == 0);
	close(fd);
	p->path = path_in(dir, "pool.img");
	opts.bytes = 512 * MIB;
	assert_ok(hr_store_init(p->path, &opts));
	assert_ok(hr__store_open_on(open_trapped(p->path), &(struct hr__snapshot_want){0}, &p->store));
	free(file);
	free(folder);
}

static void pool_close(struct pool *p)
{
	hr_store_close(p->store);
	remove(p->path);
	free(p->path);
}

static void an_import_reads_back_each_byte_once(void **state)
{
	struct pool p;
	uint64_t whole;

	(void)state;
	pool_open(&p);
	assert_ok(import_slowly(p.store, "zeros"));
	whole = trap.n_large_reads;
	/* all pieces once, but for a header and what a commit reads of itself */
	assert_in_range(whole, 192 / 4, 192 / 4 + 2);
	assert_true(trap.n_flushes > 2); /* those of two commits, and one on the way */
	pool_close(&p);
}

static void an_import_that_reads_back_something_else_binds_nothing(void **state)
{
	struct pool p;

	(void)state;
	pool_open(&p);
	trap.flip_write = 7;
	assert_fails(import_slowly(p.store, "zeros"), HR_E_DIGEST);
	assert_int_equal(p.store->now->manifest.models.n, 0);
	trap.flip_write = 0;
	assert_ok(import_slowly(p.store, "zeros"));
	assert_int_equal(p.store->now->manifest.models.n, 1);
	pool_close(&p);
}

static void an_import_whose_flush_fails_poisons_the_handle(void **state)
{
	struct pool p;

	(void)state;
	pool_open(&p);
	trap.flush_fails = true;
	assert_fails(import_slowly(p.store, "zeros"), HR_E_IO);
	trap.flush_fails = false;
	assert_fails(import_slowly(p.store, "zeros"), HR_E_POISONED);
	hr_store_close(p.store);
	assert_ok(hr__store_open_on(open_trapped(p.path), &(struct hr__snapshot_want){0}, &p.store));
	assert_int_equal(p.store->now->manifest.models.n, 0);
	assert_ok(import_slowly(p.store, "zeros"));
	pool_close(&p);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(what_is_written_is_read_back_after_a_flush),
		cmocka_unit_test(nothing_is_read_back_without_helpers_or_when_not_asked_for),
		cmocka_unit_test(a_wrong_bit_is_found_and_told_with_its_place),
		cmocka_unit_test(a_read_that_fails_is_told),
		cmocka_unit_test(a_flush_that_fails_is_told),
		cmocka_unit_test(it_can_be_cancelled_meanwhile),
		cmocka_unit_test(an_import_reads_back_each_byte_once),
		cmocka_unit_test(an_import_that_reads_back_something_else_binds_nothing),
		cmocka_unit_test(an_import_whose_flush_fails_poisons_the_handle),
	};

	return cmocka_run_group_tests(tests, make_source, remove_source);
}
