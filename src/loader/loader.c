/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Opening and closing a loader. The order of opening is the order in which things depend on one another: heap, pool,
 * engines, readers (which make the pool's pages exist), registration with the device, drainer; closing is the same
 * backwards.
 */
#include "loader.h"

#include "core/arith.h"
#include "core/mem.h"

#include <stdio.h>
#include <string.h>

#define DEFAULT_STAGING_BYTES ((uint64_t)64 << 20)
#define DEFAULT_SLOT_BYTES    ((uint64_t)2 << 20)
#define DEFAULT_MAX_READERS   12
#define SLOT_UNIT             ((uint64_t)64 << 10)
#define DEVICE_SLOT_BYTES     ((uint64_t)4 << 20)
#define MAX_WINDOW_BYTES      ((uint64_t)64 << 20) /* larger ones do not register faster */
#define MAX_STAGING_BYTES     ((uint64_t)1 << 40)

int hr__loader_here(const hr_loader *loader)
{
	if (!loader)
		return hr__fail(HR_E_OPTS, "the loader is NULL");
	return hr__device_here(loader->device);
}

bool hr__loader_is_closed(hr_loader *loader)
{
	bool is_closed;

	pthread_mutex_lock(&loader->lock);
	is_closed = loader->is_closed || loader->is_closing;
	pthread_mutex_unlock(&loader->lock);
	return is_closed;
}

/* ---- options ---- */

/* Where the engine that was asked for has its bytes while they move. */
static enum hr__staging staging_of(const struct hr_loader_opts *opts)
{
	const struct hr__engine_ops *named = opts->engine ? hr__engine_find(opts->engine) : NULL;

	return named ? named->staging : HR__STAGING_HOST;
}

/* At least 32 slots, if they can be had: readers and copies each hold a dozen. Copies within a device are short, and
 * storage likes long reads: 16. Of windows one is copied from, one is made, one is taken back, and one lies between. */
static uint64_t default_slot_bytes(const struct hr_loader_opts *opts)
{
	static const struct {
		uint64_t most, n;
	} by[] = {[HR__STAGING_HOST] = {DEFAULT_SLOT_BYTES, 32},
		  [HR__STAGING_DEVICE] = {DEVICE_SLOT_BYTES, 16},
		  [HR__STAGING_WINDOW] = {MAX_WINDOW_BYTES, 4}};
	enum hr__staging staging = staging_of(opts);

	return hr__max_u64(hr__min_u64(by[staging].most, opts->staging_bytes / by[staging].n / SLOT_UNIT * SLOT_UNIT),
			   HR_MIN_SLOT_BYTES);
}

static int check_sizes(struct hr_loader_opts *opts)
{
	if (!opts->staging_bytes)
		opts->staging_bytes = DEFAULT_STAGING_BYTES;
	if (!opts->slot_bytes)
		opts->slot_bytes = default_slot_bytes(opts);
	if (opts->staging_bytes < HR_MIN_STAGING_BYTES || opts->staging_bytes > MAX_STAGING_BYTES)
		return hr__fail(HR_E_OPTS, "staging of %" PRIu64 " bytes: from %" PRIu64 " bytes to 1 TiB are possible",
				opts->staging_bytes, HR_MIN_STAGING_BYTES);
	if (opts->slot_bytes < HR_MIN_SLOT_BYTES || opts->slot_bytes % SLOT_UNIT)
		return hr__fail(HR_E_OPTS, "slots of %" PRIu64 " bytes: they must be a multiple of %" PRIu64,
				opts->slot_bytes, SLOT_UNIT);
	if (opts->slot_bytes > opts->staging_bytes / 2 || opts->slot_bytes > (uint64_t)1 << 30)
		return hr__fail(HR_E_OPTS,
				"slots of %" PRIu64 " bytes in %" PRIu64
				" bytes of staging: at least two must fit, of 1 GiB at most",
				opts->slot_bytes, opts->staging_bytes);
	return 0;
}

static int check_opts(struct hr_loader_opts *opts)
{
	if (opts->caching > HR_CACHING_BYPASS)
		return hr__fail(HR_E_OPTS, "caching %u: auto (0), fill (1) and bypass (2) are known", opts->caching);
	if (opts->flags & ~(HR_LOADER_VERIFY | HR_LOADER_CUFILE_COMPAT))
		return hr__fail(HR_E_OPTS,
				"hr_loader_opts.flags is 0x%x: only HR_LOADER_VERIFY and "
				"HR_LOADER_CUFILE_COMPAT are known",
				opts->flags);
	if (opts->readers > HR__MAX_READERS)
		return hr__fail(HR_E_OPTS, "%u readers: at most %u", opts->readers, HR__MAX_READERS);
	if ((opts->flags & HR_LOADER_CUFILE_COMPAT) && (!opts->engine || strcmp(opts->engine, "cufile") != 0))
		return hr__fail(HR_E_OPTS, "cufile=compat is an option of engine cufile, and engine %s was asked for",
				opts->engine ? opts->engine : "auto");
	if (!opts->alloc != !opts->release)
		return hr__fail(HR_E_OPTS, "hr_loader_opts: alloc and release go together");
	if (staging_of(opts) == HR__STAGING_DEVICE && opts->caching == HR_CACHING_FILL &&
	    !(opts->flags & HR_LOADER_CUFILE_COMPAT))
		return hr__fail(HR_E_UNSUPPORTED,
				"engine %s reads around the page cache and cannot fill it; use caching auto or bypass",
				opts->engine);
	if (staging_of(opts) == HR__STAGING_WINDOW && opts->caching == HR_CACHING_BYPASS)
		return hr__fail(HR_E_UNSUPPORTED,
				"engine %s cannot be used with caching bypass: it takes bytes from the page cache; use "
				"caching auto or fill, or another engine",
				opts->engine);
	return check_sizes(opts);
}

/* ---- engines ---- */

static int take_reason(int rc, const struct hr__device_error *error, struct hr__io *io)
{
	if (rc) {
		io->system = error->system;
		snprintf(io->reason, sizeof(io->reason), "%s", error->reason);
	}
	return rc;
}

static int pin_for_engine(void *device, void *memory, size_t bytes, struct hr__io *io)
{
	struct hr__device_error error = {0};

	return take_reason(((hr_device *)device)->ops->pin_read_only(device, memory, bytes, &error), &error, io);
}

static int unpin_for_engine(void *device, void *memory, struct hr__io *io)
{
	struct hr__device_error error = {0};

	return take_reason(((hr_device *)device)->ops->unpin(device, memory, &error), &error, io);
}

int hr__loader_engine(hr_loader *loader, const struct hr__engine_ops *ops, char *reason, size_t reason_bytes)
{
	bool can_pin = loader->device->ops->pin_read_only;
	const struct hr__engine_env env = {.staging = loader->pool.memory,
					   .staging_bytes = (size_t)loader->pool.bytes,
					   .depth = HR__QUEUE_DEPTH,
					   .slot_bytes = (size_t)loader->pool.slot_bytes,
					   .pin = can_pin ? pin_for_engine : NULL,
					   .unpin = can_pin ? unpin_for_engine : NULL,
					   .device = loader->device,
					   .ordinal = loader->device->ordinal,
					   .compat = loader->compat,
					   .is_kept = &loader->window_is_kept};
	void *state = hr__calloc(1, ops->state_bytes);
	int rc = state ? ops->open(state, &env, reason, reason_bytes) : HR_E_NOMEM;

	if (rc) {
		hr__free(state);
		return rc;
	}
	if (ops->caps & HR__ENGINE_QUEUED) {
		loader->queued = ops;
		loader->queued_state = state;
	} else {
		loader->blocking = ops;
		loader->blocking_state = state;
	}
	return 0;
}

static int open_named_engine(hr_loader *loader, const char *name)
{
	const struct hr__engine_ops *ops = hr__engine_find(name);
	char reason[200] = "", shown[64];
	int rc;

	loader->engine_named = true;
	if (!ops)
		return hr__fail(HR_E_OPTS, "there is no engine '%s'; `headrace engines` lists them",
				hr__escape(shown, sizeof(shown), name, strlen(name)));
	if (ops->staging == HR__STAGING_DEVICE)
		rc = hr__window_open(loader, ops, reason, sizeof(reason));
	else
		rc = hr__loader_engine(loader, ops, reason, sizeof(reason));
	if (rc && reason[0])
		return hr__fail(rc, "engine %s cannot be used here: %s", name, reason);
	return rc;
}

/* The best of each kind. A queued engine that cannot be had is a note, not a failure; there is always a blocking
 * one. */
static int open_engines(hr_loader *loader, const char *name)
{
	const struct hr__engine_ops *const *ops = hr__engines();

	if (name && strcmp(name, "auto") != 0)
		return open_named_engine(loader, name);
	for (; *ops; ops++) {
		bool is_queued = (*ops)->caps & HR__ENGINE_QUEUED;
		char reason[200] = "";
		int rc;

		if (((*ops)->caps & HR__ENGINE_ON_REQUEST) || (is_queued ? loader->queued : loader->blocking))
			continue;
		rc = hr__loader_engine(loader, *ops, reason, sizeof(reason));
		if (rc == HR_E_NOMEM)
			return rc;
		if (rc && is_queued)
			snprintf(loader->queued_reason, sizeof(loader->queued_reason), "%s", reason);
	}
	return loader->blocking ? 0 : hr__fail(HR_E_UNSUPPORTED, "no engine can be used here");
}

/* ---- threads ---- */

static int start_thread(pthread_t *thread, const char *name, void *(*run)(void *), void *arg)
{
	int error = hr__os_thread(thread, name, run, arg);

	if (!error)
		return 0;
	return hr__fail_errno(&(struct hr__where){.stage = "loader", .offset = HR_NO_OFFSET}, error, "start a thread");
}

static int start_readers(hr_loader *loader)
{
	uint32_t started = 0;
	int rc = 0;

	for (uint32_t i = 0; i < loader->n_readers && !rc; i++) {
		struct hr__reader *reader = &loader->readers[i];

		reader->loader = loader;
		reader->iov = hr__calloc(HR__MAX_IOV, sizeof(*reader->iov));
		rc = reader->iov ? start_thread(&reader->thread, "hr-reader", hr__reader_main, reader) : HR_E_NOMEM;
		if (rc) {
			hr__free(reader->iov);
			reader->iov = NULL;
		} else {
			started++;
		}
	}
	pthread_mutex_lock(&loader->lock);
	while (loader->n_touched < started)
		pthread_cond_wait(&loader->idle, &loader->lock);
	pthread_mutex_unlock(&loader->lock);
	return rc;
}

/* One registration for the whole pool: a dozen would queue for the driver's lock, and copies could not go from one
 * to the next. */
static int pin_pool(hr_loader *loader)
{
	struct hr__device_error error = {0};
	int rc;

	if (loader->pool.staging != HR__STAGING_HOST)
		return 0;
	rc = loader->device->ops->pin(loader->device, loader->pool.memory, (size_t)loader->pool.bytes, &error);
	if (rc)
		return hr__device_fail(loader->device, rc, "cannot register the staging memory", &error);
	loader->is_pinned = true;
	return 0;
}

static int start_drainer(hr_loader *loader)
{
	int rc;

	loader->copies = hr__calloc(HR__MAX_COPIES, sizeof(*loader->copies));
	rc = loader->copies ? start_thread(&loader->drainer_thread, "hr-drainer", hr__drainer_main, loader)
			    : HR_E_NOMEM;
	if (rc)
		return rc;
	loader->drainer_started = true;
	pthread_mutex_lock(&loader->lock);
	while (!loader->lane_ready)
		pthread_cond_wait(&loader->idle, &loader->lock);
	pthread_mutex_unlock(&loader->lock);
	if (loader->lane_code)
		return hr__device_fail(loader->device, loader->lane_code, "cannot set up copying", &loader->lane_error);
	return 0;
}

static int start_queue(hr_loader *loader)
{
	int rc;

	if (!loader->queued)
		return 0;
	rc = start_thread(&loader->queue_thread, "hr-queue", hr__queue_main, loader);
	loader->queue_started = rc == 0;
	return rc;
}

/* ---- closing ---- */

static void stop_threads(hr_loader *loader)
{
	pthread_mutex_lock(&loader->lock);
	loader->stop = true;
	pthread_cond_broadcast(&loader->work);
	pthread_cond_broadcast(&loader->full);
	pthread_cond_broadcast(&loader->queue);
	pthread_mutex_unlock(&loader->lock);
	for (uint32_t i = 0; i < loader->n_readers && loader->readers && loader->readers[i].iov; i++) {
		pthread_join(loader->readers[i].thread, NULL);
		hr__free(loader->readers[i].iov);
	}
	if (loader->queue_started)
		pthread_join(loader->queue_thread, NULL);
	if (loader->drainer_started)
		pthread_join(loader->drainer_thread, NULL);
}

/* Everything that was opened, backwards. What is left is the memory of the handle, for whoever still counts on it. */
static void tear_down(hr_loader *loader)
{
	struct hr__device_error ignored;

	pthread_mutex_lock(&loader->lock);
	loader->is_closed = true; /* handles of jobs and feeds that are still open look at nothing of what goes now */
	pthread_mutex_unlock(&loader->lock);
	stop_threads(loader);
	pthread_mutex_lock(&loader->lock);
	hr__take_windows_back(loader);
	pthread_mutex_unlock(&loader->lock);
	if (loader->pool.staging == HR__STAGING_DEVICE) {
		hr__window_close(loader);
	} else {
		if (loader->queued)
			loader->queued->close(loader->queued_state);
		if (loader->blocking)
			loader->blocking->close(loader->blocking_state);
		if (loader->is_pinned)
			loader->device->ops->unpin(loader->device, loader->pool.memory, &ignored);
	}
	hr__free(loader->queued_state);
	hr__free(loader->blocking_state);
	hr__pool_close(&loader->pool);
	hr__free(loader->readers);
	hr__free(loader->copies);
	hr__heap_close(loader->heap);
}

void hr__loader_unref(hr_loader *loader)
{
	if (atomic_fetch_sub(&loader->count, 1) > 1)
		return;
	pthread_cond_destroy(&loader->work);
	pthread_cond_destroy(&loader->full);
	pthread_cond_destroy(&loader->queue);
	pthread_cond_destroy(&loader->idle);
	pthread_mutex_destroy(&loader->lock);
	pthread_mutex_destroy(&loader->report_lock);
	hr_device_close(loader->device);
	hr__free(loader);
}

/* Under the lock. */
static bool is_in_use(const hr_loader *loader)
{
	return loader->n_jobs > 0 || loader->n_moves > 0 || !hr__pool_is_idle(&loader->pool);
}

int hr_loader_close(hr_loader *loader, uint32_t timeout_ms)
{
	uint64_t deadline = timeout_ms == HR_FOREVER ? UINT64_MAX : hr__os_now_ns() + (uint64_t)timeout_ms * 1000000;
	bool in_time = true, is_busy;
	int rc;

	if (!loader)
		return 0;
	rc = hr__loader_here(loader);
	if (rc)
		return rc;
	pthread_mutex_lock(&loader->lock);
	loader->is_closing = true;
	for (uint32_t n = loader->n_jobs; n > 0 && loader->jobs; n--) { /* a job that settles leaves the ring */
		struct hr_job *job = loader->jobs;

		loader->jobs = job->next;
		hr__job_fail(job, HR_E_CANCELLED, NULL, "the loader is being closed");
	}
	while (is_in_use(loader) && in_time)
		in_time = hr__os_cond_wait(&loader->idle, &loader->lock, deadline);
	is_busy = is_in_use(loader);
	if (is_busy) {
		uint32_t in_flight = loader->pool.n_slots - loader->pool.n_free, lost = loader->pool.n_lost;

		loader->is_closing = false;
		pthread_mutex_unlock(&loader->lock);
		return hr__fail(HR_E_BUSY,
				"%" PRIu32 " reads or copies are in flight (%" PRIu32
				" past their deadline); nothing was closed",
				in_flight, lost);
	}
	pthread_mutex_unlock(&loader->lock);
	tear_down(loader);
	hr__loader_unref(loader);
	return 0;
}

/* ---- opening ---- */

static int new_loader(hr_device *device, hr_loader **out)
{
	hr_loader *loader = hr__calloc(1, sizeof(*loader));
	pthread_cond_t *conds[4];
	int error = 0;
	size_t made = 0;

	*out = NULL;
	if (!loader)
		return HR_E_NOMEM;
	conds[0] = &loader->work;
	conds[1] = &loader->full;
	conds[2] = &loader->queue;
	conds[3] = &loader->idle;
	while (made < 4 && !error) {
		error = hr__os_cond_init(conds[made]);
		made += !error;
	}
	if (error) {
		while (made > 0)
			pthread_cond_destroy(conds[--made]);
		hr__free(loader);
		return hr__fail_errno(&(struct hr__where)HR__NOWHERE, error, "make a condition variable");
	}
	pthread_mutex_init(&loader->lock, NULL);
	pthread_mutex_init(&loader->report_lock, NULL);
	loader->device = hr__device_acquire(device);
	loader->moves_end = &loader->moves;
	loader->count = 1;
	loader->opened_ns = hr__os_now_ns();
	*out = loader;
	return 0;
}

/* Drivers register memory one thread at a time, so more would only wait for one another. */
static uint32_t default_readers(const struct hr_loader_opts *opts)
{
	uint32_t cpus = hr__os_cpus();

	if (staging_of(opts) == HR__STAGING_WINDOW)
		return 1;
	return cpus < DEFAULT_MAX_READERS ? cpus : DEFAULT_MAX_READERS;
}

static int set_up(hr_loader *loader, const struct hr_loader_opts *opts)
{
	int rc;

	loader->caching = opts->caching;
	loader->compat = opts->flags & HR_LOADER_CUFILE_COMPAT;
	/* What goes straight to the GPU goes around the page cache. */
	if (staging_of(opts) == HR__STAGING_DEVICE && !loader->compat)
		loader->caching = HR_CACHING_BYPASS;
	loader->n_readers = opts->readers ? opts->readers : default_readers(opts);
	loader->verify = opts->flags & HR_LOADER_VERIFY;
	loader->readers = hr__calloc(loader->n_readers, sizeof(*loader->readers));
	if (!loader->readers)
		return HR_E_NOMEM;
	rc = hr__heap_new(loader, opts, &loader->heap);
	if (!rc)
		rc = hr__pool_open(&loader->pool, staging_of(opts), opts->staging_bytes, opts->slot_bytes);
	if (!rc)
		rc = open_engines(loader, opts->engine);
	if (!rc)
		rc = start_readers(loader);
	if (!rc)
		rc = pin_pool(loader);
	if (!rc)
		rc = start_drainer(loader);
	if (!rc)
		rc = start_queue(loader);
	return rc;
}

int hr_loader_open(hr_device *device, const struct hr_loader_opts *opts, hr_loader **out)
{
	struct hr__error_record error;
	struct hr_loader_opts own;
	hr_loader *loader;
	int rc;

	if (!out || !device)
		return hr__fail(HR_E_OPTS, "hr_loader_open: %s is NULL", out ? "the device" : "the result");
	*out = NULL;
	rc = hr__device_here(device);
	if (!rc)
		rc = hr__opts_copy(&own, sizeof(own), opts, "hr_loader_opts");
	if (!rc)
		rc = check_opts(&own);
	if (!rc)
		rc = new_loader(device, &loader);
	if (rc)
		return rc;
	rc = set_up(loader, &own);
	if (rc) {
		hr__error_save(&error);
		tear_down(loader);
		hr__loader_unref(loader);
		return hr__error_restore(&error);
	}
	*out = loader;
	return 0;
}
