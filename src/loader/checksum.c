/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Verifying: what a read brought is compared with the checksums of the source's blocks while it lies in the slot, so
 * that no byte reaches a destination before its block was found good. A plan whose alignment is that of the blocks
 * gives envelopes of whole blocks (the last one of a source may be shorter), so there is nothing to put together: each
 * slot is judged alone, by whichever reader is free.
 */
#include "loader.h"

#include "core/arith.h"
#include "core/hash.h"
#include "core/mem.h"

static int fail_unsupported(const struct hr__source *source, const char *why)
{
	return hr__fail_at(&(struct hr__where){.stage = "plan", .path = source->path, .offset = HR_NO_OFFSET},
			   HR_E_UNSUPPORTED, "%s cannot be verified while it is read: %s", source->path, why);
}

static int get_blocks(struct hr_job *job, uint32_t number)
{
	const struct hr__source *source = hr__model_source(job->model, number);
	uint64_t block;
	int rc;

	if (job->blocks[number].crc)
		return 0;
	if (!source->ops)
		return fail_unsupported(source, "a plain file has no checksums; import it into a store");
	rc = source->ops->blocks(source, &job->blocks[number]);
	if (rc)
		return rc;
	block = UINT64_C(1) << job->blocks[number].log2;
	if (job->plan.slot_bytes % block)
		return hr__fail_at(
			&(struct hr__where){.stage = "plan", .path = source->path, .offset = HR_NO_OFFSET}, HR_E_OPTS,
			"%s is verified by blocks of %" PRIu64 " bytes, which do not fit into slots of %" PRIu64
			"; use slots of a multiple of that",
			source->path, block, job->plan.slot_bytes);
	job->plan.align = (uint32_t)hr__max_u64(job->plan.align, block);
	return 0;
}

int hr__verify_prepare(struct hr_job *job)
{
	const hr_loader *loader = job->loader;
	int rc = 0;

	job->blocks = hr__calloc(hr__model_n_sources(job->model), sizeof(*job->blocks));
	if (!job->blocks)
		return HR_E_NOMEM;
	for (size_t i = 0; i < job->n_spans && !rc; i++) {
		const struct hr__source *source = hr__model_source(job->model, job->spans[i].source);

		if (job->spans[i].bytes == 0)
			continue;
		if (loader->pool.staging == HR__STAGING_WINDOW)
			rc = fail_unsupported(source, "this engine's reads do not pass through memory of the CPU; use "
						      "engine uring or pread");
		else
			rc = get_blocks(job, job->spans[i].source);
	}
	return rc;
}

/* The CRC of bytes of a slot. Those on a device come to the host for that, piece by piece. */
static uint32_t crc_of(const struct hr__slot *slot, uint64_t from, uint64_t bytes, unsigned char *bounce,
		       struct hr__bad_block *bad)
{
	hr_device *device = slot->job->loader->device;
	uint32_t crc = 0;

	if (slot->job->loader->pool.staging == HR__STAGING_HOST)
		return hr__crc32c(0, slot->memory + from, (size_t)bytes);
	for (uint64_t done = 0, part; done < bytes && !bad->code; done += part) {
		part = hr__min_u64(bytes - done, HR__BOUNCE_BYTES);
		bad->code = device->ops->read_back(device, bounce, slot->memory + from + done, (size_t)part,
						   &bad->error);
		if (!bad->code)
			crc = hr__crc32c(crc, bounce, (size_t)part);
	}
	return crc;
}

bool hr__verify_slot(const struct hr__slot *slot, unsigned char *bounce, struct hr__bad_block *bad)
{
	const struct hr__source_blocks *blocks = &slot->job->blocks[slot->chunk.source];
	uint64_t block = UINT64_C(1) << blocks->log2, done = 0;

	bad->code = 0;
	for (bad->number = slot->envelope.offset >> blocks->log2; done < slot->envelope.expected; bad->number++) {
		uint64_t bytes = hr__min_u64(block, slot->envelope.expected - done);

		bad->expected = blocks->crc[bad->number];
		bad->found = crc_of(slot, done, bytes, bounce, bad);
		if (bad->code || bad->found != bad->expected)
			return false;
		done += bytes;
	}
	return true;
}

/* The tensor that a byte of the source belongs to, as far as the chunk has one there. */
static size_t span_at(const struct hr_job *job, const struct hr__chunk *chunk, uint64_t end)
{
	size_t span = chunk->first;

	while (span < chunk->last && job->spans[span].offset + job->spans[span].bytes < end)
		span++;
	return span;
}

void hr__verify_fail(struct hr_job *job, const struct hr__slot *slot, const struct hr__bad_block *bad)
{
	const struct hr__source *source = hr__model_source(job->model, slot->chunk.source);
	uint8_t log2 = job->blocks[slot->chunk.source].log2;
	uint64_t at = bad->number << log2, end = hr__min_u64(at + (UINT64_C(1) << log2), source->bytes);
	struct hr__where where = {.stage = "verify", .path = source->path, .offset = at};

	where.tensor = hr__model_tensor_name(job->model, job->tensors[span_at(job, &slot->chunk, at + 1)],
					     &where.tensor_len);
	if (bad->code) {
		where.system = bad->error.system;
		hr__job_fail(job, bad->code, &where, "%s: what was read cannot be verified: %s", source->path,
			     bad->error.reason);
		return;
	}
	hr__job_fail(job, HR_E_DIGEST, &where,
		     "%s: block %" PRIu64 " (bytes %" PRIu64 " to %" PRIu64
		     ") has CRC-32C %08x, but %08x was stored; the data is damaged: run `headrace store check "
		     "--digests`, then import the model anew",
		     source->path, bad->number, at, end, bad->found, bad->expected);
}
