/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a store is after the power failed at any instant. The real store runs over a disk that remembers what is not
 * yet durable (fake_disk.h). After every write the outcomes of a power cut are gone through: each sector that is under
 * way is old, new or garbage, all combinations where there are few, prefixes, single losses and random ones where
 * there are many. On each outcome the real store is opened, and this must hold:
 *
 *  - it opens, at the models of before the operation or at those of after it, and at those of after it once the
 *    operation said 0;
 *  - every object of it has its SHA-256 and its digests, and so has every object of the root before, as long as that
 *    may be opened;
 *  - opening for reading writes nothing, and gives the same twice;
 *  - opening for writing, interrupted by another power cut at any point, leaves a store of which all this holds.
 *
 * The seeded bugs of src/store/mutant.h must each be found by it, or these tests fail.
 *
 * A quick run goes through a part; HR_CRASH_ALL=1 in the environment goes through all.
 */
#include "fake_disk.h"
#include "storetest.h"

#include "core/hash.h"
#include "store/copy_out.h"
#include "store/mutant.h"
#include "store/store.h"

#include <time.h>
#include <unistd.h>

#define DISK_BYTES  (UINT64_C(16) << 20)
#define MAX_PENDING 32768
#define MANY        2048 /* the zeros of a new store: nothing is there to be lost yet */
#define MAX_MEMO    256

enum what {
	OP_INIT,
	OP_IMPORT,
	OP_IMPORT_IN_STEPS,
	OP_REPLACE,
	OP_CANCEL,
	OP_REMOVE,
	OP_RECLAIM,
};

struct op {
	enum what what;
	const char *model, *source;
};

static const struct op all_ops[] = {
	{OP_INIT, NULL, NULL},      {OP_IMPORT, "alpha", "a"},  {OP_IMPORT, "beta", "b"},
	{OP_REPLACE, "alpha", "c"}, {OP_REMOVE, "beta", NULL},  {OP_IMPORT_IN_STEPS, "gamma", "d"},
	{OP_RECLAIM, NULL, NULL},   {OP_IMPORT, "delta", "b"},  {OP_CANCEL, "epsilon", "a"},
	{OP_REMOVE, "alpha", NULL}, {OP_RECLAIM, NULL, NULL},   {OP_IMPORT, "alpha", "a"},
	{OP_REPLACE, "delta", "c"}, {OP_REMOVE, "gamma", NULL}, {OP_IMPORT, "zeta", "e"},
};
#define N_OPS (sizeof(all_ops) / sizeof(all_ops[0]))

struct memo {
	uint64_t ext_off;
	uint8_t sha256[32];
};

struct trial {
	struct fake_disk *disk;
	bool thorough, stop_at_first;
	uint64_t before, after; /* fingerprints that are right now */
	bool may_be_nothing;    /* while a store is made */
	uint8_t states[MAX_PENDING];
	struct memo memo[MAX_MEMO]; /* objects found whole where nothing is pending */
	unsigned n_memo;
	uint64_t n_states, n_bad, n_mended;
	struct test_random random;
	char first_bad[400];
};

/* ---- one outcome ---- */

static void bad(struct trial *trial, const char *what)
{
	trial->n_bad++;
	if (trial->first_bad[0] == '\0')
		snprintf(trial->first_bad, sizeof(trial->first_bad), "%s (last error: %s)", what,
			 hr_error_last()->message);
}

static bool nothing_is_pending(const struct fake_disk *disk, const struct hr__object *object)
{
	for (uint64_t at = 0; at < object->ext_len; at += SECTOR)
		if (disk->last[(object->ext_off + at) / SECTOR] != UINT32_MAX)
			return false;
	return true;
}

static bool remembered(const struct trial *trial, const struct hr__object *object)
{
	for (unsigned i = 0; i < trial->n_memo; i++)
		if (trial->memo[i].ext_off == object->ext_off &&
		    memcmp(trial->memo[i].sha256, object->payload_sha256, 32) == 0)
			return true;
	return false;
}

static bool objects_are_whole(struct trial *trial, struct hr__snapshot *snapshot, bool may_remember)
{
	for (uint32_t i = 0; i < snapshot->manifest.objects.n; i++) {
		struct hr__object object;

		hr__manifest_object(&snapshot->manifest, i, &object);
		if (may_remember && remembered(trial, &object))
			continue;
		if (hr__object_copy(&(struct hr__copy){.region = snapshot->region,
						       .store_uuid = snapshot->label.uuid,
						       .object = &object,
						       .fd = -1}))
			return false;
		if (!may_remember || trial->n_memo == MAX_MEMO || !nothing_is_pending(trial->disk, &object))
			continue;
		trial->memo[trial->n_memo].ext_off = object.ext_off;
		memcpy(trial->memo[trial->n_memo].sha256, object.payload_sha256, 32);
		trial->n_memo++;
	}
	return true;
}

/* Opens and looks; gives whether mirrors of the newest root want mending. */
static bool look(struct trial *trial, struct image *image, bool *wants_mending)
{
	const struct hr__snapshot_want newest = {.is_moved = true};
	struct hr__snapshot *snapshot, *older;
	const struct hr__roots *roots;
	uint64_t found;
	bool good;
	int code = hr__snapshot_open_on(&image->base, &newest, &snapshot);

	*wants_mending = false;
	if (code) {
		/* A label that is torn cannot be told from one that rotted. */
		if (!trial->may_be_nothing || (code != HR_E_NOT_A_STORE && code != HR_E_CORRUPT))
			bad(trial, "it does not open");
		return false;
	}
	found = models_fingerprint(&snapshot->manifest);
	good = found == trial->before || found == trial->after;
	if (!good)
		bad(trial, "it has neither the old nor the new models");
	else if (!objects_are_whole(trial, snapshot, true)) {
		bad(trial, "an object is not whole");
		good = false;
	}
	roots = &snapshot->roots;
	*wants_mending = roots->states[snapshot->slot][0] != HR__RECORD_GOOD ||
			 roots->states[snapshot->slot][1] != HR__RECORD_GOOD;
	if (good && roots->roots[!snapshot->slot].generation &&
	    roots->roots[!snapshot->slot].generation >= snapshot->root.floor_gen) {
		struct hr__snapshot_want want = {.is_moved = true,
						 .generation = roots->roots[!snapshot->slot].generation};

		if (hr__snapshot_open_on(&image->base, &want, &older)) {
			bad(trial, "the generation before does not open");
			good = false;
		} else {
			if (!objects_are_whole(trial, older, true)) {
				bad(trial, "an object of the generation before is not whole");
				good = false;
			}
			hr__snapshot_release(older);
		}
	}
	hr__snapshot_release(snapshot);
	if (image->broke_promise)
		bad(trial, "opening for reading wrote something");
	return good && !image->broke_promise;
}

/* A writer opens it, and the power fails again while it puts mirrors right. */
static void mend(struct trial *trial, const uint8_t *states)
{
	uint8_t mended[IMAGE_ROOM];
	struct image image;
	hr_store *store;
	bool again;

	image_start(&image, trial->disk, states, true);
	if (hr__store_open_on(&image.base, &(struct hr__snapshot_want){.is_moved = true}, &store))
		bad(trial, "it does not open for writing");
	else
		hr_store_close(store);
	image.base.is_writable = false;
	image.written_states = mended;
	for (uint32_t k = 0; k < 2 * image.n_written + 20; k++) {
		for (uint32_t i = 0; i < image.n_written; i++)
			mended[i] = k <= image.n_written ? (i < k ? SECTOR_NEW : SECTOR_OLD)
				    : k < 2 * image.n_written + 1
					    ? (i == k - image.n_written - 1 ? SECTOR_GARBAGE : SECTOR_NEW)
					    : (uint8_t)test_random_below(&trial->random, 3);
		trial->n_states++;
		trial->n_mended++;
		look(trial, &image, &again);
	}
	image_end(&image);
}

static void check_outcome(struct trial *trial, const uint8_t *states)
{
	struct image image;
	bool wants_mending;

	if (trial->stop_at_first && trial->n_bad)
		return;
	trial->n_states++;
	image_start(&image, trial->disk, states, false);
	if (look(trial, &image, &wants_mending) && wants_mending && (trial->thorough || trial->n_states % 7 == 0))
		mend(trial, states);
	image_end(&image);
}

/* ---- all outcomes ---- */

static void all_combinations(struct trial *trial, uint32_t n)
{
	memset(trial->states, SECTOR_OLD, n);
	for (;;) {
		uint32_t i = 0;

		check_outcome(trial, trial->states);
		while (i < n && trial->states[i] == SECTOR_GARBAGE)
			trial->states[i++] = SECTOR_OLD;
		if (i == n)
			return;
		trial->states[i]++;
	}
}

static void random_outcomes(struct trial *trial, uint32_t n, unsigned times)
{
	while (times-- > 0) {
		uint64_t old = test_random_below(&trial->random, 100), garbage = test_random_below(&trial->random, 30);

		for (uint32_t i = 0; i < n; i++) {
			uint64_t dice = test_random_below(&trial->random, 100);

			trial->states[i] = dice < old ? SECTOR_OLD : dice < old + garbage ? SECTOR_GARBAGE : SECTOR_NEW;
		}
		check_outcome(trial, trial->states);
	}
}

static void chosen_outcomes(struct trial *trial, uint32_t n)
{
	uint32_t step = trial->thorough && n <= MANY ? 1 : n / 16 + 1;

	for (uint32_t k = 0; k <= n; k += step) {
		uint8_t *states = trial->states;

		memset(states, SECTOR_NEW, k); /* a prefix, with and without a torn sector behind it */
		memset(states + k, SECTOR_OLD, n - k);
		check_outcome(trial, states);
		if (k == n)
			break;
		states[k] = SECTOR_GARBAGE;
		check_outcome(trial, states);
		memset(states, SECTOR_NEW, n); /* all but one */
		states[k] = SECTOR_OLD;
		check_outcome(trial, states);
		states[k] = SECTOR_GARBAGE;
		check_outcome(trial, states);
		memset(states, SECTOR_OLD, k); /* the last ones only */
		memset(states + k, SECTOR_NEW, n - k);
		check_outcome(trial, states);
	}
}

static void power_fails(struct fake_disk *disk, void *ctx)
{
	struct trial *trial = ctx;
	uint32_t n = disk->n_pending;

	assert_true(n <= MAX_PENDING);
	trial->n_memo = 0;
	if (n <= (trial->thorough ? 9u : 5u)) {
		all_combinations(trial, n);
		return;
	}
	chosen_outcomes(trial, n);
	random_outcomes(trial, n, trial->thorough && n <= MANY ? 2000 : 60);
}

/* ---- operations ---- */

static int give_up(void *ctx, const struct hr_store_progress *progress)
{
	(void)ctx;
	return progress->done_files >= 1;
}

static int run_op(struct fake_disk *disk, hr_store **store, const struct op *op)
{
	struct hr_store_import_opts opts = HR_STORE_IMPORT_OPTS_INIT;
	char path[512];

	snprintf(path, sizeof(path), "%s/%s", store_sources, op->source ? op->source : "");
	opts.threads = 1;
	opts.flags = op->what == OP_REPLACE ? HR_IMPORT_REPLACE : 0;
	opts.commit_bytes = op->what == OP_IMPORT_IN_STEPS ? 1 : 0;
	opts.progress = op->what == OP_CANCEL ? give_up : NULL;
	switch (op->what) {
	case OP_INIT: {
		struct hr__region *region = fake_region(disk, true);
		int code = hr__store_format(region, "crash");

		hr__region_close(region);
		return code ? code
			    : hr__store_open_on(fake_region(disk, true), &(struct hr__snapshot_want){.is_moved = true},
						store);
	}
	case OP_REMOVE:
		return hr_store_remove(*store, op->model);
	case OP_RECLAIM:
		return hr_store_reclaim(*store, NULL);
	default:
		return hr_store_import(*store, path, op->model, &opts, NULL);
	}
}

/* What the models are after each operation, when nothing goes wrong. */
static void learn(uint64_t expected[N_OPS])
{
	struct fake_disk *disk = fake_disk_new(DISK_BYTES, 512);
	hr_store *store = NULL;

	for (size_t i = 0; i < N_OPS; i++) {
		int code = run_op(disk, &store, &all_ops[i]);

		assert_int_equal(code, all_ops[i].what == OP_CANCEL ? HR_E_CANCELLED : 0);
		expected[i] = models_fingerprint(&store->now->manifest);
	}
	hr_store_close(store);
	fake_disk_free(disk);
}

static struct trial *run_all(unsigned mutants, bool thorough)
{
	struct trial *trial = calloc(1, sizeof(*trial));
	uint64_t expected[N_OPS];
	hr_store *store = NULL;

	learn(expected);
	trial->disk = fake_disk_new(DISK_BYTES, 512);
	trial->thorough = thorough;
	trial->stop_at_first = mutants != 0;
	test_random_start(&trial->random, 20260801);
	hr__store_mutants = mutants;
	for (size_t i = 0; i < N_OPS && !(trial->stop_at_first && trial->n_bad); i++) {
		int code;

		trial->before = i ? expected[i - 1] : 0;
		trial->after = expected[i];
		trial->may_be_nothing = i == 0;
		trial->disk->hook = i > 0 || !mutants ? power_fails : NULL;
		trial->disk->ctx = trial;
		code = run_op(trial->disk, &store, &all_ops[i]);
		trial->disk->hook = NULL;
		if (code && !mutants && all_ops[i].what != OP_CANCEL)
			bad(trial, "an operation failed");
		if (!store || code)
			trial->after = trial->before;
		trial->before = trial->after; /* it said 0: from here on there is no way back */
		trial->may_be_nothing = false;
		power_fails(trial->disk, trial);
		if (code && mutants && all_ops[i].what != OP_CANCEL)
			break;
	}
	hr__store_mutants = 0;
	hr_store_close(store);
	fake_disk_free(trial->disk);
	trial->disk = NULL;
	return trial;
}

/* ---- tests ---- */

static bool is_thorough(void)
{
	return getenv("HR_CRASH_ALL") != NULL;
}

static void every_outcome_of_a_power_cut_is_the_old_or_the_new_store(void **state)
{
	struct timespec begin, end;
	struct trial *trial;

	(void)state;
	clock_gettime(CLOCK_MONOTONIC, &begin);
	trial = run_all(0, is_thorough());
	clock_gettime(CLOCK_MONOTONIC, &end);
	print_message("# %llu outcomes of power cuts, %llu of them while mirrors were put right, %llu bad, %ld s\n",
		      (unsigned long long)trial->n_states, (unsigned long long)trial->n_mended,
		      (unsigned long long)trial->n_bad, (long)(end.tv_sec - begin.tv_sec));
	if (trial->n_bad)
		fail_msg("%s", trial->first_bad);
	assert_true(trial->n_states > (is_thorough() ? 400000u : 5000u));
	free(trial);
}

static void must_be_caught(unsigned mutant, const char *name)
{
	struct trial *trial = run_all(mutant, false);

	print_message("# %s: after %llu outcomes: %s\n", name, (unsigned long long)trial->n_states, trial->first_bad);
	if (!trial->n_bad)
		fail_msg("the seeded bug \"%s\" was not found in %llu outcomes", name,
			 (unsigned long long)trial->n_states);
	free(trial);
}

static void a_root_before_its_manifest_is_durable_is_caught(void **state)
{
	(void)state;
	must_be_caught(HR__MUTANT_NO_FLUSH_BEFORE_ROOT, "no flush before the root");
}

static void success_before_the_root_is_durable_is_caught(void **state)
{
	(void)state;
	must_be_caught(HR__MUTANT_NO_FLUSH_AFTER_ROOT, "no flush after the root");
}

static void a_manifest_written_in_place_is_caught(void **state)
{
	(void)state;
	must_be_caught(HR__MUTANT_BODY_IN_PLACE, "manifest written in place");
}

static void a_single_root_is_caught(void **state)
{
	(void)state;
	must_be_caught(HR__MUTANT_ONE_ROOT, "one root, written in place");
}

static void space_used_again_too_early_is_caught(void **state)
{
	(void)state;
	must_be_caught(HR__MUTANT_REUSE_EARLY, "retired space used again too early");
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(every_outcome_of_a_power_cut_is_the_old_or_the_new_store),
		cmocka_unit_test(a_root_before_its_manifest_is_durable_is_caught),
		cmocka_unit_test(success_before_the_root_is_durable_is_caught),
		cmocka_unit_test(a_manifest_written_in_place_is_caught),
		cmocka_unit_test(a_single_root_is_caught),
		cmocka_unit_test(space_used_again_too_early_is_caught),
	};

	return cmocka_run_group_tests(tests, make_store_sources, remove_store_sources);
}
