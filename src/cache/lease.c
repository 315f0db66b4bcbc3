/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The lease: the buffer that get hands out. It is a part of its entry, made once, so a hit allocates nothing; its
 * count is the pins, and the entry stays as long as there is one. The last pin goes under the lock, so that whoever
 * finds none there knows that nobody is on the way; the others go without it.
 */
#include "cache.h"

#include "core/mem.h"

#include <stddef.h>
#include <string.h>

#define MANY_MARKS 8

static struct hr__entry *entry_of(hr_buffer *buffer)
{
	return (struct hr__entry *)(void *)((char *)buffer - offsetof(struct hr__entry, lease));
}

/* A pin that is not the last; false if it is, and nothing was done. */
static bool drop_if_shared(hr_buffer *buffer)
{
	uint32_t count = atomic_load(&buffer->count);

	while (count > 1)
		if (atomic_compare_exchange_weak(&buffer->count, &count, count - 1))
			return true;
	return false;
}

/* Under the lock. After this the entry may be somebody else's. */
static void drop(struct hr__entry *entry)
{
	hr_cache *cache = entry->cache;

	if (atomic_fetch_sub(&entry->lease.count, 1) > 1)
		return;
	HR__COUNT(entry, n_pinned, -UINT64_C(1));
	HR__COUNT(entry, pinned_bytes, -entry->place->bytes);
	hr__cache_update_held(entry);
	if (cache->n_room_waiters > 0 || cache->is_closing)
		pthread_cond_broadcast(&cache->changed);
}

static void release(hr_buffer *buffer)
{
	hr_cache *cache = entry_of(buffer)->cache;

	if (drop_if_shared(buffer))
		return;
	pthread_mutex_lock(&cache->lock);
	drop(entry_of(buffer));
	pthread_mutex_unlock(&cache->lock);
}

/* ---- releases on a stream ---- */

/* Under the lock: takes the mark that was made on this stream before; or, if there are many, an old one of another
 * stream, which can be used again if it has passed. NULL: there is none to take. */
static struct hr__mark take_mark(struct hr__place *place, const void *stream)
{
	size_t at = 0;
	struct hr__mark mark;

	while (at < place->n_marks && place->marks[at].stream != stream)
		at++;
	if (at == place->n_marks && at < MANY_MARKS)
		return (struct hr__mark){0};
	at = at == place->n_marks ? 0 : at;
	mark = place->marks[at];
	place->n_marks--;
	memmove(&place->marks[at], &place->marks[at + 1], (place->n_marks - at) * sizeof(mark));
	return mark;
}

/* Under the lock: room for `n` more beside those that are lent. HR_E_NOMEM. */
static int lend_room(struct hr__place *place, size_t n)
{
	struct hr__mark *bigger;

	if (place->n_marks + place->n_lent + n > place->max_marks) {
		bigger = hr__realloc(place->marks, place->max_marks + MANY_MARKS, sizeof(*bigger));
		if (!bigger)
			return HR_E_NOMEM;
		place->marks = bigger;
		place->max_marks += MANY_MARKS;
	}
	place->n_lent += n;
	return 0;
}

/* Makes `mark` stand for what is queued on the stream now. If it is another stream's and has not passed, a new one is
 * made, and the old one stays as it is: *kept says so. */
static int make_mark(hr_cache *cache, void *stream, struct hr__mark *mark, struct hr__mark *kept)
{
	const struct hr__device_ops *ops = cache->device->ops;
	struct hr__device_error error = {0};
	int rc;

	if (mark->mark && mark->stream != stream && ops->mark_done(cache->device, mark->mark, &error) != 1) {
		*kept = *mark;
		*mark = (struct hr__mark){0};
	}
	if (mark->mark)
		rc = ops->mark_again(cache->device, stream, mark->mark, &error);
	else
		rc = ops->mark(cache->device, stream, &mark->mark, &error);
	if (!rc)
		mark->stream = stream;
	return rc ? hr__device_fail(cache->device, rc, "cannot order a release after the stream", &error) : 0;
}

/* A mark of what is queued on the stream now, in the place. The caller has a pin, so both stay. */
static int mark_stream(struct hr__entry *entry, void *stream)
{
	hr_cache *cache = entry->cache;
	struct hr__place *place = entry->place;
	struct hr__mark mark, kept = {0};
	int rc;

	pthread_mutex_lock(&cache->lock);
	rc = lend_room(place, 2);
	if (!rc)
		mark = take_mark(place, stream);
	pthread_mutex_unlock(&cache->lock);
	if (rc)
		return rc;
	rc = make_mark(cache, stream, &mark, &kept);
	pthread_mutex_lock(&cache->lock);
	place->n_lent -= 2;
	if (kept.mark)
		place->marks[place->n_marks++] = kept;
	if (mark.mark)
		place->marks[place->n_marks++] = mark;
	pthread_mutex_unlock(&cache->lock);
	return rc;
}

static int release_on(hr_buffer *buffer, void *stream)
{
	int rc = mark_stream(entry_of(buffer), stream);

	if (!rc)
		release(buffer);
	return rc;
}

const struct hr__buffer_owner hr__cache_lease = {.release = release, .release_on = release_on};
