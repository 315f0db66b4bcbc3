/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Checks of the GPU: is there one, why can it not be used, how it is connected, and what GPUDirect Storage would need.
 * Without a GPU they do not apply, unless one was asked for by name.
 */
#include "doctor.h"

#include <inttypes.h>
#include <string.h>

#define CUDA_BATCH 12080               /* many small copies in one call */
#define SMALL_BAR1 (UINT64_C(1) << 30) /* consumer boards have 256 MiB */

static bool is_any_gpu(const struct doctor_facts *facts)
{
	return facts->n_gpus || facts->has_nvidia || facts->n_gpu_devices || facts->is_wsl;
}

/* Why a GPU that is there cannot be used: the first missing thing, from the bottom up. */
static void explain_missing(const struct doctor_facts *facts, enum doctor_verdict verdict,
			    struct doctor_finding *finding)
{
	if (!facts->has_nvidia && facts->has_modules && !facts->is_wsl) {
		doctor_say(finding, verdict, "%u NVIDIA GPU%s on the bus, but the module nvidia is not loaded%s",
			   facts->n_gpus, facts->n_gpus == 1 ? " is" : "s are",
			   facts->has_nouveau ? " (nouveau has taken it)" : "");
		doctor_advise(finding, "install NVIDIA's driver, then modprobe nvidia; dmesg says why if that fails%s",
			      facts->has_nouveau ? "; nouveau must be blacklisted" : "");
	} else if (!facts->has_nvidiactl && !facts->is_wsl) {
		doctor_say(
			finding, verdict, "the driver %s is loaded, but /dev/nvidiactl is not there%s", facts->driver,
			facts->container[0] || facts->is_root_overlay ? ": this container was not given the GPU" : "");
		doctor_advise(finding, "docker run --gpus all (with nvidia-container-toolkit); outside of containers: "
				       "nvidia-modprobe, or nvidia-smi as root once");
	} else if (!facts->has_uvm_device && !facts->is_wsl) {
		doctor_say(finding, verdict, "/dev/nvidia-uvm is not there%s: CUDA cannot start",
			   facts->has_uvm ? "" : " and the module nvidia_uvm is not loaded");
		doctor_advise(finding, "as root: modprobe nvidia-uvm, then nvidia-modprobe -u -c 0");
	} else {
		doctor_say(finding, verdict, "%s", facts->cuda_reason);
		doctor_advise(finding, "the library libcuda.so.1 comes with the driver and must have its version; in "
				       "containers NVIDIA_DRIVER_CAPABILITIES must have \"compute\"");
	}
}

DOCTOR_JUDGE(gpu)
{
	enum doctor_verdict verdict = facts->wants_gpu ? DOCTOR_FAIL : DOCTOR_WARN;
	const char *driver = facts->driver[0] ? facts->driver : "?";
	char total[32], left[32];

	if (facts->to_gpu && facts->device.spec[0])
		doctor_say(finding, DOCTOR_OK, "%s: %s, driver %s, %s of %s free", facts->device.spec,
			   facts->device.name, driver, cli_human(left, facts->device.free_bytes),
			   cli_human(total, facts->device.total_bytes));
	else if (!facts->cuda_reason[0] && facts->device_error[0])
		doctor_say(finding, DOCTOR_FAIL, "%s", facts->device_error);
	else if (!facts->cuda_reason[0])
		doctor_say(finding, DOCTOR_OK, "can be used, driver %s; not asked for", driver);
	else if (is_any_gpu(facts))
		explain_missing(facts, verdict, finding);
	else {
		doctor_say(finding, facts->wants_gpu ? DOCTOR_FAIL : DOCTOR_NONE, "no NVIDIA GPU on this machine (%s)",
			   facts->cuda_reason);
		if (facts->wants_gpu)
			doctor_advise(finding, "use --device cpu, or a machine with a GPU");
	}
}

DOCTOR_JUDGE(cuda)
{
	uint32_t version = facts->device.driver;

	if (!facts->to_gpu || !version) {
		doctor_say(finding, DOCTOR_NONE, "no GPU is used");
		return;
	}
	doctor_say(finding, version < CUDA_BATCH ? DOCTOR_WARN : DOCTOR_OK,
		   "the driver offers CUDA %" PRIu32 ".%" PRIu32 "%s", version / 1000, version % 1000 / 10,
		   version < CUDA_BATCH ? ": each small tensor is a copy of its own" : "");
	if (version < CUDA_BATCH)
		doctor_advise(finding,
			      "a driver for CUDA 12.8 or later (570 and up) takes many copies in one call: models of "
			      "many small tensors load faster");
}

DOCTOR_JUDGE(link)
{
	const struct doctor_gpu *narrow = NULL;

	for (unsigned i = 0; i < facts->n_gpus; i++) {
		const struct doctor_gpu *gpu = &facts->gpus[i];

		if (gpu->link_width && gpu->link_width < gpu->link_width_max && !narrow)
			narrow = gpu;
	}
	if (narrow) {
		doctor_say(finding, DOCTOR_WARN, "%s has %u of %u lanes: copies to it are that much slower",
			   narrow->address, narrow->link_width, narrow->link_width_max);
		doctor_advise(finding,
			      "seat the board anew or use a slot with all lanes; some boards give lanes up when idle: "
			      "look again under load (nvidia-smi -q -d PERFORMANCE)");
	} else if (!facts->n_gpus || !facts->gpus[0].link_width) {
		doctor_say(finding, DOCTOR_NONE, facts->n_gpus ? "the bus does not tell" : "no NVIDIA GPU on the bus");
	} else {
		doctor_say(finding, DOCTOR_OK, "x%u%s", facts->gpus[0].link_width,
			   facts->n_gpus > 1 ? " and all the others" : "");
	}
}

/* The node that all GPUs share, or DOCTOR_NO_NODE. */
static int common_node(const struct doctor_facts *facts)
{
	int node = facts->n_gpus ? facts->gpus[0].node : DOCTOR_NO_NODE;

	for (unsigned i = 1; i < facts->n_gpus; i++) {
		if (facts->gpus[i].node != node)
			return DOCTOR_NO_NODE;
	}
	return node;
}

DOCTOR_JUDGE(numa)
{
	int gpu = common_node(facts), disk = facts->disk_node;

	if (facts->n_nodes < 2) {
		doctor_say(finding, DOCTOR_NONE, "there is one node of memory");
	} else if (gpu >= 0 && gpu < 64 && facts->allowed_nodes && !(facts->allowed_nodes >> gpu & 1)) {
		doctor_say(finding, DOCTOR_WARN,
			   "the GPU is at node %d of %u, but this process may only run on CPUs of others", gpu,
			   facts->n_nodes);
		doctor_advise(finding, "numactl --cpunodebind=%d --preferred=%d COMMAND", gpu, gpu);
	} else if (gpu >= 0 && disk >= 0 && gpu != disk) {
		doctor_say(finding, DOCTOR_WARN,
			   "the GPU is at node %d, the disk %s at node %d: all bytes cross between them", gpu,
			   facts->disk, disk);
		doctor_advise(finding,
			      "put the model on a disk of node %d if there is one; otherwise run at the GPU's node: "
			      "numactl --cpunodebind=%d --preferred=%d COMMAND",
			      gpu, gpu, gpu);
	} else if (gpu >= 0) {
		doctor_say(finding, DOCTOR_OK, "the GPU is at node %d of %u%s", gpu, facts->n_nodes,
			   disk == gpu ? ", and so is the disk" : "");
		doctor_advise(finding, "for steady figures: numactl --cpunodebind=%d --preferred=%d COMMAND", gpu, gpu);
	} else {
		doctor_say(finding, DOCTOR_OK, "%u nodes; %s", facts->n_nodes,
			   facts->n_gpus > 1 ? "GPUs at several" : "no GPU that belongs to one");
		if (facts->n_gpus > 1)
			doctor_advise(finding, "bind each process to the node of its GPU (nvidia-smi topo -m): numactl "
					       "--cpunodebind=N --preferred=N COMMAND");
	}
}

DOCTOR_JUDGE(bar1)
{
	uint64_t least = UINT64_MAX;
	char text[32];

	for (unsigned i = 0; i < facts->n_gpus; i++) {
		if (facts->gpus[i].bar1_bytes && facts->gpus[i].bar1_bytes < least)
			least = facts->gpus[i].bar1_bytes;
	}
	if (least == UINT64_MAX)
		doctor_say(finding, DOCTOR_NONE, facts->n_gpus ? "the bus does not tell" : "no NVIDIA GPU on the bus");
	else if (least >= SMALL_BAR1)
		doctor_say(finding, DOCTOR_OK, "%s", cli_human(text, least));
	else {
		doctor_say(finding, DOCTOR_WARN, "%s: only GPUDirect Storage minds, whose window must fit into it",
			   cli_human(text, least));
		doctor_advise(
			finding,
			"switch on Resizable BAR (\"above 4G decoding\") in the firmware, where the board has it");
	}
}

DOCTOR_JUDGE(gds)
{
	if (!is_any_gpu(facts)) {
		doctor_say(finding, DOCTOR_NONE, "no GPU");
	} else if (!facts->has_modules) {
		doctor_say(finding, DOCTOR_NONE,
			   "/proc/modules is not there, and the library libcufile hangs without it: it is "
			   "not opened; reads go through host memory");
	} else if (!facts->has_nvidia_fs) {
		doctor_say(finding, DOCTOR_NONE,
			   "the module nvidia_fs is not loaded; reads go through host memory, which is as fast "
			   "where the disk or the link is the limit");
		doctor_advise(finding, "to use it: install nvidia-gds, then modprobe nvidia-fs");
	} else if (!facts->has_udev) {
		doctor_say(finding, DOCTOR_WARN,
			   "nvidia_fs is loaded, but /run/udev/data is not there, and libcufile refuses every "
			   "file without it (5027)");
		doctor_advise(finding, "in a container: -v /run/udev:/run/udev:ro");
	} else {
		doctor_say(finding, DOCTOR_OK, "nvidia_fs is loaded");
	}
}

DOCTOR_JUDGE(ugds)
{
	if (!is_any_gpu(facts)) {
		doctor_say(finding, DOCTOR_NONE, "no GPU");
	} else if (!facts->has_ugds) {
		doctor_say(finding, DOCTOR_NONE, "the module ugds_drv is not loaded: no disk belongs to uGDS");
	} else if (!facts->has_ugds_disk) {
		doctor_say(finding, DOCTOR_WARN, "ugds_drv is loaded, but has no disk: /dev/ugds_drv0 is not there");
		doctor_advise(finding,
			      "bind a disk with a store to it: echo ADDRESS > /sys/bus/pci/drivers/ugds_drv/bind, "
			      "after unbinding it from nvme");
	} else {
		doctor_say(finding, DOCTOR_OK, "ugds_drv has a disk");
		doctor_advise(finding, "headrace load store:MANIFEST.json#MODEL --ugds /dev/ugds_drv0");
	}
}
