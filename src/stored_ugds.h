/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A store whose disk belongs to uGDS: the kernel has no block device for it, so the store is found by its exported
 * manifest (where the region lies in the disk, and what must be there) and read through uGDS. Everything that is
 * checked of a store elsewhere is checked here too, by reads through uGDS, but for two things that cannot be had so:
 * the device's identity, for which the store's UUID and the manifest's SHA-256 stand, and locks, so that a reader
 * holds no lease and relies on its check after every batch.
 */
#ifndef HR_STORED_UGDS_H
#define HR_STORED_UGDS_H

#include "store/pin.h"
#include "store/view.h"

/* Where the region is, for hr__snapshot_want.region_ctx; all of it stays the caller's. */
struct hr__ugds_place {
	const char *node;    /* "/dev/ugds_drv0" */
	const char *sidecar; /* its path, for messages */
	const struct hr__pin_region *region;
};

/* hr__snapshot_want.open_region: a region, read-only, over the process's uGDS session with that node. HR_E_GEOMETRY
 * (the disk is smaller or has other sectors), HR_E_FIELD (the manifest does not say where), and those of the
 * session. */
int hr__ugds_region_open(void *place, struct hr__region **out);
/* Whether the label says of its region what the manifest said. HR_E_PIN. */
int hr__ugds_compare(const struct hr__ugds_place *place, const struct hr__snapshot *snapshot);

#endif
