/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The table of devices and what is the same for all of them: names, counting, fork, errors. A device is counted: the
 * caller's handle, each loader and each buffer hold it, and the last one closes it. In a forked child every call
 * answers HR_E_FORKED and nothing is freed: the memory and the driver's objects are the parent's.
 */
#include "device.h"

#include "core/error.h"
#include "core/mem.h"
#include "core/os.h"

#include <stdio.h>
#include <string.h>

static const struct hr__device_ops *const devices[] = {&hr__device_cpu, &hr__device_cuda, NULL};

const struct hr__device_ops *const *hr__devices(void)
{
	return devices;
}

/* "0", "1", ... "9999" and nothing else; -1 if it is not. */
static int parse_ordinal(const char *text)
{
	size_t length = strlen(text);
	int value = 0;

	if (length == 0 || length > 4 || (text[0] == '0' && length > 1))
		return -1;
	for (size_t i = 0; i < length; i++) {
		if (text[i] < '0' || text[i] > '9')
			return -1;
		value = value * 10 + (text[i] - '0');
	}
	return value;
}

/* Which row of the table `spec` names, and which device of that kind; NULL if it is no name of a device. */
static const struct hr__device_ops *parse_spec(const char *spec, int *ordinal)
{
	for (size_t i = 0; devices[i]; i++) {
		size_t length = strlen(devices[i]->name);

		if (strncmp(spec, devices[i]->name, length) != 0)
			continue;
		*ordinal = 0;
		if (spec[length] == '\0')
			return devices[i];
		if (spec[length] != ':' || (devices[i]->caps & HR__DEVICE_HOST))
			continue;
		*ordinal = parse_ordinal(spec + length + 1);
		if (*ordinal >= 0)
			return devices[i];
	}
	return NULL;
}

static int fail_spec(const char *spec)
{
	char names[96] = "", shown[64];
	size_t used = 0;

	for (size_t i = 0; devices[i] && used < sizeof(names); i++) {
		bool is_host = devices[i]->caps & HR__DEVICE_HOST;

		used += (size_t)snprintf(names + used, sizeof(names) - used, "%s\"%s\"", i ? ", " : "",
					 devices[i]->name);
		if (!is_host && used < sizeof(names))
			used += (size_t)snprintf(names + used, sizeof(names) - used, ", \"%s:N\"", devices[i]->name);
	}
	return hr__fail_at(&(struct hr__where){.stage = "device", .offset = HR_NO_OFFSET}, HR_E_OPTS,
			   "\"%s\" is not the name of a device; use one of %s (N = 0, 1, ...)",
			   hr__escape(shown, sizeof(shown), spec, strlen(spec)), names);
}

static void free_device(hr_device *device)
{
	hr__os_fork_mark_free(device->fork_mark);
	hr__free(device->state);
	hr__free(device);
}

static int new_device(const struct hr__device_ops *ops, int ordinal, hr_device **out)
{
	hr_device *device = hr__calloc(1, sizeof(*device));

	if (!device)
		return HR_E_NOMEM;
	device->ops = ops;
	device->ordinal = ordinal;
	atomic_init(&device->count, 1);
	if (ops->caps & HR__DEVICE_HOST)
		snprintf(device->spec, sizeof(device->spec), "%s", ops->name);
	else
		snprintf(device->spec, sizeof(device->spec), "%s:%d", ops->name, ordinal);
	device->state = hr__calloc(1, ops->state_bytes);
	if (!device->state) {
		free_device(device);
		return HR_E_NOMEM;
	}
	device->fork_mark = hr__os_fork_mark_new();
	if (!device->fork_mark) {
		free_device(device);
		return hr__fail(HR_E_UNSUPPORTED,
				"the system has no page that tells of a fork (MADV_WIPEONFORK, Linux 4.14)");
	}
	*out = device;
	return 0;
}

int hr_device_open(const char *spec, hr_device **out)
{
	struct hr__device_error error = {0};
	const struct hr__device_ops *ops;
	hr_device *device = NULL;
	int ordinal, rc;

	if (!out)
		return hr__fail(HR_E_OPTS, "hr_device_open: the device has nowhere to go (out is NULL)");
	*out = NULL;
	ops = parse_spec(spec ? spec : "", &ordinal);
	if (!ops)
		return fail_spec(spec ? spec : "");
	rc = new_device(ops, ordinal, &device);
	if (rc)
		return rc;
	rc = ops->open(device, ordinal, &error);
	if (rc) {
		hr__device_fail(device, rc, "cannot be opened", &error);
		free_device(device);
		return rc;
	}
	*out = device;
	return 0;
}

int hr__device_here(const hr_device *device)
{
	if (*device->fork_mark == 1)
		return 0;
	return hr__fail_at(&(struct hr__where){.stage = "device", .offset = HR_NO_OFFSET}, HR_E_FORKED,
			   "device %s belongs to the parent process; open one in this process", device->spec);
}

int hr__device_fail(const hr_device *device, int code, const char *doing, const struct hr__device_error *error)
{
	return hr__fail_at(&(struct hr__where){.stage = "device", .offset = HR_NO_OFFSET, .system = error->system},
			   code, "%s: %s: %s", device->spec, doing, error->reason);
}

hr_device *hr__device_acquire(hr_device *device)
{
	atomic_fetch_add_explicit(&device->count, 1, memory_order_relaxed);
	return device;
}

int hr_device_close(hr_device *device)
{
	int rc;

	if (!device)
		return 0;
	rc = hr__device_here(device);
	if (rc)
		return rc;
	if (atomic_fetch_sub_explicit(&device->count, 1, memory_order_acq_rel) == 1) {
		device->ops->close(device);
		free_device(device);
	}
	return 0;
}

int hr_device_info(hr_device *device, struct hr_device_info *out)
{
	struct hr_device_info info = {sizeof(info)};
	struct hr__device_error error = {0};
	int rc;

	if (!device || !out)
		return hr__fail(HR_E_OPTS, "hr_device_info: device or out is NULL");
	rc = hr__device_here(device);
	if (rc)
		return rc;
	memcpy(info.spec, device->spec, sizeof(info.spec));
	rc = device->ops->info(device, &info, &error);
	if (rc)
		return hr__device_fail(device, rc, "cannot be described", &error);
	return hr__out_copy(out, &info, sizeof(info), "hr_device_info");
}
