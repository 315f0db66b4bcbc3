/* SPDX-License-Identifier: Apache-2.0 */
/* A check in progress; hr_store_check() in headrace.h says what it is. The parts are here for tests. */
#ifndef HR_STORE_CHECK_H
#define HR_STORE_CHECK_H

#include "manifest.h"

struct hr__check {
	struct hr__region *region; /* for reading */
	struct hr_store_check_opts opts;
	struct hr_store_check_info info;
	struct hr_store_progress progress;
	struct hr__label label;
	struct hr__roots roots;
	bool label_is_good[2];
	bool body_is_damaged; /* one copy of it, at least */
};

/* Only reads. 0: looked at; what is damaged was reported and counted. HR_E_NOT_A_STORE, HR_E_NOMEM, HR_E_CANCELLED,
 * HR_E_REGION_CHANGED. */
int hr__check_look(struct hr__check *check);
/* Repairs through `writable`, which is closed afterwards, and looks again. HR_E_LOCKED, HR_E_BUSY, and those of
 * commits. */
int hr__check_repair(struct hr__check *check, struct hr__region *writable);
/* Searches the data area for footers. */
int hr__check_salvage(struct hr__check *check);

#endif
