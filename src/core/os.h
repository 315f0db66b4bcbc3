/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The seam to the operating system: every system call of the library but io_uring's (engine/uring.c) and dlopen's
 * (core/dl.c) is made in os.c, so that another system's implementation could stand beside it and so that each call can
 * be made to fail in tests (core/fault.h).
 *
 * Convention: functions return 0 or a positive errno value and never touch the thread's last error; they may be called
 * on any thread. EINTR is handled here.
 */
#ifndef HR_CORE_OS_H
#define HR_CORE_OS_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

/* ---- files ---- */

/* What makes a file the same file with the same contents. */
struct hr__identity {
	uint64_t device, inode, bytes;
	int64_t mtime_ns, ctime_ns;
};

struct hr__os_stat {
	struct hr__identity identity;
	uint64_t bytes;     /* of a block device too */
	uint64_t is_device; /* which one, if it is a device; else 0 */
	bool is_regular, is_directory, is_block;
	bool may_write_or_owns; /* mincore(2) tells the truth only then */
};

struct hr__raw;

/* Storage that a library reads, with no descriptor of the system's: a disk that was taken from the kernel. Offsets
 * count from the storage's own beginning. Both may be called on any thread. */
struct hr__raw_ops {
	/* Any range into any host memory, all of it or none: 0 or an errno value. For headers, records and tools:
	 * it goes through a small piece of the library's memory, one read at a time. */
	int (*read)(struct hr__raw *raw, uint64_t offset, void *dst, size_t bytes);
	/* What such a value means here and what to do: a sentence, and the error code that goes with it. */
	const char *(*explain)(int error, int *code);
};

struct hr__raw {
	const struct hr__raw_ops *ops;
};

/* An open file as engines see it: one description for buffered reads, one for direct reads, opened through the
 * first. Or, without either, storage that a library reads. */
struct hr__file {
	int fd;                /* buffered; -1 = none (block devices are direct only) */
	int direct_fd;         /* O_DIRECT; -1 = refused, see direct_errno */
	int direct_errno;      /* why there is no direct_fd; 0 = there is one, or nobody tried */
	uint32_t memory_align; /* of the buffer of a direct read */
	uint32_t offset_align; /* of offset and length of a direct read; a power of two, at least 512 */
	uint32_t fs_magic;     /* statfs f_type */
	bool is_block;
	bool may_mincore;
	uint64_t bytes;
	struct hr__raw *raw; /* NULL: it is read by descriptors */
};

/* Whether there is a way around the page cache. */
static inline bool hr__file_is_direct(const struct hr__file *file)
{
	return file->direct_fd >= 0 || file->raw;
}

/* directory_fd: AT_FDCWD allowed; O_CLOEXEC|O_NOCTTY added. O_NONBLOCK holds for the opening only. */
int hr__os_open(int directory_fd, const char *path, int flags, int *fd);
void hr__os_close(int fd);
/* Says that `n` more descriptors will be wanted: growing the table of them takes milliseconds each time once
 * threads share it. */
void hr__os_expect_files(unsigned n);
int hr__os_fstat(int fd, struct hr__os_stat *out);
int hr__os_readlink(const char *path, char *out, size_t out_bytes);
/* Names of a directory's entries, unsorted; `each` is called for all but "." and ".."; a non-zero answer ends the
 * walk. */
int hr__os_list(int directory_fd, int (*each)(void *ctx, const char *name), void *ctx);
/* A second, O_DIRECT description of the same open file, and the alignment it wants; fills direct_fd or direct_errno. */
int hr__os_open_direct(struct hr__file *file);
uint32_t hr__os_fs_magic(int fd);           /* 0 = not known */
const char *hr__os_fs_name(uint32_t magic); /* "tmpfs", "overlayfs", "NFS" ...; NULL if not one we know */
bool hr__os_fs_is_network(uint32_t magic);

/* One read; *got may be short and is 0 at the end of the file. */
int hr__os_pread(int fd, void *buffer, size_t bytes, uint64_t offset, size_t *got);
int hr__os_preadv(int fd, const struct iovec *iov, int n_iov, uint64_t offset, size_t *got);
/* Until `bytes` have come or the file ends; *got tells. */
int hr__os_pread_full(int fd, void *buffer, size_t bytes, uint64_t offset, size_t *got);

/* One write of all of `bytes`; *done tells how far it came. ENOSPC also where a device ends. */
int hr__os_pwrite_full(int fd, const void *buffer, size_t bytes, uint64_t offset, size_t *done);
/* What was written is on stable storage: data (and the size) of a file; a device's cache. */
int hr__os_datasync(int fd);
/* As hr__os_open() for a file that is to be made, with mode 0666 less the umask. */
int hr__os_create(int directory_fd, const char *path, int flags, int *fd);
int hr__os_mkdir(int directory_fd, const char *path); /* EEXIST is an error too */
int hr__os_unlink(int directory_fd, const char *path);
/* The directory that a path is in: its entries are on stable storage. */
int hr__os_sync_parent(const char *path);
/* Sets a file's size and takes all its blocks, with zeros where they are new. ENOSPC leaves the file as it was, and
 * does not fill the file system for others first, where that says how much room it has. */
int hr__os_allocate(int fd, uint64_t bytes);
/* Another description of the same open file. */
int hr__os_reopen(int fd, int flags, int *out);

/* Open-file-description locks on bytes, which also lie far beyond the end. EAGAIN: somebody else's is in the way. */
enum hr__os_lock {
	HR__OS_UNLOCK,
	HR__OS_LOCK_SHARED,
	HR__OS_LOCK_ALONE,
};
int hr__os_lock(int fd, enum hr__os_lock kind, uint64_t at, uint64_t bytes);
/* The lowest byte from `at` to `at + bytes` (0: to the end of all) that others have locked; UINT64_MAX = none. */
int hr__os_lock_lowest(int fd, uint64_t at, uint64_t bytes, uint64_t *lowest);

/* What a block device is like now. Numbers that the kernel does not know are 0. */
struct hr__os_block {
	uint32_t logical_bytes, physical_bytes;
	uint64_t sequence; /* grows with every device that the kernel finds */
	bool is_read_only;
};
int hr__os_block_ask(int fd, struct hr__os_block *out);
/* A small file of the kernel's (in /sys, say) as text, without its last newline; false if it cannot be read. */
bool hr__os_text(const char *path, char *out, size_t out_bytes);

/* How many bytes of a range are in the page cache: exact, or (sampled) estimated. ENOTSUP: no way to tell here. */
int hr__os_resident(const struct hr__file *file, uint64_t offset, uint64_t bytes, uint64_t *resident);

/* ---- memory ---- */

/* Anonymous memory aligned to 2 MiB with huge pages asked for. `bytes` is rounded up to pages by the callee. */
int hr__os_map(size_t bytes, void **out);
void hr__os_unmap(void *memory, size_t bytes);
/* A read-only, shared mapping of whole pages of a file. Only what is meant to be read by somebody else's DMA, or by a
 * caller who asked for it, is mapped: a read by the CPU ends the process if somebody truncates the file. */
int hr__os_map_file(int fd, uint64_t offset, size_t bytes, void **out);
/* Has the pages of such a mapping in the page cache and in the page table, without touching them. EFAULT: some cannot
 * be had, the file has become shorter or its storage fails. ENOTSUP: the kernel does not offer it (before 5.14). */
int hr__os_populate(void *memory, size_t bytes);
/* Starts to read a range of a file into the page cache, all of it, whatever the size of the read-ahead window. */
void hr__os_read_ahead(const struct hr__file *file, uint64_t offset, uint64_t bytes);
/* The pages of such a mapping leave this process, and are the first to leave the page cache. Nobody must need them now;
 * who touches one has it read again. */
void hr__os_let_go(void *memory, size_t bytes);
/* Takes the memory away but keeps the addresses, so that nobody is given them again. */
void hr__os_bury(void *memory, size_t bytes);
/* Makes the pages exist, for the part of staging memory that one thread sets up. */
void hr__os_touch(void *memory, size_t bytes);
/* Makes the huge pages exist that begin in a block whose bytes do not matter any more; one store for each. */
void hr__os_claim(void *block, size_t bytes);
/* Asks for huge pages where the block holds whole ones. */
void hr__os_wish_huge(void *block, size_t bytes);
size_t hr__os_page_bytes(void);

/* A page that reads 1 here and 0 in a forked child. NULL if it cannot be had. */
const volatile uint32_t *hr__os_fork_mark_new(void);
void hr__os_fork_mark_free(const volatile uint32_t *mark);

/* ---- time, threads, events ---- */

uint64_t hr__os_now_ns(void);        /* monotonic */
uint64_t hr__os_date_ns(void);       /* since 1970; may jump */
uint64_t hr__os_thread_cpu_ns(void); /* of the calling thread */
uint64_t hr__os_process_cpu_ns(void);
void hr__os_sleep_ns(uint64_t ns);
int hr__os_random(void *out, size_t bytes);
/* A joinable thread that blocks all signals; `name` up to 15 bytes. */
int hr__os_thread(pthread_t *out, const char *name, void *(*run)(void *), void *arg);
/* Up to HR__OS_TEAM_MAX threads that do `run(arg)`, beside what the caller does; fewer, also none, where they
 * cannot be had. */
#define HR__OS_TEAM_MAX 8
struct hr__os_team {
	pthread_t threads[HR__OS_TEAM_MAX];
	unsigned n;
};
void hr__os_team_start(struct hr__os_team *team, unsigned n, const char *name, void *(*run)(void *), void *arg);
void hr__os_team_join(struct hr__os_team *team);
/* Lets short waits of the calling thread end when they should, not some 50 microseconds later. */
void hr__os_precise_waits(void);
/* A condition variable on the monotonic clock. */
int hr__os_cond_init(pthread_cond_t *cond);
/* Waits until `deadline_ns` (monotonic; UINT64_MAX = for ever); false once the deadline has passed. */
bool hr__os_cond_wait(pthread_cond_t *cond, pthread_mutex_t *lock, uint64_t deadline_ns);
int hr__os_eventfd(int *fd);
void hr__os_eventfd_set(int fd);
void hr__os_eventfd_clear(int fd);

/* ---- what the process may use ---- */

unsigned hr__os_cpus(void); /* by affinity and cgroup quota; at least 1 */
/* By MemAvailable and cgroup limit, page cache of the cgroup counted as free; 0 = not known. */
uint64_t hr__os_memory_available(void);

#endif
