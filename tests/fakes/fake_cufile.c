/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A look-alike of NVIDIA's cuFile over the look-alike CUDA driver, built as libcufile.so.0: what headrace calls, as
 * the public documentation describes it and as the real library was seen to behave. fake_cufile.h has the controls and
 * says which mistakes of a caller are recorded.
 *
 * One lock guards everything; a read drops it while it reads and while it dawdles.
 */
#include "fake_cufile.h"

#include "engine/cufile_syms.h"
#include "fake_controls.h"
#include "fake_cuda.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define API         __attribute__((visibility("default")))
#define MAX_HANDLES 256

#define SETTINGS(X)                                                                                                    \
	X(nvidia_fs, 1)                                                                                                \
	X(version, 1150) X(fallback, 0) X(short_every, 0) X(delay_us, 100) X(teardown_us, 0) X(bar_kib, 0)             \
		X(room_kib, 0) X(busy, 0) X(others, 0) X(seed, 1) X(strict, 1)

static struct {
#define FIELD(name, value) long long name;
	SETTINGS(FIELD)
#undef FIELD
} settings;
static const struct fake_setting table[] = {
#define SETTING(name, value) {#name, &settings.name, value},
	SETTINGS(SETTING)
#undef SETTING
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct handle {
	bool is_used;
	int fd;
	dev_t device;
	ino_t inode;
	unsigned n_reads;
} handles[MAX_HANDLES];
static int n_opens;
static bool compat;
static uint64_t n_posix, n_nvfs;
static int (*get_context)(void **context);

/* ---- controls ---- */

static struct fake_controls controls = {
	.who = "cuFile", .settings = table, .n_settings = sizeof(table) / sizeof(table[0])};

static void error(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void error(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	fake_tell(&controls, settings.strict, format, args);
	va_end(args);
}

#include "fake_reader.h" /* uses all of the above */

API int fake_cufile_set(const char *key, long long value);
API int fake_cufile_set(const char *key, long long value)
{
	int rc;

	pthread_mutex_lock(&lock);
	rc = fake_set(&controls, key, value);
	pthread_mutex_unlock(&lock);
	return rc;
}

__attribute__((constructor)) static void start(void)
{
	void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
	void *address = library ? dlsym(library, "cuCtxGetCurrent") : NULL;

	fake_set_all(&controls, "HR_FAKE_CUFILE");
	memcpy(&get_context, &address, sizeof(address));
	if (!fake_cuda_find(&cuda))
		fprintf(stderr, "fake cuFile: the CUDA driver is not the look-alike\n");
}

API void fake_cufile_reset(void);
API void fake_cufile_reset(void)
{
	pthread_mutex_lock(&lock);
	fake_set_all(&controls, "HR_FAKE_CUFILE");
	fake_controls_reset(&controls);
	reader_reset();
	n_posix = n_nvfs = 0;
	pthread_mutex_unlock(&lock);
}

API void fake_cufile_arm(const char *function, unsigned n, int code);
API void fake_cufile_arm(const char *function, unsigned n, int code)
{
	pthread_mutex_lock(&lock);
	fake_arm(&controls, function, n, code);
	pthread_mutex_unlock(&lock);
}

API unsigned fake_cufile_errors(char *text, size_t text_bytes);
API unsigned fake_cufile_errors(char *text, size_t text_bytes)
{
	return fake_told(&controls, text, text_bytes);
}

API unsigned long long fake_cufile_calls(const char *function);
API unsigned long long fake_cufile_calls(const char *function)
{
	unsigned long long n;

	pthread_mutex_lock(&lock);
	n = fake_calls(&controls, function);
	pthread_mutex_unlock(&lock);
	return n;
}

API long long fake_cufile_live(const char *kind);
API long long fake_cufile_live(const char *kind)
{
	long long n_handles = 0, n;

	pthread_mutex_lock(&lock);
	for (int i = 0; i < MAX_HANDLES; i++)
		n_handles += handles[i].is_used;
	if (!kind)
		n = n_handles + n_registered() + n_opens;
	else if (strcmp(kind, "handles") == 0)
		n = n_handles;
	else
		n = strcmp(kind, "opens") == 0 ? n_opens : reader_live(kind);
	pthread_mutex_unlock(&lock);
	return n;
}

/* ---- the frame of every function ---- */

/* Takes the lock; what the function answers at once, or 0. */
static int begin(const char *function, bool needs_driver)
{
	bool is_asking = strncmp(function, "cuFileGet", 9) == 0; /* which needs no context */
	void *context = NULL;

	if (get_context && !is_asking)
		get_context(&context);
	pthread_mutex_lock(&lock);
	fake_count(&controls, function);
	if (needs_driver && n_opens == 0) {
		error("%s is called while the driver is not open", function);
		return HR__CF_NOT_INITIALIZED;
	}
	if (!context && !is_asking)
		return HR__CF_INVALID_CONTEXT_ERROR;
	return fake_take_armed(&controls, function);
}

static struct hr__cf_error end(int code)
{
	pthread_mutex_unlock(&lock);
	return (struct hr__cf_error){code, code == HR__CF_CUDA_DRIVER_ERROR ? 2 : 0};
}

#define BEGIN(needs_driver)                                                                                            \
	do {                                                                                                           \
		int code_ = begin(__func__, needs_driver);                                                             \
		if (code_)                                                                                             \
			return end(code_);                                                                             \
	} while (0)

/* ---- the driver ---- */

#define DECLARE(field, symbol, result, parameters, required) API result symbol parameters;
HR__CF_SYMBOLS(DECLARE)
#undef DECLARE

/* As the real one: the variable wins over the file, and without either what is shipped holds. */
static bool read_settings(void)
{
	const char *path = getenv("CUFILE_ENV_PATH_JSON"), *wins = getenv("CUFILE_ALLOW_COMPAT_MODE");
	const char *force = getenv("CUFILE_FORCE_COMPAT_MODE");
	bool allowed = true;
	char text[4096];
	size_t n;
	FILE *file = path ? fopen(path, "r") : NULL;

	if (file) {
		n = fread(text, 1, sizeof(text) - 1, file);
		text[n] = '\0';
		fclose(file);
		allowed = !strstr(text, "\"allow_compat_mode\": false");
		if (!strstr(text, "\"max_direct_io_size_kb\"") || !strstr(text, "\"max_device_cache_size_kb\""))
			error("the configuration does not limit what the driver takes");
	}
	if (!getenv("CUFILE_LOGFILE_PATH"))
		error("the driver is started with a log file in the working directory");
	if (wins)
		allowed = strcmp(wins, "true") == 0;
	return allowed || (force && strcmp(force, "true") == 0);
}

struct hr__cf_error cuFileDriverOpen(void)
{
	BEGIN(false);
	if (n_opens == 0) {
		compat = settings.others ? true : read_settings();
		if (!settings.nvidia_fs && !compat)
			return end(HR__CF_NOT_INITIALIZED);
	}
	n_opens++;
	return end(0);
}

static struct hr__cf_error close_driver(void)
{
	long long n = 0;

	for (int i = 0; i < MAX_HANDLES && n_opens == 1; i++)
		n += handles[i].is_used;
	for (int i = 0; i < MAX_BUFFERS && n_opens == 1; i++)
		n += buffers[i].base != NULL;
	if (n || (n_opens == 1 && n_reading))
		error("the driver is closed with %lld handles and buffers registered, %lld reads in motion", n,
		      n_reading);
	n_opens--;
	return end(0);
}

struct hr__cf_error cuFileDriverClose_v2(void)
{
	BEGIN(true);
	return close_driver();
}

struct hr__cf_error cuFileDriverClose(void)
{
	BEGIN(true);
	return close_driver();
}

struct hr__cf_error cuFileDriverGetProperties(struct hr__cf_props *props)
{
	BEGIN(true);
	memset(props, 0, sizeof(*props));
	props->nvfs.major_version = settings.nvidia_fs ? 2 : 0;
	props->nvfs.minor_version = settings.nvidia_fs ? 24 : 0;
	props->nvfs.dcontrolflags = compat ? HR__CF_CONTROL_COMPAT : 0;
	return end(0);
}

long cuFileUseCount(void)
{
	return n_opens;
}

struct hr__cf_error cuFileGetVersion(int *version)
{
	BEGIN(false);
	*version = (int)settings.version;
	return end(0);
}

struct hr__cf_error cuFileGetBARSizeInKB(int gpu, size_t *kib)
{
	BEGIN(true);
	*kib = (size_t)settings.bar_kib;
	return end(gpu >= 0 && gpu < 8 ? 0 : HR__CF_INVALID_VALUE);
}

/* ---- statistics ---- */

struct hr__cf_error cuFileSetStatsLevel(int level)
{
	BEGIN(true);
	return end(settings.version < 1150 || level < 0 || level > 3 ? HR__CF_INVALID_VALUE : 0);
}

struct hr__cf_error cuFileStatsStart(void)
{
	BEGIN(true);
	return end(0);
}

struct hr__cf_error cuFileGetStatsL3(struct hr__cf_stats *stats)
{
	struct hr__cf_gpu_stats gpu = {"", 0, 0, 0, 0, 0, 0, 0, 0};
	size_t at = settings.version < 1190 ? 1024 : 1136, bytes = at + 8 + HR__CF_STATS_GPU_BYTES;
	uint32_t n = 1;
	void *out = stats;

	BEGIN(true);
	memset(out, 0, bytes);
	memcpy((char *)out + at, &n, sizeof(n));
	gpu.n_total_reads = n_reads;
	gpu.n_posix_reads = n_posix;
	gpu.n_nvfs_reads = n_nvfs;
	memcpy((char *)out + at + 8, &gpu, sizeof(gpu));
	return end(0);
}

/* ---- memory and files ---- */

struct hr__cf_error cuFileBufRegister(const void *base, size_t bytes, int flags)
{
	static const int codes[] = {[REGISTERED] = 0,
				    [ALREADY_REGISTERED] = HR__CF_MEMORY_ALREADY_REGISTERED,
				    [NO_ROOM] = HR__CF_PINNING_FAILED};

	BEGIN(true);
	if (!base || !bytes || flags)
		return end(HR__CF_INVALID_VALUE);
	return end(codes[register_buffer(base, bytes)]);
}

struct hr__cf_error cuFileBufDeregister(const void *base)
{
	BEGIN(true);
	return end(deregister_buffer(base) == DEREGISTERED ? 0 : HR__CF_MEMORY_NOT_REGISTERED);
}

struct hr__cf_error cuFileHandleRegister(hr__cf_handle *handle, struct hr__cf_descr *descr)
{
	struct handle *room = NULL;
	struct stat st;

	BEGIN(true);
	if (descr->type != HR__CF_HANDLE_FD || fstat(descr->handle.fd, &st))
		return end(HR__CF_INVALID_VALUE);
	for (int i = 0; i < MAX_HANDLES; i++) {
		if (handles[i].is_used && handles[i].fd == descr->handle.fd)
			return end(HR__CF_HANDLE_ALREADY_REGISTERED);
		if (!handles[i].is_used && !room)
			room = &handles[i];
	}
	if (!room)
		return end(HR__CF_NOMEM_ERROR);
	if (!compat && !(fcntl(descr->handle.fd, F_GETFL) & O_DIRECT))
		return end(HR__CF_DIO_NOT_SET);
	*room = (struct handle){true, descr->handle.fd, st.st_dev, st.st_ino, 0};
	*handle = room;
	return end(0);
}

void cuFileHandleDeregister(hr__cf_handle handle)
{
	struct handle *h = handle;
	struct stat st;

	begin(__func__, true);
	if (h->n_reads)
		error("a handle is taken away from %u reads", h->n_reads);
	if (fstat(h->fd, &st) || st.st_dev != h->device || st.st_ino != h->inode)
		error("a descriptor is closed before its handle");
	h->is_used = false;
	end(0);
}

/* ---- reading ---- */

static void check_request(const struct handle *handle, size_t bytes, off_t file, off_t at)
{
	bool direct = fcntl(handle->fd, F_GETFL) & O_DIRECT;
	struct stat st;

	if (fstat(handle->fd, &st) || st.st_dev != handle->device || st.st_ino != handle->inode)
		error("descriptor %d is no longer the file it was registered for", handle->fd);
	if (!compat && direct && (bytes % 512 || file % 512 || at % 4096))
		error("%zu bytes at %lld to %lld are not aligned: the read goes through a copy", bytes, (long long)file,
		      (long long)at);
}

/* A descriptor for reading the file by the number of the one that was registered, as the real library does, but through
 * the page cache, so that nothing need be aligned; or -1. */
static int reopen(int fd)
{
	char path[32];

	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	return open(path, O_RDONLY | O_CLOEXEC);
}

static ssize_t give(int code)
{
	errno = code;
	return -1;
}

static void count_read(void)
{
	bool posix = compat ? !settings.nvidia_fs : settings.fallback && n_reads % (uint64_t)settings.fallback == 0;

	n_posix += posix;
	n_nvfs += !posix;
}

ssize_t cuFileRead(hr__cf_handle file, void *base, size_t bytes, off_t file_offset, off_t base_offset)
{
	struct handle *handle = file;
	struct reading reading;
	char *at = (char *)base + base_offset;
	ssize_t got;
	int fd, code = begin("cuFileRead", true);

	if (code || !handle->is_used) {
		end(0);
		return give(code ? code : HR__CF_HANDLE_NOT_REGISTERED);
	}
	check_request(handle, bytes, file_offset, base_offset);
	count_read();
	reading = begin_reading(base, at, bytes, base_offset, &handle->n_reads);
	end(0);
	fd = reopen(handle->fd);
	got = transfer(&reading, fd, at, bytes, file_offset);
	if (fd >= 0)
		close(fd);
	pthread_mutex_lock(&lock);
	end_reading(&reading);
	end(0);
	return got < 0 ? give(EIO) : got;
}
