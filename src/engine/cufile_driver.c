/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Finding, starting and ending cuFile. Three things about the library make this more than a dlopen:
 *
 *  - **It falls back without a word.** As shipped it reads through host memory wherever it cannot do better. So it is
 *    started with a configuration of our own, in force before the first call, that forbids that, and what it says of
 *    itself afterwards is compared; while it reads, its own counters are (cufile.c). If somebody else in this process
 *    has started it first, their configuration holds and ours is not read: then it is refused.
 *  - **It takes its configuration from the environment** (a file named there, and variables that override the file),
 *    which is therefore changed for the moment of the start; core/os_library.h says what that means for other threads.
 *  - **It hangs or fails for want of system files**: it waits for ever for /proc/modules, and supports no file system
 *    without udev's database. Both are looked for first.
 *
 * The driver is started for the first user and closed after the last, and nothing is called after that. One lock
 * guards all of this; nothing else here is a system's or a driver's call of long duration under a lock.
 */
#include "cufile_driver.h"

#include "core/dl.h"
#include "core/os_library.h"
#include "headrace.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

#define MODULES   "/proc/modules"
#define UDEV      "/run/udev/data"
#define NVIDIA_FS "/proc/driver/nvidia-fs"

struct hr__cf_api hr__cf_api;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
/* All guarded by lock, and constant while there are users. */
static bool is_loaded;
static unsigned n_users;
static bool compat_allowed;  /* of the driver that is open */
static char failure[2][200]; /* why a start failed, without and with compatibility mode; "" = none has */
static size_t stats_gpus_at; /* what the library writes as statistics; 0 = none that we understand */
static char about[96];

/* ---- words ---- */

const char *hr__cufile_text(int code, char *out, size_t out_bytes)
{
	static const struct {
		int code;
		const char *text;
	} texts[] = {
#define HR__CF_TEXT(name, number, text) {number, text},
		HR__CF_ERRORS(HR__CF_TEXT)
#undef HR__CF_TEXT
	};
	char system[64];

	for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++)
		if (texts[i].code == code) {
			snprintf(out, out_bytes, "%s (%d)", texts[i].text, code);
			return out;
		}
	if (code > 0 && code < 5000)
		snprintf(out, out_bytes, "%s (%d)", strerror_r(code, system, sizeof(system)), code);
	else
		snprintf(out, out_bytes, "error %d", code);
	return out;
}

/* ---- looking ---- */

/* Under the lock. */
static int load(char *reason, size_t reason_bytes)
{
	static const char *const names[] = {"libcufile.so.0", NULL};
	static const char *const others[] = {"/usr/local/cuda/lib64/libcufile.so.0", NULL};
	static const struct hr__dl_symbol symbols[] = {
#define HR__CF_ROW(field, symbol, result, parameters, required) {offsetof(struct hr__cf_api, field), #symbol, required},
		HR__CF_SYMBOLS(HR__CF_ROW)
#undef HR__CF_ROW
	};
	const size_t n = sizeof(symbols) / sizeof(symbols[0]);
	char why[160], ignored[160];

	if (is_loaded)
		return 0;
	memset(&hr__cf_api, 0, sizeof(hr__cf_api));
	if (hr__dl_load(names, symbols, n, &hr__cf_api, why, sizeof(why)) &&
	    hr__dl_load(others, symbols, n, &hr__cf_api, ignored, sizeof(ignored))) {
		snprintf(reason, reason_bytes, "no usable cuFile library: %s", why);
		return HR_E_UNSUPPORTED;
	}
	if (!hr__cf_api.cuFileDriverClose_v2) /* the same under its older name */
		hr__cf_api.cuFileDriverClose_v2 = hr__cf_api.cuFileDriverClose;
	is_loaded = true;
	return 0;
}

static int has_modules(char *reason, size_t reason_bytes)
{
	if (hr__os_is_there(MODULES))
		return 0;
	snprintf(reason, reason_bytes,
		 "there is no " MODULES ", for which libcufile would wait for ever: a kernel with modules is needed");
	return HR_E_UNSUPPORTED;
}

int hr__cufile_look(const struct hr__file *file, char *reason, size_t reason_bytes)
{
	int rc;

	pthread_mutex_lock(&lock);
	rc = load(reason, reason_bytes);
	pthread_mutex_unlock(&lock);
	if (!rc)
		rc = has_modules(reason, reason_bytes);
	if (!rc && !hr__os_is_there(NVIDIA_FS))
		snprintf(
			reason, reason_bytes,
			"only when asked for: straight into GPU memory, but nvidia-fs is not loaded: by PCI peer-to-peer where "
			"that works, else through host memory (--cufile compat) or not at all");
	if (rc || !file || file->is_block || hr__os_variable("CUFILE_EXPERIMENTAL_FS") || hr__os_is_there(UDEV))
		return rc;
	snprintf(reason, reason_bytes,
		 "there is no " UDEV
		 ", without which libcufile refuses every file: run udev, or show the host's to the "
		 "container (-v /run/udev:/run/udev:ro)");
	return HR_E_UNSUPPORTED;
}

/* ---- starting ---- */

/* What the driver may take beside the window is cut to one slot: device memory for reads that are not aligned (there
 * are none), and the pieces in which a read is done. Its statistics are asked for by call, not here: version 1.14 would
 * write them when the process ends, and crash. */
static int write_config(bool compat, size_t slot_bytes, char *path, size_t path_bytes)
{
	char text[1024];
	size_t kib = slot_bytes >> 10;

	snprintf(text, sizeof(text),
		 "{\"logging\": {\"level\": \"ERROR\"},\n"
		 " \"profile\": {\"nvtx\": false, \"cufile_stats\": 0},\n"
		 " \"properties\": {\n"
		 "  \"allow_compat_mode\": %s, \"force_compat_mode\": false, \"use_pci_p2pdma\": %s,\n"
		 "  \"use_poll_mode\": false, \"max_direct_io_size_kb\": %zu,\n"
		 "  \"max_device_cache_size_kb\": %zu, \"per_buffer_cache_size_kb\": %zu,\n"
		 "  \"posix_pool_slab_size_kb\": [4, %zu], \"posix_pool_slab_count\": [4, 16]}}\n",
		 compat ? "true" : "false", hr__os_is_there(NVIDIA_FS) ? "false" : "true", kib, kib, kib, kib);
	return hr__os_temp_file(text, path, path_bytes);
}

/* The size of what the library writes: the last byte that differs from what was there before, with two fillings. */
static size_t measure_stats(void)
{
	static unsigned char room[HR__CF_STATS_ROOM]; /* guarded by lock */
	size_t bytes = 0;

	for (int filling = 0x5a; filling <= 0xa5; filling += 0xa5 - 0x5a) {
		memset(room, filling, sizeof(room));
		if (HR__CF(cuFileGetStatsL3, (void *)room).err)
			return 0;
		for (size_t i = sizeof(room); i > bytes; i--)
			if (room[i - 1] != filling)
				bytes = i;
	}
	return bytes;
}

/* Counters that no version we know of lays out so are of no use. */
static void start_stats(void)
{
	static const size_t layouts[] = {
#define HR__CF_LAYOUT(gpus_at) gpus_at,
		HR__CF_STATS_LAYOUTS(HR__CF_LAYOUT)
#undef HR__CF_LAYOUT
	};
	size_t bytes;

	stats_gpus_at = 0;
	if (!hr__cf_api.cuFileSetStatsLevel || !hr__cf_api.cuFileStatsStart || !hr__cf_api.cuFileGetStatsL3)
		return;
	if (HR__CF(cuFileSetStatsLevel, HR__CF_STATS_LEVEL).err || HR__CF_0(cuFileStatsStart).err)
		return;
	bytes = measure_stats();
	for (size_t i = 0; i < sizeof(layouts) / sizeof(layouts[0]); i++) {
		size_t first = layouts[i] + 8;

		if (bytes >= first && (bytes - first) % HR__CF_STATS_GPU_BYTES == 0)
			stats_gpus_at = layouts[i];
	}
}

static void learn_about(const struct hr__cf_props *props)
{
	int version = 0, n = 0;

	if (!hr__cf_api.cuFileGetVersion || HR__CF(cuFileGetVersion, &version).err)
		version = 0;
	about[0] = '\0';
	if (version)
		n = snprintf(about, sizeof(about), "cuFile %d.%d", version / 1000, version % 1000 / 10);
	else
		n = snprintf(about, sizeof(about), "cuFile");
	if (props->nvfs.major_version || props->nvfs.minor_version)
		snprintf(about + n, sizeof(about) - (size_t)n, ", nvidia-fs %u.%u", props->nvfs.major_version,
			 props->nvfs.minor_version);
}

/* The driver is open: whether it is what was asked for. */
static int check_driver(bool compat, char *reason, size_t reason_bytes)
{
	union {
		struct hr__cf_props props;
		char room[512]; /* for what newer versions may add */
	} now;

	memset(&now, 0, sizeof(now));
	if (HR__CF(cuFileDriverGetProperties, &now.props).err)
		memset(&now, 0, sizeof(now));
	if (!compat && (now.props.nvfs.dcontrolflags & HR__CF_CONTROL_COMPAT)) {
		snprintf(reason, reason_bytes,
			 "cuFile allows itself to read through host memory: something else in this process has started "
			 "it with other settings");
		return HR_E_UNSUPPORTED;
	}
	learn_about(&now.props);
	start_stats();
	return 0;
}

static int open_driver(bool compat, char *reason, size_t reason_bytes)
{
	struct hr__cf_error error = HR__CF_0(cuFileDriverOpen);
	char text[96];
	int rc;

	if (error.err == HR__CF_NOT_INITIALIZED && !compat)
		snprintf(reason, reason_bytes,
			 "cuFile has no way from storage to the GPU here: nvidia-fs is %s (5001); allow reads through "
			 "host memory (cufile=compat) or use another engine",
			 hr__os_is_there(NVIDIA_FS) ? "loaded, but refused" : "not loaded");
	else if (error.err)
		snprintf(reason, reason_bytes, "cuFile does not start: %s",
			 hr__cufile_text(error.err, text, sizeof(text)));
	if (error.err) {
		snprintf(failure[compat], sizeof(failure[compat]), "%s", reason);
		return HR_E_UNSUPPORTED;
	}
	rc = check_driver(compat, reason, reason_bytes);
	if (rc)
		HR__CF_0(cuFileDriverClose_v2);
	return rc;
}

/* With our settings in the environment for as long as the library needs to take them. */
static int start(bool compat, size_t slot_bytes, char *reason, size_t reason_bytes)
{
	char path[512], text[64];
	struct hr__os_setting settings[] = {
		{"CUFILE_ENV_PATH_JSON", path, NULL},
		{"CUFILE_ALLOW_COMPAT_MODE", compat ? "true" : "false", NULL},
		{"CUFILE_FORCE_COMPAT_MODE", compat ? hr__os_variable("CUFILE_FORCE_COMPAT_MODE") : NULL, NULL},
		{"CUFILE_LOGFILE_PATH", hr__os_variable("CUFILE_LOGFILE_PATH"), NULL},
	};
	const size_t n = sizeof(settings) / sizeof(settings[0]);
	int rc, error = write_config(compat, slot_bytes, path, sizeof(path));

	if (!settings[3].value) /* else it goes into the working directory */
		settings[3].value = "/dev/null";
	if (!error) {
		error = hr__os_environment_set(settings, n);
		if (error)
			hr__os_remove_file(path);
	}
	if (error) {
		snprintf(reason, reason_bytes, "the configuration of cuFile cannot be written: %s",
			 strerror_r(error, text, sizeof(text)));
		return HR_E_UNSUPPORTED;
	}
	rc = open_driver(compat, reason, reason_bytes);
	hr__os_environment_restore(settings, n);
	hr__os_remove_file(path);
	return rc;
}

/* Under the lock. */
static int acquire(bool compat, size_t slot_bytes, char *reason, size_t reason_bytes)
{
	int rc;

	if (n_users > 0 && !compat && compat_allowed) {
		snprintf(reason, reason_bytes,
			 "another loader of this process has cuFile open with reads through host memory allowed "
			 "(cufile=compat): close that first");
		return HR_E_UNSUPPORTED;
	}
	if (n_users > 0)
		return 0;
	rc = load(reason, reason_bytes);
	if (!rc)
		rc = has_modules(reason, reason_bytes);
	if (rc)
		return rc;
	if (failure[compat][0]) {
		snprintf(reason, reason_bytes, "%s", failure[compat]);
		return HR_E_UNSUPPORTED;
	}
	rc = start(compat, slot_bytes, reason, reason_bytes);
	compat_allowed = compat;
	return rc;
}

int hr__cufile_acquire(bool compat, size_t slot_bytes, char *reason, size_t reason_bytes)
{
	int rc;

	pthread_mutex_lock(&lock);
	rc = acquire(compat, slot_bytes, reason, reason_bytes);
	n_users += rc == 0;
	pthread_mutex_unlock(&lock);
	return rc;
}

void hr__cufile_release(void)
{
	pthread_mutex_lock(&lock);
	if (--n_users == 0)
		HR__CF_0(cuFileDriverClose_v2);
	pthread_mutex_unlock(&lock);
}

/* ---- while it is open ---- */

bool hr__cufile_counts(uint64_t *posix, uint64_t *all)
{
	struct hr__cf_gpu_stats gpu;
	char room[HR__CF_STATS_ROOM];
	uint32_t n;

	*posix = *all = 0;
	if (!stats_gpus_at || HR__CF(cuFileGetStatsL3, (void *)room).err)
		return false;
	memcpy(&n, room + stats_gpus_at, sizeof(n));
	for (uint32_t g = 0; g < n && g < HR__CF_STATS_MAX_GPUS; g++) {
		memcpy(&gpu, room + stats_gpus_at + 8 + (size_t)g * HR__CF_STATS_GPU_BYTES, sizeof(gpu));
		*posix += gpu.n_posix_reads;
		*all += gpu.n_total_reads;
	}
	return true;
}

void hr__cufile_describe(char *out, size_t out_bytes)
{
	snprintf(out, out_bytes, "%s", about);
}
