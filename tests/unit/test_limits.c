/* SPDX-License-Identifier: Apache-2.0 */
/* Limits of control groups, both versions, read from trees that look like the /proc and /sys of containers. */
#include "hrtest.h"

#include "core/limits.h"

#include <sys/stat.h>

static int new_tree(void **state)
{
	*state = make_temp_dir();
	return 0;
}

static int free_tree(void **state)
{
	remove_tree(*state);
	free(*state);
	return 0;
}

static void put(const char *root, const char *path, const char *text)
{
	char full[512];

	snprintf(full, sizeof(full), "%s%s", root, path);
	for (char *slash = strchr(full + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
		*slash = '\0';
		mkdir(full, 0700);
		*slash = '/';
	}
	write_file(full, text, strlen(text));
}

static void put_memory(const char *root)
{
	put(root, "/proc/meminfo",
	    "MemTotal:       2000000 kB\nMemFree: 7 kB\nMemAvailable:   1000000 kB\nBuffers: 1 kB\n");
}

static void without_groups_all_may_be_used(void **state)
{
	const char *root = *state;

	assert_int_equal(hr__limits_cpus(root, 7), 7);
	assert_int_equal(hr__limits_memory(root), 0); /* not known */
	put_memory(root);
	assert_int_equal(hr__limits_memory(root), UINT64_C(1000000) << 10);
}

static void the_tightest_level_of_version_2_holds(void **state)
{
	const char *root = *state;

	put_memory(root);
	put(root, "/proc/self/cgroup", "0::/pod/box\n");
	put(root, "/sys/fs/cgroup/pod/box/cpu.max", "max 100000\n");
	put(root, "/sys/fs/cgroup/pod/cpu.max", "250000 100000\n");
	put(root, "/sys/fs/cgroup/cpu.max", "600000 100000\n");
	assert_int_equal(hr__limits_cpus(root, 64), 3); /* two and a half */
	assert_int_equal(hr__limits_cpus(root, 2), 2);
	put(root, "/sys/fs/cgroup/pod/box/memory.max", "max\n");
	put(root, "/sys/fs/cgroup/pod/box/memory.current", "5\n");
	put(root, "/sys/fs/cgroup/pod/memory.max", "8000000\n");
	put(root, "/sys/fs/cgroup/pod/memory.current", "5000000\n");
	put(root, "/sys/fs/cgroup/pod/memory.stat", "anon 1\nfile 2\ninactive_file 3000000\nactive_file 9\n");
	put(root, "/sys/fs/cgroup/memory.max", "900000000\n");
	put(root, "/sys/fs/cgroup/memory.current", "6000000\n");
	assert_int_equal(hr__limits_memory(root), 6000000);
	put(root, "/sys/fs/cgroup/pod/memory.current", "99000000\n");
	assert_int_equal(hr__limits_memory(root), 0);
}

static void a_container_of_version_1_sees_its_own_limits(void **state)
{
	const char *root = *state;

	put_memory(root);
	put(root, "/proc/self/cgroup",
	    "12:cpuset:/docker/abc\n11:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n1:name=systemd:/docker/abc\n0::/docker/abc\n");
	put(root, "/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "150000\n");
	put(root, "/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
	put(root, "/sys/fs/cgroup/memory/memory.limit_in_bytes", "4000000\n");
	put(root, "/sys/fs/cgroup/memory/memory.usage_in_bytes", "3000000\n");
	put(root, "/sys/fs/cgroup/memory/memory.stat", "cache 1\ninactive_file 1\ntotal_inactive_file 2500000\n");
	assert_int_equal(hr__limits_cpus(root, 64), 2);
	assert_int_equal(hr__limits_memory(root), 3500000);
}

static void a_group_of_version_1_is_found_below_its_controller(void **state)
{
	const char *root = *state;

	put_memory(root);
	put(root, "/proc/self/cgroup", "9:name=systemd:/\n4:memory:/jobs/a\n1:cpu:/jobs/a\n0::/\n");
	put(root, "/sys/fs/cgroup/cpu/jobs/a/cpu.cfs_quota_us", "-1\n");
	put(root, "/sys/fs/cgroup/cpu/jobs/a/cpu.cfs_period_us", "100000\n");
	put(root, "/sys/fs/cgroup/cpu/jobs/cpu.cfs_quota_us", "400000\n");
	put(root, "/sys/fs/cgroup/cpu/jobs/cpu.cfs_period_us", "100000\n");
	put(root, "/sys/fs/cgroup/memory/jobs/a/memory.limit_in_bytes", "9223372036854771712\n"); /* none */
	put(root, "/sys/fs/cgroup/memory/jobs/a/memory.usage_in_bytes", "1000\n");
	assert_int_equal(hr__limits_cpus(root, 64), 4);
	assert_int_equal(hr__limits_memory(root), UINT64_C(1000000) << 10);
	put(root, "/sys/fs/cgroup/memory/jobs/a/memory.limit_in_bytes", "5000\n");
	assert_int_equal(hr__limits_memory(root), 4000);
}

static void what_cannot_be_read_limits_nothing(void **state)
{
	static const char *const lists[] = {
		"",           "\n",           "0::\n",       "0:",       "::",
		"4:memory\n", "4:memory:x\n", "4:memory:/a", "x:y:/z\n", "4:memoryx,xmemory:/a\n",
		":::::\n",    "0::/../..\n"};
	static const char *const values[] = {"", "\n", "x", "-5 -5", "0 0", "max", "1", "99999999999999999999999 1"};
	const char *root = *state;

	put_memory(root);
	for (size_t i = 0; i < sizeof(lists) / sizeof(lists[0]); i++) {
		put(root, "/proc/self/cgroup", lists[i]);
		assert_int_equal(hr__limits_cpus(root, 5), 5);
		assert_int_equal(hr__limits_memory(root), UINT64_C(1000000) << 10);
	}
	put(root, "/proc/self/cgroup", "1:cpu:/\n0::/\n");
	for (size_t i = 0; i < sizeof(values) / sizeof(values[0]); i++) {
		put(root, "/sys/fs/cgroup/cpu.max", values[i]);
		put(root, "/sys/fs/cgroup/cpu/cpu.cfs_quota_us", values[i]);
		put(root, "/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000");
		assert_true(hr__limits_cpus(root, 5) >= 1 && hr__limits_cpus(root, 5) <= 5);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(without_groups_all_may_be_used, new_tree, free_tree),
		cmocka_unit_test_setup_teardown(the_tightest_level_of_version_2_holds, new_tree, free_tree),
		cmocka_unit_test_setup_teardown(a_container_of_version_1_sees_its_own_limits, new_tree, free_tree),
		cmocka_unit_test_setup_teardown(a_group_of_version_1_is_found_below_its_controller, new_tree,
						free_tree),
		cmocka_unit_test_setup_teardown(what_cannot_be_read_limits_nothing, new_tree, free_tree),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
