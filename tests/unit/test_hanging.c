/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Promise 3, nothing under a moving DMA, where it is hardest: reads that do not come back. Deadlines, slots that are
 * lost and found again, readers that are all stuck, closes that must wait. With both kinds of engine, on every device
 * that is here. Each test is under an alarm: what must not happen is a hang.
 */
#include "loadtest.h"

#include "fakes/fake_engine.h"

#include <sys/mman.h>
#include <unistd.h>

#define DEADLINE_MS 200 /* no read that is not told to hang takes as long, not on a busy machine either */

struct hung {
	struct bed bed;
	struct hr_tensor tensor; /* of several chunks */
	unsigned char *want;
	hr_buffer *buffer;
	struct hr_read read;
	hr_job *job;
};

static void set_up(struct hung *h, const char *device, const char *engine, uint32_t readers, uint64_t staging_bytes,
		   const struct fake_engine_settings *fake)
{
	struct hr_loader_opts opts = HR_LOADER_OPTS_INIT;
	static const struct test_tensor tensors[] = {{"first", "U8", 1000}, {"w", "U8", 6000001}, {"last", "U8", 5000}};

	memset(h, 0, sizeof(*h));
	alarm(60);
	fake_engine_set(fake);
	opts.engine = engine;
	opts.readers = readers;
	opts.staging_bytes = staging_bytes;
	opts.slot_bytes = HR_MIN_SLOT_BYTES;
	h->bed.dir = make_temp_dir();
	h->bed.paths[0] = path_in(h->bed.dir, "a.safetensors");
	write_safetensors(h->bed.paths[0], tensors, 3, 77);
	assert_ok(hr_model_open(h->bed.paths[0], NULL, &h->bed.model));
	bed_load(&h->bed, device, &opts);
	h->tensor = (struct hr_tensor)HR_TENSOR_INIT;
	assert_ok(hr_model_tensor(h->bed.model, 1, &h->tensor));
	h->want = plain_read(h->bed.model, &h->tensor);
	assert_ok(hr_buffer_new(h->bed.loader, h->tensor.bytes, &h->buffer));
	h->read = (struct hr_read){1, 0, UINT64_MAX, hr_buffer_data(h->buffer), h->tensor.bytes};
}

static void start(struct hung *h, uint32_t io_timeout_ms, hr_job **job)
{
	struct hr_job_opts opts = HR_JOB_OPTS_INIT;

	opts.io_timeout_ms = io_timeout_ms;
	assert_ok(hr_job_start(h->bed.loader, h->bed.model, &h->read, 1, &opts, job));
}

static void tear_down(struct hung *h)
{
	hr_buffer_release(h->buffer);
	free(h->want);
	bed_close(&h->bed);
	fake_engine_set(NULL);
	alarm(0);
}

static uint64_t lost_bytes(const struct hung *h)
{
	struct hr_stats stats = HR_STATS_INIT;

	assert_ok(hr_loader_stats(h->bed.loader, &stats));
	return stats.lost_bytes;
}

static void wait_until_found(const struct hung *h)
{
	fake_engine_let_go();
	while (lost_bytes(h) > 0)
		usleep(1000);
}

/* Everything works again. */
static void check_works(struct hung *h)
{
	hr_job *job;

	start(h, 0, &job);
	assert_ok(hr_job_wait(job, HR_FOREVER));
	assert_ok(hr_job_close(job, HR_FOREVER));
	assert_true(buffer_is_right(h->bed.model, &h->tensor, h->buffer));
}

static void on_every_device_and_engine(void (*body)(const char *device, const char *engine))
{
	static const char *const devices[] = {"cpu", "cuda:0"}, *const engines[] = {"fake", "fake-queue",
										    "fake-window"};

	for (size_t d = 0; d < 2; d++)
		for (size_t e = 0; e < 3; e++)
			if (has_engine(devices[d], engines[e]))
				body(devices[d], engines[e]);
}

static void deadline(const char *device, const char *engine)
{
	struct hung h;
	uint64_t began;

	set_up(&h, device, engine, 3, HR_MIN_SLOT_BYTES * 8, &(struct fake_engine_settings){.hang_read = 4});
	began = now_ms();
	start(&h, DEADLINE_MS, &h.job);
	assert_fails(hr_job_wait(h.job, HR_FOREVER), HR_E_TIMEDOUT);
	assert_true(now_ms() - began >= DEADLINE_MS);
	assert_string_equal(hr_error_last()->path, h.bed.paths[0]);
	assert_string_equal(hr_error_last()->tensor, "w");
	assert_true(hr_error_last()->offset < h.tensor.offset + h.tensor.bytes);
	assert_int_equal(lost_bytes(&h), HR_MIN_SLOT_BYTES);
	assert_int_equal(fake_engine_hanging(), 1);
	assert_ok(hr_job_close(h.job, 0)); /* it has settled although the read is still out */
	check_works(&h);                   /* with what is left */
	assert_fails(hr_loader_close(h.bed.loader, 30), HR_E_BUSY);
	check_works(&h); /* nothing was closed */
	wait_until_found(&h);
	check_works(&h);
	tear_down(&h); /* closes at once */
}

static void misses_a_deadline_loses_the_slot_and_finds_it_again(void **state)
{
	(void)state;
	on_every_device_and_engine(deadline);
}

/* The destination is unmapped once the job has settled, and other memory lies there when the read comes back. */
static void leaves_memory_alone_after_it_has_settled(void **state)
{
	static const char *const engines[] = {"fake", "fake-queue"};

	(void)state;
	for (int i = 0; i < 2; i++) {
		struct hung h;
		unsigned char *memory;
		size_t bytes;

		set_up(&h, "cpu", engines[i], 2, HR_MIN_SLOT_BYTES * 8,
		       &(struct fake_engine_settings){.hang_read = 2, .n_hang = 2});
		bytes = (size_t)h.tensor.bytes;
		memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		h.read.dst = memory;
		start(&h, DEADLINE_MS, &h.job);
		assert_fails(hr_job_wait(h.job, HR_FOREVER), HR_E_TIMEDOUT);
		assert_ok(hr_job_close(h.job, 0));
		munmap(memory, bytes);
		memory = mmap(memory, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE,
			      -1, 0);
		assert_true(memory != MAP_FAILED);
		wait_until_found(&h);
		for (size_t at = 0; at < bytes; at++)
			if (memory[at])
				fail_msg("byte %zu was written after the job had settled", at);
		munmap(memory, bytes);
		tear_down(&h);
	}
}

static void no_deadline(const char *device, const char *engine)
{
	struct hr_stats stats = HR_STATS_INIT;
	struct hung h;

	set_up(&h, device, engine, 2, HR_MIN_SLOT_BYTES * 8, &(struct fake_engine_settings){.hang_read = 3});
	start(&h, 0, &h.job);
	while (fake_engine_hanging() == 0) /* alarm() ends a wait for nothing */
		usleep(1000);
	assert_fails(hr_job_wait(h.job, 50), HR_E_PENDING);
	assert_fails(hr_loader_close(h.bed.loader, 20), HR_E_BUSY);
	assert_fails(hr_job_wait(h.job, 0), HR_E_PENDING); /* cancelled by the close, but its memory is not free yet */
	assert_fails(hr_job_close(h.job, 20), HR_E_BUSY);
	assert_ok(hr_job_stats(h.job, &stats)); /* all of it is alive and callable */
	assert_ok(hr_loader_stats(h.bed.loader, &stats));
	assert_int_equal(stats.lost_bytes, 0);
	fake_engine_let_go();
	assert_fails(hr_job_wait(h.job, HR_FOREVER), HR_E_CANCELLED);
	check_works(&h);
	assert_ok(hr_loader_close(h.bed.loader, HR_FOREVER));
	h.bed.loader = NULL;
	assert_ok(hr_job_close(h.job, 0));
	tear_down(&h);
}

static void keeps_everything_alive_while_a_read_is_out(void **state)
{
	(void)state;
	on_every_device_and_engine(no_deadline);
}

static void cancelled(const char *device, const char *engine)
{
	struct hung h;

	set_up(&h, device, engine, 2, HR_MIN_SLOT_BYTES * 8, &(struct fake_engine_settings){.hang_read = 1});
	start(&h, DEADLINE_MS, &h.job);
	while (fake_engine_hanging() == 0)
		usleep(500);
	assert_ok(hr_job_cancel(h.job));
	assert_fails(hr_job_wait(h.job, HR_FOREVER), HR_E_CANCELLED); /* the deadline settles it */
	assert_int_equal(lost_bytes(&h), HR_MIN_SLOT_BYTES);
	assert_ok(hr_job_close(h.job, 0));
	wait_until_found(&h);
	tear_down(&h);
}

static void settles_a_cancelled_job_at_its_deadline(void **state)
{
	(void)state;
	on_every_device_and_engine(cancelled);
}

/* Starts a job and a feed beside a job that is going to lose everything there is; all must hear of it. */
static void check_all_lost(struct hung *h, int n_hanging)
{
	struct hr_tensor t = HR_TENSOR_INIT;
	hr_job *other, *late;
	hr_buffer *buffer;
	hr_feed *feed;

	start(h, DEADLINE_MS, &h->job);
	while (fake_engine_hanging() < n_hanging) /* all of them reads of the job with a deadline */
		usleep(500);
	start(h, 0, &other);
	assert_ok(hr_feed_open(h->bed.loader, h->bed.model, NULL, &feed));
	assert_fails(hr_job_wait(h->job, HR_FOREVER), HR_E_TIMEDOUT);
	assert_fails(hr_job_wait(other, HR_FOREVER), HR_E_LOST);
	assert_fails(hr_feed_next(feed, &t, &buffer), HR_E_LOST);
	start(h, 0, &late);
	assert_fails(hr_job_wait(late, HR_FOREVER), HR_E_LOST);
	assert_fails(hr_read_into(h->bed.loader, h->bed.model, 1, h->read.dst, h->read.dst_bytes), HR_E_LOST);
	assert_ok(hr_job_close(h->job, 0));
	assert_ok(hr_job_close(other, 0));
	assert_ok(hr_job_close(late, 0));
	assert_ok(hr_feed_close(feed, 0));
	assert_fails(hr_loader_close(h->bed.loader, 20), HR_E_BUSY);
	wait_until_found(h);
	check_works(h);
	tear_down(h);
}

static void says_lost_when_all_readers_are_stuck(void **state)
{
	struct hung h;

	(void)state;
	set_up(&h, "cpu", "fake", 1, HR_MIN_SLOT_BYTES * 8, &(struct fake_engine_settings){.hang_read = 1});
	check_all_lost(&h, 1);
	set_up(&h, "cpu", "fake", 3, HR_MIN_SLOT_BYTES * 8,
	       &(struct fake_engine_settings){.hang_read = 1, .n_hang = 3});
	check_all_lost(&h, 3);
}

static void says_lost_when_all_staging_memory_is(void **state)
{
	struct hung h;

	(void)state;
	set_up(&h, "cpu", "fake-queue", 2, HR_MIN_STAGING_BYTES,
	       &(struct fake_engine_settings){.hang_read = 1, .n_hang = 2});
	check_all_lost(&h, 2);
}

static void says_lost_when_the_queue_is_full_of_reads_that_hang(void **state)
{
	struct hung h;

	(void)state;
	set_up(&h, "cpu", "fake-queue", 2, HR_MIN_SLOT_BYTES * 60,
	       &(struct fake_engine_settings){.hang_read = 1, .n_hang = 60});
	check_all_lost(&h, 32);
}

static void of_a_feed(const char *device, const char *engine)
{
	struct hr_feed_opts opts = HR_FEED_OPTS_INIT;
	struct hr_tensor t = HR_TENSOR_INIT;
	hr_buffer *buffer;
	struct hung h;
	hr_feed *feed;
	int rc;

	set_up(&h, device, engine, 2, HR_MIN_SLOT_BYTES * 8, &(struct fake_engine_settings){.hang_read = 12});
	opts.io_timeout_ms = DEADLINE_MS;
	assert_ok(hr_feed_open(h.bed.loader, h.bed.model, &opts, &feed));
	do {
		rc = hr_feed_next(feed, &t, &buffer);
		if (!rc) {
			assert_true(buffer_is_right(h.bed.model, &t, buffer));
			hr_buffer_release(buffer);
		}
	} while (!rc);
	assert_int_equal(rc, HR_E_TIMEDOUT);
	assert_true(t.index < 2); /* the large one never comes */
	assert_ok(hr_feed_close(feed, HR_FOREVER));
	wait_until_found(&h);
	assert_ok(load_by_feed(h.bed.loader, h.bed.model, &opts, true, NULL));
	tear_down(&h);
}

static void ends_a_feed_at_its_deadline(void **state)
{
	(void)state;
	on_every_device_and_engine(of_a_feed);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(misses_a_deadline_loses_the_slot_and_finds_it_again),
		cmocka_unit_test(leaves_memory_alone_after_it_has_settled),
		cmocka_unit_test(keeps_everything_alive_while_a_read_is_out),
		cmocka_unit_test(settles_a_cancelled_job_at_its_deadline),
		cmocka_unit_test(says_lost_when_all_readers_are_stuck),
		cmocka_unit_test(says_lost_when_all_staging_memory_is),
		cmocka_unit_test(says_lost_when_the_queue_is_full_of_reads_that_hang),
		cmocka_unit_test(ends_a_feed_at_its_deadline),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
