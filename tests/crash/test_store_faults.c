/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a store does when its region misbehaves: every call fails once, in each way that a call can fail; every byte of
 * every record rots once; a reader holds a generation while writers go on and use space again. Never wrong bytes,
 * never a store that is neither old nor new, and an error that says what happened.
 */
#include "fake_disk.h"
#include "storetest.h"

#include "store/copy_out.h"
#include "store/mutant.h"

#include <errno.h>

#define DISK_BYTES (UINT64_C(16) << 20)

static const struct hr__snapshot_want newest = {.is_moved = true};

static struct fake_disk *base_disk; /* a store with "alpha" and "beta" on it */
static uint64_t base_models;

static int import(hr_store *store, const char *source, const char *model, uint32_t flags)
{
	struct hr_store_import_opts opts = HR_STORE_IMPORT_OPTS_INIT;
	char path[512];

	snprintf(path, sizeof(path), "%s/%s", store_sources, source);
	opts.threads = 1;
	opts.flags = flags;
	return hr_store_import(store, path, model, &opts, NULL);
}

static int make_base(void **state)
{
	struct hr__region *region;
	hr_store *store;

	make_store_sources(state);
	base_disk = fake_disk_new(DISK_BYTES, 4096);
	region = fake_region(base_disk, true);
	assert_ok(hr__store_format(region, "faults"));
	hr__region_close(region);
	assert_ok(hr__store_open_on(fake_region(base_disk, true), &newest, &store));
	assert_ok(import(store, "a", "alpha", 0));
	assert_ok(import(store, "b", "beta", 0));
	base_models = models_fingerprint(&store->now->manifest);
	hr_store_close(store);
	return 0;
}

static int remove_base(void **state)
{
	fake_disk_free(base_disk);
	return remove_store_sources(state);
}

/* ---- every call fails once ---- */

struct scenario {
	uint64_t seen[4]; /* fingerprints after each operation */
	unsigned n_done;  /* operations that said 0 */
	int code;
};

/* Until something fails. */
static void run(struct fake_disk *disk, struct scenario *s)
{
	hr_store *store = NULL;

	s->n_done = 0;
	s->code = hr__store_open_on(fake_region(disk, true), &newest, &store);
	if (!s->code)
		s->code = import(store, "c", "alpha", HR_IMPORT_REPLACE);
	if (!s->code)
		s->seen[++s->n_done] = models_fingerprint(&store->now->manifest);
	if (!s->code)
		s->code = hr_store_remove(store, "beta");
	if (!s->code)
		s->seen[++s->n_done] = models_fingerprint(&store->now->manifest);
	if (!s->code)
		s->code = hr_store_reclaim(store, NULL);
	if (!s->code)
		s->seen[++s->n_done] = models_fingerprint(&store->now->manifest);
	if (s->code == HR_E_COMMIT_UNKNOWN)
		assert_fails(hr_store_remove(store, "alpha"), HR_E_POISONED);
	hr_store_close(store);
}

/* What is on the disk is what was there after the last operation that said 0, or after the next. */
static void check_disk(struct fake_disk *disk, const struct scenario *good, const struct scenario *s, uint64_t n,
		       bool may_be_harmed)
{
	struct hr__snapshot *snapshot;
	uint64_t found;
	int code = hr__snapshot_open_on(fake_region(disk, false), &newest, &snapshot);

	if (code && may_be_harmed)
		return;
	if (code)
		fail_msg("call %llu: it does not open: %s", (unsigned long long)n, hr_error_last()->message);
	found = models_fingerprint(&snapshot->manifest);
	if (found != good->seen[s->n_done] && (s->n_done == 3 || s->code == 0 || found != good->seen[s->n_done + 1]))
		fail_msg("call %llu: neither old nor new models after %u operations, code %d", (unsigned long long)n,
			 s->n_done, s->code);
	if (!objects_are_right(snapshot) && !may_be_harmed)
		fail_msg("call %llu: an object is damaged: %s", (unsigned long long)n, hr_error_last()->message);
	hr__snapshot_release(snapshot);
}

static void every_call(enum fake_fault fault, const char *name)
{
	struct scenario good = {.seen = {base_models}}, s = {.seen = {base_models}};
	struct fake_disk *disk = fake_disk_copy(base_disk, false);
	uint64_t n_calls, n_failed = 0;

	run(disk, &good);
	assert_int_equal(good.code, 0);
	n_calls = disk->n_calls;
	fake_disk_free(disk);
	for (uint64_t n = 1; n <= n_calls; n++) {
		struct fake_disk *durable;

		disk = fake_disk_copy(base_disk, false);
		disk->fault_at = n;
		disk->fault = fault;
		run(disk, &s);
		assert_true(disk->fired);
		n_failed += s.code != 0;
		disk->fault_at = 0;
		disk->bytes = DISK_BYTES;
		/* With what was written, and as it is after a power cut on top of it. */
		durable = fake_disk_copy(disk, false);
		check_disk(durable, &good, &s, n, fault == FAKE_MISDIRECT);
		check_disk(disk, &good, &s, n, fault == FAKE_MISDIRECT);
		fake_disk_free(durable);
		fake_disk_free(disk);
	}
	print_message("# %s at each of %llu calls: %llu were told\n", name, (unsigned long long)n_calls,
		      (unsigned long long)n_failed);
	assert_true(n_failed > 0);
}

static void every_call_fails_once_with_eio(void **state)
{
	(void)state;
	every_call(FAKE_EIO, "EIO");
}

static void every_read_and_write_stops_half_way_once(void **state)
{
	(void)state;
	every_call(FAKE_SHORT, "half a transfer");
}

static void every_read_has_a_wrong_bit_once(void **state)
{
	(void)state;
	every_call(FAKE_FLIP, "a wrong bit");
}

static void every_write_is_lost_once(void **state)
{
	(void)state;
	every_call(FAKE_LIE, "a lost write");
}

static void every_write_goes_elsewhere_once(void **state)
{
	(void)state;
	every_call(FAKE_MISDIRECT, "a write to the wrong place");
}

static void the_region_shrinks_at_every_call(void **state)
{
	(void)state;
	every_call(FAKE_SHRINK, "a region of half the size");
}

static void the_region_is_another_device_at_every_call(void **state)
{
	(void)state;
	every_call(FAKE_SWAP, "another device");
}

static void every_allocation_fails_once(void **state)
{
	struct scenario good = {.seen = {base_models}}, s = {.seen = {base_models}};
	struct fake_disk *disk = fake_disk_copy(base_disk, false);
	uint64_t n;

	(void)state;
	run(disk, &good);
	fake_disk_free(disk);
	for (n = 1;; n++) {
		bool fired;

		disk = fake_disk_copy(base_disk, false);
		hr__fault_arm("malloc", n, ENOMEM);
		run(disk, &s);
		fired = hr__fault_fired();
		hr__fault_arm(NULL, 0, 0);
		if (fired && s.code && s.code != HR_E_NOMEM && s.code != HR_E_COMMIT_UNKNOWN)
			fail_msg("allocation %llu: %s", (unsigned long long)n, hr_error_last()->message);
		check_disk(disk, &good, &s, n, false);
		fake_disk_free(disk);
		if (!fired)
			break;
	}
	print_message("# %llu allocations failed once each\n", (unsigned long long)n - 1);
	assert_true(n > 100);
	assert_int_equal(s.code, 0);
}

/* ---- rot ---- */

/* Opens a disk: gives its code; what opens is the newest models or (`older`) those before. */
static int opens(struct fake_disk *disk, uint64_t older)
{
	struct hr__snapshot *snapshot;
	int code = hr__snapshot_open_on(fake_region(disk, false), &newest, &snapshot);
	uint64_t found;

	if (code)
		return code;
	found = models_fingerprint(&snapshot->manifest);
	if (found != base_models && found != older)
		fail_msg("rot was believed");
	hr__snapshot_release(snapshot);
	return 0;
}

static void rot(struct fake_disk *disk, const uint64_t at[2], size_t bytes, uint64_t older, const char *what)
{
	unsigned n_refused = 0;

	for (size_t i = 0; i < bytes; i++) {
		uint8_t bit = (uint8_t)(1 << i % 8);

		for (int copy = 0; copy < 2; copy++) {
			disk->now[at[copy] + i] ^= bit;
			if (opens(disk, base_models))
				fail_msg("%s: byte %zu of one copy was enough: %s", what, i, hr_error_last()->message);
			disk->now[at[copy] + i] ^= bit;
		}
		disk->now[at[0] + i] ^= bit;
		disk->now[at[1] + i] ^= bit;
		n_refused += opens(disk, older) != 0;
		disk->now[at[0] + i] ^= bit;
		disk->now[at[1] + i] ^= bit;
	}
	print_message("# %s: %zu bytes rotted, in one copy and in both; refused %u times\n", what, bytes, n_refused);
	if (older == base_models)
		assert_int_equal(n_refused, bytes);
}

static void every_byte_of_every_record_rots_once(void **state)
{
	struct fake_disk *disk = fake_disk_copy(base_disk, false);
	uint64_t label[2], root[2], other[2], older;
	struct hr__snapshot *snapshot, *before;
	size_t body_bytes;

	(void)state;
	assert_ok(hr__snapshot_open_on(fake_region(disk, false), &newest, &snapshot));
	assert_ok(hr__snapshot_open_on(
		fake_region(disk, false),
		&(struct hr__snapshot_want){.is_moved = true, .generation = snapshot->root.generation - 1}, &before));
	older = models_fingerprint(&before->manifest);
	assert_true(older != base_models);
	for (unsigned copy = 0; copy < 2; copy++) {
		label[copy] = hr__label_off(DISK_BYTES, copy);
		root[copy] = hr__root_off(DISK_BYTES, snapshot->slot, copy);
		other[copy] = hr__root_off(DISK_BYTES, !snapshot->slot, copy);
	}
	body_bytes = (size_t)snapshot->root.body_len;
	rot(disk, label, HR__RECORD_BYTES, base_models, "label");
	/* Nothing but a pin can tell that there was a newer root, if all of it is gone. */
	rot(disk, root, HR__RECORD_BYTES, older, "newest root");
	for (size_t i = 0; i < HR__RECORD_BYTES; i++) {
		disk->now[other[0] + i] ^= 1;
		disk->now[other[1] + i] ^= 1;
		assert_ok(opens(disk, base_models));
		disk->now[other[0] + i] ^= 1;
		disk->now[other[1] + i] ^= 1;
	}
	rot(disk, snapshot->root.body_off, body_bytes, base_models, "manifest");
	hr__snapshot_release(before);
	hr__snapshot_release(snapshot);
	fake_disk_free(disk);
}

static void every_byte_of_an_object_is_checked(void **state)
{
	struct fake_disk *disk = fake_disk_copy(base_disk, false);
	struct hr__snapshot *snapshot;
	struct hr__object object;
	uint64_t step = 37, n = 0;

	(void)state;
	assert_ok(hr__snapshot_open_on(fake_region(disk, false), &newest, &snapshot));
	hr__manifest_object(&snapshot->manifest, 0, &object);
	for (uint64_t i = 0; i < object.meta_off + object.meta_len; i += step, n++) {
		bool is_pad = i >= object.payload_len && i < object.meta_off;

		disk->now[object.ext_off + i] ^= 4;
		assert_int_equal(objects_are_right(snapshot), is_pad);
		disk->now[object.ext_off + i] ^= 4;
	}
	print_message("# %llu bytes of an object rotted\n", (unsigned long long)n);
	hr__snapshot_release(snapshot);
	fake_disk_free(disk);
}

/* ---- the same generation twice, going back ---- */

static void two_records_of_one_generation_are_refused(void **state)
{
	struct fake_disk *one = fake_disk_copy(base_disk, false), *two = fake_disk_copy(base_disk, false);
	hr_store *store;
	int slot;

	(void)state;
	assert_ok(hr__store_open_on(fake_region(one, true), &newest, &store));
	assert_ok(import(store, "c", "gamma", 0));
	hr_store_close(store);
	assert_ok(hr__store_open_on(fake_region(two, true), &newest, &store));
	assert_ok(import(store, "d", "delta", 0));
	slot = (int)store->now->slot;
	hr_store_close(store);
	memcpy(one->now + hr__root_off(DISK_BYTES, (unsigned)slot, 1),
	       two->now + hr__root_off(DISK_BYTES, (unsigned)slot, 1), HR__RECORD_BYTES);
	assert_fails(hr__store_open_on(fake_region(one, false), &newest, &store), HR_E_DIVERGED);
	fake_disk_free(one);
	fake_disk_free(two);
}

static void a_damaged_manifest_is_gone_back_behind_only_when_asked(void **state)
{
	struct hr__snapshot_want step_back = {.is_moved = true, .step_back = true};
	struct fake_disk *disk = fake_disk_copy(base_disk, false);
	uint64_t generation;
	hr_store *store;

	(void)state;
	assert_ok(hr__store_open_on(fake_region(disk, false), &newest, &store));
	generation = store->now->root.generation;
	for (int copy = 0; copy < 2; copy++)
		disk->now[store->now->root.body_off[copy] + 200] ^= 1;
	hr_store_close(store);
	assert_fails(hr__store_open_on(fake_region(disk, false), &newest, &store), HR_E_CORRUPT);
	assert_fails(hr__store_open_on(fake_region(disk, true), &newest, &store), HR_E_CORRUPT);
	assert_ok(hr__store_open_on(fake_region(disk, true), &step_back, &store));
	assert_int_equal(store->now->root.generation, generation - 1);
	assert_ok(hr_store_remove(store, "alpha"));
	assert_int_equal(store->now->root.generation, generation + 1);
	hr_store_close(store);
	assert_ok(hr__store_open_on(fake_region(disk, false), &newest, &store));
	assert_true(objects_are_right(store->now));
	hr_store_close(store);
	fake_disk_free(disk);
}

/* ---- readers ---- */

/* A reader holds a generation while the writer replaces all that is in it, reclaims, and writes again: gives how
 * often the reader read wrong bytes without being told. */
static unsigned read_while_space_is_reused(bool can_lock, unsigned mutants, bool *was_told)
{
	struct fake_disk *disk = fake_disk_copy(base_disk, false);
	struct hr__snapshot *reader;
	unsigned n_wrong = 0;
	hr_store *store;

	disk->no_locks = !can_lock;
	*was_told = false;
	hr__store_mutants = mutants;
	assert_ok(hr__snapshot_open_on(fake_region(disk, false), &newest, &reader));
	assert_int_equal(reader->is_leased, can_lock);
	assert_ok(hr__store_open_on(fake_region(disk, true), &newest, &store));
	/* What a reader holds fills the store, so not for ever. */
	for (int i = 0; i < (can_lock ? 5 : 12); i++) {
		char name[16];
		bool right;
		int code;

		snprintf(name, sizeof(name), "m%d", i);
		if (i == 0) {
			assert_ok(hr_store_remove(store, "alpha"));
			assert_ok(hr_store_remove(store, "beta"));
		} else {
			assert_ok(import(store, i % 2 ? "d" : "c", name, 0));
		}
		if (i > 1) {
			snprintf(name, sizeof(name), "m%d", i - 1);
			assert_ok(hr_store_remove(store, name));
		}
		assert_ok(hr_store_reclaim(store, NULL));
		/* First the bytes, then the question whether they may be believed, as a loader does. */
		right = objects_are_right(reader);
		code = hr__snapshot_check(reader);
		if (code && code != HR_E_STALE)
			fail_msg("%s", hr_error_last()->message);
		*was_told |= code == HR_E_STALE;
		n_wrong += !right && !code;
	}
	hr__store_mutants = 0;
	hr_store_close(store);
	hr__snapshot_release(reader);
	fake_disk_free(disk);
	return n_wrong;
}

static void a_reader_with_a_lease_keeps_its_generation(void **state)
{
	bool was_told;

	(void)state;
	assert_int_equal(read_while_space_is_reused(true, 0, &was_told), 0);
	assert_false(was_told);
}

static void a_reader_that_cannot_lock_is_told(void **state)
{
	bool was_told;

	(void)state;
	assert_int_equal(read_while_space_is_reused(false, 0, &was_told), 0);
	assert_true(was_told);
}

static void a_writer_that_ignores_leases_is_caught(void **state)
{
	bool was_told;

	(void)state;
	read_while_space_is_reused(true, HR__MUTANT_IGNORE_LEASES, &was_told);
	assert_true(was_told);
}

static void only_one_may_write(void **state)
{
	struct fake_disk *disk = fake_disk_copy(base_disk, false);
	hr_store *first, *second;

	(void)state;
	assert_ok(hr__store_open_on(fake_region(disk, true), &newest, &first));
	assert_fails(hr__store_open_on(fake_region(disk, true), &newest, &second), HR_E_LOCKED);
	assert_ok(hr__store_open_on(fake_region(disk, false), &newest, &second));
	hr_store_close(second);
	hr_store_close(first);
	assert_ok(hr__store_open_on(fake_region(disk, true), &newest, &second));
	hr_store_close(second);
	fake_disk_free(disk);
}

static void a_full_store_says_so_and_can_be_emptied(void **state)
{
	struct fake_disk *disk = fake_disk_copy(base_disk, false);
	hr_store *store;
	int code = 0, n = 0;

	(void)state;
	assert_ok(hr__store_open_on(fake_region(disk, true), &newest, &store));
	/* Equal shards are shared, so each model adds its config and what is new. */
	while (!code && n < 200) {
		char dir[600], file[700], name[16];

		snprintf(name, sizeof(name), "n%d", n);
		snprintf(dir, sizeof(dir), "mkdir -p %s/full", store_sources);
		assert_int_equal(system(dir), 0);
		snprintf(file, sizeof(file), "%s/full/config.json", store_sources);
		write_file(file, name, strlen(name));
		code = import(store, "full", name, 0);
		n += !code;
	}
	assert_true(code == HR_E_NOSPACE || code == HR_E_FRAGMENTED);
	assert_true(n > 10);
	for (int i = 0; i < n; i++) {
		char name[16];

		snprintf(name, sizeof(name), "n%d", i);
		assert_ok(hr_store_remove(store, name));
	}
	assert_ok(hr_store_reclaim(store, NULL));
	assert_ok(import(store, "c", "again", 0));
	assert_ok(import(store, "d", "and again", 0));
	hr_store_close(store);
	fake_disk_free(disk);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(every_call_fails_once_with_eio),
		cmocka_unit_test(every_read_and_write_stops_half_way_once),
		cmocka_unit_test(every_read_has_a_wrong_bit_once),
		cmocka_unit_test(every_write_is_lost_once),
		cmocka_unit_test(every_write_goes_elsewhere_once),
		cmocka_unit_test(the_region_shrinks_at_every_call),
		cmocka_unit_test(the_region_is_another_device_at_every_call),
		cmocka_unit_test(every_allocation_fails_once),
		cmocka_unit_test(every_byte_of_every_record_rots_once),
		cmocka_unit_test(every_byte_of_an_object_is_checked),
		cmocka_unit_test(two_records_of_one_generation_are_refused),
		cmocka_unit_test(a_damaged_manifest_is_gone_back_behind_only_when_asked),
		cmocka_unit_test(a_reader_with_a_lease_keeps_its_generation),
		cmocka_unit_test(a_reader_that_cannot_lock_is_told),
		cmocka_unit_test(a_writer_that_ignores_leases_is_caught),
		cmocka_unit_test(only_one_may_write),
		cmocka_unit_test(a_full_store_says_so_and_can_be_emptied),
	};

	return cmocka_run_group_tests(tests, make_base, remove_base);
}
