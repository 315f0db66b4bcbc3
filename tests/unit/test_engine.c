/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The contract of engine.h, run on every engine of the table: right bytes and nothing beside them, the file's tail,
 * short reads that are gone on with, failures, the end that comes too early, many requests at once, wake(). A new
 * engine is one more row of the table and is tested by that alone. An engine that cannot be used here is skipped with
 * its reason.
 */
#include "hrtest.h"

#include "core/os.h"
#include "engine/engine.h"
#include "fakes/fake_engine.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#define FILE_BYTES (700001) /* no multiple of anything */
#define SLOT       ((size_t)128 << 10)
#define N_SLOTS    24

struct rig {
	char *dir, *path;
	struct hr__file file;
	unsigned char *staging, *want; /* N_SLOTS * SLOT; the file's bytes */
	const struct hr__engine_ops *ops;
	void *state;
	int n_pinned; /* windows that are registered now */
};

static struct rig rig;

static int open_file(void **state)
{
	(void)state;
	rig.dir = make_temp_dir();
	rig.path = path_in(rig.dir, "bytes");
	rig.want = malloc(FILE_BYTES);
	fill_pattern(rig.want, FILE_BYTES, 3, 0);
	write_file(rig.path, rig.want, FILE_BYTES);
	rig.file = (struct hr__file){.bytes = FILE_BYTES, .direct_fd = -1};
	assert_int_equal(hr__os_open(AT_FDCWD, rig.path, O_RDONLY, &rig.file.fd), 0);
	hr__os_open_direct(&rig.file);
	assert_int_equal(hr__os_map(N_SLOTS * SLOT, (void **)&rig.staging), 0);
	return 0;
}

static int close_file(void **state)
{
	(void)state;
	hr__os_unmap(rig.staging, N_SLOTS * SLOT);
	hr__os_close(rig.file.direct_fd);
	hr__os_close(rig.file.fd);
	remove_tree(rig.dir);
	free(rig.want);
	free(rig.path);
	free(rig.dir);
	return 0;
}

static int pin(void *device, void *memory, size_t bytes, struct hr__io *io)
{
	int armed = hr__fault("test_pin");

	assert_ptr_equal(device, &rig);
	assert_true(bytes > 0 && (uintptr_t)memory % 4096 == 0 && bytes % 4096 == 0);
	if (armed) {
		snprintf(io->reason, sizeof(io->reason), "the test refuses it");
		io->system = armed;
		return HR_E_DEVICE;
	}
	rig.n_pinned++;
	return 0;
}

static int unpin(void *device, void *memory, struct hr__io *io)
{
	(void)device;
	(void)memory;
	(void)io;
	if (hr__fault("test_unpin"))
		return HR_E_DEVICE;
	rig.n_pinned--;
	return 0;
}

/* False, with a line that says why, if it cannot be used here. */
static bool open_engine(const struct hr__engine_ops *ops)
{
	const struct hr__engine_env env = {.staging = rig.staging,
					   .staging_bytes = N_SLOTS * SLOT,
					   .depth = N_SLOTS,
					   .slot_bytes = SLOT,
					   .pin = pin,
					   .unpin = unpin,
					   .device = &rig};
	char reason[200] = "";
	int rc;

	rig.ops = ops;
	rig.state = calloc(1, ops->state_bytes ? ops->state_bytes : 1);
	rc = ops->open(rig.state, &env, reason, sizeof(reason));
	if (rc) {
		printf("# %s is left out: %s\n", ops->name, reason);
		assert_true(reason[0]);
		assert_int_equal(ops->probe(&rig.file, reason, sizeof(reason)), HR_E_UNSUPPORTED);
		free(rig.state);
		return false;
	}
	assert_int_equal(ops->probe(&rig.file, reason, sizeof(reason)), 0);
	return true;
}

static void close_engine(void)
{
	rig.ops->close(rig.state);
	free(rig.state);
	assert_int_equal(rig.n_pinned, 0);
}

static bool has_windows(void)
{
	return rig.ops->staging == HR__STAGING_WINDOW;
}

/* Runs a test's body for each engine, and for reads through and around the page cache. */
static void on_every_engine(void (*body)(bool direct))
{
	for (const struct hr__engine_ops *const *ops = hr__engines(); *ops; ops++) {
		fake_engine_set(NULL);
		if ((*ops)->staging == HR__STAGING_DEVICE) { /* needs a device: test_cufile.c */
			printf("# %s is left out: it reads into memory of a device\n", (*ops)->name);
			continue;
		}
		if (!open_engine(*ops))
			continue;
		assert_true(!!((*ops)->caps & HR__ENGINE_BLOCKING) != !!((*ops)->caps & HR__ENGINE_QUEUED));
		body(false);
		if (has_windows())
			printf("# no direct reads: %s reads from the page cache\n", (*ops)->name);
		else if (rig.file.direct_fd >= 0)
			body(true);
		else
			printf("# no direct reads: O_DIRECT is refused here\n");
		close_engine();
	}
	fake_engine_set(NULL);
}

/* A window's bytes come to where the test looks for them the way that a device would fetch them. */
static void run_window(struct hr__io *io)
{
	unsigned char *memory = io->memory;
	int n_before = rig.n_pinned;

	rig.ops->read(rig.state, io);
	if (io->code) {
		assert_int_equal(rig.n_pinned, n_before);
		return;
	}
	assert_int_equal(rig.n_pinned, n_before + 1);
	memcpy(memory, io->memory, io->got);
	rig.ops->release(rig.state, io);
	io->memory = memory;
}

static void run(struct hr__io *io)
{
	struct hr__io *done[N_SLOTS];
	size_t n = 0;

	if (has_windows()) {
		run_window(io);
		return;
	}
	if (rig.ops->caps & HR__ENGINE_BLOCKING) {
		rig.ops->read(rig.state, io);
		return;
	}
	rig.ops->submit(rig.state, io);
	for (int i = 0; i < 1000 && n == 0; i++)
		n = rig.ops->reap(rig.state, done, N_SLOTS);
	assert_int_equal(n, 1);
	assert_ptr_equal(done[0], io);
}

/* A request for [offset, offset + bytes) as the loader would make it: aligned if it is direct. */
static struct hr__io request(unsigned char *memory, uint64_t offset, size_t bytes, bool direct)
{
	uint64_t align = direct ? 4096 : 1, begin = offset / align * align,
		 end = (offset + bytes + align - 1) / align * align;

	return (struct hr__io){.file = &rig.file,
			       .offset = begin,
			       .asked = (size_t)(end - begin),
			       .expected = (size_t)((end < FILE_BYTES ? end : FILE_BYTES) - begin),
			       .memory = memory,
			       .direct = direct,
			       .staged = true};
}

static void check_memory(const unsigned char *memory, uint64_t offset, size_t expected, size_t asked)
{
	assert_memory_equal(memory, rig.want + offset, expected);
	for (size_t i = asked; i < asked + 64; i++)
		assert_int_equal(memory[i], 0xee);
}

static void read_and_check(uint64_t offset, size_t bytes, bool direct)
{
	unsigned char *memory = rig.staging + 2 * SLOT;
	struct hr__io io = request(memory, offset, bytes, direct), asked = io;

	memset(memory - 64, 0xee, SLOT + 128);
	run(&io);
	assert_int_equal(io.code, 0);
	assert_int_equal(io.got, asked.expected);
	check_memory(memory, asked.offset, asked.expected, asked.asked);
	for (int i = -64; i < 0; i++)
		assert_int_equal(memory[i], 0xee);
}

static void any_range(bool direct)
{
	struct test_random random = {99};

	for (int i = 0; i < 60; i++) {
		uint64_t offset = test_random_below(&random, FILE_BYTES);
		uint64_t most = FILE_BYTES - offset < SLOT - 8192 ? FILE_BYTES - offset : SLOT - 8192;

		read_and_check(offset, (size_t)(1 + test_random_below(&random, most)), direct);
	}
}

static void reads_any_range_and_nothing_beside_it(void **state)
{
	(void)state;
	on_every_engine(any_range);
}

static void tail(bool direct)
{
	read_and_check(FILE_BYTES - 1, 1, direct);
	read_and_check(FILE_BYTES / 4096 * 4096, FILE_BYTES % 4096, direct);
	read_and_check(FILE_BYTES - 50000, 50000, direct);
}

static void reads_the_last_block_of_a_file_exactly(void **state)
{
	(void)state;
	on_every_engine(tail);
}

static void in_parts(bool direct)
{
	fake_engine_set(&(struct fake_engine_settings){.seed = 5, .short_reads = 1});
	any_range(direct);
	fake_engine_set(NULL);
}

static void goes_on_after_short_reads(void **state)
{
	(void)state;
	on_every_engine(in_parts);
}

static void failing(bool direct)
{
	struct hr__io io = request(rig.staging, 8192, 10000, direct);

	hr__fault_arm(has_windows() ? "mmap_file" : rig.ops->id == HR_ENGINE_URING ? "io_uring_read" : "pread", 1, EIO);
	run(&io);
	assert_true(hr__fault_fired());
	hr__fault_arm(NULL, 0, 0);
	assert_int_equal(io.code, HR_E_IO);
	assert_int_equal(io.system, EIO);
	read_and_check(8192, 10000, direct); /* and is good for the next one */
}

static void hands_up_an_error_of_the_system(void **state)
{
	(void)state;
	on_every_engine(failing);
}

static void real_failure(bool direct)
{
	struct hr__file closed = rig.file;
	struct hr__io io = request(rig.staging, 0, 4096, direct);
	int write_only = open(rig.path, O_WRONLY);

	closed.fd = closed.direct_fd = write_only;
	io.file = &closed;
	run(&io);
	assert_int_equal(io.code, HR_E_IO);
	assert_int_equal(io.system, has_windows() ? EACCES : EBADF);
	close(write_only);
}

static void hands_up_what_the_kernel_says(void **state)
{
	(void)state;
	on_every_engine(real_failure);
}

static void early_end(bool direct)
{
	struct hr__io io = request(rig.staging, 0, 4096, direct);

	io.offset = FILE_BYTES / 4096 * 4096; /* what is left is less than the 4096 bytes that are expected */
	run(&io);
	assert_int_equal(io.code, HR_E_SHORT);
	assert_true(io.got < 4096);
	io = request(rig.staging, 0, 4096, direct);
	io.offset = (FILE_BYTES / 4096 + 5) * 4096;
	run(&io);
	assert_int_equal(io.code, HR_E_SHORT);
	assert_int_equal(io.got, 0);
}

static void says_so_when_the_file_ends_early(void **state)
{
	(void)state;
	on_every_engine(early_end);
}

static void vectored(bool direct)
{
	unsigned char a[100], b[70000], c[1], d[29899];
	struct iovec iov[] = {{a, sizeof(a)}, {b, sizeof(b)}, {c, sizeof(c)}, {d, sizeof(d)}};
	struct hr__io io = request(NULL, 333, 100000, false);

	if (direct || !(rig.ops->caps & HR__ENGINE_BLOCKING) || has_windows())
		return;
	fake_engine_set(&(struct fake_engine_settings){.seed = 6, .short_reads = 1});
	io.iov = iov;
	io.n_iov = 4;
	io.staged = false;
	run(&io);
	assert_int_equal(io.code, 0);
	assert_memory_equal(a, rig.want + 333, sizeof(a));
	assert_memory_equal(b, rig.want + 433, sizeof(b));
	assert_memory_equal(c, rig.want + 70433, sizeof(c));
	assert_memory_equal(d, rig.want + 70434, sizeof(d));
}

static void scatters_one_read_over_several_places(void **state)
{
	(void)state;
	on_every_engine(vectored);
}

static void in_flight(bool direct)
{
	struct hr__io ios[N_SLOTS], *done[N_SLOTS];
	uint64_t offsets[N_SLOTS];
	bool came[N_SLOTS] = {0};
	size_t n = 0;

	if (!(rig.ops->caps & HR__ENGINE_QUEUED))
		return;
	fake_engine_set(&(struct fake_engine_settings){.seed = 8, .short_reads = 1});
	for (size_t i = 0; i < N_SLOTS; i++) {
		offsets[i] = i * 28672;
		ios[i] = request(rig.staging + i * SLOT, offsets[i], 28672, direct);
		memset(rig.staging + i * SLOT, 0xee, SLOT);
		rig.ops->submit(rig.state, &ios[i]);
	}
	while (n < N_SLOTS) {
		size_t k = rig.ops->reap(rig.state, done, 5); /* fewer than may be ready */

		assert_true(k <= 5);
		n += k;
		for (size_t j = 0; j < k; j++) {
			size_t i = (size_t)(done[j] - ios);

			assert_true(i < N_SLOTS && !came[i]); /* exactly once */
			came[i] = true;
			assert_int_equal(ios[i].code, 0);
			check_memory(rig.staging + i * SLOT, offsets[i],
				     28672 < FILE_BYTES - offsets[i] ? 28672 : FILE_BYTES - offsets[i], 28672);
		}
	}
}

static void gives_each_of_many_requests_back_once(void **state)
{
	(void)state;
	on_every_engine(in_flight);
}

static void *wake_later(void *arg)
{
	(void)arg;
	usleep(30000);
	rig.ops->wake(rig.state);
	return NULL;
}

static void waking(bool direct)
{
	struct hr__io *done[N_SLOTS];
	pthread_t thread;

	(void)direct;
	if (!(rig.ops->caps & HR__ENGINE_QUEUED))
		return;
	alarm(20); /* instead of a hang */
	rig.ops->wake(rig.state);
	assert_int_equal(rig.ops->reap(rig.state, done, N_SLOTS), 0); /* a wake that came first is not lost */
	assert_int_equal(pthread_create(&thread, NULL, wake_later, NULL), 0);
	assert_int_equal(rig.ops->reap(rig.state, done, N_SLOTS), 0);
	pthread_join(thread, NULL);
	alarm(0);
	read_and_check(5, 5000, false);
}

static void wakes_from_another_thread(void **state)
{
	(void)state;
	on_every_engine(waking);
}

static void interrupted(bool direct)
{
	if (rig.ops->id != HR_ENGINE_URING)
		return;
	hr__fault_arm("io_uring_read", 1, EINTR);
	read_and_check(77, 60000, direct);
	assert_true(hr__fault_fired());
	hr__fault_arm("io_uring_read", 1, EAGAIN);
	read_and_check(77, 60000, direct);
	assert_true(hr__fault_fired());
	hr__fault_arm(NULL, 0, 0);
}

static void tries_again_what_is_no_failure(void **state)
{
	(void)state;
	on_every_engine(interrupted);
}

/* A direct read that stops in the middle of a sector: part of it must be read again, since a read cannot begin
 * there. */
static void realigns_a_direct_read(void **state)
{
	struct hr__file file = {.offset_align = 512};
	struct hr__io io = {
		.file = &file, .offset = 4096, .asked = 8192, .expected = 8192, .memory = rig.staging, .direct = true};

	(void)state;
	assert_false(hr__io_advance(&io, 1000));
	assert_int_equal(io.offset, 4096 + 512);
	assert_int_equal(io.asked, 8192 - 512);
	assert_ptr_equal(io.memory, rig.staging + 512);
	assert_int_equal(io.got, 512);
	assert_true(hr__io_advance(&io, 8192 - 512));
	assert_int_equal(io.code, 0);
	assert_int_equal(io.got, 8192);
	io = (struct hr__io){
		.file = &file, .offset = 4096, .asked = 8192, .expected = 8192, .memory = rig.staging, .direct = true};
	assert_true(hr__io_advance(&io, 100)); /* less than a sector in mid-file: there is no way on */
	assert_int_equal(io.code, HR_E_SHORT);
}

static void has_a_table_without_two_rows_of_one_name(void **state)
{
	const struct hr__engine_ops *const *all = hr__engines();

	(void)state;
	for (size_t i = 0; all[i]; i++) {
		assert_ptr_equal(hr__engine_find(all[i]->name), all[i]);
		assert_true(all[i]->id < HR_N_ENGINES);
		for (size_t j = 0; j < i; j++)
			assert_int_not_equal(all[i]->id, all[j]->id);
	}
	assert_null(hr__engine_find("no such engine"));
	assert_string_equal(hr_engine_name(HR_ENGINE_PREAD), "pread");
	assert_string_equal(hr_engine_name(HR_ENGINE_URING), "uring");
	assert_null(hr_engine_name(HR_N_ENGINES));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(has_a_table_without_two_rows_of_one_name),
		cmocka_unit_test(reads_any_range_and_nothing_beside_it),
		cmocka_unit_test(reads_the_last_block_of_a_file_exactly),
		cmocka_unit_test(goes_on_after_short_reads),
		cmocka_unit_test(hands_up_an_error_of_the_system),
		cmocka_unit_test(hands_up_what_the_kernel_says),
		cmocka_unit_test(says_so_when_the_file_ends_early),
		cmocka_unit_test(scatters_one_read_over_several_places),
		cmocka_unit_test(gives_each_of_many_requests_back_once),
		cmocka_unit_test(wakes_from_another_thread),
		cmocka_unit_test(tries_again_what_is_no_failure),
		cmocka_unit_test(realigns_a_direct_read),
	};

	return cmocka_run_group_tests(tests, open_file, close_file);
}
