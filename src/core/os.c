/* SPDX-License-Identifier: Apache-2.0 */
#include "os.h"

#include "arith.h"
#include "fault.h"
#include "limits.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

#define FAIL_IF_ARMED(point) HR__FAIL_IF_ARMED(point)

#define HUGE_PAGE ((size_t)2 << 20)

int hr__os_open(int directory_fd, const char *path, int flags, int *fd)
{
	*fd = -1;
	FAIL_IF_ARMED("open");
	do {
		*fd = openat(directory_fd, path, flags | O_CLOEXEC | O_NOCTTY);
	} while (*fd < 0 && errno == EINTR);
	if (*fd >= 0 && (flags & O_NONBLOCK)) /* meant for opening a FIFO; io_uring would take it to mean more */
		fcntl(*fd, F_SETFL, flags & ~O_NONBLOCK);
	return *fd < 0 ? errno : 0;
}

void hr__os_close(int fd)
{
	if (fd >= 0)
		close(fd);
}

void hr__os_expect_files(unsigned n)
{
	int low, high;

	if (hr__os_eventfd(&low))
		return;
	high = fcntl(low, F_DUPFD_CLOEXEC, low + (int)n); /* fails beyond the limit, as the openings will */
	hr__os_close(high);
	hr__os_close(low);
}

static int64_t ns_of(const struct timespec *t)
{
	return (int64_t)t->tv_sec * 1000000000 + t->tv_nsec;
}

int hr__os_fstat(int fd, struct hr__os_stat *out)
{
	struct stat st;
	int access;

	FAIL_IF_ARMED("fstat");
	if (fstat(fd, &st))
		return errno;
	access = fcntl(fd, F_GETFL) & O_ACCMODE;
	*out = (struct hr__os_stat){
		.identity = {st.st_dev, st.st_ino, (uint64_t)st.st_size, ns_of(&st.st_mtim), ns_of(&st.st_ctim)},
		.bytes = (uint64_t)st.st_size,
		.is_device = st.st_rdev,
		.is_regular = S_ISREG(st.st_mode),
		.is_directory = S_ISDIR(st.st_mode),
		.is_block = S_ISBLK(st.st_mode),
		.may_write_or_owns = geteuid() == 0 || geteuid() == st.st_uid || access != O_RDONLY,
	};
	if (out->is_block && ioctl(fd, BLKGETSIZE64, &out->bytes))
		return errno;
	return 0;
}

int hr__os_readlink(const char *path, char *out, size_t out_bytes)
{
	ssize_t n = readlink(path, out, out_bytes - 1);

	if (n < 0)
		return errno;
	out[n] = '\0';
	return 0;
}

int hr__os_list(int directory_fd, int (*each)(void *ctx, const char *name), void *ctx)
{
	int error = 0, fd;
	DIR *dir;

	FAIL_IF_ARMED("list");
	fd = openat(directory_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (fd < 0)
		return errno;
	dir = fdopendir(fd);
	if (!dir) {
		error = errno;
		close(fd);
		return error;
	}
	for (;;) {
		struct dirent *entry;

		errno = 0;
		entry = readdir(dir);
		if (!entry) {
			error = errno;
			break;
		}
		if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
			continue;
		if (each(ctx, entry->d_name))
			break;
	}
	closedir(dir);
	return error;
}

uint32_t hr__os_fs_magic(int fd)
{
	struct statfs fs;

	if (HR__FAULT("fstatfs") || fstatfs(fd, &fs))
		return 0;
	return (uint32_t)fs.f_type;
}

static const struct {
	uint32_t magic;
	const char *name;
	bool is_network;
} file_systems[] = {
	{0xef53, "ext4", false},          {0x58465342, "xfs", false},
	{0x9123683e, "btrfs", false},     {0x01021994, "tmpfs", false},
	{0x794c7630, "overlayfs", false}, {0x2fc12fc1, "zfs", false},
	{0xf2f52010, "f2fs", false},      {0x6969, "NFS", true},
	{0x65735546, "FUSE", true},       {0xff534d42, "CIFS", true},
	{0xfe534d42, "SMB2", true},       {0x0bd00bd0, "Lustre", true},
	{0x47504653, "GPFS", true},       {0x00c36400, "Ceph", true},
	{0x19830326, "BeeGFS", true},     {0x01021997, "9p", true},
};

const char *hr__os_fs_name(uint32_t magic)
{
	for (size_t i = 0; i < sizeof(file_systems) / sizeof(file_systems[0]); i++)
		if (file_systems[i].magic == magic)
			return file_systems[i].name;
	return NULL;
}

bool hr__os_fs_is_network(uint32_t magic)
{
	for (size_t i = 0; i < sizeof(file_systems) / sizeof(file_systems[0]); i++)
		if (file_systems[i].magic == magic)
			return file_systems[i].is_network;
	return false;
}

/* The alignment that direct reads want. statx says it since Linux 6.1; a file system that stays silent gets 4096. */
static void ask_direct_align(struct hr__file *file)
{
	file->memory_align = 4096;
	file->offset_align = 4096;
#ifdef STATX_DIOALIGN
	struct statx st;

	if (statx(file->direct_fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &st) == 0 && (st.stx_mask & STATX_DIOALIGN)) {
		if (st.stx_dio_offset_align == 0) { /* the file system says that it cannot */
			hr__os_close(file->direct_fd);
			file->direct_fd = -1;
			file->direct_errno = EINVAL;
			return;
		}
		file->memory_align = (uint32_t)hr__max_u64(512, st.stx_dio_mem_align);
		file->offset_align = (uint32_t)hr__max_u64(512, st.stx_dio_offset_align);
	}
#endif
	if (file->is_block) {
		int sector = 512;

		if (ioctl(file->direct_fd, BLKSSZGET, &sector) == 0 && sector >= 512)
			file->offset_align = (uint32_t)sector;
	}
}

int hr__os_open_direct(struct hr__file *file)
{
	char path[64];
	struct hr__os_stat a = {0}, b = {0};
	int error = HR__FAULT("open_direct");

	file->direct_fd = -1;
	file->direct_errno = 0;
	/* Through /proc the new description is of the very file that is open, whatever its path names by now. */
	snprintf(path, sizeof(path), "/proc/self/fd/%d", file->fd);
	if (!error)
		error = hr__os_open(AT_FDCWD, path, O_RDONLY | O_DIRECT, &file->direct_fd);
	if (!error)
		error = hr__os_fstat(file->fd, &a);
	if (!error)
		error = hr__os_fstat(file->direct_fd, &b);
	if (!error && (a.identity.device != b.identity.device || a.identity.inode != b.identity.inode))
		error = ESTALE;
	if (error) {
		hr__os_close(file->direct_fd);
		file->direct_fd = -1;
		file->direct_errno = error;
		return error;
	}
	ask_direct_align(file);
	return file->direct_errno;
}

int hr__os_pread(int fd, void *buffer, size_t bytes, uint64_t offset, size_t *got)
{
	ssize_t n;

	*got = 0;
	FAIL_IF_ARMED("pread");
	do {
		n = pread(fd, buffer, bytes, (off_t)offset);
	} while (n < 0 && errno == EINTR);
	if (n < 0)
		return errno;
	*got = (size_t)n;
	return 0;
}

int hr__os_preadv(int fd, const struct iovec *iov, int n_iov, uint64_t offset, size_t *got)
{
	ssize_t n;

	*got = 0;
	FAIL_IF_ARMED("preadv");
	do {
		n = preadv(fd, iov, n_iov, (off_t)offset);
	} while (n < 0 && errno == EINTR);
	if (n < 0)
		return errno;
	*got = (size_t)n;
	return 0;
}

int hr__os_pread_full(int fd, void *buffer, size_t bytes, uint64_t offset, size_t *got)
{
	*got = 0;
	while (*got < bytes) {
		size_t n;
		int error = hr__os_pread(fd, (char *)buffer + *got, bytes - *got, offset + *got, &n);

		if (error)
			return error;
		if (n == 0)
			break;
		*got += n;
	}
	return 0;
}

#ifndef SYS_cachestat
#define SYS_cachestat 451
#endif

/* cachestat(2): exact and cheap, since Linux 6.5; refused for files that are not ours. */
static int resident_by_cachestat(const struct hr__file *file, uint64_t offset, uint64_t bytes, uint64_t *resident)
{
	struct {
		uint64_t off, len;
	} range = {offset, bytes};
	struct {
		uint64_t cached, dirty, writeback, evicted, recently_evicted;
	} answer;

	FAIL_IF_ARMED("cachestat");
	if (syscall(SYS_cachestat, file->fd, &range, &answer, 0))
		return errno;
	*resident = hr__min_u64(answer.cached * hr__os_page_bytes(), bytes);
	return 0;
}

/* mincore(2) over a mapping that is only asked about, never read. It claims that all is resident for a file that we
 * neither own nor may write, so it is not asked then. */
static int resident_by_mincore(const struct hr__file *file, uint64_t offset, uint64_t bytes, uint64_t *resident)
{
	uint64_t page = hr__os_page_bytes(), start = hr__round_down(offset, page);
	size_t length = (size_t)(hr__round_up(offset + bytes, page) - start), n = length / page, count = 0;
	unsigned char in_core[512];
	void *map;
	int error = 0;

	FAIL_IF_ARMED("mincore");
	if (!file->may_mincore)
		return ENOTSUP;
	map = mmap(NULL, length, PROT_READ, MAP_SHARED, file->fd, (off_t)start);
	if (map == MAP_FAILED)
		return errno;
	for (size_t done = 0; done < n && !error; done += sizeof(in_core)) {
		size_t part = n - done < sizeof(in_core) ? n - done : sizeof(in_core);

		if (mincore((char *)map + done * page, part * page, in_core))
			error = errno;
		for (size_t i = 0; i < part && !error; i++)
			count += in_core[i] & 1;
	}
	munmap(map, length);
	*resident = hr__min_u64(count * page, bytes);
	return error;
}

/* One small read per 512 KiB that must not wait for storage: what any reader may do. A large one would start
 * read-ahead. */
static int resident_by_nowait(const struct hr__file *file, uint64_t offset, uint64_t bytes, uint64_t *resident)
{
	static const uint64_t step = 512 << 10;
	uint64_t asked = 0, hits = 0;
	char probe[4096];

	FAIL_IF_ARMED("preadv2");
	for (uint64_t at = offset; at < offset + bytes; at += step, asked++) {
		struct iovec iov = {probe, (size_t)hr__min_u64(sizeof(probe), offset + bytes - at)};
		ssize_t n = preadv2(file->fd, &iov, 1, (off_t)at, RWF_NOWAIT);

		if (n < 0 && errno != EAGAIN)
			return errno == EOPNOTSUPP || errno == EINVAL ? ENOTSUP : errno;
		hits += n > 0;
	}
	*resident = asked ? bytes / asked * hits : 0;
	if (hits == asked)
		*resident = bytes;
	return 0;
}

int hr__os_resident(const struct hr__file *file, uint64_t offset, uint64_t bytes, uint64_t *resident)
{
	*resident = 0;
	if (file->fd < 0 || file->is_block)
		return 0; /* block devices are read around the cache only */
	if (bytes == 0 || resident_by_cachestat(file, offset, bytes, resident) == 0 ||
	    resident_by_mincore(file, offset, bytes, resident) == 0)
		return 0;
	return resident_by_nowait(file, offset, bytes, resident);
}

size_t hr__os_page_bytes(void)
{
	return (size_t)sysconf(_SC_PAGESIZE);
}

int hr__os_map(size_t bytes, void **out)
{
	size_t length = (size_t)hr__round_up(bytes, hr__os_page_bytes());
	size_t slack = length >= HUGE_PAGE ? HUGE_PAGE : 0;
	char *raw, *aligned;

	*out = NULL;
	FAIL_IF_ARMED("mmap");
	if (length < bytes)
		return ENOMEM;
	raw = mmap(NULL, length + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (raw == MAP_FAILED)
		return errno;
	aligned = slack ? (char *)hr__round_up((uintptr_t)raw, HUGE_PAGE) : raw;
	if (aligned > raw)
		munmap(raw, (size_t)(aligned - raw));
	if (raw + slack > aligned)
		munmap(aligned + length, (size_t)(raw + slack - aligned));
	if (slack)
		madvise(aligned, length, MADV_HUGEPAGE); /* a wish: it costs nothing where it is not granted */
	*out = aligned;
	return 0;
}

void hr__os_wish_huge(void *block, size_t bytes)
{
	uintptr_t begin = hr__round_up((uintptr_t)block, HUGE_PAGE),
		  end = hr__round_down((uintptr_t)block + bytes, HUGE_PAGE);

	if (end > begin)
		madvise((void *)begin, end - begin, MADV_HUGEPAGE);
}

void hr__os_unmap(void *memory, size_t bytes)
{
	if (memory)
		munmap(memory, (size_t)hr__round_up(bytes, hr__os_page_bytes()));
}

int hr__os_map_file(int fd, uint64_t offset, size_t bytes, void **out)
{
	void *memory;

	*out = NULL;
	FAIL_IF_ARMED("mmap_file");
	memory = mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, (off_t)offset);
	if (memory == MAP_FAILED)
		return errno;
	/* Then cold pages come in by 2 MiB and are mapped as such, where the file system can: measured on ext4,
	 * twice as fast as by the read-ahead window, and mapping them again costs a fiftieth of what small pages
	 * do. */
	madvise(memory, bytes, MADV_HUGEPAGE);
	*out = memory;
	return 0;
}

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

int hr__os_populate(void *memory, size_t bytes)
{
	int error = 0;

	FAIL_IF_ARMED("madvise_populate");
	for (int i = 0; i < 100; i++) {
		if (madvise(memory, bytes, MADV_POPULATE_READ) == 0)
			return 0;
		error = errno;
		if (error != EINTR && error != EAGAIN)
			break;
	}
	return error == EINVAL ? ENOTSUP : error;
}

/* The kernel cuts one request down to its read-ahead window, which is 128 KiB unless somebody changed it. Pages
 * come in as small ones this way, which takes more CPU time than to have them come with the first touch or
 * hr__os_populate(). */
void hr__os_read_ahead(const struct hr__file *file, uint64_t offset, uint64_t bytes)
{
	static const uint64_t step = 128 << 10;

	for (uint64_t at = offset; at < offset + bytes; at += step)
		posix_fadvise(file->fd, (off_t)at, (off_t)hr__min_u64(step, offset + bytes - at), POSIX_FADV_WILLNEED);
}

#ifndef MADV_COLD
#define MADV_COLD 20
#endif

void hr__os_let_go(void *memory, size_t bytes)
{
	madvise(memory, bytes, MADV_COLD); /* a wish, as old kernels do not know it */
	madvise(memory, bytes, MADV_DONTNEED);
}

void hr__os_bury(void *memory, size_t bytes)
{
	(void)mmap(memory, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

/* By plain stores: page faults of several threads go on side by side, MADV_POPULATE_WRITE has them queue (measured:
 * 64 MiB by a dozen threads in 1.7 ms against 6.4). */
void hr__os_touch(void *memory, size_t bytes)
{
	for (size_t i = 0; i < bytes; i += 4096)
		((volatile char *)memory)[i] = 0;
}

void hr__os_claim(void *block, size_t bytes)
{
	uintptr_t end = (uintptr_t)block + bytes;

	for (uintptr_t page = hr__round_up((uintptr_t)block, HUGE_PAGE); page < end; page += HUGE_PAGE)
		*(volatile char *)page = 0;
}

const volatile uint32_t *hr__os_fork_mark_new(void)
{
	uint32_t *page;

	if (HR__FAULT("fork_mark"))
		return NULL;
	page = mmap(NULL, hr__os_page_bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (page == MAP_FAILED)
		return NULL;
	if (madvise(page, hr__os_page_bytes(), MADV_WIPEONFORK)) {
		munmap(page, hr__os_page_bytes());
		return NULL;
	}
	*page = 1;
	return page;
}

void hr__os_fork_mark_free(const volatile uint32_t *mark)
{
	if (mark)
		munmap((void *)(uintptr_t)mark, hr__os_page_bytes());
}

static uint64_t clock_ns(clockid_t clock)
{
	struct timespec t;

	clock_gettime(clock, &t);
	return (uint64_t)ns_of(&t);
}

uint64_t hr__os_now_ns(void)
{
	return clock_ns(CLOCK_MONOTONIC);
}

uint64_t hr__os_date_ns(void)
{
	return clock_ns(CLOCK_REALTIME);
}

uint64_t hr__os_thread_cpu_ns(void)
{
	return clock_ns(CLOCK_THREAD_CPUTIME_ID);
}

uint64_t hr__os_process_cpu_ns(void)
{
	return clock_ns(CLOCK_PROCESS_CPUTIME_ID);
}

void hr__os_sleep_ns(uint64_t ns)
{
	struct timespec t = {(time_t)(ns / 1000000000), (long)(ns % 1000000000)};

	nanosleep(&t, NULL);
}

int hr__os_random(void *out, size_t bytes)
{
	FAIL_IF_ARMED("getrandom");
	return getrandom(out, bytes, GRND_NONBLOCK) == (ssize_t)bytes ? 0 : EAGAIN;
}

int hr__os_thread(pthread_t *out, const char *name, void *(*run)(void *), void *arg)
{
	sigset_t all, before;
	int error;

	FAIL_IF_ARMED("pthread_create");
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	error = pthread_create(out, NULL, run, arg);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	if (!error)
		pthread_setname_np(*out, name);
	return error;
}

void hr__os_team_start(struct hr__os_team *team, unsigned n, const char *name, void *(*run)(void *), void *arg)
{
	team->n = 0;
	while (team->n < n && team->n < HR__OS_TEAM_MAX && hr__os_thread(&team->threads[team->n], name, run, arg) == 0)
		team->n++;
}

void hr__os_team_join(struct hr__os_team *team)
{
	for (unsigned i = 0; i < team->n; i++)
		pthread_join(team->threads[i], NULL);
	team->n = 0;
}

void hr__os_precise_waits(void)
{
	prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL);
}

int hr__os_cond_init(pthread_cond_t *cond)
{
	pthread_condattr_t attr;
	int error;

	FAIL_IF_ARMED("pthread_cond_init");
	error = pthread_condattr_init(&attr);
	if (error)
		return error;
	pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
	error = pthread_cond_init(cond, &attr);
	pthread_condattr_destroy(&attr);
	return error;
}

bool hr__os_cond_wait(pthread_cond_t *cond, pthread_mutex_t *lock, uint64_t deadline_ns)
{
	struct timespec t = {(time_t)(deadline_ns / 1000000000), (long)(deadline_ns % 1000000000)};

	if (deadline_ns == UINT64_MAX)
		return pthread_cond_wait(cond, lock) == 0;
	return pthread_cond_timedwait(cond, lock, &t) != ETIMEDOUT;
}

int hr__os_eventfd(int *fd)
{
	*fd = -1;
	FAIL_IF_ARMED("eventfd");
	*fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	return *fd < 0 ? errno : 0;
}

void hr__os_eventfd_set(int fd)
{
	uint64_t one = 1;
	ssize_t n;

	do {
		n = write(fd, &one, sizeof(one));
	} while (n < 0 && errno == EINTR);
}

void hr__os_eventfd_clear(int fd)
{
	uint64_t count;
	ssize_t n;

	do {
		n = read(fd, &count, sizeof(count));
	} while (n < 0 && errno == EINTR);
}

/* A small file of the kernel's as text; false if it cannot be read. */
static bool read_text(const char *path, char *out, size_t out_bytes)
{
	size_t got = 0;
	int fd;

	if (hr__os_open(AT_FDCWD, path, O_RDONLY, &fd))
		return false;
	if (hr__os_pread_full(fd, out, out_bytes - 1, 0, &got))
		got = 0;
	hr__os_close(fd);
	out[got] = '\0';
	return got > 0;
}

bool hr__os_text(const char *path, char *out, size_t out_bytes)
{
	size_t length;

	out[0] = '\0';
	if (!read_text(path, out, out_bytes))
		return false;
	length = strlen(out);
	if (length && out[length - 1] == '\n')
		out[length - 1] = '\0';
	return true;
}

unsigned hr__os_cpus(void)
{
	unsigned cpus;
	cpu_set_t set;

	if (sched_getaffinity(0, sizeof(set), &set) == 0)
		cpus = (unsigned)CPU_COUNT(&set);
	else
		cpus = (unsigned)sysconf(_SC_NPROCESSORS_ONLN);
	cpus = hr__limits_cpus("", cpus);
	return cpus ? cpus : 1;
}

uint64_t hr__os_memory_available(void)
{
	return hr__limits_memory("");
}
