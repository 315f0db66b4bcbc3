/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file headrace.h
 * @brief headrace: safetensors weights from where they rest to where they are used.
 *
 * headrace opens a checkpoint (a file, a directory of shards, an index), checks every header before the
 * first byte of data moves, and then delivers tensors into host or GPU memory at the speed of the slower
 * of storage and link, through one small pool of staging memory that never grows.
 *
 * A whole program, less its error checks:
 *
 *     hr_model *model;   hr_device *device;   hr_loader *loader;   hr_buffer *buffer;   uint64_t t;
 *     hr_model_open("Llama-3.1-8B", NULL, &model);
 *     hr_device_open("cuda:0", &device);
 *     hr_loader_open(device, NULL, &loader);
 *     hr_model_find(model, "lm_head.weight", HR_STRLEN, &t);
 *     hr_get(loader, model, t, &buffer);              // hr_buffer_data(buffer) is device memory
 *     hr_buffer_release(buffer);
 *     hr_loader_close(loader, HR_FOREVER);
 *     hr_device_close(device);   hr_model_close(model);
 *
 * Read in the order of this file: errors, model, device, loader, job, buffer, feed, cache, store, and what
 * tells you what happened (statistics, plan, probe).
 *
 * Caveats, before anything else:
 *  - A **job** writes into memory that you own until it has *settled*. A wait that expires
 *    (HR_E_PENDING) ends the wait, not the ownership: free the memory only after hr_job_wait() gave
 *    another answer or hr_job_close() gave 0.
 *  - After fork(), a child may go on reading models. Loaders, devices, jobs, feeds, caches and buffers belong
 *    to the parent: every call with one of them answers HR_E_FORKED in the child, and frees nothing.
 *  - Handles are not closed behind your back: nothing runs when the library is loaded, nothing at exit.
 *  - A file that is changed while it is read makes the call fail with HR_E_CHANGED. Replace checkpoints
 *    by writing a new directory, not by writing into an old one.
 *
 * Conventions: every function that can fail returns 0 or a negative HR_E_* code, and hr_error_last() has
 * the whole story. Constructors fill an out-parameter, which is NULL after a failure. Every close, free
 * and release takes NULL. Options are structs whose first field is their size: set them up with the
 * matching *_INIT macro and leave at zero what you do not care for; NULL means all defaults. Byte counts
 * are called x_bytes, times x_ms or x_ns.
 */
#ifndef HEADRACE_H
#define HEADRACE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/** @def HR_API
 * Marks what the library exports. */
#if defined(__GNUC__)
#define HR_API __attribute__((visibility("default")))
#else
#define HR_API
#endif

/** Version of this header: major. hr_version() has that of the library. */
#define HR_VERSION_MAJOR 0
/** Minor. */
#define HR_VERSION_MINOR 1
/** Patch level. */
#define HR_VERSION_PATCH 0

/** Version of the library that is linked, e.g. "0.1.0" (the macros give that of the header). */
HR_API const char *hr_version(void);

/** As a name length: "use strlen()". */
#define HR_STRLEN SIZE_MAX
/** As a byte position: "none". */
#define HR_NO_OFFSET UINT64_MAX
/** As a time-out in milliseconds: "however long it takes". 0 asks once and does not wait. */
#define HR_FOREVER UINT32_MAX

/* ------------------------------------------------------------------------------------------------ errors */

/**
 * All error codes: X(name, number, what it means). Numbers are stable, the same on every system, and
 * never used again for something else. The system's or driver's own code is hr_error.system.
 */
#define HR_ERROR_CODES(X)                                                                                    \
	X(HR_E_NOMEM, -1, "out of host memory")                                                              \
	X(HR_E_OPTS, -2, "an argument or option is not valid")                                               \
	X(HR_E_IO, -3, "a system call failed")                                                               \
	X(HR_E_NOTFOUND, -4, "no such file, model, tensor or device")                                        \
	X(HR_E_CHANGED, -5, "the file was changed while it was in use")                                      \
	X(HR_E_PENDING, -6, "not finished yet; the wait expired")                                            \
	X(HR_E_TIMEDOUT, -7, "storage did not answer within the job's I/O deadline")                         \
	X(HR_E_CANCELLED, -8, "cancelled by the caller")                                                     \
	X(HR_E_BUSY, -9, "work is in flight; nothing was closed")                                            \
	X(HR_E_FORKED, -10, "the handle belongs to the parent process")                                      \
	X(HR_E_END, -11, "the feed has handed out its last tensor")                                          \
	X(HR_E_UNSUPPORTED, -12, "not possible on this system")                                              \
	X(HR_E_DEVICE, -13, "the device's driver reported a failure")                                        \
	X(HR_E_DEVICE_MEMORY, -14, "out of device memory")                                                   \
	X(HR_E_SHORT, -15, "the storage returned fewer bytes than the file has")                             \
	X(HR_E_LOST, -16, "no staging memory is left: reads never came back")                                \
	X(HR_E_SPACE, -17, "the destination is too small")                                                   \
	X(HR_E_DIGEST, -18, "the bytes do not have the expected digest")                                     \
	X(HR_E_SMALL, -32, "the file is too small to be safetensors")                                        \
	X(HR_E_HEADER_LARGE, -33, "the header length is above the limit of 100,000,000 bytes")               \
	X(HR_E_HEADER_LENGTH, -34, "the header does not fit into the file")                                  \
	X(HR_E_UTF8, -35, "the header or index is not UTF-8")                                                \
	X(HR_E_JSON, -36, "the header or index is not JSON")                                                 \
	X(HR_E_TYPE, -37, "a value has the wrong JSON type")                                                 \
	X(HR_E_FIELD, -38, "a field is missing")                                                             \
	X(HR_E_DUPLICATE, -39, "a name occurs twice")                                                        \
	X(HR_E_DTYPE, -40, "the dtype is not known")                                                         \
	X(HR_E_OVERFLOW, -41, "a size does not fit into 64 bits")                                            \
	X(HR_E_OFFSET, -42, "the tensors' ranges do not follow one another")                                 \
	X(HR_E_SIZE, -43, "a range does not have the size of dtype and shape")                               \
	X(HR_E_SUBBYTE, -44, "a tensor of a sub-byte dtype does not fill whole bytes")                       \
	X(HR_E_COVER, -45, "the tensors do not cover the file exactly")                                      \
	X(HR_E_LIMIT, -46, "a limit that keeps hostile files harmless is exceeded")                          \
	X(HR_E_PATH, -47, "a shard name is not a plain file name")                                           \
	X(HR_E_INDEX, -48, "the index does not agree with its shards")                                       \
	X(HR_E_AMBIGUOUS, -49, "more than one model could be meant")                                         \
	X(HR_E_FULL, -64, "all of the cache's budget is in use")                                             \
	X(HR_E_BUDGET, -65, "the group is larger than the cache's budget")                                   \
	X(HR_E_NOT_A_STORE, -80, "there is no store here")                                                   \
	X(HR_E_STORE_VERSION, -81, "the store is of a format that this version does not know")               \
	X(HR_E_REGION_CHANGED, -82, "the region under the store was swapped, replaced or cut")               \
	X(HR_E_GEOMETRY, -83, "the region is smaller or has other sectors than the store")                   \
	X(HR_E_IDENTITY, -84, "the store is on another device than it was made on")                          \
	X(HR_E_CORRUPT, -85, "the store's records are damaged")                                              \
	X(HR_E_DIVERGED, -86, "two different records claim one generation")                                  \
	X(HR_E_STALE, -87, "the generation is no longer kept")                                               \
	X(HR_E_PIN, -88, "the store is not the one that was expected")                                       \
	X(HR_E_NOSPACE, -89, "the store is full")                                                            \
	X(HR_E_FRAGMENTED, -90, "no gap in the store is large enough")                                       \
	X(HR_E_COMMIT_UNKNOWN, -91, "a commit was interrupted by an error; opening the store again decides") \
	X(HR_E_POISONED, -92, "an earlier write failed; open the store again")                               \
	X(HR_E_LOCKED, -93, "somebody else writes to the store or holds the device")                         \
	X(HR_E_FOREIGN, -94, "the region holds something else")                                              \
	X(HR_E_EXISTS, -95, "there is one of that name already")                                     \
	X(HR_E_GDS, -112, "the library for reads straight into GPU memory reported a failure")               \
	X(HR_E_FALLBACK, -113, "reads that were to go straight into GPU memory went through host memory")

/** Error codes; HR_OK is success. */
enum hr_error_code {
	HR_OK = 0,
#define HR__ENUM(name, number, text) name = (number), /**< one row of the table above */
	HR_ERROR_CODES(HR__ENUM)
#undef HR__ENUM
};

/** What went wrong, as far as it is known. Strings are never NULL; an empty one means "does not apply". */
struct hr_error {
	int32_t code;        /**< HR_E_* */
	int32_t system;      /**< errno, or the driver's code with HR_E_DEVICE*; 0 if there is none */
	uint64_t offset;     /**< byte position in `path`, or HR_NO_OFFSET */
	const char *stage;   /**< "open", "header", "index", "plan", "read", "copy", "device" ... */
	const char *path;    /**< file */
	const char *tensor;  /**< tensor name, with control bytes escaped */
	const char *message; /**< one sentence with the values and what to do; no trailing newline */
};

/**
 * The calling thread's last error. It holds until the same thread's next failing call. Never NULL; its
 * code is HR_OK if nothing has failed yet. Threads: each has its own.
 */
HR_API const struct hr_error *hr_error_last(void);

/** What a code means, in general ("out of host memory"). Never NULL. */
HR_API const char *hr_strerror(int code);
/** A code's name ("HR_E_NOMEM"). Never NULL. */
HR_API const char *hr_error_name(int code);

/* ------------------------------------------------------------------------------------------------- model */

/** A named set of tensors opened for reading; immutable, counted, shared freely between threads. */
typedef struct hr_model hr_model;

/** All dtypes of safetensors 0.8: X(name, number, bits of one element). */
#define HR_DTYPES(X)                                                                                         \
	X(BOOL, 1, 8) X(U8, 2, 8) X(I8, 3, 8) X(U16, 4, 16) X(I16, 5, 16) X(U32, 6, 32) X(I32, 7, 32)        \
	X(U64, 8, 64) X(I64, 9, 64) X(F16, 10, 16) X(BF16, 11, 16) X(F32, 12, 32) X(F64, 13, 64)             \
	X(C64, 14, 64) X(F8_E5M2, 15, 8) X(F8_E4M3, 16, 8) X(F8_E8M0, 17, 8) X(F8_E4M3FNUZ, 18, 8)           \
	X(F8_E5M2FNUZ, 19, 8) X(F6_E2M3, 20, 6) X(F6_E3M2, 21, 6) X(F4, 22, 4)

/** Element types (HR_DTYPE_F32 ...). Numbers are stable. */
enum hr_dtype {
#define HR__ENUM(name, number, bits) HR_DTYPE_##name = (number), /**< one row of the table above */
	HR_DTYPES(HR__ENUM)
#undef HR__ENUM
};

/** A dtype's name as the format spells it ("BF16"), or "?" for a number that is none. */
HR_API const char *hr_dtype_name(uint32_t dtype);
/** Bits of one element, or 0. */
HR_API uint32_t hr_dtype_bits(uint32_t dtype);

/** hr_model_opts.flags: refuse symbolic links (shards in a Hugging Face cache are such links). */
#define HR_MODEL_NO_SYMLINKS 1u
/** hr_model_opts.flags: a model in a store may be on another device than the store was made on (a copy, say). */
#define HR_MODEL_MOVED 2u

/** How to open a model. */
struct hr_model_opts {
	size_t size;    /**< HR_MODEL_OPTS_INIT sets it */
	uint32_t flags; /**< HR_MODEL_* */
	/** Path of a manifest that hr_store_export() wrote, or NULL: the store must be that one and the generation the
	 * one described, or HR_E_PIN or HR_E_STALE. Only for what is in a store. */
	const char *expect;
	/** The node of a disk that uGDS has taken from the kernel ("/dev/ugds_drv0"), or NULL. A store in it is
	 * opened by its exported manifest ("store:FILE.json#MODEL"), and everything is read and checked through
	 * uGDS, into a piece of the first GPU's memory. One disk, and one process, at a time. docs/gds.md. */
	const char *ugds;
};
/** Start value of a struct hr_model_opts: its size, all else zero. */
#define HR_MODEL_OPTS_INIT {sizeof(struct hr_model_opts)}

/**
 * Opens a model by name: a directory, an index ("….safetensors.index.json"), one file, or a model in a store:
 * "store:PATH#MODEL", with "@41" behind it for that generation, "/FILE" for one of its files, and the path of an
 * exported manifest ("….json") in place of the store's for the very generation that it describes.
 *
 * A directory must make clear what it holds: one index, or one *.safetensors file. Otherwise the answer
 * is HR_E_AMBIGUOUS with the candidates. An index decides between copies of a tensor in several shards;
 * it does not filter: a tensor of a listed shard that it does not name belongs to the model, flagged
 * HR_TENSOR_UNLISTED and warned of.
 *
 * All headers are read and checked here, and nothing else: no byte of tensor data. Cost and memory are linear in
 * header bytes. Sixteen shards and more are read by up to 8 threads, which end before the call does. Ownership: *out
 * is the caller's; close it. Blocks: on header reads. Errors: HR_E_NOTFOUND, HR_E_IO, HR_E_SMALL … HR_E_AMBIGUOUS,
 * HR_E_NOMEM, HR_E_OPTS.
 */
HR_API int hr_model_open(const char *name, const struct hr_model_opts *opts, hr_model **out);

/** As hr_model_open(), for a list of files that form one model. No name may occur in two of them. */
HR_API int hr_model_open_files(const char *const *paths, size_t n_paths, const struct hr_model_opts *opts,
			       hr_model **out);

/** One more owner of the same model. Returns its argument. Threads: any. */
HR_API hr_model *hr_model_acquire(hr_model *model);
/** Drops the caller's reference. Jobs, feeds and caches hold their own. */
HR_API void hr_model_close(hr_model *model);

/** hr_tensor.flags: the index names this tensor's shard, but not this tensor. */
#define HR_TENSOR_UNLISTED 1u

/** A tensor, as its shard's header describes it. Pointers live as long as the model. */
struct hr_tensor {
	size_t size;          /**< HR_TENSOR_INIT sets it */
	const char *name;     /**< UTF-8, not NUL-terminated as such: a name may hold any byte, NUL included */
	size_t name_len;      /**< bytes */
	const uint64_t *dims; /**< `rank` of them; element order is row-major */
	uint64_t index;       /**< the tensor's number in this model */
	uint64_t bytes;       /**< payload */
	uint64_t offset;      /**< of the first byte, absolute in the shard */
	uint32_t shard;       /**< number of its shard */
	uint32_t dtype;       /**< HR_DTYPE_* */
	uint32_t rank;        /**< 0 for a scalar */
	uint32_t flags;       /**< HR_TENSOR_* */
};
/** Start value of a struct hr_tensor: its size, all else zero. */
#define HR_TENSOR_INIT {sizeof(struct hr_tensor)}

/** How many tensors. They are numbered in file order: by shard, then by offset. */
HR_API uint64_t hr_model_n_tensors(const hr_model *model);
/** Describes one tensor. Errors: HR_E_OPTS for a number out of range. */
HR_API int hr_model_tensor(const hr_model *model, uint64_t index, struct hr_tensor *out);
/** Finds a tensor by name. Errors: HR_E_NOTFOUND. Threads: any. */
HR_API int hr_model_find(const hr_model *model, const char *name, size_t name_len, uint64_t *index);

/** A shard. Pointers live as long as the model. */
struct hr_shard {
	size_t size;          /**< HR_SHARD_INIT sets it */
	const char *path;     /**< as opened */
	uint64_t bytes;       /**< whole file */
	uint64_t data_offset; /**< where the header ends and data begins */
	uint64_t n_tensors;   /**< that its header lists, those that another shard overrides included */
	uint64_t n_metadata;  /**< pairs in its __metadata__ */
};
/** Start value of a struct hr_shard: its size, all else zero. */
#define HR_SHARD_INIT {sizeof(struct hr_shard)}

/** How many shards. */
HR_API uint32_t hr_model_n_shards(const hr_model *model);
/** Describes one shard. Errors: HR_E_OPTS. */
HR_API int hr_model_shard(const hr_model *model, uint32_t shard, struct hr_shard *out);
/** One pair of a shard's __metadata__, in header order. Lengths are exact, NUL bytes included. */
HR_API int hr_model_metadata(const hr_model *model, uint32_t shard, uint64_t pair, const char **key, size_t *key_len,
			     const char **value, size_t *value_len);
/** Warnings that opening gave ("3 tensors are not in the index"). NULL past the last one. */
HR_API const char *hr_model_warning(const hr_model *model, size_t i);

/**
 * Reads raw bytes of a shard, header included, through the model's own descriptor. For tools; the fast
 * way is a loader. Works in a forked child. Blocks. Errors: HR_E_OPTS for a range outside the shard,
 * HR_E_IO, HR_E_SHORT, HR_E_CHANGED.
 */
HR_API int hr_model_read_shard(const hr_model *model, uint32_t shard, uint64_t offset, void *dst, size_t bytes);

/** A SHA-256 digest. */
struct hr_digest {
	uint8_t sha256[32]; /**< the 32 bytes, as printed from left to right */
};
/**
 * SHA-256 of a whole shard and, if `tensors` is not NULL, of each of its tensors (tensors[i] belongs to
 * the i-th tensor of that shard in the model's numbering), in one pass with 8 MiB of memory.
 * Blocks. Threads: any, several shards at once. Errors: as hr_model_read_shard().
 */
HR_API int hr_model_digest(const hr_model *model, uint32_t shard, struct hr_digest *whole, struct hr_digest *tensors,
			   size_t n_tensors);

/* ------------------------------------------------------------------------------------------------ device */

/** Memory that tensors are delivered into. Counted: buffers and loaders hold it. */
typedef struct hr_device hr_device;

/**
 * Opens a device: "cpu", "cuda" (the first GPU), "cuda:1". The CUDA driver is looked for here, at run
 * time, and its primary context is retained (created, if the process has none yet: that takes a while).
 * The caller's current context stays as it was. Errors: HR_E_OPTS for a name that is none,
 * HR_E_NOTFOUND, HR_E_UNSUPPORTED (no driver), HR_E_DEVICE, HR_E_NOMEM.
 */
HR_API int hr_device_open(const char *spec, hr_device **out);
/** Drops the caller's reference. */
HR_API int hr_device_close(hr_device *device);

/** What a device is. */
struct hr_device_info {
	size_t size;          /**< HR_DEVICE_INFO_INIT sets it */
	char spec[16];        /**< "cuda:0" */
	char name[112];       /**< "NVIDIA H200" */
	uint64_t total_bytes; /**< of its memory; 0 = not known */
	uint64_t free_bytes;  /**< at this moment; 0 = not known */
	uint32_t driver;      /**< 13000 for CUDA 13.0; 0 for cpu */
	uint32_t flags;       /**< HR_DEVICE_* */
};
/** Start value of a struct hr_device_info: its size, all else zero. */
#define HR_DEVICE_INFO_INIT {sizeof(struct hr_device_info)}
/** hr_device_info.flags: many small copies go to the driver in one call (CUDA 12.8 and later). */
#define HR_DEVICE_BATCH_COPY 1u
/** Asks what a device is. Errors: HR_E_FORKED, HR_E_DEVICE. */
HR_API int hr_device_info(hr_device *device, struct hr_device_info *out);

/* ------------------------------------------------------------------------------------------------ loader */

/** One device, one pool of staging memory, the engines and their threads: the thing that moves bytes. */
typedef struct hr_loader hr_loader;

/**
 * hr_loader_opts.caching: decide for each range. What is in the page cache is read from there; cold bytes are read
 * through it (so that the next reader finds them) if the whole model fits well into the memory that the process may
 * use, or the file system is a network's, and around it otherwise.
 */
#define HR_CACHING_AUTO 0u
/** All reads go through the page cache and fill it. */
#define HR_CACHING_FILL 1u
/** All reads go around the page cache (O_DIRECT); HR_E_UNSUPPORTED where the file system refuses that. */
#define HR_CACHING_BYPASS 2u

/** Smallest pool that is accepted; see hr_loader_opts. */
#define HR_MIN_STAGING_BYTES (UINT64_C(128) << 10)
/** Smallest slot that is accepted. */
#define HR_MIN_SLOT_BYTES (UINT64_C(64) << 10)

/** How to set up a loader. */
struct hr_loader_opts {
	size_t size; /**< HR_LOADER_OPTS_INIT sets it */
	/** Every byte of staging memory there will ever be. Default 64 MiB; from HR_MIN_STAGING_BYTES, below 16 MiB
	 * at a price in speed. With engines "cufile" and "ugds" it is a window of GPU memory, and 4 KiB of host
	 * memory for each slot and 64 KiB for each reader come to it. */
	uint64_t staging_bytes;
	/** One read at most. Default 2 MiB, less in a pool of few; a multiple of 64 KiB from
	 * HR_MIN_SLOT_BYTES, and at least two must fit into the pool. */
	uint64_t slot_bytes;
	/** NULL or "auto": bytes that are in the page cache by "pread", cold ones by "uring" or, where that
	 * is not allowed, "pread". An engine asked for by name never falls back: it works or fails. "mapped"
	 * (GPUs only) reads nothing: it registers windows of the page cache's own pages, of `slot_bytes` each and
	 * `staging_bytes` in all, by one thread unless `readers` says more; four of them by default. */
	const char *engine;
	uint32_t caching; /**< HR_CACHING_* */
	/** Threads for blocking reads. Default: as many as the process may use CPUs for (affinity, cgroup
	 * quota), at most 12. */
	uint32_t readers;
	/** Where device memory of buffers comes from. NULL: headrace's own pool. Otherwise `alloc` gives
	 * memory of `bytes` at `align`, or NULL, and `release` takes it back. Called only on a thread that is
	 * inside one of headrace's calls, and never while a lock of headrace is held. `stream` is the stream
	 * on which the memory is first used (NULL: none of the caller's). Both or neither. */
	void *(*alloc)(void *ctx, uint64_t bytes, uint64_t align, void *stream);
	void (*release)(void *ctx, void *memory, uint64_t bytes, void *stream); /**< see `alloc` */
	void *alloc_ctx;                                                        /**< first argument of both */
	uint32_t flags;                                                         /**< HR_LOADER_* */
};
/** hr_loader_opts.flags: every job, feed and read verifies, as with HR_JOB_VERIFY. */
#define HR_LOADER_VERIFY 1u
/**
 * hr_loader_opts.flags: engine "cufile" may read through host memory, in its library's compatibility mode. Without this
 * it reads straight from storage into GPU memory, or fails. The statistics say how it read.
 */
#define HR_LOADER_CUFILE_COMPAT 2u
/** Start value of a struct hr_loader_opts: its size, all else zero. */
#define HR_LOADER_OPTS_INIT {sizeof(struct hr_loader_opts)}

/**
 * Starts a loader: allocates the pool, registers it with the device (once, portably), starts the threads.
 * The threads block all signals. Ownership: *out is the caller's. Threads: a loader may be used from any
 * number of threads, for any number of models, jobs and feeds. Errors: HR_E_OPTS (sizes, unknown engine),
 * HR_E_UNSUPPORTED (an engine asked for by name cannot be used here, with the reason), HR_E_NOMEM,
 * HR_E_DEVICE, HR_E_FORKED.
 */
HR_API int hr_loader_open(hr_device *device, const struct hr_loader_opts *opts, hr_loader **out);

/**
 * Cancels what is in flight, waits up to `timeout_ms` for it to settle, then ends the threads and gives
 * the pool back. HR_E_BUSY if something has not settled by then: nothing was closed, call again.
 * Buffers may outlive their loader. Job and feed handles must still be closed, in any order.
 */
HR_API int hr_loader_close(hr_loader *loader, uint32_t timeout_ms);

/* --------------------------------------------------------------------------------------------------- job */

/** One request to a loader; it completes, fails, or is cancelled as a whole. */
typedef struct hr_job hr_job;

/** A byte range of one tensor, and where it goes. Slices and tensor parallelism build on this. */
struct hr_read {
	uint64_t tensor; /**< number in the model */
	uint64_t offset; /**< first byte, counted from the tensor's first */
	uint64_t length; /**< bytes; UINT64_MAX = to the tensor's end */
	void *dst;       /**< memory of the loader's device; any alignment */
	/** Room from `dst` to the end of its allocation: at least `length`. If it reaches over the destinations of the
	 * next tensors, neighbours that lie in memory as they lie in the file are copied in one go. */
	uint64_t dst_bytes;
};

/** How to run a job. */
struct hr_job_opts {
	size_t size; /**< HR_JOB_OPTS_INIT sets it */
	/** If a single read takes longer than this, the job fails with HR_E_TIMEDOUT and settles; the staging
	 * memory of that read is kept and counted as lost until the read comes back. 0: no deadline. */
	uint32_t io_timeout_ms;
	uint32_t flags; /**< HR_JOB_* */
	/** CUDA stream: our writes start after the work that is queued there now. That work must be able to finish
	 * without the caller's help; until it has, the loader's other jobs wait behind this one. */
	void *wait_stream;
	void *signal_stream; /**< CUDA stream: what is queued there after a good hr_job_wait() sees our writes */
};
/**
 * hr_job_opts.flags: bytes are compared with the checksums that a store keeps (CRC-32C of every 64 KiB or more) before
 * they are copied to their destination; HR_E_DIGEST names the place where they differ. Whole blocks are read, and
 * through staging memory always. HR_E_UNSUPPORTED for plain files, which have no checksums.
 */
#define HR_JOB_VERIFY 1u
/** Start value of a struct hr_job_opts: its size, all else zero. */
#define HR_JOB_OPTS_INIT {sizeof(struct hr_job_opts)}

/**
 * Starts a job: all ranges and sizes are checked first, and either all of it starts or none. Reads are
 * done in file order, whatever the order given; `reads` may be freed after the call. The destinations
 * belong to the job until it has settled. Does not block on storage. Errors: HR_E_OPTS (tensor number, a
 * range outside its tensor, a stream on cpu), HR_E_SPACE (destination), HR_E_NOMEM, HR_E_FORKED.
 */
HR_API int hr_job_start(hr_loader *loader, hr_model *model, const struct hr_read *reads, size_t n_reads,
			const struct hr_job_opts *opts, hr_job **out);

/**
 * Waits until the job has settled, that is: until nothing can touch its destinations any more. 0 if every
 * byte has arrived; HR_E_PENDING if `timeout_ms` is over first (the job goes on); otherwise the job's own
 * error, which also becomes the caller's last error: then no byte at its destinations may be trusted.
 */
HR_API int hr_job_wait(hr_job *job, uint32_t timeout_ms);
/** Asks the job to end early. Does not wait. A job that had finished stays finished. */
HR_API int hr_job_cancel(hr_job *job);
/** Cancels, waits as hr_job_wait(), frees the handle. HR_E_BUSY: not settled yet, the handle is still good. */
HR_API int hr_job_close(hr_job *job, uint32_t timeout_ms);
/** An eventfd(2) that becomes readable when the job has settled. It belongs to the job: do not close it. */
HR_API int hr_job_fd(hr_job *job, int *fd);

/** Reads one whole tensor into the caller's memory: a job and a wait. Blocks. Errors: of both. */
HR_API int hr_read_into(hr_loader *loader, hr_model *model, uint64_t tensor, void *dst, uint64_t dst_bytes);

/* ------------------------------------------------------------------------------------------------ buffer */

/** Counted memory on a device that holds the bytes of one or more tensors. Nothing else writes it (of hr_map(): nothing
 * but who writes the file). */
typedef struct hr_buffer hr_buffer;

/** Reads one tensor into a new buffer. Blocks. Errors: as a job, and HR_E_DEVICE_MEMORY, HR_E_NOMEM. */
HR_API int hr_get(hr_loader *loader, hr_model *model, uint64_t tensor, hr_buffer **out);

/** hr_map_opts.flags: have all of the tensor in the page cache and in the page table before the call returns. Blocks on
 * storage; the first touch of each page then costs nothing. */
#define HR_MAP_POPULATE 1u
/** hr_map_opts.flags: begin to read the tensor into the page cache, and do not wait for the rest. Takes more CPU
 * time in all than HR_MAP_POPULATE, since the kernel reads ahead into small pages. */
#define HR_MAP_AHEAD 2u

/** How to map. */
struct hr_map_opts {
	size_t size;    /**< HR_MAP_OPTS_INIT sets it */
	uint32_t flags; /**< HR_MAP_* */
};
/** Start value of a struct hr_map_opts: its size, all else zero. */
#define HR_MAP_OPTS_INIT {sizeof(struct hr_map_opts)}

/**
 * A tensor in place: a buffer over the page cache's own pages, in host memory, read-only, with nothing read or copied.
 * No loader is needed. One mapping for each shard is shared by all its tensors. The buffer holds the model; when a
 * shard's last buffer goes, its pages leave the process and are the first to leave the page cache.
 *
 * What it costs: **a file that somebody truncates ends the process with SIGBUS** when the bytes that are gone are
 * touched, as does storage that fails; what is overwritten in the file changes in the tensor. headrace's own code
 * never reads through the mapping. The memory begins where the tensor's bytes do: aligned as the file's writer aligned
 * them, mostly to 8 bytes. Writing to it ends the process with SIGSEGV.
 *
 * The file is compared with what it was at open, now and not later. Works in a forked child. Errors: HR_E_OPTS,
 * HR_E_CHANGED, HR_E_UNSUPPORTED (a store: it has no files), HR_E_NOMEM, HR_E_IO.
 */
HR_API int hr_map(hr_model *model, uint64_t tensor, const struct hr_map_opts *opts, hr_buffer **out);

/** hr_buffer_flags(): the memory may only be read. */
#define HR_BUFFER_READ_ONLY 1u
/** What kind of memory it is: HR_BUFFER_*. */
HR_API uint32_t hr_buffer_flags(const hr_buffer *buffer);

/** New memory on the loader's device, aligned to at least 256 bytes, contents undefined; for jobs. */
HR_API int hr_buffer_new(hr_loader *loader, uint64_t bytes, hr_buffer **out);

/** The memory: a host pointer on cpu, a device pointer on cuda. NULL if it has no bytes. */
HR_API void *hr_buffer_data(const hr_buffer *buffer);
/** Its size. */
HR_API uint64_t hr_buffer_bytes(const hr_buffer *buffer);
/** One more owner. Returns its argument. Threads: any. */
HR_API hr_buffer *hr_buffer_acquire(hr_buffer *buffer);
/**
 * Drops an owner. The last one must have no work queued that still uses the memory. Never blocks, and
 * while the loader lives never calls the driver: the loader takes the memory back in its own time.
 */
HR_API void hr_buffer_release(hr_buffer *buffer);
/**
 * Drops an owner; the memory is used again only after what is queued on `stream` now. cuda only. If the driver will not
 * order it so, the call fails and drops nothing. A caller's allocator hears the last owner's stream.
 */
HR_API int hr_buffer_release_on(hr_buffer *buffer, void *stream);
/** Copies bytes of a buffer to host memory, for checks and tools. Blocks. */
HR_API int hr_buffer_read(hr_buffer *buffer, uint64_t offset, void *dst, uint64_t bytes);

/* -------------------------------------------------------------------------------------------------- feed */

/** Tensors delivered one after the other, with bounded look-ahead. */
typedef struct hr_feed hr_feed;

/** What to deliver, and how. */
struct hr_feed_opts {
	size_t size;              /**< HR_FEED_OPTS_INIT sets it */
	const uint64_t *tensors;  /**< which; NULL: all. Copied. */
	size_t n_tensors;         /**< of them */
	uint32_t flags;           /**< HR_FEED_* */
	uint32_t io_timeout_ms;   /**< as in a job */
	void *wait_stream;        /**< as in a job */
	void *signal_stream;      /**< as in a job, at every hr_feed_next() */
	uint32_t next_timeout_ms; /**< hr_feed_next() answers HR_E_PENDING after this long. 0: it waits for ever */
};
/** Start value of a struct hr_feed_opts: its size, all else zero. */
#define HR_FEED_OPTS_INIT {sizeof(struct hr_feed_opts)}
/** hr_feed_opts.flags: deliver in the order of `tensors`. Otherwise in file order, which is faster. */
#define HR_FEED_GIVEN_ORDER 1u
/** hr_feed_opts.flags: as HR_JOB_VERIFY. */
#define HR_FEED_VERIFY 2u

/**
 * Opens a feed. Look-ahead fills staging slots only: memory of a tensor is taken when it is handed out
 * (small ones that follow one another share allocations of at most 8 MiB, taken one ahead), so the peak is
 * what the consumer keeps. Errors: HR_E_OPTS, HR_E_NOMEM, HR_E_FORKED.
 */
HR_API int hr_feed_open(hr_loader *loader, hr_model *model, const struct hr_feed_opts *opts, hr_feed **out);
/**
 * The next tensor, complete, in a buffer that is the caller's. HR_E_END after the last. HR_E_PENDING after
 * `next_timeout_ms`: nothing was handed out, call again. Any other error is final for the feed and names
 * what was handed out before, where that matters. Blocks.
 * Threads: one at a time per feed.
 */
HR_API int hr_feed_next(hr_feed *feed, struct hr_tensor *tensor, hr_buffer **buffer);
/** Ends a feed early or after its last tensor. HR_E_BUSY as with jobs. Buffers handed out stay good. */
HR_API int hr_feed_close(hr_feed *feed, uint32_t timeout_ms);

/* ------------------------------------------------------------------------------------------------- cache */

/**
 * Tensors of one model that become resident and leave together: a layer, or one tensor. They lie in one piece of
 * memory, each at a multiple of 256 bytes, in the model's order, whatever the order given. Immutable and counted.
 */
typedef struct hr_group hr_group;

/**
 * Makes a group of `n_tensors` (1 or more) tensors of a model, which it keeps open. A cache knows a group by its
 * handle: two groups of the same tensors are two groups, and their bytes may be resident twice. Errors: HR_E_OPTS
 * (number out of range, no tensors), HR_E_DUPLICATE (a tensor given twice), HR_E_OVERFLOW, HR_E_NOMEM.
 */
HR_API int hr_group_new(hr_model *model, const uint64_t *tensors, size_t n_tensors, hr_group **out);
/** One more owner. Returns its argument. Threads: any. */
HR_API hr_group *hr_group_acquire(hr_group *group);
/** Drops an owner. Caches hold the groups that are resident. */
HR_API void hr_group_release(hr_group *group);
/** Size of its memory: the tensors, each rounded up to 256 bytes but the last. */
HR_API uint64_t hr_group_bytes(const hr_group *group);
/** Its number, unique in the process: what events call it. */
HR_API uint64_t hr_group_id(const hr_group *group);
/** How many tensors. */
HR_API size_t hr_group_n_tensors(const hr_group *group);
/** The i-th tensor in the order given, and where it begins in the group's memory. Errors: HR_E_OPTS. */
HR_API int hr_group_tensor(const hr_group *group, size_t i, uint64_t *tensor, uint64_t *offset);

/**
 * Groups of any number of models, kept on one loader's device under a byte budget. What was not used goes when
 * something else needs the room; what is in use (pinned) stays where it is.
 */
typedef struct hr_cache hr_cache;

/** hr_cache_opts.policy: what was used longest ago goes first. A walk over more than fits then hits nothing. */
#define HR_POLICY_LRU 0u
/** What will be used last goes first, judged by how it was used so far: a repeated walk keeps the part that fits. */
#define HR_POLICY_LOOP 1u

/** How to set up a cache. */
struct hr_cache_opts {
	size_t size; /**< HR_CACHE_OPTS_INIT sets it */
	/** Device memory that the cache may hold at once, in whole allocations, free ones included. Not 0. */
	uint64_t budget_bytes;
	/** Pinned host memory in which evicted groups may stay, so that they come back over the link and not from
	 * storage; a later change of the file does not show in them. 0: none. cuda only (HR_E_UNSUPPORTED): on cpu,
	 * make the budget larger instead. */
	uint64_t host_budget_bytes;
	/** What the allocator rounds sizes up to: counted against the budget. 0: what headrace's own pool does (256 on
	 * cpu, pages from 2 MiB on; 512 on cuda). A caller's allocator may round to more; a power of two. */
	uint64_t granularity_bytes;
	uint32_t policy;        /**< HR_POLICY_* */
	uint32_t io_timeout_ms; /**< of every load, as in a job */
	/** How many events hr_cache_events() can be behind. 0: none are kept. */
	uint32_t n_events;
};
/** Start value of a struct hr_cache_opts: its size, all else zero. */
#define HR_CACHE_OPTS_INIT {sizeof(struct hr_cache_opts)}

/**
 * Opens a cache. It takes memory as groups come and keeps it for the next ones; a group gets the memory of one of
 * (much) the same size if there is any. Ownership: *out is the caller's; the loader must stay open as long as loads
 * are wanted. Threads: any number, on any of its functions. Errors: HR_E_OPTS, HR_E_NOMEM, HR_E_FORKED.
 */
HR_API int hr_cache_open(hr_loader *loader, const struct hr_cache_opts *opts, hr_cache **out);
/**
 * Cancels loads that nobody waits for, waits up to `timeout_ms` for what is pinned or in motion, gives all memory back.
 * HR_E_BUSY if something is still pinned or in motion by then: nothing was closed. No other call may be in the cache.
 */
HR_API int hr_cache_close(hr_cache *cache, uint32_t timeout_ms);

/** How to get. */
struct hr_cache_get_opts {
	size_t size; /**< HR_CACHE_GET_OPTS_INIT sets it */
	/** If everything is pinned: how long to wait for room. 0: not at all; then HR_E_FULL. */
	uint32_t room_timeout_ms;
	/** How long to wait for the bytes; then HR_E_PENDING, the load goes on, and another call finds it. 0: as long
	 * as it takes. */
	uint32_t load_timeout_ms;
	void *wait_stream;   /**< as in a job: for a caller's allocator whose memory still has work queued on it */
	void *signal_stream; /**< as in a job. Costs nothing if the bytes were there before */
};
/** Start value of a struct hr_cache_get_opts: its size, all else zero. */
#define HR_CACHE_GET_OPTS_INIT {sizeof(struct hr_cache_get_opts)}

/**
 * The group's bytes, resident, pinned until the buffer is released; all getters of a group share one buffer. Loads
 * them if need be, once for all who ask at a time; other groups leave to make room. Release with hr_buffer_release(),
 * or with hr_buffer_release_on() if work queued on a stream still uses them: the memory is used again only after it,
 * with no waiting on the host. Do not write into it: what is written is lost when the group leaves.
 *
 * A thread that waits for room while it holds pins itself may wait for what only it could release: give it a
 * room_timeout_ms that ends.
 *
 * Blocks. Errors: HR_E_FULL (all the budget is pinned; the message names by whom), HR_E_BUDGET (the group alone is
 * larger), HR_E_PENDING, those of a job, HR_E_DEVICE_MEMORY. A load that fails leaves nothing behind: the next get
 * tries again.
 */
HR_API int hr_cache_get(hr_cache *cache, hr_group *group, const struct hr_cache_get_opts *opts, hr_buffer **out);

/**
 * Begins to bring a group in, so that a later get finds it. A hint: it takes room from groups that the policy would
 * evict, never from what is pinned, being loaded, or brought in by an earlier hint and not yet used; without room it
 * does nothing and is counted as passed over. Loads that somebody waits for go first; a get that finds no other room
 * takes that of hints. Of the options only wait_stream counts. Does not wait for storage. Errors: HR_E_BUDGET,
 * HR_E_NOMEM, HR_E_DEVICE*, HR_E_OPTS; that a load failed is told by the get that follows.
 */
HR_API int hr_cache_prefetch(hr_cache *cache, hr_group *group, const struct hr_cache_get_opts *opts);

/**
 * Evicts one group; *freed_bytes (may be NULL) is what that left free for others, 0 if it was not resident. The memory
 * stays the cache's. HR_E_BUSY if it is pinned or waited for.
 */
HR_API int hr_cache_evict(hr_cache *cache, hr_group *group, uint64_t *freed_bytes);
/**
 * Gives at least `bytes` of memory back to the device: what is free first, then by evicting in the policy's order.
 * *freed_bytes (may be NULL) says how much; less if the rest is pinned. UINT64_MAX: all that can be had. Waits for
 * consumers' work that still uses that memory.
 */
HR_API int hr_cache_trim(hr_cache *cache, uint64_t bytes, uint64_t *freed_bytes);
/** Another budget. Shrinking gives memory back as hr_cache_trim(). HR_E_FULL if more is pinned: nothing changes. */
HR_API int hr_cache_set_budget(hr_cache *cache, uint64_t budget_bytes);
/** What a group counts against the budget: its bytes, rounded up as the allocator does. */
HR_API uint64_t hr_cache_charge(const hr_cache *cache, const hr_group *group);

/** What a cache holds now, and did so far. With a model: its part; then sizes of the whole are 0. */
struct hr_cache_stats {
	size_t size;                /**< HR_CACHE_STATS_INIT sets it */
	uint64_t budget_bytes;      /**< of the whole */
	uint64_t used_bytes;        /**< resident, being loaded, and (of the whole) free */
	uint64_t pinned_bytes;      /**< of them, in use */
	uint64_t free_bytes;        /**< of them, kept for the next groups; of the whole */
	uint64_t peak_bytes;        /**< the most that used_bytes ever was; of the whole */
	uint64_t n_groups;          /**< resident or being loaded */
	uint64_t n_pinned;          /**< of them, in use */
	uint64_t n_hits;            /**< gets that found the bytes there */
	uint64_t n_joins;           /**< gets that found the load under way */
	uint64_t n_misses;          /**< gets that had to begin it */
	uint64_t n_loads;           /**< loads begun, prefetches included */
	uint64_t n_failures;        /**< of them, failed or given up before they were used */
	uint64_t n_evictions;       /**< groups that left */
	uint64_t n_waits;           /**< gets that waited for room */
	uint64_t n_prefetches;      /**< loads begun by hints */
	uint64_t n_passed_over;     /**< hints that found no room */
	uint64_t hit_bytes;         /**< of hits */
	uint64_t loaded_bytes;      /**< payload brought in by loads that succeeded, from storage or the host tier */
	uint64_t evicted_bytes;     /**< of groups that left */
	uint64_t load_wait_ns;      /**< what gets took that were not hits, summed */
	uint64_t room_wait_ns;      /**< of it, waiting for room */
	uint64_t host_budget_bytes; /**< of the whole */
	uint64_t host_used_bytes;   /**< host tier: memory taken, free included; of the whole */
	uint64_t host_peak_bytes;   /**< host tier: the most that it was; of the whole */
	uint64_t n_host_groups;     /**< host tier: groups kept */
	uint64_t n_host_hits;       /**< host tier: loads that found their bytes there */
	uint64_t n_host_saves;      /**< host tier: groups copied into it */
	uint64_t n_host_evictions;  /**< host tier: groups dropped from it */
	uint64_t host_hit_bytes;    /**< of loaded_bytes, from the host tier */
};
/** Start value of a struct hr_cache_stats: its size, all else zero. */
#define HR_CACHE_STATS_INIT {sizeof(struct hr_cache_stats)}
/** Statistics of a cache, or of one model's groups in it. */
HR_API int hr_cache_stats(hr_cache *cache, const hr_model *model, struct hr_cache_stats *out);

/** What an event tells. */
enum hr_cache_event_kind {
	HR_CACHE_HIT = 1,       /**< a get found the bytes there */
	HR_CACHE_MISS = 2,      /**< a get began a load; its time is what the get took */
	HR_CACHE_JOIN = 3,      /**< a get waited for a load under way; its time is what the get took */
	HR_CACHE_LOAD = 4,      /**< from the beginning of a load to its end */
	HR_CACHE_HOST_LOAD = 5, /**< the same, out of the host tier */
	HR_CACHE_FAILED = 6,    /**< a load that failed or was given up */
	HR_CACHE_EVICT = 7,     /**< a group left */
	HR_CACHE_WAIT = 8,      /**< a get waited for room */
	HR_CACHE_PASS = 9,      /**< a hint was passed over */
};
/** One event. */
struct hr_cache_event {
	uint64_t start_ns;    /**< CLOCK_MONOTONIC */
	uint64_t duration_ns; /**< 0 for what takes no time */
	uint64_t group;       /**< hr_group_id() */
	uint64_t bytes;       /**< of the group */
	uint32_t kind;        /**< HR_CACHE_* */
	uint32_t prefetch;    /**< 1: a load that a hint began */
};
/**
 * Takes up to `n` of the oldest events that were not taken yet; *n_found says how many. *n_lost (may be NULL) is how
 * many were overwritten since the last call, since nobody came for them.
 */
HR_API int hr_cache_events(hr_cache *cache, struct hr_cache_event *events, size_t n, size_t *n_found, uint64_t *n_lost);
/* ------------------------------------------------------------------------------------------------- store */

/**
 * Checkpoints as immutable raw objects on a **region**, that is a block device, a partition, a loop device or a plain
 * file, with no file system between. docs/store-format.md says what is written.
 *
 * A store goes from **generation** to generation. Every change (a model imported, replaced, removed) is one commit,
 * that is there wholly or not at all, whatever happens to the machine meanwhile. Objects are never changed: an update
 * writes new ones and switches. A reader opens the newest generation and holds it: a commit does not disturb it, and
 * space is used again only when no reader holds what was there, or, where a reader cannot lock, not unnoticed.
 *
 * One handle is one generation for a reader, and always the newest for a writer, of which there is one at a time.
 */
typedef struct hr_store hr_store;

/** hr_store_init_opts.flags: destroy whatever the region holds. */
#define HR_STORE_FORCE 1u

/** How to make a store. */
struct hr_store_init_opts {
	size_t size;    /**< HR_STORE_INIT_OPTS_INIT sets it */
	uint32_t flags; /**< HR_STORE_FORCE */
	/** Of a plain file that is to be made, all of it taken at once; 0: the region is there already. */
	uint64_t bytes;
	const char *name; /**< what to call it, up to 64 bytes; NULL: nothing */
};
/** Start value of a struct hr_store_init_opts: its size, all else zero. */
#define HR_STORE_INIT_OPTS_INIT {sizeof(struct hr_store_init_opts)}

/**
 * Makes an empty store. Refuses a region with anything at its ends, where partition tables and file systems have their
 * marks, and one that is mounted or held. Errors: HR_E_FOREIGN (not empty), HR_E_LOCKED (in use), HR_E_GEOMETRY (below
 * 16 MiB, odd sectors, a partition that is not aligned to 64 KiB), HR_E_IO, HR_E_OPTS, HR_E_NOMEM. Blocks.
 */
HR_API int hr_store_init(const char *path, const struct hr_store_init_opts *opts);

/** hr_store_opts.flags: open for writing. One writer at a time: HR_E_LOCKED for the second. */
#define HR_STORE_WRITE 1u
/** hr_store_opts.flags: the store may lie on another device than the one that it was made on (a copy, say). */
#define HR_STORE_MOVED 2u

/** How to open a store. */
struct hr_store_opts {
	size_t size;    /**< HR_STORE_OPTS_INIT sets it */
	uint32_t flags; /**< HR_STORE_WRITE, HR_STORE_MOVED */
	/** Which; 0: the newest. The one before it can be opened too until its space is given up. */
	uint64_t generation;
};
/** Start value of a struct hr_store_opts: its size, all else zero. */
#define HR_STORE_OPTS_INIT {sizeof(struct hr_store_opts)}

/**
 * Opens a store. For reading nothing is written, and the generation is held until the handle is closed. For writing
 * torn records of an interrupted commit are put right. Threads: any, also at once; changes wait for one another.
 * Errors: HR_E_NOTFOUND, HR_E_NOT_A_STORE, HR_E_STORE_VERSION, HR_E_GEOMETRY, HR_E_IDENTITY (see HR_STORE_MOVED),
 * HR_E_CORRUPT, HR_E_DIVERGED, HR_E_STALE (that generation is gone), HR_E_LOCKED, HR_E_IO, HR_E_OPTS, HR_E_NOMEM.
 */
HR_API int hr_store_open(const char *path, const struct hr_store_opts *opts, hr_store **out);
/** Closes it; no call with it may be going on. */
HR_API void hr_store_close(hr_store *store);

/** A store in numbers. */
struct hr_store_info {
	size_t size;      /**< HR_STORE_INFO_INIT sets it */
	char name[72];    /**< what it was called when it was made */
	char kind[16];    /**< of the device it was made on: "nvme", "scsi", "virtio", "dm", "loop", "file", "other" */
	char wwid[104];   /**< that device's own name, if it has one */
	uint8_t uuid[16]; /**< the store's */
	uint8_t body_sha256[32];   /**< of this generation's manifest */
	uint64_t generation;       /**< that is open */
	uint64_t floor_generation; /**< those before it cannot be opened any more */
	uint64_t region_bytes;     /**< the region, in whole MiB */
	uint64_t data_bytes;       /**< of it, for models and manifests */
	uint64_t live_bytes;       /**< taken by objects */
	/** Of live_bytes: objects that no model has, left by an import that did not end. */
	uint64_t unbound_bytes;
	uint64_t retired_bytes;      /**< given up, and free once no older generation needs them */
	uint64_t free_bytes;         /**< in no use */
	uint64_t largest_free_bytes; /**< of that, in one piece */
	uint64_t manifest_bytes;     /**< of this generation's manifest */
	uint64_t init_time_ns;       /**< when it was made, since 1970 */
	uint64_t commit_time_ns;     /**< when this generation was */
	uint32_t lba_bytes;          /**< logical sectors that it was made for */
	uint32_t n_models;           /**< models */
	uint32_t n_objects;          /**< objects: shards and other files, equal ones once */
	uint32_t n_unbound;          /**< objects that no model has */
	uint32_t is_leased;          /**< 1: writers know that this generation is being read */
};
/** Start value of a struct hr_store_info: its size, all else zero. */
#define HR_STORE_INFO_INIT {sizeof(struct hr_store_info)}
/** Describes a store. */
HR_API int hr_store_stats(hr_store *store, struct hr_store_info *out);

/** A model of a store. Pointers live until the store is changed through this handle, or closed. */
struct hr_store_model_info {
	size_t size;                 /**< HR_STORE_MODEL_INFO_INIT sets it */
	const char *name;            /**< UTF-8, not NUL-terminated */
	size_t name_len;             /**< bytes */
	const char *provenance;      /**< where it was imported from; not NUL-terminated */
	size_t provenance_len;       /**< bytes */
	uint8_t uuid[16];            /**< new with every import */
	uint64_t bytes;              /**< of all its files */
	uint64_t created_generation; /**< that it came with */
	uint32_t n_files;            /**< shards, index, config ... */
	uint32_t n_shards;           /**< of them, safetensors */
};
/** Start value of a struct hr_store_model_info: its size, all else zero. */
#define HR_STORE_MODEL_INFO_INIT {sizeof(struct hr_store_model_info)}
/** Describes a model by its number; they are sorted by name. */
HR_API int hr_store_model(hr_store *store, uint32_t model, struct hr_store_model_info *out);
/** A model's number by its name. Errors: HR_E_NOTFOUND. */
HR_API int hr_store_find(hr_store *store, const char *name, uint32_t *model);

/** A file of a model. Pointers live as in struct hr_store_model_info. */
struct hr_store_file_info {
	size_t size;      /**< HR_STORE_FILE_INFO_INIT sets it */
	const char *name; /**< a relative path with "/", UTF-8, not NUL-terminated */
	size_t name_len;  /**< bytes */
	uint32_t object;  /**< that holds its bytes */
};
/** Start value of a struct hr_store_file_info: its size, all else zero. */
#define HR_STORE_FILE_INFO_INIT {sizeof(struct hr_store_file_info)}
/** Describes a file of a model by its number; they are sorted by name. */
HR_API int hr_store_file(hr_store *store, uint32_t model, uint32_t file, struct hr_store_file_info *out);

/** An object: the bytes of a file, in one piece. */
struct hr_store_object_info {
	size_t size;                 /**< HR_STORE_OBJECT_INFO_INIT sets it */
	uint8_t uuid[16];            /**< its own */
	uint8_t sha256[32];          /**< of its bytes */
	uint8_t header_sha256[32];   /**< of the safetensors header, length included; a shard's */
	uint64_t bytes;              /**< that the file has */
	uint64_t offset;             /**< of the first, in the region */
	uint64_t extent_offset;      /**< of all that is its own */
	uint64_t extent_bytes;       /**< that it takes, with padding, footer and digests */
	uint64_t header_bytes;       /**< of a shard's JSON; 0 otherwise */
	uint64_t created_generation; /**< that it came with */
	uint32_t n_tensors;          /**< in its header */
	uint32_t n_users;            /**< files that are it; 0: unbound */
	uint32_t digest_block_bytes; /**< that one CRC-32C covers */
	uint32_t is_shard;           /**< 1: safetensors; 0: any other file */
};
/** Start value of a struct hr_store_object_info: its size, all else zero. */
#define HR_STORE_OBJECT_INFO_INIT {sizeof(struct hr_store_object_info)}
/** Describes an object by its number. */
HR_API int hr_store_object(hr_store *store, uint32_t object, struct hr_store_object_info *out);

/** How far long work on a store has come. */
struct hr_store_progress {
	size_t size;          /**< bytes of this struct */
	const char *step;     /**< "writing", "checking" (what was written is read back), "reading" */
	const char *file;     /**< that is being worked on; may be empty */
	uint64_t done_bytes;  /**< of this step */
	uint64_t total_bytes; /**< of this step */
	uint32_t done_files;  /**< wholly */
	uint32_t total_files; /**< in all */
};

/** hr_store_import_opts.flags: a model of that name is replaced, in the same commit that brings the new one. */
#define HR_IMPORT_REPLACE 1u
/** hr_store_import_opts.flags: do not read objects back before they are committed. */
#define HR_IMPORT_NO_READ_BACK 2u
/** hr_store_import_opts.flags: write nothing; look at the files and tell what would be written. */
#define HR_IMPORT_PLAN 4u

/** How to import. */
struct hr_store_import_opts {
	size_t size;      /**< HR_STORE_IMPORT_OPTS_INIT sets it */
	uint32_t flags;   /**< HR_IMPORT_* */
	uint32_t threads; /**< the caller's included; 0: 4 */
	/** After so many new bytes what is there is committed, as objects that no model has yet: so much is done
	 * again at most if the import is interrupted. 0: 4 GiB. */
	uint64_t commit_bytes;
	/** Called now and then, on the calling thread; non-zero ends the import with HR_E_CANCELLED. */
	int (*progress)(void *ctx, const struct hr_store_progress *progress);
	void *progress_ctx; /**< first argument of `progress` */
};
/** Start value of a struct hr_store_import_opts: its size, all else zero. */
#define HR_STORE_IMPORT_OPTS_INIT {sizeof(struct hr_store_import_opts)}

/** What an import did, or would do. */
struct hr_store_import_info {
	size_t size;            /**< HR_STORE_IMPORT_INFO_INIT sets it */
	uint64_t generation;    /**< that the model came with */
	uint64_t bytes;         /**< of all files */
	uint64_t written_bytes; /**< of them, new to the store */
	uint64_t shared_bytes;  /**< of them, there already */
	uint64_t needed_bytes;  /**< space that files take which are new at first sight */
	uint32_t n_files;       /**< files */
	uint32_t n_shards;      /**< of them, safetensors */
	uint32_t n_skipped;     /**< directories left out because their name begins with a dot */
};
/** Start value of a struct hr_store_import_info: its size, all else zero. */
#define HR_STORE_IMPORT_INFO_INIT {sizeof(struct hr_store_import_info)}

/**
 * Imports a model: a directory with everything in it (shards, index, config, tokenizer), an index with the shards that
 * it names, or one file. All headers are checked first, all space is taken first. Every file is read once, hashed
 * while it is written, made durable, and read back; bytes that the store has already are not written again. One last
 * commit gives the model its name. If that does not come, by an error, a cancel or the machine's end, the store is as
 * it was, but for whole objects that the next import of the same files finds. `out` may be NULL.
 *
 * Errors: HR_E_EXISTS (see HR_IMPORT_REPLACE), HR_E_NOSPACE, HR_E_FRAGMENTED, HR_E_CHANGED and HR_E_SHORT (a source),
 * HR_E_DIGEST (the region does not give back what was written), HR_E_COMMIT_UNKNOWN, HR_E_POISONED,
 * HR_E_REGION_CHANGED, HR_E_CANCELLED, HR_E_NOTFOUND, HR_E_PATH, those of headers, HR_E_IO, HR_E_OPTS, HR_E_LIMIT,
 * HR_E_NOMEM, HR_E_FORKED. Blocks.
 */
HR_API int hr_store_import(hr_store *store, const char *source, const char *model,
			   const struct hr_store_import_opts *opts, struct hr_store_import_info *out);

/**
 * Removes a model, in one commit. Objects that no other model has go with it; their space is used again when nobody
 * reads them any more (hr_store_reclaim() hurries that). Errors: HR_E_NOTFOUND, and those of commits.
 */
HR_API int hr_store_remove(hr_store *store, const char *model);

/** What a reclaim gave. */
struct hr_store_reclaim_info {
	size_t size;              /**< HR_STORE_RECLAIM_INFO_INIT sets it */
	uint64_t freed_bytes;     /**< free now that were not before */
	uint64_t held_bytes;      /**< that readers of older generations still hold */
	uint64_t held_generation; /**< the oldest of those; 0: none */
	uint64_t generation;      /**< of the store, now */
};
/** Start value of a struct hr_store_reclaim_info: its size, all else zero. */
#define HR_STORE_RECLAIM_INFO_INIT {sizeof(struct hr_store_reclaim_info)}
/**
 * Gives up everything that the newest generation does not need: objects of imports that did not end, and what removed
 * models and older manifests took. Older generations cannot be opened afterwards; those that readers hold are kept.
 * `out` may be NULL.
 */
HR_API int hr_store_reclaim(hr_store *store, struct hr_store_reclaim_info *out);

/** How to get a model. */
struct hr_store_get_opts {
	size_t size; /**< HR_STORE_GET_OPTS_INIT sets it */
	/** As in an import. */
	int (*progress)(void *ctx, const struct hr_store_progress *progress);
	void *progress_ctx; /**< first argument of `progress` */
};
/** Start value of a struct hr_store_get_opts: its size, all else zero. */
#define HR_STORE_GET_OPTS_INIT {sizeof(struct hr_store_get_opts)}
/**
 * Writes all files of a model into a directory, as they were, which is made if it is not there. Every digest block and
 * the SHA-256 of every file is checked on the way. Refuses to overwrite: HR_E_EXISTS. Errors: HR_E_NOTFOUND,
 * HR_E_DIGEST, HR_E_CORRUPT, HR_E_STALE, HR_E_IO, HR_E_CANCELLED, HR_E_NOMEM. Blocks.
 */
HR_API int hr_store_get(hr_store *store, const char *model, const char *directory,
			const struct hr_store_get_opts *opts);

/**
 * Writes the open generation's manifest as JSON, piece by piece, to `write`, which gives 0 or anything else to stop
 * (HR_E_CANCELLED). It serves as a pin of this very generation; docs/store-format.md describes it.
 */
HR_API int hr_store_export(hr_store *store, int (*write)(void *ctx, const char *text, size_t bytes), void *ctx);

/** hr_store_check_opts.flags: also read all objects and compare them with their digests and hashes. */
#define HR_CHECK_DIGESTS 1u
/** hr_store_check_opts.flags: rewrite lost copies of the label and of the newest root from the ones that are sound. */
#define HR_CHECK_REPAIR 2u
/** hr_store_check_opts.flags: if the newest generation's manifest is damaged, go back to the one before it. */
#define HR_CHECK_ROLLBACK 4u
/** hr_store_check_opts.flags: search the whole region for objects by their footers, whatever label and roots say. */
#define HR_CHECK_SALVAGE 8u

/** How to check. */
struct hr_store_check_opts {
	size_t size;    /**< HR_STORE_CHECK_OPTS_INIT sets it */
	uint32_t flags; /**< HR_CHECK_* */
	/** Called with each finding, a sentence; `is_bad` 1: something is damaged, 0: a note. NULL: nobody is told. */
	void (*report)(void *ctx, uint32_t is_bad, const char *sentence);
	void *report_ctx; /**< first argument of `report` */
	/** With HR_CHECK_SALVAGE: a directory that objects whose hash is right are written to, named by it; NULL:
	 * listed only. */
	const char *salvage_to;
	/** As in an import. */
	int (*progress)(void *ctx, const struct hr_store_progress *progress);
	void *progress_ctx; /**< first argument of `progress` */
};
/** Start value of a struct hr_store_check_opts: its size, all else zero. */
#define HR_STORE_CHECK_OPTS_INIT {sizeof(struct hr_store_check_opts)}

/** What a check found. */
struct hr_store_check_info {
	size_t size;            /**< HR_STORE_CHECK_INFO_INIT sets it */
	uint64_t generation;    /**< that is the store's now; 0: none could be read */
	uint64_t checked_bytes; /**< of objects */
	uint32_t n_objects;     /**< looked at, or found by a salvage */
	uint32_t n_bad;         /**< things that are damaged and were not repaired */
	uint32_t n_repaired;    /**< things that were damaged and are not any more */
	uint32_t n_salvaged;    /**< files that a salvage wrote */
};
/** Start value of a struct hr_store_check_info: its size, all else zero. */
#define HR_STORE_CHECK_INFO_INIT {sizeof(struct hr_store_check_info)}
/**
 * Checks a store by its path: label, roots, manifest, footers, and what `opts` asks for. Gives 0 if it could be looked
 * at: what was found is in `out`. Only HR_CHECK_REPAIR and HR_CHECK_ROLLBACK write to the region. Errors:
 * HR_E_NOT_A_STORE, HR_E_LOCKED, HR_E_BUSY (a reader holds what would be gone back behind), HR_E_IO, HR_E_CANCELLED,
 * HR_E_OPTS, HR_E_NOMEM. Blocks.
 */
HR_API int hr_store_check(const char *path, const struct hr_store_check_opts *opts, struct hr_store_check_info *out);

/* --------------------------------------------------------------------------------- what happened, and why */

/** Engines, as numbers in hr_stats. */
enum hr_engine {
	HR_ENGINE_PREAD = 0,
	HR_ENGINE_URING = 1,
	HR_ENGINE_MAPPED = 2,
	HR_ENGINE_CUFILE = 3,
	HR_ENGINE_UGDS = 4,
};
/** Room for engines in hr_stats: more than there are. */
#define HR_N_ENGINES 8
/** An engine's name by its number, or NULL. */
HR_API const char *hr_engine_name(uint32_t engine);

/** What a job, a feed or a loader did. Times are wall clock unless they say cpu. */
struct hr_stats {
	size_t size;                         /**< HR_STATS_INIT sets it */
	uint64_t total_bytes;                /**< payload asked for */
	uint64_t done_bytes;                 /**< payload that has arrived */
	uint64_t total_tensors;              /**< reads asked for */
	uint64_t read_bytes;                 /**< read from storage or page cache: payload, gaps and alignment */
	uint64_t n_chunks;                   /**< reads issued */
	uint64_t n_copies;                   /**< copies to the device */
	uint64_t n_batches;                  /**< driver calls that carried them */
	uint64_t cached_bytes[HR_N_ENGINES]; /**< of read_bytes, by engine: through the page cache */
	uint64_t direct_bytes[HR_N_ENGINES]; /**< of read_bytes, by engine: around it */
	uint64_t elapsed_ns;                 /**< from start to settled, or to now */
	uint64_t first_ns;                   /**< from start to the first payload at its destination; 0 = not yet */
	uint64_t storage_wait_ns;            /**< summed over threads: waiting for storage */
	uint64_t copy_wait_ns;       /**< summed over threads: waiting for staging memory, that is, for copies */
	uint64_t read_cpu_ns;        /**< summed over readers: CPU time in reads */
	uint64_t staging_bytes;      /**< the pool */
	uint64_t peak_staging_bytes; /**< of it, in use at once */
	uint64_t lost_bytes;         /**< of it, under reads that never came back */
	uint64_t peak_buffer_bytes;  /**< loader only: device memory of buffers at its peak */
	uint32_t n_readers;          /**< threads for blocking reads */
	uint32_t n_slots;            /**< in the pool */
	char note[240];              /**< why a better way was not used; empty if there is nothing to say */
	uint64_t verified_bytes;     /**< of read_bytes: compared with checksums */
};
/** Start value of a struct hr_stats: its size, all else zero. */
#define HR_STATS_INIT {sizeof(struct hr_stats)}
/** Statistics of a job, running or settled. */
HR_API int hr_job_stats(hr_job *job, struct hr_stats *out);
/** Statistics of a feed. */
HR_API int hr_feed_stats(hr_feed *feed, struct hr_stats *out);
/** Statistics of all that a loader ever did. */
HR_API int hr_loader_stats(hr_loader *loader, struct hr_stats *out);

/** What a job would do. */
struct hr_plan_info {
	size_t size;                         /**< HR_PLAN_INFO_INIT sets it */
	uint64_t payload_bytes;              /**< asked for */
	uint64_t read_bytes;                 /**< that would be read */
	uint64_t n_chunks;                   /**< reads */
	uint64_t n_pieces;                   /**< copies, before neighbours are merged */
	uint64_t resident_bytes;             /**< of read_bytes: in the page cache now */
	uint64_t cached_bytes[HR_N_ENGINES]; /**< by engine, as in hr_stats */
	uint64_t direct_bytes[HR_N_ENGINES]; /**< by engine, as in hr_stats */
	uint64_t staging_bytes;              /**< the pool */
	char note[240];                      /**< as in hr_stats */
};
/** Start value of a struct hr_plan_info: its size, all else zero. */
#define HR_PLAN_INFO_INIT {sizeof(struct hr_plan_info)}
/** What hr_job_start() would do with these reads (their `dst` is not looked at). Reads no data. */
HR_API int hr_plan(hr_loader *loader, hr_model *model, const struct hr_read *reads, size_t n_reads,
		   struct hr_plan_info *out);

/** One line of what `headrace engines` prints. */
struct hr_probe_row {
	char kind[8];     /**< "engine" or "device" */
	char name[16];    /**< "uring", "cuda:0" */
	uint32_t usable;  /**< 1 or 0 */
	char reason[240]; /**< why not; or, if usable, what it is or how */
};
/**
 * Tells which engines and devices can be used here, and why not; with a model, for its files.
 * Fills up to `n_rows` rows and sets *n_found to how many there are. Reads no tensor data.
 */
HR_API int hr_probe(hr_model *model, struct hr_probe_row *rows, size_t n_rows, size_t *n_found);

/* ------------------------------------------------------------------------------------------ experimental */

#ifdef HR_EXPERIMENTAL

/** Pinned staging memory to device, 64 MiB copies or the pool if it is smaller; memcpy on cpu. */
#define HR_CEILING_LINK 0u
/** O_DIRECT reads of 4 MiB, 16 in flight, over the model's files, copied nowhere. */
#define HR_CEILING_STORAGE 1u
/** Buffered reads by all readers into staging memory, copied nowhere. */
#define HR_CEILING_CACHED 2u
/** memcpy of the same bytes by as many threads as the loader has readers. */
#define HR_CEILING_MEMORY 3u

/** What one part of this machine can do at best, measured by plain loops that share no code with the loader. */
struct hr_ceiling {
	size_t size;     /**< HR_CEILING_INIT sets it */
	uint64_t bytes;  /**< moved */
	uint64_t ns;     /**< wall clock */
	uint64_t cpu_ns; /**< of the whole process */
};
/** Start value of a struct hr_ceiling: its size, all else zero. */
#define HR_CEILING_INIT {sizeof(struct hr_ceiling)}
/**
 * Measures a ceiling: up to `bytes` (0: as many as the model has). Takes memory of its own: no more than the pool has,
 * but for HR_CEILING_MEMORY up to 4 GiB, since the destination of a load is fresh memory too. The loader should be
 * idle. Errors: HR_E_OPTS, HR_E_UNSUPPORTED (O_DIRECT refused), and those of what is measured.
 */
HR_API int hr_ceiling(hr_loader *loader, hr_model *model, uint32_t kind, uint64_t bytes, struct hr_ceiling *out);

#endif /* HR_EXPERIMENTAL */

#ifdef __cplusplus
}
#endif
#endif /* HEADRACE_H */
