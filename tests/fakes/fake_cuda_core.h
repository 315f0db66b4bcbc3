/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the files of the look-alike driver share. fake_cuda.c has the controls, devices and contexts, fake_cuda_calls.c
 * the rest of the driver's functions, fake_cuda_queue.c streams, events and the worker that does late what was queued,
 * fake_cuda_memory.c memory of device and host.
 *
 * One lock guards everything; the worker drops it only while it copies bytes. Device memory has two addresses: the one
 * that callers see cannot be read or written by the CPU at all, so code that takes a device pointer for a host pointer
 * dies; the bytes are at `backing`.
 */
#ifndef HR_TESTS_FAKE_CUDA_CORE_H
#define HR_TESTS_FAKE_CUDA_CORE_H

#include "device/cuda_syms.h"

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define FAKE_MAX_DEVICES 8
#define FAKE_POISON      0xdb

#define FAKE_SETTINGS(X)                                                                                               \
	X(devices, 1)                                                                                                  \
	X(memory_mib, 4096)                                                                                            \
	X(version, 13000) X(pools, 1) X(host_pointers, 1) X(batch_result, 0) X(register_mib, 0) X(read_only, 1) X(host_tables, 0) X(delay_us, 200)       \
		X(seed, 1) X(strict, 1)

struct fake_settings {
#define FAKE_FIELD(name, value) long long name;
	FAKE_SETTINGS(FAKE_FIELD)
#undef FAKE_FIELD
};

struct fake_context {
	int device;
	int n_retained;
	int sticky; /* a result that every call answers from now on */
	uint64_t used_bytes, peak_bytes;
};

/* Device memory. Freed blocks stay in the table for a while, so that stale addresses are known for what they are. */
struct fake_block {
	uint64_t address;
	size_t bytes;
	char *backing;
	struct fake_context *context;
	bool is_ready;  /* its allocation has happened in its stream's order */
	bool is_packed; /* its address lies wall to wall with others' */
	bool is_freed;  /* somebody asked for that: no new copies */
	bool is_gone;   /* and it has happened */
	bool of_pool;
	unsigned n_pending; /* copies */
};

/* Registered host memory. */
struct fake_range {
	struct fake_range *next;
	char *base;
	size_t bytes;
	unsigned n_pending;
	bool is_gone;
};

/* What an event stood for when it was recorded. */
struct fake_record {
	unsigned refs;
	bool is_done;
	bool is_captured;
};

struct fake_event {
	struct fake_event *next;
	struct fake_context *context;
	struct fake_record *record;
};

struct fake_copy {
	struct fake_block *block;
	size_t block_offset;
	char *host;
	size_t bytes;
	struct fake_range *range;  /* NULL: pageable */
	struct fake_block *source; /* instead of `host`: device to device */
	size_t source_offset;
};

enum fake_kind { FAKE_COPY_IN, FAKE_COPY_OUT, FAKE_RECORD, FAKE_WAIT, FAKE_ALLOC, FAKE_FREE, FAKE_HOST };

struct fake_op {
	struct fake_op *next;
	enum fake_kind kind;
	uint64_t not_before_ns;
	struct fake_record *record;
	struct fake_block *block;
	void (*host)(void *arg);
	void *host_arg;
	size_t n_copies;
	struct fake_copy copies[];
};

struct fake_stream {
	struct fake_stream *next;
	struct fake_context *context;
	struct fake_op *first, **end;
	bool is_busy; /* its first operation is running */
	bool is_destroyed;
	bool is_capturing;
	bool capture_broken;
};

struct fake_pool {
	struct fake_pool *next;
	struct fake_context *context;
};

extern struct fake_settings fake_settings;
extern pthread_mutex_t fake_lock;
extern struct fake_stream *fake_streams;
extern struct fake_event *fake_events;
extern struct fake_pool *fake_pools;
extern int fake_global_captures;
extern struct fake_context fake_contexts[FAKE_MAX_DEVICES];

/* fake_cuda.c */
void fake_error(const char *format, ...) __attribute__((format(printf, 1, 2)));
int fake_armed(const char *function); /* the armed result of this call, or 0 */
uint64_t fake_random(void);
void *fake_alloc(size_t bytes); /* zeroed; never NULL */

/* The frame of every function of the driver (fake_cuda.c). fake_begin takes the lock, or gives the result that the
 * function answers at once; fake_end gives the lock back. */
enum fake_needs {
	NEEDS_NOTHING = 0,
	NEEDS_INIT = 1,
	NEEDS_CONTEXT = 3,
	UNSAFE_IN_CAPTURE = 4, /* "potentially unsafe", as cuda.h calls it */
};

int fake_begin(const char *function, int needs);
int fake_end(int code);
#define BEGIN(needs)                                                                                                   \
	do {                                                                                                           \
		int code_ = fake_begin(__func__, (needs));                                                             \
		if (code_)                                                                                             \
			return code_;                                                                                  \
	} while (0)

struct fake_context *fake_current(void);
bool fake_is_stream(const struct fake_stream *stream); /* records an error if not */
bool fake_is_event(const struct fake_event *event);

/* fake_cuda_memory.c; all under fake_lock. */
struct fake_block *fake_block_new(struct fake_context *context, size_t bytes); /* NULL: no memory */
struct fake_block *fake_block_find(uint64_t address, size_t bytes);            /* holding the whole range */
void fake_block_free(struct fake_block *block);
long long fake_blocks_live(const struct fake_context *context); /* NULL = of all */
int fake_range_add(char *base, size_t bytes, unsigned int flags);
int fake_range_remove(char *base);
/* 0 and the range that holds these bytes (NULL: none does); INVALID_VALUE if they cross a border. */
int fake_range_find(const char *base, size_t bytes, struct fake_range **out);
long long fake_ranges_live(void);
long long fake_ranges_most(void); /* bytes at once since it was last asked */
/* Fills one copy and counts it as pending. If `host` is an address of device memory it is one within the device. */
int fake_copy_prepare(struct fake_copy *copy, uint64_t device, char *host, size_t bytes, bool must_be_registered);
void fake_copy_finished(struct fake_copy *copy);

/* fake_cuda_queue.c; all under fake_lock. */
struct fake_op *fake_op_new(enum fake_kind kind, size_t n_copies);
void fake_push(struct fake_stream *stream, struct fake_op *op);
void fake_wait_until_idle(struct fake_stream *stream); /* or its context is broken */
void fake_record_drop(struct fake_record *record);
/* Whether a copy that is queued or runs reads or writes some of this device memory. */
bool fake_is_in_flight(uint64_t address, size_t bytes);
void fake_changed_tell(void);
void fake_changed_wait(void);

#define API __attribute__((visibility("default")))

/* The functions must look exactly as the library's table has them. */
#define HR__DECLARE(field, symbol, parameters, required) API hr__cu_result symbol parameters;
HR__CU_SYMBOLS(HR__DECLARE)
#undef HR__DECLARE
API hr__cu_result cuMemcpyBatchAsync HR__CU_BATCH_V1_PARAMETERS;
API hr__cu_result cuMemcpyBatchAsync_v2 HR__CU_BATCH_V2_PARAMETERS;
/* Only tests call these. */
API hr__cu_result cuCtxGetCurrent(hr__cu_context *context);
API hr__cu_result cuMemcpyDtoH_v2(void *dst, hr__cu_ptr src, size_t bytes);
API hr__cu_result cuLaunchHostFunc(hr__cu_stream stream, void (*host)(void *arg), void *arg);
API hr__cu_result cuStreamBeginCapture_v2(hr__cu_stream stream, int mode);
API hr__cu_result cuStreamEndCapture(hr__cu_stream stream, void **graph);
API hr__cu_result cuGraphDestroy(void *graph);

#endif
