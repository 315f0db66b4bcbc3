/* SPDX-License-Identifier: Apache-2.0 */
/*
 * headrace's own types and numbers of the CUDA driver, compared with cuda.h. Compiled only where that header is found.
 * The compiler checks everything, so that it compiles is the test; abi_cuda_names.c checks the functions.
 */
#include <cuda.h>

#include "device/cuda_syms.h"

#include <stddef.h>

#define SAME(ours, theirs)      _Static_assert((long long)(ours) == (long long)(theirs), #ours " is not " #theirs)
#define SAME_SIZE(ours, theirs) SAME(sizeof(ours), sizeof(theirs))
#define SAME_PLACE(ours, field, theirs, their_field)                                                                   \
	SAME(offsetof(ours, field), offsetof(theirs, their_field));                                                    \
	SAME(sizeof(((ours *)0)->field), sizeof(((theirs *)0)->their_field))

SAME(HR__CU_SUCCESS, CUDA_SUCCESS);
SAME(HR__CU_INVALID_VALUE, CUDA_ERROR_INVALID_VALUE);
SAME(HR__CU_OUT_OF_MEMORY, CUDA_ERROR_OUT_OF_MEMORY);
SAME(HR__CU_NOT_INITIALIZED, CUDA_ERROR_NOT_INITIALIZED);
SAME(HR__CU_DEINITIALIZED, CUDA_ERROR_DEINITIALIZED);
SAME(HR__CU_STUB_LIBRARY, CUDA_ERROR_STUB_LIBRARY);
SAME(HR__CU_NO_DEVICE, CUDA_ERROR_NO_DEVICE);
SAME(HR__CU_INVALID_DEVICE, CUDA_ERROR_INVALID_DEVICE);
SAME(HR__CU_INVALID_CONTEXT, CUDA_ERROR_INVALID_CONTEXT);
SAME(HR__CU_ECC_UNCORRECTABLE, CUDA_ERROR_ECC_UNCORRECTABLE);
SAME(HR__CU_NVLINK_UNCORRECTABLE, CUDA_ERROR_NVLINK_UNCORRECTABLE);
SAME(HR__CU_INVALID_HANDLE, CUDA_ERROR_INVALID_HANDLE);
SAME(HR__CU_NOT_FOUND, CUDA_ERROR_NOT_FOUND);
SAME(HR__CU_NOT_READY, CUDA_ERROR_NOT_READY);
SAME(HR__CU_ILLEGAL_ADDRESS, CUDA_ERROR_ILLEGAL_ADDRESS);
SAME(HR__CU_LAUNCH_TIMEOUT, CUDA_ERROR_LAUNCH_TIMEOUT);
SAME(HR__CU_CONTEXT_IS_DESTROYED, CUDA_ERROR_CONTEXT_IS_DESTROYED);
SAME(HR__CU_ASSERT, CUDA_ERROR_ASSERT);
SAME(HR__CU_ALREADY_REGISTERED, CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
SAME(HR__CU_NOT_REGISTERED, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
SAME(HR__CU_HARDWARE_STACK, CUDA_ERROR_HARDWARE_STACK_ERROR);
SAME(HR__CU_LAUNCH_FAILED, CUDA_ERROR_LAUNCH_FAILED);
SAME(HR__CU_NOT_SUPPORTED, CUDA_ERROR_NOT_SUPPORTED);
SAME(HR__CU_CAPTURE_UNSUPPORTED, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
SAME(HR__CU_CAPTURE_ISOLATION, CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
SAME(HR__CU_STREAM_NON_BLOCKING, CU_STREAM_NON_BLOCKING);
SAME(HR__CU_EVENT_DISABLE_TIMING, CU_EVENT_DISABLE_TIMING);
SAME(HR__CU_CAPTURE_MODE_RELAXED, CU_STREAM_CAPTURE_MODE_RELAXED);
SAME(HR__CU_CAPTURE_STATUS_NONE, CU_STREAM_CAPTURE_STATUS_NONE);
SAME(HR__CU_HOST_REGISTER_PORTABLE, CU_MEMHOSTREGISTER_PORTABLE);
SAME(HR__CU_HOST_REGISTER_READ_ONLY, CU_MEMHOSTREGISTER_READ_ONLY);
SAME(HR__CU_ALLOCATION_PINNED, CU_MEM_ALLOCATION_TYPE_PINNED);
SAME(HR__CU_POOL_INTERNAL_DEPENDENCIES, CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES);
SAME(HR__CU_LOCATION_DEVICE, CU_MEM_LOCATION_TYPE_DEVICE);
SAME(HR__CU_ATTRIBUTE_HOST_POINTER_USABLE, CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM);
SAME(HR__CU_ATTRIBUTE_POOLS_SUPPORTED, CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED);

SAME_SIZE(hr__cu_result, CUresult);
SAME_SIZE(hr__cu_device, CUdevice);
SAME_SIZE(hr__cu_attribute, CUdevice_attribute);
SAME_SIZE(hr__cu_pool_attribute, CUmemPool_attribute);
SAME_SIZE(hr__cu_capture_mode, CUstreamCaptureMode);
SAME_SIZE(hr__cu_capture_status, CUstreamCaptureStatus);
SAME_SIZE(hr__cu_search_status, CUdriverProcAddressQueryResult);
SAME_SIZE(hr__cu_ptr, CUdeviceptr);
SAME_SIZE(hr__cu_context, CUcontext);
SAME_SIZE(hr__cu_stream, CUstream);
SAME_SIZE(hr__cu_event, CUevent);
SAME_SIZE(hr__cu_pool, CUmemoryPool);

SAME_SIZE(struct hr__cu_location, CUmemLocation);
SAME_PLACE(struct hr__cu_location, type, CUmemLocation, type);
SAME_PLACE(struct hr__cu_location, id, CUmemLocation, id);

SAME_SIZE(struct hr__cu_pool_props, CUmemPoolProps);
SAME_PLACE(struct hr__cu_pool_props, alloc_type, CUmemPoolProps, allocType);
SAME_PLACE(struct hr__cu_pool_props, handle_types, CUmemPoolProps, handleTypes);
SAME_PLACE(struct hr__cu_pool_props, location, CUmemPoolProps, location);
SAME_PLACE(struct hr__cu_pool_props, win32_security, CUmemPoolProps, win32SecurityAttributes);
#if CUDA_VERSION >= 12020 /* before, the rest was reserved as a whole */
SAME_PLACE(struct hr__cu_pool_props, max_bytes, CUmemPoolProps, maxSize);
#endif

#if CUDA_VERSION >= 12080
SAME(HR__CU_SOURCE_ORDER_STREAM, CU_MEMCPY_SRC_ACCESS_ORDER_STREAM);
SAME_SIZE(struct hr__cu_copy_attributes, CUmemcpyAttributes);
SAME_PLACE(struct hr__cu_copy_attributes, source_order, CUmemcpyAttributes, srcAccessOrder);
SAME_PLACE(struct hr__cu_copy_attributes, source_hint, CUmemcpyAttributes, srcLocHint);
SAME_PLACE(struct hr__cu_copy_attributes, destination_hint, CUmemcpyAttributes, dstLocHint);
SAME_PLACE(struct hr__cu_copy_attributes, flags, CUmemcpyAttributes, flags);
#endif
#if CUDA_VERSION >= 13000
SAME(HR__CU_CONTAINED, CUDA_ERROR_CONTAINED);
#endif
