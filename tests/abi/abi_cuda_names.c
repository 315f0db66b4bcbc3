/* SPDX-License-Identifier: Apache-2.0 */
/*
 * headrace's own prototypes of the CUDA driver, compared with cuda.h. Compiled only where that header is found.
 *
 * The table of cuda_syms.h is read with NVIDIA's types under our names, and each of its functions is declared once
 * more: the compiler refuses a declaration that differs from the one in cuda.h. What is left for run time are the
 * names: cuda.h says by macros which symbol a plain name stands for (cuMemAlloc is cuMemAlloc_v2), and that must be
 * the one in the table.
 */
#include <cuda.h>

typedef CUresult hr__cu_result;
typedef CUdevice hr__cu_device;
typedef CUdevice_attribute hr__cu_attribute;
typedef CUmemPool_attribute hr__cu_pool_attribute;
typedef CUstreamCaptureMode hr__cu_capture_mode;
typedef CUstreamCaptureStatus hr__cu_capture_status;
typedef CUdriverProcAddressQueryResult hr__cu_search_status;
typedef CUdeviceptr hr__cu_ptr;
typedef CUcontext hr__cu_context;
typedef CUstream hr__cu_stream;
typedef CUevent hr__cu_event;
typedef CUmemoryPool hr__cu_pool;
#define hr__cu_location        CUmemLocation_st
#define hr__cu_pool_props      CUmemPoolProps_st
#define hr__cu_copy_attributes CUmemcpyAttributes_st
#define HR__CU_TYPES_GIVEN
#include "device/cuda_syms.h"

#include <stdio.h>
#include <string.h>

#define DECLARE(field, symbol, parameters, required) hr__cu_result CUDAAPI symbol parameters;
HR__CU_SYMBOLS(DECLARE)
#if CUDA_VERSION >= 13000
hr__cu_result CUDAAPI cuMemcpyBatchAsync_v2 HR__CU_BATCH_V2_PARAMETERS;
#elif CUDA_VERSION >= 12080
hr__cu_result CUDAAPI cuMemcpyBatchAsync HR__CU_BATCH_V1_PARAMETERS;
#endif

#define TEXT_OF(name) #name
#define TEXT(name)    TEXT_OF(name)

static const struct {
	const char *name, *theirs, *ours;
} functions[] = {
/* cuda.h may make another name of a symbol too, so the symbol is taken as it is written. */
#define ROW(field, symbol, parameters, required) {#field, TEXT(field), #symbol},
	HR__CU_SYMBOLS(ROW)};

int main(void)
{
	int failures = 0;

	for (size_t i = 0; i < sizeof(functions) / sizeof(functions[0]); i++) {
		if (strcmp(functions[i].theirs, functions[i].ours) == 0)
			continue;
		printf("%s is %s in cuda.h, %s in the table\n", functions[i].name, functions[i].theirs,
		       functions[i].ours);
		failures++;
	}
	return failures != 0;
}
