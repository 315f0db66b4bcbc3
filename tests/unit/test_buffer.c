/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Buffers by the public header: counts, reading back, outliving everything, memory that cannot be had, a caller's own
 * allocator, and releases on one thread while the loader closes on another.
 */
#include "loadtest.h"

#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

static const char *const devices[] = {"cpu", "cuda:0"};

static void on_every_device(void (*body)(const char *device))
{
	for (size_t i = 0; i < 2; i++)
		if (has_device(devices[i]))
			body(devices[i]);
}

static void read_back(const char *device)
{
	unsigned char want[100], got[100];
	hr_buffer *buffer, *empty;
	hr_device *d;
	hr_loader *loader;

	assert_ok(hr_device_open(device, &d));
	assert_ok(hr_loader_open(d, NULL, &loader));
	assert_ok(hr_buffer_new(loader, 100, &buffer));
	assert_int_equal(hr_buffer_bytes(buffer), 100);
	assert_int_equal((uintptr_t)hr_buffer_data(buffer) % 256, 0);
	assert_ok(hr_buffer_read(buffer, 0, want, 100));
	assert_ok(hr_buffer_read(buffer, 40, got, 60));
	assert_memory_equal(got, want + 40, 60);
	assert_ok(hr_buffer_read(buffer, 100, got, 0));
	assert_fails(hr_buffer_read(buffer, 100, got, 1), HR_E_OPTS);
	assert_fails(hr_buffer_read(buffer, 1, got, UINT64_MAX), HR_E_OPTS);
	assert_fails(hr_buffer_read(buffer, 0, NULL, 1), HR_E_OPTS);
	assert_fails(hr_buffer_read(NULL, 0, got, 1), HR_E_OPTS);
	assert_ok(hr_buffer_new(loader, 0, &empty));
	assert_null(hr_buffer_data(empty));
	assert_int_equal(hr_buffer_bytes(empty), 0);
	assert_ok(hr_buffer_read(empty, 0, NULL, 0));
	assert_fails(hr_buffer_new(loader, 1, NULL), HR_E_OPTS);
	assert_fails(hr_buffer_new(NULL, 1, &(hr_buffer *){NULL}), HR_E_OPTS);
	if (strcmp(device, "cpu") == 0)
		assert_fails(hr_buffer_release_on(buffer, want), HR_E_OPTS); /* and it was not released */
	assert_int_equal(hr_buffer_bytes(buffer), 100);
	assert_ptr_equal(hr_buffer_acquire(buffer), buffer);
	hr_buffer_release(buffer);
	assert_ok(hr_buffer_read(buffer, 0, got, 100));
	hr_buffer_release(buffer);
	hr_buffer_release(empty);
	hr_buffer_release(NULL);
	assert_ok(hr_buffer_release_on(NULL, NULL));
	assert_ok(hr_loader_close(loader, 0));
	assert_ok(hr_device_close(d));
}

static void can_be_read_in_part_and_counted(void **state)
{
	(void)state;
	on_every_device(read_back);
}

static void outliving(const char *device)
{
	struct hr_tensor t = HR_TENSOR_INIT;
	unsigned char *want, *got;
	hr_buffer *buffer;
	struct bed bed;

	bed_open(&bed, 41, 8, 3000000);
	bed_load(&bed, device, NULL);
	do {
		assert_ok(hr_model_tensor(bed.model, t.bytes ? t.index + 1 : t.index + (t.name != NULL), &t));
	} while (t.bytes < 10000);
	want = plain_read(bed.model, &t);
	got = malloc(t.bytes);
	assert_ok(hr_get(bed.loader, bed.model, t.index, &buffer));
	bed_close(&bed);
	assert_ok(hr_buffer_read(buffer, 0, got, t.bytes));
	assert_memory_equal(got, want, t.bytes);
	hr_buffer_release(buffer);
	free(want);
	free(got);
}

static void outlives_loader_device_and_model(void **state)
{
	(void)state;
	on_every_device(outliving);
}

static void too_large(const char *device)
{
	hr_buffer *buffer = (hr_buffer *)(uintptr_t)1;
	int code = strcmp(device, "cpu") == 0 ? HR_E_NOMEM : HR_E_DEVICE_MEMORY;
	struct hr_stats stats = HR_STATS_INIT;
	hr_loader *loader;
	hr_device *d;

	assert_ok(hr_device_open(device, &d));
	assert_ok(hr_loader_open(d, NULL, &loader));
	assert_fails(hr_buffer_new(loader, UINT64_C(1) << (code == HR_E_NOMEM ? 60 : 45), &buffer), code);
	assert_null(buffer);
	assert_non_null(strstr(hr_error_last()->message, device));
	if (code == HR_E_NOMEM) /* a driver may call it an invalid argument */
		assert_fails(hr_buffer_new(loader, UINT64_MAX, &buffer), code);
	assert_ok(hr_loader_stats(loader, &stats));
	assert_int_equal(stats.peak_buffer_bytes, 0);
	assert_ok(hr_loader_close(loader, 0));
	assert_ok(hr_device_close(d));
}

static void says_when_there_is_no_memory(void **state)
{
	(void)state;
	on_every_device(too_large);
}

/* ---- a caller's allocator ---- */

#define MAX_BLOCKS 200

static struct {
	pthread_t thread;
	int inside; /* one of our calls */
	struct {
		void *memory;
		uint64_t bytes;
	} blocks[MAX_BLOCKS];
	size_t n_allocated, n_released, n_wrong, most;
} hooks;

static void *hook_alloc(void *ctx, uint64_t bytes, uint64_t align, void *stream)
{
	if (ctx != &hooks || !hooks.inside || !pthread_equal(hooks.thread, pthread_self()) || stream || align < 256 ||
	    bytes == 0)
		hooks.n_wrong++;
	if (hooks.n_allocated - hooks.n_released >= hooks.most || hooks.n_allocated == MAX_BLOCKS)
		return NULL;
	hooks.blocks[hooks.n_allocated].memory = aligned_alloc(align, (bytes + align - 1) / align * align);
	hooks.blocks[hooks.n_allocated].bytes = bytes;
	return hooks.blocks[hooks.n_allocated++].memory;
}

static void hook_release(void *ctx, void *memory, uint64_t bytes, void *stream)
{
	size_t i = 0;

	if (ctx != &hooks || !hooks.inside || !pthread_equal(hooks.thread, pthread_self()) || stream)
		hooks.n_wrong++;
	while (i < hooks.n_allocated && (hooks.blocks[i].memory != memory || hooks.blocks[i].bytes != bytes))
		i++;
	if (i == hooks.n_allocated) {
		hooks.n_wrong++;
		return;
	}
	hooks.blocks[i].memory = NULL;
	hooks.n_released++;
	memset(memory, 0xdd, bytes);
	free(memory);
}

static void start_hooks(struct bed *bed, uint64_t seed, size_t most)
{
	struct hr_loader_opts opts = HR_LOADER_OPTS_INIT;

	memset(&hooks, 0, sizeof(hooks));
	hooks.thread = pthread_self();
	hooks.most = most;
	opts.alloc = hook_alloc;
	opts.release = hook_release;
	opts.alloc_ctx = &hooks;
	bed_open(bed, seed, 60, 200000);
	bed_load(bed, "cpu", &opts);
}

#define OURS(call) (hooks.inside = 1, hooks_rc = (call), hooks.inside = 0, hooks_rc)
static int hooks_rc;

static size_t count_not_empty(const struct bed *bed)
{
	struct hr_tensor t = HR_TENSOR_INIT;
	size_t n = 0;

	for (uint64_t i = 0; i < bed->n_tensors; i++) {
		assert_ok(hr_model_tensor(bed->model, i, &t));
		n += t.bytes > 0;
	}
	return n;
}

static void uses_a_callers_allocator_once_per_tensor(void **state)
{
	struct hr_tensor t = HR_TENSOR_INIT;
	hr_buffer *buffer;
	hr_feed *feed;
	struct bed bed;

	(void)state;
	start_hooks(&bed, 42, MAX_BLOCKS);
	assert_ok(OURS(hr_feed_open(bed.loader, bed.model, NULL, &feed)));
	usleep(10000);
	assert_int_equal(hooks.n_allocated, 0); /* look-ahead calls nobody */
	for (uint64_t i = 0; i < bed.n_tensors; i++) {
		assert_ok(OURS(hr_feed_next(feed, &t, &buffer)));
		assert_true(buffer_is_right(bed.model, &t, buffer));
		assert_true(hooks.n_allocated - hooks.n_released <= 2);
		hooks.inside = 1;
		hr_buffer_release(buffer);
		hooks.inside = 0;
	}
	assert_int_equal(hooks.n_allocated, count_not_empty(&bed));
	assert_ok(OURS(hr_feed_close(feed, HR_FOREVER)));
	assert_ok(OURS(hr_get(bed.loader, bed.model, 1, &buffer)));
	hooks.inside = 1;
	bed_close(&bed);
	hr_buffer_release(buffer); /* with no loader left it goes back at once */
	hooks.inside = 0;
	assert_int_equal(hooks.n_released, hooks.n_allocated);
	assert_int_equal(hooks.n_wrong, 0);
}

static void ends_a_feed_clearly_when_the_allocator_gives_none(void **state)
{
	struct hr_tensor t[60];
	hr_buffer *buffers[60], *none;
	size_t n = 0;
	hr_feed *feed;
	struct bed bed;
	int rc;

	(void)state;
	start_hooks(&bed, 43, 7);
	assert_ok(OURS(hr_feed_open(bed.loader, bed.model, NULL, &feed)));
	do {
		t[n] = (struct hr_tensor)HR_TENSOR_INIT;
		rc = OURS(hr_feed_next(feed, &t[n], &buffers[n]));
		n += !rc;
	} while (!rc);
	assert_int_equal(rc, HR_E_DEVICE_MEMORY);
	assert_true(n >= 7);
	for (size_t i = 0; i < n; i++) /* what was handed out is right, and stays so */
		assert_true(buffer_is_right(bed.model, &t[i], buffers[i]));
	hooks.inside = 1;
	for (size_t i = 0; i < n; i++)
		hr_buffer_release(buffers[i]);
	hooks.inside = 0;
	assert_fails(OURS(hr_feed_next(feed, &t[0], &none)), HR_E_DEVICE_MEMORY); /* it is final */
	assert_ok(OURS(hr_feed_close(feed, HR_FOREVER)));
	hooks.most = 0;
	assert_fails(OURS(hr_get(bed.loader, bed.model, t[6].bytes ? 6 : 0, &none)), HR_E_DEVICE_MEMORY);
	assert_null(none);
	hooks.inside = 1;
	bed_close(&bed);
	hooks.inside = 0;
	assert_int_equal(hooks.n_released, hooks.n_allocated);
	assert_int_equal(hooks.n_wrong, 0);
}

/* ---- releases while the loader closes ---- */

struct releaser {
	hr_buffer *buffers[64];
	atomic_int go;
};

static void *release_all(void *arg)
{
	struct releaser *r = arg;

	while (!r->go)
		;
	for (int i = 0; i < 64; i++)
		hr_buffer_release(r->buffers[i]);
	return NULL;
}

static void racing(const char *device)
{
	for (int round = 0; round < 20; round++) {
		struct releaser r = {.go = 0};
		struct hr_loader_opts opts = HR_LOADER_OPTS_INIT;
		hr_loader *loader;
		hr_device *d;
		pthread_t thread;

		opts.staging_bytes = HR_MIN_STAGING_BYTES;
		assert_ok(hr_device_open(device, &d));
		assert_ok(hr_loader_open(d, &opts, &loader));
		for (int i = 0; i < 64; i++)
			assert_ok(hr_buffer_new(loader, 1000, &r.buffers[i]));
		assert_int_equal(pthread_create(&thread, NULL, release_all, &r), 0);
		r.go = 1;
		assert_ok(hr_loader_close(loader, HR_FOREVER));
		assert_ok(hr_device_close(d));
		pthread_join(thread, NULL);
	}
}

static void may_be_released_while_the_loader_closes(void **state)
{
	(void)state;
	on_every_device(racing);
}

static void taken_back(const char *device)
{
	struct hr_stats stats = HR_STATS_INIT;
	hr_buffer *buffer;
	hr_loader *loader;
	hr_device *d;

	assert_ok(hr_device_open(device, &d));
	assert_ok(hr_loader_open(d, NULL, &loader));
	for (int i = 0; i < 50; i++) { /* far more than is held at once */
		assert_ok(hr_buffer_new(loader, 1 << 20, &buffer));
		hr_buffer_release(buffer);
	}
	assert_ok(hr_loader_stats(loader, &stats));
	assert_true(stats.peak_buffer_bytes <= 3 << 20);
	assert_ok(hr_loader_close(loader, 0));
	assert_ok(hr_device_close(d));
}

static void gives_released_memory_back_before_it_takes_more(void **state)
{
	(void)state;
	on_every_device(taken_back);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(can_be_read_in_part_and_counted),
		cmocka_unit_test(outlives_loader_device_and_model),
		cmocka_unit_test(says_when_there_is_no_memory),
		cmocka_unit_test(uses_a_callers_allocator_once_per_tensor),
		cmocka_unit_test(ends_a_feed_clearly_when_the_allocator_gives_none),
		cmocka_unit_test(may_be_released_while_the_loader_closes),
		cmocka_unit_test(gives_released_memory_back_before_it_takes_more),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
