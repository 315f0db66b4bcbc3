/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the loader sees of a model: where each tensor's bytes are, and the sources they are in. A model is immutable
 * once it is open, so nothing here takes a lock; only the count changes.
 */
#ifndef HR_MODEL_MODEL_H
#define HR_MODEL_MODEL_H

#include "model/source.h"

#include "headrace.h"

/* A tensor's bytes: a range of one of the model's sources. */
struct hr__extent {
	uint32_t source; /* number of the shard */
	uint64_t offset; /* in the source */
	uint64_t bytes;
};

/* Unique in the process: an address is used again once a model has closed. */
uint64_t hr__model_id(const hr_model *model);
uint32_t hr__model_n_sources(const hr_model *model);
const struct hr__source *hr__model_source(const hr_model *model, uint32_t source);
/* `tensor` is in range. */
void hr__model_extent(const hr_model *model, uint64_t tensor, struct hr__extent *out);
/* For messages; not NUL-terminated. */
const char *hr__model_tensor_name(const hr_model *model, uint64_t tensor, size_t *length);
/* The numbers of a shard's tensors: `count` of them from `first` on. */
void hr__model_shard_tensors(const hr_model *model, uint32_t shard, uint64_t *first, uint64_t *count);
/* hr__source_check() for all sources (or one). */
int hr__model_check(const hr_model *model);
/* A source in memory, read-only, for a caller who asked for it; counted. HR_E_UNSUPPORTED, HR_E_CHANGED, HR_E_NOMEM,
 * HR_E_IO. */
int hr__model_map(const hr_model *model, uint32_t source, unsigned char **out);
void hr__model_unmap(const hr_model *model, uint32_t source);
/* Bytes of all shards. */
uint64_t hr__model_bytes(const hr_model *model);

#endif
