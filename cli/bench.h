/* SPDX-License-Identifier: Apache-2.0 */
/*
 * "headrace bench" in parts: cmd_bench.c decides what to measure and in which order, bench_run.c takes one sample,
 * bench_state.c makes files cold or warm and proves it, bench_synthetic.c makes checkpoints, bench_open.c times
 * opening, bench_loop.c a model that does not fit, bench_machine.c says where this was, bench_report.c tells the
 * result.
 *
 * Everything is measured in rounds: in each, every series gets one sample, so that a neighbour's noise falls
 * on all of them alike. A figure is a median with its spread, beside ceilings of the same run.
 */
#ifndef HR_CLI_BENCH_H
#define HR_CLI_BENCH_H

#include "work.h"

enum bench_what {
	BENCH_STORAGE, /* ceilings, in the order of HR_CEILING_* below */
	BENCH_LINK,
	BENCH_CACHED,
	BENCH_MEMORY,
	BENCH_LOAD, /* one buffer, one job */
	BENCH_FEED, /* hr_feed, every buffer kept */
};

struct bench_sample {
	uint64_t bytes;
	uint64_t ns;
	uint64_t cpu_ns;
	uint64_t first_ns;
	uint64_t setup_ns;
	uint64_t resident_bytes; /* VmHWM of this sample, or of the process if it cannot be reset */
	uint64_t beyond_bytes;   /* of that, what was not there before and is not the tensors' own */
	uint64_t
		/* what free device memory shrank by since the start; the driver may keep what was freed */
		device_bytes;
	bool is_prepared; /* the files were proved to be cold or warm */
};

struct bench_series {
	enum bench_what what;
	bool is_cold;
	bool is_partly; /* `percent` of the files in the page cache */
	unsigned percent;
	const char *engine;     /* NULL: as the options say */
	uint64_t staging_bytes; /* 0: as the options say */
	uint64_t slot_bytes;
	size_t n;
	struct bench_sample *samples;
	struct hr_stats stats; /* of the last sample of load and feed */
};

struct bench {
	const struct cli_args *args;
	hr_model *model;
	hr_device *device;
	struct hr_device_info about;
	uint64_t device_open_ns;
	uint64_t free_bytes; /* of the device at the start; 0 on cpu */
	struct cli_set set;
	hr_device *prober_device; /* asks what is in the page cache */
	hr_loader *prober;
	struct hr_read *prober_reads;
	struct hr_probe_row *rows; /* of hr_probe(), for the names of engines */
	bool has_peak_reset;
	size_t rounds;
	size_t n_series;
	struct bench_series *series;
};

bool bench_is_ceiling(enum bench_what what);
const char *bench_name(enum bench_what what);

/* ---- bench_run.c: 0 or an exit status ---- */

int bench_sample_take(struct bench *bench, struct bench_series *series);

/* ---- bench_state.c ---- */

/* Opens what asks for residency. 0 or an exit status. */
int bench_prober_open(struct bench *bench);
void bench_prober_close(struct bench *bench);
/* Takes the files out of the page cache, or brings them all in; whether that worked, as far as can be told. */
bool bench_make_cold(struct bench *bench);
bool bench_make_warm(struct bench *bench);
/* The same for a part of every file, in stripes; within a fiftieth. */
bool bench_make_partly(struct bench *bench, unsigned percent);

/* ---- bench_synthetic.c ---- */

struct bench_files {
	char *dir; /* NULL: none made */
	char **paths;
	size_t n;
};

/* Makes the checkpoint that `spec` describes in a new folder under `parent`. 0 or an exit status; free in any case. */
int bench_synthetic_new(const struct cli_args *args, const char *spec, const char *parent, struct bench_files *files);
/* Removes the files, unless they are to be kept. */
void bench_synthetic_free(struct bench_files *files, bool keep);

/* ---- bench_shapes.c: which tensors a specification means ---- */

struct bench_tensor {
	char *name;
	uint64_t dims[2];
	uint32_t rank;
	uint32_t shard;
	uint64_t bytes; /* dtype is BF16 */
};

struct bench_shapes {
	size_t n;
	size_t room;
	struct bench_tensor *tensors;
	uint32_t n_shards;
	uint64_t bytes;
};

/* "llama:SIZE", "small:NxSIZE[/SHARDS]", "one:SIZE". 0, or CLI_USAGE after saying what is wrong. */
int bench_shapes_new(const struct cli_args *args, const char *spec, struct bench_shapes *shapes);
void bench_shapes_free(struct bench_shapes *shapes);

/* ---- bench_open.c, bench_loop.c, bench_machine.c, bench_report.c ---- */

int bench_open_run(const struct cli_args *args, const char *const *names, size_t n_names);
/* With model, device and prober open. 0 or an exit status. */
int bench_loop_run(struct bench *bench);
void bench_machine_json(struct cli_json *json, const struct hr_device_info *about, const char *path);
void bench_report_text(const struct bench *bench);
void bench_report_json(const struct bench *bench);

struct bench_spread {
	double median, min, max;
};
/* Sorts in place. */
struct bench_spread bench_spread_of(double *values, size_t n);
void bench_spread_json(struct cli_json *json, const char *key, const struct bench_spread *spread);

#endif
