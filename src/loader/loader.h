/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The loader's own header: what its files share. Read it before any of them.
 *
 * A job is drawn from its plan chunk by chunk. A chunk in motion is a **slot**'s (free -> filling -> full -> draining
 * -> free), or, when the CPU may write the destination itself, a reader's own, straight into the destination. Who does
 * what:
 *
 *   readers.c   N reader threads draw chunks, decide how each is read (choose.c), and read or hand it to the queued
 *               engine, whose one thread lives here too; a slot that is full goes to
 *   drainer.c   one thread, the only one that copies: all pieces of all full slots in one batch, one fence per batch;
 *               a slot is free again when its fence is done, never by counting reads
 *   job.c       start, wait, cancel, settle; feed.c is a job whose destinations come one after the other
 *   checksum.c  compares what was read with the checksums of the source, where a job asks for that: readers do it,
 *               between full and drained
 *   pool.c      the slots and every change of their states
 *   buffer.c    memory handed out, and taking it back
 *
 * **Lock order.** There is one lock, loader->lock; it guards all that says so and is never held over a system call, a
 * driver call or a caller's hook. (report_lock only keeps an engine from being closed while it is asked how it reads.)
 * A buffer's release takes no lock at all.
 *
 * **When a job settles.** `in_flight` counts its chunks in motion. A job has settled when it will draw no more chunks
 * and in_flight is 0: then nothing can touch its destinations. A slot whose read missed its deadline no longer counts,
 * since that read can only touch the slot, which is lost until it comes back.
 */
#ifndef HR_LOADER_LOADER_H
#define HR_LOADER_LOADER_H

#include "core/error.h"
#include "core/os.h"
#include "device/device.h"
#include "engine/engine.h"
#include "model/model.h"
#include "model/plan.h"

#include "headrace.h"

#include <pthread.h>
#include <stdatomic.h>

#define HR__MAX_READERS   64
#define HR__MAX_BATCHES   4  /* of copies in flight; see drainer.c */
#define HR__QUEUE_DEPTH   32 /* reads of the queued engine in flight at most */
#define HR__MAX_GAP_BYTES ((uint64_t)64 << 10)
#define HR__MAX_COPIES    4096  /* in one call to the device */
#define HR__PLAN_ALIGN    4096u /* the least; a source may want more */

/* ---- slots (pool.c) ---- */

enum hr__slot_state {
	HR__SLOT_FREE,
	HR__SLOT_FILLING,  /* an engine writes into it */
	HR__SLOT_FULL,     /* waits to be verified, for the drainer, or parked for destinations that are not known */
	HR__SLOT_DRAINING, /* copies read from it */
	HR__SLOT_LEAVING,  /* nothing reads from it any more; its window waits to be taken back by the engine */
	HR__SLOT_LOST,     /* its read or its copy never came back */
};

/* A chunk in motion. Its owner is who may touch it: a reader, an engine, the drainer; state changes are made under
 * the lock. */
struct hr__slot {
	struct hr__io io;
	unsigned char *memory;  /* slot_bytes of staging; NULL with windows, which have memory only while in use */
	unsigned char *payload; /* where the chunk's first byte lands in it, or is in the window */
	struct hr_job *job;     /* guarded by lock */
	struct hr__chunk chunk;
	struct hr__envelope envelope;
	/* Slots of a window on the device: the last partial block of a file, which the reader reads into host
	 * memory. It stands for the bytes from tail_at of the slot on. */
	unsigned char *tail;
	size_t tail_at, tail_bytes; /* tail_bytes 0: there is none */
	uint64_t deadline_ns;       /* of the read; UINT64_MAX = none; guarded by lock */
	size_t drained;             /* spans before this one have been copied or queued; guarded by lock */
	size_t draining_to;         /* ... before this one once the fence is done */
	struct hr__slot *next;      /* in whichever list it is; guarded by lock */
	const struct hr__engine_ops *engine;
	enum hr__slot_state state; /* guarded by lock; changed by pool.c alone */
	bool blocks_reader;        /* a reader thread is inside the read; guarded by lock */
	bool has_window;           /* release() of the engine is due when nothing reads from it; guarded by lock */
	hr_model *lost_model;      /* keeps the file of a lost slot's read; guarded by lock */
};

struct hr__slot_list {
	struct hr__slot *head, *tail;
};

struct hr__pool {
	enum hr__staging staging;
	unsigned char *memory; /* NULL with windows */
	struct hr__slot *slots;
	/* Last in, first out: what was used last is in the CPU's cache. In a window on the device first in, first out:
	 * what a storage driver keeps of a read is gone for longest then. Guarded by lock. */
	struct hr__slot *free, *free_last;
	uint64_t slot_bytes;
	uint64_t bytes;
	uint32_t n_slots, n_free, n_leaving, n_lost; /* counts guarded by lock */
	/* in use at once, when one was full: reads straight into destinations do not count; guarded by lock */
	uint32_t n_peak;
	uint32_t reserve; /* slots that look-ahead leaves free for chunks somebody waits for */
	/* Window on the device: the host memory beside it, HR__TAIL_BYTES for each slot and HR__BOUNCE_BYTES for each
	 * reader. */
	unsigned char *tails;
	size_t tails_bytes;
};

/* A pool of HR__STAGING_DEVICE has no memory yet: window.c gives it some. */
int hr__pool_open(struct hr__pool *pool, enum hr__staging staging, uint64_t staging_bytes, uint64_t slot_bytes);
void hr__pool_close(struct hr__pool *pool);
/* Before the first slot is taken: memory for the first `n` slots, which are then all there are. */
void hr__pool_place(struct hr__pool *pool, unsigned char *memory, uint32_t n);
/* All under the lock. Whether nothing is in motion; windows that nothing reads from may wait to be taken back. */
static inline bool hr__pool_is_idle(const struct hr__pool *pool)
{
	return pool->n_free + pool->n_leaving == pool->n_slots;
}
struct hr__slot *hr__pool_take(struct hr__pool *pool); /* free -> filling; NULL if there is none */
void hr__pool_move(struct hr__pool *pool, struct hr__slot *slot, enum hr__slot_state to);
void hr__slot_push(struct hr__slot_list *list, struct hr__slot *slot);
struct hr__slot *hr__slot_pop(struct hr__slot_list *list);

/* ---- memory handed out (buffer.c) ---- */

/* Where buffers' memory comes from and goes back to; stays while the loader is open, buffers are out, or feeds have
 * handles. */
struct hr__heap {
	hr_device *device;
	hr_loader *loader; /* counted: its handle, and with it the drainer's condition variable, stays as long */
	void *(*alloc)(void *ctx, uint64_t bytes, uint64_t align, void *stream);
	void (*release)(void *ctx, void *memory, uint64_t bytes, void *stream);
	void *ctx;
	_Atomic uint32_t count; /* the loader, every block and every feed */
	_Atomic uint64_t bytes, peak_bytes;
	/* a stack of blocks that wait for the loader; a mark once it has closed */
	struct hr__block *_Atomic given_back;
};

/* One allocation; several small buffers may share it. */
struct hr__block {
	struct hr__heap *heap;
	struct hr__block *next;
	void *memory;
	uint64_t bytes;
	_Atomic uint32_t count;
};

/* A counted view of a block; or what somebody else hands out (a cache its memory), who then is told of releases. */
struct hr__buffer_owner {
	void (*release)(hr_buffer *buffer);
	int (*release_on)(hr_buffer *buffer, void *stream);
};

struct hr_buffer {
	struct hr__block *block; /* NULL: mapped */
	hr_model *model;         /* mapped only; counted */
	struct hr__extent extent;
	void *memory;
	uint64_t bytes;
	_Atomic uint32_t count;
	const struct hr__buffer_owner *owner; /* NULL: itself */
};

int hr__heap_new(hr_loader *loader, const struct hr_loader_opts *opts, struct hr__heap **out);
void hr__heap_close(struct hr__heap *heap); /* by the loader: what is released from now on goes back at once */
struct hr__heap *hr__heap_acquire(struct hr__heap *heap);
void hr__heap_unref(struct hr__heap *heap); /* takes NULL */
/* Gives memory back to its owner that releases left waiting. `may_call_hooks`: the thread is inside one of our
 * calls. */
void hr__heap_reap(struct hr__heap *heap, bool may_call_hooks);
int hr__block_new(struct hr__heap *heap, uint64_t bytes, void *stream, struct hr__block **out);
void hr__block_release(struct hr__block *block);
/* Gives a block with one owner back at once: nothing queued uses it any more, and the next hr__block_new can have it.
 * Only on a thread that is inside one of our calls. */
void hr__block_free_idle(struct hr__block *block);
/* takes a count of the block */
int hr__buffer_new(struct hr__block *block, uint64_t offset, uint64_t bytes, hr_buffer **out);
/* A tensor in place; `memory` is where its source's first byte is mapped. Takes a count of the model, and on
 * success the caller's count of the mapping. */
int hr__buffer_new_mapped(hr_model *model, const struct hr__extent *extent, unsigned char *memory, hr_buffer **out);

/* ---- jobs (job.c) ---- */

/* Where a span goes. `room` counts from `at` to the end of the allocation, as far as the caller said: copies of
 * neighbours are made one only inside it, since a driver refuses a copy that crosses from one allocation into the
 * next. */
struct hr__target {
	unsigned char *at;
	uint64_t room;
};

/* What is counted; a job's are added to its loader's when they change. All guarded by lock. */
struct hr__counts {
	uint64_t done_bytes, read_bytes, n_chunks, n_copies, n_batches;
	uint64_t cached_bytes[HR_N_ENGINES], direct_bytes[HR_N_ENGINES];
	uint64_t storage_wait_ns, copy_wait_ns, read_cpu_ns;
	uint64_t verified_bytes;
};

struct hr_job {
	struct hr_loader *loader;
	hr_model *model;
	struct hr_job *next, *previous; /* in loader->jobs while it has not settled; guarded by lock */

	/* Set at the start, then only read. */
	struct hr__plan plan;
	struct hr__span *spans; /* n_spans, in the order of reading */
	uint64_t *tensors;      /* which tensor a span is of */
	size_t n_spans;
	uint64_t total_bytes;
	uint32_t io_timeout_ms;
	bool is_feed;
	bool fill_cold; /* caching auto: cold bytes of this model go through the page cache */
	/* Verifying: the checksums of each source that is read, by its number; NULL: the job does not verify. Then the
	 * plan's alignment is that of their blocks, so that every envelope is made of whole ones. */
	struct hr__source_blocks *blocks;
	void *signal_stream;
	uint64_t started_ns;
	uint64_t number; /* of the loader's jobs, in the order of their start */

	/* Guarded by lock. */
	struct hr__target *targets; /* of a span; known for spans below n_bound */
	uint64_t *left;             /* feed: bytes of a span that have not arrived; job: NULL */
	size_t n_bound;
	struct hr__cursor cursor;
	struct hr__slot_list parked; /* full slots whose next piece has no destination yet */
	void *mark;                  /* of wait_stream, until the drainer has used it */
	void *const *marks;          /* whoever started the job keeps them until it has settled */
	size_t n_marks;              /* that the drainer has not used yet */
	bool is_background;          /* its chunks are drawn when no other job has any, the oldest job's first */
	uint32_t in_flight;
	_Atomic int code; /* the first failure; written under the lock */
	bool is_drawn;    /* no more chunks will come of it */
	bool is_settled, is_checked, is_listed;
	struct hr__error_record error; /* the failure in words */
	pthread_cond_t changed;        /* settled, or (feed) a span has arrived */
	int event_fd;                  /* -1 until somebody asks */
	uint64_t settled_ns, first_ns;
	struct hr__counts counts;

	_Atomic bool direct_refused; /* an O_DIRECT read of this job failed with EINVAL: it goes on buffered */
};

/* What hr_job_start and hr_feed_open share: checks `reads` and sets the job up, not yet running. A feed's `dst` are
 * not looked at. `sorted` asks for file order. */
struct hr__job_request {
	const struct hr_read *reads;
	size_t n_reads;
	uint32_t io_timeout_ms;
	void *wait_stream, *signal_stream;
	void *const *marks; /* more that our writes must come after; not copied: they stay until the job has settled */
	size_t n_marks;
	bool is_feed, sorted, verify, is_background;
};
int hr__job_new(hr_loader *loader, hr_model *model, const struct hr__job_request *request, struct hr_job **out);
void hr__job_run(struct hr_job *job);
/* A background job that somebody waits for now. */
void hr__job_promote(struct hr_job *job);
bool hr__job_has_settled(struct hr_job *job);
void hr__job_free(struct hr_job *job); /* settled, or never run */
/* Under the lock: records the first failure, with words made from the place. */
void hr__job_fail(struct hr_job *job, int code, const struct hr__where *where, const char *format, ...)
	__attribute__((format(printf, 4, 5)));
/* Under the lock: one chunk less in motion; settles the job if it was the last. */
void hr__job_landed(struct hr_job *job);
void hr__job_try_settle(struct hr_job *job);
/* Under the lock: all pieces in spans [from, to) of a chunk have arrived. */
void hr__job_arrived(struct hr_job *job, const struct hr__chunk *chunk, size_t from, size_t to);
/* Why a read failed, in words: file, tensor, offsets, expected and found. Under the lock. */
void hr__job_fail_read(struct hr_job *job, const struct hr__io *io, const struct hr__chunk *chunk);
/* On the waiter's thread, once settled: compares the files with what they were. Records and returns the job's
 * failure. */
int hr__job_result(struct hr_job *job);

/* ---- checksums (checksum.c) ---- */

/* Gets the checksums of all sources that a job reads, and its plan's alignment from them. The spans are there. Errors:
 * HR_E_UNSUPPORTED (a source has none, or the engine leaves bytes where they are), HR_E_OPTS (slots below a block). */
int hr__verify_prepare(struct hr_job *job);
/* A block whose bytes are not what the checksum says. */
struct hr__bad_block {
	uint64_t number;
	uint32_t expected, found;
	int code; /* 0; else the slot could not be read back from the device, for this reason */
	struct hr__device_error error;
};
/* Compares what a full slot has; no lock. `bounce` is the reader's. False: *bad is the first that differs. */
bool hr__verify_slot(const struct hr__slot *slot, unsigned char *bounce, struct hr__bad_block *bad);
/* Under the lock. */
void hr__verify_fail(struct hr_job *job, const struct hr__slot *slot, const struct hr__bad_block *bad);

/* ---- how a chunk is read (choose.c) ---- */

struct hr__choice {
	const struct hr__engine_ops *engine; /* of the loader: blocking or queued */
	bool direct;
};
void hr__choose(const struct hr_loader *loader, const struct hr_job *job, const struct hr__chunk *chunk,
		struct hr__choice *out);
/* What is read for a chunk: whole blocks where the read is direct or verified, else just its bytes. */
void hr__choose_envelope(const struct hr_job *job, const struct hr__chunk *chunk, bool direct,
			 struct hr__envelope *out);
/* At the start of a job: refuses what was asked for by name and cannot be done for these files. */
int hr__choose_check(const struct hr_loader *loader, const hr_model *model);
/* caching auto: whether cold bytes of this model should go through the page cache. */
bool hr__choose_fill(const struct hr_loader *loader, const hr_model *model);
void hr__choose_note(struct hr_loader *loader, const struct hr_job *job, char *out, size_t out_bytes);
/* The alignment that all sources of a model are content with. */
uint32_t hr__choose_align(const hr_loader *loader, const hr_model *model);

/* ---- windows on the device (window.c) ---- */

#define HR__TAIL_BYTES   4096u
#define HR__BOUNCE_BYTES ((size_t)64 << 10)

/* Allocates the pool's window on the loader's device and opens the engine over it; a window that it cannot register
 * is made smaller. The reason is for the engine's failure. */
int hr__window_open(hr_loader *loader, const struct hr__engine_ops *ops, char *reason, size_t reason_bytes);
void hr__window_close(hr_loader *loader); /* takes one that was never opened */
/* Which library reads, how, and what it took. */
void hr__window_note(hr_loader *loader, char *out, size_t out_bytes);
/* What is to be read how: the rest of a prepared direct request that ends with its file in mid-block. */
void hr__window_aim(struct hr__slot *slot, const struct hr__source *source);
/* Reads that rest; false, and the request failed, if it does not come. */
bool hr__window_read_tail(struct hr__slot *slot);

/* ---- moves (move.c) ---- */

/* One copy between memory on the device and pinned host memory, in order with the copies of jobs: a job that starts
 * after a move writes after it. The owner keeps it, and both memories, until it is done. */
struct hr__move {
	void *device, *host;
	size_t bytes;       /* not 0 */
	bool is_down;       /* to the host */
	void *const *marks; /* to come after; they stay until it is done */
	size_t n_marks;
	/* Guarded by lock. */
	bool is_done;
	int code; /* HR_E_*: the copy failed */
	struct hr__device_error error;
	struct hr__move *next;
};

/* HR_E_CANCELLED: the loader is closing. */
int hr__move_start(hr_loader *loader, struct hr__move *move);
/* Waits until it is done; false once the deadline has passed (0: asks). */
bool hr__move_wait(hr_loader *loader, struct hr__move *move, uint64_t deadline_ns);
/* By the drainer, under the lock. */
void hr__move_end(hr_loader *loader, struct hr__move *move, int code, const struct hr__device_error *error);

/* ---- the loader ---- */

struct hr__reader {
	struct hr_loader *loader;
	pthread_t thread;
	struct iovec *iov; /* HR__MAX_IOV, for reads straight into destinations */
	/* Window on the device: HR__BOUNCE_BYTES of host memory, through which slots are verified. */
	unsigned char *bounce;
};

struct hr_loader {
	hr_device *device;
	struct hr__heap *heap;
	struct hr__pool pool;
	uint32_t caching;
	uint32_t n_readers;
	struct hr__reader *readers;
	pthread_t drainer_thread, queue_thread;
	bool drainer_started, queue_started, is_pinned;

	const struct hr__engine_ops *blocking, *queued; /* either may be NULL, not both */
	void *blocking_state, *queued_state;
	pthread_mutex_t report_lock;
	bool compat;                         /* engine cufile may read through host memory */
	bool window_is_kept;                 /* something still uses it: it is never freed */
	bool is_reportable;                  /* guarded by report_lock */
	uint64_t window_asked, window_bytes; /* the latter may be less, for this reason */
	char window_reason[120];
	uint64_t engine_host_bytes, engine_device_bytes; /* what its library took at the start */
	bool engine_named;                               /* by the caller: no falling back */
	char queued_reason[200];                         /* why there is no queued engine, if one was wanted */

	_Atomic uint32_t count; /* the caller, and each job handle */

	pthread_mutex_t lock;
	pthread_cond_t work;  /* readers: a chunk may be drawn, or the end */
	pthread_cond_t full;  /* the drainer */
	pthread_cond_t queue; /* the queued engine's thread */
	pthread_cond_t idle;  /* whoever closes the loader: a job settled */
	/* All guarded by lock. */
	struct hr_job *jobs; /* a ring of those not settled; the one to draw from next */
	uint32_t n_jobs, n_deadlines;
	uint32_t n_background; /* of n_jobs */
	uint64_t n_started;
	struct hr__slot_list full_slots;
	struct hr__move *moves, **moves_end; /* not sent yet, oldest first */
	uint32_t n_moves;                    /* not done yet */
	struct hr__slot_list queue_slots;    /* for the queued engine, not yet submitted */
	struct hr__slot_list leaving;        /* slots whose windows readers shall take back */
	struct hr__slot_list verify_slots;   /* full, for whichever reader is free next */
	uint32_t queue_in_flight;
	uint32_t n_idle_readers;  /* waiting for `work` */
	uint32_t n_stuck_readers; /* inside a read of a lost slot */
	bool queue_reaping, drainer_waiting;
	uint32_t n_touched; /* readers that have made their part of the pool's pages exist */
	bool is_closing, is_closed, stop;
	bool verify; /* every job; set at the opening */
	struct hr__counts counts;
	uint64_t total_bytes, total_tensors, opened_ns;

	/* The drainer's own. */
	struct hr__lane *lane;
	struct hr__copy *copies;
	int lane_code; /* set before the drainer reports that it is up; guarded by lock */
	bool lane_ready;
	struct hr__device_error lane_error;
};

void *hr__reader_main(void *reader);
void *hr__queue_main(void *loader);
void *hr__drainer_main(void *loader);
void hr__loader_unref(hr_loader *loader);
/* What open_engine of loader.c and window.c share: makes the state, opens, and puts the engine into its place. */
int hr__loader_engine(hr_loader *loader, const struct hr__engine_ops *ops, char *reason, size_t reason_bytes);
/* Under the lock: reads that never came back hold all staging memory, all readers, or all places of the queued
 * engine. */
bool hr__loader_is_lost(const hr_loader *loader);
/* Its handle may still be counted then. */
bool hr__loader_is_closed(hr_loader *loader);
/* Every public call begins with it: HR_E_FORKED or HR_E_OPTS. */
int hr__loader_here(const hr_loader *loader);
/* Under the lock: a full slot goes to the drainer, is parked if its next piece has no destination yet, or goes back
 * to the pool if its job has failed. */
void hr__drain(hr_loader *loader, struct hr__slot *slot);
/* Under the lock: a slot's chunk is no longer in motion. */
void hr__slot_land(hr_loader *loader, struct hr__slot *slot);
/* Under the lock, which it gives back in between: gives the windows that nothing reads from any more to the engine. */
void hr__take_windows_back(hr_loader *loader);
/* Under the lock: readers should look for work. */
void hr__wake_readers(hr_loader *loader, uint32_t n);

#endif
