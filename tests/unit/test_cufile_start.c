/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How cuFile is started: what is looked for before, which settings it gets and what is left of them afterwards, what
 * is refused, and what is remembered. A library is started once in a process, so each case is a child of its own, which
 * answers with the number of the check that failed.
 */
#include "gdstest.h"

#include "engine/cufile_syms.h"
#include "modeltest.h"

#include <dirent.h>
#include <errno.h>
#include <sys/stat.h>
#include <unistd.h>

#define CHECK(number, condition)                                                                                       \
	do {                                                                                                           \
		if (!(condition)) {                                                                                    \
			fprintf(stderr, "# check %d: %s; last error: %s\n", number, #condition,                        \
				hr_error_last()->message);                                                             \
			return number;                                                                                 \
		}                                                                                                      \
	} while (0)

/* One folder for the case that runs; a child may fill it. */
static char *folder;

static bool find(void)
{
	alarm(60);
	has_fake_cuda = fake_cuda_find(&cuda);
	has_fake_cufile = fake_cufile_find(&cufile);
	return has_fake_cuda && has_fake_cufile;
}

/* Opens a loader as asked, and closes it. */
static int try_open(uint32_t flags)
{
	struct hr_loader_opts opts = HR_LOADER_OPTS_INIT;
	hr_device *device;
	hr_loader *loader;
	int rc = hr_device_open("cuda:0", &device);

	opts.engine = "cufile";
	opts.staging_bytes = MIB;
	opts.flags = flags;
	if (rc)
		return rc;
	rc = hr_loader_open(device, &opts, &loader);
	hr_loader_close(loader, HR_FOREVER);
	hr_device_close(device);
	return rc;
}

static bool says(const char *text)
{
	return strstr(hr_error_last()->message, text) != NULL;
}

static int n_entries(const char *path)
{
	DIR *dir = opendir(path);
	int n = 0;

	while (dir && readdir(dir))
		n++;
	if (dir)
		closedir(dir);
	return n;
}

/* A kernel in `folder`, with these paths in it. */
static void set_kernel(const char *const *paths)
{
	static const char *const folders[] = {"proc", "proc/driver", "run", "run/udev"};

	for (size_t i = 0; i < sizeof(folders) / sizeof(folders[0]); i++)
		mkdir(path_in(folder, folders[i]), 0755);
	for (size_t i = 0; paths[i]; i++)
		write_file(path_in(folder, paths[i]), "x", 1);
	setenv("HR_FAKE_ROOT", folder, 1);
}

/* ---- the cases; each in a child ---- */

static int no_modules(void *ctx)
{
	(void)ctx;
	set_kernel((const char *const[]){"proc/modules.not", "run/udev/data", NULL});
	CHECK(1, find());
	CHECK(2, try_open(0) == HR_E_UNSUPPORTED && says("/proc/modules"));
	CHECK(3, try_open(HR_LOADER_CUFILE_COMPAT) == HR_E_UNSUPPORTED && says("/proc/modules"));
	CHECK(4, cufile.calls("cuFileDriverOpen") == 0);
	return 0;
}

static int no_udev(void *ctx)
{
	struct hr_loader_opts opts = HR_LOADER_OPTS_INIT;
	struct hr_probe_row rows[32];
	struct bed bed;
	size_t n;

	(void)ctx;
	set_kernel((const char *const[]){"proc/modules", "run/udev/data.not", NULL});
	CHECK(1, find());
	opts.engine = "cufile";
	bed_open(&bed, 3, 5, 100000);
	bed_load(&bed, "cuda:0", &opts);
	cufile.arm("cuFileHandleRegister", 1, HR__CF_HANDLE_NOT_REGISTERED); /* as the real one does then */
	CHECK(2, load_by_job(bed.loader, bed.model, NULL) == HR_E_GDS && says("/run/udev/data") && says("5027"));
	CHECK(3, hr_probe(bed.model, rows, 32, &n) == 0);
	for (size_t i = 0; i < n; i++)
		if (strcmp(rows[i].name, "cufile") == 0)
			CHECK(4, !rows[i].usable && strstr(rows[i].reason, "/run/udev/data"));
	CHECK(5, hr_probe(NULL, rows, 32, &n) == 0); /* a block device would do */
	for (size_t i = 0; i < n; i++)
		if (strcmp(rows[i].name, "cufile") == 0)
			CHECK(6, rows[i].usable);
	bed_close(&bed);
	return 0;
}

static int no_nvidia_fs(void *ctx)
{
	(void)ctx;
	CHECK(1, find() && cufile.set("nvidia_fs", 0) == 0);
	CHECK(2, try_open(0) == HR_E_UNSUPPORTED && says("nvidia-fs is not loaded") && says("cufile=compat"));
	CHECK(3, try_open(0) == HR_E_UNSUPPORTED && says("nvidia-fs is not loaded"));
	CHECK(4, cufile.calls("cuFileDriverOpen") == 1); /* a failed start is remembered */
	CHECK(5, try_open(HR_LOADER_CUFILE_COMPAT) == 0);
	CHECK(6, try_open(0) == HR_E_UNSUPPORTED);
	CHECK(7, cufile.calls("cuFileDriverOpen") == 2 && cufile.live(NULL) == 0);
	return 0;
}

static int other_failures(void *ctx)
{
	static const int codes[] = {HR__CF_NVFS_SETUP_ERROR, -22};
	int code = codes[*(int *)ctx];

	CHECK(1, find());
	cufile.arm("cuFileDriverOpen", 1, code);
	CHECK(2, try_open(0) == HR_E_UNSUPPORTED && says("does not start") && says(code > 0 ? "(5033)" : "-22"));
	CHECK(3, try_open(0) == HR_E_UNSUPPORTED && says("does not start"));
	CHECK(4, cufile.calls("cuFileDriverOpen") == 1);
	return 0;
}

static int settings_go_and_come(void *ctx)
{
	(void)ctx;
	setenv("CUFILE_ENV_PATH_JSON", "/etc/their.json", 1);
	setenv("CUFILE_FORCE_COMPAT_MODE", "true", 1); /* which must not win */
	unsetenv("CUFILE_ALLOW_COMPAT_MODE");
	unsetenv("CUFILE_LOGFILE_PATH");
	setenv("TMPDIR", folder, 1);
	CHECK(1, find() && n_entries(folder) == 2);
	CHECK(2, try_open(0) == 0);
	CHECK(3, strcmp(getenv("CUFILE_ENV_PATH_JSON"), "/etc/their.json") == 0);
	CHECK(4, strcmp(getenv("CUFILE_FORCE_COMPAT_MODE"), "true") == 0);
	CHECK(5, !getenv("CUFILE_ALLOW_COMPAT_MODE") && !getenv("CUFILE_LOGFILE_PATH"));
	CHECK(6, n_entries(folder) == 2);
	cufile.arm("cuFileDriverOpen", 1, HR__CF_INTERNAL_ERROR);
	CHECK(7, try_open(0) == HR_E_UNSUPPORTED && n_entries(folder) == 2 && !getenv("CUFILE_LOGFILE_PATH"));
	return 0;
}

static int settings_cannot_be_written(void *ctx)
{
	static const char *const points[] = {"mkostemp", "write", "setenv"};

	(void)ctx;
	setenv("TMPDIR", folder, 1);
	CHECK(1, find());
	for (int i = 0; i < 3; i++)
		for (uint64_t n = 1; n < 5; n++) {
			int rc;

			hr__fault_arm(points[i], n, ENOSPC);
			rc = try_open(0);
			if (!hr__fault_fired()) {
				CHECK(2, rc == 0);
				continue;
			}
			CHECK(3, rc == HR_E_UNSUPPORTED && says("configuration of cuFile"));
			CHECK(4, n_entries(folder) == 2 && !getenv("CUFILE_ALLOW_COMPAT_MODE"));
		}
	hr__fault_arm(NULL, 0, 0);
	CHECK(5, try_open(0) == 0); /* and it was not remembered */
	return 0;
}

static int compat_beside_direct(void *ctx)
{
	struct hr_loader_opts opts = HR_LOADER_OPTS_INIT;
	hr_device *device;
	hr_loader *loader;

	(void)ctx;
	CHECK(1, find());
	CHECK(2, hr_device_open("cuda:0", &device) == 0);
	opts.engine = "cufile";
	opts.flags = HR_LOADER_CUFILE_COMPAT;
	CHECK(3, hr_loader_open(device, &opts, &loader) == 0);
	CHECK(4, try_open(0) == HR_E_UNSUPPORTED && says("another loader of this process"));
	CHECK(5, try_open(HR_LOADER_CUFILE_COMPAT) == 0);
	CHECK(6, hr_loader_close(loader, HR_FOREVER) == 0);
	CHECK(7, try_open(0) == 0);
	opts.flags = 0;
	CHECK(8, hr_loader_open(device, &opts, &loader) == 0);
	CHECK(9, try_open(HR_LOADER_CUFILE_COMPAT) == 0); /* it gets what is stricter */
	CHECK(10, hr_loader_close(loader, HR_FOREVER) == 0);
	CHECK(11, hr_device_close(device) == 0 && cufile.live(NULL) == 0);
	return 0;
}

/* Something else in the process has started the library as it is shipped. */
static int started_by_others(void *ctx)
{
	(void)ctx;
	CHECK(1, find() && cufile.set("others", 1) == 0);
	CHECK(2, try_open(0) == HR_E_UNSUPPORTED && says("something else in this process"));
	CHECK(3, try_open(0) == HR_E_UNSUPPORTED && says("something else in this process"));
	CHECK(4, try_open(HR_LOADER_CUFILE_COMPAT) == 0);
	cufile.set("others", 0);
	CHECK(5, try_open(0) == 0); /* once they have closed it */
	CHECK(6, cufile.live(NULL) == 0);
	return 0;
}

/* ---- the parent ---- */

static int is_there(void *ctx)
{
	(void)ctx;
	return find() ? 1 : 0;
}

static void play(int (*body)(void *ctx), void *ctx)
{
	int answer;

	fflush(NULL);
	if (in_child(is_there, NULL) != 1) {
		skip_for("the look-alike driver and library are not the ones that are found");
	}
	folder = make_temp_dir();
	answer = in_child(body, ctx);
	remove_tree(folder);
	free(folder);
	assert_int_equal(answer, 0);
}

static void without_a_list_of_modules_it_is_not_started(void **state)
{
	(void)state;
	play(no_modules, NULL);
}

static void without_udev_a_file_is_refused_with_the_reason(void **state)
{
	(void)state;
	play(no_udev, NULL);
}

static void without_nvidia_fs_only_compat_works_and_the_failure_is_remembered(void **state)
{
	(void)state;
	play(no_nvidia_fs, NULL);
}

static void any_failed_start_is_told_and_remembered(void **state)
{
	(void)state;
	for (int i = 0; i < 2; i++)
		play(other_failures, &i);
}

static void settings_hold_for_the_start_alone(void **state)
{
	(void)state;
	play(settings_go_and_come, NULL);
}

static void settings_that_cannot_be_written_stop_it(void **state)
{
	(void)state;
	play(settings_cannot_be_written, NULL);
}

static void a_loader_that_must_not_use_host_memory_is_refused_beside_one_that_may(void **state)
{
	(void)state;
	play(compat_beside_direct, NULL);
}

static void other_peoples_settings_are_noticed(void **state)
{
	(void)state;
	play(started_by_others, NULL);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(without_a_list_of_modules_it_is_not_started),
		cmocka_unit_test(without_udev_a_file_is_refused_with_the_reason),
		cmocka_unit_test(without_nvidia_fs_only_compat_works_and_the_failure_is_remembered),
		cmocka_unit_test(any_failed_start_is_told_and_remembered),
		cmocka_unit_test(settings_hold_for_the_start_alone),
		cmocka_unit_test(settings_that_cannot_be_written_stop_it),
		cmocka_unit_test(a_loader_that_must_not_use_host_memory_is_refused_beside_one_that_may),
		cmocka_unit_test(other_peoples_settings_are_noticed),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
