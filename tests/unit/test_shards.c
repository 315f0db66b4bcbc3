/* SPDX-License-Identifier: Apache-2.0 */
/*
 * model/shards: many shards are read at once, and nobody can tell. On a machine where the process may use one CPU
 * only, there are no helpers, and the same must hold.
 */
#include "modeltest.h"

#include "core/os.h"
#include "model/model.h"

#include <errno.h>
#include <pthread.h>
#include <semaphore.h>

#define N_SHARDS 40
#define ROUNDS   10

static int new_dir(void **state)
{
	*state = make_temp_dir();
	return 0;
}

static int drop_dir(void **state)
{
	remove_tree(*state);
	free(*state);
	return 0;
}

static const char *shard_name(uint32_t number)
{
	static char name[32];

	snprintf(name, sizeof(name), "m-%02u.safetensors", number);
	return name;
}

/* Shard s has the tensors "s<s>.a", "s<s>.b" and "s<s>.c". `more` goes into the index's map as it is. */
static void write_model(const char *dir, const char *more)
{
	char *index_path = path_in(dir, "model.safetensors.index.json");
	FILE *index = fopen(index_path, "w");

	fprintf(index, "{\"weight_map\":{");
	for (uint32_t s = N_SHARDS; s-- > 0;) {
		char names[3][16];

		for (int i = 0; i < 3; i++) {
			snprintf(names[i], sizeof(names[i]), "s%u.%c", s, 'a' + i);
			fprintf(index, "\"%s\":\"%s\"%s", names[i], shard_name(s), s || i < 2 ? "," : "");
		}
		SHARD(dir, shard_name(s), names[0], names[1], names[2]);
	}
	fprintf(index, "%s}}", more);
	fclose(index);
	free(index_path);
}

/* "<dir>/m-<number>.safetensors" gets what is no header. */
static void spoil(const char *dir, uint32_t number)
{
	char header[8 + 9] = {9, 0, 0, 0, 0, 0, 0, 0, 's', 'p', 'o', 'i', 'l', 'e', 'd', '.', '.'};
	char *path = path_in(dir, shard_name(number));

	write_file(path, header, sizeof(header));
	free(path);
}

static void lose(const char *dir, uint32_t number)
{
	char *path = path_in(dir, shard_name(number));

	assert_int_equal(unlink(path), 0);
	free(path);
}

/* The model is all there, in the order of the shards' names. 0, or what is wrong; also for a child. */
static int check_model(const char *dir)
{
	hr_model *model;

	if (hr_model_open(dir, NULL, &model))
		return 1;
	if (hr_model_n_tensors(model) != 3 * N_SHARDS || hr_model_n_shards(model) != N_SHARDS ||
	    hr_model_warning(model, 0))
		return 2;
	for (uint64_t i = 0; i < 3 * N_SHARDS; i++) {
		struct hr_tensor tensor = HR_TENSOR_INIT;
		char name[16];

		snprintf(name, sizeof(name), "s%u.%c", (unsigned)(i / 3), (int)('a' + i % 3));
		if (hr_model_tensor(model, i, &tensor) || tensor.shard != i / 3 || tensor.name_len != strlen(name) ||
		    memcmp(tensor.name, name, tensor.name_len) != 0)
			return 3;
	}
	hr_model_close(model);
	return 0;
}

/* It is refused each time with this code and this path, and nothing is left open. */
static void refused(const char *dir, int code, const char *path)
{
	for (int i = 0; i < ROUNDS; i++) {
		int before = count_open_files();
		hr_model *model;

		assert_fails(hr_model_open(dir, NULL, &model), code);
		assert_null(model);
		if (!strstr(hr_error_last()->path, path) || !strstr(hr_error_last()->message, path))
			fail_msg("\"%s\" is not about %s", hr_error_last()->message, path);
		assert_int_equal(count_open_files(), before);
	}
}

static void many_shards_are_numbered_by_name(void **state)
{
	int before = count_open_files();

	write_model(*state, "");
	for (int i = 0; i < ROUNDS; i++)
		assert_int_equal(check_model(*state), 0);
	assert_int_equal(count_open_files(), before);
}

static void the_first_bad_shard_is_the_one_that_is_told(void **state)
{
	write_model(*state, "");
	lose(*state, 38);
	refused(*state, HR_E_INDEX, shard_name(38));
	spoil(*state, 33);
	refused(*state, HR_E_JSON, shard_name(33));
	lose(*state, 5);
	refused(*state, HR_E_INDEX, shard_name(5));
	spoil(*state, 4);
	refused(*state, HR_E_JSON, shard_name(4));
	lose(*state, 0);
	refused(*state, HR_E_INDEX, shard_name(0));
}

static void an_index_that_is_wrong_by_itself_counts_before_its_shards(void **state)
{
	write_model(*state, ",\"s7.b\":\"m-07.safetensors\"");
	refused(*state, HR_E_DUPLICATE, "model.safetensors.index.json");
	spoil(*state, 0);
	lose(*state, 20);
	refused(*state, HR_E_DUPLICATE, "model.safetensors.index.json");
}

static void a_tensor_that_its_shard_lacks_is_found_missing(void **state)
{
	write_model(*state, ",\"s7.d\":\"m-07.safetensors\"");
	refused(*state, HR_E_INDEX, "model.safetensors.index.json");
	assert_string_equal(hr_error_last()->tensor, "s7.d");
}

/* The caller's order counts, and the same file twice is told unless a shard before the second is bad. */
static void a_list_of_many_files_fails_at_its_first_fault(void **state)
{
	char *paths[N_SHARDS];
	hr_model *model;

	write_model(*state, "");
	for (uint32_t s = 0; s < N_SHARDS; s++)
		paths[s] = path_in(*state, shard_name(N_SHARDS - 1 - s));
	assert_ok(hr_model_open_files((const char *const *)paths, N_SHARDS, NULL, &model));
	hr_model_close(model);
	spoil(*state, 1); /* the last but one */
	memcpy(paths[20], paths[3], strlen(paths[3]));
	for (int i = 0; i < ROUNDS; i++) {
		assert_fails(hr_model_open_files((const char *const *)paths, N_SHARDS, NULL, &model), HR_E_DUPLICATE);
		assert_string_equal(hr_error_last()->path, paths[20]);
	}
	paths[19][0] = '\0';
	for (int i = 0; i < ROUNDS; i++) {
		assert_fails(hr_model_open_files((const char *const *)paths, N_SHARDS, NULL, &model), HR_E_OPTS);
		assert_non_null(strstr(hr_error_last()->message, "file 19"));
	}
	for (uint32_t s = 0; s < N_SHARDS; s++)
		free(paths[s]);
}

/* ---- threads ---- */

#ifndef __SANITIZE_THREAD__
static void *wait_for_end(void *end)
{
	sem_wait(end);
	return NULL;
}

static int check_in_child(void *dir)
{
	return check_model(dir);
}

static void a_forked_child_of_a_process_with_threads_opens_models(void **state)
{
	pthread_t thread;
	sem_t end;

	write_model(*state, "");
	assert_int_equal(sem_init(&end, 0, 0), 0);
	assert_int_equal(pthread_create(&thread, NULL, wait_for_end, &end), 0);
	assert_int_equal(check_model(*state), 0);
	for (int i = 0; i < ROUNDS; i++)
		assert_int_equal(in_child(check_in_child, *state), 0);
	sem_post(&end);
	pthread_join(thread, NULL);
	assert_int_equal(check_model(*state), 0);
}
#endif

static void without_threads_the_caller_reads_all(void **state)
{
	write_model(*state, "");
	hr__fault_arm("pthread_create", 1, EAGAIN);
	assert_int_equal(check_model(*state), 0);
	assert_int_equal(hr__fault_fired(), hr__os_cpus() > 1);
	hr__fault_arm(NULL, 0, 0);
}

static void *count_run(void *count)
{
	__atomic_fetch_add((unsigned *)count, 1, __ATOMIC_RELAXED);
	return NULL;
}

static void a_team_is_as_many_threads_as_can_be_had(void **state)
{
	struct hr__os_team team;
	unsigned count = 0;

	(void)state;
	hr__os_team_start(&team, HR__OS_TEAM_MAX + 5, "hr-test", count_run, &count);
	assert_int_equal(team.n, HR__OS_TEAM_MAX);
	hr__os_team_join(&team);
	assert_int_equal(count, HR__OS_TEAM_MAX);
	hr__fault_arm("pthread_create", 3, EAGAIN);
	hr__os_team_start(&team, 5, "hr-test", count_run, &count);
	hr__fault_arm(NULL, 0, 0);
	assert_int_equal(team.n, 2);
	hr__os_team_join(&team);
	assert_int_equal(count, HR__OS_TEAM_MAX + 2);
}

/* Makes the n-th passage of a fault point fail, for every n: whichever call of whichever thread that is, all is
 * clean. */
static unsigned fail_each(const char *dir, const char *point, int errno_value)
{
	unsigned n = 1;

	for (;; n++) {
		int before = count_open_files(), rc, fired;
		hr_model *model;

		hr__fault_arm(point, n, errno_value);
		rc = hr_model_open(dir, NULL, &model);
		fired = hr__fault_fired();
		hr__fault_arm(NULL, 0, 0);
		if (rc) {
			assert_true(fired);
			assert_null(model);
			assert_true(rc == HR_E_NOMEM || (!point && rc == HR_E_IO));
			assert_int_equal(hr_error_last()->code, rc);
			assert_true(hr_error_last()->message[0] != 0);
		} else {
			assert_int_equal(hr_model_n_tensors(model), 3 * N_SHARDS);
			hr_model_close(model);
		}
		assert_int_equal(count_open_files(), before);
		if (!fired)
			return n;
	}
}

static void survives_every_failing_call_and_allocation(void **state)
{
	write_model(*state, "");
	assert_true(fail_each(*state, "malloc", ENOMEM) > 3 * N_SHARDS);
	assert_true(fail_each(*state, NULL, EIO) > 5 * N_SHARDS);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, new_dir, drop_dir)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(many_shards_are_numbered_by_name),
		TEST(the_first_bad_shard_is_the_one_that_is_told),
		TEST(an_index_that_is_wrong_by_itself_counts_before_its_shards),
		TEST(a_tensor_that_its_shard_lacks_is_found_missing),
		TEST(a_list_of_many_files_fails_at_its_first_fault),
#ifndef __SANITIZE_THREAD__ /* which gives up where a child starts threads with the numbers of its parent's */
		TEST(a_forked_child_of_a_process_with_threads_opens_models),
#endif
		TEST(without_threads_the_caller_reads_all),
		TEST(a_team_is_as_many_threads_as_can_be_had),
		TEST(survives_every_failing_call_and_allocation),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
