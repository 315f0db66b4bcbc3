/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Loads: one job for all tensors of a group. Whoever waits for an entry first waits for its job and ends the load for
 * all; the others wait for the entry. A load that nobody waits for ends when somebody asks for the group or takes its
 * memory: nothing runs in the background but the loader. A group that the host tier has comes from there, by a move in
 * place of the job.
 */
#include "cache.h"

#include "core/arith.h"
#include "core/mem.h"

/* ---- starting ---- */

/* No lock: the entry is PREPARING. */
static struct hr_read *reads_of(const struct hr__entry *entry)
{
	const hr_group *group = entry->group;
	struct hr_read *reads = hr__calloc(group->n, sizeof(*reads));
	char *memory = entry->place->block->memory;

	for (size_t i = 0; reads && i < group->n; i++)
		reads[i] = (struct hr_read){.tensor = group->members[i].tensor,
					    .length = UINT64_MAX,
					    .dst = memory ? memory + group->members[i].at : NULL,
					    .dst_bytes = group->bytes - group->members[i].at};
	return reads;
}

/* No lock. What the loader's lane has to wait for, in the shape that a job wants. */
static int list_marks(struct hr__entry *entry)
{
	const struct hr__place *place = entry->place;

	entry->job_marks = NULL;
	if (place->n_marks == 0)
		return 0;
	entry->job_marks = hr__calloc(place->n_marks, sizeof(void *));
	for (size_t i = 0; entry->job_marks && i < place->n_marks; i++)
		entry->job_marks[i] = place->marks[i].mark;
	return entry->job_marks ? 0 : HR_E_NOMEM;
}

static int start_job(struct hr__entry *entry, bool background, void *wait_stream, hr_job **out)
{
	hr_cache *cache = entry->cache;
	struct hr_read *reads = reads_of(entry);
	struct hr__job_request request = {.reads = reads,
					  .n_reads = entry->group->n,
					  .io_timeout_ms = cache->io_timeout_ms,
					  .wait_stream = wait_stream,
					  .n_marks = entry->place->n_marks,
					  .sorted = true,
					  .is_background = background};
	int rc = reads ? list_marks(entry) : HR_E_NOMEM;

	*out = NULL;
	request.marks = entry->job_marks;
	if (!rc && hr__loader_is_closed(cache->loader))
		rc = hr__fail(HR_E_CANCELLED, "the loader of the cache has been closed: it loads nothing any more");
	if (!rc)
		rc = hr__job_new(cache->loader, entry->group->model, &request, out);
	hr__free(reads);
	if (!rc)
		hr__job_run(*out);
	return rc;
}

/* The thread's last error, for those who wait for the entry. No lock. */
static struct hr__error_record *copy_of_error(void)
{
	struct hr__error_record now, *copy;

	hr__error_save(&now);
	copy = hr__malloc(sizeof(*copy));
	if (copy)
		*copy = now;
	hr__error_restore(&now);
	return copy;
}

/* Under the lock: a load is over and did not succeed. */
static void fail(struct hr__entry *entry, int code, struct hr__error_record *error)
{
	hr_cache *cache = entry->cache;
	struct hr__place *place;

	if (entry->copy)
		hr__host_release(entry->copy);
	entry->copy = NULL;
	HR__COUNT(entry, n_failures, 1);
	hr__cache_event(cache, HR_CACHE_FAILED, entry, entry->started_ns);
	entry->error = error;
	place = hr__cache_detach(entry);
	if (entry->state != HR__ENTRY_GONE)
		hr__cache_remove(entry, code);
	hr__cache_free_place(cache, place);
}

/* No lock: the copy in the host tier comes up. */
static int start_move(struct hr__entry *entry)
{
	int rc = list_marks(entry);

	entry->up = (struct hr__move){.device = entry->place->block->memory,
				      .host = entry->copy->memory->at,
				      .bytes = (size_t)entry->group->bytes,
				      .marks = entry->job_marks,
				      .n_marks = entry->place->n_marks};
	if (!rc && hr__move_start(entry->cache->loader, &entry->up))
		rc = hr__fail(HR_E_CANCELLED, "the loader of the cache has been closed: it loads nothing any more");
	return rc;
}

int hr__cache_start_load(struct hr__entry *entry, bool background, void *wait_stream)
{
	hr_cache *cache = entry->cache;
	struct hr__error_record *error = NULL;
	hr_job *job = NULL;
	int rc;

	HR__COUNT(entry, n_loads, 1);
	entry->copy = hr__host_acquire(cache, entry->group);
	pthread_mutex_unlock(&cache->lock);
	entry->started_ns = hr__os_now_ns();
	rc = entry->copy ? start_move(entry) : start_job(entry, background, wait_stream, &job);
	if (rc) {
		error = copy_of_error();
		hr__free(entry->job_marks);
	}
	pthread_mutex_lock(&cache->lock);
	if (rc) {
		fail(entry, rc, error);
		return rc;
	}
	entry->job = job;
	entry->state = HR__ENTRY_LOADING;
	hr__cache_update_held(entry);
	if (job && background && entry->n_waiting > 1) /* somebody came meanwhile */
		hr__job_promote(job);
	pthread_cond_broadcast(&cache->changed);
	return 0;
}

/* ---- ending ---- */

static void succeed(struct hr__entry *entry)
{
	hr_cache *cache = entry->cache;

	entry->state = HR__ENTRY_RESIDENT;
	entry->lease.block = entry->place->block;
	entry->lease.memory = entry->group->bytes ? entry->place->block->memory : NULL;
	entry->lease.bytes = entry->group->bytes;
	HR__COUNT(entry, loaded_bytes, entry->group->payload);
	hr__cache_event(cache, entry->copy ? HR_CACHE_HOST_LOAD : HR_CACHE_LOAD, entry, entry->started_ns);
	if (entry->copy) {
		HR__COUNT(entry, n_host_hits, 1);
		HR__COUNT(entry, host_hit_bytes, entry->group->payload);
		hr__host_release(entry->copy);
		entry->copy = NULL;
	}
	pthread_cond_broadcast(&cache->changed);
}

static uint32_t ms_until(uint64_t deadline_ns)
{
	uint64_t now = hr__os_now_ns();

	if (deadline_ns == UINT64_MAX)
		return HR_FOREVER;
	return deadline_ns <= now ? 0 : (uint32_t)hr__min_u64((deadline_ns - now + 999999) / 1000000, HR_FOREVER - 1);
}

/* No lock: waits for the job or the move, and frees what it used. HR_E_PENDING: it goes on. */
static int wait_for_load(struct hr__entry *entry, uint64_t deadline_ns)
{
	hr_cache *cache = entry->cache;
	int rc;

	if (!entry->copy) {
		rc = hr_job_wait(entry->job, ms_until(deadline_ns));
		if (rc == HR_E_PENDING)
			return rc;
		hr_job_close(entry->job, HR_FOREVER); /* settled, so this cannot fail */
	} else {
		if (!hr__move_wait(cache->loader, &entry->up, deadline_ns))
			return HR_E_PENDING;
		rc = entry->up.code;
		if (rc)
			rc = hr__device_fail(cache->device, rc, "cannot bring a group back from host memory",
					     &entry->up.error);
	}
	hr__free(entry->job_marks);
	return rc;
}

/* Under the lock, which it lets go: waits for the job and ends the load. False if the deadline passed first. */
static bool end_load(struct hr__entry *entry, uint64_t deadline_ns)
{
	hr_cache *cache = entry->cache;
	struct hr__error_record *error = NULL;
	struct hr__mark *marks = NULL;
	size_t n_marks = 0;
	int rc;

	entry->is_ending = true;
	pthread_mutex_unlock(&cache->lock);
	rc = wait_for_load(entry, deadline_ns);
	if (rc && rc != HR_E_PENDING)
		error = copy_of_error();
	pthread_mutex_lock(&cache->lock);
	entry->is_ending = false;
	if (rc == HR_E_PENDING) {
		pthread_cond_broadcast(&cache->changed); /* somebody else may have more time */
		return false;
	}
	entry->job = NULL;
	if (rc) {
		fail(entry, rc, error);
		return true;
	}
	marks = entry->place->marks;
	n_marks = entry->place->n_marks;
	entry->place->marks = NULL;
	entry->place->n_marks = entry->place->max_marks = 0;
	succeed(entry);
	if (n_marks > 0) {
		pthread_mutex_unlock(&cache->lock);
		hr__cache_free_marks(cache, marks, n_marks);
		pthread_mutex_lock(&cache->lock);
	} else {
		hr__free(marks);
	}
	return true;
}

void hr__cache_await(struct hr__entry *entry, uint64_t room_deadline_ns, uint64_t load_deadline_ns)
{
	hr_cache *cache = entry->cache;
	bool in_time = true;

	while (in_time && (entry->state == HR__ENTRY_PREPARING || entry->state == HR__ENTRY_LOADING)) {
		if (entry->state == HR__ENTRY_LOADING && !entry->is_ending)
			in_time = end_load(entry, load_deadline_ns);
		else
			in_time = hr__os_cond_wait(&cache->changed, &cache->lock,
						   entry->is_short_of_room ? room_deadline_ns : load_deadline_ns);
	}
}

void hr__cache_give_up(struct hr__entry *entry)
{
	hr_cache *cache = entry->cache;

	entry->n_waiting++;
	entry->is_ending = true;
	hr__cache_update_held(entry);
	hr__cache_remove(entry, 0); /* whoever asks for it from now on begins anew */
	pthread_mutex_unlock(&cache->lock);
	if (entry->copy)
		hr__move_wait(cache->loader, &entry->up, UINT64_MAX);
	else
		hr_job_close(entry->job, HR_FOREVER);
	hr__free(entry->job_marks);
	pthread_mutex_lock(&cache->lock);
	entry->job = NULL;
	entry->is_ending = false;
	fail(entry, 0, NULL);
	hr__cache_unwait(entry);
}
