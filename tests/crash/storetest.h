/* SPDX-License-Identifier: Apache-2.0 */
/* What the tests of the store share: small models to import, and what a generation holds in one number. */
#ifndef HR_TESTS_STORETEST_H
#define HR_TESTS_STORETEST_H

#include "hrtest.h"

#include "store/snapshot.h"
#include "store/store.h"

/* Depends on models, file names and contents, and on nothing else. */
uint64_t models_fingerprint(const struct hr__manifest *manifest);
/* Digests and SHA-256 of all objects. */
bool objects_are_right(struct hr__snapshot *snapshot);

/* A directory with the models "a" to "e": one to three shards and a config each; the first shard of all is the same. */
extern char *store_sources;
int make_store_sources(void **state);
int remove_store_sources(void **state);

#endif
