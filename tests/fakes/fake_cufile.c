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
#define MAX_BUFFERS 64
#define MAX_READS   256
#define MAX_ARMED   16
#define MAX_COUNTED 32
#define MAX_REQUEST ((size_t)8 << 20)

#define SETTINGS(X)                                                                                                    \
	X(nvidia_fs, 1)                                                                                                \
	X(version, 1150) X(fallback, 0) X(short_every, 0) X(delay_us, 100) X(teardown_us, 0) X(bar_kib, 0)             \
		X(room_kib, 0) X(busy, 0) X(others, 0) X(seed, 1) X(strict, 1)

static struct {
#define FIELD(name, value) long long name;
	SETTINGS(FIELD)
#undef FIELD
} settings;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct handle {
	bool is_used;
	int fd;
	dev_t device;
	ino_t inode;
	unsigned n_reads;
} handles[MAX_HANDLES];
static struct buffer {
	char *base;
	size_t bytes;
	unsigned n_reads;
} buffers[MAX_BUFFERS];
/* What a read holds on to, by address: while it runs, and until the driver has forgotten it. */
static struct key {
	char *at;
	size_t bytes;
	bool is_running;
	uint64_t gone_ns;
} keys[MAX_READS];
static int n_opens;
static bool compat;
static long long n_reading, n_most_reading;
static uint64_t n_posix, n_nvfs, n_reads, random_state = 1;
static unsigned n_errors;
static char last_error[256];
static struct {
	char name[48];
	unsigned n;
	int code;
} armed[MAX_ARMED];
static struct {
	const char *name;
	unsigned long long n;
} counted[MAX_COUNTED];
static struct fake_cuda cuda;
static int (*get_context)(void **context);

/* ---- controls ---- */

static void error(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void error(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	vsnprintf(last_error, sizeof(last_error), format, args);
	va_end(args);
	n_errors++;
	if (settings.strict) {
		fprintf(stderr, "fake cuFile: %s\n", last_error);
		abort();
	}
}

static uint64_t draw(void)
{
	random_state = random_state * 6364136223846793005u + 1442695040888963407u;
	return random_state >> 33;
}

static uint64_t now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

API int fake_cufile_set(const char *key, long long value);
API int fake_cufile_set(const char *key, long long value)
{
	int rc = -1;

	pthread_mutex_lock(&lock);
#define SET(name, initial)                                                                                             \
	if (strcmp(key, #name) == 0) {                                                                                 \
		settings.name = value;                                                                                 \
		rc = 0;                                                                                                \
	}
	SETTINGS(SET)
#undef SET
	random_state = (uint64_t)settings.seed;
	pthread_mutex_unlock(&lock);
	return rc;
}

static void set_defaults(void)
{
#define DEFAULT(name, value) settings.name = value;
	SETTINGS(DEFAULT)
#undef DEFAULT
	fake_settings_read("HR_FAKE_CUFILE", fake_cufile_set);
}

__attribute__((constructor)) static void start(void)
{
	void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
	void *address = library ? dlsym(library, "cuCtxGetCurrent") : NULL;

	set_defaults();
	memcpy(&get_context, &address, sizeof(address));
	if (!fake_cuda_find(&cuda))
		fprintf(stderr, "fake cuFile: the CUDA driver is not the look-alike\n");
}

API void fake_cufile_reset(void);
API void fake_cufile_reset(void)
{
	set_defaults();
	pthread_mutex_lock(&lock);
	memset(armed, 0, sizeof(armed));
	memset(counted, 0, sizeof(counted));
	memset(keys, 0, sizeof(keys));
	n_errors = 0;
	n_posix = n_nvfs = n_reads = 0;
	n_most_reading = n_reading;
	last_error[0] = '\0';
	pthread_mutex_unlock(&lock);
}

API void fake_cufile_arm(const char *function, unsigned n, int code);
API void fake_cufile_arm(const char *function, unsigned n, int code)
{
	pthread_mutex_lock(&lock);
	if (n == 0)
		memset(armed, 0, sizeof(armed));
	for (int i = 0; i < MAX_ARMED && n; i++) {
		if (armed[i].n)
			continue;
		snprintf(armed[i].name, sizeof(armed[i].name), "%s", function);
		armed[i].n = n;
		armed[i].code = code;
		break;
	}
	pthread_mutex_unlock(&lock);
}

API unsigned fake_cufile_errors(char *text, size_t text_bytes);
API unsigned fake_cufile_errors(char *text, size_t text_bytes)
{
	if (text && text_bytes)
		snprintf(text, text_bytes, "%s", last_error);
	return n_errors;
}

API unsigned long long fake_cufile_calls(const char *function);
API unsigned long long fake_cufile_calls(const char *function)
{
	unsigned long long n = 0;

	pthread_mutex_lock(&lock);
	for (int i = 0; i < MAX_COUNTED && counted[i].name; i++)
		if (!function || strcmp(function, counted[i].name) == 0)
			n += counted[i].n;
	pthread_mutex_unlock(&lock);
	return n;
}

API long long fake_cufile_live(const char *kind);
API long long fake_cufile_live(const char *kind)
{
	long long n_handles = 0, n_buffers = 0, kib = 0;

	pthread_mutex_lock(&lock);
	for (int i = 0; i < MAX_HANDLES; i++)
		n_handles += handles[i].is_used;
	for (int i = 0; i < MAX_BUFFERS; i++) {
		n_buffers += buffers[i].base != NULL;
		kib += buffers[i].base ? (long long)(buffers[i].bytes >> 10) : 0;
	}
	pthread_mutex_unlock(&lock);
	if (!kind)
		return n_handles + n_buffers + n_opens;
	return strcmp(kind, "handles") == 0      ? n_handles
	       : strcmp(kind, "buffers") == 0    ? n_buffers
	       : strcmp(kind, "opens") == 0      ? n_opens
	       : strcmp(kind, "reads") == 0      ? n_reading
	       : strcmp(kind, "peak_reads") == 0 ? n_most_reading
	       : strcmp(kind, "kib") == 0        ? kib
						 : -1;
}

/* ---- the frame of every function ---- */

static int armed_code(const char *function)
{
	for (int i = 0; i < MAX_ARMED; i++)
		if (armed[i].n && strcmp(armed[i].name, function) == 0 && --armed[i].n == 0)
			return armed[i].code;
	return 0;
}

static void count(const char *function)
{
	for (int i = 0; i < MAX_COUNTED; i++) {
		if (!counted[i].name)
			counted[i].name = function;
		if (strcmp(counted[i].name, function) == 0) {
			counted[i].n++;
			return;
		}
	}
}

/* Takes the lock; what the function answers at once, or 0. */
static int begin(const char *function, bool needs_driver)
{
	bool is_asking = strncmp(function, "cuFileGet", 9) == 0; /* which needs no context */
	void *context = NULL;

	if (get_context && !is_asking)
		get_context(&context);
	pthread_mutex_lock(&lock);
	count(function);
	if (needs_driver && n_opens == 0) {
		error("%s is called while the driver is not open", function);
		return HR__CF_NOT_INITIALIZED;
	}
	if (!context && !is_asking)
		return HR__CF_INVALID_CONTEXT_ERROR;
	return armed_code(function);
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
	struct buffer *room = NULL;
	size_t kib = bytes >> 10;

	BEGIN(true);
	if (!base || !bytes || flags)
		return end(HR__CF_INVALID_VALUE);
	if ((uintptr_t)base % 65536 || bytes % 65536)
		error("memory at %p, %zu bytes, is registered across a 64 KiB border", base, bytes);
	for (int i = 0; i < MAX_BUFFERS; i++) {
		if (!buffers[i].base) {
			room = room ? room : &buffers[i];
			continue;
		}
		if ((const char *)base < buffers[i].base + buffers[i].bytes &&
		    buffers[i].base < (const char *)base + bytes)
			return end(HR__CF_MEMORY_ALREADY_REGISTERED);
		kib += buffers[i].bytes >> 10;
	}
	if (!room || (settings.room_kib && kib > (size_t)settings.room_kib))
		return end(HR__CF_PINNING_FAILED);
	*room = (struct buffer){(char *)(uintptr_t)base, bytes, 0};
	return end(0);
}

struct hr__cf_error cuFileBufDeregister(const void *base)
{
	BEGIN(true);
	for (int i = 0; i < MAX_BUFFERS; i++) {
		if (buffers[i].base != base || !base)
			continue;
		if (buffers[i].n_reads)
			error("memory is taken away from %u reads", buffers[i].n_reads);
		if (buffers[i].n_reads || settings.busy > 0) {
			settings.busy -= settings.busy > 0;
			return end(HR__CF_MEMORY_NOT_REGISTERED);
		}
		buffers[i].base = NULL;
		return end(0);
	}
	return end(HR__CF_MEMORY_NOT_REGISTERED);
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

static struct buffer *buffer_of(const char *base, size_t bytes, off_t offset)
{
	for (int i = 0; i < MAX_BUFFERS; i++)
		if (buffers[i].base && base == buffers[i].base && offset >= 0 &&
		    (size_t)offset + bytes <= buffers[i].bytes)
			return &buffers[i];
	return NULL;
}

/* Remembers a read by its address, and tells of one that meets another there. */
static struct key *take_key(char *at, size_t bytes)
{
	uint64_t now = now_ns();
	struct key *room = NULL;

	for (int i = 0; i < MAX_READS; i++) {
		struct key *key = &keys[i];

		if (!key->is_running && key->gone_ns <= now) {
			room = room ? room : key;
			continue;
		}
		if (at < key->at + key->bytes && key->at < at + bytes)
			error("corruption: %zu bytes are read to where a read %s", bytes,
			      key->is_running ? "is going on" : "has not been torn down");
	}
	if (!room)
		abort();
	*room = (struct key){at, bytes, true, 0};
	return room;
}

static void check_request(const struct handle *handle, const struct buffer *buffer, size_t bytes, off_t file, off_t at)
{
	bool direct = fcntl(handle->fd, F_GETFL) & O_DIRECT;
	struct stat st;

	if (!buffer)
		error("%zu bytes are read to memory that is not registered, or not by its first byte", bytes);
	if (bytes > MAX_REQUEST)
		error("a read of %zu bytes will be cut up", bytes);
	if (fstat(handle->fd, &st) || st.st_dev != handle->device || st.st_ino != handle->inode)
		error("descriptor %d is no longer the file it was registered for", handle->fd);
	if (!compat && direct && (bytes % 512 || file % 512 || at % 4096))
		error("%zu bytes at %lld to %lld are not aligned: the read goes through a copy", bytes, (long long)file,
		      (long long)at);
}

/* The file's bytes, by the descriptor's number as the real library does, but through the page cache, so that nothing
 * need be aligned. */
static ssize_t read_file(int fd, char *bytes, size_t n, off_t offset)
{
	char path[32];
	ssize_t got = 0, part = 1;
	int own;

	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	own = open(path, O_RDONLY | O_CLOEXEC);
	while (own >= 0 && part > 0 && (size_t)got < n) {
		part = pread(own, bytes + got, n - (size_t)got, offset + got);
		got += part > 0 ? part : 0;
	}
	if (own >= 0)
		close(own);
	return own < 0 || part < 0 ? -1 : got;
}

static void dawdle(void)
{
	uint64_t ns;

	pthread_mutex_lock(&lock);
	ns = settings.delay_us ? draw() % ((uint64_t)settings.delay_us * 1000) : 0;
	pthread_mutex_unlock(&lock);
	if (ns)
		nanosleep(&(struct timespec){(time_t)(ns / 1000000000), (long)(ns % 1000000000)}, NULL);
}

static ssize_t give(int code)
{
	errno = code;
	return -1;
}

/* Counts a read; whether it is to be short. */
static bool count_read(void)
{
	bool posix = compat ? !settings.nvidia_fs : settings.fallback && n_reads % (uint64_t)settings.fallback == 0;

	n_reads++;
	n_posix += posix;
	n_nvfs += !posix;
	return settings.short_every && n_reads % (uint64_t)settings.short_every == 0;
}

ssize_t cuFileRead(hr__cf_handle file, void *base, size_t bytes, off_t file_offset, off_t base_offset)
{
	struct handle *handle = file;
	struct buffer *buffer;
	struct key *key;
	char *at = (char *)base + base_offset, *copy;
	bool is_short;
	ssize_t got;
	int code = begin("cuFileRead", true);

	if (code || !handle->is_used) {
		end(0);
		return give(code ? code : HR__CF_HANDLE_NOT_REGISTERED);
	}
	buffer = buffer_of(base, bytes, base_offset);
	check_request(handle, buffer, bytes, file_offset, base_offset);
	key = take_key(at, bytes);
	handle->n_reads++;
	if (buffer)
		buffer->n_reads++;
	n_reading++;
	n_most_reading = n_reading > n_most_reading ? n_reading : n_most_reading;
	is_short = count_read();
	end(0);

	copy = malloc(bytes ? bytes : 1);
	memset(copy, 0x5e, bytes); /* what a bounce buffer held before */
	got = read_file(handle->fd, copy, bytes, file_offset);
	dawdle();
	if (is_short && got > 512)
		got -= 512;
	if (got >= 0 && cuda.store && (size_t)got < bytes)
		memset(copy + got, 0x5e, bytes - (size_t)got);
	if (got >= 0 && cuda.store)
		cuda.store((unsigned long long)(uintptr_t)at, copy, bytes); /* a short one spoils the rest */
	free(copy);

	pthread_mutex_lock(&lock);
	key->is_running = false;
	key->gone_ns = now_ns() + (uint64_t)settings.teardown_us * 1000;
	handle->n_reads--;
	if (buffer)
		buffer->n_reads--;
	n_reading--;
	end(0);
	return got < 0 ? give(EIO) : got;
}
