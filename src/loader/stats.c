/* SPDX-License-Identifier: Apache-2.0 */
/* What was done and what would be done: statistics of jobs and loaders, and hr_plan(), which draws a plan and reads
 * nothing. */
#include "loader.h"

#include "core/mem.h"

#include <string.h>

static void put_counts(struct hr_stats *out, const struct hr__counts *counts)
{
	out->done_bytes = counts->done_bytes;
	out->read_bytes = counts->read_bytes;
	out->n_chunks = counts->n_chunks;
	out->n_copies = counts->n_copies;
	out->n_batches = counts->n_batches;
	out->storage_wait_ns = counts->storage_wait_ns;
	out->copy_wait_ns = counts->copy_wait_ns;
	out->read_cpu_ns = counts->read_cpu_ns;
	out->verified_bytes = counts->verified_bytes;
	memcpy(out->cached_bytes, counts->cached_bytes, sizeof(out->cached_bytes));
	memcpy(out->direct_bytes, counts->direct_bytes, sizeof(out->direct_bytes));
}

static void put_loader(struct hr_stats *out, const hr_loader *loader)
{
	out->staging_bytes = loader->pool.bytes + loader->pool.tails_bytes;
	out->peak_staging_bytes = loader->pool.n_peak * loader->pool.slot_bytes;
	out->lost_bytes = loader->pool.n_lost * loader->pool.slot_bytes;
	out->peak_buffer_bytes = loader->heap->peak_bytes;
	out->n_readers = loader->n_readers;
	out->n_slots = loader->pool.n_slots;
}

int hr_job_stats(hr_job *job, struct hr_stats *out)
{
	struct hr_stats own = {0};
	int rc;

	if (!job)
		return hr__fail(HR_E_OPTS, "hr_job_stats: the job is NULL");
	rc = hr__loader_here(job->loader);
	if (rc)
		return rc;
	hr__choose_note(job->loader, job, own.note, sizeof(own.note));
	pthread_mutex_lock(&job->loader->lock);
	put_counts(&own, &job->counts);
	if (!job->loader->is_closed)
		put_loader(&own, job->loader);
	own.total_bytes = job->total_bytes;
	own.total_tensors = job->n_spans;
	own.elapsed_ns = (job->is_settled ? job->settled_ns : hr__os_now_ns()) - job->started_ns;
	own.first_ns = job->first_ns;
	pthread_mutex_unlock(&job->loader->lock);
	return hr__out_copy(out, &own, sizeof(own), "hr_stats");
}

int hr_loader_stats(hr_loader *loader, struct hr_stats *out)
{
	struct hr_stats own = {0};
	int rc = hr__loader_here(loader);

	if (rc)
		return rc;
	hr__choose_note(loader, NULL, own.note, sizeof(own.note));
	pthread_mutex_lock(&loader->lock);
	put_counts(&own, &loader->counts);
	put_loader(&own, loader);
	own.total_bytes = loader->total_bytes;
	own.total_tensors = loader->total_tensors;
	own.elapsed_ns = hr__os_now_ns() - loader->opened_ns;
	pthread_mutex_unlock(&loader->lock);
	return hr__out_copy(out, &own, sizeof(own), "hr_stats");
}

static void plan_chunk(const hr_loader *loader, const struct hr_job *job, const struct hr__chunk *chunk,
		       struct hr_plan_info *info)
{
	const struct hr__source *source = hr__model_source(job->model, chunk->source);
	struct hr__envelope envelope;
	struct hr__choice choice;
	struct hr__piece piece;
	uint64_t resident = 0;

	hr__choose(loader, job, chunk, &choice);
	hr__choose_envelope(job, chunk, choice.direct, &envelope);
	hr__os_resident(&source->file, source->base + chunk->offset, chunk->bytes, &resident);
	info->resident_bytes += resident;
	info->read_bytes += envelope.expected;
	(choice.direct ? info->direct_bytes : info->cached_bytes)[choice.engine->id] += envelope.expected;
	info->n_chunks++;
	for (size_t span = chunk->first; span <= chunk->last; span++)
		info->n_pieces += hr__chunk_piece(&job->plan, chunk, span, &piece);
}

int hr_plan(hr_loader *loader, hr_model *model, const struct hr_read *reads, size_t n_reads, struct hr_plan_info *out)
{
	/* A feed's request is one whose destinations are not known: just what is asked here. It is drawn, but never
	 * run. */
	struct hr__job_request request = {.reads = reads, .n_reads = n_reads, .is_feed = true, .sorted = true};
	struct hr_plan_info info = {0};
	struct hr__cursor cursor = {0};
	struct hr__chunk chunk;
	struct hr_job *job;
	int rc = hr__loader_here(loader);

	if (!rc && (!model || (!reads && n_reads)))
		rc = hr__fail(HR_E_OPTS, "hr_plan: %s is NULL", model ? "reads" : "the model");
	if (!rc)
		rc = hr__job_new(loader, model, &request, &job);
	if (rc)
		return rc;
	while (hr__plan_next(&job->plan, &cursor, job->n_spans, &chunk))
		plan_chunk(loader, job, &chunk, &info);
	info.payload_bytes = job->total_bytes;
	info.staging_bytes = loader->pool.bytes + loader->pool.tails_bytes;
	hr__choose_note(loader, job, info.note, sizeof(info.note));
	hr__job_free(job);
	return hr__out_copy(out, &info, sizeof(info), "hr_plan_info");
}
