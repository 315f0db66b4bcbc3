/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How a model comes to be: new, one add per shard in the order of their numbers, finish. Until it is finished it is nobody
 * else's; hr_model_close() takes it away at any stage.
 */
#ifndef HR_MODEL_BUILD_H
#define HR_MODEL_BUILD_H

#include "model/index.h"
#include "model/model.h"

#define HR__MAX_SHARDS 65536
/* All headers of a model together; a hundred times what a checkpoint of 100,000 tensors has. */
#define HR__MAX_MODEL_HEADER_BYTES (UINT64_C(1) << 30)

int hr__model_new(hr_model **out);
/* The key that all names of this model are hashed with: an index that is given to hr__model_finish() uses it too. */
const struct hr__hash_key *hr__model_key(const hr_model *model);

/* Reads and checks the header of one shard. Takes the source over, also when it fails. Errors: those of the header, with the
 * source's path; HR_E_IO, HR_E_CHANGED, HR_E_LIMIT. */
int hr__model_add(hr_model *model, struct hr__source *source);

/* Makes the one table of names and numbers the tensors. With an index its shards are the model's, in the same order. Errors:
 * HR_E_DUPLICATE, HR_E_INDEX. */
int hr__model_finish(hr_model *model, const struct hr__index *index, const char *index_path);

#endif
