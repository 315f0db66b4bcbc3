/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Jobs: checking a request, starting it, and ending it. loader.h says when a job has settled. A job's first failure is
 * its result; it is put into words by whoever finds it, in the job, and becomes the thread's last error of whoever
 * waits.
 *
 * The files are compared with what they were on the waiter's thread, after the job has settled: then every byte that
 * was read has been read, and no worker has to ask the file system.
 */
#include "loader.h"

#include "core/arith.h"
#include "core/mem.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- checking ---- */

static int fail_read_request(const hr_model *model, const struct hr_read *read, size_t i, int code, const char *what)
{
	struct hr__where where = {.stage = "plan", .offset = HR_NO_OFFSET};

	where.tensor = hr__model_tensor_name(model, read->tensor, &where.tensor_len);
	return hr__fail_at(&where, code,
			   "read %zu: %s (offset %" PRIu64 ", length %" PRIu64 ", destination %" PRIu64 " bytes)", i,
			   what, read->offset, read->length, read->dst_bytes);
}

/* Checks a read and puts it into the job's arrays. */
static int take_read(struct hr_job *job, const struct hr__job_request *request, size_t i)
{
	const struct hr_read *read = &request->reads[i];
	const hr_model *model = job->model;
	struct hr__extent extent;
	uint64_t length = read->length, end;

	if (read->tensor >= hr_model_n_tensors(model))
		return hr__fail_at(&(struct hr__where){.stage = "plan", .offset = HR_NO_OFFSET}, HR_E_OPTS,
				   "read %zu: tensor number %" PRIu64 " is out of range: the model has %" PRIu64, i,
				   read->tensor, hr_model_n_tensors(model));
	hr__model_extent(model, read->tensor, &extent);
	if (length == UINT64_MAX)
		length = read->offset <= extent.bytes ? extent.bytes - read->offset : 0;
	if (!hr__add_u64(read->offset, length, &end) || end > extent.bytes)
		return fail_read_request(model, read, i, HR_E_OPTS, "the range is outside of the tensor");
	if (!request->is_feed && length > 0 && !read->dst)
		return fail_read_request(model, read, i, HR_E_OPTS, "the destination is NULL");
	if (!request->is_feed && read->dst_bytes < length)
		return fail_read_request(model, read, i, HR_E_SPACE, "the destination is too small");
	job->spans[i] = (struct hr__span){extent.offset + read->offset, length, extent.source};
	job->tensors[i] = read->tensor;
	job->targets[i] = (struct hr__target){read->dst, read->dst_bytes};
	job->total_bytes += length;
	return 0;
}

static int compare_spans(const struct hr__span *x, const struct hr__span *y)
{
	if (x->source != y->source)
		return x->source < y->source ? -1 : 1;
	if (x->offset != y->offset)
		return x->offset < y->offset ? -1 : 1;
	if (x->bytes != y->bytes)
		return x->bytes < y->bytes ? -1 : 1;
	return 0;
}

/* One read with all that belongs to it, for sorting. */
struct wanted {
	struct hr__span span;
	struct hr__target target;
	uint64_t tensor;
};

static int compare_wanted(const void *a, const void *b)
{
	return compare_spans(&((const struct wanted *)a)->span, &((const struct wanted *)b)->span);
}

static int sort_reads(struct hr_job *job, size_t n)
{
	struct wanted *wanted;
	size_t i = 1;

	while (i < n && compare_spans(&job->spans[i - 1], &job->spans[i]) <= 0)
		i++;
	if (i >= n) /* in file order already, as whole models are */
		return 0;
	wanted = hr__calloc(n, sizeof(*wanted));
	if (!wanted)
		return HR_E_NOMEM;
	for (i = 0; i < n; i++)
		wanted[i] = (struct wanted){job->spans[i], job->targets[i], job->tensors[i]};
	qsort(wanted, n, sizeof(*wanted), compare_wanted);
	for (i = 0; i < n; i++) {
		job->spans[i] = wanted[i].span;
		job->targets[i] = wanted[i].target;
		job->tensors[i] = wanted[i].tensor;
	}
	hr__free(wanted);
	return 0;
}

/* Checks all reads and puts them into the job's arrays, in the order of reading. */
static int take_reads(struct hr_job *job, const struct hr__job_request *request)
{
	size_t n = request->n_reads;
	int rc = 0;

	job->spans = hr__calloc(n, sizeof(*job->spans));
	job->tensors = hr__calloc(n, sizeof(*job->tensors));
	job->targets = hr__calloc(n, sizeof(*job->targets));
	job->left = request->is_feed ? hr__calloc(n, sizeof(*job->left)) : NULL;
	if (!job->spans || !job->tensors || !job->targets || (request->is_feed && !job->left))
		return HR_E_NOMEM;
	for (size_t i = 0; i < n && !rc; i++)
		rc = take_read(job, request, i);
	if (!rc && request->sorted)
		rc = sort_reads(job, n);
	for (size_t i = 0; i < n && job->left && !rc; i++)
		job->left[i] = job->spans[i].bytes;
	return rc;
}

void hr__job_free(struct hr_job *job)
{
	if (!job)
		return;
	if (job->mark)
		job->loader->device->ops->mark_free(job->loader->device, job->mark);
	if (job->event_fd >= 0)
		hr__os_close(job->event_fd);
	pthread_cond_destroy(&job->changed);
	hr__free(job->spans);
	hr__free(job->tensors);
	hr__free(job->targets);
	hr__free(job->left);
	hr__free(job->blocks);
	hr_model_close(job->model);
	hr__loader_unref(job->loader);
	hr__free(job);
}

static int take_streams(struct hr_job *job, const struct hr__job_request *request)
{
	hr_device *device = job->loader->device;
	struct hr__device_error error = {0};
	int rc;

	if (!request->wait_stream && !request->signal_stream)
		return 0;
	if (!(device->ops->caps & HR__DEVICE_STREAMS))
		return hr__fail(HR_E_OPTS, "%s has no streams: leave wait_stream and signal_stream NULL", device->spec);
	job->signal_stream = request->signal_stream;
	if (!request->wait_stream)
		return 0;
	rc = device->ops->mark(device, request->wait_stream, &job->mark, &error);
	return rc ? hr__device_fail(device, rc, "cannot wait for the caller's stream", &error) : 0;
}

int hr__job_new(hr_loader *loader, hr_model *model, const struct hr__job_request *request, struct hr_job **out)
{
	struct hr_job *job;
	int rc;

	*out = NULL;
	job = hr__calloc(1, sizeof(*job));
	if (!job)
		return HR_E_NOMEM;
	job->event_fd = -1;
	job->io_timeout_ms = request->io_timeout_ms;
	job->is_feed = request->is_feed;
	rc = hr__os_cond_init(&job->changed);
	if (rc) {
		hr__free(job);
		return hr__fail_errno(&(struct hr__where)HR__NOWHERE, rc, "make a condition variable");
	}
	job->loader = loader;
	atomic_fetch_add(&loader->count, 1);
	job->model = hr_model_acquire(model);
	rc = hr__choose_check(loader, model);
	if (!rc)
		rc = take_reads(job, request);
	if (!rc)
		rc = take_streams(job, request);
	if (rc) {
		hr__job_free(job);
		return rc;
	}
	job->marks = request->marks;
	job->n_marks = request->n_marks;
	job->is_background = request->is_background;
	job->n_bound = job->is_feed ? 0 : request->n_reads;
	job->n_spans = request->n_reads;
	job->fill_cold = hr__choose_fill(loader, model);
	job->plan = (struct hr__plan){job->spans,
				      job->n_spans,
				      loader->pool.slot_bytes,
				      HR__MAX_GAP_BYTES,
				      hr__choose_align(loader, model),
				      loader->pool.staging == HR__STAGING_WINDOW ? HR__MAX_COPIES : HR__MAX_IOV / 2};
	rc = request->verify || loader->verify ? hr__verify_prepare(job) : 0;
	if (rc)
		hr__job_free(job);
	else
		*out = job;
	return rc;
}

/* ---- running; all under the lock ---- */

static void list_job(hr_loader *loader, struct hr_job *job)
{
	if (loader->jobs) {
		job->next = loader->jobs;
		job->previous = loader->jobs->previous;
		job->previous->next = job->next->previous = job;
	} else {
		loader->jobs = job->next = job->previous = job;
	}
	loader->n_jobs++;
	loader->n_background += job->is_background;
	job->number = ++loader->n_started;
	loader->n_deadlines += job->io_timeout_ms != 0;
	if (loader->n_deadlines == 1) /* the drainer is the clock, and may be asleep without one */
		pthread_cond_signal(&loader->full);
	job->is_listed = true;
}

static void unlist_job(hr_loader *loader, struct hr_job *job)
{
	job->next->previous = job->previous;
	job->previous->next = job->next;
	if (loader->jobs == job)
		loader->jobs = job->next == job ? NULL : job->next;
	loader->n_jobs--;
	loader->n_background -= job->is_background;
	loader->n_deadlines -= job->io_timeout_ms != 0;
	job->is_listed = false;
}

void hr__job_run(struct hr_job *job)
{
	hr_loader *loader = job->loader;

	pthread_mutex_lock(&loader->lock);
	job->started_ns = hr__os_now_ns();
	loader->total_bytes += job->total_bytes;
	loader->total_tensors += job->n_spans;
	list_job(loader, job);
	if (loader->is_closing || loader->is_closed)
		hr__job_fail(job, HR_E_CANCELLED, NULL, "the loader is being closed");
	else if (hr__loader_is_lost(loader))
		hr__job_fail(
			job, HR_E_LOST, NULL,
			"no staging memory is left: earlier reads never came back; open a new loader, and look at the storage");
	job->is_drawn = job->total_bytes == 0;
	hr__job_try_settle(job);
	hr__wake_readers(loader, loader->n_readers);
	pthread_mutex_unlock(&loader->lock);
}

void hr__job_promote(struct hr_job *job)
{
	hr_loader *loader = job->loader;

	pthread_mutex_lock(&loader->lock);
	if (job->is_background && job->is_listed)
		loader->n_background--;
	job->is_background = false;
	pthread_mutex_unlock(&loader->lock);
}

bool hr__job_has_settled(struct hr_job *job)
{
	bool settled;

	pthread_mutex_lock(&job->loader->lock);
	settled = job->is_settled;
	pthread_mutex_unlock(&job->loader->lock);
	return settled;
}

void hr__job_try_settle(struct hr_job *job)
{
	hr_loader *loader = job->loader;

	if (job->is_settled || job->in_flight > 0 || !(job->is_drawn || job->code))
		return;
	job->is_settled = true;
	job->settled_ns = hr__os_now_ns();
	unlist_job(loader, job);
	if (job->event_fd >= 0)
		hr__os_eventfd_set(job->event_fd);
	pthread_cond_broadcast(&job->changed);
	pthread_cond_broadcast(&loader->idle);
}

void hr__job_landed(struct hr_job *job)
{
	job->in_flight--;
	hr__job_try_settle(job);
}

/* What waits for the queued engine is not sent any more, nor verified what waits for that: whose turn it would be may
 * have nothing to wake up for, or be stuck. */
static void land_waiting(hr_loader *loader, const struct hr_job *job, struct hr__slot_list *list)
{
	struct hr__slot_list all = *list;
	struct hr__slot *slot;

	*list = (struct hr__slot_list){0};
	for (slot = hr__slot_pop(&all); slot; slot = hr__slot_pop(&all)) {
		if (slot->job == job)
			hr__slot_land(loader, slot);
		else
			hr__slot_push(list, slot);
	}
}

void hr__job_fail(struct hr_job *job, int code, const struct hr__where *where, const char *format, ...)
{
	const struct hr__where nowhere = {.stage = "job", .offset = HR_NO_OFFSET};
	struct hr__slot *slot;
	char message[1024];
	va_list args;

	if (job->code)
		return;
	va_start(args, format);
	vsnprintf(message, sizeof(message), format, args);
	va_end(args);
	hr__error_fill(&job->error, where ? where : &nowhere, code, "%s", message);
	job->code = code;
	if (job->is_settled) /* found out too late to stop anything, but not too late to tell */
		return;
	/* What waits for a destination will get none. Chunks in motion come back by themselves. */
	job->in_flight++; /* so that the job does not settle in the middle of this */
	for (slot = hr__slot_pop(&job->parked); slot; slot = hr__slot_pop(&job->parked))
		hr__slot_land(job->loader, slot);
	land_waiting(job->loader, job, &job->loader->queue_slots);
	land_waiting(job->loader, job, &job->loader->verify_slots);
	pthread_cond_broadcast(&job->changed);
	hr__job_landed(job);
}

void hr__job_fail_read(struct hr_job *job, const struct hr__io *io, const struct hr__chunk *chunk)
{
	const struct hr__source *source = hr__model_source(job->model, chunk->source);
	struct hr__where where = {
		.stage = "read", .path = source->path, .offset = io->offset - source->base, .system = io->system};
	char text[64];

	where.tensor = hr__model_tensor_name(job->model, job->tensors[chunk->first], &where.tensor_len);
	if (io->code == HR_E_SHORT)
		hr__job_fail(job, HR_E_SHORT, &where,
			     "%s ended early: a read at byte %" PRIu64
			     " came back with nothing, %zu of %zu bytes were read; the "
			     "file had %" PRIu64 " bytes when it was opened",
			     source->path, where.offset, io->got, io->expected, source->bytes);
	else
		hr__job_fail(job, io->code, &where, "%s: reading %zu bytes at %" PRIu64 " failed: %s", source->path,
			     io->asked, where.offset,
			     io->reason[0] ? io->reason : strerror_r(io->system, text, sizeof(text)));
}

void hr__job_arrived(struct hr_job *job, const struct hr__chunk *chunk, size_t from, size_t to)
{
	uint64_t bytes = 0;

	for (size_t span = from; span < to; span++) {
		struct hr__piece piece;

		if (!hr__chunk_piece(&job->plan, chunk, span, &piece))
			continue;
		bytes += piece.bytes;
		if (job->left)
			job->left[span] -= piece.bytes;
	}
	job->counts.done_bytes += bytes;
	job->loader->counts.done_bytes += bytes;
	if (!job->first_ns)
		job->first_ns = hr__os_now_ns() - job->started_ns;
	if (job->is_feed)
		pthread_cond_broadcast(&job->changed);
}

/* ---- the waiter's side ---- */

/* The files that a job has read: HR_E_CHANGED if one is no longer what it was. One look is good for all sources of one
 * owner. */
static int check_files(const struct hr_job *job)
{
	uint32_t last = UINT32_MAX;
	const void *owner = NULL;

	for (size_t i = 0; i < job->n_spans; i++) {
		const struct hr__source *source = hr__model_source(job->model, job->spans[i].source);
		int rc;

		if (job->spans[i].source == last || (source->ops && source->owner == owner))
			continue;
		last = job->spans[i].source;
		owner = source->owner;
		rc = hr__source_check(source);
		if (rc)
			return rc;
	}
	return 0;
}

/* Under the lock: whether a look at the files may change the result. A file that ended early was most likely
 * truncated, and bytes that have another checksum replaced. */
static bool may_be_of_change(const struct hr_job *job)
{
	return !job->is_checked && (!job->code || job->code == HR_E_SHORT || job->code == HR_E_DIGEST);
}

int hr__job_result(struct hr_job *job)
{
	hr_loader *loader = job->loader;
	struct hr__device_error error = {0};
	bool must_check;
	int rc = 0, code;

	pthread_mutex_lock(&loader->lock);
	must_check = may_be_of_change(job);
	pthread_mutex_unlock(&loader->lock);
	if (must_check)
		rc = check_files(job);
	pthread_mutex_lock(&loader->lock);
	if (rc && may_be_of_change(job)) {
		if (job->code)
			hr__error_locate("read", NULL, job->error.tensor, HR_STRLEN);
		hr__error_save(&job->error);
		job->code = rc;
	}
	job->is_checked = true;
	code = job->code;
	if (code)
		hr__error_restore(&job->error);
	pthread_mutex_unlock(&loader->lock);
	if (code)
		return code;
	if (job->signal_stream) {
		rc = loader->device->ops->signal(loader->device, job->signal_stream, &error);
		if (rc)
			return hr__device_fail(loader->device, rc, "cannot signal the caller's stream", &error);
	}
	return 0;
}

static uint64_t deadline_after(uint32_t timeout_ms)
{
	return timeout_ms == HR_FOREVER ? UINT64_MAX : hr__os_now_ns() + (uint64_t)timeout_ms * 1000000;
}

/* Waits until the job has settled; false if the time is over first. */
static bool wait_settled(struct hr_job *job, uint32_t timeout_ms)
{
	uint64_t deadline = deadline_after(timeout_ms);
	bool in_time = true, settled;

	pthread_mutex_lock(&job->loader->lock);
	while (!job->is_settled && in_time)
		in_time = hr__os_cond_wait(&job->changed, &job->loader->lock, deadline);
	settled = job->is_settled;
	pthread_mutex_unlock(&job->loader->lock);
	return settled;
}

/* ---- public ---- */

int hr_job_start(hr_loader *loader, hr_model *model, const struct hr_read *reads, size_t n_reads,
		 const struct hr_job_opts *opts, hr_job **out)
{
	struct hr_job_opts own;
	struct hr__job_request request = {.reads = reads, .n_reads = n_reads, .sorted = true};
	int rc;

	if (!out || !model || (!reads && n_reads))
		return hr__fail(HR_E_OPTS, "hr_job_start: %s is NULL",
				!out     ? "the result"
				: !model ? "the model"
					 : "reads");
	*out = NULL;
	rc = hr__loader_here(loader);
	if (!rc)
		rc = hr__opts_copy(&own, sizeof(own), opts, "hr_job_opts");
	if (!rc && (own.flags & ~HR_JOB_VERIFY))
		rc = hr__fail(HR_E_OPTS, "hr_job_opts.flags is 0x%x: only HR_JOB_VERIFY is known", own.flags);
	if (rc)
		return rc;
	hr__heap_reap(loader->heap, true);
	request.io_timeout_ms = own.io_timeout_ms;
	request.verify = own.flags & HR_JOB_VERIFY;
	request.wait_stream = own.wait_stream;
	request.signal_stream = own.signal_stream;
	rc = hr__job_new(loader, model, &request, out);
	if (!rc)
		hr__job_run(*out);
	return rc;
}

int hr_job_wait(hr_job *job, uint32_t timeout_ms)
{
	int rc;

	if (!job)
		return hr__fail(HR_E_OPTS, "hr_job_wait: the job is NULL");
	rc = hr__loader_here(job->loader);
	if (rc)
		return rc;
	if (!wait_settled(job, timeout_ms))
		return hr__fail(HR_E_PENDING, "the job has not settled within %" PRIu32 " ms; it goes on", timeout_ms);
	return hr__job_result(job);
}

int hr_job_cancel(hr_job *job)
{
	int rc;

	if (!job)
		return 0;
	rc = hr__loader_here(job->loader);
	if (rc)
		return rc;
	pthread_mutex_lock(&job->loader->lock);
	if (!job->is_settled)
		hr__job_fail(job, HR_E_CANCELLED, NULL, "the job was cancelled");
	pthread_mutex_unlock(&job->loader->lock);
	return 0;
}

int hr_job_close(hr_job *job, uint32_t timeout_ms)
{
	int rc = hr_job_cancel(job);

	if (!job || rc)
		return rc;
	if (!wait_settled(job, timeout_ms))
		return hr__fail(HR_E_BUSY,
				"the job has reads or copies in flight after %" PRIu32
				" ms; its destinations must stay",
				timeout_ms);
	hr__job_free(job);
	return 0;
}

int hr_job_fd(hr_job *job, int *fd)
{
	int rc, made = -1;

	if (!job || !fd)
		return hr__fail(HR_E_OPTS, "hr_job_fd: %s is NULL", job ? "fd" : "the job");
	*fd = -1;
	rc = hr__loader_here(job->loader);
	if (rc)
		return rc;
	rc = hr__os_eventfd(&made);
	if (rc)
		return hr__fail_errno(&(struct hr__where)HR__NOWHERE, rc, "make an eventfd");
	pthread_mutex_lock(&job->loader->lock);
	if (job->event_fd < 0) {
		job->event_fd = made;
		made = -1;
		if (job->is_settled)
			hr__os_eventfd_set(job->event_fd);
	}
	*fd = job->event_fd;
	pthread_mutex_unlock(&job->loader->lock);
	hr__os_close(made);
	return 0;
}

/* A job and a wait, for a range that goes to one place. */
static int read_now(hr_loader *loader, hr_model *model, uint64_t tensor, void *dst, uint64_t dst_bytes)
{
	struct hr_read read = {tensor, 0, UINT64_MAX, dst, dst_bytes};
	hr_job *job;
	int rc = hr_job_start(loader, model, &read, 1, NULL, &job);

	if (rc)
		return rc;
	rc = hr_job_wait(job, HR_FOREVER);
	hr_job_close(job, HR_FOREVER);
	return rc;
}

int hr_read_into(hr_loader *loader, hr_model *model, uint64_t tensor, void *dst, uint64_t dst_bytes)
{
	return read_now(loader, model, tensor, dst, dst_bytes);
}

int hr_get(hr_loader *loader, hr_model *model, uint64_t tensor, hr_buffer **out)
{
	struct hr_tensor t = HR_TENSOR_INIT;
	int rc;

	if (!out || !model)
		return hr__fail(HR_E_OPTS, "hr_get: %s is NULL", out ? "the model" : "the result");
	*out = NULL;
	rc = hr_model_tensor(model, tensor, &t);
	if (!rc)
		rc = hr_buffer_new(loader, t.bytes, out);
	if (rc)
		return rc;
	rc = read_now(loader, model, tensor, hr_buffer_data(*out), t.bytes);
	if (rc) {
		hr_buffer_release(*out);
		*out = NULL;
	}
	return rc;
}
