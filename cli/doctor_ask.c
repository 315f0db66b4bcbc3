/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Facts that are asked for: of the system by calls, of the library by hr_probe(), hr_model_open(), hr_device_open() and
 * hr_plan(). That something cannot be opened is a fact like others, and the next question is asked all the same. No
 * data of tensors is read.
 */
#include "doctor.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#define DEFAULT_STAGING (UINT64_C(64) << 20)
#define PROBE_STAGING   (UINT64_C(16) << 20) /* enough for slots of the default size */

/* ---- the model's files ---- */

static void ask_direct(struct doctor_facts *facts, const char *path)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC | O_DIRECT);

	if (fd < 0) {
		facts->direct_errno = errno;
		return;
	}
#ifdef STATX_DIOALIGN
	struct statx st;

	if (statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &st) == 0 && (st.stx_mask & STATX_DIOALIGN)) {
		facts->direct_memory_align = st.stx_dio_mem_align;
		facts->direct_offset_align = st.stx_dio_offset_align;
		if (!st.stx_dio_offset_align)
			facts->direct_errno = EINVAL;
	}
#endif
	close(fd);
}

/* The first shard's file, or what the store is on that holds it; to be freed. NULL: neither is known. */
static char *place_of_model(const struct doctor *d)
{
	struct hr_shard shard = HR_SHARD_INIT;
	const char *name = d->args->names[0];

	if (cli_is_store(name))
		return cli_text("%.*s", (int)strcspn(name + strlen(CLI_STORE), "#"), name + strlen(CLI_STORE));
	if (d->facts.n_shards == 0 || hr_model_shard(d->model, 0, &shard) || !cli_is_in_files(d->model))
		return NULL;
	return cli_text("%s", shard.path);
}

static void ask_files(struct doctor *d)
{
	struct doctor_facts *facts = &d->facts;
	char *place = place_of_model(d);
	char path[PATH_MAX];
	struct stat st;

	if (place && realpath(place, path) && stat(path, &st) == 0) {
		ask_direct(facts, path);
		snprintf(facts->path, sizeof(facts->path), "%.4095s", path);
		if (S_ISBLK(st.st_mode))
			snprintf(facts->block, sizeof(facts->block), "%u:%u", major(st.st_rdev), minor(st.st_rdev));
	}
	cli_free(place);
}

/* What is in the page cache: asked as "load" to cpu would ask it. */
static void ask_resident(struct doctor *d)
{
	const struct hr_loader_opts opts = {.size = sizeof(opts), .staging_bytes = UINT64_C(1) << 20, .readers = 1};
	struct hr_plan_info info = HR_PLAN_INFO_INIT;
	struct hr_read *reads = cli_set_reads(&d->set, 0, d->set.n, NULL);
	hr_device *device = NULL;
	hr_loader *loader = NULL;

	if (hr_device_open("cpu", &device) == 0 && hr_loader_open(device, &opts, &loader) == 0 &&
	    hr_plan(loader, d->model, reads, d->set.n, &info) == 0) {
		d->facts.plan_bytes = info.read_bytes;
		d->facts.resident_bytes = info.resident_bytes;
	}
	hr_loader_close(loader, HR_FOREVER);
	hr_device_close(device);
	cli_free(reads);
}

static int ask_model(struct doctor *d)
{
	const struct cli_args *args = d->args;
	struct doctor_facts *facts = &d->facts;
	int rc = args->n_names == 1 ? hr_model_open(args->names[0], NULL, &d->model)
				    : hr_model_open_files(args->names, args->n_names, NULL, &d->model);

	if (rc) {
		snprintf(facts->model_error, sizeof(facts->model_error), "%s", hr_error_last()->message);
		facts->model_errno = hr_error_last()->system;
		return 0;
	}
	rc = cli_set_new(args, d->model, &d->set);
	if (rc)
		return rc;
	facts->has_model = true;
	facts->model_bytes = d->set.bytes;
	facts->model_needs = d->set.buffer_bytes;
	facts->n_shards = hr_model_n_shards(d->model);
	ask_files(d);
	ask_resident(d);
	return 0;
}

/* ---- engines and devices ---- */

static int ask_probe(struct doctor *d)
{
	size_t n_found = 0;

	for (;;) {
		if (hr_probe(d->model, d->rows, d->n_rows, &n_found))
			return cli_fail_last(d->args);
		if (n_found <= d->n_rows)
			break;
		d->n_rows = n_found;
		d->rows = cli_grow(d->rows, d->n_rows, sizeof(*d->rows));
	}
	d->n_rows = n_found;
	return 0;
}

static void note_rows(struct doctor *d)
{
	struct doctor_facts *facts = &d->facts;
	bool has_cuda = false;

	for (size_t i = 0; i < d->n_rows; i++) {
		const struct hr_probe_row *row = &d->rows[i];
		bool is_cuda = strcmp(row->kind, "device") == 0 && strncmp(row->name, "cuda", 4) == 0;

		if (is_cuda && !row->usable && !has_cuda)
			memcpy(facts->cuda_reason, row->reason, sizeof(facts->cuda_reason));
		has_cuda |= is_cuda && row->usable;
		if (strcmp(row->kind, "engine") == 0 && strcmp(row->name, "uring") == 0 && !row->usable)
			memcpy(facts->uring_reason, row->reason, sizeof(facts->uring_reason));
	}
	if (has_cuda)
		facts->cuda_reason[0] = '\0';
}

/* A name that is no device's is a usage error; a device that is not there is a fact. */
static int ask_device(struct doctor *d)
{
	struct doctor_facts *facts = &d->facts;
	const char *spec = d->args->device;

	facts->wants_gpu = spec && strncmp(spec, "cuda", 4) == 0;
	if (!spec)
		spec = facts->cuda_reason[0] ? "cpu" : "cuda:0";
	if (hr_device_open(spec, &d->device)) {
		if (hr_error_last()->code == HR_E_OPTS)
			return cli_fail_setup(d->args);
		snprintf(facts->device_error, sizeof(facts->device_error), "%s", hr_error_last()->message);
		if (hr_device_open("cpu", &d->device))
			return cli_fail_last(d->args);
	}
	facts->device = (struct hr_device_info)HR_DEVICE_INFO_INIT;
	if (hr_device_info(d->device, &facts->device))
		return cli_fail_last(d->args);
	facts->to_gpu = strncmp(facts->device.spec, "cuda", 4) == 0;
	return 0;
}

/* Whether a load with these settings would start, and if not, why. */
static bool try_setting(const struct doctor *d, const char *engine, uint32_t caching, char *why, size_t room)
{
	struct hr_plan_info info = HR_PLAN_INFO_INIT;
	struct hr_read *reads = cli_set_reads(&d->set, 0, d->set.n, NULL);
	struct hr_loader_opts opts;
	hr_loader *loader = NULL;
	bool works;

	cli_loader_opts(d->args, &opts);
	opts.staging_bytes = PROBE_STAGING;
	opts.readers = 1;
	opts.engine = engine;
	opts.caching = caching;
	if (strcmp(engine, "cufile") != 0)
		opts.flags &= ~HR_LOADER_CUFILE_COMPAT;
	works = hr_loader_open(d->device, &opts, &loader) == 0 &&
		hr_plan(loader, d->model, reads, d->set.n, &info) == 0;
	if (!works)
		snprintf(why, room, "%s", hr_error_last()->message);
	hr_loader_close(loader, HR_FOREVER);
	cli_free(reads);
	return works;
}

static void ask_engines(struct doctor *d)
{
	static const uint32_t ways[] = {HR_CACHING_FILL, HR_CACHING_BYPASS};

	for (size_t i = 0; i < d->n_rows; i++) {
		struct doctor_engine *engine;

		if (strcmp(d->rows[i].kind, "engine") != 0)
			continue;
		d->engines = cli_grow(d->engines, d->n_engines + 1, sizeof(*d->engines));
		engine = &d->engines[d->n_engines++];
		*engine = (struct doctor_engine){.is_usable = d->rows[i].usable};
		memcpy(engine->name, d->rows[i].name, sizeof(engine->name));
		memcpy(engine->reason, d->rows[i].reason, sizeof(engine->reason));
		for (size_t w = 0; w < CLI_N(ways) && engine->is_usable && d->facts.has_model; w++) {
			engine->is_known[ways[w]] = true;
			engine->works[ways[w]] = try_setting(d, engine->name, ways[w], engine->why[ways[w]],
							     sizeof(engine->why[ways[w]]));
		}
	}
}

int doctor_ask(struct doctor *d)
{
	struct statvfs shm;
	int status = d->args->n_names ? ask_model(d) : 0;

	d->facts.staging_bytes = d->args->staging_bytes ? d->args->staging_bytes : DEFAULT_STAGING;
	if (statvfs("/dev/shm", &shm) == 0)
		d->facts.shm_bytes = (uint64_t)shm.f_blocks * shm.f_frsize;
	doctor_files_read("", &d->facts);
	if (status == 0)
		status = ask_probe(d);
	if (status)
		return status;
	note_rows(d);
	status = ask_device(d);
	if (status == 0)
		ask_engines(d);
	return status;
}

void doctor_free(struct doctor *d)
{
	cli_free(d->trial.series);
	cli_free(d->engines);
	cli_free(d->rows);
	hr_device_close(d->device);
	cli_set_free(&d->set);
	hr_model_close(d->model);
}
