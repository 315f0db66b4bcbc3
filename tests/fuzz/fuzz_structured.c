/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The bytes drive a generator: a valid list of tensors, spelled in one of many ways, with no fault or one of the
 * faults below. The answer must be exactly that list, or exactly the error of that fault.
 */
#include "fuzz.h"

#include "format/header.h"

#define MAX_TENSORS 12
#define TEXT_BYTES  16384

enum fault {
	NO_FAULT,
	FAULT_HOLE,
	FAULT_OVERLAP,
	FAULT_REVERSED,
	FAULT_SIZE,
	FAULT_SHORT,
	FAULT_LONG,
	FAULT_NAME_TWICE,
	FAULT_FIELD_TWICE,
	FAULT_FIELD_MISSING,
	FAULT_DTYPE,
	FAULT_SHAPE_TYPE,
	FAULT_FLOAT,
	FAULT_NEGATIVE,
	FAULT_BEYOND_U64,
	FAULT_COMMA,
	FAULT_NOT_UTF8,
	FAULT_SURROGATE,
	FAULT_OVERFLOW,
	FAULT_SUBBYTE,
	FAULT_RANK,
	FAULT_DEPTH,
	FAULT_METADATA_TWICE,
	FAULT_METADATA_TYPE,
	FAULT_AFTER_END,
	N_FAULTS,
};

static const int codes[N_FAULTS] = {
	[FAULT_HOLE] = HR_E_OFFSET,          [FAULT_OVERLAP] = HR_E_OFFSET,
	[FAULT_REVERSED] = HR_E_OFFSET,      [FAULT_SIZE] = HR_E_SIZE,
	[FAULT_SHORT] = HR_E_COVER,          [FAULT_LONG] = HR_E_COVER,
	[FAULT_NAME_TWICE] = HR_E_DUPLICATE, [FAULT_FIELD_TWICE] = HR_E_DUPLICATE,
	[FAULT_FIELD_MISSING] = HR_E_FIELD,  [FAULT_DTYPE] = HR_E_DTYPE,
	[FAULT_SHAPE_TYPE] = HR_E_TYPE,      [FAULT_FLOAT] = HR_E_TYPE,
	[FAULT_NEGATIVE] = HR_E_TYPE,        [FAULT_BEYOND_U64] = HR_E_TYPE,
	[FAULT_COMMA] = HR_E_JSON,           [FAULT_NOT_UTF8] = HR_E_UTF8,
	[FAULT_SURROGATE] = HR_E_JSON,       [FAULT_OVERFLOW] = HR_E_OVERFLOW,
	[FAULT_SUBBYTE] = HR_E_SUBBYTE,      [FAULT_RANK] = HR_E_LIMIT,
	[FAULT_DEPTH] = HR_E_LIMIT,          [FAULT_METADATA_TWICE] = HR_E_DUPLICATE,
	[FAULT_METADATA_TYPE] = HR_E_TYPE,   [FAULT_AFTER_END] = HR_E_JSON,
};

struct tensor {
	char name[32];
	uint64_t dims[4], begin, end;
	uint32_t dtype;
	unsigned rank;
};

struct generator {
	const uint8_t *at, *end;
	struct tensor tensors[MAX_TENSORS];
	unsigned n, victim; /* the tensor that has the fault */
	enum fault fault;
	uint64_t data_bytes;
	char text[TEXT_BYTES];
	size_t used;
};

static unsigned choose(struct generator *g, unsigned n)
{
	return g->at < g->end ? *g->at++ % n : 0;
}

static void put(struct generator *g, const char *text)
{
	size_t length = strlen(text);

	fuzz_check(g->used + length < TEXT_BYTES);
	memcpy(g->text + g->used, text, length);
	g->used += length;
}

static void put_space(struct generator *g)
{
	static const char *const spaces[] = {"", "", "", " ", "\n", "\t \r"};

	put(g, spaces[choose(g, 6)]);
}

static void put_mark(struct generator *g, const char *mark)
{
	put_space(g);
	put(g, mark);
	put_space(g);
}

/* An ASCII string, each letter as it is or escaped; an emoji stands for '@' in one of two spellings. */
static void put_string(struct generator *g, const char *text)
{
	unsigned style = choose(g, 4);
	char escaped[8];

	put(g, "\"");
	for (; *text; text++) {
		snprintf(escaped, sizeof(escaped), style == 1 ? "\\u%04x" : "%c", *text);
		if (*text == '@')
			put(g, style == 1 ? "\\ud83d\\uDE00" : "\xf0\x9f\x98\x80");
		else
			put(g, escaped);
	}
	put(g, "\"");
}

static void put_numbers(struct generator *g, const uint64_t *numbers, unsigned n)
{
	char text[32];

	put_mark(g, "[");
	for (unsigned i = 0; i < n; i++) {
		if (i)
			put_mark(g, ",");
		snprintf(text, sizeof(text), "%llu", (unsigned long long)numbers[i]);
		put(g, text);
	}
	put_mark(g, "]");
}

static bool has(const struct generator *g, unsigned i, enum fault fault)
{
	return g->fault == fault && g->victim == i;
}

static void put_shape(struct generator *g, unsigned i)
{
	const struct tensor *t = &g->tensors[i];

	if (has(g, i, FAULT_SHAPE_TYPE))
		put(g, choose(g, 2) ? "null" : "{}");
	else if (has(g, i, FAULT_FLOAT))
		put(g, choose(g, 2) ? "[1.0]" : "[1e0]");
	else if (has(g, i, FAULT_NEGATIVE))
		put(g, choose(g, 2) ? "[-1]" : "[-0]");
	else if (has(g, i, FAULT_BEYOND_U64))
		put(g, "[18446744073709551616]");
	else if (has(g, i, FAULT_OVERFLOW))
		put(g, choose(g, 2) ? "[9223372036854775808,2]" : "[18446744073709551615,2,0]");
	else if (has(g, i, FAULT_SUBBYTE))
		put(g, "[3,1]");
	else if (has(g, i, FAULT_RANK))
		for (unsigned d = 0; d < 66; d++)
			put(g, d == 0 ? "[1" : d < 65 ? ",1" : "]");
	else
		put_numbers(g, t->dims, t->rank);
}

static void put_range(struct generator *g, unsigned i)
{
	const struct tensor *t = &g->tensors[i];
	uint64_t range[2] = {t->begin, t->end};

	if (has(g, i, FAULT_HOLE) || (g->fault == FAULT_HOLE && i > g->victim)) {
		range[0]++;
		range[1]++;
	} else if (has(g, i, FAULT_OVERLAP)) {
		range[0]--;
		range[1]--;
	} else if (has(g, i, FAULT_REVERSED)) {
		range[0] = t->end;
		range[1] = t->begin;
	} else if (has(g, i, FAULT_SIZE)) {
		range[1]++;
	}
	put_numbers(g, range, 2);
}

static void put_field(struct generator *g, unsigned i, unsigned field)
{
	static const char *const names[] = {"dtype", "shape", "data_offsets", "extra"};

	put_string(g, names[field]);
	put_mark(g, ":");
	if (field == 0 && has(g, i, FAULT_DTYPE))
		put_string(g, choose(g, 2) ? "F128" : "");
	else if (field == 0)
		put_string(g, has(g, i, FAULT_SUBBYTE) ? "F4" : hr_dtype_name(g->tensors[i].dtype));
	else if (field == 1)
		put_shape(g, i);
	else if (field == 2)
		put_range(g, i);
	else if (has(g, i, FAULT_DEPTH))
		put(g, "[[[[[[[[[[[[[[[[[0]]]]]]]]]]]]]]]]]");
	else
		put(g, choose(g, 2) ? "{\"dtype\":[1,{\"a\":null}],\"b\":-1.5e3}" : "\"\\n\"");
}

static void put_tensor(struct generator *g, unsigned i)
{
	unsigned first = choose(g, 3), n = 3;
	bool with_extra = choose(g, 4) == 0 || has(g, i, FAULT_DEPTH);

	put_string(g, g->tensors[i].name);
	if (has(g, i, FAULT_NOT_UTF8)) {
		g->text[g->used - 1] = '\xc3';
		put(g, "\"");
	}
	if (has(g, i, FAULT_SURROGATE)) {
		g->used--;
		put(g, choose(g, 2) ? "\\ud800\"" : "\\udfff\"");
	}
	put_mark(g, ":");
	put_mark(g, "{");
	n -= has(g, i, FAULT_FIELD_MISSING);
	for (unsigned f = 0; f < n; f++) {
		if (f)
			put_mark(g, ",");
		put_field(g, i, (first + f) % 3);
	}
	if (with_extra || has(g, i, FAULT_FIELD_TWICE))
		put_mark(g, ",");
	if (has(g, i, FAULT_FIELD_TWICE))
		put_field(g, i, first);
	else if (with_extra)
		put_field(g, i, 3);
	put_mark(g, "}");
}

static void put_metadata(struct generator *g)
{
	put_string(g, "__metadata__");
	put_mark(g, ":");
	if (g->fault == FAULT_METADATA_TYPE) {
		put(g, choose(g, 2) ? "{\"a\":1}" : "[]");
		return;
	}
	put(g, "{\"a\":\"b\"}");
}

static void put_document(struct generator *g)
{
	unsigned turn = choose(g, g->n ? g->n : 1);
	bool needs_metadata = g->fault == FAULT_METADATA_TWICE || g->fault == FAULT_METADATA_TYPE;
	unsigned n_metadata = g->fault == FAULT_METADATA_TWICE ? 2 : needs_metadata ? 1 : choose(g, 2);
	unsigned n_put = 0;

	put_mark(g, "{");
	for (unsigned i = 0; i < g->n; i++) {
		if (n_put++)
			put_mark(g, ",");
		put_tensor(g, (i + turn) % g->n);
	}
	for (unsigned i = 0; i < n_metadata; i++) {
		if (n_put++)
			put_mark(g, ",");
		put_metadata(g);
	}
	if (g->fault == FAULT_NAME_TWICE) {
		put_mark(g, ",");
		put_tensor(g, g->victim);
	}
	if (g->fault == FAULT_COMMA)
		put_mark(g, ",");
	put_mark(g, "}");
	if (g->fault == FAULT_AFTER_END)
		put(g, choose(g, 2) ? "}" : "\177");
}

static void make_tensors(struct generator *g)
{
	g->n = choose(g, MAX_TENSORS + 1);
	for (unsigned i = 0; i < g->n; i++) {
		struct tensor *t = &g->tensors[i];
		uint64_t bits;

		t->dtype = 1 + choose(g, 22);
		t->rank = choose(g, 5);
		bits = hr_dtype_bits(t->dtype);
		if (bits % 8 && t->rank == 0)
			t->rank = 1;
		for (unsigned d = 0; d < t->rank; d++) {
			t->dims[d] = choose(g, 5);
			if (d == 0 && hr_dtype_bits(t->dtype) % 8)
				t->dims[d] *= 4; /* whole bytes */
			bits *= t->dims[d];
		}
		snprintf(t->name, sizeof(t->name), choose(g, 2) ? "w.%u" : "@%u@", i);
		t->begin = g->data_bytes;
		t->end = g->data_bytes += bits / 8;
	}
}

/* Chooses a fault and a tensor to have it; none where it would be no fault. */
static void make_fault(struct generator *g)
{
	bool is_empty;

	g->fault = choose(g, 2) ? NO_FAULT : (enum fault)choose(g, N_FAULTS);
	g->victim = choose(g, g->n ? g->n : 1);
	if (g->fault == FAULT_SIZE)
		g->victim = g->n - 1;
	is_empty = g->n == 0 || g->tensors[g->victim].begin == g->tensors[g->victim].end;
	if (g->n == 0 && g->fault != FAULT_METADATA_TWICE && g->fault != FAULT_METADATA_TYPE &&
	    g->fault != FAULT_LONG && g->fault != FAULT_AFTER_END)
		g->fault = NO_FAULT;
	if ((g->fault == FAULT_OVERLAP || g->fault == FAULT_REVERSED) && is_empty)
		g->fault = NO_FAULT;
	if (g->fault == FAULT_OVERLAP && g->tensors[g->victim].begin == 0)
		g->fault = NO_FAULT;
	if (g->fault == FAULT_SHORT && g->data_bytes == 0)
		g->fault = NO_FAULT;
}

static const struct hr__hash_key key = {3, 4};

static void check_equal(const struct generator *g, const struct hr__header *header)
{
	char name[64];
	size_t n;

	fuzz_check(header->n_entries == g->n);
	for (unsigned i = 0; i < g->n; i++) {
		const struct tensor *t = &g->tensors[i];
		const struct hr__entry *found = NULL;

		n = 0;
		for (const char *c = t->name; *c; c++) {
			memcpy(name + n, *c == '@' ? "\xf0\x9f\x98\x80" : c, *c == '@' ? 4 : 1);
			n += *c == '@' ? 4 : 1;
		}
		for (size_t e = 0; e < header->n_entries; e++)
			if (header->entries[e].name_len == n && memcmp(header->entries[e].name, name, n) == 0)
				found = &header->entries[e];
		fuzz_check(found && found->dtype == t->dtype && found->rank == t->rank);
		fuzz_check(found->begin == t->begin && found->end == t->end);
		fuzz_check(memcmp(found->dims, t->dims, t->rank * sizeof(t->dims[0])) == 0);
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n)
{
	static struct generator g;
	struct hr__header header;
	uint8_t *json;
	uint64_t data_bytes;
	int rc;

	if (n < FUZZ_PREFIX)
		return 0;
	memset(&g, 0, sizeof(g));
	g.at = bytes + FUZZ_PREFIX;
	g.end = bytes + n;
	make_tensors(&g);
	make_fault(&g);
	put_document(&g);
	data_bytes = g.data_bytes + (g.fault == FAULT_LONG || g.fault == FAULT_SIZE || g.fault == FAULT_HOLE) -
		     (g.fault == FAULT_SHORT);
	json = fuzz_copy((const uint8_t *)g.text, g.used);
	fuzz_arm(bytes);
	rc = hr__header_parse(&key, json, g.used, data_bytes, &header);
	if (fuzz_fired())
		fuzz_check(rc == HR_E_NOMEM);
	else
		fuzz_check(rc == codes[g.fault]);
	free(json);
	if (rc)
		fuzz_check_error(rc, "header", 8 + g.used + data_bytes);
	else
		check_equal(&g, &header);
	hr__header_free(&header);
	return 0;
}
