/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reading an exported manifest (a sidecar): which generation of which store it describes, and where that store was. It
 * is believed in one thing only: what it demands. The store itself must say the same.
 */
#ifndef HR_STORE_PIN_H
#define HR_STORE_PIN_H

#include <stddef.h>
#include <stdint.h>

/* What a store must be. */
struct hr__pin {
	uint8_t uuid[16];
	uint64_t generation;
	uint8_t body_sha256[32];
};

/* Where a store lay in its device when the sidecar was written. Believed only as far as the label says the same. */
struct hr__pin_region {
	uint64_t bytes;        /* of the region */
	uint64_t base;         /* where it begins in the device */
	uint64_t device_bytes; /* of the whole device */
	uint64_t lba_bytes;
};

struct hr__sidecar {
	struct hr__pin pin;
	struct hr__pin_region region; /* all zero: the sidecar does not say */
	char *path;                   /* of the region; relative ones begin where the sidecar is */
};

/* HR_E_NOTFOUND, HR_E_IO, HR_E_LIMIT, HR_E_JSON, HR_E_TYPE, HR_E_FIELD, HR_E_STORE_VERSION, with stage "sidecar". */
int hr__sidecar_read(const char *path, struct hr__sidecar *out);
/* From text; `name` is what messages call it. */
int hr__sidecar_parse(const char *name, const void *text, size_t bytes, struct hr__sidecar *out);
void hr__sidecar_free(struct hr__sidecar *sidecar);

#endif
