/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The loader under random use: random models, settings, engines that misbehave, and several threads that run jobs and
 * feeds, wait, cancel and close early. What must hold, always:
 *
 *  - a job that succeeds put the right bytes at its destinations; whatever a job does, bytes beside them stay as they
 *    were;
 *  - a feed hands out the tensors asked for, in the order promised, each with the right bytes, also when the buffers
 *    are kept beyond feed, loader and device;
 *  - when nothing is going on any more, every slot is free, and the loader closes at once.
 *
 * Threads of the test answer by value: the first sentence of what went wrong.
 */
#include "loadtest.h"

#include "fakes/fake_engine.h"
#include "loader/loader.h"

#include <unistd.h>

#define MAX_READS 60
#define MAX_KEPT  64
#define N_THREADS 3
#define GUARD     61

struct kept {
	struct hr_tensor tensor;
	hr_buffer *buffer;
};

struct worker {
	const struct bed *bed;
	unsigned char *const *shards; /* their bytes */
	struct test_random random;
	bool may_be_refused; /* O_DIRECT was asked for by name */
	pthread_t thread;
	struct kept kept[MAX_KEPT];
	size_t n_kept;
	const char *wrong; /* NULL: nothing */
	int code;
};

static bool fail_worker(struct worker *w, const char *what, int code)
{
	if (!w->wrong) {
		w->wrong = what;
		w->code = code;
	}
	return false;
}

static uint64_t pick(struct worker *w, uint64_t n)
{
	return test_random_below(&w->random, n);
}

/* ---- jobs ---- */

struct job_case {
	struct hr_read reads[MAX_READS];
	uint64_t at[MAX_READS]; /* of the destination, in the buffer */
	size_t n;
	hr_buffer *buffer;
	unsigned char *before, *after;
	uint64_t bytes;
};

/* Random ranges, some empty, some twice, some overlapping; destinations follow one another, with or without room
 * between. */
static void make_reads(struct worker *w, struct job_case *c)
{
	c->n = pick(w, 5) ? pick(w, MAX_READS + 1) : 1;
	c->bytes = GUARD;
	for (size_t i = 0; i < c->n; i++) {
		struct hr_tensor t = HR_TENSOR_INIT;
		struct hr_read *read = &c->reads[i];

		hr_model_tensor(w->bed->model, pick(w, w->bed->n_tensors), &t);
		*read = (struct hr_read){.tensor = t.index, .length = UINT64_MAX};
		if (pick(w, 2)) {
			read->offset = pick(w, t.bytes + 1);
			read->length = pick(w, t.bytes - read->offset + 1);
		}
		if (i > 0 && pick(w, 8) == 0)
			*read = c->reads[i - 1];
		hr_model_tensor(w->bed->model, read->tensor, &t);
		if (read->length == UINT64_MAX)
			read->dst_bytes = t.bytes - read->offset;
		else
			read->dst_bytes = read->length;
		c->at[i] = c->bytes;
		c->bytes += read->dst_bytes + (pick(w, 2) ? pick(w, GUARD) : 0);
	}
	c->bytes += GUARD;
}

static bool make_memory(struct worker *w, struct job_case *c)
{
	bool is_host = w->bed->device->ops->caps & HR__DEVICE_HOST;

	if (hr_buffer_new(w->bed->loader, c->bytes, &c->buffer))
		return fail_worker(w, "no buffer", hr_error_last()->code);
	c->before = malloc(c->bytes);
	c->after = malloc(c->bytes);
	if (is_host)
		memset(hr_buffer_data(c->buffer), 0xa5, c->bytes);
	for (size_t i = 0; i < c->n; i++)
		c->reads[i].dst = (char *)hr_buffer_data(c->buffer) + c->at[i];
	if (hr_buffer_read(c->buffer, 0, c->before, c->bytes))
		return fail_worker(w, "the buffer cannot be read", hr_error_last()->code);
	return true;
}

/* What the memory must hold now is what it held before, with the ranges laid over it; if the job failed, those do
 * not count. */
static bool check_memory(struct worker *w, struct job_case *c, bool succeeded)
{
	if (hr_buffer_read(c->buffer, 0, c->after, c->bytes))
		return fail_worker(w, "the buffer cannot be read afterwards", hr_error_last()->code);
	for (size_t i = 0; i < c->n; i++) {
		struct hr_tensor t = HR_TENSOR_INIT;
		const struct hr_read *read = &c->reads[i];

		hr_model_tensor(w->bed->model, read->tensor, &t);
		memcpy(c->before + c->at[i], w->shards[t.shard] + t.offset + read->offset, read->dst_bytes);
		if (!succeeded)
			memcpy(c->after + c->at[i], c->before + c->at[i], read->dst_bytes);
	}
	if (memcmp(c->before, c->after, c->bytes) != 0)
		return fail_worker(w, succeeded ? "a job delivered wrong bytes" : "a job wrote beside its destinations",
				   1);
	return true;
}

/* Waits in one of the ways there are, and closes. The job's result, or HR_E_CANCELLED if it was not asked for. */
static int end_job(struct worker *w, hr_job *job)
{
	int rc = HR_E_CANCELLED, fd;

	switch (pick(w, 5)) {
	case 0:
		hr_job_cancel(job);
		rc = hr_job_wait(job, HR_FOREVER);
		break;
	case 1:
		if (hr_job_wait(job, (uint32_t)pick(w, 3)) == 0)
			rc = hr_job_wait(job, 0);
		break;
	case 2:
		if (hr_job_fd(job, &fd))
			return 1;
		rc = hr_job_wait(job, HR_FOREVER);
		break;
	default:
		rc = hr_job_wait(job, HR_FOREVER);
	}
	while (hr_job_close(job, (uint32_t)pick(w, 20)) == HR_E_BUSY)
		;
	return rc;
}

static bool run_job(struct worker *w)
{
	struct hr_job_opts opts = HR_JOB_OPTS_INIT;
	struct job_case c = {0};
	hr_job *job;
	bool good;
	int rc;

	make_reads(w, &c);
	good = make_memory(w, &c);
	opts.io_timeout_ms = pick(w, 3) ? 0 : 20000;
	rc = good ? hr_job_start(w->bed->loader, w->bed->model, c.reads, c.n, &opts, &job) : 0;
	if (good && rc) {
		if (rc != HR_E_UNSUPPORTED || !w->may_be_refused)
			good = fail_worker(w, "a job did not start", rc);
	} else if (good) {
		rc = end_job(w, job);
		if (rc && rc != HR_E_CANCELLED)
			good = fail_worker(w, "a job failed", rc);
		else
			good = check_memory(w, &c, rc == 0);
	}
	hr_buffer_release(c.buffer);
	free(c.before);
	free(c.after);
	return good;
}

/* ---- feeds ---- */

static bool is_right(const struct worker *w, const struct kept *k)
{
	unsigned char *got = malloc(k->tensor.bytes ? k->tensor.bytes : 1);
	bool right = hr_buffer_bytes(k->buffer) == k->tensor.bytes &&
		     hr_buffer_read(k->buffer, 0, got, k->tensor.bytes) == 0 &&
		     memcmp(got, w->shards[k->tensor.shard] + k->tensor.offset, k->tensor.bytes) == 0;

	free(got);
	return right;
}

static bool take_one(struct worker *w, const struct kept *now)
{
	bool right = is_right(w, now);

	if (right && w->n_kept < MAX_KEPT && pick(w, 3) == 0)
		w->kept[w->n_kept++] = *now;
	else
		hr_buffer_release(now->buffer);
	return right || fail_worker(w, "a feed handed out wrong bytes", 1);
}

static bool in_order(const struct worker *w, const struct kept *last, const struct kept *now,
		     const struct hr_feed_opts *opts, size_t i)
{
	(void)w;
	if (opts->tensors && (opts->flags & HR_FEED_GIVEN_ORDER))
		return now->tensor.index == opts->tensors[i];
	return i == 0 || last->tensor.shard < now->tensor.shard ||
	       (last->tensor.shard == now->tensor.shard && last->tensor.offset <= now->tensor.offset);
}

static bool drink(struct worker *w, hr_feed *feed, const struct hr_feed_opts *opts, size_t total)
{
	size_t most = pick(w, 3) ? total : pick(w, total + 1);
	struct kept last = {0}, now;
	int rc;

	for (size_t i = 0; i < most; i++) {
		now = (struct kept){HR_TENSOR_INIT, NULL};
		rc = hr_feed_next(feed, &now.tensor, &now.buffer);
		if (rc)
			return fail_worker(w, "a feed failed", rc);
		if (!in_order(w, &last, &now, opts, i)) {
			hr_buffer_release(now.buffer);
			return fail_worker(w, "a feed is out of order", (int)i);
		}
		last = now;
		if (!take_one(w, &now))
			return false;
		if (pick(w, 6) == 0)
			usleep((useconds_t)pick(w, 500));
	}
	rc = most == total ? hr_feed_next(feed, &now.tensor, &now.buffer) : HR_E_END;
	return rc == HR_E_END || fail_worker(w, "a feed does not end", rc);
}

static bool run_feed(struct worker *w)
{
	uint64_t tensors[MAX_READS];
	struct hr_feed_opts opts = HR_FEED_OPTS_INIT;
	size_t total = w->bed->n_tensors;
	hr_feed *feed;
	bool good;
	int rc;

	if (pick(w, 2)) {
		total = pick(w, MAX_READS + 1);
		for (size_t i = 0; i < total; i++)
			tensors[i] = pick(w, w->bed->n_tensors);
		opts.tensors = tensors;
		opts.n_tensors = total;
	}
	opts.flags = pick(w, 2) ? HR_FEED_GIVEN_ORDER : 0;
	opts.io_timeout_ms = pick(w, 3) ? 0 : 20000;
	rc = hr_feed_open(w->bed->loader, w->bed->model, &opts, &feed);
	if (rc)
		return (rc == HR_E_UNSUPPORTED && w->may_be_refused) || fail_worker(w, "a feed did not open", rc);
	good = drink(w, feed, &opts, total);
	while (hr_feed_close(feed, (uint32_t)pick(w, 20)) == HR_E_BUSY)
		;
	return good;
}

static void *work(void *arg)
{
	struct worker *w = arg;
	bool good = true;

	for (int i = 0; i < 6 && good; i++)
		good = pick(w, 2) ? run_job(w) : run_feed(w);
	return NULL;
}

/* ---- a round ---- */

static void random_opts(struct test_random *random, struct hr_loader_opts *opts)
{
	static const char *const engines[] = {NULL,         "pread", "uring",      "fake",
					      "fake-queue", "fake",  "fake-queue", "mapped"};
	struct fake_engine_settings fake = {.seed = test_random_next(random),
					    .short_reads = (int)test_random_below(random, 2)};

	opts->slot_bytes = HR_MIN_SLOT_BYTES * (1 + test_random_below(random, 3));
	opts->staging_bytes = opts->slot_bytes * (2 + test_random_below(random, 8)) + test_random_below(random, 1000);
	opts->engine = engines[test_random_below(random, sizeof(engines) / sizeof(engines[0]))];
	if (is_through_ugds()) /* what can read such models: that, and two that go by way of the host */
		opts->engine = ((const char *const[]){NULL, NULL, "pread", "fake"})[test_random_below(random, 4)];
	opts->caching = (uint32_t)test_random_below(random, 3);
	if (getenv("HR_TEST_ENGINE") && test_random_below(random, 2))
		opts->engine = NULL;
	opts->readers = 1 + (uint32_t)test_random_below(random, 8);
	fake.delay_ns = test_random_below(random, 2) ? 100000 : 0;
	fake_engine_set(&fake);
}

static void check_idle(hr_loader *loader)
{
	pthread_mutex_lock(&loader->lock);
	assert_int_equal(loader->n_jobs, 0);
	assert_true(hr__pool_is_idle(&loader->pool));
	assert_int_equal(loader->pool.n_lost, 0);
	assert_int_equal(loader->queue_in_flight, 0);
	assert_null(loader->full_slots.head);
	assert_null(loader->queue_slots.head);
	pthread_mutex_unlock(&loader->lock);
}

static void run_threads(struct worker *workers, struct bed *bed, unsigned char *const *shards,
			struct test_random *random, const struct hr_loader_opts *opts)
{
	size_t n = 1 + test_random_below(random, N_THREADS);

	for (size_t i = 0; i < n; i++) {
		workers[i].bed = bed;
		workers[i].shards = shards;
		workers[i].random.state = test_random_next(random);
		workers[i].may_be_refused = opts->caching == HR_CACHING_BYPASS;
		assert_int_equal(pthread_create(&workers[i].thread, NULL, work, &workers[i]), 0);
	}
	for (size_t i = 0; i < n; i++)
		pthread_join(workers[i].thread, NULL);
	for (size_t i = 0; i < n; i++)
		if (workers[i].wrong)
			fail_msg("%s (%s %d): engine %s, caching %u, staging %llu, slots %llu, readers %u",
				 workers[i].wrong, hr_error_name(workers[i].code), workers[i].code,
				 opts->engine ? opts->engine : "auto", opts->caching,
				 (unsigned long long)opts->staging_bytes, (unsigned long long)opts->slot_bytes,
				 opts->readers);
}

static void check_kept(struct worker *workers)
{
	for (size_t i = 0; i < N_THREADS; i++)
		for (size_t k = 0; k < workers[i].n_kept; k++) {
			assert_true(is_right(&workers[i], &workers[i].kept[k]));
			hr_buffer_release(workers[i].kept[k].buffer);
		}
}

static void read_shards(const hr_model *model, unsigned char *shards[2])
{
	for (uint32_t s = 0; s < 2; s++) {
		struct hr_shard shard = HR_SHARD_INIT;

		assert_ok(hr_model_shard(model, s, &shard));
		shards[s] = malloc(shard.bytes);
		assert_ok(hr_model_read_shard(model, s, 0, shards[s], shard.bytes));
	}
}

static void run_round(struct test_random *random, const char *device)
{
	struct hr_loader_opts opts = HR_LOADER_OPTS_INIT;
	struct worker *workers = calloc(N_THREADS, sizeof(*workers));
	unsigned char *shards[2];
	struct bed bed;

	random_opts(random, &opts);
	bed_open(&bed, test_random_next(random) >> 32, 2 + test_random_below(random, 40),
		 1 + test_random_below(random, 400000));
	read_shards(bed.model, shards);
	assert_ok(hr_device_open(device, &bed.device));
	if (hr_loader_open(bed.device, &opts, &bed.loader) == HR_E_UNSUPPORTED && opts.engine) {
		opts.engine = NULL; /* io_uring is forbidden here, or windows on this device or with bypass */
		assert_ok(hr_loader_open(bed.device, &opts, &bed.loader));
	}
	run_threads(workers, &bed, shards, random, &opts);
	check_idle(bed.loader);
	assert_ok(hr_loader_close(bed.loader, 0));
	bed.loader = NULL;
	bed_close(&bed);
	check_kept(workers);
	free(shards[0]);
	free(shards[1]);
	free(workers);
}

static void run_rounds(const char *device, uint64_t seed)
{
	uint64_t end = now_ms() + 3000;
	struct test_random random;
	int rounds = 0;

	if (getenv("HR_TEST_ENGINE") && strcmp(device, "cpu") == 0)
		skip_for("engine %s is for GPUs", getenv("HR_TEST_ENGINE"));
	if (!has_device(device))
		skip_for("%s", hr_error_last()->message);
	test_random_start(&random, seed);
	for (; rounds < 20 || (now_ms() < end && rounds < 400); rounds++)
		run_round(&random, device);
	fake_engine_set(NULL);
	printf("# %d rounds\n", rounds);
}

static void delivers_right_bytes_to_host_memory_whatever_happens(void **state)
{
	(void)state;
	run_rounds("cpu", 1);
}

static void delivers_right_bytes_to_a_gpu_whatever_happens(void **state)
{
	(void)state;
	run_rounds("cuda:0", 2);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(delivers_right_bytes_to_host_memory_whatever_happens),
		cmocka_unit_test(delivers_right_bytes_to_a_gpu_whatever_happens),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
