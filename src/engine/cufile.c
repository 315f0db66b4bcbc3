/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The engine that reads by NVIDIA's cuFile (GPUDirect Storage), straight from storage into GPU memory; only when asked
 * for by name. cufile_driver.c has the library as such.
 *
 * What always holds:
 *  - One window of GPU memory is registered, at open, once. Registering what is read into, tensor by tensor, is what
 *    brings drivers down; and each registration pins host memory and takes time. Reads name the window and an offset
 *    in it: any other address sends them through a copy.
 *  - Only the synchronous call is used, by as many threads as there are readers. The asynchronous one delivers wrong
 *    bytes with right counts on more than one stream, and batches of 128 never return.
 *  - A request is exactly as long as what must come, at most MAX_REQUEST, above which the library cuts it up and adds
 *    the counts: then a short one is no prefix. Any count but the exact one fails the chunk, whose memory is garbage.
 *  - A file is known to the library by the number of a descriptor, and the number is all it keeps: used again for
 *    another file it would read that one. So the engine has descriptors of its own, each open for as long as its
 *    handle, and finds them by what file they are, never by a number or an address. Few are kept.
 *  - Where reads through host memory are forbidden, the library's own counter of those is looked at after every read.
 *  - At the end: reads are over, handles go, then the window, then the driver.
 */
#include "cufile_driver.h"
#include "engine.h"

#include "core/os_library.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#define MAX_HANDLES      64 /* no fewer than there can be readers */
#define MAX_REQUEST      ((size_t)8 << 20)
#define DEREGISTER_TRIES 200
#define DEREGISTER_NS    ((uint64_t)10 * 1000 * 1000)

/* A file as cuFile knows it. */
struct handle {
	hr__cf_handle cufile;
	int fd; /* our own; -1 = this place is empty */
	bool direct;
	uint64_t device, inode; /* which file; our descriptor keeps the number from being given to another */
	uint32_t n_reads;       /* in motion */
	uint64_t used;          /* when last, as a count */
};

struct cufile {
	void *window;
	bool is_acquired, is_registered, compat;
	bool *is_kept;
	uint64_t posix_before;
	pthread_mutex_t lock;
	struct handle handles[MAX_HANDLES]; /* guarded by lock */
	uint64_t n_uses;                    /* guarded by lock */
};

/* ---- failures ---- */

static void fail(struct hr__io *io, int code, int system, const char *what)
{
	char text[96];

	io->code = code;
	io->system = system;
	snprintf(io->reason, sizeof(io->reason), "%s: %s", what, hr__cufile_text(system, text, sizeof(text)));
}

/* cuFileRead() answered less than nothing. Its errno may be the system's or one of its own. */
static void fail_read(struct hr__io *io, ssize_t answer, int errno_value)
{
	int system = answer == -1 ? errno_value : (int)-answer;

	if (system == EPERM) { /* also when its own buffers are too small, or the descriptor is not what it was */
		io->code = HR_E_GDS;
		io->system = system;
		snprintf(io->reason, sizeof(io->reason),
			 "cuFileRead gave EPERM, which may mean any failure of its own");
		return;
	}
	fail(io, system >= 5000 ? HR_E_GDS : HR_E_IO, system, "cuFileRead");
}

static void fail_handle(struct hr__io *io, int code)
{
	const char *fs = hr__os_fs_name(io->file->fs_magic);
	char text[96], look[160];

	io->code = HR_E_GDS;
	io->system = code;
	if (hr__cufile_look(io->file, look, sizeof(look)))
		snprintf(io->reason, sizeof(io->reason), "cuFile refuses the file (%d): %s", code, look);
	else
		snprintf(io->reason, sizeof(io->reason), "cuFile refuses the file, on %s: %s",
			 fs ? fs : "its file system", hr__cufile_text(code, text, sizeof(text)));
}

/* ---- handles ---- */

static bool is_of(const struct handle *handle, const struct hr__io *io, const struct hr__os_stat *stat)
{
	return handle->fd >= 0 && handle->direct == io->direct && handle->device == stat->identity.device &&
	       handle->inode == stat->identity.inode;
}

/* Under the lock: an empty place, or that of the file that has not been read from for longest. There is one, since
 * there are as many places as there can be reads. */
static struct handle *make_room(struct cufile *c)
{
	struct handle *oldest = NULL;

	for (size_t i = 0; i < MAX_HANDLES; i++) {
		struct handle *handle = &c->handles[i];

		if (handle->n_reads > 0)
			continue;
		if (handle->fd < 0)
			return handle;
		if (!oldest || handle->used < oldest->used)
			oldest = handle;
	}
	if (oldest) {
		hr__cf_api.cuFileHandleDeregister(oldest->cufile);
		hr__os_close(oldest->fd);
		oldest->fd = -1;
	}
	return oldest;
}

/* Under the lock. */
static int register_file(struct handle *handle, struct hr__io *io, const struct hr__os_stat *stat)
{
	struct hr__cf_descr descr = {.type = HR__CF_HANDLE_FD};
	struct hr__cf_error error;
	int fd, rc = hr__os_dup(io->direct ? io->file->direct_fd : io->file->fd, &fd);

	if (rc) {
		hr__io_fail(io, rc);
		return rc;
	}
	descr.handle.fd = fd;
	error = HR__CF(cuFileHandleRegister, &handle->cufile, &descr);
	if (error.err) {
		hr__os_close(fd);
		fail_handle(io, error.err);
		return error.err;
	}
	handle->fd = fd;
	handle->direct = io->direct;
	handle->device = stat->identity.device;
	handle->inode = stat->identity.inode;
	return 0;
}

/* The handle of a request's file, made if need be, and one read more in motion; NULL: the request has failed. Under
 * the lock: registering takes some 50 microseconds, once a file. */
static struct handle *take_handle(struct cufile *c, struct hr__io *io)
{
	struct handle *handle = NULL;
	struct hr__os_stat stat;
	int error = hr__os_fstat(io->direct ? io->file->direct_fd : io->file->fd, &stat);

	if (error) {
		hr__io_fail(io, error);
		return NULL;
	}
	for (size_t i = 0; i < MAX_HANDLES && !handle; i++)
		if (is_of(&c->handles[i], io, &stat))
			handle = &c->handles[i];
	if (!handle) {
		handle = make_room(c);
		if (!handle || register_file(handle, io, &stat))
			return NULL;
	}
	handle->n_reads++;
	handle->used = ++c->n_uses;
	return handle;
}

/* ---- reading ---- */

static ssize_t call_read(const struct cufile *c, const struct handle *handle, const struct hr__io *io, int *errno_value)
{
	off_t at = (off_t)((char *)io->memory - (char *)c->window);
	int armed = HR__FAULT("cuFileRead");
	ssize_t answer;

	if (armed) {
		*errno_value = armed;
		return -1;
	}
	errno = 0;
	answer = hr__cf_api.cuFileRead(handle->cufile, c->window, io->expected, (off_t)io->offset, at);
	*errno_value = errno;
	return answer;
}

/* Whether a read went through host memory although that is forbidden: then the bytes may be right, but they are not
 * handed out as what they were asked for. The counter is the process's; where compatibility mode is forbidden nobody's
 * read may move it. */
static bool has_fallen_back(const struct cufile *c, struct hr__io *io)
{
	uint64_t posix, all;

	if (c->compat || !hr__cufile_counts(&posix, &all) || posix <= c->posix_before)
		return false;
	io->code = HR_E_FALLBACK;
	snprintf(
		io->reason, sizeof(io->reason),
		"cuFile read through host memory although that is forbidden: by its own count %llu of %llu reads; allow "
		"it (cufile=compat) or use another engine",
		(unsigned long long)(posix - c->posix_before), (unsigned long long)all);
	return true;
}

static void read_one(void *state, struct hr__io *io)
{
	struct cufile *c = state;
	struct handle *handle;
	ssize_t answer;
	int errno_value;

	pthread_mutex_lock(&c->lock);
	handle = take_handle(c, io);
	pthread_mutex_unlock(&c->lock);
	if (!handle)
		return;
	do {
		answer = call_read(c, handle, io, &errno_value);
	} while (answer == -1 && (errno_value == EINTR || errno_value == EAGAIN));
	pthread_mutex_lock(&c->lock);
	handle->n_reads--;
	pthread_mutex_unlock(&c->lock);
	if (answer < 0) {
		fail_read(io, answer, errno_value);
	} else if ((size_t)answer != io->expected) {
		io->code = HR_E_SHORT;
		io->got = 0; /* how many of them are right there is no telling */
		snprintf(io->reason, sizeof(io->reason), "cuFileRead gave %zd bytes of %zu", answer, io->expected);
	} else if (!has_fallen_back(c, io)) {
		io->got = io->expected;
		io->code = 0;
	}
}

/* ---- open and close ---- */

static int probe(const struct hr__file *file, char *reason, size_t reason_bytes)
{
	return hr__cufile_look(file, reason, reason_bytes);
}

/* What one GPU lets others see of its memory at once; 0 = not known. */
static size_t bar_bytes(int ordinal)
{
	size_t kib = 0;

	if (!hr__cf_api.cuFileGetBARSizeInKB || HR__CF(cuFileGetBARSizeInKB, ordinal, &kib).err)
		return 0;
	return kib << 10;
}

static int register_window(struct cufile *c, const struct hr__engine_env *env, char *reason, size_t reason_bytes)
{
	size_t bar = bar_bytes(env->ordinal);
	struct hr__cf_error error;
	char text[96];

	if (bar && env->staging_bytes > bar) {
		snprintf(reason, reason_bytes,
			 "a window of %zu bytes does not fit into the %zu that the GPU shows (BAR1)",
			 env->staging_bytes, bar);
		return HR_E_SPACE;
	}
	error = HR__CF(cuFileBufRegister, env->staging, env->staging_bytes, 0);
	c->is_registered = error.err == 0;
	if (c->is_registered)
		return 0;
	snprintf(reason, reason_bytes, "cuFile cannot register a window of %zu bytes: %s", env->staging_bytes,
		 hr__cufile_text(error.err, text, sizeof(text)));
	if (error.err == HR__CF_MAPPING_SIZE || error.err == HR__CF_PINNING_FAILED || error.err == HR__CF_NOMEM_ERROR ||
	    error.err == HR__CF_CUDA_DRIVER_ERROR || error.err == HR__CF_BUF_REGISTER_ERROR)
		return HR_E_SPACE;
	return HR_E_GDS;
}

/* The window may be in use for a moment after its last read; for longer than that it is not ours to free. */
static bool deregister_window(const struct cufile *c)
{
	for (int i = 0; i < DEREGISTER_TRIES; i++) {
		if (HR__CF(cuFileBufDeregister, c->window).err == 0)
			return true;
		hr__os_sleep_ns(DEREGISTER_NS);
	}
	return false;
}

static void close_all(void *state)
{
	struct cufile *c = state;
	bool is_free = true;

	for (size_t i = 0; i < MAX_HANDLES; i++) {
		if (c->handles[i].fd < 0)
			continue;
		hr__cf_api.cuFileHandleDeregister(c->handles[i].cufile);
		hr__os_close(c->handles[i].fd);
	}
	if (c->is_registered)
		is_free = deregister_window(c);
	if (c->is_acquired && is_free) /* else it stays open with what it holds */
		hr__cufile_release();
	*c->is_kept = !is_free;
	pthread_mutex_destroy(&c->lock);
}

static int open_all(void *state, const struct hr__engine_env *env, char *reason, size_t reason_bytes)
{
	struct cufile *c = state;
	uint64_t all;
	int rc;

	if (env->slot_bytes > MAX_REQUEST) {
		snprintf(reason, reason_bytes,
			 "slots of %zu bytes are more than the %zu that cuFile reads in one piece", env->slot_bytes,
			 MAX_REQUEST);
		return HR_E_UNSUPPORTED;
	}
	pthread_mutex_init(&c->lock, NULL);
	c->window = env->staging;
	c->compat = env->compat;
	c->is_kept = env->is_kept;
	for (size_t i = 0; i < MAX_HANDLES; i++)
		c->handles[i].fd = -1;
	rc = hr__cufile_acquire(env->compat, env->slot_bytes, reason, reason_bytes);
	c->is_acquired = rc == 0;
	if (!rc)
		rc = register_window(c, env, reason, reason_bytes);
	if (rc) {
		close_all(c);
		return rc;
	}
	hr__cufile_counts(&c->posix_before, &all);
	return 0;
}

static void report(void *state, struct hr__engine_report *out)
{
	const struct cufile *c = state;
	char about[96];
	uint64_t posix, all;

	hr__cufile_describe(about, sizeof(about));
	snprintf(out->note, sizeof(out->note), "%s%s", about,
		 c->compat ? "; reads through host memory are allowed (compat)" : "");
	if (!hr__cufile_counts(&posix, &all))
		return;
	out->all = all;
	out->through_host = posix;
}

const struct hr__engine_ops hr__engine_cufile = {
	.name = "cufile",
	.id = HR_ENGINE_CUFILE,
	.caps = HR__ENGINE_BLOCKING | HR__ENGINE_ON_REQUEST,
	.staging = HR__STAGING_DEVICE,
	.state_bytes = sizeof(struct cufile),
	.probe = probe,
	.open = open_all,
	.read = read_one,
	.report = report,
	.close = close_all,
};
