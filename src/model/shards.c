/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The calling thread and its helpers take the shards one by one, in order. Whoever fails keeps its error if no shard
 * before it has failed, and from then on no later shard is begun; those before it are all in somebody's hands. So the
 * error that is told is that of the first bad shard, whatever the threads did.
 *
 * Helpers only save time: where none can be started, the caller does it all. The lock guards the error; the rest is
 * atomic or belongs to the thread that took the shard. A thread's text of a header lives until it takes no more.
 */
#include "shards.h"

#include "core/arith.h"
#include "core/error.h"
#include "core/mem.h"

#include <stdatomic.h>

/* Most headers come with the first read. */
#define FIRST_READ  ((size_t)64 << 10)
#define MANY_SHARDS 16
#define MAX_THREADS HR__OS_TEAM_MAX

struct reading {
	const struct hr__hash_key *key;
	const struct hr__shard_origin *from;
	struct hr__shard *shards;
	atomic_uint next;              /* the first that nobody has taken */
	_Atomic uint64_t header_bytes; /* of all that were taken */
	atomic_uint end;               /* the first that failed, or the number of shards */
	pthread_mutex_t lock;
	struct hr__error_record error; /* of `end` */
	bool is_over;                  /* and that is that all headers together are too large */
};

struct text {
	uint8_t *bytes;
	size_t room;
};

/* ---- one shard ---- */

static int text_reserve(struct text *text, size_t bytes)
{
	uint8_t *bigger;

	if (bytes <= text->room)
		return 0;
	bigger = hr__realloc(text->bytes, bytes, 1);
	if (!bigger)
		return HR_E_NOMEM;
	text->bytes = bigger;
	text->room = bytes;
	return 0;
}

static int count_header_bytes(struct reading *reading, const struct hr__source *source, uint64_t json_bytes,
			      bool *is_over)
{
	/* at most 65,536 times 10^8 */
	uint64_t all = atomic_fetch_add(&reading->header_bytes, json_bytes) + json_bytes;

	*is_over = all > HR__MAX_MODEL_HEADER_BYTES;
	if (!*is_over)
		return 0;
	return hr__fail_at(&(struct hr__where){.stage = "header", .path = source->path, .offset = 0}, HR_E_LIMIT,
			   "with %s the headers of this model have %" PRIu64 " bytes; the limit is %" PRIu64,
			   source->path, all, HR__MAX_MODEL_HEADER_BYTES);
}

/* A header that the source's owner vouches for is read whole and proven before anything of it is looked at. */
static int read_proven(struct reading *reading, const struct hr__source *source, struct text *text,
		       uint64_t *json_bytes, bool *is_over)
{
	uint64_t all = source->proven, found = 0;
	int code;

	if (all < HR__FRAME_BYTES || all - HR__FRAME_BYTES > HR__HEADER_MAX_BYTES || all > source->bytes)
		return hr__fail_at(&(struct hr__where){.stage = "header", .path = source->path, .offset = 0},
				   HR_E_HEADER_LARGE,
				   "%s is not stored as a safetensors shard with a header of at most %" PRIu64 " bytes",
				   source->path, HR__HEADER_MAX_BYTES);
	code = count_header_bytes(reading, source, all - HR__FRAME_BYTES, is_over);
	if (!code)
		code = text_reserve(text, (size_t)all);
	if (!code)
		code = hr__source_read(source, 0, text->bytes, (size_t)all);
	if (!code)
		code = hr__source_prove(source, text->bytes, (size_t)all);
	if (code)
		return code;
	code = hr__header_frame(text->bytes, (size_t)all, source->bytes, &found);
	if (code)
		return hr__error_locate("header", source->path, NULL, 0);
	*json_bytes = all - HR__FRAME_BYTES;
	if (found == *json_bytes)
		return 0;
	return hr__fail_at(&(struct hr__where){.stage = "header", .path = source->path, .offset = 0},
			   HR_E_HEADER_LENGTH,
			   "%s says that its header has %" PRIu64 " bytes, but it is stored as one of %" PRIu64,
			   source->path, found, *json_bytes);
}

/* Reads the header's text, behind its length. */
static int read_header(struct reading *reading, const struct hr__source *source, struct text *text,
		       uint64_t *json_bytes, bool *is_over)
{
	size_t first = (size_t)hr__min_u64(source->bytes, FIRST_READ), all;
	int code;

	if (source->ops)
		return read_proven(reading, source, text, json_bytes, is_over);
	code = text_reserve(text, FIRST_READ);
	if (!code)
		code = hr__source_read(source, 0, text->bytes, first);
	if (code)
		return code;
	code = hr__header_frame(text->bytes, first, source->bytes, json_bytes);
	if (code)
		return hr__error_locate("header", source->path, NULL, 0);
	code = count_header_bytes(reading, source, *json_bytes, is_over);
	all = HR__FRAME_BYTES + (size_t)*json_bytes;
	if (!code && all > first)
		code = text_reserve(text, all);
	if (!code && all > first)
		code = hr__source_read(source, first, text->bytes + first, all - first);
	return code;
}

static int read_shard(struct reading *reading, uint32_t number, struct text *text, bool *is_over)
{
	struct hr__shard *shard = &reading->shards[number];
	struct hr__source *source = &shard->source;
	uint64_t json_bytes = 0;
	int code = reading->from->open(reading->from->ctx, number, source);

	if (code)
		return code;
	code = read_header(reading, source, text, &json_bytes, is_over);
	if (!code)
		code = hr__source_check(source);
	if (code)
		return code;
	shard->data_offset = HR__FRAME_BYTES + json_bytes;
	code = hr__header_parse(reading->key, text->bytes + HR__FRAME_BYTES, (size_t)json_bytes,
				source->bytes - shard->data_offset, &shard->header);
	return code ? hr__error_locate("header", source->path, NULL, 0) : 0;
}

static void shard_empty(struct hr__shard *shard)
{
	*shard = (struct hr__shard){.source.file = {.fd = -1, .direct_fd = -1}};
}

void hr__shard_close(struct hr__shard *shard)
{
	hr__header_free(&shard->header);
	hr__mapping_close(&shard->mapping, &shard->source);
	hr__source_close(&shard->source);
	shard_empty(shard);
}

/* ---- all of them ---- */

static void keep_failure(struct reading *reading, uint32_t number, bool is_over)
{
	pthread_mutex_lock(&reading->lock);
	if (number < atomic_load(&reading->end)) {
		atomic_store(&reading->end, number);
		hr__error_save(&reading->error);
		reading->is_over = is_over;
	}
	pthread_mutex_unlock(&reading->lock);
}

static void *read_some(void *ctx)
{
	struct reading *reading = ctx;
	struct text text = {.bytes = NULL};

	for (;;) {
		uint32_t number = atomic_fetch_add(&reading->next, 1);
		bool is_over = false;

		if (number >= atomic_load(&reading->end))
			break;
		if (read_shard(reading, number, &text, &is_over))
			keep_failure(reading, number, is_over);
	}
	hr__free(text.bytes);
	return NULL;
}

unsigned hr__shards_helpers(uint32_t n)
{
	return n < MANY_SHARDS ? 0 : (unsigned)hr__min_u64(hr__os_cpus(), MAX_THREADS) - 1;
}

/* Gives what `meanwhile` gave; how the shards went is in `reading`. */
static int read_all(struct reading *reading, uint32_t n, unsigned n_helpers)
{
	const struct hr__shard_origin *from = reading->from;
	struct hr__os_team team;
	int code = 0;

	for (uint32_t s = 0; s < n; s++)
		shard_empty(&reading->shards[s]);
	atomic_store(&reading->next, 0);
	atomic_store(&reading->header_bytes, 0);
	atomic_store(&reading->end, n);
	hr__os_team_start(&team, n_helpers, "hr-open", read_some, reading);
	if (from->meanwhile)
		code = from->meanwhile(from->ctx);
	if (code)
		atomic_store(&reading->end, 0);
	else
		read_some(reading);
	hr__os_team_join(&team);
	return code;
}

static void close_from(struct hr__shard *shards, uint32_t first, uint32_t n)
{
	for (uint32_t s = first; s < n; s++)
		hr__shard_close(&shards[s]);
}

int hr__shards_read(const struct hr__hash_key *key, const struct hr__shard_origin *from, struct hr__shard *shards,
		    uint32_t n, uint32_t *n_good)
{
	const struct hr__shard_origin again = {.open = from->open, .ctx = from->ctx};
	struct reading reading = {.key = key, .from = from, .shards = shards, .lock = PTHREAD_MUTEX_INITIALIZER};
	unsigned n_helpers = hr__shards_helpers(n);
	int code;

	if (n_helpers)
		hr__os_expect_files(2 * n);
	code = read_all(&reading, n, n_helpers);
	if (!code && reading.is_over && n_helpers) {
		/* With which shard it became too much depends on their order: now they are taken in it. */
		close_from(shards, 0, n);
		reading.from = &again;
		read_all(&reading, n, 0);
	}
	*n_good = code ? 0 : atomic_load(&reading.end);
	close_from(shards, *n_good, n);
	if (code || *n_good == n)
		return code;
	return hr__error_restore(&reading.error);
}
