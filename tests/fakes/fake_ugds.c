/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A look-alike of the uGDS library over the look-alike CUDA driver, built as libugds.so from what the project's public
 * header and sources say; no run of the real one has been compared with it. fake_ugds.h has the controls and says which
 * mistakes of a caller are recorded.
 *
 * One lock guards everything; a read drops it while it reads and while it dawdles.
 */
#include "fake_ugds.h"

#include "engine/ugds_syms.h"
#include "fake_controls.h"
#include "fake_cuda.h"

#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define API         __attribute__((visibility("default")))
#define MAX_BUFFERS 64
#define MAX_READS   256
#define MAX_ARMED   16
#define MAX_COUNTED 32
#define MAX_REQUEST ((size_t)8 << 20)
#define GPU_PAGE    ((uintptr_t)64 << 10)

#define SETTINGS(X)                                                                                                    \
	X(lba, 512)                                                                                                    \
	X(capacity_mib, 0) X(short_every, 0) X(delay_us, 100) X(teardown_us, 0) X(wedge_after, 0) X(room_kib, 0)       \
		X(busy, 0) X(seed, 1) X(strict, 1)

static struct {
#define FIELD(name, value) long long name;
	SETTINGS(FIELD)
#undef FIELD
} settings;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
/* There is one disk. */
static struct {
	bool is_used, is_wedged;
	int fd;
	dev_t device;
	ino_t inode;
	unsigned n_reads;
} disk;
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
static long long n_reading, n_most_reading;
static uint64_t n_reads, random_state = 1;
static unsigned n_errors;
static char last_error[256];
static pid_t owner;
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
		fprintf(stderr, "fake uGDS: %s\n", last_error);
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

API int fake_ugds_set(const char *key, long long value);
API int fake_ugds_set(const char *key, long long value)
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
	fake_settings_read("HR_FAKE_UGDS", fake_ugds_set);
}

__attribute__((constructor)) static void start(void)
{
	void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
	void *address = library ? dlsym(library, "cuCtxGetCurrent") : NULL;

	set_defaults();
	memcpy(&get_context, &address, sizeof(address));
	if (!fake_cuda_find(&cuda))
		fprintf(stderr, "fake uGDS: the CUDA driver is not the look-alike\n");
}

API void fake_ugds_reset(void);
API void fake_ugds_reset(void)
{
	set_defaults();
	pthread_mutex_lock(&lock);
	memset(armed, 0, sizeof(armed));
	memset(counted, 0, sizeof(counted));
	memset(keys, 0, sizeof(keys));
	n_errors = 0;
	n_reads = 0;
	n_most_reading = n_reading;
	last_error[0] = '\0';
	pthread_mutex_unlock(&lock);
}

API void fake_ugds_arm(const char *function, unsigned n, int code);
API void fake_ugds_arm(const char *function, unsigned n, int code)
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

API unsigned fake_ugds_errors(char *text, size_t text_bytes);
API unsigned fake_ugds_errors(char *text, size_t text_bytes)
{
	if (text && text_bytes)
		snprintf(text, text_bytes, "%s", last_error);
	return n_errors;
}

API unsigned long long fake_ugds_calls(const char *function);
API unsigned long long fake_ugds_calls(const char *function)
{
	unsigned long long n = 0;

	pthread_mutex_lock(&lock);
	for (int i = 0; i < MAX_COUNTED && counted[i].name; i++)
		if (!function || strcmp(function, counted[i].name) == 0)
			n += counted[i].n;
	pthread_mutex_unlock(&lock);
	return n;
}

API long long fake_ugds_live(const char *kind);
API long long fake_ugds_live(const char *kind)
{
	long long n_buffers = 0, kib = 0, n_handles;

	pthread_mutex_lock(&lock);
	n_handles = disk.is_used;
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
static int begin(const char *function)
{
	void *context = NULL;

	if (get_context)
		get_context(&context);
	pthread_mutex_lock(&lock);
	count(function);
	owner = owner ? owner : getpid();
	if (owner != getpid())
		error("%s is called in a forked child", function);
	if (!context)
		error("%s is called without a CUDA context", function);
	if (n_opens == 0 && strcmp(function, "uGDSDriverOpen") != 0) {
		error("%s is called while the driver is not open", function);
		return HR__UG_DRIVER_NOT_INITIALIZED;
	}
	if (disk.is_wedged && strcmp(function, "uGDSRead") != 0)
		error("%s is called after the disk was lost", function);
	return armed_code(function);
}

static struct hr__ug_error end(int code)
{
	pthread_mutex_unlock(&lock);
	return (struct hr__ug_error){code, code == HR__UG_CUDA_DRIVER_ERROR ? 2 : 0};
}

#define BEGIN()                                                                                                        \
	do {                                                                                                           \
		int code_ = begin(__func__);                                                                           \
		if (code_)                                                                                             \
			return end(code_);                                                                             \
	} while (0)

#define DECLARE(name, result, parameters) API result name parameters;
HR__UG_SYMBOLS(DECLARE)
#undef DECLARE

/* ---- the driver and the disk ---- */

struct hr__ug_error uGDSDriverOpen(void)
{
	BEGIN();
	n_opens++;
	return end(0);
}

struct hr__ug_error uGDSDriverClose(void)
{
	bool is_busy;

	BEGIN();
	is_busy = disk.is_used || n_reading;
	for (int i = 0; i < MAX_BUFFERS; i++)
		is_busy |= buffers[i].base != NULL;
	if (is_busy) {
		error("the driver is closed with a disk or memory registered");
		return end(HR__UG_BUSY);
	}
	n_opens--;
	return end(0);
}

struct hr__ug_error uGDSHandleRegister(hr__ug_handle *handle, struct hr__ug_descr *descr)
{
	struct stat st;

	BEGIN();
	if (descr->type != HR__UG_HANDLE_FD || fstat(descr->handle.fd, &st))
		return end(HR__UG_INVALID_VALUE);
	if (disk.is_used) {
		error("a disk is registered twice: its controller is reset under %u reads", disk.n_reads);
		return end(HR__UG_HANDLE_ALREADY_REGISTERED);
	}
	disk.is_used = true;
	disk.fd = descr->handle.fd;
	disk.device = st.st_dev;
	disk.inode = st.st_ino;
	disk.n_reads = 0;
	*handle = &disk;
	return end(0);
}

struct hr__ug_error uGDSHandleDeregisterEx(hr__ug_handle handle, int timeout_s)
{
	struct stat st;

	BEGIN();
	if (handle != &disk || !disk.is_used || timeout_s != 0)
		return end(HR__UG_HANDLE_NOT_REGISTERED);
	if (disk.n_reads)
		error("the disk is taken away from %u reads", disk.n_reads);
	if (fstat(disk.fd, &st) || st.st_dev != disk.device || st.st_ino != disk.inode)
		error("the node is closed before its handle");
	for (int i = 0; i < MAX_BUFFERS; i++)
		if (buffers[i].base)
			error("the disk goes before memory that is registered with it");
	disk.is_used = false;
	return end(0);
}

static uint64_t capacity(void)
{
	struct stat st;

	if (settings.capacity_mib)
		return (uint64_t)settings.capacity_mib << 20;
	return fstat(disk.fd, &st) ? 0 : (uint64_t)st.st_size / (uint64_t)settings.lba * (uint64_t)settings.lba;
}

struct hr__ug_error uGDSGetDeviceCapacity(hr__ug_handle handle, uint64_t *bytes)
{
	BEGIN();
	if (handle != &disk || !disk.is_used)
		return end(HR__UG_HANDLE_NOT_REGISTERED);
	*bytes = capacity();
	return end(0);
}

/* ---- memory ---- */

struct hr__ug_error uGDSBufRegister(const void *base, size_t bytes, int flags)
{
	struct buffer *room = NULL;
	size_t kib = bytes >> 10;

	BEGIN();
	if (!base || !bytes || flags)
		return end(HR__UG_INVALID_VALUE);
	if (!disk.is_used)
		return end(HR__UG_DRIVER_NOT_INITIALIZED);
	if ((uintptr_t)base % GPU_PAGE || bytes % GPU_PAGE)
		error("memory at %p, %zu bytes, is registered across a 64 KiB border", base, bytes);
	for (int i = 0; i < MAX_BUFFERS; i++) {
		if (!buffers[i].base) {
			room = room ? room : &buffers[i];
			continue;
		}
		if ((const char *)base < buffers[i].base + buffers[i].bytes &&
		    buffers[i].base < (const char *)base + bytes)
			return end(HR__UG_MEMORY_ALREADY_REGISTERED);
		kib += buffers[i].bytes >> 10;
	}
	if (!room || (settings.room_kib && kib > (size_t)settings.room_kib))
		return end(HR__UG_GPU_MEMORY_PINNING_FAILED);
	*room = (struct buffer){(char *)(uintptr_t)base, bytes, 0};
	return end(0);
}

struct hr__ug_error uGDSBufDeregister(const void *base)
{
	BEGIN();
	for (int i = 0; i < MAX_BUFFERS; i++) {
		if (buffers[i].base != base || !base)
			continue;
		if (buffers[i].n_reads)
			error("memory is taken away from %u reads", buffers[i].n_reads);
		if (buffers[i].n_reads || settings.busy > 0) {
			settings.busy -= settings.busy > 0;
			return end(HR__UG_BUSY);
		}
		buffers[i].base = NULL;
		return end(0);
	}
	return end(HR__UG_MEMORY_NOT_REGISTERED);
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

/* What the library checks before any command is made: -EINVAL, -EBADF, or 0. */
static int refuse(hr__ug_handle handle, size_t bytes, off_t at, off_t base_offset)
{
	size_t lba = (size_t)settings.lba;

	if (handle != &disk || !disk.is_used || disk.is_wedged)
		return -EBADF;
	if (!bytes || bytes % lba || (size_t)at % lba || base_offset % 4096 || at < 0 ||
	    (uint64_t)at + bytes > capacity())
		return -EINVAL;
	return 0;
}

static ssize_t read_disk(char *bytes, size_t n, off_t offset)
{
	ssize_t got = 0, part = 1;

	while (part > 0 && (size_t)got < n) {
		part = pread(disk.fd, bytes + got, n - (size_t)got, offset + got);
		got += part > 0 ? part : 0;
	}
	return part < 0 ? -1 : got;
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

/* Moves the bytes. A base that lies across a border is rounded down by the kernel's part. */
static ssize_t transfer(char *at, size_t bytes, off_t offset, bool is_short)
{
	char *copy = malloc(bytes);
	ssize_t got = read_disk(copy, bytes, offset);

	dawdle();
	if (is_short && got > 512)
		got -= 512;
	if (got >= 0 && (size_t)got < bytes)
		memset(copy + got, 0x5e, bytes - (size_t)got);
	if (got >= 0 && cuda.store)
		cuda.store((unsigned long long)(uintptr_t)at, copy, bytes);
	free(copy);
	return got < 0 ? -EIO : got;
}

ssize_t uGDSRead(hr__ug_handle handle, void *base, size_t bytes, off_t disk_offset, off_t base_offset)
{
	struct buffer *buffer;
	struct key *key;
	char *at = (char *)base - (uintptr_t)base % GPU_PAGE + base_offset;
	bool is_short, is_lost;
	ssize_t got;
	int code = begin("uGDSRead"), refused = code ? -code : refuse(handle, bytes, disk_offset, base_offset);

	if (refused) {
		end(0);
		return refused;
	}
	buffer = buffer_of(base, bytes, base_offset);
	if (!buffer)
		error("%zu bytes are read to memory that is not registered, or not by its first byte", bytes);
	if (bytes > MAX_REQUEST)
		error("a read of %zu bytes will be cut up", bytes);
	key = take_key(at, bytes);
	disk.n_reads++;
	if (buffer)
		buffer->n_reads++;
	n_reading++;
	n_most_reading = n_reading > n_most_reading ? n_reading : n_most_reading;
	n_reads++;
	is_short = settings.short_every && n_reads % (uint64_t)settings.short_every == 0;
	is_lost = settings.wedge_after > 0 && --settings.wedge_after == 0;
	disk.is_wedged |= is_lost;
	end(0);
	if (is_lost) /* it stays in motion, and its memory in use */
		return -EIO;
	got = transfer(at, bytes, disk_offset, is_short);
	pthread_mutex_lock(&lock);
	key->is_running = false;
	key->gone_ns = now_ns() + (uint64_t)settings.teardown_us * 1000;
	disk.n_reads--;
	if (buffer)
		buffer->n_reads--;
	n_reading--;
	end(0);
	return got;
}
