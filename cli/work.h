/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the commands that move bytes share: opening by the command line, choosing tensors, one transfer, signals,
 * progress, and measuring the process.
 */
#ifndef HR_CLI_WORK_H
#define HR_CLI_WORK_H

#include "cli.h"

#include <time.h>

/* ---- selection.c ---- */

/* The model that the operands name: one name of any kind, or several files. Warnings go to stderr.
 * 0 or an exit status, after saying what is wrong. */
int cli_model_open(const struct cli_args *args, size_t n_names, hr_model **model);
/* Whether it is a store that holds the model, so that its checksums can be had. */
bool cli_is_in_store(const hr_model *model);
/* The file or device that a shard in a store lies on; NULL if it is in none, or that cannot be told. */
char *cli_region_of(const char *shard_path);
/* Whether it is on a block device, which is read around the page cache only. */
bool cli_is_direct_only(const hr_model *model);
#define CLI_STORE "store:"
/* Whether a name is that of a model in a store. */
bool cli_is_store(const char *name);
/* Whether all shards are plain files by their paths. */
bool cli_is_in_files(const hr_model *model);
/* The device asked for, or cuda:0 if it can be used, else cpu. 0 or an exit status. */
int cli_device_open(const struct cli_args *args, hr_device **device);
void cli_loader_opts(const struct cli_args *args, struct hr_loader_opts *opts);

/* Tensors that share a buffer; at least one, and no more once they have 1 GiB. */
struct cli_part {
	size_t first, n; /* of the set's */
	uint64_t bytes;  /* of the buffer */
};

/* Some tensors of a model, in file order, and where they go: each at a multiple of 256 bytes of its part's buffer,
 * so that neighbours in the file whose sizes are multiples of 256 are neighbours in the buffer and need one copy. */
struct cli_set {
	size_t n;
	uint64_t *tensors; /* numbers in the model */
	uint64_t *offsets; /* in the part's buffer */
	uint64_t *sizes;
	uint32_t *part_of;
	struct cli_part *parts;
	size_t n_parts;
	uint64_t bytes;        /* payload */
	uint64_t buffer_bytes; /* with the gaps */
};

/* All tensors, or those that --only matches. 0 or an exit status (nothing matches). */
int cli_set_new(const struct cli_args *args, hr_model *model, struct cli_set *set);
/* The first `bytes` of another set; the last tensor may be there in part only. */
void cli_set_first(const struct cli_set *all, uint64_t bytes, struct cli_set *set);
void cli_set_free(struct cli_set *set);
/* Reads of tensors first .. first + n - 1 into memory at `base` (NULL: nowhere, for a plan); the caller frees. */
struct hr_read *cli_set_reads(const struct cli_set *set, size_t first, size_t n, void *base);
/* Whether a name matches a pattern of *, ?, [a-z], [!a-z] and \ before one of these. */
bool cli_glob(const char *pattern, const char *name, size_t len);

/* ---- signals.c ---- */

/* From here on SIGINT and SIGTERM only set a flag; the second one ends the program as usual. */
void cli_signals_catch(void);
/* 0, or 128 + the number of the signal that came. */
int cli_signals_status(void);

/* ---- progress.c ---- */

/* A bar on stderr, if that is a terminal. */
struct cli_progress {
	bool is_on;
	bool is_drawn;
	const char *verb;
	uint64_t start_ns;
	uint64_t last_ns;
};

void cli_progress_start(struct cli_progress *progress, const char *verb);
void cli_progress_show(struct cli_progress *progress, uint64_t done, uint64_t total);
void cli_progress_end(struct cli_progress *progress);

/* ---- measure.c ---- */

uint64_t cli_now_ns(void);
uint64_t cli_cpu_ns(void); /* user and system time of the whole process */
/* A line of /proc/self/status in bytes ("VmHWM:"); 0 where it cannot be read. */
uint64_t cli_status_bytes(const char *field);
/* Lets the peak of the resident set (VmHWM) start anew; false where that is not allowed. */
bool cli_peak_reset(void);
unsigned cli_cpus(void);                      /* that this process may run on */
double cli_rate(uint64_t bytes, uint64_t ns); /* GB/s, 10^9 */

/* ---- transfer.c ---- */

#define CLI_INTERRUPTED 1

/* One load of a set, set-up counted: loader, then a buffer and a job for each part. */
struct cli_transfer {
	/* given */
	hr_device *device;
	hr_model *model;
	const struct cli_set *set;
	const struct hr_loader_opts *opts;
	struct cli_progress *progress; /* or NULL */
	uint64_t free_bytes;           /* of the device before anything was loaded; 0: asked at the start */
	/* found */
	hr_loader *loader;
	hr_buffer **buffers; /* one a part */
	hr_job **jobs;       /* NULL where none is open */
	uint64_t setup_ns;   /* until the first job has started */
	uint64_t elapsed_ns; /* all of it */
	uint64_t first_ns;   /* from the start, set-up counted, to the first payload at its destination */
	uint64_t cpu_ns;
	uint64_t device_bytes; /* what free device memory shrank by; 0 on cpu */
	struct hr_stats stats;
};

/* 0, an HR_E_* code (the thread's last error has the story), or CLI_INTERRUPTED: cancelled and settled. Close in
 * any case. */
int cli_transfer_run(struct cli_transfer *transfer);
void cli_transfer_close(struct cli_transfer *transfer);
/* Waits for a job in slices, with a tick (or NULL) after each, until it settles or a signal comes: then it is
 * cancelled and awaited, and the answer is CLI_INTERRUPTED. */
int cli_job_wait(hr_job *job, void (*tick)(void *ctx), void *ctx);
uint64_t cli_device_free(hr_device *device); /* 0: not known */

/* ---- verify.c ---- */

/* Some bytes of a tensor, where they arrived. */
struct cli_piece {
	uint64_t tensor; /* number in the model that was loaded */
	uint64_t start;  /* first byte, counted from the tensor's first */
	uint64_t bytes;
	hr_buffer *buffer;
	uint64_t offset; /* in the buffer */
};

/* What arrived, and what it is compared with. */
struct cli_compare {
	const struct cli_args *args;
	hr_model *model;
	hr_model *against;     /* has the bytes that are expected; perhaps `model` itself */
	const uint64_t *twins; /* numbers in `against`, by number in `model`; NULL: the same */
	bool is_plain;         /* `against` is in files, to be opened by path */
	const struct cli_piece *pieces;
	size_t n;
	struct cli_progress *progress;
	uint64_t done_before, total_bytes; /* for the progress */
};

/* Compares all pieces. 0, or an exit status after telling the first difference. */
int cli_compare(const struct cli_compare *what);
/* Compares what is in the buffers with a plain read of the files by path. 0 or an exit status. */
int cli_verify(const struct cli_args *args, const struct cli_transfer *transfer, uint64_t *elapsed_ns);

/* ---- stats_text.c ---- */

struct cli_json;
void cli_put_engines(FILE *out, const uint64_t *cached, const uint64_t *direct);
/* Of the staging memory, what is pinned memory of the host: all with a GPU (`driver` is not 0), unless it is GPU memory
 * itself: then 4 KiB for each slot and 64 KiB for each reader. */
uint64_t cli_pinned_bytes(const char *engine, uint32_t driver, const struct hr_stats *stats);
void cli_json_engines(struct cli_json *json, const uint64_t *cached, const uint64_t *direct);
void cli_json_waits(struct cli_json *json, const struct hr_stats *stats);

#endif
