/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Checks of the model and of the place where it lies. Without a model they do not apply.
 */
#include "doctor.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>

static bool has_no_model(const struct doctor_facts *facts, struct doctor_finding *finding)
{
	if (facts->has_model)
		return false;
	doctor_say(finding, DOCTOR_NONE, facts->model_error[0] ? "the model cannot be opened" : "no model was named");
	return true;
}

DOCTOR_JUDGE(model)
{
	char text[32];

	if (facts->model_error[0]) {
		doctor_say(finding, DOCTOR_FAIL, "%s", facts->model_error);
		doctor_advise(finding, facts->model_errno == EMFILE ? "raise the limit of open files (see \"files\")"
								    : "'headrace check NAME' names every fault");
	} else if (!has_no_model(facts, finding)) {
		doctor_say(finding, DOCTOR_OK, "headers sound: %s in %" PRIu32 " shard%s",
			   cli_human(text, facts->model_bytes), facts->n_shards, facts->n_shards == 1 ? "" : "s");
	}
}

DOCTOR_JUDGE(memory)
{
	uint64_t left = doctor_memory_left(facts);
	uint64_t room = facts->to_gpu ? facts->device.free_bytes : left;
	uint64_t need = facts->to_gpu ? facts->model_needs : facts->model_needs + facts->staging_bytes;
	char a[32], b[32];

	if (has_no_model(facts, finding))
		return;
	if (!room) {
		doctor_say(finding, DOCTOR_NONE, "how much memory is free is not known");
	} else if (need > room) {
		doctor_say(finding, DOCTOR_FAIL, "the tensors need %s, but %s has %s", cli_human(a, need),
			   facts->to_gpu ? facts->device.spec : "the machine", cli_human(b, room));
		doctor_advise(finding,
			      "load a part (--only, or one rank's share), or free memory; 'headrace verify' needs no "
			      "more than two windows");
	} else if (facts->to_gpu && left && left < 2 * facts->staging_bytes) {
		doctor_say(finding, DOCTOR_WARN,
			   "%s of host memory are left, hardly more than the %s of staging memory", cli_human(a, left),
			   cli_human(b, facts->staging_bytes));
		doctor_advise(finding, "free memory, or use a smaller --staging (16MiB is nearly as fast)");
	} else {
		doctor_say(finding, DOCTOR_OK, "the tensors need %s of the %s that are free%s", cli_human(a, need),
			   cli_human(b, room), facts->to_gpu ? " on the GPU" : "");
	}
}

static bool is_network(const char *fs)
{
	static const char *const names[] = {"nfs",          "nfs4",      "cifs",        "smb3",         "ceph",
					    "glusterfs",    "lustre",    "beegfs",      "beegfs_nodev", "gpfs",
					    "wekafs",       "9p",        "virtiofs",    "afs",          "fuse.sshfs",
					    "fuse.gcsfuse", "fuse.s3fs", "fuse.juicefs"};

	for (size_t i = 0; i < CLI_N(names); i++) {
		if (strcmp(fs, names[i]) == 0)
			return true;
	}
	return false;
}

DOCTOR_JUDGE(fs)
{
	bool is_nfs = strncmp(facts->fs, "nfs", 3) == 0;

	if (has_no_model(facts, finding))
		return;
	if (facts->block[0]) {
		doctor_say(finding, DOCTOR_OK, "none: a store on the block device %s", facts->path);
	} else if (!facts->fs[0]) {
		doctor_say(finding, DOCTOR_NONE, "not known: %s",
			   facts->path[0] ? facts->path : "the model is in no file of its own");
	} else if (is_nfs && !strstr(facts->mount_options, "nconnect=")) {
		doctor_say(finding, DOCTOR_WARN,
			   "%s at %s, over one connection; read through the page cache, unless --caching says "
			   "otherwise",
			   facts->fs, facts->mount);
		doctor_advise(finding,
			      "mount with nconnect=8 and rsize=1048576: one connection rarely fills a fast network");
	} else if (is_network(facts->fs)) {
		doctor_say(finding, DOCTOR_OK,
			   "%s at %s: a network's; read through the page cache, unless --caching says otherwise",
			   facts->fs, facts->mount);
	} else if (strcmp(facts->fs, "overlay") == 0) {
		doctor_say(finding, DOCTOR_WARN,
			   "the model lies in a container's image or its writable layer (overlay at %s); "
			   "GPUDirect Storage refuses it, and other containers do not share its page cache",
			   facts->mount);
		doctor_advise(finding, "keep models on a volume of the host (docker: -v /models:/models:ro)");
	} else if (strcmp(facts->fs, "tmpfs") == 0 || strcmp(facts->fs, "ramfs") == 0) {
		doctor_say(finding, DOCTOR_OK,
			   "%s at %s: the files are in memory, there is nothing to read from a disk", facts->fs,
			   facts->mount);
	} else {
		doctor_say(finding, DOCTOR_OK, "%s at %s", facts->fs, facts->mount);
	}
}

DOCTOR_JUDGE(direct)
{
	if (has_no_model(facts, finding))
		return;
	if (facts->direct_errno && (strcmp(facts->fs, "tmpfs") == 0 || strcmp(facts->fs, "ramfs") == 0)) {
		doctor_say(finding, DOCTOR_NONE, "%s is the page cache", facts->fs);
	} else if (facts->direct_errno) {
		doctor_say(finding, DOCTOR_WARN,
			   "O_DIRECT is refused by %s (%s): --caching bypass fails, auto reads through the page "
			   "cache",
			   facts->fs[0] ? facts->fs : "the file system", strerror(facts->direct_errno));
		doctor_advise(finding, "a model that is much larger than memory loads better from ext4 or XFS");
	} else if (!facts->direct_offset_align) {
		doctor_say(finding, DOCTOR_OK,
			   "O_DIRECT works; the kernel does not tell its alignment, blocks of 4096 bytes are used");
	} else {
		doctor_say(finding, facts->direct_offset_align > 65536 ? DOCTOR_WARN : DOCTOR_OK,
			   "O_DIRECT works, in blocks of %" PRIu32 " bytes at memory addresses of %" PRIu32,
			   facts->direct_offset_align, facts->direct_memory_align);
		if (finding->verdict == DOCTOR_WARN)
			doctor_advise(finding, "slots must be multiples of twice that: --slot %" PRIu32,
				      2 * facts->direct_offset_align);
	}
}

/* Virtual disks call themselves turning ones whatever is behind them. */
DOCTOR_JUDGE(disk)
{
	bool is_virtual;

	if (has_no_model(facts, finding))
		return;
	is_virtual = strncmp(facts->disk, "vd", 2) == 0 || strncmp(facts->disk, "xvd", 3) == 0 ||
		     strncmp(facts->disk, "loop", 4) == 0;
	if (!facts->is_disk_known) {
		doctor_say(finding, DOCTOR_NONE, "no disk of this machine is behind the file system");
	} else if (facts->is_rotational && !is_virtual) {
		doctor_say(finding, DOCTOR_WARN, "%s turns: cold bytes come at some 0.1 to 0.3 GB/s", facts->disk);
		doctor_advise(finding, "keep models on an SSD; --caching fill at least spares the second load");
	} else {
		doctor_say(finding, DOCTOR_OK, "%s%s%s", facts->disk, is_virtual ? " (a virtual disk)" : "",
			   facts->is_stacked ? " (stacked on others: device mapper, RAID or loop)" : "");
	}
}

DOCTOR_JUDGE(cache)
{
	bool is_large = facts->plan_bytes > doctor_memory_left(facts) / 2;
	char a[32];

	if (has_no_model(facts, finding))
		return;
	if (!facts->plan_bytes || facts->block[0]) {
		doctor_say(finding, DOCTOR_NONE, "%s",
			   facts->block[0] ? "a store on a block device is read around it" : "the model has no bytes");
		return;
	}
	doctor_say(finding, DOCTOR_OK,
		   "%.0f %% of the model is in it; cold bytes are read %s it (auto): the model is %s half of the "
		   "%s that can be had",
		   100.0 * (double)facts->resident_bytes / (double)facts->plan_bytes,
		   is_large && !is_network(facts->fs) ? "around" : "through", is_large ? "more than" : "less than",
		   cli_human(a, doctor_memory_left(facts)));
}
