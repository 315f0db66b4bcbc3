/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A view: a snapshot as models see it, its objects as sources. Counted: every source holds its view, so models live as
 * long as they like and the lease with them. Nothing of an object is parsed before its hash matched the manifest's:
 * readers of headers and of small files prove() what they read first.
 */
#ifndef HR_STORE_VIEW_H
#define HR_STORE_VIEW_H

#include "pin.h"
#include "snapshot.h"

#include "model/source.h"

struct hr__view;

/* With a pin (NULL: none) its generation is opened, whatever is wanted, and the store must be the one that it
 * describes. Errors: those of hr__snapshot_open(), HR_E_PIN. */
int hr__view_open(const char *path, const struct hr__snapshot_want *want, const struct hr__pin *pin,
		  struct hr__view **out);
struct hr__view *hr__view_acquire(struct hr__view *view);
void hr__view_unref(struct hr__view *view); /* takes NULL */
const struct hr__snapshot *hr__view_snapshot(const struct hr__view *view);

/* Calls `each` for the members of a model that have no slash in their name; a non-zero answer ends the walk. */
void hr__view_list(const struct hr__view *view, uint32_t model, int (*each)(void *ctx, const char *name), void *ctx);
/* A member as a source that holds the view; `path` is what messages call it. HR_E_NOTFOUND, HR_E_NOMEM. */
int hr__view_source(struct hr__view *view, uint32_t model, const char *name, const char *path, struct hr__source *out);

#endif
