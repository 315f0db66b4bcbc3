/* SPDX-License-Identifier: Apache-2.0 */
/*
 * "headrace doctor" in parts. Facts come first: doctor_files.c reads them from files of the kernel below a root (a test
 * gives it a tree of its own), doctor_ask.c asks the system and the library for the rest. Then the checks judge: each
 * is a pure function from the facts to a verdict with a reason and advice, listed in doctor_checks.c. doctor_trial.c
 * measures, doctor_report.c prints, cmd_doctor.c puts it together.
 *
 * Everything in struct doctor_facts is "not known" when it is zero, unless the comment says otherwise.
 */
#ifndef HR_CLI_DOCTOR_H
#define HR_CLI_DOCTOR_H

#include "work.h"

/* ---- facts ---- */

#define DOCTOR_MAX_GPUS 16
#define DOCTOR_NO_NODE  (-1)

/* An NVIDIA GPU on the PCI bus. */
struct doctor_gpu {
	char address[16]; /* "0000:17:00.0" */
	int node;         /* of memory; DOCTOR_NO_NODE: not known, or there is only one */
	uint64_t bar1_bytes;
	unsigned link_width, link_width_max; /* PCIe lanes */
};

struct doctor_facts {
	/* the kernel and this process: doctor_files.c */
	char kernel[64]; /* "6.1.0-18-amd64" */
	unsigned cpus_online, cpus_allowed;
	double cpu_quota;      /* CPUs that a cgroup allows; 0: no limit */
	uint64_t memory_total; /* bytes */
	uint64_t memory_available;
	unsigned cgroup_version; /* 1, 2; of the memory controller */
	uint64_t cgroup_limit;   /* bytes; 0: no limit */
	uint64_t cgroup_used;    /* page cache that can be dropped not counted */
	char huge_pages[16];     /* "always", "madvise", "never"; empty: the kernel has none */
	bool has_memlock, has_files;
	uint64_t memlock; /* bytes; UINT64_MAX: no limit */
	uint64_t files, files_hard;
	bool may_lock;          /* CAP_IPC_LOCK: memlock is not counted */
	bool may_admin;         /* CAP_SYS_ADMIN */
	int uring_disabled;     /* sysctl kernel.io_uring_disabled; -1: there is none */
	int seccomp;            /* 0 none, 1 strict, 2 a filter */
	unsigned n_nodes;       /* of memory */
	uint64_t allowed_nodes; /* bit n: a CPU of node n is allowed */
	char container[32];     /* what says so: "docker", "podman", "kubernetes" */
	bool is_root_overlay;   /* "/" is an overlay */
	bool is_wsl;            /* Windows' subsystem: /dev/dxg */

	/* the GPU: doctor_files.c */
	unsigned n_gpus;
	struct doctor_gpu gpus[DOCTOR_MAX_GPUS];
	bool has_modules;                                     /* /proc/modules is there */
	bool has_nvidia, has_uvm, has_nvidia_fs, has_nouveau; /* modules */
	char driver[32];                                      /* "580.95.05" */
	bool has_nvidiactl, has_uvm_device;                   /* in /dev */
	unsigned n_gpu_devices;                               /* /dev/nvidia0 ... */
	bool has_udev;                                        /* /run/udev/data is there */
	bool has_ugds, has_ugds_disk;                         /* the module ugds_drv; /dev/ugds_drv0 */

	/* where the model is: doctor_files.c, given `path` */
	char path[4096]; /* resolved; empty: no model */
	char block[32];  /* "259:1": the path is a block device with a store on it */
	char fs[32];     /* "ext4" */
	char mount[512];
	char mount_options[512];
	char disk[64]; /* "nvme0n1p1"; empty: none, or not to be told */
	int disk_node;
	bool is_disk_known, is_rotational, is_stacked; /* stacked: device mapper, md, loop */

	/* asked: doctor_ask.c */
	bool wants_gpu;               /* a GPU was named on the command line */
	bool to_gpu;                  /* where the model would go */
	struct hr_device_info device; /* zeros: none could be opened */
	char device_error[400];
	char cuda_reason[240];  /* why there is no GPU */
	char uring_reason[240]; /* why io_uring cannot be used; empty: it can */
	uint64_t shm_bytes;     /* /dev/shm */
	uint64_t staging_bytes;
	bool has_model;
	char model_error[600]; /* why it cannot be opened */
	int model_errno;
	uint64_t model_bytes, model_needs; /* payload; with the gaps between tensors in memory */
	uint32_t n_shards;
	uint64_t plan_bytes, resident_bytes; /* that would be read; of them in the page cache */
	int direct_errno;                    /* of opening with O_DIRECT; 0: it works */
	uint32_t direct_memory_align, direct_offset_align;
};

/* Reads what files below `root` ("" for the real ones) say. `facts->path` is given. */
void doctor_files_read(const char *root, struct doctor_facts *facts);
/* Its part about the path (doctor_mounts.c). */
void doctor_mounts_read(const char *root, struct doctor_facts *facts);

/* ---- checks ---- */

enum doctor_verdict {
	DOCTOR_OK,
	DOCTOR_WARN, /* it works, but not as well as it could */
	DOCTOR_FAIL, /* something will not work */
	DOCTOR_NONE, /* does not apply, or cannot be told */
};

struct doctor_finding {
	enum doctor_verdict verdict;
	char reason[640];
	char advice[480]; /* what to do; empty: nothing */
};

struct doctor_check {
	const char *id;   /* stable: for programs and the documentation */
	const char *what; /* what it looks at, in a few words */
	bool is_of_model; /* says nothing without one */
	void (*judge)(const struct doctor_facts *facts, struct doctor_finding *finding);
};

/* In the order in which they are printed; ends with an id of NULL. */
extern const struct doctor_check doctor_checks[];
const char *doctor_verdict_name(enum doctor_verdict verdict);

/* For checks: sets the verdict with its reason; the advice is empty until doctor_advise(). */
void doctor_say(struct doctor_finding *finding, enum doctor_verdict verdict, const char *format, ...)
	__attribute__((format(printf, 3, 4)));
void doctor_advise(struct doctor_finding *finding, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* "6.1.0" as 6001; 0 if it cannot be read. */
unsigned doctor_kernel_number(const char *release);
/* What memory this process can have: the system's and its cgroup's, the smaller. */
uint64_t doctor_memory_left(const struct doctor_facts *facts);

/* doctor_machine.c, doctor_gpu.c, doctor_model.c */
#define DOCTOR_JUDGE(name) void doctor_judge_##name(const struct doctor_facts *facts, struct doctor_finding *finding)
DOCTOR_JUDGE(kernel);
DOCTOR_JUDGE(ugds);
DOCTOR_JUDGE(cpus);
DOCTOR_JUDGE(memory);
DOCTOR_JUDGE(cgroup);
DOCTOR_JUDGE(huge_pages);
DOCTOR_JUDGE(memlock);
DOCTOR_JUDGE(files);
DOCTOR_JUDGE(uring);
DOCTOR_JUDGE(container);
DOCTOR_JUDGE(gpu);
DOCTOR_JUDGE(cuda);
DOCTOR_JUDGE(numa);
DOCTOR_JUDGE(bar1);
DOCTOR_JUDGE(link);
DOCTOR_JUDGE(gds);
DOCTOR_JUDGE(model);
DOCTOR_JUDGE(fs);
DOCTOR_JUDGE(direct);
DOCTOR_JUDGE(disk);
DOCTOR_JUDGE(cache);

/* ---- what was found ---- */

/* One engine, alone and with each way of caching. */
struct doctor_engine {
	char name[16];
	bool is_usable;
	char reason[240];
	bool is_known[3]; /* by HR_CACHING_*; only with a model */
	bool works[3];
	char why[3][400]; /* why not */
};

struct doctor_sample {
	double gb_per_second;
	double cpu_per_gb;
};

#define DOCTOR_MAX_ROUNDS 5

/* One setting in one state of the page cache. */
struct doctor_series {
	char engine[16]; /* "auto" */
	uint32_t caching;
	bool is_cold;
	bool is_prepared; /* each time the page cache was proved to be as it should */
	size_t n;
	struct doctor_sample samples[DOCTOR_MAX_ROUNDS];
	uint64_t pinned_bytes, staging_peak_bytes;
	char error[400]; /* it failed */
};

struct doctor_trial {
	uint64_t sample_bytes;
	double seconds; /* that it took */
	size_t n;
	struct doctor_series *series;
};

struct doctor {
	const struct cli_args *args;
	hr_model *model;
	hr_device *device;
	struct cli_set set;
	struct doctor_facts facts;
	struct doctor_engine *engines;
	size_t n_engines;
	struct hr_probe_row *rows; /* of hr_probe() */
	size_t n_rows;
	struct doctor_trial trial;
	const char *best_engine; /* NULL: auto */
	uint32_t best_caching;
	char best_why[240];
};

/* doctor_ask.c. 0 or an exit status; what does not work is a fact, not a failure. */
int doctor_ask(struct doctor *doctor);
void doctor_free(struct doctor *doctor);
/* doctor_trial.c: measures, and chooses the best setting. 0 or an exit status. */
int doctor_trial_run(struct doctor *doctor);
struct bench_spread doctor_rate(const struct doctor_series *series);
double doctor_cpu(const struct doctor_series *series);
/* doctor_report.c: prints; true if nothing failed. */
bool doctor_report(const struct doctor *doctor);
const char *doctor_caching_name(uint32_t caching);

#endif
