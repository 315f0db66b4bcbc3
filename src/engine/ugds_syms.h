/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The part of the uGDS library (raw NVMe reads into GPU memory, by a driver of its own) that headrace calls, as its own
 * prototypes: no header of its is needed to build. The table is walked when the library is opened (ugds_driver.c),
 * written once more by the look-alike of the tests, and compared with the real ugds.h where that is found (tests/abi).
 *
 * X(name, result, parameters). All of them are needed.
 */
#ifndef HR_ENGINE_UGDS_SYMS_H
#define HR_ENGINE_UGDS_SYMS_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* The test that compares all this with ugds.h gives its types these names instead. */
#ifndef HR__UG_TYPES_GIVEN
typedef void *hr__ug_handle; /* uGDSHandle_t */

/* uGDSError_t: returned by value, in one register. */
struct hr__ug_error {
	int err;    /* uGDSOpError */
	int cu_err; /* CUresult, where that is the cause */
};

/* uGDSDescr_t */
struct hr__ug_descr {
	int type;
	union {
		int fd;
		void *handle;
	} handle;
};
#endif

enum {
	HR__UG_HANDLE_FD = 1,
};

/* uGDSOpError: X(name, number, what it means). */
#define HR__UG_ERRORS(X)                                                                                               \
	X(DRIVER_NOT_INITIALIZED, 5001, "the driver is not open, or has no disk yet")                                  \
	X(DRIVER_INVALID_PROPS, 5002, "invalid property")                                                              \
	X(DRIVER_UNSUPPORTED_LIMIT, 5003, "property out of range")                                                     \
	X(DRIVER_VERSION_MISMATCH, 5004, "the driver has another version")                                             \
	X(DRIVER_VERSION_READ_ERROR, 5005, "the driver's version cannot be read")                                      \
	X(DRIVER_CLOSING, 5006, "the driver is being closed")                                                          \
	X(PLATFORM_NOT_SUPPORTED, 5007, "this platform is not supported")                                              \
	X(IO_NOT_SUPPORTED, 5008, "this access is not supported")                                                      \
	X(DEVICE_NOT_SUPPORTED, 5009, "this GPU or disk is not supported")                                             \
	X(NVFS_DRIVER_ERROR, 5010, "the kernel module refused a call")                                                 \
	X(CUDA_DRIVER_ERROR, 5011, "the CUDA driver refused a call")                                                   \
	X(CUDA_POINTER_INVALID, 5012, "invalid device pointer")                                                        \
	X(CUDA_MEMORY_TYPE_INVALID, 5013, "memory of the wrong kind")                                                  \
	X(CUDA_POINTER_RANGE_ERROR, 5014, "beyond the end of an allocation")                                           \
	X(CUDA_CONTEXT_MISMATCH, 5015, "another CUDA context is current")                                              \
	X(INVALID_MAPPING_SIZE, 5016, "this size cannot be mapped")                                                    \
	X(INVALID_MAPPING_RANGE, 5017, "beyond what is mapped")                                                        \
	X(INVALID_FILE_TYPE, 5018, "the node is not one of the driver's")                                              \
	X(INVALID_FILE_OPEN_FLAG, 5019, "the node is open in an unsupported way")                                      \
	X(DIO_NOT_SET, 5020, "the file is not open for direct access")                                                 \
	X(INVALID_VALUE, 5022, "invalid argument")                                                                     \
	X(MEMORY_ALREADY_REGISTERED, 5023, "the memory is registered already")                                         \
	X(MEMORY_NOT_REGISTERED, 5024, "the memory is not registered")                                                 \
	X(PERMISSION_DENIED, 5025, "no permission for the driver")                                                     \
	X(DRIVER_ALREADY_OPEN, 5026, "the driver is open already")                                                     \
	X(HANDLE_NOT_REGISTERED, 5027, "the handle is not registered")                                                 \
	X(HANDLE_ALREADY_REGISTERED, 5028, "the node is registered already")                                           \
	X(DEVICE_NOT_FOUND, 5029, "no such device")                                                                    \
	X(INTERNAL_ERROR, 5030, "internal error")                                                                      \
	X(GETNEWFD_FAILED, 5031, "no new descriptor")                                                                  \
	X(NVFS_SETUP_ERROR, 5033, "the driver could not be set up")                                                    \
	X(IO_DISABLED, 5034, "reads are disabled")                                                                     \
	X(GPU_MEMORY_PINNING_FAILED, 5036, "GPU memory could not be pinned")                                           \
	X(BATCH_CAPACITY_EXCEEDED, 5040, "more than a batch holds")                                                    \
	X(RDMA_MR_STILL_ACTIVE, 5041, "memory is still shown to the network")                                          \
	X(BUSY, 5042, "something is still in motion")                                                                  \
	X(OUT_OF_MEMORY, 5043, "the library is out of memory")

enum {
	HR__UG_SUCCESS = 0,
#define HR__UG_ENUM(name, number, text) HR__UG_##name = (number),
	HR__UG_ERRORS(HR__UG_ENUM)
#undef HR__UG_ENUM
};

/* Not formatted by tool, which takes the stars for multiplications. */
/* clang-format off */
#define HR__UG_SYMBOLS(X)                                                                                              \
	X(uGDSDriverOpen, struct hr__ug_error, (void))                                                                 \
	X(uGDSDriverClose, struct hr__ug_error, (void))                                                                \
	X(uGDSHandleRegister, struct hr__ug_error, (hr__ug_handle *handle, struct hr__ug_descr *descr))                \
	X(uGDSHandleDeregisterEx, struct hr__ug_error, (hr__ug_handle handle, int timeout_s))                          \
	X(uGDSGetDeviceCapacity, struct hr__ug_error, (hr__ug_handle handle, uint64_t *bytes))                         \
	X(uGDSBufRegister, struct hr__ug_error, (const void *base, size_t bytes, int flags))                           \
	X(uGDSBufDeregister, struct hr__ug_error, (const void *base))                                                  \
	X(uGDSRead, ssize_t,                                                                                           \
	  (hr__ug_handle handle, void *base, size_t bytes, off_t disk_offset, off_t base_offset))
/* clang-format on */

struct hr__ug_api {
#define HR__UG_FIELD(name, result, parameters) result(*name) parameters;
	HR__UG_SYMBOLS(HR__UG_FIELD)
#undef HR__UG_FIELD
};

#endif
