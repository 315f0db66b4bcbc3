/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Feeds by the public header: options, orders, the end, consumers that are slow or keep everything, failures that
 * stay, early closes, and that look-ahead takes no device memory. On every device that is here.
 */
#include "loadtest.h"

#include "fakes/fake_engine.h"

#include <errno.h>
#include <unistd.h>

static const char *const devices[] = {"cpu", "cuda:0"};

static void on_every_device(void (*body)(const char *device))
{
	for (size_t i = 0; i < 2; i++)
		if (has_device(devices[i]))
			body(devices[i]);
	fake_engine_set(NULL);
}

static void refuses_options_that_are_not_valid(void **state)
{
	struct hr_feed_opts flags = HR_FEED_OPTS_INIT, tensors = HR_FEED_OPTS_INIT, stream = HR_FEED_OPTS_INIT;
	hr_feed *feed = (hr_feed *)(uintptr_t)1;
	struct hr_tensor t = HR_TENSOR_INIT;
	uint64_t number = 4;
	hr_buffer *buffer;
	struct bed bed;

	(void)state;
	bed_open(&bed, 1, 4, 5000);
	bed_load(&bed, "cpu", NULL);
	flags.flags = 1u << 31;
	assert_fails(hr_feed_open(bed.loader, bed.model, &flags, &feed), HR_E_OPTS);
	assert_null(feed);
	tensors.tensors = &number;
	tensors.n_tensors = 1;
	assert_fails(hr_feed_open(bed.loader, bed.model, &tensors, &feed), HR_E_OPTS);
	stream.signal_stream = &number;
	assert_fails(hr_feed_open(bed.loader, bed.model, &stream, &feed), HR_E_OPTS);
	assert_fails(hr_feed_open(bed.loader, NULL, NULL, &feed), HR_E_OPTS);
	assert_fails(hr_feed_open(NULL, bed.model, NULL, &feed), HR_E_OPTS);
	assert_fails(hr_feed_open(bed.loader, bed.model, NULL, NULL), HR_E_OPTS);
	assert_fails(hr_feed_next(NULL, &t, &buffer), HR_E_OPTS);
	assert_ok(hr_feed_open(bed.loader, bed.model, NULL, &feed));
	assert_fails(hr_feed_next(feed, NULL, &buffer), HR_E_OPTS);
	assert_fails(hr_feed_next(feed, &t, NULL), HR_E_OPTS);
	t.size = 1;
	assert_fails(hr_feed_next(feed, &t, &buffer), HR_E_OPTS);
	t.size = sizeof(t);
	assert_ok(hr_feed_next(feed, &t, &buffer)); /* a mistake of the caller's does not end it */
	assert_int_equal(t.index, 0);
	hr_buffer_release(buffer);
	assert_ok(hr_feed_close(feed, HR_FOREVER));
	assert_ok(hr_feed_close(NULL, 0));
	bed_close(&bed);
}

static void in_file_order(const char *device)
{
	struct hr_stats stats = HR_STATS_INIT;
	struct hr_tensor t = HR_TENSOR_INIT;
	hr_buffer *buffer;
	hr_feed *feed;
	struct bed bed;

	bed_open(&bed, 2, 60, 300000);
	bed_load(&bed, device, NULL);
	assert_ok(hr_feed_open(bed.loader, bed.model, NULL, &feed));
	for (uint64_t i = 0; i < bed.n_tensors; i++) {
		assert_ok(hr_feed_next(feed, &t, &buffer));
		assert_int_equal(t.index, i);
		assert_true(buffer_is_right(bed.model, &t, buffer));
		assert_int_equal((uintptr_t)hr_buffer_data(buffer) % 256, 0);
		hr_buffer_release(buffer);
	}
	for (int i = 0; i < 2; i++) {
		assert_fails(hr_feed_next(feed, &t, &buffer), HR_E_END);
		assert_null(buffer);
	}
	assert_ok(hr_feed_stats(feed, &stats));
	assert_int_equal(stats.done_bytes, bed.bytes);
	assert_int_equal(stats.total_bytes, bed.bytes);
	assert_int_equal(stats.total_tensors, bed.n_tensors);
	assert_ok(hr_feed_close(feed, 0));
	bed_close(&bed);
}

static void hands_out_all_in_file_order_and_then_ends(void **state)
{
	(void)state;
	on_every_device(in_file_order);
}

static void repeated(const char *device)
{
	uint64_t order[90];
	struct hr_feed_opts opts = HR_FEED_OPTS_INIT;
	struct hr_tensor t = HR_TENSOR_INIT;
	struct test_random random = {8};
	hr_buffer *buffers[90];
	hr_feed *feed;
	struct bed bed;

	bed_open(&bed, 3, 30, 200000);
	bed_load(
		&bed, device,
		&(struct hr_loader_opts){.size = sizeof(struct hr_loader_opts), .staging_bytes = HR_MIN_STAGING_BYTES});
	for (int i = 0; i < 90; i++)
		order[i] = i % 3 ? test_random_below(&random, 30) : 17; /* one of them again and again */
	opts.tensors = order;
	opts.n_tensors = 90;
	opts.flags = HR_FEED_GIVEN_ORDER;
	assert_ok(hr_feed_open(bed.loader, bed.model, &opts, &feed));
	opts.tensors = NULL; /* it was copied */
	for (int i = 0; i < 90; i++) {
		assert_ok(hr_feed_next(feed, &t, &buffers[i]));
		assert_int_equal(t.index, order[i]);
	}
	for (int i = 0; i < 90; i++) {
		assert_ok(hr_model_tensor(bed.model, order[i], &t));
		assert_true(buffer_is_right(bed.model, &t, buffers[i]));
		if (t.bytes && i >= 3 && order[i] == 17) /* each is memory of its own */
			assert_ptr_not_equal(hr_buffer_data(buffers[i]), hr_buffer_data(buffers[i - 3]));
	}
	for (int i = 0; i < 90; i++)
		hr_buffer_release(buffers[i]);
	assert_ok(hr_feed_close(feed, 0));
	bed_close(&bed);
}

static void keeps_the_given_order_with_repeats(void **state)
{
	(void)state;
	on_every_device(repeated);
}

static void of_a_subset(const char *device)
{
	static const uint64_t some[] = {19, 3, 3, 11, 0};
	static const uint64_t sorted[] = {0, 3, 3, 11, 19};
	struct hr_feed_opts opts = {sizeof(opts), some, 5, 0, 0, NULL, NULL};
	struct hr_tensor t = HR_TENSOR_INIT;
	hr_buffer *buffer;
	hr_feed *feed;
	struct bed bed;

	bed_open(&bed, 4, 20, 100000);
	bed_load(&bed, device, NULL);
	assert_ok(hr_feed_open(bed.loader, bed.model, &opts, &feed));
	for (int i = 0; i < 5; i++) {
		struct hr_tensor want = HR_TENSOR_INIT;

		assert_ok(hr_feed_next(feed, &t, &buffer));
		assert_ok(hr_model_tensor(bed.model, sorted[i], &want));
		assert_true(buffer_is_right(bed.model, &t, buffer));
		assert_int_equal(t.offset, want.offset);
		hr_buffer_release(buffer);
	}
	assert_fails(hr_feed_next(feed, &t, &buffer), HR_E_END);
	assert_ok(hr_feed_close(feed, 0));
	opts.n_tensors = 0; /* a list of none is none, not all */
	assert_ok(hr_feed_open(bed.loader, bed.model, &opts, &feed));
	assert_fails(hr_feed_next(feed, &t, &buffer), HR_E_END);
	assert_ok(hr_feed_close(feed, 0));
	bed_close(&bed);
}

static void sorts_a_subset_into_file_order(void **state)
{
	(void)state;
	on_every_device(of_a_subset);
}

static void kept(const char *device)
{
	static const uint64_t pools[] = {HR_MIN_STAGING_BYTES, HR_MIN_STAGING_BYTES * 5, 0};
	struct bed bed;

	bed_open(&bed, 5, 200, 120000);
	for (int i = 0; i < 3; i++) {
		struct hr_loader_opts opts = HR_LOADER_OPTS_INIT;

		opts.staging_bytes = pools[i];
		bed_load(&bed, device, &opts);
		assert_ok(load_by_feed(bed.loader, bed.model, NULL, true, NULL));
		assert_ok(hr_loader_close(bed.loader, 0));
		assert_ok(hr_device_close(bed.device));
	}
	bed.loader = NULL;
	bed.device = NULL;
	bed_close(&bed);
}

static void gets_every_tensor_right_for_a_consumer_that_keeps_all(void **state)
{
	(void)state;
	on_every_device(kept);
}

/* Takes the next tensor of a feed, compares and drops it; false at the end. */
static bool sip(hr_feed *feed, const hr_model *model)
{
	struct hr_tensor t = HR_TENSOR_INIT;
	hr_buffer *buffer;
	int rc = hr_feed_next(feed, &t, &buffer);

	if (rc == HR_E_END)
		return false;
	assert_int_equal(rc, 0);
	assert_true(buffer_is_right(model, &t, buffer));
	hr_buffer_release(buffer);
	return true;
}

static void side_by_side(const char *device)
{
	static const uint64_t pools[] = {HR_MIN_STAGING_BYTES, HR_MIN_STAGING_BYTES * 4};

	alarm(60); /* instead of a hang */
	for (int i = 0; i < 2; i++) {
		struct hr_loader_opts opts = HR_LOADER_OPTS_INIT;
		struct hr_feed_opts given = HR_FEED_OPTS_INIT;
		bool more_a = true, more_b = true;
		hr_feed *a, *b;
		struct bed bed;

		opts.staging_bytes = pools[i];
		given.flags = HR_FEED_GIVEN_ORDER;
		bed_open(&bed, 6, 60, 300000);
		bed_load(&bed, device, &opts);
		assert_ok(hr_feed_open(bed.loader, bed.model, NULL, &a));
		assert_ok(hr_feed_open(bed.loader, bed.model, &given, &b));
		usleep(20000); /* both fill what slots they may */
		for (int round = 0; more_a || more_b; round++) {
			more_a = more_a && sip(a, bed.model);
			if (round % 3 == 0) /* one is slower than the other */
				more_b = more_b && sip(b, bed.model);
			if (round % 20 == 0)
				assert_ok(load_by_job(bed.loader, bed.model, NULL));
		}
		assert_ok(hr_feed_close(a, 0));
		assert_ok(hr_feed_close(b, 0));
		bed_close(&bed);
	}
	alarm(0);
}

static void two_slow_feeds_and_a_job_on_one_thread_never_dead_lock(void **state)
{
	(void)state;
	on_every_device(side_by_side);
}

static void early(const char *device)
{
	struct hr_loader_opts opts = HR_LOADER_OPTS_INIT;
	struct hr_tensor t = HR_TENSOR_INIT;
	hr_buffer *buffer;
	struct bed bed;

	opts.staging_bytes = HR_MIN_STAGING_BYTES * 2;
	bed_open(&bed, 7, 60, 900000);
	bed_load(&bed, device, &opts);
	for (int taken = 0; taken < 20; taken++) {
		hr_feed *feed;

		assert_ok(hr_feed_open(bed.loader, bed.model, NULL, &feed));
		for (int i = 0; i < taken; i++) {
			assert_ok(hr_feed_next(feed, &t, &buffer));
			if (i + 1 < taken)
				hr_buffer_release(buffer);
		}
		assert_ok(hr_feed_close(feed, HR_FOREVER));
		if (taken) { /* what was handed out stays good */
			assert_true(buffer_is_right(bed.model, &t, buffer));
			hr_buffer_release(buffer);
		}
	}
	assert_ok(load_by_job(bed.loader, bed.model, NULL));
	bed_close(&bed);
}

static void can_be_closed_at_any_point(void **state)
{
	(void)state;
	on_every_device(early);
}

static void failed(const char *device)
{
	struct hr_loader_opts opts = HR_LOADER_OPTS_INIT;
	struct hr_tensor t = HR_TENSOR_INIT;
	hr_buffer *buffer;
	hr_feed *feed;
	struct bed bed;
	int rc = 0, n = 0;

	fake_engine_set(&(struct fake_engine_settings){.fail_read = 9, .fail_errno = EIO});
	opts.engine = "fake";
	opts.staging_bytes = HR_MIN_STAGING_BYTES;
	bed_open(&bed, 8, 60, 900000);
	bed_load(&bed, device, &opts);
	assert_ok(hr_feed_open(bed.loader, bed.model, NULL, &feed));
	while (!rc) {
		rc = hr_feed_next(feed, &t, &buffer);
		n += !rc;
		if (!rc) {
			assert_true(buffer_is_right(bed.model, &t, buffer));
			hr_buffer_release(buffer);
		}
	}
	assert_true(n < 60);
	for (int i = 0; i < 3; i++) {
		assert_fails(hr_feed_next(feed, &t, &buffer), HR_E_IO);
		assert_null(buffer);
		assert_int_equal(hr_error_last()->system, EIO);
	}
	assert_ok(hr_feed_close(feed, HR_FOREVER));
	assert_ok(load_by_feed(bed.loader, bed.model, NULL, false, NULL)); /* the loader goes on */
	bed_close(&bed);
}

static void stays_failed_once_it_has_failed(void **state)
{
	(void)state;
	on_every_device(failed);
}

static void pending(const char *device)
{
	struct hr_loader_opts opts = HR_LOADER_OPTS_INIT;
	struct hr_feed_opts feed_opts = HR_FEED_OPTS_INIT;
	struct hr_tensor t = HR_TENSOR_INIT;
	hr_buffer *buffer;
	hr_feed *feed;
	struct bed bed;
	int rc = 0, n = 0, n_pending = 0;

	fake_engine_set(&(struct fake_engine_settings){.hang_read = 9});
	opts.engine = "fake";
	opts.staging_bytes = HR_MIN_STAGING_BYTES;
	feed_opts.next_timeout_ms = 5;
	bed_open(&bed, 8, 60, 900000);
	bed_load(&bed, device, &opts);
	assert_ok(hr_feed_open(bed.loader, bed.model, &feed_opts, &feed));
	while (rc == 0 || rc == HR_E_PENDING) {
		rc = hr_feed_next(feed, &t, &buffer);
		if (rc == HR_E_PENDING) {
			assert_null(buffer);
			if (fake_engine_hanging() && ++n_pending == 3)
				fake_engine_let_go();
		} else if (rc == 0) {
			n++;
			assert_true(buffer_is_right(bed.model, &t, buffer));
			hr_buffer_release(buffer);
		}
	}
	assert_fails(rc, HR_E_END);
	assert_int_equal(n, hr_model_n_tensors(bed.model));
	assert_true(n_pending >= 3);
	assert_ok(hr_feed_close(feed, HR_FOREVER));
	bed_close(&bed);
}

static void is_pending_when_its_time_is_up_and_goes_on(void **state)
{
	(void)state;
	on_every_device(pending);
}

static void peak(const char *device)
{
	struct hr_loader_opts opts = HR_LOADER_OPTS_INIT;
	struct hr_stats stats = HR_STATS_INIT;
	hr_feed *feed;
	struct bed bed;

	opts.staging_bytes = UINT64_C(2) << 20;
	bed_open(&bed, 9, 400, 300000); /* some 20 MB: several times what tensors may share */
	bed_load(&bed, device, &opts);
	assert_ok(hr_feed_open(bed.loader, bed.model, NULL, &feed));
	for (int i = 0; i < 2000 && stats.read_bytes == 0; i++) {
		usleep(10000);
		assert_ok(hr_loader_stats(bed.loader, &stats));
	}
	assert_int_equal(stats.peak_buffer_bytes, 0); /* look-ahead takes none */
	assert_true(stats.read_bytes > 0);
	while (sip(feed, bed.model))
		;
	assert_ok(hr_loader_stats(bed.loader, &stats));
	assert_true(stats.peak_buffer_bytes > 0);
	/* what is shared, and what the loader has yet to take back */
	assert_true(stats.peak_buffer_bytes <= UINT64_C(24) << 20);
	assert_true(stats.peak_staging_bytes <= opts.staging_bytes);
	assert_ok(hr_feed_close(feed, HR_FOREVER));
	bed_close(&bed);
}

static void takes_device_memory_only_for_what_it_hands_out(void **state)
{
	(void)state;
	on_every_device(peak);
}

static void shared(const char *device)
{
	struct hr_tensor t[40];
	hr_buffer *buffers[40];
	hr_feed *feed;
	struct bed bed;

	bed_open(&bed, 10, 40, 3000); /* all of them share one allocation */
	bed_load(&bed, device, NULL);
	assert_ok(hr_feed_open(bed.loader, bed.model, NULL, &feed));
	for (int i = 0; i < 40; i++) {
		t[i] = (struct hr_tensor)HR_TENSOR_INIT;
		assert_ok(hr_feed_next(feed, &t[i], &buffers[i]));
	}
	assert_ok(hr_feed_close(feed, 0));
	for (int i = 0; i < 40; i += 2) {
		hr_buffer_acquire(buffers[i]);
		hr_buffer_release(buffers[i + 1]);
	}
	for (int i = 0; i < 40; i += 2) {
		assert_true(buffer_is_right(bed.model, &t[i], buffers[i]));
		hr_buffer_release(buffers[i]);
		assert_true(buffer_is_right(bed.model, &t[i], buffers[i]));
		hr_buffer_release(buffers[i]);
	}
	bed_close(&bed);
}

static void counts_each_of_the_tensors_that_share_an_allocation(void **state)
{
	(void)state;
	on_every_device(shared);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(refuses_options_that_are_not_valid),
		cmocka_unit_test(hands_out_all_in_file_order_and_then_ends),
		cmocka_unit_test(keeps_the_given_order_with_repeats),
		cmocka_unit_test(sorts_a_subset_into_file_order),
		cmocka_unit_test(gets_every_tensor_right_for_a_consumer_that_keeps_all),
		cmocka_unit_test(two_slow_feeds_and_a_job_on_one_thread_never_dead_lock),
		cmocka_unit_test(can_be_closed_at_any_point),
		cmocka_unit_test(stays_failed_once_it_has_failed),
		cmocka_unit_test(is_pending_when_its_time_is_up_and_goes_on),
		cmocka_unit_test(takes_device_memory_only_for_what_it_hands_out),
		cmocka_unit_test(counts_each_of_the_tensors_that_share_an_allocation),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
