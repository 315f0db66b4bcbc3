/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The part of NVIDIA's cuFile library (GPUDirect Storage) that headrace calls, as its own prototypes: no header of
 * NVIDIA's is needed to build. The table is walked when the library is opened (cufile_driver.c), written once more by
 * the look-alike of the tests, and compared with the real cufile.h where that is found (tests/abi).
 *
 * X(field, symbol, result, parameters, required). A newer name of a function stands on a row of its own before the
 * older one: which of the two is used is decided after loading.
 */
#ifndef HR_ENGINE_CUFILE_SYMS_H
#define HR_ENGINE_CUFILE_SYMS_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* The test that compares all this with cufile.h gives NVIDIA's types these names instead. */
#ifndef HR__CF_TYPES_GIVEN
typedef void *hr__cf_handle; /* CUfileHandle_t */

/* CUfileError_t: returned by value, in one register. */
struct hr__cf_error {
	int err;    /* CUfileOpError */
	int cu_err; /* CUresult, if err is HR__CF_CUDA_DRIVER_ERROR */
};

struct hr__cf_stats; /* CUfileStatsLevel3_t; see below */

/* CUfileDescr_t */
struct hr__cf_descr {
	int type;
	union {
		int fd;
		void *handle;
	} handle;
	const void *fs_ops;
};

/* CUfileDrvProps_t */
struct hr__cf_props {
	struct {
		unsigned int major_version, minor_version;
		size_t poll_thresh_size, max_direct_io_size;
		unsigned int dstatusflags, dcontrolflags;
	} nvfs;
	unsigned int fflags;
	unsigned int max_device_cache_size, per_buffer_cache_size, max_device_pinned_mem_size;
	unsigned int max_batch_io_size, max_batch_io_timeout_msecs;
};
#endif

/* CUfileStatsLevel3_t, as far as it is looked at: how many GPUs there are, 8 bytes on the first one's record of how its
 * reads went, and further ones. What stands before grew between versions; X(where the number of GPUs is). The library
 * writes as many records as it has GPUs, or room for all, so that the size tells which version it is. */
#define HR__CF_STATS_LAYOUTS(X)                                                                                        \
	X(1024) /* 1.15 */                                                                                             \
	X(1136) /* 1.19 */
#define HR__CF_STATS_ROOM      16384
#define HR__CF_STATS_GPU_BYTES 248
#define HR__CF_STATS_MAX_GPUS  16
struct hr__cf_gpu_stats {
	char uuid[16];
	uint64_t read_bytes, read_bw_bytes_per_sec, read_utilization, read_duration_us;
	uint64_t n_total_reads, n_p2p_reads, n_nvfs_reads, n_posix_reads;
};

enum {
	HR__CF_HANDLE_FD = 1,
	HR__CF_CONTROL_COMPAT = 1 << 1, /* of dcontrolflags: compatibility mode is allowed */
	HR__CF_STATS_LEVEL = 3,
};

/* CUfileOpError: X(name, number, what it means). */
#define HR__CF_ERRORS(X)                                                                                               \
	X(NOT_INITIALIZED, 5001, "nvidia-fs is not loaded")                                                            \
	X(INVALID_PROPS, 5002, "invalid property")                                                                     \
	X(UNSUPPORTED_LIMIT, 5003, "property out of range")                                                            \
	X(VERSION_MISMATCH, 5004, "nvidia-fs has another version")                                                     \
	X(VERSION_READ_ERROR, 5005, "the version of nvidia-fs cannot be read")                                         \
	X(CLOSING, 5006, "the driver is being closed")                                                                 \
	X(PLATFORM_NOT_SUPPORTED, 5007, "this platform is not supported")                                              \
	X(IO_NOT_SUPPORTED, 5008, "this file is not supported")                                                        \
	X(DEVICE_NOT_SUPPORTED, 5009, "this GPU is not supported")                                                     \
	X(NVFS_DRIVER_ERROR, 5010, "nvidia-fs refused a call")                                                         \
	X(CUDA_DRIVER_ERROR, 5011, "the CUDA driver refused a call")                                                   \
	X(POINTER_INVALID, 5012, "invalid device pointer")                                                             \
	X(MEMORY_TYPE_INVALID, 5013, "memory of the wrong kind")                                                       \
	X(POINTER_RANGE_ERROR, 5014, "beyond the end of an allocation")                                                \
	X(CONTEXT_MISMATCH, 5015, "another CUDA context is current")                                                   \
	X(MAPPING_SIZE, 5016, "more than the largest size that can be pinned")                                         \
	X(MAPPING_RANGE, 5017, "beyond what is registered")                                                            \
	X(INVALID_FILE_TYPE, 5018, "this kind of file is not supported")                                               \
	X(INVALID_OPEN_FLAG, 5019, "the file is open in an unsupported way")                                           \
	X(DIO_NOT_SET, 5020, "the file is not open for direct I/O")                                                    \
	X(INVALID_VALUE, 5022, "invalid argument")                                                                     \
	X(MEMORY_ALREADY_REGISTERED, 5023, "the memory is registered already")                                         \
	X(MEMORY_NOT_REGISTERED, 5024, "the memory is not registered, or in use")                                      \
	X(PERMISSION_DENIED, 5025, "no permission for the driver or the file")                                         \
	X(ALREADY_OPEN, 5026, "the driver is open already")                                                            \
	X(HANDLE_NOT_REGISTERED, 5027, "this file or file system is not supported")                                    \
	X(HANDLE_ALREADY_REGISTERED, 5028, "the descriptor is registered already")                                     \
	X(DEVICE_NOT_FOUND, 5029, "no such GPU")                                                                       \
	X(INTERNAL_ERROR, 5030, "internal error")                                                                      \
	X(GETNEWFD_FAILED, 5031, "no new descriptor")                                                                  \
	X(NVFS_SETUP_ERROR, 5033, "the library could not be set up")                                                   \
	X(IO_DISABLED, 5034, "disabled by configuration for this file")                                                \
	X(BATCH_SUBMIT_FAILED, 5035, "a batch could not be submitted")                                                 \
	X(PINNING_FAILED, 5036, "GPU memory could not be pinned")                                                      \
	X(BATCH_FULL, 5037, "the batch queue is full")                                                                 \
	X(ASYNC_NOT_SUPPORTED, 5038, "stream operations are not supported")                                            \
	X(NOMEM_ERROR, 5043, "the library is out of memory")                                                           \
	X(IO_ERROR, 5044, "input/output error")                                                                        \
	X(BUF_REGISTER_ERROR, 5045, "memory could not be registered")                                                  \
	X(INVALID_CONTEXT_ERROR, 5047, "invalid CUDA context")                                                         \
	X(NVFS_INTERNAL_ERROR, 5048, "internal error of nvidia-fs")                                                    \
	X(NOCOMPAT_ERROR, 5049, "compatibility mode is off")

enum {
	HR__CF_SUCCESS = 0,
#define HR__CF_ENUM(name, number, text) HR__CF_##name = (number),
	HR__CF_ERRORS(HR__CF_ENUM)
#undef HR__CF_ENUM
};

/* Not formatted by tool, which takes the stars for multiplications. */
/* clang-format off */
#define HR__CF_SYMBOLS(X)                                                                                              \
	X(cuFileDriverOpen, cuFileDriverOpen, struct hr__cf_error, (void), 1)                                          \
	X(cuFileDriverClose_v2, cuFileDriverClose_v2, struct hr__cf_error, (void), 0)                                  \
	X(cuFileDriverClose, cuFileDriverClose, struct hr__cf_error, (void), 1)                                        \
	X(cuFileHandleRegister, cuFileHandleRegister, struct hr__cf_error,                                             \
	  (hr__cf_handle *handle, struct hr__cf_descr *descr), 1)                                                      \
	X(cuFileHandleDeregister, cuFileHandleDeregister, void, (hr__cf_handle handle), 1)                             \
	X(cuFileBufRegister, cuFileBufRegister, struct hr__cf_error, (const void *base, size_t bytes, int flags), 1)   \
	X(cuFileBufDeregister, cuFileBufDeregister, struct hr__cf_error, (const void *base), 1)                        \
	X(cuFileRead, cuFileRead, ssize_t,                                                                             \
	  (hr__cf_handle handle, void *base, size_t bytes, off_t file_offset, off_t base_offset), 1)                   \
	X(cuFileDriverGetProperties, cuFileDriverGetProperties, struct hr__cf_error, (struct hr__cf_props *props), 1)  \
	X(cuFileUseCount, cuFileUseCount, long, (void), 0)                                                             \
	X(cuFileGetVersion, cuFileGetVersion, struct hr__cf_error, (int *version), 0)                                  \
	X(cuFileGetBARSizeInKB, cuFileGetBARSizeInKB, struct hr__cf_error, (int gpu, size_t *kib), 0)                  \
	X(cuFileSetStatsLevel, cuFileSetStatsLevel, struct hr__cf_error, (int level), 0)                               \
	X(cuFileStatsStart, cuFileStatsStart, struct hr__cf_error, (void), 0)                                          \
	X(cuFileGetStatsL3, cuFileGetStatsL3, struct hr__cf_error, (struct hr__cf_stats *stats), 0)
/* clang-format on */

struct hr__cf_api {
#define HR__CF_FIELD(field, symbol, result, parameters, required) result(*field) parameters;
	HR__CF_SYMBOLS(HR__CF_FIELD)
#undef HR__CF_FIELD
};

#endif
