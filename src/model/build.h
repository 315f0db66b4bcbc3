/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How a model comes to be: new, its shards, finish. Until it is finished it is nobody
 * else's; hr_model_close() takes it away at any stage.
 */
#ifndef HR_MODEL_BUILD_H
#define HR_MODEL_BUILD_H

#include "model/index.h"
#include "model/model.h"
#include "model/shards.h"

int hr__model_new(hr_model **out);
/* The key that all names of this model are hashed with: an index that is given to hr__model_finish() uses it too. */
const struct hr__hash_key *hr__model_key(const hr_model *model);

/* Reads and checks the headers of all `n` shards (1 to HR__MAX_SHARDS), once per model. After a failure the model has
 * those before the shard that failed. `from` and the errors are those of hr__shards_read(). */
int hr__model_add(hr_model *model, uint32_t n, const struct hr__shard_origin *from);

/* Makes the one table of names and numbers the tensors. With an index its shards are the model's, in the same
 * order. Errors: HR_E_DUPLICATE, HR_E_INDEX. */
int hr__model_finish(hr_model *model, const struct hr__index *index, const char *index_path);

#endif
