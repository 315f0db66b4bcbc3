/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Our prototypes of cuFile against NVIDIA's cufile.h, where it is found: declaring a function twice compiles only if
 * both say the same. NVIDIA's types get our names, so that sizes need no comparing; those that we declare ourselves
 * are in abi_cufile_types.c.
 */
#include <cufile.h>

#undef cuFileDriverClose /* the header gives the older function the newer one's name */
CUfileError_t cuFileDriverClose(void);

#define HR__CF_TYPES_GIVEN
#define hr__cf_error CUfileError
#define hr__cf_descr CUfileDescr_t
#define hr__cf_props CUfileDrvProps
#define hr__cf_stats CUfileStatsLevel3
typedef CUfileHandle_t hr__cf_handle;

#include "engine/cufile_syms.h"

#define DECLARE(field, symbol, result, parameters, required) extern result symbol parameters;
HR__CF_SYMBOLS(DECLARE)
#undef DECLARE

_Static_assert(HR__CF_HANDLE_FD == (int)CU_FILE_HANDLE_TYPE_OPAQUE_FD, "type of handle");
_Static_assert(HR__CF_CONTROL_COMPAT == 1 << CU_FILE_ALLOW_COMPAT_MODE, "bit of compatibility mode");
_Static_assert(HR__CF_NOT_INITIALIZED == (int)CU_FILE_DRIVER_NOT_INITIALIZED, "5001");
_Static_assert(HR__CF_CUDA_DRIVER_ERROR == (int)CU_FILE_CUDA_DRIVER_ERROR, "5011");
_Static_assert(HR__CF_MAPPING_SIZE == (int)CU_FILE_INVALID_MAPPING_SIZE, "5016");
_Static_assert(HR__CF_DIO_NOT_SET == (int)CU_FILE_DIO_NOT_SET, "5020");
_Static_assert(HR__CF_INVALID_VALUE == (int)CU_FILE_INVALID_VALUE, "5022");
_Static_assert(HR__CF_MEMORY_ALREADY_REGISTERED == (int)CU_FILE_MEMORY_ALREADY_REGISTERED, "5023");
_Static_assert(HR__CF_HANDLE_NOT_REGISTERED == (int)CU_FILE_HANDLE_NOT_REGISTERED, "5027");
_Static_assert(HR__CF_HANDLE_ALREADY_REGISTERED == (int)CU_FILE_HANDLE_ALREADY_REGISTERED, "5028");
_Static_assert(HR__CF_INTERNAL_ERROR == (int)CU_FILE_INTERNAL_ERROR, "5030");
_Static_assert(HR__CF_PINNING_FAILED == (int)CU_FILE_GPU_MEMORY_PINNING_FAILED, "5036");

/* The version of the header that this is compiled with has one of the layouts that we know. */
#define IS_LAYOUT(gpus_at)                                                                                             \
	(offsetof(CUfileStatsLevel3_t, num_gpus) == (gpus_at) &&                                                       \
	 offsetof(CUfileStatsLevel3_t, per_gpu_stats) == (gpus_at) + 8) ||
_Static_assert(HR__CF_STATS_LAYOUTS(IS_LAYOUT) 0, "statistics");
_Static_assert(sizeof(CUfilePerGpuStats_t) == HR__CF_STATS_GPU_BYTES, "statistics of one GPU");
_Static_assert(offsetof(CUfilePerGpuStats_t, n_total_reads) == offsetof(struct hr__cf_gpu_stats, n_total_reads),
	       "reads");
_Static_assert(offsetof(CUfilePerGpuStats_t, n_posix_reads) == offsetof(struct hr__cf_gpu_stats, n_posix_reads),
	       "reads");
_Static_assert(sizeof(CUfileStatsLevel3_t) <= HR__CF_STATS_ROOM, "room");

int abi_cufile_sizes(size_t *sizes);
int abi_cufile_sizes(size_t *sizes)
{
	sizes[0] = sizeof(CUfileError_t);
	sizes[1] = sizeof(CUfileDescr_t);
	sizes[2] = sizeof(CUfileDrvProps_t);
	sizes[3] = offsetof(CUfileDescr_t, handle);
	sizes[4] = offsetof(CUfileDescr_t, fs_ops);
	sizes[5] = offsetof(CUfileDrvProps_t, nvfs.dcontrolflags);
	return 6;
}
