/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The pool: random legal moves keep the counts true after each step, and every illegal one ends the process, whatever
 * state the slot is in. The table of legal moves here is written out by hand, apart from the pool's own.
 */
#include "hrtest.h"

#include "loader/loader.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#define N_STATES 6
#define N_SLOTS  7

/* free, filling, full, draining, leaving, lost */
static const bool legal[N_STATES][N_STATES] = {
	[HR__SLOT_FREE] = {0, 1, 0, 0, 0, 0},    [HR__SLOT_FILLING] = {1, 0, 1, 0, 0, 1},
	[HR__SLOT_FULL] = {1, 0, 0, 1, 1, 0},    [HR__SLOT_DRAINING] = {1, 0, 1, 0, 1, 1},
	[HR__SLOT_LEAVING] = {1, 0, 0, 0, 0, 0}, [HR__SLOT_LOST] = {1, 0, 0, 0, 1, 0},
};

static void check_counts(const struct hr__pool *pool, uint32_t peak)
{
	uint32_t n_free = 0, n_leaving = 0, n_lost = 0, n_listed = 0;

	for (uint32_t i = 0; i < pool->n_slots; i++) {
		n_free += pool->slots[i].state == HR__SLOT_FREE;
		n_lost += pool->slots[i].state == HR__SLOT_LOST;
		n_leaving += pool->slots[i].state == HR__SLOT_LEAVING;
		assert_ptr_equal(pool->slots[i].memory, pool->memory + i * pool->slot_bytes);
	}
	for (const struct hr__slot *slot = pool->free; slot; slot = slot->next) {
		assert_int_equal(slot->state, HR__SLOT_FREE);
		n_listed++;
	}
	assert_int_equal(pool->n_free, n_free);
	assert_int_equal(n_listed, n_free);
	assert_int_equal(pool->n_lost, n_lost);
	assert_int_equal(pool->n_leaving, n_leaving);
	assert_int_equal(hr__pool_is_idle(pool), n_free + n_leaving == pool->n_slots);
	assert_int_equal(pool->n_peak, peak);
	assert_true(pool->n_peak <= pool->n_slots);
}

static void random_step(struct hr__pool *pool, struct test_random *random, uint32_t *peak)
{
	struct hr__slot *slot = &pool->slots[test_random_below(random, pool->n_slots)];
	enum hr__slot_state to = (enum hr__slot_state)test_random_below(random, N_STATES);

	if (test_random_below(random, 3) == 0) {
		bool none = pool->n_free == 0;

		slot = hr__pool_take(pool);
		assert_int_equal(slot == NULL, none);
		if (slot)
			memset(slot->memory, 0xaa, pool->slot_bytes);
	} else if (slot->state != HR__SLOT_FREE && legal[slot->state][to]) {
		hr__pool_move(pool, slot, to);
		if (to == HR__SLOT_FULL && pool->n_slots - pool->n_free > *peak)
			*peak = pool->n_slots - pool->n_free;
	}
}

static void keeps_its_counts_true(void **state)
{
	struct test_random random;
	struct hr__pool pool;
	uint32_t peak = 0;

	(void)state;
	test_random_start(&random, 7);
	assert_ok(hr__pool_open(&pool, HR__STAGING_HOST, N_SLOTS * HR_MIN_SLOT_BYTES + 4096, HR_MIN_SLOT_BYTES));
	assert_int_equal(pool.n_slots, N_SLOTS);
	for (int step = 0; step < 20000; step++) {
		random_step(&pool, &random, &peak);
		check_counts(&pool, peak);
	}
	for (uint32_t i = 0; i < pool.n_slots; i++)
		if (pool.slots[i].state != HR__SLOT_FREE)
			hr__pool_move(&pool, &pool.slots[i], HR__SLOT_FREE);
	check_counts(&pool, peak);
	assert_int_equal(pool.n_free, N_SLOTS);
	hr__pool_close(&pool);
}

/* Brings a slot that was taken into a state. */
static void bring_to(struct hr__pool *pool, struct hr__slot *slot, enum hr__slot_state state)
{
	if (state == HR__SLOT_FULL || state == HR__SLOT_DRAINING || state == HR__SLOT_LEAVING)
		hr__pool_move(pool, slot, HR__SLOT_FULL);
	if (state == HR__SLOT_LEAVING)
		hr__pool_move(pool, slot, HR__SLOT_LEAVING);
	if (state == HR__SLOT_DRAINING)
		hr__pool_move(pool, slot, HR__SLOT_DRAINING);
	if (state == HR__SLOT_LOST)
		hr__pool_move(pool, slot, HR__SLOT_LOST);
	if (state == HR__SLOT_FREE)
		hr__pool_move(pool, slot, HR__SLOT_FREE);
}

/* Whether the move ends the process. */
static bool move_aborts(enum hr__slot_state from, enum hr__slot_state to)
{
	const struct rlimit no_core = {0, 0};
	struct hr__pool pool;
	struct hr__slot *slot;
	int status;
	pid_t child;

	fflush(NULL);
	child = fork();
	if (child == 0) {
		setrlimit(RLIMIT_CORE, &no_core);
		signal(SIGABRT, SIG_DFL);
		if (!freopen("/dev/null", "w", stderr) ||
		    hr__pool_open(&pool, HR__STAGING_HOST, HR_MIN_STAGING_BYTES, HR_MIN_SLOT_BYTES))
			_exit(2);
		slot = hr__pool_take(&pool);
		bring_to(&pool, slot, from);
		if (from == HR__SLOT_FREE && to == HR__SLOT_FILLING)
			slot = hr__pool_take(&pool) ? slot : NULL;
		else
			hr__pool_move(&pool, slot, to);
		_exit(0);
	}
	assert_true(child > 0 && waitpid(child, &status, 0) == child);
	assert_false(WIFEXITED(status) && WEXITSTATUS(status) == 2);
	return WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
}

static void ends_the_process_at_every_illegal_move(void **state)
{
	(void)state;
#ifdef NDEBUG
	skip_for("asserts are compiled out");
#endif
	for (int from = 0; from < N_STATES; from++)
		for (int to = 0; to < N_STATES; to++)
			if (move_aborts((enum hr__slot_state)from, (enum hr__slot_state)to) == legal[from][to])
				fail_msg("from %d to %d: must %s", from, to, legal[from][to] ? "work" : "abort");
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(keeps_its_counts_true),
		cmocka_unit_test(ends_the_process_at_every_illegal_move),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
