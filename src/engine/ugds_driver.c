/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Finding and starting uGDS, the one session, and its end. ugds_driver.h says what always holds.
 *
 * Opening, in this order: the node (with a lock on it, so that a second process is told instead of resetting the
 * controller under the first), driver, handle, capacity, the bounce, the sector size. Closing is the same backwards;
 * what the library does not give back within seconds stays, with everything that it needs.
 *
 * Locks: `lock` for the session as such, held while it is opened and closed; session->bounce_lock for the bounce.
 */
#include "ugds_driver.h"

#include "ugds_syms.h"

#include "core/arith.h"
#include "core/dl.h"
#include "core/fault.h"
#include "core/mem.h"
#include "core/os_library.h"
#include "headrace.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#define MODULE           "/sys/module/ugds_drv"
#define NODE             "/dev/ugds_drv0"
#define PAGE             4096u
#define DEREGISTER_TRIES 200
#define DEREGISTER_NS    ((uint64_t)10 * 1000 * 1000)

struct hr__ugds {
	struct hr__raw raw;
	unsigned n_users; /* guarded by lock */
	char *node;
	int fd;
	hr__ug_handle handle;
	uint64_t capacity;
	uint32_t lba_bytes;
	struct hr__ugds_gpu gpu;
	bool has_gpu, is_driver_open, has_handle, has_bounce;
	pthread_mutex_t bounce_lock;
	struct hr__ugds *next_kept;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct hr__ug_api api; /* filled once, then constant; guarded by lock until then */
static bool is_loaded;        /* guarded by lock */
static struct hr__ugds *_Atomic current;
static const volatile uint32_t *_Atomic fork_mark; /* made for the first session, and kept: reads 0 in a forked child */
static atomic_bool is_poisoned;                    /* for ever */
static struct hr__ugds *kept;                      /* sessions that the library still holds; guarded by lock */

/* A call that gives a struct hr__ug_error, with its fault point. */
#define CALL(name, ...)                                                                                                \
	(__extension__({                                                                                               \
		int armed_ = HR__FAULT(#name);                                                                         \
		armed_ ? (struct hr__ug_error){armed_, 0} : api.name(__VA_ARGS__);                                     \
	}))
#define CALL_0(name)                                                                                                   \
	(__extension__({                                                                                               \
		int armed_ = HR__FAULT(#name);                                                                         \
		armed_ ? (struct hr__ug_error){armed_, 0} : api.name();                                                \
	}))

/* ---- words ---- */

const char *hr__ugds_text(int code, char *out, size_t out_bytes)
{
	static const struct {
		int code;
		const char *text;
	} texts[] = {
#define TEXT(name, number, text) {number, text},
		HR__UG_ERRORS(TEXT)
#undef TEXT
	};

	for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++)
		if (texts[i].code == code) {
			snprintf(out, out_bytes, "%s (%d)", texts[i].text, code);
			return out;
		}
	snprintf(out, out_bytes, "error %d", code);
	return out;
}

#define RESTART "; the command may still be in motion, so nothing more is read through uGDS: restart the process"

const char *hr__ugds_explain(int error, int *code)
{
	*code = HR_E_GDS;
	switch (error) {
	case EIO:
		return "uGDS reports a failed or timed-out read (-EIO)" RESTART;
	case EBADF:
		return "uGDS has given the disk up after a time-out (-EBADF)" RESTART;
	case ENOTRECOVERABLE:
		return "an earlier read through uGDS failed or timed out" RESTART;
	case EINVAL:
		return "uGDS refuses the place or the length of the read (-EINVAL): the disk has other sectors, or is "
		       "smaller, than it had when it was opened; open the model again";
	case EMSGSIZE:
		*code = HR_E_SHORT;
		return "uGDS read fewer bytes than it was asked for, and which of them are right there is no telling";
	case ECHILD:
		*code = HR_E_FORKED;
		return "the uGDS session belongs to the parent process; open the model in a process of its own (exec)";
	case EREMOTEIO:
		*code = HR_E_DEVICE;
		return "what uGDS read could not be copied from the GPU to the host";
	default:
		return "uGDS refuses the read";
	}
}

static int fail(struct hr__ugds_fault *fault, int code, int system, const char *text)
{
	fault->code = code;
	fault->system = system;
	snprintf(fault->reason, sizeof(fault->reason), "%s", text);
	return code;
}

static int fail_call(struct hr__ugds_fault *fault, int code, const char *what)
{
	char text[96];

	snprintf(fault->reason, sizeof(fault->reason), "%s: %s", what, hr__ugds_text(code, text, sizeof(text)));
	fault->system = code;
	fault->code = HR_E_GDS;
	return HR_E_GDS;
}

/* ---- looking ---- */

/* Under the lock. */
static int load(char *reason, size_t reason_bytes)
{
	static const char *const names[] = {"libugds.so", NULL};
	static const struct hr__dl_symbol symbols[] = {
#define ROW(name, result, parameters) {offsetof(struct hr__ug_api, name), #name, 1},
		HR__UG_SYMBOLS(ROW)
#undef ROW
	};
	char why[160];

	if (is_loaded)
		return 0;
	if (hr__dl_load(names, symbols, sizeof(symbols) / sizeof(symbols[0]), &api, why, sizeof(why))) {
		snprintf(reason, reason_bytes, "no usable uGDS library: %s", why);
		return HR_E_UNSUPPORTED;
	}
	is_loaded = true;
	return 0;
}

int hr__ugds_look(char *reason, size_t reason_bytes)
{
	int rc;

	pthread_mutex_lock(&lock);
	rc = load(reason, reason_bytes);
	pthread_mutex_unlock(&lock);
	if (rc)
		return rc;
	if (!hr__os_is_there(MODULE)) {
		snprintf(reason, reason_bytes, "the module ugds_drv is not loaded, so no disk belongs to uGDS");
		return HR_E_UNSUPPORTED;
	}
	if (!hr__os_is_there(NODE))
		snprintf(reason, reason_bytes,
			 "for models opened through uGDS; ugds_drv is loaded, but has no disk (" NODE " is not there)");
	return 0;
}

/* ---- reading ---- */

/* Of a process that has ever had a session: its driver, and CUDA's, are the parent's. */
static bool is_forked(void)
{
	const volatile uint32_t *mark = atomic_load(&fork_mark);

	return mark && *mark == 0;
}

/* With alignments as they are known by now. */
static int read_once(struct hr__ugds *session, void *base, size_t bytes, uint64_t offset, uint64_t at)
{
	int armed;
	ssize_t answer;

	if (is_forked())
		return ECHILD;
	if (atomic_load(&is_poisoned))
		return ENOTRECOVERABLE;
	armed = HR__FAULT("uGDSRead");
	answer = armed ? -armed : api.uGDSRead(session->handle, base, bytes, (off_t)offset, (off_t)at);
	if (answer == -EIO || answer == -EBADF)
		atomic_store(&is_poisoned, true);
	if (answer < 0)
		return (int)-answer;
	return (size_t)answer == bytes ? 0 : EMSGSIZE;
}

int hr__ugds_read(struct hr__ugds *session, void *base, size_t bytes, uint64_t offset, uint64_t at)
{
	if (!bytes || bytes > HR__UGDS_MAX_REQUEST || bytes % session->lba_bytes || offset % session->lba_bytes ||
	    at % PAGE || offset > session->capacity || bytes > session->capacity - offset)
		return EINVAL;
	return read_once(session, base, bytes, offset, at);
}

/* One piece of a host read, for the thread that has the GPU. */
struct piece {
	struct hr__ugds *session;
	uint64_t offset;
	size_t bytes;
	int error;
};

static void read_piece(void *arg)
{
	struct piece *piece = arg;

	piece->error = hr__ugds_read(piece->session, piece->session->gpu.bounce, piece->bytes, piece->offset, 0);
}

/* Whole sectors into the bounce, and of them what is wanted to the host. */
static int read_through(struct hr__ugds *session, uint64_t offset, unsigned char *dst, size_t bytes)
{
	const struct hr__ugds_gpu *gpu = &session->gpu;
	uint64_t align = hr__max_u64(session->lba_bytes, PAGE);
	int error = 0;

	while (bytes > 0 && !error) {
		uint64_t begin = hr__round_down(offset, align), lead = offset - begin;
		uint64_t whole = hr__min_u64(hr__round_up(lead + bytes, align), gpu->bounce_bytes);
		struct piece piece = {session, begin, 0, 0};
		size_t part;

		whole = hr__min_u64(whole, session->capacity > begin ? session->capacity - begin : 0);
		if (whole <= lead)
			return EINVAL;
		part = (size_t)hr__min_u64(whole - lead, bytes);
		piece.bytes = (size_t)whole;
		error = gpu->inside(gpu->ctx, read_piece, &piece) ? EREMOTEIO : piece.error;
		if (!error && gpu->read_back(gpu->ctx, dst, (char *)gpu->bounce + lead, part))
			error = EREMOTEIO;
		offset += part;
		dst += part;
		bytes -= part;
	}
	return error;
}

static int read_host(struct hr__raw *raw, uint64_t offset, void *dst, size_t bytes)
{
	struct hr__ugds *session = (struct hr__ugds *)raw;
	int error;

	if (is_forked()) /* the lock may be the parent's */
		return ECHILD;
	pthread_mutex_lock(&session->bounce_lock);
	error = read_through(session, offset, dst, bytes);
	pthread_mutex_unlock(&session->bounce_lock);
	return error;
}

static const struct hr__raw_ops raw_ops = {.read = read_host, .explain = hr__ugds_explain};

struct hr__raw *hr__ugds_raw(struct hr__ugds *session)
{
	return &session->raw;
}

struct hr__ugds *hr__ugds_of(const struct hr__file *file)
{
	return file->raw && file->raw->ops == &raw_ops ? (struct hr__ugds *)file->raw : NULL;
}

uint64_t hr__ugds_capacity(const struct hr__ugds *session)
{
	return session->capacity;
}

uint32_t hr__ugds_lba_bytes(const struct hr__ugds *session)
{
	return session->lba_bytes;
}

/* ---- registering ---- */

static bool may_be_too_large(int code)
{
	return code == HR__UG_INVALID_MAPPING_SIZE || code == HR__UG_INVALID_MAPPING_RANGE ||
	       code == HR__UG_GPU_MEMORY_PINNING_FAILED || code == HR__UG_OUT_OF_MEMORY ||
	       code == HR__UG_CUDA_DRIVER_ERROR;
}

int hr__ugds_register(struct hr__ugds *session, void *base, size_t bytes, char *reason, size_t reason_bytes)
{
	struct hr__ug_error error;
	char text[96];
	int ignored;

	(void)session; /* there is one; the library asks for none here */
	if (is_forked() || atomic_load(&is_poisoned)) {
		snprintf(reason, reason_bytes, "%s",
			 hr__ugds_explain(is_forked() ? ECHILD : ENOTRECOVERABLE, &ignored));
		return HR_E_GDS;
	}
	/* The kernel's part rounds a base down without a word, and reads would land before it. */
	if ((uintptr_t)base % HR__UGDS_GPU_PAGE || bytes % HR__UGDS_GPU_PAGE) {
		snprintf(reason, reason_bytes, "a window of %zu bytes at %p does not lie at 64 KiB borders", bytes,
			 base);
		return HR_E_GDS;
	}
	error = CALL(uGDSBufRegister, base, bytes, 0);
	if (error.err == 0)
		return 0;
	snprintf(reason, reason_bytes, "uGDS cannot register a window of %zu bytes: %s", bytes,
		 hr__ugds_text(error.err, text, sizeof(text)));
	return may_be_too_large(error.err) ? HR_E_SPACE : HR_E_GDS;
}

/* Memory, a handle or the driver may be in use for a moment after the last read; for longer than that they are not ours
 * to give up. */
static bool give_up(struct hr__ug_error (*call)(const void *arg), const void *arg)
{
	for (int i = 0; i < DEREGISTER_TRIES && !atomic_load(&is_poisoned); i++) {
		struct hr__ug_error error = call(arg);

		if (error.err == 0)
			return true;
		if (error.err != HR__UG_BUSY)
			break;
		hr__os_sleep_ns(DEREGISTER_NS);
	}
	atomic_store(&is_poisoned, true);
	return false;
}

static struct hr__ug_error deregister_memory(const void *base)
{
	return CALL(uGDSBufDeregister, base);
}

static struct hr__ug_error deregister_handle(const void *session)
{
	return CALL(uGDSHandleDeregisterEx, ((const struct hr__ugds *)session)->handle, 0);
}

static struct hr__ug_error close_driver(const void *nothing)
{
	(void)nothing;
	return CALL_0(uGDSDriverClose);
}

bool hr__ugds_deregister(struct hr__ugds *session, void *base)
{
	(void)session;
	return !is_forked() && give_up(deregister_memory, base);
}

/* ---- opening and closing; under the lock ---- */

/* For the thread that has the GPU. */
struct opening {
	struct hr__ugds *session;
	struct hr__ugds_fault *fault;
	int code;
};

/* The sector size, which nothing tells: a read of less than a sector is refused before anything happens. */
static int find_sector(struct hr__ugds *session, struct hr__ugds_fault *fault)
{
	int error = EINVAL, code;
	const char *why;

	for (session->lba_bytes = 512; session->lba_bytes <= PAGE; session->lba_bytes *= 2) {
		error = read_once(session, session->gpu.bounce, session->lba_bytes, 0, 0);
		if (error != EINVAL)
			break;
	}
	if (!error)
		return 0;
	if (error == EINVAL)
		return fail(fault, HR_E_UNSUPPORTED, error,
			    "the disk has sectors of more than 4096 bytes, or refuses its first one");
	why = hr__ugds_explain(error, &code);
	return fail(fault, code, error, why);
}

static int start(struct hr__ugds *session, struct hr__ugds_fault *fault)
{
	struct hr__ug_descr descr = {.type = HR__UG_HANDLE_FD};
	struct hr__ug_error error = CALL_0(uGDSDriverOpen);

	if (error.err)
		return fail_call(fault, error.err, "uGDS does not start");
	session->is_driver_open = true;
	descr.handle.fd = session->fd;
	error = CALL(uGDSHandleRegister, &session->handle, &descr);
	if (error.err)
		return fail_call(fault, error.err, "uGDS cannot open the disk");
	session->has_handle = true;
	error = CALL(uGDSGetDeviceCapacity, session->handle, &session->capacity);
	if (error.err)
		return fail_call(fault, error.err, "uGDS does not tell the disk's capacity");
	error = CALL(uGDSBufRegister, session->gpu.bounce, session->gpu.bounce_bytes, 0);
	if (error.err)
		return fail_call(fault, error.err, "uGDS cannot register GPU memory");
	session->has_bounce = true;
	return find_sector(session, fault);
}

static void start_inside(void *arg)
{
	struct opening *opening = arg;

	opening->code = start(opening->session, opening->fault);
}

static void stop_inside(void *arg)
{
	struct hr__ugds *session = arg;

	if (session->has_bounce && !give_up(deregister_memory, session->gpu.bounce))
		return;
	session->has_bounce = false;
	if (session->has_handle && !give_up(deregister_handle, session))
		return;
	session->has_handle = false;
	if (session->is_driver_open && give_up(close_driver, NULL))
		session->is_driver_open = false;
}

/* What the library still holds stays as it is, and with it the descriptor and the lock on the node. */
static void close_session(struct hr__ugds *session)
{
	bool is_kept;

	if (session->is_driver_open && !atomic_load(&is_poisoned))
		session->gpu.inside(session->gpu.ctx, stop_inside, session);
	is_kept = session->has_bounce || session->has_handle;
	if (session->has_gpu)
		session->gpu.close(session->gpu.ctx, is_kept);
	if (!is_kept)
		hr__os_close(session->fd);
	if (is_kept) {
		atomic_store(&is_poisoned, true);
		session->next_kept = kept;
		kept = session;
		return;
	}
	pthread_mutex_destroy(&session->bounce_lock);
	hr__free(session->node);
	hr__free(session);
}

static int open_node(struct hr__ugds *session, struct hr__ugds_fault *fault)
{
	int error = hr__os_open(AT_FDCWD, session->node, O_RDWR | O_NONBLOCK, &session->fd);
	char text[128];

	if (error) {
		snprintf(fault->reason, sizeof(fault->reason), "cannot open %s: %s%s", session->node,
			 strerror_r(error, text, sizeof(text)),
			 error == ENOENT ? "; bind the disk to the driver ugds_drv first" : "");
		fault->system = error;
		fault->code = error == ENOENT ? HR_E_NOTFOUND : HR_E_IO;
		return fault->code;
	}
	if (hr__os_lock(session->fd, HR__OS_LOCK_ALONE, 0, 1) != EAGAIN)
		return 0;
	return fail(
		fault, HR_E_LOCKED, EAGAIN,
		"another process uses this disk through uGDS, and opening it would reset the disk under its reads; one "
		"process at a time");
}

static int open_session(struct hr__ugds *session, hr__ugds_gpu_open *gpu, struct hr__ugds_fault *fault)
{
	struct opening opening = {session, fault, 0};
	int code = load(fault->reason, sizeof(fault->reason));

	if (code)
		return fault->code = code;
	if (!atomic_load(&fork_mark))
		atomic_store(&fork_mark, hr__os_fork_mark_new());
	if (!session->node || !atomic_load(&fork_mark))
		return fail(fault, HR_E_NOMEM, 0, "out of host memory");
	code = open_node(session, fault);
	if (!code)
		code = gpu(&session->gpu, fault);
	if (code)
		return fault->code = code;
	session->has_gpu = true;
	code = session->gpu.inside(session->gpu.ctx, start_inside, &opening);
	if (code)
		return fail(fault, code, 0, "the GPU cannot be made current");
	return opening.code;
}

static int new_session(const char *node, hr__ugds_gpu_open *gpu, struct hr__ugds_fault *fault)
{
	struct hr__ugds *session = hr__calloc(1, sizeof(*session));
	int code;

	if (!session)
		return fail(fault, HR_E_NOMEM, 0, "out of host memory");
	session->raw.ops = &raw_ops;
	session->fd = -1;
	session->node = hr__strdup(node);
	pthread_mutex_init(&session->bounce_lock, NULL);
	code = open_session(session, gpu, fault);
	if (code)
		close_session(session);
	else
		atomic_store(&current, session);
	return code;
}

/* Under the lock. */
static int open_or_join(const char *node, hr__ugds_gpu_open *gpu, struct hr__ugds **out, struct hr__ugds_fault *fault)
{
	struct hr__ugds *session = atomic_load(&current);
	int code = 0;

	if (atomic_load(&is_poisoned))
		return fail(fault, HR_E_GDS, ENOTRECOVERABLE, hr__ugds_explain(ENOTRECOVERABLE, &code));
	if (session && strcmp(session->node, node) != 0) {
		snprintf(fault->reason, sizeof(fault->reason),
			 "this process has %s open through uGDS, which takes one disk at a time: close the models and "
			 "loaders that use it first",
			 session->node);
		return fault->code = HR_E_BUSY;
	}
	if (!session)
		code = new_session(node, gpu, fault);
	if (code)
		return code;
	*out = atomic_load(&current);
	(*out)->n_users++;
	return 0;
}

int hr__ugds_open(const char *node, hr__ugds_gpu_open *gpu, struct hr__ugds **out, struct hr__ugds_fault *fault)
{
	int code;

	*out = NULL;
	*fault = (struct hr__ugds_fault){0};
	if (is_forked()) {
		const char *why = hr__ugds_explain(ECHILD, &code);

		return fail(fault, code, 0, why);
	}
	pthread_mutex_lock(&lock);
	code = open_or_join(node, gpu, out, fault);
	pthread_mutex_unlock(&lock);
	return code;
}

struct hr__ugds *hr__ugds_acquire(struct hr__ugds *session)
{
	pthread_mutex_lock(&lock);
	session->n_users++;
	pthread_mutex_unlock(&lock);
	return session;
}

struct hr__ugds *hr__ugds_current(void)
{
	struct hr__ugds *session;

	if (is_forked())
		return NULL;
	pthread_mutex_lock(&lock);
	session = atomic_load(&current);
	if (session)
		session->n_users++;
	pthread_mutex_unlock(&lock);
	return session;
}

void hr__ugds_unref(struct hr__ugds *session)
{
	if (!session || is_forked()) /* all of it is the parent's */
		return;
	pthread_mutex_lock(&lock);
	if (--session->n_users == 0) {
		atomic_store(&current, NULL);
		close_session(session);
	}
	pthread_mutex_unlock(&lock);
}
