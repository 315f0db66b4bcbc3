/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Our prototypes of uGDS against its ugds.h, where that is found: declaring a function twice compiles only if both say
 * the same. Its types get our names; those that we declare ourselves are in abi_ugds_types.c.
 */
#include <ugds.h>

#define HR__UG_TYPES_GIVEN
#define hr__ug_error uGDSError
#define hr__ug_descr uGDSDescr_t
typedef uGDSHandle_t hr__ug_handle;

#include "engine/ugds_syms.h"

#define DECLARE(name, result, parameters) extern result name parameters;
HR__UG_SYMBOLS(DECLARE)
#undef DECLARE

_Static_assert(HR__UG_HANDLE_FD == (int)UGDS_HANDLE_TYPE_OPAQUE_FD, "type of handle");
_Static_assert(HR__UG_DRIVER_NOT_INITIALIZED == (int)UGDS_DRIVER_NOT_INITIALIZED, "5001");
_Static_assert(HR__UG_CUDA_DRIVER_ERROR == (int)UGDS_CUDA_DRIVER_ERROR, "5011");
_Static_assert(HR__UG_INVALID_MAPPING_SIZE == (int)UGDS_INVALID_MAPPING_SIZE, "5016");
_Static_assert(HR__UG_INVALID_VALUE == (int)UGDS_INVALID_VALUE, "5022");
_Static_assert(HR__UG_MEMORY_ALREADY_REGISTERED == (int)UGDS_MEMORY_ALREADY_REGISTERED, "5023");
_Static_assert(HR__UG_HANDLE_NOT_REGISTERED == (int)UGDS_HANDLE_NOT_REGISTERED, "5027");
_Static_assert(HR__UG_INTERNAL_ERROR == (int)UGDS_INTERNAL_ERROR, "5030");
_Static_assert(HR__UG_GPU_MEMORY_PINNING_FAILED == (int)UGDS_GPU_MEMORY_PINNING_FAILED, "5036");
_Static_assert(HR__UG_BUSY == (int)UGDS_BUSY, "5042");
_Static_assert(HR__UG_OUT_OF_MEMORY == (int)UGDS_OUT_OF_MEMORY, "5043");

int abi_ugds_sizes(size_t *sizes);
int abi_ugds_sizes(size_t *sizes)
{
	sizes[0] = sizeof(uGDSError_t);
	sizes[1] = sizeof(uGDSDescr_t);
	sizes[2] = offsetof(uGDSDescr_t, handle);
	sizes[3] = offsetof(uGDSError_t, cu_err);
	return 4;
}
