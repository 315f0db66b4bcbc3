/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Names of what is in a store:
 *
 *     store:PATH                    the only model of a store
 *     store:PATH#MODEL              the newest generation of a model
 *     store:PATH#MODEL@41           that model in generation 41
 *     store:PATH#MODEL/FILE         one file of it, with or without @GENERATION before the slash
 *     store:SIDECAR.json#MODEL      the very generation that the exported manifest describes
 *
 * PATH ends at the first '#' that leaves a path to something that exists. A model's name may hold slashes and '@': the
 * longest name that is one wins.
 */
#ifndef HR_STORED_H
#define HR_STORED_H

#include "folder.h"

#include "headrace.h"

struct hr__stored {
	struct hr__folder folder; /* the model */
	char *name;               /* "store:PATH#MODEL[@GENERATION]", the folder's name */
	char *member;             /* "" = all of it */
};

bool hr__store_name_is(const char *name);
/* Errors: HR_E_NOTFOUND (store or model), HR_E_AMBIGUOUS (no model named, and there are several), those of a view, and
 * of a sidecar. */
int hr__store_resolve(const char *name, const struct hr_model_opts *opts, struct hr__stored *out);
void hr__stored_close(struct hr__stored *stored);
/* One file of a model as a source. */
int hr__store_member(const char *name, const struct hr_model_opts *opts, struct hr__source *out);

#endif
