/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The rules about a whole header. Names and metadata keys are distinct (found by a keyed hash: names made to collide
 * cannot be chosen); sorted by (begin, end) the ranges follow one another from 0 without hole or overlap; each has
 * exactly the size of its dtype and shape; the last ends where the file ends. Order of checks as in the official
 * parser.
 *
 * Temporary memory: one table of 32-bit numbers, at most 16 bytes an entry, used for hashing and then for sorting.
 */
#include "header_rules.h"

#include "core/arith.h"
#include "core/error.h"
#include "core/mem.h"

#include <string.h>

/* ---- distinct names ---- */

struct table {
	uint32_t *slots; /* number of an item + 1; 0 = free. At most half of them are used. */
	size_t mask;
};

static int table_new(struct table *table, size_t n)
{
	size_t size = 16;

	while (size < 2 * n)
		size *= 2;
	table->mask = size - 1;
	table->slots = hr__calloc(size, sizeof(*table->slots));
	return table->slots ? 0 : HR_E_NOMEM;
}

static int fail_twice(const char *what, const char *name, size_t name_len, const char *first)
{
	const struct hr__where where = {
		.stage = "header", .offset = hr__header_position(name), .tensor = name, .tensor_len = name_len};
	char shown[120];

	return hr__fail_at(&where, HR_E_DUPLICATE,
			   "%s \"%s\" occurs twice, at byte %" PRIu64 " and at byte %" PRIu64
			   ": which of the two is meant cannot be told",
			   what, hr__escape(shown, sizeof(shown), name, name_len), hr__header_position(first),
			   where.offset);
}

static int distinct_entries(struct table *table, const struct hr__header *header)
{
	for (size_t i = 0; i < header->n_entries; i++) {
		const struct hr__entry *entry = &header->entries[i], *other;
		size_t at = entry->hash & table->mask;

		for (; table->slots[at]; at = (at + 1) & table->mask) {
			other = &header->entries[table->slots[at] - 1];
			if (other->hash == entry->hash && other->name_len == entry->name_len &&
			    memcmp(other->name, entry->name, entry->name_len) == 0)
				return fail_twice("tensor", entry->name, entry->name_len, other->name);
		}
		table->slots[at] = (uint32_t)i + 1;
	}
	return 0;
}

static int distinct_pairs(const struct hr__hash_key *key, const struct hr__header *header)
{
	struct table table;
	int rc = table_new(&table, header->n_pairs);

	for (size_t i = 0; !rc && i < header->n_pairs; i++) {
		const struct hr__pair *pair = &header->pairs[i], *other;
		size_t at = hr__hash(key, pair->key, pair->key_len) & table.mask;

		for (; !rc && table.slots[at]; at = (at + 1) & table.mask) {
			other = &header->pairs[table.slots[at] - 1];
			if (other->key_len == pair->key_len && memcmp(other->key, pair->key, pair->key_len) == 0)
				rc = fail_twice("the metadata key", pair->key, pair->key_len, other->key);
		}
		if (!rc)
			table.slots[at] = (uint32_t)i + 1;
	}
	hr__free(table.slots);
	return rc;
}

/* ---- order ---- */

static bool is_before(const struct hr__entry *a, const struct hr__entry *b)
{
	return a->begin != b->begin ? a->begin < b->begin : a->end < b->end;
}

static bool is_sorted(const struct hr__header *header)
{
	for (size_t i = 1; i < header->n_entries; i++)
		if (is_before(&header->entries[i], &header->entries[i - 1]))
			return false;
	return true;
}

/* One round of a merge sort of entry numbers: pairs of runs of `width` in `from` become runs of twice that in `to`. */
static void merge_runs(const struct hr__entry *entries, const uint32_t *from, uint32_t *to, size_t n, size_t width)
{
	for (size_t start = 0; start < n; start += 2 * width) {
		size_t left = start, middle = (size_t)hr__min_u64(start + width, n), right = middle;
		size_t end = (size_t)hr__min_u64(start + 2 * width, n);

		for (size_t out = start; out < end; out++) {
			bool take_right = left == middle ||
					  (right < end && is_before(&entries[from[right]], &entries[from[left]]));

			to[out] = take_right ? from[right++] : from[left++];
		}
	}
}

/* Moves each entry to its place along the cycles of the permutation; order[i] is the entry that belongs at i. */
static void permute(struct hr__entry *entries, uint32_t *order, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		const struct hr__entry first = entries[i];
		size_t at = i;

		while (order[at] != i) {
			size_t next = order[at];

			entries[at] = entries[next];
			order[at] = (uint32_t)at;
			at = next;
		}
		entries[at] = first;
		order[at] = (uint32_t)at;
	}
}

/* `numbers` has room for two per entry. Stable, and n log n for any order that a file may come with. */
static void sort_entries(struct hr__header *header, uint32_t *numbers)
{
	size_t n = header->n_entries;
	uint32_t *from = numbers, *to = numbers + n;

	for (size_t i = 0; i < n; i++)
		from[i] = (uint32_t)i;
	for (size_t width = 1; width < n; width *= 2) {
		uint32_t *sorted = to;

		merge_runs(header->entries, from, to, n, width);
		to = from;
		from = sorted;
	}
	permute(header->entries, from, n);
}

/* ---- ranges and sizes ---- */

static struct hr__where at_entry(const struct hr__entry *entry)
{
	return (struct hr__where){.stage = "header",
				  .tensor = entry->name,
				  .tensor_len = entry->name_len,
				  .offset = hr__header_position(entry->name)};
}

static int fail_offset(const struct hr__entry *entry, const struct hr__entry *before, uint64_t expected)
{
	const struct hr__where where = at_entry(entry);
	char name[100], other[100] = "";

	hr__escape(name, sizeof(name), entry->name, entry->name_len);
	if (before)
		hr__escape(other, sizeof(other), before->name, before->name_len);
	if (entry->end < entry->begin)
		return hr__fail_at(&where, HR_E_OFFSET,
				   "tensor \"%s\" at byte %" PRIu64 ": its range ends at %" PRIu64
				   ", before it begins at %" PRIu64,
				   name, where.offset, entry->end, entry->begin);
	if (!before)
		return hr__fail_at(&where, HR_E_OFFSET,
				   "tensor \"%s\" at byte %" PRIu64
				   ": the first range must begin at 0, not at %" PRIu64,
				   name, where.offset, entry->begin);
	return hr__fail_at(&where, HR_E_OFFSET,
			   "tensor \"%s\" at byte %" PRIu64 ": its range begins at %" PRIu64
			   ", but that of \"%s\" before it ends at "
			   "%" PRIu64 ": %s of %" PRIu64 " bytes",
			   name, where.offset, entry->begin, other, expected,
			   entry->begin > expected ? "a hole" : "an overlap",
			   entry->begin > expected ? entry->begin - expected : expected - entry->begin);
}

/* Sets *bytes to what dtype and shape make; multiplied from left to right as the official parser does, so that both
 * refuse the same shapes. */
static int size_of(const struct hr__entry *entry, uint64_t *bytes)
{
	const struct hr__where where = at_entry(entry);
	uint64_t bits = 1;
	bool fits = true;
	char name[100];

	*bytes = 0;
	for (unsigned i = 0; fits && i < entry->rank; i++)
		fits = hr__mul_u64(bits, entry->dims[i], &bits);
	if (!fits || !hr__mul_u64(bits, hr_dtype_bits(entry->dtype), &bits))
		return hr__fail_at(&where, HR_E_OVERFLOW,
				   "tensor \"%s\" at byte %" PRIu64 ": its size in bits does not fit into 64 bits",
				   hr__escape(name, sizeof(name), entry->name, entry->name_len), where.offset);
	if (bits % 8 != 0)
		return hr__fail_at(&where, HR_E_SUBBYTE,
				   "tensor \"%s\" at byte %" PRIu64 ": %" PRIu64 " bits of %s do not fill whole bytes",
				   hr__escape(name, sizeof(name), entry->name, entry->name_len), where.offset, bits,
				   hr_dtype_name(entry->dtype));
	*bytes = bits / 8;
	return 0;
}

static int fail_size(const struct hr__entry *entry, uint64_t bytes)
{
	const struct hr__where where = at_entry(entry);
	char name[100];

	return hr__fail_at(&where, HR_E_SIZE,
			   "tensor \"%s\" at byte %" PRIu64 ": dtype %s and shape make %" PRIu64
			   " bytes, but its range %" PRIu64 " to %" PRIu64 " has %" PRIu64,
			   hr__escape(name, sizeof(name), entry->name, entry->name_len), where.offset,
			   hr_dtype_name(entry->dtype), bytes, entry->begin, entry->end, entry->end - entry->begin);
}

static int check_ranges(const struct hr__header *header, uint64_t *end)
{
	const struct hr__entry *before = NULL;

	*end = 0;
	for (size_t i = 0; i < header->n_entries; i++) {
		const struct hr__entry *entry = &header->entries[i];
		uint64_t bytes;
		int rc;

		if (entry->begin != *end || entry->end < entry->begin)
			return fail_offset(entry, before, *end);
		rc = size_of(entry, &bytes);
		if (rc)
			return rc;
		if (entry->end - entry->begin != bytes)
			return fail_size(entry, bytes);
		*end = entry->end;
		before = entry;
	}
	return 0;
}

static int check_cover(const struct hr__header_text *text, uint64_t end)
{
	const uint64_t data = HR__FRAME_BYTES + (uint64_t)text->json_bytes;
	const struct hr__where where = {.stage = "header", .offset = data + hr__min_u64(end, text->data_bytes)};

	if (end > text->data_bytes)
		return hr__fail_at(&where, HR_E_COVER,
				   "the header describes %" PRIu64 " bytes of tensors, the file has %" PRIu64
				   ": it ends at byte %" PRIu64 ", short by %" PRIu64
				   "; it is truncated, download it again",
				   end, text->data_bytes, where.offset, end - text->data_bytes);
	if (end < text->data_bytes)
		return hr__fail_at(&where, HR_E_COVER,
				   "the header describes %" PRIu64 " bytes of tensors, the file has %" PRIu64
				   ": from byte %" PRIu64 " on, %" PRIu64
				   " bytes belong to no tensor; it is damaged or something was appended",
				   end, text->data_bytes, where.offset, text->data_bytes - end);
	return 0;
}

int hr__header_check(const struct hr__header_text *text, const struct hr__hash_key *key, struct hr__header *header)
{
	struct table table;
	uint64_t end;
	int rc = distinct_pairs(key, header);

	if (rc)
		return rc;
	rc = table_new(&table, header->n_entries);
	if (rc)
		return rc;
	rc = distinct_entries(&table, header);
	if (!rc && !is_sorted(header))
		sort_entries(header, table.slots);
	hr__free(table.slots);
	if (rc)
		return rc;
	rc = check_ranges(header, &end);
	return rc ? rc : check_cover(text, end);
}
