/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A source in memory: one read-only mapping of the whole file, shared by all tensors that a caller asked to have in
 * place (hr_map). It is made when first asked for and stays until the model is closed; addresses are all that it costs
 * while nobody uses it, since the pages are let go of with the last user. No lock: who comes second takes what is
 * there.
 *
 * Nothing in headrace reads through it: a file that somebody truncates would end the process.
 */
#ifndef HR_MODEL_MAPPING_H
#define HR_MODEL_MAPPING_H

#include "model/source.h"

#include <stdatomic.h>

struct hr__mapping {
	void *_Atomic memory; /* NULL until somebody asks */
	_Atomic uint32_t n_users;
};

/* One more user; *out is where the source's first byte is. HR_E_UNSUPPORTED (no plain file), HR_E_CHANGED, HR_E_NOMEM,
 * HR_E_IO. Threads: any. */
int hr__mapping_acquire(struct hr__mapping *mapping, const struct hr__source *source, unsigned char **out);
/* One user less. Never blocks on storage. */
void hr__mapping_release(struct hr__mapping *mapping, const struct hr__source *source);
void hr__mapping_close(struct hr__mapping *mapping, const struct hr__source *source);

#endif
