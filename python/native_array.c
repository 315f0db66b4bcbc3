/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Array: a tensor that was loaded, in memory that it owns a count of and that nothing else writes. It goes out as
 * DLPack (both forms), through the buffer protocol on cpu, as numpy array, or as bytes.
 *
 * One that was mapped may only be read, and says so wherever it goes out; the older form of DLPack cannot, so it is not
 * given. Our own code takes a mapped tensor's bytes from the file (hr_buffer_read), never through the mapping.
 *
 * Whoever takes a DLPack capsule holds a count of its own on the buffer: its deleter runs on any thread, without the
 * GIL, and never blocks. On cuda the consumer's work may still be queued when it drops the tensor; so the memory is
 * handed back in the order of the stream that the consumer named, or of the legacy default stream. An Array whose
 * address was never asked for cannot have work of its own queued, and is dropped without asking the driver.
 */
#include "native.h"
#include "native_dlpack.h"

#include <stdlib.h>
#include <string.h>

/* CUDA's handle of the legacy default stream, as the array API numbers it too. */
#define LEGACY_STREAM ((void *)1)

struct array_object {
	PyObject_HEAD struct native *native;
	hr_buffer *buffer;
	uint64_t offset; /* where in the buffer it begins */
	bool is_shared;  /* others see the same memory: it is shown read-only */
	uint64_t bytes;
	struct dl_device device;
	uint32_t dtype;
	int rank;
	bool was_addressed; /* somebody may have queued work with the bare address */
	Py_ssize_t *shape;  /* `rank` of them, and as many strides in bytes */
};

PyObject *native_array(const struct native *native, const struct hr_tensor *tensor, hr_buffer *buffer,
		       const char *device)
{
	return native_array_part(native, tensor, buffer, device, &(struct array_part){0});
}

PyObject *native_array_part(const struct native *native, const struct hr_tensor *tensor, hr_buffer *buffer,
			    const char *device, const struct array_part *part)
{
	struct array_object *self = PyObject_New(struct array_object, native->array_type);
	Py_ssize_t stride = (Py_ssize_t)hr_dtype_bits(tensor->dtype) / 8;

	if (!self) {
		hr_buffer_release(buffer);
		return NULL;
	}
	self->native = (struct native *)native;
	self->buffer = buffer;
	self->offset = part->offset;
	self->is_shared = part->is_shared;
	self->bytes = tensor->bytes;
	self->device.device_type = strncmp(device, "cuda", 4) ? DL_CPU : DL_CUDA;
	self->device.device_id = self->device.device_type == DL_CUDA && strlen(device) > 5
					 ? (int32_t)strtol(device + 5, NULL, 10)
					 : 0;
	self->dtype = tensor->dtype;
	self->rank = (int)tensor->rank;
	self->was_addressed = false;
	self->shape = PyMem_Malloc(2 * sizeof(Py_ssize_t) * (tensor->rank ? tensor->rank : 1));
	if (!self->shape) {
		Py_DECREF((PyObject *)self);
		return PyErr_NoMemory();
	}
	for (int i = self->rank - 1; i >= 0; i--) {
		self->shape[i] = (Py_ssize_t)tensor->dims[i];
		self->shape[self->rank + i] = stride;
		/* An empty tensor's other dimensions may be so large that their product means nothing. */
		if (self->bytes)
			stride *= self->shape[i];
	}
	return (PyObject *)self;
}

/* The last owner on cuda has to say when the memory is free. Nothing can be told to the caller if that fails. */
static void drop(hr_buffer *buffer, int device_type, void *stream)
{
	if (device_type == DL_CUDA && buffer && hr_buffer_release_on(buffer, stream) == 0)
		return;
	hr_buffer_release(buffer);
}

static void dealloc(struct array_object *self)
{
	PyTypeObject *type = Py_TYPE((PyObject *)self);

	drop(self->buffer, self->was_addressed ? self->device.device_type : DL_CPU, LEGACY_STREAM);
	PyMem_Free(self->shape);
	PyObject_Free(self);
	Py_DECREF(type);
}

static bool is_read_only(const struct array_object *self)
{
	return self->is_shared || hr_buffer_flags(self->buffer) & HR_BUFFER_READ_ONLY;
}

static void *data_of(const struct array_object *self)
{
	return self->bytes ? (char *)hr_buffer_data(self->buffer) + self->offset : NULL;
}

/* ----------------------------------------------------------------------------------------------------------------
 * DLPack */

/* What a capsule needs to stay good on its own. One allocation, with room for shape and strides behind it. */
struct exported {
	union {
		struct dl_managed old;
		struct dl_managed_versioned versioned;
	} as;
	hr_buffer *buffer;
	int32_t device_type;
	void *stream;
	void *copy;
	int64_t dims[];
};

static void let_go(struct exported *exported)
{
	if (exported->buffer)
		drop(exported->buffer, exported->device_type, exported->stream);
	free(exported->copy);
	free(exported);
}

static void delete_old(struct dl_managed *managed)
{
	let_go(managed->context);
}

static void delete_versioned(struct dl_managed_versioned *managed)
{
	let_go(managed->context);
}

/* A capsule that was taken has been renamed by its consumer, and is his. */
static void destroy_old(PyObject *capsule)
{
	if (PyCapsule_IsValid(capsule, "dltensor"))
		delete_old(PyCapsule_GetPointer(capsule, "dltensor"));
}

static void destroy_versioned(PyObject *capsule)
{
	if (PyCapsule_IsValid(capsule, "dltensor_versioned"))
		delete_versioned(PyCapsule_GetPointer(capsule, "dltensor_versioned"));
}

/* DLPack's type of a dtype; code 255: it has none. */
static struct dl_dtype dl_dtype_of(uint32_t dtype)
{
	static const struct dl_dtype types[] = {
		[HR_DTYPE_BOOL] = {6, 8, 1},         [HR_DTYPE_U8] = {1, 8, 1},
		[HR_DTYPE_I8] = {0, 8, 1},           [HR_DTYPE_U16] = {1, 16, 1},
		[HR_DTYPE_I16] = {0, 16, 1},         [HR_DTYPE_U32] = {1, 32, 1},
		[HR_DTYPE_I32] = {0, 32, 1},         [HR_DTYPE_U64] = {1, 64, 1},
		[HR_DTYPE_I64] = {0, 64, 1},         [HR_DTYPE_F16] = {2, 16, 1},
		[HR_DTYPE_BF16] = {4, 16, 1},        [HR_DTYPE_F32] = {2, 32, 1},
		[HR_DTYPE_F64] = {2, 64, 1},         [HR_DTYPE_C64] = {5, 64, 1},
		[HR_DTYPE_F8_E5M2] = {12, 8, 1},     [HR_DTYPE_F8_E4M3] = {10, 8, 1},
		[HR_DTYPE_F8_E8M0] = {14, 8, 1},     [HR_DTYPE_F8_E4M3FNUZ] = {11, 8, 1},
		[HR_DTYPE_F8_E5M2FNUZ] = {13, 8, 1}, [HR_DTYPE_F4] = {17, 4, 2},
	};

	if (dtype < sizeof(types) / sizeof(types[0]) && types[dtype].bits)
		return types[dtype];
	return (struct dl_dtype){255, 0, 0};
}

/* Checks stream= as the array API has it. What was handed out is complete, so nothing has to wait for it. */
static bool stream_of(const struct array_object *self, PyObject *value, void **out)
{
	long long stream;

	*out = LEGACY_STREAM;
	if (value == Py_None)
		return true;
	stream = PyLong_AsLongLong(value);
	if (stream == -1 && PyErr_Occurred())
		return false;
	if (self->device.device_type == DL_CPU) {
		if (stream == -1)
			return true;
		PyErr_SetString(PyExc_ValueError,
				"this tensor is in host memory, which has no streams: leave stream out");
		return false;
	}
	if (stream == 0 || stream < -1) {
		PyErr_Format(PyExc_ValueError,
			     "%R is no CUDA stream: 1 is the legacy default stream, 2 the per-thread one", value);
		return false;
	}
	if (stream > 0)
		*out = (void *)(intptr_t)stream;
	return true;
}

static bool device_is_ours(const struct array_object *self, PyObject *value)
{
	int type, id;

	if (value == Py_None)
		return true;
	if (!PyTuple_Check(value) ||
	    !PyArg_ParseTuple(value, "ii;dl_device is a tuple (device type, device number)", &type, &id)) {
		if (!PyErr_Occurred())
			PyErr_SetString(PyExc_TypeError, "dl_device is a tuple (device type, device number)");
		return false;
	}
	if (type == self->device.device_type && id == self->device.device_id)
		return true;
	PyErr_Format(PyExc_BufferError, "this tensor is on DLPack device (%d, %d) and cannot be exported to (%d, %d)",
		     (int)self->device.device_type, (int)self->device.device_id, type, id);
	return false;
}

/* Shape and strides in elements of DLPack's type; a packed pair of 4-bit values is one element. */
static bool fill_dims(const struct array_object *self, struct exported *exported, struct dl_dtype type)
{
	int64_t *shape = exported->dims, *strides = exported->dims + self->rank, stride = 1;

	for (int i = self->rank - 1; i >= 0; i--) {
		shape[i] = self->shape[i];
		if (i == self->rank - 1 && type.lanes > 1)
			shape[i] /= type.lanes;
		strides[i] = stride;
		if (self->bytes)
			stride *= shape[i];
	}
	return type.lanes == 1 || (self->rank > 0 && self->shape[self->rank - 1] % type.lanes == 0);
}

static struct exported *export_new(struct array_object *self, void *stream, bool copy)
{
	struct dl_dtype type = dl_dtype_of(self->dtype);
	struct exported *exported;
	int rc = 0;

	if (type.code == 255) {
		PyErr_Format(PyExc_BufferError,
			     "DLPack has no type for dtype %s: use the raw bytes (tobytes(), or memoryview on cpu)",
			     hr_dtype_name(self->dtype));
		return NULL;
	}
	if (copy && self->device.device_type != DL_CPU) {
		PyErr_SetString(PyExc_BufferError,
				"copies are made in host memory only: copy with the consuming library");
		return NULL;
	}
	exported = calloc(1, sizeof(*exported) + 2 * sizeof(int64_t) * (size_t)self->rank);
	if (exported && copy && self->bytes) {
		exported->copy = malloc((size_t)self->bytes);
		if (!exported->copy) {
			free(exported);
			exported = NULL;
		}
	}
	if (!exported) {
		PyErr_NoMemory();
		return NULL;
	}
	if (!fill_dims(self, exported, type)) {
		let_go(exported);
		PyErr_Format(PyExc_BufferError,
			     "DLPack packs pairs of %s along the last dimension, which is odd here: use the raw bytes",
			     hr_dtype_name(self->dtype));
		return NULL;
	}
	exported->device_type = self->device.device_type;
	exported->stream = stream;
	if (exported->copy) {
		Py_BEGIN_ALLOW_THREADS rc = hr_buffer_read(self->buffer, self->offset, exported->copy, self->bytes);
		Py_END_ALLOW_THREADS
	} else if (!copy) {
		exported->buffer = hr_buffer_acquire(self->buffer);
	}
	if (!rc)
		return exported;
	let_go(exported);
	native_fail(self->native);
	return NULL;
}

static PyObject *dlpack(struct array_object *self, PyObject *args, PyObject *kwargs)
{
	static char *keywords[] = {"stream", "max_version", "dl_device", "copy", NULL};
	PyObject *stream_object = Py_None, *version = Py_None, *device = Py_None, *copy_object = Py_None, *capsule;
	struct exported *exported;
	struct dl_tensor tensor;
	int major = 0, minor = 0;
	bool copy;
	void *stream;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$OOOO:__dlpack__", keywords, &stream_object, &version, &device,
					 &copy_object))
		return NULL;
	if (version != Py_None && (!PyTuple_Check(version) ||
				   !PyArg_ParseTuple(version, "ii;max_version is (major, minor)", &major, &minor))) {
		if (!PyErr_Occurred())
			PyErr_SetString(PyExc_TypeError, "max_version is a tuple (major, minor)");
		return NULL;
	}
	copy = copy_object != Py_None && PyObject_IsTrue(copy_object) > 0;
	if (PyErr_Occurred() || !stream_of(self, stream_object, &stream) || !device_is_ours(self, device))
		return NULL;
	if (is_read_only(self) && !copy && major < 1) {
		PyErr_SetString(
			PyExc_BufferError,
			"this tensor is mapped or a cache's and may only be read, which the older form of DLPack cannot say: ask for "
			"max_version=(1, 0) or for a copy");
		return NULL;
	}
	exported = export_new(self, stream, copy);
	if (!exported)
		return NULL;
	tensor = (struct dl_tensor){
		.data = exported->copy ? exported->copy : data_of(self),
		.device = self->device,
		.ndim = self->rank,
		.dtype = dl_dtype_of(self->dtype),
		.shape = self->rank ? exported->dims : NULL,
		.strides = self->rank ? exported->dims + self->rank : NULL,
	};
	if (major >= 1) {
		exported->as.versioned = (struct dl_managed_versioned){
			1,
			1,
			exported,
			delete_versioned,
			copy ? DL_FLAG_COPIED : is_read_only(self) ? DL_FLAG_READ_ONLY : 0,
			tensor};
		capsule = PyCapsule_New(&exported->as.versioned, "dltensor_versioned", destroy_versioned);
	} else {
		exported->as.old = (struct dl_managed){tensor, exported, delete_old};
		capsule = PyCapsule_New(&exported->as.old, "dltensor", destroy_old);
	}
	if (!capsule)
		let_go(exported);
	return capsule;
}

static PyObject *dlpack_device(struct array_object *self, PyObject *unused)
{
	(void)unused;
	return Py_BuildValue("ii", (int)self->device.device_type, (int)self->device.device_id);
}

/* ------------------------------------------------------------------------------------------------------- buffer
 * protocol */

/* The struct module's code of a dtype, or NULL: then only the bytes can be seen. */
static const char *format_of(uint32_t dtype)
{
	static const char *const formats[] = {
		[HR_DTYPE_BOOL] = "?", [HR_DTYPE_U8] = "B",  [HR_DTYPE_I8] = "b",  [HR_DTYPE_U16] = "H",
		[HR_DTYPE_I16] = "h",  [HR_DTYPE_U32] = "I", [HR_DTYPE_I32] = "i", [HR_DTYPE_U64] = "Q",
		[HR_DTYPE_I64] = "q",  [HR_DTYPE_F16] = "e", [HR_DTYPE_F32] = "f", [HR_DTYPE_F64] = "d",
		[HR_DTYPE_C64] = "Zf",
	};

	return dtype < sizeof(formats) / sizeof(formats[0]) ? formats[dtype] : NULL;
}

static int get_buffer(struct array_object *self, Py_buffer *view, int flags)
{
	static char nothing[1];
	const char *format = format_of(self->dtype);
	int read_only = is_read_only(self);

	view->obj = NULL;
	if (self->device.device_type != DL_CPU) {
		PyErr_SetString(PyExc_BufferError,
				"this tensor is in a GPU's memory: use DLPack, or tobytes() for a copy");
		return -1;
	}
	if (read_only && (flags & PyBUF_WRITABLE)) {
		PyErr_SetString(PyExc_BufferError, "this tensor is mapped or a cache's and may only be read");
		return -1;
	}
	if (!(flags & PyBUF_ND) || !format)
		return PyBuffer_FillInfo(view, (PyObject *)self, self->bytes ? data_of(self) : nothing,
					 (Py_ssize_t)self->bytes, read_only, flags);
	*view = (Py_buffer){
		.buf = self->bytes ? data_of(self) : nothing,
		.obj = Py_NewRef((PyObject *)self),
		.len = (Py_ssize_t)self->bytes,
		.itemsize = (Py_ssize_t)hr_dtype_bits(self->dtype) / 8,
		.readonly = read_only,
		.ndim = self->rank,
		.format = (flags & PyBUF_FORMAT) == PyBUF_FORMAT ? (char *)(uintptr_t)format : NULL,
		.shape = self->rank ? self->shape : NULL,
		.strides = self->rank && (flags & PyBUF_STRIDES) == PyBUF_STRIDES ? self->shape + self->rank : NULL,
	};
	return 0;
}

/* ---------------------------------------------------------------------------------------------------------------
 * methods */

static PyObject *get_shape(struct array_object *self, void *unused)
{
	PyObject *shape = PyTuple_New(self->rank);

	(void)unused;
	for (int i = 0; shape && i < self->rank; i++) {
		PyObject *dim = PyLong_FromUnsignedLongLong((uint64_t)self->shape[i]);

		if (!dim || PyTuple_SetItem(shape, i, dim) < 0)
			Py_CLEAR(shape);
	}
	return shape;
}

static PyObject *get_dtype(struct array_object *self, void *unused)
{
	(void)unused;
	return PyUnicode_FromString(hr_dtype_name(self->dtype));
}

static PyObject *get_nbytes(struct array_object *self, void *unused)
{
	(void)unused;
	return PyLong_FromUnsignedLongLong(self->bytes);
}

static PyObject *get_device(struct array_object *self, void *unused)
{
	(void)unused;
	if (self->device.device_type == DL_CPU)
		return PyUnicode_FromString("cpu");
	return PyUnicode_FromFormat("cuda:%d", (int)self->device.device_id);
}

static PyObject *get_read_only(struct array_object *self, void *unused)
{
	(void)unused;
	return PyBool_FromLong(is_read_only(self));
}

static PyObject *get_address(struct array_object *self, void *unused)
{
	(void)unused;
	self->was_addressed = true;
	return PyLong_FromVoidPtr(data_of(self));
}

static PyObject *tobytes(struct array_object *self, PyObject *unused)
{
	PyObject *bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)self->bytes);
	char *to;
	int rc;

	(void)unused;
	if (!bytes)
		return NULL;
	to = PyBytes_AsString(bytes);
	Py_BEGIN_ALLOW_THREADS rc = self->bytes ? hr_buffer_read(self->buffer, self->offset, to, self->bytes) : 0;
	Py_END_ALLOW_THREADS if (!rc) return bytes;
	Py_DECREF(bytes);
	return native_fail(self->native);
}

static PyObject *numpy(PyObject *self, PyObject *unused)
{
	PyObject *module = PyImport_ImportModule("headrace._convert");
	PyObject *made = module ? PyObject_CallMethod(module, "to_numpy", "O", self) : NULL;

	(void)unused;
	Py_XDECREF(module);
	return made;
}

static PyObject *repr(struct array_object *self)
{
	PyObject *shape = get_shape(self, NULL), *device = get_device(self, NULL), *made = NULL;

	if (shape && device)
		made = PyUnicode_FromFormat("<headrace.Array %s %R on %U>", hr_dtype_name(self->dtype), shape, device);
	Py_XDECREF(shape);
	Py_XDECREF(device);
	return made;
}

static PyMethodDef methods[] = {
	{"__dlpack__", (PyCFunction)(void (*)(void))dlpack, METH_VARARGS | METH_KEYWORDS,
	 "__dlpack__($self, *, stream=None, max_version=None, dl_device=None, copy=None)\n--\n\n"
	 "A DLPack capsule that owns a count on the memory: `dltensor_versioned` if max_version is (1, 0) or more.\n\n"
	 "Raises BufferError for what DLPack cannot say: the 6-bit dtypes, 4-bit ones whose last dimension is odd, and, in the\n"
	 "form before 1.0, that a mapped tensor may only be read."},
	{"__dlpack_device__", (PyCFunction)(void (*)(void))dlpack_device, METH_NOARGS,
	 "__dlpack_device__($self)\n--\n\n(1, 0) on cpu, (2, N) on cuda:N."},
	{"tobytes", (PyCFunction)(void (*)(void))tobytes, METH_NOARGS,
	 "tobytes($self)\n--\n\nA copy of the payload in host memory, from any device."},
	{"numpy", numpy, METH_NOARGS,
	 "numpy($self)\n--\n\nThe same memory as a numpy array (cpu only).\n\n"
	 "BF16, F8 and F4 need the package ml_dtypes; without it, and for F6, TypeError."},
	{NULL, NULL, 0, NULL},
};

static PyGetSetDef properties[] = {
	{"shape", (getter)get_shape, NULL, "Tuple of int, as in the file's header.", NULL},
	{"dtype", (getter)get_dtype, NULL, "\"BF16\", \"F32\" ..., as the format spells it.", NULL},
	{"nbytes", (getter)get_nbytes, NULL, "Payload in bytes.", NULL},
	{"device", (getter)get_device, NULL, "\"cpu\" or \"cuda:N\".", NULL},
	{"read_only", (getter)get_read_only, NULL,
	 "Whether it is mapped (Model.map), so that a write ends the process.", NULL},
	{"address", (getter)get_address, NULL, "Where the memory begins, on its device; 0 for an empty tensor.", NULL},
	{NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
	{Py_tp_dealloc, (void *)(uintptr_t)dealloc},
	{Py_tp_repr, (void *)(uintptr_t)repr},
	{Py_bf_getbuffer, (void *)(uintptr_t)get_buffer},
	{Py_tp_methods, methods},
	{Py_tp_getset, properties},
	{Py_tp_doc,
	 "A tensor that was loaded. It owns its memory, which nothing else writes: keep it as long as you like.\n\n"
	 "numpy.from_dlpack(array), torch.from_dlpack(array), memoryview(array) and their like share that memory and keep it."},
	{0, NULL},
};

PyType_Spec native_array_spec = {
	.name = "headrace.Array",
	.basicsize = sizeof(struct array_object),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
	.slots = slots,
};
