/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A feed: a job whose destinations come one after the other. Reading runs ahead into slots and parks there;
 * hr_feed_next() takes memory for the next tensor, binds it, and waits until its last byte has arrived.
 *
 * Small tensors that follow one another are bound together in one block of at most ARENA_BYTES, each at a multiple of
 * 256: so a hundred thousand of them cost a few hundred allocations, and where they lie in memory as in the file the
 * drainer merges their copies. Each still is a buffer of its own that counts on the block. One such block is bound
 * ahead, so that its bytes arrive while the consumer takes the one before; a large tensor's memory is taken only when
 * its turn has come. A caller's allocator gets one call per tensor instead: what it hands out belongs to one tensor,
 * and it hears which stream that was released on.
 */
#include "loader.h"

#include "core/arith.h"
#include "core/mem.h"

#include <string.h>

#define ARENA_BYTES       ((uint64_t)8 << 20)
#define ARENA_MAX_TENSORS 4096
#define MEMBER_ALIGN      256

struct hr_feed {
	struct hr_job *job;
	struct hr__heap *heap; /* counted: the feed may be asked when its loader has closed */
	size_t next;           /* span to hand out */
	size_t end;            /* spans below it are bound */
	size_t last_group;     /* where the spans that were bound last begin */
	size_t n_ready;        /* spans below it have arrived, and their file was compared since */
	hr_buffer **bound;     /* of spans next .. end - 1, from first_bound on */
	size_t first_bound, max_bound;
	uint32_t timeout_ms; /* of one hr_feed_next(); 0 = none */
	bool is_over;        /* its failure has been told */
};

/* All tensors, or those asked for, as reads. */
static struct hr_read *reads_of(const hr_model *model, const struct hr_feed_opts *opts, size_t *n)
{
	struct hr_read *reads;

	*n = opts->tensors ? opts->n_tensors : (size_t)hr_model_n_tensors(model);
	reads = hr__calloc(*n, sizeof(*reads));
	for (size_t i = 0; reads && i < *n; i++)
		reads[i] = (struct hr_read){.tensor = opts->tensors ? opts->tensors[i] : i, .length = UINT64_MAX};
	return reads;
}

int hr_feed_open(hr_loader *loader, hr_model *model, const struct hr_feed_opts *opts, hr_feed **out)
{
	struct hr__job_request request = {.is_feed = true};
	struct hr_feed_opts own;
	struct hr_feed *feed;
	int rc;

	if (!out || !model)
		return hr__fail(HR_E_OPTS, "hr_feed_open: %s is NULL", out ? "the model" : "the result");
	*out = NULL;
	rc = hr__loader_here(loader);
	if (!rc)
		rc = hr__opts_copy(&own, sizeof(own), opts, "hr_feed_opts");
	if (!rc && (own.flags & ~(HR_FEED_GIVEN_ORDER | HR_FEED_VERIFY)))
		rc = hr__fail(HR_E_OPTS,
			      "hr_feed_opts.flags is 0x%x: only HR_FEED_GIVEN_ORDER and HR_FEED_VERIFY are known",
			      own.flags);
	if (rc)
		return rc;
	hr__heap_reap(loader->heap, true);
	feed = hr__calloc(1, sizeof(*feed));
	request.reads = feed ? reads_of(model, &own, &request.n_reads) : NULL;
	request.io_timeout_ms = own.io_timeout_ms;
	request.wait_stream = own.wait_stream;
	request.signal_stream = own.signal_stream;
	request.sorted = !(own.flags & HR_FEED_GIVEN_ORDER);
	request.verify = own.flags & HR_FEED_VERIFY;
	rc = request.reads ? hr__job_new(loader, model, &request, &feed->job) : HR_E_NOMEM;
	hr__free((void *)(uintptr_t)request.reads);
	if (rc) {
		hr__free(feed);
		return rc;
	}
	feed->heap = hr__heap_acquire(loader->heap);
	feed->timeout_ms = own.next_timeout_ms;
	hr__job_run(feed->job);
	*out = feed;
	return 0;
}

/* How many tensors from `start` on share a block, and its size. At least one. */
static size_t group_from(const struct hr_feed *feed, size_t start, uint64_t *bytes)
{
	const struct hr_job *job = feed->job;
	bool may_share = !feed->heap->alloc;
	size_t n = 0;

	*bytes = 0;
	while (start + n < job->n_spans && n < ARENA_MAX_TENSORS) {
		uint64_t more = hr__round_up(job->spans[start + n].bytes, MEMBER_ALIGN);

		if (n > 0 && (!may_share || *bytes + more > ARENA_BYTES))
			break;
		*bytes += more;
		n++;
	}
	if (n == 1) /* alone, it needs no padding */
		*bytes = job->spans[start].bytes;
	return n;
}

/* Under the lock: full slots that waited for these destinations go to the drainer. */
static void unpark(struct hr_job *job)
{
	struct hr__slot_list waiting = job->parked;
	struct hr__slot *slot;

	job->parked = (struct hr__slot_list){0};
	for (slot = hr__slot_pop(&waiting); slot; slot = hr__slot_pop(&waiting))
		hr__drain(job->loader, slot);
}

/* Room in `bound` for n more behind those that it holds. */
static int make_room(struct hr_feed *feed, size_t n)
{
	size_t held = feed->end - feed->next;
	hr_buffer **bigger;

	if (feed->first_bound > 0 && held > 0)
		memmove(feed->bound, feed->bound + feed->first_bound, held * sizeof(hr_buffer *));
	feed->first_bound = 0;
	if (held + n <= feed->max_bound)
		return 0;
	bigger = hr__realloc(feed->bound, held + n, sizeof(hr_buffer *));
	if (!bigger)
		return HR_E_NOMEM;
	feed->bound = bigger;
	feed->max_bound = held + n;
	return 0;
}

/* Buffers for n tensors from the first that is not bound, out of one block. All or none. */
static int make_buffers(struct hr_feed *feed, struct hr__block *block, size_t n)
{
	hr_buffer **out = feed->bound + (feed->end - feed->next);
	uint64_t at = 0;

	for (size_t i = 0; i < n; i++) {
		uint64_t own = feed->job->spans[feed->end + i].bytes;
		int rc = hr__buffer_new(block, at, own, &out[i]);

		if (rc) {
			while (i > 0)
				hr_buffer_release(out[--i]);
			return rc;
		}
		at += hr__round_up(own, MEMBER_ALIGN);
	}
	return 0;
}

/* Tells the job where they go, and lets their bytes come. */
static void bind_targets(struct hr_feed *feed, size_t n, uint64_t bytes)
{
	struct hr_job *job = feed->job;
	hr_buffer **buffers = feed->bound + (feed->end - feed->next);
	uint64_t at = 0;

	pthread_mutex_lock(&job->loader->lock);
	for (size_t i = 0; i < n; i++) {
		job->targets[feed->end + i] = (struct hr__target){hr_buffer_data(buffers[i]), bytes - at};
		at += hr__round_up(job->spans[feed->end + i].bytes, MEMBER_ALIGN);
	}
	job->n_bound = feed->end + n;
	unpark(job);
	hr__wake_readers(job->loader, job->loader->n_readers);
	pthread_mutex_unlock(&job->loader->lock);
}

/* Takes memory for the next tensors that are not bound. */
static int bind_group(struct hr_feed *feed)
{
	struct hr__block *block;
	uint64_t bytes;
	size_t n = group_from(feed, feed->end, &bytes);
	int rc = make_room(feed, n);

	if (!rc)
		rc = hr__block_new(feed->heap, bytes, feed->job->signal_stream, &block);
	if (rc)
		return rc;
	rc = make_buffers(feed, block, n);
	hr__block_release(block);
	if (rc)
		return rc;
	bind_targets(feed, n, bytes);
	feed->last_group = feed->end;
	feed->end += n;
	return 0;
}

static struct hr__where where_of(const struct hr__error_record *record)
{
	return (struct hr__where){record->stage, record->path,         record->tensor,
				  HR_STRLEN,     record->error.offset, record->error.system};
}

/* The feed's failure, now and whenever it is asked again. Of a change of the file it says how many tensors went out
 * before anybody could know. */
static int tell_failure(struct hr_feed *feed)
{
	struct hr__error_record record;
	struct hr__where where;
	int rc = hr__job_result(feed->job);

	feed->is_over = true;
	if (rc != HR_E_CHANGED)
		return rc;
	hr__error_save(&record);
	where = where_of(&record);
	return hr__fail_at(&where, rc,
			   "%s; %zu tensors were handed out before this was seen, do not trust those of this file",
			   record.message, feed->next);
}

/* What this thread's last error tells becomes the feed's failure: nothing more is read or handed out. */
static int fail_feed(struct hr_feed *feed, int code)
{
	struct hr_job *job = feed->job;
	struct hr__error_record record;
	struct hr__where where;

	hr__error_save(&record);
	where = where_of(&record);
	pthread_mutex_lock(&job->loader->lock);
	hr__job_fail(job, code, &where, "%s", record.message);
	pthread_mutex_unlock(&job->loader->lock);
	return tell_failure(feed);
}

/* Binds what has to be bound before the next tensor can be handed out, and one block of small ones ahead. Only the
 * former may fail. */
static int bind_enough(struct hr_feed *feed)
{
	const struct hr_job *job = feed->job;

	while (feed->end < job->n_spans && feed->next >= feed->last_group && !job->code) {
		bool is_ahead = feed->next < feed->end;
		uint64_t bytes;
		int rc;

		if (is_ahead && group_from(feed, feed->end, &bytes) == 1)
			break;
		rc = bind_group(feed);
		if (rc && !is_ahead)
			return fail_feed(feed, rc);
		if (rc)
			break;
	}
	return 0;
}

static void release_bound(struct hr_feed *feed)
{
	for (size_t i = 0; i < feed->end - feed->next; i++)
		hr_buffer_release(feed->bound[feed->first_bound + i]);
	feed->next = feed->end;
}

/* Waits until the next tensor's last byte is in place. Answers up to which span all that are bound and of the same
 * file have arrived: one look at the file afterwards is good for them all. 0: the job has failed, or time was up. */
static size_t wait_arrived(struct hr_feed *feed)
{
	struct hr_job *job = feed->job;
	size_t span = feed->next;
	bool on_time = true;

	pthread_mutex_lock(&job->loader->lock);
	if (job->left[span] > 0 && !job->code) {
		uint64_t until = feed->timeout_ms ? hr__os_now_ns() + feed->timeout_ms * UINT64_C(1000000) : UINT64_MAX;

		while (job->left[span] > 0 && !job->code && on_time)
			on_time = hr__os_cond_wait(&job->changed, &job->loader->lock, until);
	}
	if (job->code || job->left[span] > 0)
		span = 0;
	else
		while (span < job->n_bound && job->left[span] == 0 &&
		       job->spans[span].source == job->spans[feed->next].source)
			span++;
	pthread_mutex_unlock(&job->loader->lock);
	return span;
}

/* A change of the file condemns what is at hand. */
static int check_before_handing_out(struct hr_feed *feed)
{
	struct hr_job *job = feed->job;
	int rc = hr__source_check(hr__model_source(job->model, job->spans[feed->next].source));
	const char *name;
	size_t length;

	if (!rc)
		return 0;
	name = hr__model_tensor_name(job->model, job->tensors[feed->next], &length);
	hr__error_locate("read", NULL, name, length);
	return fail_feed(feed, rc);
}

static int signal_consumer(struct hr_job *job)
{
	struct hr__device_error error = {0};
	hr_device *device = job->loader->device;
	int rc = job->signal_stream ? device->ops->signal(device, job->signal_stream, &error) : 0;

	return rc ? hr__device_fail(device, rc, "cannot signal the caller's stream", &error) : 0;
}

/* Brings the next tensor in, and looks at its file. What fails here fails the feed. */
static int make_ready(struct hr_feed *feed)
{
	size_t n_arrived = wait_arrived(feed);
	int rc;

	if (!n_arrived && !feed->job->code)
		return hr__fail(HR_E_PENDING, "the next tensor has not arrived within %" PRIu32 " ms; the feed goes on",
				feed->timeout_ms);
	if (!n_arrived)
		return tell_failure(feed);
	rc = check_before_handing_out(feed);
	if (!rc)
		feed->n_ready = n_arrived;
	return rc;
}

int hr_feed_next(hr_feed *feed, struct hr_tensor *tensor, hr_buffer **buffer)
{
	struct hr_job *job;
	int rc;

	if (!feed || !tensor || !buffer)
		return hr__fail(HR_E_OPTS, "hr_feed_next: %s is NULL",
				!feed     ? "the feed"
				: !tensor ? "tensor"
					  : "buffer");
	*buffer = NULL;
	job = feed->job;
	rc = hr__loader_here(job->loader);
	if (rc)
		return rc;
	hr__heap_reap(feed->heap, true);
	if (feed->is_over)
		return tell_failure(feed);
	if (feed->next == job->n_spans)
		return hr__fail(HR_E_END, "the feed has handed out all of its %zu tensors", job->n_spans);
	rc = hr_model_tensor(job->model, job->tensors[feed->next], tensor);
	if (!rc)
		rc = bind_enough(feed);
	if (!rc && feed->next >= feed->n_ready)
		rc = make_ready(feed);
	if (rc)
		return rc;
	if (job->code)
		return tell_failure(feed);
	rc = signal_consumer(job);
	if (rc)
		return fail_feed(feed, rc);
	*buffer = feed->bound[feed->first_bound++];
	feed->next++;
	return 0;
}

int hr_feed_close(hr_feed *feed, uint32_t timeout_ms)
{
	int rc;

	if (!feed)
		return 0;
	rc = hr_job_close(feed->job, timeout_ms);
	if (rc)
		return rc;
	release_bound(feed);
	hr__heap_unref(feed->heap);
	hr__free(feed->bound);
	hr__free(feed);
	return 0;
}

int hr_feed_stats(hr_feed *feed, struct hr_stats *out)
{
	if (!feed)
		return hr__fail(HR_E_OPTS, "hr_feed_stats: the feed is NULL");
	return hr_job_stats(feed->job, out);
}
