/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The part of the look-alike driver that headrace itself never calls, but NVIDIA's own libraries do: with it the real
 * libcufile runs in its compatibility mode on a machine without a GPU. It answers what a data-centre GPU answers;
 * what it does not know it says it does not support. See fake_cuda_core.h.
 */
#include "fake_cuda_core.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

API hr__cu_result cuCtxCreate_v2(hr__cu_context *context, unsigned int flags, hr__cu_device device);
API hr__cu_result cuCtxDestroy_v2(hr__cu_context context);
API hr__cu_result cuCtxSetCurrent(hr__cu_context context);
API hr__cu_result cuCtxGetDevice(hr__cu_device *device);
API hr__cu_result cuDeviceGetUuid(char *uuid, hr__cu_device device);
API hr__cu_result cuDeviceGetUuid_v2(char *uuid, hr__cu_device device);
API hr__cu_result cuDeviceGetPCIBusId(char *id, int length, hr__cu_device device);
API hr__cu_result cuPointerGetAttribute(void *out, int attribute, hr__cu_ptr pointer);
API hr__cu_result cuPointerGetAttributes(unsigned int n, int *attributes, void **out, hr__cu_ptr pointer);
API hr__cu_result cuPointerSetAttribute(const void *value, int attribute, hr__cu_ptr pointer);
API hr__cu_result cuMemGetAddressRange_v2(hr__cu_ptr *base, size_t *bytes, hr__cu_ptr pointer);
API hr__cu_result cuMemHostGetDevicePointer_v2(hr__cu_ptr *out, void *host, unsigned int flags);
API hr__cu_result cuMemHostAlloc(void **memory, size_t bytes, unsigned int flags);
API hr__cu_result cuMemAllocHost_v2(void **memory, size_t bytes);
API hr__cu_result cuMemFreeHost(void *memory);
API hr__cu_result cuMemcpyHtoD_v2(hr__cu_ptr dst, const void *src, size_t bytes);
API hr__cu_result cuEventSynchronize(hr__cu_event event);
API hr__cu_result cuCtxGetStreamPriorityRange(int *least, int *greatest);
API hr__cu_result cuStreamCreateWithPriority(hr__cu_stream *stream, unsigned int flags, int priority);

/* A context of the library's own is the device's primary one: nothing here tells the two apart. */
hr__cu_result cuCtxCreate_v2(hr__cu_context *context, unsigned int flags, hr__cu_device device)
{
	int code = cuDevicePrimaryCtxRetain(context, device);

	(void)flags;
	return code ? code : cuCtxPushCurrent_v2(*context);
}

hr__cu_result cuCtxDestroy_v2(hr__cu_context context)
{
	const struct fake_context *c = context;
	hr__cu_context popped;
	int code = cuCtxPopCurrent_v2(&popped);

	return code ? code : cuDevicePrimaryCtxRelease_v2(c->device);
}

hr__cu_result cuCtxSetCurrent(hr__cu_context context)
{
	hr__cu_context popped;
	int code = fake_current() ? cuCtxPopCurrent_v2(&popped) : 0;

	return code || !context ? code : cuCtxPushCurrent_v2(context);
}

hr__cu_result cuCtxGetDevice(hr__cu_device *device)
{
	BEGIN(NEEDS_CONTEXT);
	*device = fake_current()->device;
	return fake_end(0);
}

hr__cu_result cuDeviceGetUuid_v2(char *uuid, hr__cu_device device)
{
	BEGIN(NEEDS_INIT);
	memset(uuid, 0, 16);
	memcpy(uuid, "look-alike", 10);
	uuid[15] = (char)(1 + device);
	return fake_end(0);
}

hr__cu_result cuDeviceGetUuid(char *uuid, hr__cu_device device)
{
	return cuDeviceGetUuid_v2(uuid, device);
}

hr__cu_result cuDeviceGetPCIBusId(char *id, int length, hr__cu_device device)
{
	BEGIN(NEEDS_INIT);
	snprintf(id, (size_t)length, "0000:%02x:00.0", 0x40 + device);
	return fake_end(0);
}

enum { /* CUpointer_attribute */
       CONTEXT = 1,
       MEMORY_TYPE = 2,
       DEVICE_POINTER = 3,
       HOST_POINTER = 4,
       SYNC_MEMOPS = 6,
       BUFFER_ID = 7,
       IS_MANAGED = 8,
       DEVICE_ORDINAL = 9,
       RANGE_START = 11,
       RANGE_BYTES = 12,
       IS_MAPPED = 13,
       TYPE_HOST = 1,
       TYPE_DEVICE = 2,
};

/* Under the lock. */
static int pointer_attribute(void *out, int attribute, hr__cu_ptr pointer)
{
	struct fake_block *block = fake_block_find(pointer, 1);
	struct fake_range *range = NULL;

	if (!block && fake_range_find((char *)(uintptr_t)pointer, 1, &range))
		return HR__CU_INVALID_VALUE;
	if (!block && !range)
		return HR__CU_INVALID_VALUE;
	switch (attribute) {
	case CONTEXT:
		memcpy(out, &(void *){block ? (void *)block->context : fake_current()}, sizeof(void *));
		return 0;
	case MEMORY_TYPE:
		memcpy(out, &(unsigned int){block ? TYPE_DEVICE : TYPE_HOST}, sizeof(unsigned int));
		return 0;
	case DEVICE_POINTER:
		memcpy(out, &pointer, sizeof(pointer));
		return 0;
	case HOST_POINTER:
		memcpy(out, &pointer, sizeof(pointer));
		return block ? HR__CU_INVALID_VALUE : 0;
	case BUFFER_ID:
		memcpy(out, block ? &(uint64_t){block->address >> 12} : &(uint64_t){(uintptr_t)range->base >> 12},
		       sizeof(uint64_t));
		return 0;
	case SYNC_MEMOPS:
	case IS_MANAGED:
		memcpy(out, &(unsigned int){0}, sizeof(unsigned int));
		return 0;
	case DEVICE_ORDINAL:
		memcpy(out, &(int){block ? block->context->device : 0}, sizeof(int));
		return 0;
	case RANGE_START:
		memcpy(out, block ? &(void *){(void *)(uintptr_t)block->address} : &(void *){range->base},
		       sizeof(void *));
		return 0;
	case RANGE_BYTES:
		memcpy(out, block ? &block->bytes : &range->bytes, sizeof(size_t));
		return 0;
	case IS_MAPPED:
		memcpy(out, &(unsigned int){1}, sizeof(unsigned int));
		return 0;
	default:
		return HR__CU_NOT_SUPPORTED;
	}
}

hr__cu_result cuPointerGetAttribute(void *out, int attribute, hr__cu_ptr pointer)
{
	BEGIN(NEEDS_INIT);
	return fake_end(pointer_attribute(out, attribute, pointer));
}

hr__cu_result cuPointerGetAttributes(unsigned int n, int *attributes, void **out, hr__cu_ptr pointer)
{
	BEGIN(NEEDS_INIT);
	for (unsigned int i = 0; i < n; i++)
		if (pointer_attribute(out[i], attributes[i], pointer)) /* as documented: 0, and no error */
			memset(out[i], 0, sizeof(int));
	return fake_end(0);
}

hr__cu_result cuPointerSetAttribute(const void *value, int attribute, hr__cu_ptr pointer)
{
	BEGIN(NEEDS_INIT);
	(void)value;
	return fake_end(attribute == SYNC_MEMOPS && fake_block_find(pointer, 1) ? 0 : HR__CU_INVALID_VALUE);
}

hr__cu_result cuMemGetAddressRange_v2(hr__cu_ptr *base, size_t *bytes, hr__cu_ptr pointer)
{
	struct fake_block *block;

	BEGIN(NEEDS_CONTEXT);
	block = fake_block_find(pointer, 1);
	if (!block || block->is_freed)
		return fake_end(HR__CU_NOT_FOUND);
	if (base)
		*base = block->address;
	if (bytes)
		*bytes = block->bytes;
	return fake_end(0);
}

hr__cu_result cuMemHostGetDevicePointer_v2(hr__cu_ptr *out, void *host, unsigned int flags)
{
	BEGIN(NEEDS_CONTEXT);
	(void)flags;
	*out = (hr__cu_ptr)(uintptr_t)host;
	return fake_end(0);
}

hr__cu_result cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
	BEGIN(NEEDS_CONTEXT);
	*least = *greatest = 0;
	return fake_end(0);
}

hr__cu_result cuStreamCreateWithPriority(hr__cu_stream *stream, unsigned int flags, int priority)
{
	(void)priority;
	return cuStreamCreate(stream, flags);
}

hr__cu_result cuMemHostAlloc(void **memory, size_t bytes, unsigned int flags)
{
	void *made = NULL;
	int code;

	(void)flags;
	if (posix_memalign(&made, 4096, bytes ? bytes : 1))
		return HR__CU_OUT_OF_MEMORY;
	code = cuMemHostRegister_v2(made, bytes, HR__CU_HOST_REGISTER_PORTABLE);
	if (code)
		free(made);
	else
		*memory = made;
	return code;
}

hr__cu_result cuMemAllocHost_v2(void **memory, size_t bytes)
{
	return cuMemHostAlloc(memory, bytes, 0);
}

hr__cu_result cuMemFreeHost(void *memory)
{
	int code = cuMemHostUnregister(memory);

	if (!code)
		free(memory);
	return code;
}

hr__cu_result cuMemcpyHtoD_v2(hr__cu_ptr dst, const void *src, size_t bytes)
{
	struct fake_block *block;

	BEGIN(NEEDS_CONTEXT | UNSAFE_IN_CAPTURE);
	block = fake_block_find(dst, bytes);
	if (!block || block->is_freed)
		return fake_end(HR__CU_INVALID_VALUE);
	memcpy(block->backing + (dst - block->address), src, bytes);
	return fake_end(0);
}

hr__cu_result cuEventSynchronize(hr__cu_event event)
{
	int code = cuEventQuery(event);

	while (code == HR__CU_NOT_READY) {
		pthread_mutex_lock(&fake_lock);
		fake_changed_wait();
		pthread_mutex_unlock(&fake_lock);
		code = cuEventQuery(event);
	}
	return code;
}

/* What libraries look for and have not been seen to call. */
#define NOT_SUPPORTED(name)                                                                                            \
	API hr__cu_result name(void);                                                                                  \
	hr__cu_result name(void)                                                                                       \
	{                                                                                                              \
		fprintf(stderr, "fake CUDA: %s is called, and there is no such function here\n", #name);               \
		return HR__CU_NOT_SUPPORTED;                                                                           \
	}
NOT_SUPPORTED(cuCtxEnablePeerAccess)
NOT_SUPPORTED(cuDeviceCanAccessPeer)
NOT_SUPPORTED(cuEventElapsedTime)
NOT_SUPPORTED(cuGetExportTable)
NOT_SUPPORTED(cuIpcCloseMemHandle)
NOT_SUPPORTED(cuIpcGetEventHandle)
NOT_SUPPORTED(cuIpcGetMemHandle)
NOT_SUPPORTED(cuIpcOpenEventHandle)
NOT_SUPPORTED(cuIpcOpenMemHandle_v2)
NOT_SUPPORTED(cuMemAllocManaged)
NOT_SUPPORTED(cuMemGetHandleForAddressRange)
NOT_SUPPORTED(cuMemcpy)
NOT_SUPPORTED(cuMemcpyAsync)
NOT_SUPPORTED(cuMemcpyPeer)
NOT_SUPPORTED(cuMemcpyPeerAsync)
NOT_SUPPORTED(cuMemsetD8Async)
NOT_SUPPORTED(cuMemsetD8_v2)
NOT_SUPPORTED(cuStreamWaitValue32)
NOT_SUPPORTED(cuStreamWaitValue32_v2)
NOT_SUPPORTED(cuStreamWriteValue32)
NOT_SUPPORTED(cuStreamWriteValue32_v2)
