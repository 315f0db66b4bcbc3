/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The part of the CUDA driver API that headrace calls, as its own prototypes: no header of NVIDIA's is needed to
 * build. The table is walked when the driver is opened (cuda_driver.c), written once more by the look-alike driver of
 * the tests, and compared with the real cuda.h where that is found (tests/abi).
 *
 * X(field, symbol, parameters, required). The symbol has its suffix: "cuMemAlloc" alone is a function of the 32-bit
 * days. All return hr__cu_result. Streams, events, contexts and pools are pointers to something of the driver's.
 */
#ifndef HR_DEVICE_CUDA_SYMS_H
#define HR_DEVICE_CUDA_SYMS_H

#include <stddef.h>
#include <stdint.h>

/* The test that compares all this with cuda.h gives NVIDIA's types these names instead. */
#ifndef HR__CU_TYPES_GIVEN
typedef int hr__cu_result;             /* CUresult */
typedef int hr__cu_device;             /* CUdevice */
typedef int hr__cu_attribute;          /* CUdevice_attribute */
typedef int hr__cu_pool_attribute;     /* CUmemPool_attribute */
typedef int hr__cu_capture_mode;       /* CUstreamCaptureMode */
typedef int hr__cu_capture_status;     /* CUstreamCaptureStatus */
typedef int hr__cu_search_status;      /* CUdriverProcAddressQueryResult */
typedef unsigned long long hr__cu_ptr; /* CUdeviceptr */
typedef void *hr__cu_context;          /* CUcontext */
typedef void *hr__cu_stream;           /* CUstream */
typedef void *hr__cu_event;            /* CUevent */
typedef void *hr__cu_pool;             /* CUmemoryPool */

/* CUmemLocation */
struct hr__cu_location {
	int type;
	int id;
};

/* CUmemPoolProps */
struct hr__cu_pool_props {
	int alloc_type;
	int handle_types;
	struct hr__cu_location location;
	void *win32_security;
	size_t max_bytes;
	unsigned short usage;
	unsigned char reserved[54];
};

/* CUmemcpyAttributes */
struct hr__cu_copy_attributes {
	int source_order;
	struct hr__cu_location source_hint, destination_hint;
	unsigned int flags;
};
#endif

enum {
	HR__CU_SUCCESS = 0,
	HR__CU_INVALID_VALUE = 1,
	HR__CU_OUT_OF_MEMORY = 2,
	HR__CU_NOT_INITIALIZED = 3,
	HR__CU_DEINITIALIZED = 4,
	HR__CU_STUB_LIBRARY = 34,
	HR__CU_NO_DEVICE = 100,
	HR__CU_INVALID_DEVICE = 101,
	HR__CU_INVALID_CONTEXT = 201,
	HR__CU_ECC_UNCORRECTABLE = 214,
	HR__CU_NVLINK_UNCORRECTABLE = 220,
	HR__CU_CONTAINED = 226,
	HR__CU_INVALID_HANDLE = 400,
	HR__CU_NOT_FOUND = 500,
	HR__CU_NOT_READY = 600,
	HR__CU_ILLEGAL_ADDRESS = 700,
	HR__CU_LAUNCH_TIMEOUT = 702,
	HR__CU_CONTEXT_IS_DESTROYED = 709,
	HR__CU_ASSERT = 710,
	HR__CU_ALREADY_REGISTERED = 712,
	HR__CU_NOT_REGISTERED = 713,
	HR__CU_HARDWARE_STACK = 714,
	HR__CU_LAUNCH_FAILED = 719,
	HR__CU_NOT_SUPPORTED = 801,
	HR__CU_CAPTURE_UNSUPPORTED = 900,
	HR__CU_CAPTURE_ISOLATION = 905,

	HR__CU_STREAM_NON_BLOCKING = 1,
	HR__CU_EVENT_DISABLE_TIMING = 2,
	HR__CU_CAPTURE_MODE_RELAXED = 2,
	HR__CU_CAPTURE_STATUS_NONE = 0,
	HR__CU_HOST_REGISTER_PORTABLE = 1,
	HR__CU_HOST_REGISTER_READ_ONLY = 8,
	HR__CU_ALLOCATION_PINNED = 1,
	HR__CU_POOL_INTERNAL_DEPENDENCIES = 3,
	HR__CU_LOCATION_DEVICE = 1,
	HR__CU_SOURCE_ORDER_STREAM = 1,
	HR__CU_ATTRIBUTE_HOST_POINTER_USABLE = 91,
	HR__CU_ATTRIBUTE_POOLS_SUPPORTED = 115,
};

/* Not formatted by tool, which takes the stars for multiplications. */
/* clang-format off */
#define HR__CU_SYMBOLS(X)                                                                                              \
	X(cuInit, cuInit, (unsigned int flags), 1)                                                                     \
	X(cuDriverGetVersion, cuDriverGetVersion, (int *version), 1)                                                   \
	X(cuGetErrorName, cuGetErrorName, (hr__cu_result result, const char **text), 1)                                \
	X(cuGetErrorString, cuGetErrorString, (hr__cu_result result, const char **text), 1)                            \
	X(cuGetProcAddress, cuGetProcAddress_v2,                                                                       \
	  (const char *symbol, void **address, int version, uint64_t flags, hr__cu_search_status *status), 0)          \
	X(cuDeviceGetCount, cuDeviceGetCount, (int *count), 1)                                                         \
	X(cuDeviceGet, cuDeviceGet, (hr__cu_device *device, int ordinal), 1)                                           \
	X(cuDeviceGetName, cuDeviceGetName, (char *name, int length, hr__cu_device device), 1)                         \
	X(cuDeviceGetAttribute, cuDeviceGetAttribute, (int *value, hr__cu_attribute attribute, hr__cu_device device), 1) \
	X(cuDeviceTotalMem, cuDeviceTotalMem_v2, (size_t *bytes, hr__cu_device device), 1)                             \
	X(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, (hr__cu_context *context, hr__cu_device device), 1)      \
	X(cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2, (hr__cu_device device), 1)                          \
	X(cuCtxPushCurrent, cuCtxPushCurrent_v2, (hr__cu_context context), 1)                                          \
	X(cuCtxPopCurrent, cuCtxPopCurrent_v2, (hr__cu_context *context), 1)                                           \
	X(cuThreadExchangeStreamCaptureMode, cuThreadExchangeStreamCaptureMode, (hr__cu_capture_mode *mode), 1)        \
	X(cuMemGetInfo, cuMemGetInfo_v2, (size_t *free_bytes, size_t *total_bytes), 1)                                 \
	X(cuMemAlloc, cuMemAlloc_v2, (hr__cu_ptr *memory, size_t bytes), 1)                                            \
	X(cuMemFree, cuMemFree_v2, (hr__cu_ptr memory), 1)                                                             \
	X(cuMemPoolCreate, cuMemPoolCreate, (hr__cu_pool *pool, const struct hr__cu_pool_props *props), 0)             \
	X(cuMemPoolDestroy, cuMemPoolDestroy, (hr__cu_pool pool), 0)                                                   \
	X(cuMemPoolSetAttribute, cuMemPoolSetAttribute, (hr__cu_pool pool, hr__cu_pool_attribute attribute, void *value), 0) \
	X(cuMemAllocFromPoolAsync, cuMemAllocFromPoolAsync,                                                            \
	  (hr__cu_ptr *memory, size_t bytes, hr__cu_pool pool, hr__cu_stream stream), 0)                               \
	X(cuMemFreeAsync, cuMemFreeAsync, (hr__cu_ptr memory, hr__cu_stream stream), 0)                                \
	X(cuMemHostRegister, cuMemHostRegister_v2, (void *memory, size_t bytes, unsigned int flags), 1)                \
	X(cuMemHostUnregister, cuMemHostUnregister, (void *memory), 1)                                                 \
	X(cuMemcpyHtoDAsync, cuMemcpyHtoDAsync_v2,                                                                     \
	  (hr__cu_ptr dst, const void *src, size_t bytes, hr__cu_stream stream), 1)                                    \
	X(cuMemcpyDtoHAsync, cuMemcpyDtoHAsync_v2, (void *dst, hr__cu_ptr src, size_t bytes, hr__cu_stream stream), 1) \
	X(cuMemcpyDtoDAsync, cuMemcpyDtoDAsync_v2, (hr__cu_ptr dst, hr__cu_ptr src, size_t bytes, hr__cu_stream stream), 1) \
	X(cuStreamCreate, cuStreamCreate, (hr__cu_stream *stream, unsigned int flags), 1)                              \
	X(cuStreamDestroy, cuStreamDestroy_v2, (hr__cu_stream stream), 1)                                              \
	X(cuStreamSynchronize, cuStreamSynchronize, (hr__cu_stream stream), 1)                                         \
	X(cuStreamWaitEvent, cuStreamWaitEvent, (hr__cu_stream stream, hr__cu_event event, unsigned int flags), 1)     \
	X(cuStreamIsCapturing, cuStreamIsCapturing, (hr__cu_stream stream, hr__cu_capture_status *status), 1)          \
	X(cuEventCreate, cuEventCreate, (hr__cu_event *event, unsigned int flags), 1)                                  \
	X(cuEventRecord, cuEventRecord, (hr__cu_event event, hr__cu_stream stream), 1)                                 \
	X(cuEventQuery, cuEventQuery, (hr__cu_event event), 1)                                                         \
	X(cuEventDestroy, cuEventDestroy_v2, (hr__cu_event event), 1)

/* cuMemcpyBatchAsync has two shapes; which one a driver has is asked of cuGetProcAddress by version. */
#define HR__CU_BATCH_V1_PARAMETERS                                                                                     \
	(hr__cu_ptr *dsts, hr__cu_ptr *srcs, size_t *sizes, size_t count,                                              \
	 struct hr__cu_copy_attributes *attributes, size_t *attribute_starts, size_t n_attributes, size_t *failed,     \
	 hr__cu_stream stream)
#define HR__CU_BATCH_V2_PARAMETERS                                                                                     \
	(hr__cu_ptr *dsts, hr__cu_ptr *srcs, size_t *sizes, size_t count,                                              \
	 struct hr__cu_copy_attributes *attributes, size_t *attribute_starts, size_t n_attributes,                     \
	 hr__cu_stream stream)
/* clang-format on */

struct hr__cu_api {
#define HR__FIELD(field, symbol, parameters, required) hr__cu_result(*field) parameters;
	HR__CU_SYMBOLS(HR__FIELD)
#undef HR__FIELD
	hr__cu_result(*batch_v1) HR__CU_BATCH_V1_PARAMETERS; /* CUDA 12.8 and 12.9; NULL if v2 is there */
	hr__cu_result(*batch_v2) HR__CU_BATCH_V2_PARAMETERS; /* CUDA 13.0 and later */
	int version;                                         /* 13000 */
};

#endif
