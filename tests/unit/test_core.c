/* SPDX-License-Identifier: Apache-2.0 */
/* core/: errors, option structs, hashes, the seam to the system. */
#include "hrtest.h"

#include "core/arith.h"
#include "core/error.h"
#include "core/hash.h"
#include "core/mem.h"
#include "core/os.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

static void an_error_keeps_its_values_until_the_next(void **state)
{
	(void)state;
	assert_int_equal(hr__fail_at(&(struct hr__where){.stage = "read",
							 .path = "/x/y",
							 .tensor = "a\nb",
							 .tensor_len = 3,
							 .offset = 77,
							 .system = 5},
				     HR_E_IO, "value %d", 42),
			 HR_E_IO);
	const struct hr_error *e = hr_error_last();

	assert_int_equal(e->code, HR_E_IO);
	assert_int_equal(e->system, 5);
	assert_int_equal(e->offset, 77);
	assert_string_equal(e->stage, "read");
	assert_string_equal(e->path, "/x/y");
	assert_string_equal(e->tensor, "a\\x0ab");
	assert_string_equal(e->message, "value 42");
	hr__fail(HR_E_OPTS, "was: %s", e->message);
	assert_string_equal(hr_error_last()->message, "was: value 42");
	assert_int_equal(hr_error_last()->offset, HR_NO_OFFSET);
}

static void locate_adds_only_what_is_missing(void **state)
{
	(void)state;
	hr__fail(HR_E_JSON, "bad byte");
	assert_int_equal(hr__error_locate("header", "/m/a.safetensors", NULL, 0), HR_E_JSON);
	assert_string_equal(hr_error_last()->message, "/m/a.safetensors: bad byte");
	hr__error_locate("other", "/else", "t", 1);
	assert_string_equal(hr_error_last()->path, "/m/a.safetensors");
	assert_string_equal(hr_error_last()->stage, "header");
	assert_string_equal(hr_error_last()->tensor, "t");
}

static void a_saved_error_comes_back_whole(void **state)
{
	struct hr__error_record kept;

	(void)state;
	hr__fail_at(&(struct hr__where){.path = "p", .offset = 1}, HR_E_SHORT, "short");
	hr__error_save(&kept);
	hr__fail(HR_E_OPTS, "other");
	assert_int_equal(hr__error_restore(&kept), HR_E_SHORT);
	assert_string_equal(hr_error_last()->path, "p");
	assert_string_equal(hr_error_last()->message, "short");
}

static void escaping_leaves_no_control_bytes_and_fits(void **state)
{
	char all[256], out[64];

	(void)state;
	for (int i = 0; i < 256; i++)
		all[i] = (char)i;
	for (size_t room = 8; room < sizeof(out); room++) {
		hr__escape(out, room, all, sizeof(all));
		assert_true(strlen(out) < room);
		for (const char *c = out; *c; c++)
			assert_true((unsigned char)*c >= 0x20 && *c != 0x7f);
	}
	assert_string_equal(hr__escape(out, sizeof(out), "h\xc3\xa9 \xe2\x80\xae \xff", HR_STRLEN),
			    "h\xc3\xa9 \\xe2\\x80\\xae \\xff");
}

static void every_code_has_a_name_and_numbers_are_unique(void **state)
{
	static const int codes[] = {
#define ROW(name, number, text) number,
		HR_ERROR_CODES(ROW)
#undef ROW
	};

	(void)state;
	for (size_t i = 0; i < sizeof(codes) / sizeof(codes[0]); i++) {
		assert_int_equal(strncmp(hr_error_name(codes[i]), "HR_E_", 5), 0);
		assert_string_not_equal(hr_strerror(codes[i]), "unknown error code");
		for (size_t j = 0; j < i; j++)
			assert_int_not_equal(codes[i], codes[j]);
	}
	assert_string_equal(hr_strerror(12345), "unknown error code");
}

static void option_structs_of_other_versions_are_read_or_refused(void **state)
{
	struct {
		size_t size;
		uint32_t a, b;
	} in = {sizeof(size_t) + 4, 7, 9}, out;
	struct {
		size_t size;
		uint32_t a, b, c, d;
	} longer = {sizeof(longer), 1, 2, 0, 0};

	(void)state;
	assert_ok(hr__opts_copy(&out, sizeof(out), &in, "opts"));
	assert_int_equal(out.a, 7);
	assert_int_equal(out.b, 0);
	assert_ok(hr__opts_copy(&out, sizeof(out), &longer, "opts"));
	assert_int_equal(out.b, 2);
	longer.d = 1;
	assert_fails(hr__opts_copy(&out, sizeof(out), &longer, "opts"), HR_E_OPTS);
	in.size = 0;
	assert_fails(hr__opts_copy(&out, sizeof(out), &in, "opts"), HR_E_OPTS);
	assert_ok(hr__opts_copy(&out, sizeof(out), NULL, "opts"));
	assert_int_equal(out.a, 0);
}

static void checked_arithmetic_says_when_it_wraps(void **state)
{
	uint64_t out = 5;

	(void)state;
	assert_true(hr__add_u64(1, 2, &out));
	assert_int_equal(out, 3);
	assert_false(hr__add_u64(UINT64_MAX, 1, &(uint64_t){0}));
	assert_false(hr__mul_u64(UINT64_C(1) << 32, UINT64_C(1) << 32, &(uint64_t){0}));
	assert_int_equal(hr__round_up(4097, 4096), 8192);
	assert_int_equal(hr__round_down(4097, 4096), 4096);
}

static void siphash_matches_its_published_shape(void **state)
{
	/* SipHash-1-3 of 00 01 .. 0e under key 00 01 .. 0f, from the reference implementation's test vectors. */
	const struct hr__hash_key key = {UINT64_C(0x0706050403020100), UINT64_C(0x0f0e0d0c0b0a0908)};
	unsigned char in[64];
	struct hr__hash_key a, b;

	(void)state;
	for (int i = 0; i < 64; i++)
		in[i] = (unsigned char)i;
	assert_int_equal(hr__hash(&key, in, 0), UINT64_C(0xabac0158050fc4dc));
	assert_int_equal(hr__hash(&key, in, 1), UINT64_C(0xc9f49bf37d57ca93));
	assert_int_equal(hr__hash(&key, in, 15), UINT64_C(0xd320d86d2a519956));
	hr__hash_key_new(&a);
	hr__hash_key_new(&b);
	assert_true(a.k0 != b.k0 || a.k1 != b.k1);
}

static void sha256_gives_the_known_digest(void **state)
{
	static const uint8_t abc[] = {0xba, 0x78, 0x16, 0xbf, 0x8f, 0x01, 0xcf, 0xea};
	hr__sha256 *sha;
	uint8_t out[32];

	(void)state;
	assert_ok(hr__sha256_new(&sha));
	for (int round = 0; round < 2; round++) {
		assert_ok(hr__sha256_update(sha, "a", 1));
		assert_ok(hr__sha256_update(sha, "bc", 2));
		assert_ok(hr__sha256_final(sha, out));
		assert_memory_equal(out, abc, sizeof(abc));
	}
	hr__sha256_free(sha);
}

/* RFC 3720, B.4. */
static void crc32c_gives_the_known_values(void **state)
{
	unsigned char bytes[48];

	(void)state;
	assert_int_equal(hr__crc32c(0, "", 0), 0);
	assert_int_equal(hr__crc32c(0, "123456789", 9), 0xe3069283);
	memset(bytes, 0, 32);
	assert_int_equal(hr__crc32c(0, bytes, 32), 0x8a9136aa);
	memset(bytes, 0xff, 32);
	assert_int_equal(hr__crc32c(0, bytes, 32), 0x62a8ab43);
	for (int i = 0; i < 32; i++)
		bytes[i] = (unsigned char)i;
	assert_int_equal(hr__crc32c(0, bytes, 32), 0x46dd794e);
	assert_int_equal(hr__crc32c_by_table(0, bytes, 32), 0x46dd794e);
}

static void crc32c_is_the_same_by_instruction_and_by_table(void **state)
{
	static const size_t sizes[] = {1, 7, 8, 9, 767, 768, 769, 4096, 12287, 12288, 12289, 65536, 100003};
	unsigned char *bytes = malloc(100011);

	(void)state;
	fill_pattern(bytes, 100011, 5, 0);
	for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++)
		for (size_t shift = 0; shift < 8; shift++) {
			size_t n = sizes[i], half = n / 3;
			uint32_t whole = hr__crc32c(0, bytes + shift, n);

			assert_int_equal(whole, hr__crc32c_by_table(0, bytes + shift, n));
			assert_int_equal(
				whole, hr__crc32c(hr__crc32c(0, bytes + shift, half), bytes + shift + half, n - half));
		}
	free(bytes);
}

static void residency_tells_cached_from_dropped(void **state)
{
	char *dir = make_temp_dir(), *path = path_in(dir, "f");
	struct hr__file file = {.direct_fd = -1, .may_mincore = true};
	uint64_t resident;
	char *bytes = calloc(1, 1 << 20);

	(void)state;
	write_file(path, bytes, 1 << 20);
	assert_int_equal(hr__os_open(AT_FDCWD, path, O_RDONLY, &file.fd), 0);
	assert_int_equal(hr__os_resident(&file, 0, 1 << 20, &resident), 0);
	assert_int_equal(resident, 1 << 20);
	/* cachestat; then mincore; then small reads that may not wait */
	for (int fallback = 0; fallback < 3; fallback++) {
		file.may_mincore = fallback < 2;
		hr__fault_arm("cachestat", fallback ? 1 : 0, EPERM);
		assert_int_equal(hr__os_resident(&file, 4096, 1 << 19, &resident), 0);
		assert_int_equal(resident, 1 << 19);
	}
	fsync(file.fd);
	posix_fadvise(file.fd, 0, 0, POSIX_FADV_DONTNEED);
	assert_int_equal(hr__os_resident(&file, 0, 1 << 20, &resident), 0);
	if (resident) /* a file system that keeps everything, tmpfs say */
		print_message("# nothing was dropped here: %llu bytes still resident\n", (unsigned long long)resident);
	hr__fault_arm(NULL, 0, 0);
	hr__os_close(file.fd);
	remove_tree(dir);
	free(bytes);
	free(path);
	free(dir);
}

static void the_fork_mark_reads_zero_in_a_child(void **state)
{
	const volatile uint32_t *mark = hr__os_fork_mark_new();
	int status;
	pid_t child;

	(void)state;
	assert_non_null(mark);
	assert_int_equal(*mark, 1);
	child = fork();
	if (child == 0)
		_exit(*mark == 0 ? 0 : 1);
	assert_int_equal(waitpid(child, &status, 0), child);
	assert_int_equal(status, 0);
	hr__os_fork_mark_free(mark);
}

static void memory_and_cpus_are_asked_of_the_system(void **state)
{
	void *memory;

	(void)state;
	assert_true(hr__os_cpus() >= 1);
	assert_true(hr__os_memory_available() > 0);
	assert_int_equal(hr__os_map(8 << 20, &memory), 0);
	assert_int_equal((uintptr_t)memory % (2 << 20), 0);
	hr__os_touch(memory, 8 << 20);
	hr__os_unmap(memory, 8 << 20);
}

static void claims_only_the_first_byte_of_pages_that_begin_in_a_block(void **state)
{
	const size_t huge = (size_t)2 << 20;
	unsigned char *memory;
	void *map;

	(void)state;
	assert_int_equal(hr__os_map(4 * huge, &map), 0);
	memory = map;
	memset(memory, 0xAA, 4 * huge);
	hr__os_claim(memory + 1, huge - 1); /* none begins here */
	hr__os_claim(memory + huge - 10, 10);
	hr__os_claim(memory + huge, 0);
	assert_null(memchr(memory, 0, 4 * huge));
	hr__os_claim(memory + huge - 10, huge + 11); /* two do, the last with one byte */
	assert_int_equal(memory[huge], 0);
	assert_int_equal(memory[2 * huge], 0);
	memory[huge] = memory[2 * huge] = 0xAA;
	assert_null(memchr(memory, 0, 4 * huge));
	hr__os_unmap(map, 4 * huge);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(an_error_keeps_its_values_until_the_next),
		cmocka_unit_test(locate_adds_only_what_is_missing),
		cmocka_unit_test(a_saved_error_comes_back_whole),
		cmocka_unit_test(escaping_leaves_no_control_bytes_and_fits),
		cmocka_unit_test(every_code_has_a_name_and_numbers_are_unique),
		cmocka_unit_test(option_structs_of_other_versions_are_read_or_refused),
		cmocka_unit_test(checked_arithmetic_says_when_it_wraps),
		cmocka_unit_test(siphash_matches_its_published_shape),
		cmocka_unit_test(sha256_gives_the_known_digest),
		cmocka_unit_test(crc32c_gives_the_known_values),
		cmocka_unit_test(crc32c_is_the_same_by_instruction_and_by_table),
		cmocka_unit_test(residency_tells_cached_from_dropped),
		cmocka_unit_test(the_fork_mark_reads_zero_in_a_child),
		cmocka_unit_test(memory_and_cpus_are_asked_of_the_system),
		cmocka_unit_test(claims_only_the_first_byte_of_pages_that_begin_in_a_block),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
