/* SPDX-License-Identifier: Apache-2.0 */
/* The part of DLPack's ABI (1.1) that Array speaks: both forms of a managed tensor. Layout and numbers are DLPack's
 * own. */
#ifndef HR_PYTHON_NATIVE_DLPACK_H
#define HR_PYTHON_NATIVE_DLPACK_H

#include <stdint.h>

enum { DL_CPU = 1, DL_CUDA = 2 };

struct dl_device {
	int32_t device_type;
	int32_t device_id;
};

struct dl_dtype {
	uint8_t code;
	uint8_t bits;
	uint16_t lanes;
};

struct dl_tensor {
	void *data;
	struct dl_device device;
	int32_t ndim;
	struct dl_dtype dtype;
	int64_t *shape;
	int64_t *strides; /* in elements; never NULL when ndim > 0, which DLPack 1.2 asks for */
	uint64_t byte_offset;
};

struct dl_managed {
	struct dl_tensor tensor;
	void *context;
	void (*deleter)(struct dl_managed *self);
};

struct dl_managed_versioned {
	uint32_t major, minor;
	void *context;
	void (*deleter)(struct dl_managed_versioned *self);
	uint64_t flags;
	struct dl_tensor tensor;
};

#define DL_FLAG_READ_ONLY UINT64_C(1)
#define DL_FLAG_COPIED    UINT64_C(2)

#endif
