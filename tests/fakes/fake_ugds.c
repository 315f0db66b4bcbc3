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

#define API __attribute__((visibility("default")))

#define SETTINGS(X)                                                                                                    \
	X(lba, 512)                                                                                                    \
	X(capacity_mib, 0) X(short_every, 0) X(delay_us, 100) X(teardown_us, 0) X(wedge_after, 0) X(room_kib, 0)       \
		X(busy, 0) X(seed, 1) X(strict, 1)

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
/* There is one disk. */
static struct {
	bool is_used, is_wedged;
	int fd;
	dev_t device;
	ino_t inode;
	unsigned n_reads;
} disk;
static int n_opens;
static pid_t owner;
static int (*get_context)(void **context);

/* ---- controls ---- */

static struct fake_controls controls = {
	.who = "uGDS", .settings = table, .n_settings = sizeof(table) / sizeof(table[0])};

static void error(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void error(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	fake_tell(&controls, settings.strict, format, args);
	va_end(args);
}

#include "fake_reader.h" /* uses all of the above */

API int fake_ugds_set(const char *key, long long value);
API int fake_ugds_set(const char *key, long long value)
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

	fake_set_all(&controls, "HR_FAKE_UGDS");
	memcpy(&get_context, &address, sizeof(address));
	if (!fake_cuda_find(&cuda))
		fprintf(stderr, "fake uGDS: the CUDA driver is not the look-alike\n");
}

API void fake_ugds_reset(void);
API void fake_ugds_reset(void)
{
	pthread_mutex_lock(&lock);
	fake_set_all(&controls, "HR_FAKE_UGDS");
	fake_controls_reset(&controls);
	reader_reset();
	pthread_mutex_unlock(&lock);
}

API void fake_ugds_arm(const char *function, unsigned n, int code);
API void fake_ugds_arm(const char *function, unsigned n, int code)
{
	pthread_mutex_lock(&lock);
	fake_arm(&controls, function, n, code);
	pthread_mutex_unlock(&lock);
}

API unsigned fake_ugds_errors(char *text, size_t text_bytes);
API unsigned fake_ugds_errors(char *text, size_t text_bytes)
{
	return fake_told(&controls, text, text_bytes);
}

API unsigned long long fake_ugds_calls(const char *function);
API unsigned long long fake_ugds_calls(const char *function)
{
	unsigned long long n;

	pthread_mutex_lock(&lock);
	n = fake_calls(&controls, function);
	pthread_mutex_unlock(&lock);
	return n;
}

API long long fake_ugds_live(const char *kind);
API long long fake_ugds_live(const char *kind)
{
	long long n;

	pthread_mutex_lock(&lock);
	if (!kind)
		n = disk.is_used + n_registered() + n_opens;
	else if (strcmp(kind, "handles") == 0)
		n = disk.is_used;
	else
		n = strcmp(kind, "opens") == 0 ? n_opens : reader_live(kind);
	pthread_mutex_unlock(&lock);
	return n;
}

/* ---- the frame of every function ---- */

/* Takes the lock; what the function answers at once, or 0. */
static int begin(const char *function)
{
	void *context = NULL;

	if (get_context)
		get_context(&context);
	pthread_mutex_lock(&lock);
	fake_count(&controls, function);
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
	return fake_take_armed(&controls, function);
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
	BEGIN();
	if (disk.is_used || n_reading || n_registered()) {
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
	if (n_registered())
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
	static const int codes[] = {[REGISTERED] = 0,
				    [ALREADY_REGISTERED] = HR__UG_MEMORY_ALREADY_REGISTERED,
				    [NO_ROOM] = HR__UG_GPU_MEMORY_PINNING_FAILED};

	BEGIN();
	if (!base || !bytes || flags)
		return end(HR__UG_INVALID_VALUE);
	if (!disk.is_used)
		return end(HR__UG_DRIVER_NOT_INITIALIZED);
	return end(codes[register_buffer(base, bytes)]);
}

struct hr__ug_error uGDSBufDeregister(const void *base)
{
	static const int codes[] = {
		[DEREGISTERED] = 0, [NOT_REGISTERED] = HR__UG_MEMORY_NOT_REGISTERED, [BUSY] = HR__UG_BUSY};

	BEGIN();
	return end(codes[deregister_buffer(base)]);
}

/* ---- reading ---- */

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

ssize_t uGDSRead(hr__ug_handle handle, void *base, size_t bytes, off_t disk_offset, off_t base_offset)
{
	/* A base that lies across a border is rounded down by the kernel's part. */
	char *at = (char *)base - (uintptr_t)base % GPU_PAGE + base_offset;
	struct reading reading;
	bool is_lost;
	ssize_t got;
	int code = begin("uGDSRead"), refused = code ? -code : refuse(handle, bytes, disk_offset, base_offset);

	if (refused) {
		end(0);
		return refused;
	}
	reading = begin_reading(base, at, bytes, base_offset, &disk.n_reads);
	is_lost = settings.wedge_after > 0 && --settings.wedge_after == 0;
	disk.is_wedged |= is_lost;
	end(0);
	if (is_lost) /* it stays in motion, and its memory in use */
		return -EIO;
	got = transfer(&reading, disk.fd, at, bytes, disk_offset);
	pthread_mutex_lock(&lock);
	end_reading(&reading);
	end(0);
	return got < 0 ? -EIO : got;
}
