/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Model: a checkpoint whose headers have been read and checked. The handle is immutable and counted, so each call
 * takes a reference of its own, and close() in one thread never pulls it away under another.
 */
#include "native.h"

#include <string.h>

/* ----------------------------------------------------------------------------------------------------------
 * descriptions */

static PyStructSequence_Field tensor_fields[] = {
	{"name", "as the header spells it"},
	{"dtype", "\"BF16\", \"F32\" ..., as the format spells it"},
	{"shape", "tuple of int; row-major"},
	{"nbytes", "payload in bytes"},
	{"shard", "number of its shard"},
	{"offset", "of its first byte in the shard"},
	{"listed", "False if the index names its shard, but not this tensor"},
	{"index", "its number in the model"},
	{NULL, NULL},
};
static PyStructSequence_Desc tensor_desc = {"headrace.TensorInfo", "A tensor, as its shard's header describes it.",
					    tensor_fields, 7};

static PyStructSequence_Field shard_fields[] = {
	{"path", "as opened"},
	{"nbytes", "whole file"},
	{"data_offset", "where the header ends and data begins"},
	{"n_tensors", "that its header lists"},
	{NULL, NULL},
};
static PyStructSequence_Desc shard_desc = {"headrace.ShardInfo", "A shard: one file of a model.", shard_fields, 4};

static bool add_sequence(PyObject *module, PyTypeObject **out, PyStructSequence_Desc *desc)
{
	*out = PyStructSequence_NewType(desc);
	return *out && PyModule_AddType(module, *out) == 0;
}

bool native_model_types(struct native *native, PyObject *module)
{
	return add_sequence(module, &native->tensor_type, &tensor_desc) &&
	       add_sequence(module, &native->shard_type, &shard_desc);
}

static PyObject *decode(const char *bytes, size_t length)
{
	return PyUnicode_DecodeUTF8(bytes, (Py_ssize_t)length, "surrogatepass");
}

PyObject *native_name(const struct hr_tensor *tensor)
{
	return decode(tensor->name, tensor->name_len);
}

PyObject *native_shape(const struct hr_tensor *tensor)
{
	PyObject *shape = PyTuple_New((Py_ssize_t)tensor->rank);

	for (uint32_t i = 0; shape && i < tensor->rank; i++) {
		PyObject *dim = PyLong_FromUnsignedLongLong(tensor->dims[i]);

		if (!dim || PyTuple_SetItem(shape, (Py_ssize_t)i, dim) < 0)
			Py_CLEAR(shape);
	}
	return shape;
}

/* Fills a struct sequence; takes the values over, and fails if one of them is NULL. */
static PyObject *sequence_of(PyTypeObject *type, PyObject **values, size_t n)
{
	PyObject *sequence = PyStructSequence_New(type);
	bool good = sequence != NULL;

	for (size_t i = 0; i < n; i++) {
		good = good && values[i];
		if (sequence)
			PyStructSequence_SetItem(sequence, (Py_ssize_t)i, values[i] ? values[i] : Py_NewRef(Py_None));
		else
			Py_XDECREF(values[i]);
	}
	if (!good)
		Py_CLEAR(sequence);
	return sequence;
}

PyObject *native_tensor_info(const struct native *native, const struct hr_tensor *tensor)
{
	PyObject *values[] = {
		decode(tensor->name, tensor->name_len),
		PyUnicode_InternFromString(hr_dtype_name(tensor->dtype)),
		native_shape(tensor),
		PyLong_FromUnsignedLongLong(tensor->bytes),
		PyLong_FromUnsignedLong(tensor->shard),
		PyLong_FromUnsignedLongLong(tensor->offset),
		PyBool_FromLong(!(tensor->flags & HR_TENSOR_UNLISTED)),
		PyLong_FromUnsignedLongLong(tensor->index),
	};

	return sequence_of(native->tensor_type, values, sizeof(values) / sizeof(values[0]));
}

/* ---------------------------------------------------------------------------------------------------------------
 * opening */

/* The bytes objects of a list of paths, or NULL with an exception. */
static PyObject *paths_of(PyObject *source)
{
	PyObject *sequence = PySequence_List(source);
	PyObject *list = sequence ? PyList_New(0) : NULL;

	for (Py_ssize_t i = 0; list && i < PyList_Size(sequence); i++) {
		PyObject *bytes = NULL;

		if (!PyUnicode_FSConverter(PyList_GetItem(sequence, i), &bytes) || PyList_Append(list, bytes) < 0)
			Py_CLEAR(list);
		Py_XDECREF(bytes);
	}
	Py_XDECREF(sequence);
	return list;
}

static int open_list(PyObject *list, const struct hr_model_opts *opts, hr_model **out)
{
	size_t n = (size_t)PyList_Size(list);
	const char **paths = PyMem_Calloc(n ? n : 1, sizeof(*paths));
	int rc = HR_E_NOMEM;

	*out = NULL;
	for (size_t i = 0; paths && i < n; i++)
		paths[i] = PyBytes_AsString(PyList_GetItem(list, (Py_ssize_t)i));
	if (paths) {
		Py_BEGIN_ALLOW_THREADS rc = hr_model_open_files(paths, n, opts, out);
		Py_END_ALLOW_THREADS
	}
	PyMem_Free(paths);
	return rc;
}

static int open_name(PyObject *bytes, const struct hr_model_opts *opts, hr_model **out)
{
	const char *name = PyBytes_AsString(bytes);
	int rc;

	Py_BEGIN_ALLOW_THREADS rc = hr_model_open(name, opts, out);
	Py_END_ALLOW_THREADS return rc;
}

PyObject *native_open(PyObject *module, PyObject *args, PyObject *kwargs)
{
	static char *keywords[] = {"source", "no_symlinks", "ugds", NULL};
	struct native *native = PyModule_GetState(module);
	struct hr_model_opts opts = HR_MODEL_OPTS_INIT;
	struct model_object *self;
	PyObject *source, *held = NULL;
	hr_model *model = NULL;
	int no_symlinks = 0, rc;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|$pz:open", keywords, &source, &no_symlinks, &opts.ugds))
		return NULL;
	native_unpark(native);
	opts.flags = no_symlinks ? HR_MODEL_NO_SYMLINKS : 0;
	if (PyList_Check(source) || PyTuple_Check(source)) {
		held = paths_of(source);
		rc = held ? open_list(held, &opts, &model) : 0;
	} else {
		rc = PyUnicode_FSConverter(source, &held) ? open_name(held, &opts, &model) : 0;
	}
	Py_XDECREF(held);
	if (rc == HR_E_NOMEM && !PyErr_Occurred())
		return PyErr_NoMemory();
	if (rc)
		return native_fail(native);
	if (!model)
		return NULL;
	self = PyObject_New(struct model_object, native->model_type);
	if (!self) {
		hr_model_close(model);
		return NULL;
	}
	self->native = native;
	self->model = model;
	self->names = self->tensors = NULL;
	return (PyObject *)self;
}

static void dealloc(struct model_object *self)
{
	PyTypeObject *type = Py_TYPE((PyObject *)self);

	hr_model_close(self->model);
	Py_XDECREF(self->names);
	Py_XDECREF(self->tensors);
	PyObject_Free(self);
	Py_DECREF(type);
}

hr_model *native_model(const struct native *native, PyObject *object)
{
	struct model_object *self = (struct model_object *)object;

	if (!PyObject_TypeCheck(object, native->model_type)) {
		PyErr_Format(PyExc_TypeError, "%R is not a headrace.Model: open one with headrace.open()", object);
		return NULL;
	}
	if (!self->model) {
		PyErr_SetString(PyExc_ValueError, "the model is closed");
		return NULL;
	}
	return hr_model_acquire(self->model);
}

bool native_tensor_number(const struct native *native, const hr_model *model, PyObject *key, uint64_t *index)
{
	struct hr_tensor tensor = HR_TENSOR_INIT;
	const char *name;
	Py_ssize_t length;
	int rc;

	if (PyUnicode_Check(key)) {
		name = PyUnicode_AsUTF8AndSize(key, &length);
		if (!name)
			return false;
		rc = hr_model_find(model, name, (size_t)length, index);
	} else {
		*index = PyLong_AsUnsignedLongLong(key);
		if (*index == UINT64_MAX && PyErr_Occurred())
			return false;
		rc = hr_model_tensor(model, *index, &tensor);
	}
	if (rc)
		native_fail(native);
	return rc == 0;
}

/* ---------------------------------------------------------------------------------------------------------------
 * methods */

/* One description of each tensor, made once. */
static PyObject *all_tensors(struct model_object *self, hr_model *model)
{
	PyObject *list;

	if (self->tensors)
		return self->tensors;
	list = PyList_New(0);
	for (uint64_t i = 0; list && i < hr_model_n_tensors(model); i++) {
		struct hr_tensor tensor = HR_TENSOR_INIT;
		PyObject *info = NULL;

		if (hr_model_tensor(model, i, &tensor))
			native_fail(self->native);
		else
			info = native_tensor_info(self->native, &tensor);
		if (!info || PyList_Append(list, info) < 0)
			Py_CLEAR(list);
		Py_XDECREF(info);
	}
	self->tensors = list;
	return list;
}

static PyObject *get_tensors(struct model_object *self, void *unused)
{
	hr_model *model = native_model(self->native, (PyObject *)self);
	PyObject *list;

	(void)unused;
	if (!model)
		return NULL;
	list = all_tensors(self, model);
	hr_model_close(model);
	return list ? PySequence_List(list) : NULL;
}

static PyObject *all_names(struct model_object *self, const hr_model *model)
{
	PyObject *list;

	if (self->names)
		return self->names;
	list = PyList_New(0);
	for (uint64_t i = 0; list && i < hr_model_n_tensors(model); i++) {
		struct hr_tensor tensor = HR_TENSOR_INIT;
		PyObject *name = NULL;

		if (hr_model_tensor(model, i, &tensor))
			native_fail(self->native);
		else
			name = decode(tensor.name, tensor.name_len);
		if (!name || PyList_Append(list, name) < 0)
			Py_CLEAR(list);
		Py_XDECREF(name);
	}
	self->names = list;
	return list;
}

static PyObject *get_names(struct model_object *self, void *unused)
{
	hr_model *model = native_model(self->native, (PyObject *)self);
	PyObject *list;

	(void)unused;
	if (!model)
		return NULL;
	list = all_names(self, model);
	hr_model_close(model);
	return list ? PySequence_List(list) : NULL;
}

static PyObject *get_shards(struct model_object *self, void *unused)
{
	hr_model *model = native_model(self->native, (PyObject *)self);
	PyObject *list = model ? PyList_New(0) : NULL;

	(void)unused;
	for (uint32_t i = 0; list && i < hr_model_n_shards(model); i++) {
		struct hr_shard shard = HR_SHARD_INIT;
		PyObject *made = NULL;

		if (hr_model_shard(model, i, &shard)) {
			native_fail(self->native);
		} else {
			PyObject *values[] = {PyUnicode_DecodeFSDefault(shard.path),
					      PyLong_FromUnsignedLongLong(shard.bytes),
					      PyLong_FromUnsignedLongLong(shard.data_offset),
					      PyLong_FromUnsignedLongLong(shard.n_tensors)};

			made = sequence_of(self->native->shard_type, values, 4);
		}
		if (!made || PyList_Append(list, made) < 0)
			Py_CLEAR(list);
		Py_XDECREF(made);
	}
	hr_model_close(model);
	return list;
}

static PyObject *get_warnings(struct model_object *self, void *unused)
{
	hr_model *model = native_model(self->native, (PyObject *)self);
	PyObject *list = model ? PyList_New(0) : NULL;

	(void)unused;
	for (size_t i = 0; list && hr_model_warning(model, i); i++) {
		const char *warning = hr_model_warning(model, i);
		PyObject *made = PyUnicode_DecodeUTF8(warning, (Py_ssize_t)strlen(warning), "backslashreplace");

		if (!made || PyList_Append(list, made) < 0)
			Py_CLEAR(list);
		Py_XDECREF(made);
	}
	hr_model_close(model);
	return list;
}

static PyObject *get_closed(struct model_object *self, void *unused)
{
	(void)unused;
	return PyBool_FromLong(!self->model);
}

static PyObject *tensor(struct model_object *self, PyObject *key)
{
	struct hr_tensor found = HR_TENSOR_INIT;
	hr_model *model = native_model(self->native, (PyObject *)self);
	PyObject *info = NULL;
	uint64_t index;

	if (!model)
		return NULL;
	if (native_tensor_number(self->native, model, key, &index)) {
		if (hr_model_tensor(model, index, &found))
			native_fail(self->native);
		else
			info = native_tensor_info(self->native, &found);
	}
	hr_model_close(model);
	return info;
}

/* A tensor in place. */
static PyObject *map(struct model_object *self, PyObject *args, PyObject *kwargs)
{
	static char *keywords[] = {"name", "populate", "ahead", NULL};
	struct hr_map_opts opts = HR_MAP_OPTS_INIT;
	struct hr_tensor tensor = HR_TENSOR_INIT;
	PyObject *key, *array = NULL;
	hr_buffer *buffer = NULL;
	int populate = 0, ahead = 0, rc;
	hr_model *model;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|$pp:map", keywords, &key, &populate, &ahead))
		return NULL;
	opts.flags = (populate ? HR_MAP_POPULATE : 0) | (ahead ? HR_MAP_AHEAD : 0);
	model = native_model(self->native, (PyObject *)self);
	if (!model)
		return NULL;
	if (native_tensor_number(self->native, model, key, &tensor.index)) {
		Py_BEGIN_ALLOW_THREADS rc = hr_map(model, tensor.index, &opts, &buffer);
		if (!rc)
			hr_model_tensor(model, tensor.index, &tensor);
		Py_END_ALLOW_THREADS array = rc ? native_fail(self->native)
						: native_array(self->native, &tensor, buffer, "cpu");
	}
	hr_model_close(model);
	return array;
}

static PyObject *metadata(struct model_object *self, PyObject *args, PyObject *kwargs)
{
	static char *keywords[] = {"shard", NULL};
	struct hr_shard info = HR_SHARD_INIT;
	hr_model *model;
	PyObject *dict = NULL;
	unsigned shard = 0;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|I:metadata", keywords, &shard))
		return NULL;
	model = native_model(self->native, (PyObject *)self);
	if (!model)
		return NULL;
	if (hr_model_shard(model, shard, &info))
		native_fail(self->native);
	else
		dict = PyDict_New();
	for (uint64_t i = 0; dict && i < info.n_metadata; i++) {
		const char *key, *value;
		size_t key_len, value_len;
		PyObject *k = NULL, *v = NULL;

		if (hr_model_metadata(model, shard, i, &key, &key_len, &value, &value_len)) {
			native_fail(self->native);
		} else {
			k = decode(key, key_len);
			v = decode(value, value_len);
		}
		if (!k || !v || PyDict_SetItem(dict, k, v) < 0)
			Py_CLEAR(dict);
		Py_XDECREF(k);
		Py_XDECREF(v);
	}
	hr_model_close(model);
	return dict;
}

static PyObject *read_shard(struct model_object *self, PyObject *args)
{
	unsigned long long offset;
	Py_ssize_t length;
	PyObject *bytes;
	hr_model *model;
	unsigned shard;
	char *to;
	int rc;

	if (!PyArg_ParseTuple(args, "IKn:read_shard", &shard, &offset, &length))
		return NULL;
	bytes = PyBytes_FromStringAndSize(NULL, length);
	model = bytes ? native_model(self->native, (PyObject *)self) : NULL;
	if (!model) {
		Py_XDECREF(bytes);
		return NULL;
	}
	to = PyBytes_AsString(bytes);
	Py_BEGIN_ALLOW_THREADS rc = hr_model_read_shard(model, shard, offset, to, (size_t)length);
	hr_model_close(model);
	Py_END_ALLOW_THREADS if (!rc) return bytes;
	Py_DECREF(bytes);
	return native_fail(self->native);
}

/* Where bytes of a tensor are in its shard, or false with an exception. */
static bool find_part(const struct model_object *self, const hr_model *model, PyObject *key, uint64_t offset,
		      uint64_t length, struct hr_tensor *tensor)
{
	uint64_t number;

	if (!native_tensor_number(self->native, model, key, &number))
		return false;
	if (hr_model_tensor(model, number, tensor)) {
		native_fail(self->native);
		return false;
	}
	if (offset <= tensor->bytes && length <= tensor->bytes - offset)
		return true;
	PyErr_Format(PyExc_ValueError, "bytes %llu to %llu are asked for, and the tensor has %llu",
		     (unsigned long long)offset, (unsigned long long)(offset + length),
		     (unsigned long long)tensor->bytes);
	return false;
}

static PyObject *read_part(struct model_object *self, PyObject *args)
{
	struct hr_tensor tensor = HR_TENSOR_INIT;
	unsigned long long offset;
	PyObject *key, *bytes = NULL;
	Py_ssize_t length;
	hr_model *model;
	char *to;
	int rc = 0;

	if (!PyArg_ParseTuple(args, "OKn:read_part", &key, &offset, &length))
		return NULL;
	model = native_model(self->native, (PyObject *)self);
	if (!model)
		return NULL;
	if (find_part(self, model, key, offset, (uint64_t)length, &tensor))
		bytes = PyByteArray_FromStringAndSize(NULL, length);
	if (bytes && length) {
		to = PyByteArray_AsString(bytes);
		Py_BEGIN_ALLOW_THREADS rc = hr_model_read_shard(model, tensor.shard, tensor.offset + offset, to,
								(size_t)length);
		Py_END_ALLOW_THREADS
	}
	if (rc) {
		Py_CLEAR(bytes);
		native_fail(self->native);
	}
	hr_model_close(model);
	return bytes;
}

/* Hashed in Python, piece by piece, so that Ctrl-C works. */
static PyObject *digest(PyObject *self, PyObject *args, PyObject *kwargs)
{
	static char *keywords[] = {"shard", NULL};
	PyObject *module, *made;
	unsigned shard = 0;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|I:digest", keywords, &shard))
		return NULL;
	module = PyImport_ImportModule("headrace._digest");
	made = module ? PyObject_CallMethod(module, "digest", "OI", self, shard) : NULL;
	Py_XDECREF(module);
	return made;
}

static PyObject *close_model(struct model_object *self, PyObject *unused)
{
	hr_model *model = self->model;

	(void)unused;
	self->model = NULL;
	hr_model_close(model);
	Py_RETURN_NONE;
}

static PyObject *enter(PyObject *self, PyObject *unused)
{
	(void)unused;
	return Py_NewRef(self);
}

static PyObject *leave(struct model_object *self, PyObject *args)
{
	(void)args;
	return close_model(self, NULL);
}

static Py_ssize_t length(struct model_object *self)
{
	if (self->model)
		return (Py_ssize_t)hr_model_n_tensors(self->model);
	PyErr_SetString(PyExc_ValueError, "the model is closed");
	return -1;
}

static int contains(struct model_object *self, PyObject *key)
{
	const char *name;
	Py_ssize_t n;
	uint64_t index;

	if (!self->model) {
		PyErr_SetString(PyExc_ValueError, "the model is closed");
		return -1;
	}
	name = PyUnicode_Check(key) ? PyUnicode_AsUTF8AndSize(key, &n) : NULL;
	if (!name) {
		PyErr_Clear(); /* no str, or none that UTF-8 can spell: not in it */
		return 0;
	}
	return hr_model_find(self->model, name, (size_t)n, &index) == 0;
}

static PyObject *iterate(struct model_object *self)
{
	PyObject *names = get_names(self, NULL);
	PyObject *iterator = names ? PyObject_GetIter(names) : NULL;

	Py_XDECREF(names);
	return iterator;
}

static PyObject *repr(struct model_object *self)
{
	if (!self->model)
		return PyUnicode_FromString("<headrace.Model, closed>");
	return PyUnicode_FromFormat("<headrace.Model of %llu tensors in %u shards>",
				    (unsigned long long)hr_model_n_tensors(self->model),
				    hr_model_n_shards(self->model));
}

static PyMethodDef methods[] = {
	{"tensor", (PyCFunction)(void (*)(void))tensor, METH_O,
	 "tensor($self, name, /)\n--\n\nThe TensorInfo of a tensor, by name (or number). Raises headrace.TensorNotFound."},
	{"blocks", (PyCFunction)(void (*)(void))native_model_blocks, METH_VARARGS | METH_KEYWORDS,
	 "blocks($self, names=None, *, small_bytes=1048576, block_bytes=16777216)\n--\n\n"
	 "How to lay out tensors so that small ones share memory: a list of (nbytes, names, places, runs).\n\n"
	 "names: names or numbers, in the order wanted; None: all, in file order. Tensors of small_bytes and more are blocks of\n"
	 "their own; others share blocks of at most block_bytes. (places, address, nbytes) is a read of Loader.start() then.\n"
	 "runs: tuples (dtype, shape, first, step, at, stride, count): `count` equal tensors that begin at byte `first` of the\n"
	 "block and every `step` bytes from there, and are names[at], names[at + stride] and so on. Alignment is 256 bytes."},
	{"map", (PyCFunction)(void (*)(void))map, METH_VARARGS | METH_KEYWORDS,
	 "map($self, name, *, populate=False, ahead=False)\n--\n\n"
	 "A tensor in place, on cpu: an Array over the page cache's own pages, with nothing read or copied; it may only be read.\n\n"
	 "If somebody truncates the file, touching the bytes that are gone ends the process with SIGBUS; a write ends it with SIGSEGV.\n"
	 "populate: have all of it in memory before this returns. ahead: begin to read it, and do not wait.\n"
	 "The Array stays good after the model is closed."},
	{"metadata", (PyCFunction)(void (*)(void))metadata, METH_VARARGS | METH_KEYWORDS,
	 "metadata($self, shard=0)\n--\n\nA shard's __metadata__ as a dict of str, empty if it has none."},
	{"digest", (PyCFunction)(void (*)(void))digest, METH_VARARGS | METH_KEYWORDS,
	 "digest($self, shard=0)\n--\n\nSHA-256 of a shard's whole file, in hexadecimal as sha256sum prints it. Reads the file."},
	{"read_shard", (PyCFunction)(void (*)(void))read_shard, METH_VARARGS,
	 "read_shard($self, shard, offset, nbytes, /)\n--\n\nRaw bytes of a shard's file, header included. The fast way is a Loader."},
	{"read_part", (PyCFunction)(void (*)(void))read_part, METH_VARARGS,
	 "read_part($self, name, offset, nbytes, /)\n--\n\n"
	 "Bytes of a tensor, from its byte `offset` on, as a bytearray: read by this thread, through the page cache. The quick way\n"
	 "to some KiB; the fast way to many is a Loader."},
	{"close", (PyCFunction)(void (*)(void))close_model, METH_NOARGS,
	 "close($self)\n--\n\nLets go of the files. What is being loaded, and what was loaded, stays good."},
	{"__enter__", enter, METH_NOARGS, NULL},
	{"__exit__", (PyCFunction)(void (*)(void))leave, METH_VARARGS, NULL},
	{NULL, NULL, 0, NULL},
};

static PyGetSetDef properties[] = {
	{"names", (getter)get_names, NULL, "Names of all tensors, in file order: by shard, then by offset.", NULL},
	{"tensors", (getter)get_tensors, NULL, "TensorInfo of all tensors, in file order.", NULL},
	{"shards", (getter)get_shards, NULL, "ShardInfo of all shards.", NULL},
	{"warnings", (getter)get_warnings, NULL, "What opening found odd, but not wrong: a list of str.", NULL},
	{"closed", (getter)get_closed, NULL, "Whether close() was called.", NULL},
	{NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
	{Py_tp_dealloc, (void *)(uintptr_t)dealloc},
	{Py_tp_repr, (void *)(uintptr_t)repr},
	{Py_tp_iter, (void *)(uintptr_t)iterate},
	{Py_sq_length, (void *)(uintptr_t)length},
	{Py_sq_contains, (void *)(uintptr_t)contains},
	{Py_tp_methods, methods},
	{Py_tp_getset, properties},
	{Py_tp_doc,
	 "A checkpoint whose headers were all read and checked. Immutable, good in any thread and in a forked child.\n\n"
	 "len(), `in` and iteration are about the tensors' names. Made by headrace.open()."},
	{0, NULL},
};

PyType_Spec native_model_spec = {
	.name = "headrace.Model",
	.basicsize = sizeof(struct model_object),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
	.slots = slots,
};
