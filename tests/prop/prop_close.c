/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Closing a loader under those who use it: threads that wait for jobs (several for the same one), drink from feeds,
 * ask for statistics, cancel, close their handles and drop buffers, while the main thread closes the loader with
 * time-outs that are too short and long enough. What must hold: every call answers one of the codes that fit, what was
 * handed out is right, and all ends.
 */
#include "loadtest.h"

#include "fakes/fake_engine.h"

#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#define N_THREADS 4

struct user {
	const struct bed *bed;
	struct test_random random;
	pthread_t thread;
	hr_job *job;    /* closed by its own thread once nobody waits for it any more */
	hr_job *shared; /* of all threads */
	hr_feed *feed;
	hr_buffer *buffer;
	const char *wrong;
	int code;
};

static void note(struct user *u, const char *what, int code)
{
	if (!u->wrong) {
		u->wrong = what;
		u->code = code;
	}
}

static bool is_end(int rc)
{
	return rc == 0 || rc == HR_E_CANCELLED;
}

static void use_jobs(struct user *u)
{
	struct hr_stats stats = HR_STATS_INIT;
	int rc = HR_E_PENDING;

	while (rc == HR_E_PENDING)
		rc = hr_job_wait(u->shared, (uint32_t)test_random_below(&u->random, 3));
	if (!is_end(rc))
		note(u, "waiting for a job that others wait for too", rc);
	rc = hr_job_stats(u->job, &stats);
	if (rc)
		note(u, "statistics", rc);
	if (test_random_below(&u->random, 3) == 0)
		hr_job_cancel(u->job);
	rc = hr_job_wait(u->job, HR_FOREVER);
	if (!is_end(rc))
		note(u, "waiting", rc);
	rc = hr_job_close(u->job, HR_FOREVER);
	if (rc)
		note(u, "closing a job", rc);
}

static void use_feed(struct user *u)
{
	struct hr_stats stats = HR_STATS_INIT;
	int rc;

	for (;;) {
		struct hr_tensor t = HR_TENSOR_INIT;
		hr_buffer *buffer;

		rc = hr_feed_next(u->feed, &t, &buffer);
		if (rc)
			break;
		if (!buffer_is_right(u->bed->model, &t, buffer))
			note(u, "a feed handed out wrong bytes", 1);
		hr_buffer_release(buffer);
		if (hr_feed_stats(u->feed, &stats))
			note(u, "statistics of a feed", 1);
	}
	if (rc != HR_E_END && rc != HR_E_CANCELLED)
		note(u, "a feed", rc);
	rc = hr_feed_close(u->feed, HR_FOREVER);
	if (rc)
		note(u, "closing a feed", rc);
}

static void *use(void *arg)
{
	struct user *u = arg;

	if (test_random_below(&u->random, 2)) {
		use_jobs(u);
		use_feed(u);
	} else {
		use_feed(u);
		use_jobs(u);
	}
	hr_buffer_release(u->buffer);
	return NULL;
}

static hr_job *start_job(const struct bed *bed, hr_buffer *buffer)
{
	struct hr_tensor t = HR_TENSOR_INIT;
	struct hr_read reads[200];
	size_t n = 0;
	uint64_t at = 0;
	hr_job *job;

	for (uint64_t i = 0; i < bed->n_tensors; i++) {
		assert_ok(hr_model_tensor(bed->model, i, &t));
		reads[n++] = (struct hr_read){i, 0, UINT64_MAX, (char *)hr_buffer_data(buffer) + at, t.bytes};
		at += t.bytes;
	}
	assert_ok(hr_job_start(bed->loader, bed->model, reads, n, NULL, &job));
	return job;
}

static void close_under(struct test_random *random, const char *device)
{
	static const char *const engines[] = {NULL, "fake", "fake-queue", "mapped"};
	struct hr_loader_opts opts = HR_LOADER_OPTS_INIT;
	struct user users[N_THREADS] = {{0}};
	hr_buffer *buffer;
	struct bed bed;
	hr_job *shared;
	int rc;

	opts.engine = engines[test_random_below(random, is_through_ugds() ? 2 : strcmp(device, "cpu") == 0 ? 3 : 4)];
	opts.staging_bytes = HR_MIN_STAGING_BYTES * (1 + test_random_below(random, 4));
	opts.readers = 1 + (uint32_t)test_random_below(random, 4);
	fake_engine_set(&(struct fake_engine_settings){.seed = random->state, .short_reads = 1, .delay_ns = 200000});
	bed_open(&bed, random->state >> 40, 40, 100000);
	bed_load(&bed, device, &opts);
	assert_ok(hr_buffer_new(bed.loader, bed.bytes, &buffer));
	shared = start_job(&bed, buffer);
	for (int i = 0; i < N_THREADS; i++) {
		users[i] = (struct user){.bed = &bed, .random = {test_random_next(random)}, .shared = shared};
		assert_ok(hr_buffer_new(bed.loader, bed.bytes, &users[i].buffer));
		users[i].job = start_job(&bed, users[i].buffer);
		assert_ok(hr_feed_open(bed.loader, bed.model, NULL, &users[i].feed));
	}
	for (int i = 0; i < N_THREADS; i++)
		assert_int_equal(pthread_create(&users[i].thread, NULL, use, &users[i]), 0);
	usleep((useconds_t)test_random_below(random, 4000));
	do {
		rc = hr_loader_close(bed.loader, (uint32_t)test_random_below(random, 2));
	} while (rc == HR_E_BUSY);
	bed.loader = NULL;
	for (int i = 0; i < N_THREADS; i++)
		pthread_join(users[i].thread, NULL);
	assert_int_equal(rc, 0);
	for (int i = 0; i < N_THREADS; i++)
		if (users[i].wrong)
			fail_msg("%s: %s (%d)", users[i].wrong, hr_error_name(users[i].code), users[i].code);
	assert_ok(hr_job_close(shared, 0));
	hr_buffer_release(buffer);
	bed_close(&bed);
}

static void run_rounds(const char *device, uint64_t seed)
{
	uint64_t end = now_ms() + 1500;
	struct test_random random;

	if (!has_device(device))
		skip_for("%s", hr_error_last()->message);
	alarm(120); /* instead of a hang */
	test_random_start(&random, seed);
	for (int round = 0; round < 15 || (now_ms() < end && round < 300); round++)
		close_under(&random, device);
	fake_engine_set(NULL);
	alarm(0);
}

static void a_loader_closes_under_its_users_on_cpu(void **state)
{
	(void)state;
	run_rounds("cpu", 11);
}

static void a_loader_closes_under_its_users_on_cuda(void **state)
{
	(void)state;
	run_rounds("cuda:0", 12);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(a_loader_closes_under_its_users_on_cpu),
		cmocka_unit_test(a_loader_closes_under_its_users_on_cuda),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
