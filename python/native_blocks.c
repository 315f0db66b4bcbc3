/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Model.blocks(): where tensors go if small ones share memory. Making a tensor costs a framework some microseconds, and
 * a view of memory that is there a quarter of one, if many equal ones are made by one call. So the small tensors that
 * follow one another are laid out in one block, and the block says how to cut it: in runs of equal tensors at even
 * distances, both in memory and in the order in which they were asked for.
 *
 * What always holds:
 *  - A tensor begins at a multiple of 256 bytes, as in memory of its own.
 *  - Inside a block tensors lie in the order of their numbers, which is that of the file: so neighbours are copied in
 *    one go.
 *  - Every tensor of a block is in exactly one of its runs; empty ones too.
 */
#include "native.h"

#include <string.h>

#define ALIGNMENT 256u
#define OPEN_RUNS 8

/* Equal tensors: the first begins at byte `first` and is number `at` of the block, and so on in equal steps. */
struct run {
	const struct hr_tensor *kind;
	uint64_t first, step;
	uint64_t at, stride;
	uint64_t count;
};

/* The block that is being filled. */
struct block {
	const struct native *native;
	struct hr_tensor *tensors; /* in the order asked for */
	uint64_t *starts;          /* where each begins in the block */
	uint64_t *by_number;       /* positions, sorted by the tensor's number */
	size_t n, room;
	uint64_t bytes; /* so far, paddings included */
	struct run open[OPEN_RUNS];
	unsigned n_open, next_victim;
	PyObject *runs; /* list of those that are finished */
};

static uint64_t padded(uint64_t bytes)
{
	return (bytes + ALIGNMENT - 1) & ~(uint64_t)(ALIGNMENT - 1);
}

static bool emit(struct block *block, const struct run *run)
{
	PyObject *shape = native_shape(run->kind);
	PyObject *item = shape ? Py_BuildValue("(sOKKKKK)", hr_dtype_name(run->kind->dtype), shape,
					       (unsigned long long)run->first, (unsigned long long)run->step,
					       (unsigned long long)run->at, (unsigned long long)run->stride,
					       (unsigned long long)run->count)
			       : NULL;
	bool good = item && PyList_Append(block->runs, item) == 0;

	Py_XDECREF(item);
	Py_XDECREF(shape);
	return good;
}

static bool same_kind(const struct hr_tensor *a, const struct hr_tensor *b)
{
	return a->dtype == b->dtype && a->rank == b->rank &&
	       (!a->rank || !memcmp(a->dims, b->dims, a->rank * sizeof(*a->dims)));
}

/* Whether the tensor at byte `start`, number `at`, goes on with the run; then it is part of it. */
static bool extend(struct run *run, uint64_t start, uint64_t at)
{
	uint64_t last = run->first + (run->count - 1) * run->step;
	uint64_t step = start - last, stride = at - (run->at + (run->count - 1) * run->stride);

	if (start < last || (run->count > 1 && (step != run->step || stride != run->stride)))
		return false;
	run->step = step;
	run->stride = stride;
	run->count++;
	return true;
}

static bool add_to_runs(struct block *block, size_t i)
{
	const struct run fresh = {&block->tensors[i], block->starts[i], 0, i, 1, 1};
	struct run *place = NULL;

	for (unsigned k = 0; k < block->n_open && !place; k++) {
		if (same_kind(block->open[k].kind, fresh.kind))
			place = &block->open[k];
	}
	if (place && extend(place, fresh.first, i))
		return true;
	if (!place && block->n_open < OPEN_RUNS) {
		block->open[block->n_open++] = fresh;
		return true;
	}
	if (!place)
		place = &block->open[block->next_victim++ % OPEN_RUNS];
	if (!emit(block, place))
		return false;
	*place = fresh;
	return true;
}

/* One step of a merge sort of positions, by the number of their tensor. */
static void merge(const struct block *block, uint64_t *to, const uint64_t *from, size_t low, size_t middle, size_t high)
{
	size_t left = low, right = middle;

	for (size_t i = low; i < high; i++) {
		bool take_left = right >= high || (left < middle && block->tensors[from[left]].index <=
									    block->tensors[from[right]].index);

		to[i] = take_left ? from[left++] : from[right++];
	}
}

static bool sort_by_number(struct block *block)
{
	bool sorted = true;
	uint64_t *other;

	for (size_t i = 0; i < block->n; i++) {
		block->by_number[i] = i;
		sorted = sorted && (!i || block->tensors[i - 1].index <= block->tensors[i].index);
	}
	if (sorted)
		return true;
	other = PyMem_Calloc(block->n, sizeof(*other));
	if (!other)
		return PyErr_NoMemory() != NULL;
	for (size_t width = 1; width < block->n; width *= 2) {
		for (size_t low = 0; low < block->n; low += 2 * width) {
			size_t middle = low + width < block->n ? low + width : block->n;
			size_t high = low + 2 * width < block->n ? low + 2 * width : block->n;

			merge(block, other, block->by_number, low, middle, high);
		}
		memcpy(block->by_number, other, block->n * sizeof(*other));
	}
	PyMem_Free(other);
	return true;
}

/* Pairs (number, byte in the block) of those that have bytes, as a bytes object. */
static PyObject *places_of(struct block *block)
{
	struct native_place *places = PyMem_Calloc(block->n ? block->n : 1, sizeof(*places));
	PyObject *made;
	uint64_t start = 0;
	size_t n = 0;

	if (!places)
		return PyErr_NoMemory();
	for (size_t i = 0; i < block->n; i++) {
		const struct hr_tensor *tensor = &block->tensors[block->by_number[i]];

		block->starts[block->by_number[i]] = start;
		if (tensor->bytes)
			places[n++] = (struct native_place){tensor->index, start};
		start += padded(tensor->bytes);
	}
	made = PyBytes_FromStringAndSize((const char *)places, (Py_ssize_t)(n * sizeof(*places)));
	PyMem_Free(places);
	return made;
}

static PyObject *names_of(const struct block *block)
{
	PyObject *names = PyList_New((Py_ssize_t)block->n);

	for (size_t i = 0; names && i < block->n; i++) {
		PyObject *name = native_name(&block->tensors[i]);

		if (!name || PyList_SetItem(names, (Py_ssize_t)i, name) < 0)
			Py_CLEAR(names);
	}
	return names;
}

/* Appends the block to `list`, and begins the next one. */
static bool finish(struct block *block, PyObject *list)
{
	PyObject *places, *names, *item = NULL;
	bool good;

	if (!block->n)
		return true;
	block->runs = PyList_New(0);
	good = block->runs && sort_by_number(block);
	places = good ? places_of(block) : NULL;
	names = places ? names_of(block) : NULL;
	good = names != NULL;
	for (size_t i = 0; good && i < block->n; i++)
		good = add_to_runs(block, i);
	for (unsigned k = 0; good && k < block->n_open; k++)
		good = emit(block, &block->open[k]);
	if (good)
		item = Py_BuildValue("(KOOO)", (unsigned long long)block->bytes, names, places, block->runs);
	good = item && PyList_Append(list, item) == 0;
	Py_XDECREF(item);
	Py_XDECREF(names);
	Py_XDECREF(places);
	Py_CLEAR(block->runs);
	block->n = block->n_open = 0;
	block->bytes = 0;
	return good;
}

static bool grow(struct block *block)
{
	size_t room = block->room ? 2 * block->room : 256;
	struct hr_tensor *tensors = PyMem_Realloc(block->tensors, room * sizeof(*tensors));
	uint64_t *starts, *by_number;

	block->tensors = tensors ? tensors : block->tensors;
	starts = tensors ? PyMem_Realloc(block->starts, room * sizeof(*starts)) : NULL;
	block->starts = starts ? starts : block->starts;
	by_number = starts ? PyMem_Realloc(block->by_number, room * sizeof(*by_number)) : NULL;
	block->by_number = by_number ? by_number : block->by_number;
	if (!by_number)
		return PyErr_NoMemory() != NULL;
	block->room = room;
	return true;
}

struct limits {
	unsigned long long small, block;
};

static bool add(struct block *block, const struct hr_tensor *tensor, const struct limits *limits, PyObject *list)
{
	bool alone = tensor->bytes >= limits->small;

	if ((alone || block->bytes + padded(tensor->bytes) > limits->block) && !finish(block, list))
		return false;
	if (block->n == block->room && !grow(block))
		return false;
	block->tensors[block->n++] = *tensor;
	block->bytes += padded(tensor->bytes);
	return !alone || finish(block, list);
}

/* The tensor at place `i` of what was asked for: of all, or of the list. */
static bool nth(const struct native *native, const hr_model *model, PyObject *list, uint64_t i, struct hr_tensor *out)
{
	if (list && !native_tensor_number(native, model, PyList_GetItem(list, (Py_ssize_t)i), &i))
		return false;
	if (hr_model_tensor(model, i, out) == 0)
		return true;
	native_fail(native);
	return false;
}

static PyObject *all_blocks(struct native *native, const hr_model *model, PyObject *wanted, const struct limits *limits)
{
	uint64_t n = wanted ? (uint64_t)PyList_Size(wanted) : hr_model_n_tensors(model);
	struct block block = {.native = native};
	PyObject *list = PyList_New(0);
	bool good = list != NULL;

	for (uint64_t i = 0; good && i < n; i++) {
		struct hr_tensor tensor = HR_TENSOR_INIT;

		good = nth(native, model, wanted, i, &tensor) && add(&block, &tensor, limits, list);
	}
	good = good && finish(&block, list);
	PyMem_Free(block.tensors);
	PyMem_Free(block.starts);
	PyMem_Free(block.by_number);
	if (!good)
		Py_CLEAR(list);
	return list;
}

PyObject *native_model_blocks(struct model_object *self, PyObject *args, PyObject *kwargs)
{
	static char *keywords[] = {"names", "small_bytes", "block_bytes", NULL};
	PyObject *names = Py_None, *list = NULL, *made = NULL;
	struct limits limits = {1u << 20, 16u << 20};
	hr_model *model;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O$KK:blocks", keywords, &names, &limits.small, &limits.block))
		return NULL;
	if (PyUnicode_Check(names))
		return PyErr_Format(PyExc_TypeError, "names is a list of names, not a name: [%R]", names);
	model = native_model(self->native, (PyObject *)self);
	if (!model)
		return NULL;
	if (names != Py_None)
		list = PySequence_List(names);
	if (names == Py_None || list)
		made = all_blocks(self->native, model, list, &limits);
	Py_XDECREF(list);
	hr_model_close(model);
	return made;
}

bool native_block_reads(PyObject *item, struct native_reads *reads)
{
	unsigned long long address, room;
	const char *bytes;
	Py_ssize_t size;

	if (!PyArg_ParseTuple(item, "y#KK", &bytes, &size, &address, &room))
		return false;
	for (Py_ssize_t i = 0; i + (Py_ssize_t)sizeof(struct native_place) <= size;
	     i += (Py_ssize_t)sizeof(struct native_place)) {
		struct native_place place;
		struct hr_read *read = native_reads_add(reads);

		if (!read)
			return false;
		memcpy(&place, bytes + i, sizeof(place));
		if (place.start > room) {
			PyErr_Format(PyExc_ValueError, "a block of %llu bytes has no byte %llu", room,
				     (unsigned long long)place.start);
			return false;
		}
		*read = (struct hr_read){place.number, 0, UINT64_MAX, (void *)(uintptr_t)(address + place.start),
					 room - place.start};
	}
	return true;
}
