/* SPDX-License-Identifier: Apache-2.0 */
#ifndef HR_FORMAT_DTYPE_H
#define HR_FORMAT_DTYPE_H

#include "headrace.h"

/* The dtype with exactly this name, or 0. */
uint32_t hr__dtype_find(const char *name, size_t length);

#endif
