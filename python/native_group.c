/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Group and Lease: tensors that are resident together, and the right to use them until release.
 *
 * A Lease holds one count of the group's buffer, and that count is what pins the group in its cache. Each Array that it
 * hands out holds one more; so memory that somebody can still see is never used for something else, whatever is
 * released in which order.
 */
#include "native.h"

#include <string.h>

struct group_object {
	PyObject_HEAD struct native *native;
	hr_group *group;
	hr_model *model;
	PyObject *names; /* tuple of str, in the order given */
};

struct lease_object {
	PyObject_HEAD struct native *native;
	struct group_object *group;
	hr_buffer *buffer; /* NULL after release() */
	PyObject *tensors; /* dict of Array, made when first asked for */
	char device_name[16];
};

/* ---------------------------------------------------------------------------------------------------------- group */

static uint64_t *numbers_of(const struct native *native, const hr_model *model, PyObject *names)
{
	Py_ssize_t n = PyTuple_Size(names);
	uint64_t *numbers = PyMem_Calloc(n ? (size_t)n : 1, sizeof(*numbers));

	if (!numbers) {
		PyErr_NoMemory();
		return NULL;
	}
	for (Py_ssize_t i = 0; i < n; i++) {
		if (!native_tensor_number(native, model, PyTuple_GetItem(names, i), &numbers[i])) {
			PyMem_Free(numbers);
			return NULL;
		}
	}
	return numbers;
}

/* The names of the tensors as str, whatever they were asked for by. */
static PyObject *names_of(const struct native *native, const hr_model *model, const uint64_t *numbers, Py_ssize_t n)
{
	PyObject *names = PyTuple_New(n);

	for (Py_ssize_t i = 0; names && i < n; i++) {
		struct hr_tensor tensor = HR_TENSOR_INIT;
		PyObject *name;

		hr_model_tensor(model, numbers[i], &tensor);
		name = PyUnicode_DecodeUTF8(tensor.name, (Py_ssize_t)tensor.name_len, "surrogatepass");
		if (!name || PyTuple_SetItem(names, i, name) < 0) {
			native_fail_with(native, HR_E_NOMEM, "out of memory");
			Py_CLEAR(names);
		}
	}
	return names;
}

/* A tuple of what was asked for: a name alone stands for a list of one. */
static PyObject *tuple_of(PyObject *names)
{
	if (PyUnicode_Check(names) || PyLong_Check(names))
		return PyTuple_Pack(1, names);
	return PySequence_Tuple(names);
}

PyObject *native_group(const struct native *native, PyObject *model_object, PyObject *names)
{
	struct group_object *self = NULL;
	hr_model *model = native_model(native, model_object);
	PyObject *tuple = model ? tuple_of(names) : NULL;
	uint64_t *numbers = tuple ? numbers_of(native, model, tuple) : NULL;
	size_t n = numbers ? (size_t)PyTuple_Size(tuple) : 0;
	hr_group *group = NULL;

	if (numbers && hr_group_new(model, numbers, n, &group) != 0)
		native_fail(native);
	else if (numbers)
		self = PyObject_New(struct group_object, native->group_type);
	if (self) {
		self->native = (struct native *)native;
		self->group = group;
		self->model = model;
		self->names = names_of(native, model, numbers, (Py_ssize_t)n);
		if (!self->names)
			Py_CLEAR(self);
	} else {
		hr_group_release(group);
		hr_model_close(model);
	}
	PyMem_Free(numbers);
	Py_XDECREF(tuple);
	return (PyObject *)self;
}

hr_group *native_group_handle(const struct native *native, PyObject *object)
{
	if (Py_TYPE(object) == native->group_type)
		return ((struct group_object *)object)->group;
	PyErr_Format(PyExc_TypeError, "expected a headrace.Group, not %R", object);
	return NULL;
}

static void group_dealloc(struct group_object *self)
{
	PyTypeObject *type = Py_TYPE((PyObject *)self);

	hr_group_release(self->group);
	hr_model_close(self->model);
	Py_XDECREF(self->names);
	PyObject_Free(self);
	Py_DECREF(type);
}

static PyObject *get_names(struct group_object *self, void *unused)
{
	(void)unused;
	return Py_NewRef(self->names);
}

static PyObject *get_offsets(struct group_object *self, void *unused)
{
	size_t n = hr_group_n_tensors(self->group);
	PyObject *offsets = PyTuple_New((Py_ssize_t)n);

	(void)unused;
	for (size_t i = 0; offsets && i < n; i++) {
		uint64_t tensor = 0, offset = 0;
		PyObject *number;

		hr_group_tensor(self->group, i, &tensor, &offset);
		number = PyLong_FromUnsignedLongLong(offset);
		if (!number || PyTuple_SetItem(offsets, (Py_ssize_t)i, number) < 0)
			Py_CLEAR(offsets);
	}
	return offsets;
}

static PyObject *group_nbytes(struct group_object *self, void *unused)
{
	(void)unused;
	return PyLong_FromUnsignedLongLong(hr_group_bytes(self->group));
}

static PyObject *get_id(struct group_object *self, void *unused)
{
	(void)unused;
	return PyLong_FromUnsignedLongLong(hr_group_id(self->group));
}

static PyObject *group_repr(struct group_object *self)
{
	PyObject *first = PyTuple_Size(self->names) ? PyTuple_GetItem(self->names, 0) : Py_None;

	return PyUnicode_FromFormat("<headrace.Group of %zd tensors from %R on>", PyTuple_Size(self->names), first);
}

static PyGetSetDef group_properties[] = {
	{"names", (getter)get_names, NULL, "Tuple of its tensors' names.", NULL},
	{"offsets", (getter)get_offsets, NULL, "Tuple: where each of them begins in the group's memory.", NULL},
	{"nbytes", (getter)group_nbytes, NULL, "Size of the group's memory.", NULL},
	{"id", (getter)get_id, NULL, "Its number, unique in the process: what events call it.", NULL},
	{NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot group_slots[] = {
	{Py_tp_dealloc, (void *)(uintptr_t)group_dealloc},
	{Py_tp_repr, (void *)(uintptr_t)group_repr},
	{Py_tp_getset, group_properties},
	{Py_tp_doc,
	 "Tensors of one model that a Cache brings in and evicts together: a layer, or one tensor. They lie in one piece of memory,\n"
	 "each at a multiple of 256 bytes. Cache.group() makes it."},
	{0, NULL},
};

PyType_Spec native_group_spec = {
	.name = "headrace.Group",
	.basicsize = sizeof(struct group_object),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
	.slots = group_slots,
};

/* ---------------------------------------------------------------------------------------------------------- lease */

PyObject *native_lease(const struct native *native, PyObject *group, hr_buffer *buffer, const char *device)
{
	struct lease_object *self = PyObject_New(struct lease_object, native->lease_type);

	if (!self) {
		hr_buffer_release(buffer);
		return NULL;
	}
	self->native = (struct native *)native;
	self->group = (struct group_object *)Py_NewRef(group);
	self->buffer = buffer;
	self->tensors = NULL;
	memcpy(self->device_name, device, sizeof(self->device_name));
	return (PyObject *)self;
}

static void lease_dealloc(struct lease_object *self)
{
	PyTypeObject *type = Py_TYPE((PyObject *)self);

	Py_XDECREF(self->tensors);
	hr_buffer_release(self->buffer);
	Py_DECREF((PyObject *)self->group);
	PyObject_Free(self);
	Py_DECREF(type);
}

static bool is_held(const struct lease_object *self)
{
	if (self->buffer)
		return true;
	PyErr_SetString(PyExc_ValueError, "the lease was released: get the group again");
	return false;
}

static PyObject *array_of(const struct lease_object *self, size_t i)
{
	struct hr_tensor tensor = HR_TENSOR_INIT;
	struct array_part part = {.is_shared = true};
	uint64_t number = 0;

	if (hr_group_tensor(self->group->group, i, &number, &part.offset) != 0 ||
	    hr_model_tensor(self->group->model, number, &tensor) != 0)
		return native_fail(self->native);
	return native_array_part(self->native, &tensor, hr_buffer_acquire(self->buffer), self->device_name, &part);
}

static PyObject *get_tensors(struct lease_object *self, void *unused)
{
	size_t n = hr_group_n_tensors(self->group->group);
	PyObject *dict;

	(void)unused;
	if (!is_held(self))
		return NULL;
	if (self->tensors)
		return Py_NewRef(self->tensors);
	dict = PyDict_New();
	for (size_t i = 0; dict && i < n; i++) {
		PyObject *array = array_of(self, i);

		if (!array || PyDict_SetItem(dict, PyTuple_GetItem(self->group->names, (Py_ssize_t)i), array) < 0)
			Py_CLEAR(dict);
		Py_XDECREF(array);
	}
	self->tensors = dict ? Py_NewRef(dict) : NULL;
	return dict;
}

/* All of it as one array of bytes, for those who make their own views and see to it that nobody writes. */
static PyObject *get_memory(struct lease_object *self, void *unused)
{
	uint64_t bytes;
	struct hr_tensor tensor = HR_TENSOR_INIT;

	(void)unused;
	if (!is_held(self))
		return NULL;
	bytes = hr_buffer_bytes(self->buffer);
	tensor.dtype = HR_DTYPE_U8;
	tensor.rank = 1;
	tensor.dims = &bytes;
	tensor.bytes = bytes;
	return native_array(self->native, &tensor, hr_buffer_acquire(self->buffer), self->device_name);
}

static PyObject *lease_group(struct lease_object *self, void *unused)
{
	(void)unused;
	return Py_NewRef((PyObject *)self->group);
}

static PyObject *release_on(struct lease_object *self, void *stream)
{
	hr_buffer *buffer = self->buffer;

	if (!buffer)
		Py_RETURN_NONE;
	Py_CLEAR(self->tensors);
	if (!stream)
		hr_buffer_release(buffer);
	else if (hr_buffer_release_on(buffer, stream) != 0)
		return native_fail(self->native);
	self->buffer = NULL;
	Py_RETURN_NONE;
}

static PyObject *release(struct lease_object *self, PyObject *args, PyObject *kwargs)
{
	static char *keywords[] = {"stream", NULL};
	unsigned long long stream = 0;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|K:release", keywords, &stream))
		return NULL;
	return release_on(self, (void *)(uintptr_t)stream);
}

static PyObject *enter(PyObject *self, PyObject *unused)
{
	(void)unused;
	return Py_NewRef(self);
}

static PyObject *leave(struct lease_object *self, PyObject *unused)
{
	(void)unused;
	return release_on(self, NULL);
}

static PyMethodDef lease_methods[] = {
	{"release", (PyCFunction)(void (*)(void))release, METH_VARARGS | METH_KEYWORDS,
	 "release($self, stream=0)\n--\n\n"
	 "Gives the group back. Arrays of it that are still there keep it in memory as long as they live.\n\n"
	 "stream: CUDA stream, as int: the memory is used again only after what is queued there now. 0: nothing is queued."},
	{"__enter__", enter, METH_NOARGS, NULL},
	{"__exit__", (PyCFunction)(void (*)(void))leave, METH_VARARGS, NULL},
	{NULL, NULL, 0, NULL},
};

static PyGetSetDef lease_properties[] = {
	{"tensors", (getter)get_tensors, NULL, "Dict of the group's tensors: name to Array.", NULL},
	{"memory", (getter)get_memory, NULL, "All the group's memory as one Array of bytes.", NULL},
	{"group", (getter)lease_group, NULL, "What it holds.", NULL},
	{NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot lease_slots[] = {
	{Py_tp_dealloc, (void *)(uintptr_t)lease_dealloc},
	{Py_tp_methods, lease_methods},
	{Py_tp_getset, lease_properties},
	{Py_tp_doc,
	 "The right to use a group: it stays in memory until release(), or the end of a with. Do not write into it."},
	{0, NULL},
};

PyType_Spec native_lease_spec = {
	.name = "headrace.Lease",
	.basicsize = sizeof(struct lease_object),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
	.slots = lease_slots,
};
