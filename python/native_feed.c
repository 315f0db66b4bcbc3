/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Feed: the iterator that Loader.feed() gives. One thread at a time may be inside; another one is told so, as
 * generators do.
 */
#include "native.h"

struct feed_object {
	PyObject_HEAD struct native *native;
	hr_feed *feed; /* NULL after close() or the last tensor */
	struct loader_object *loader;
	bool in_use;
	PyObject *last_stats; /* of a feed that is closed */
};

static uint64_t *numbers_of(const struct native *native, const hr_model *model, PyObject *list)
{
	Py_ssize_t n = PyList_Size(list);
	uint64_t *numbers = PyMem_Calloc(n ? (size_t)n : 1, sizeof(*numbers));

	if (!numbers) {
		PyErr_NoMemory();
		return NULL;
	}
	for (Py_ssize_t i = 0; i < n; i++) {
		if (!native_tensor_number(native, model, PyList_GetItem(list, i), &numbers[i])) {
			PyMem_Free(numbers);
			return NULL;
		}
	}
	return numbers;
}

static PyObject *feed_new(struct loader_object *loader, hr_model *model, const struct hr_feed_opts *opts)
{
	struct feed_object *self = PyObject_New(struct feed_object, loader->native->feed_type);
	int rc;

	if (!self)
		return NULL;
	self->native = loader->native;
	self->feed = NULL;
	self->loader = (struct loader_object *)Py_NewRef((PyObject *)loader);
	self->in_use = false;
	self->last_stats = NULL;
	Py_BEGIN_ALLOW_THREADS rc = hr_feed_open(loader->loader, model, opts, &self->feed);
	Py_END_ALLOW_THREADS if (!rc) return (PyObject *)self;
	native_fail(loader->native);
	Py_DECREF((PyObject *)self);
	return NULL;
}

static PyObject *open_feed(struct loader_object *loader, hr_model *model, PyObject *names, struct hr_feed_opts *opts)
{
	uint64_t *numbers = NULL;
	PyObject *feed, *list;

	if (names != Py_None) {
		list = PySequence_List(names);
		numbers = list ? numbers_of(loader->native, model, list) : NULL;
		opts->n_tensors = numbers ? (size_t)PyList_Size(list) : 0;
		opts->tensors = numbers;
		Py_XDECREF(list);
		if (!numbers)
			return NULL;
	}
	feed = feed_new(loader, model, opts);
	PyMem_Free(numbers);
	return feed;
}

PyObject *native_loader_feed(struct loader_object *self, PyObject *args, PyObject *kwargs)
{
	static char *keywords[] = {"model", "names", "given_order", "wait_stream", "signal_stream", "io_timeout", NULL};
	struct hr_feed_opts opts = HR_FEED_OPTS_INIT;
	PyObject *model_object, *names = Py_None, *timeout = Py_None, *feed = NULL;
	unsigned long long wait_stream = 0, signal_stream = 0;
	int given_order = 0;
	double seconds;
	hr_model *model;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|O$pKKO:feed", keywords, &model_object, &names, &given_order,
					 &wait_stream, &signal_stream, &timeout) ||
	    !native_seconds(timeout, &seconds))
		return NULL;
	if (PyUnicode_Check(names))
		return PyErr_Format(PyExc_TypeError, "names is a list of names, not a name: [%R]", names);
	opts.flags = given_order ? HR_FEED_GIVEN_ORDER : 0;
	opts.io_timeout_ms = seconds < 0 ? 0 : seconds >= 4e6 ? UINT32_MAX - 1 : (uint32_t)(seconds * 1000) + 1;
	opts.wait_stream = (void *)(uintptr_t)wait_stream;
	opts.signal_stream = (void *)(uintptr_t)signal_stream;
	opts.next_timeout_ms = SLICE_MS;
	if (!native_loader_enter(self))
		return NULL;
	model = native_model(self->native, model_object);
	if (model)
		feed = open_feed(self, model, names, &opts);
	hr_model_close(model);
	native_loader_leave(self);
	return feed;
}

static void dealloc(struct feed_object *self)
{
	PyTypeObject *type = Py_TYPE((PyObject *)self);
	const struct parked parked = {.feed = self->feed, .owner = (PyObject *)self->loader};

	if (self->feed && hr_feed_close(self->feed, 0) == HR_E_BUSY)
		native_park(self->native, &parked);
	else
		Py_XDECREF((PyObject *)self->loader);
	Py_XDECREF(self->last_stats);
	PyObject_Free(self);
	Py_DECREF(type);
}

static bool take(struct feed_object *self)
{
	if (self->in_use) {
		PyErr_SetString(PyExc_ValueError, "the feed is in use by another thread");
		return false;
	}
	self->in_use = true;
	return true;
}

/* Closes the handle if it has settled within `until`; otherwise HR_E_BUSY, and it is still good. */
static bool close_within(struct feed_object *self, double until)
{
	struct hr_stats stats = HR_STATS_INIT;
	int rc;

	if (!self->last_stats && hr_feed_stats(self->feed, &stats) == 0)
		self->last_stats = native_stats(&stats);
	PyErr_Clear();
	for (;;) {
		Py_BEGIN_ALLOW_THREADS rc = hr_feed_close(self->feed,
							  until >= 0 && native_now() >= until ? 0 : SLICE_MS);
		Py_END_ALLOW_THREADS if (rc != HR_E_BUSY || (until >= 0 && native_now() >= until)) break;
		if (PyErr_CheckSignals() < 0)
			return false;
	}
	if (!rc)
		self->feed = NULL;
	else
		native_fail(self->native);
	return rc == 0;
}

/* Waits for the next tensor, in slices. HR_OK with `buffer`, or a code; 1: an exception is set. */
static int next_slice_by_slice(struct feed_object *self, struct hr_tensor *tensor, hr_buffer **buffer)
{
	int rc;

	/* As long as somebody is inside, close() of the loader waits for him, and he looks whether it does. */
	self->loader->users++;
	do {
		Py_BEGIN_ALLOW_THREADS rc = hr_feed_next(self->feed, tensor, buffer);
		Py_END_ALLOW_THREADS if (rc == HR_E_PENDING && self->loader->closing)
		{
			native_fail_with(self->native, HR_E_CANCELLED, "the loader is being closed");
			rc = 1;
		}
		else if (rc == HR_E_PENDING && PyErr_CheckSignals() < 0)
		{
			rc = 1;
		}
	} while (rc == HR_E_PENDING);
	self->loader->users--;
	return rc;
}

static PyObject *pair_of(const struct feed_object *self, const struct hr_tensor *tensor, hr_buffer *buffer)
{
	PyObject *info = native_tensor_info(self->native, tensor);
	PyObject *array, *pair = NULL;

	if (!info) {
		hr_buffer_release(buffer);
		return NULL;
	}
	array = native_array(self->native, tensor, buffer, self->loader->device_name);
	if (array)
		pair = PyTuple_Pack(2, info, array);
	Py_XDECREF(array);
	Py_DECREF(info);
	return pair;
}

static PyObject *next(struct feed_object *self)
{
	struct hr_tensor tensor = HR_TENSOR_INIT;
	hr_buffer *buffer = NULL;
	PyObject *pair = NULL;
	int rc;

	if (!take(self))
		return NULL;
	if (!self->feed) {
		self->in_use = false;
		return NULL; /* over, or closed */
	}
	rc = next_slice_by_slice(self, &tensor, &buffer);
	if (rc == 0)
		pair = pair_of(self, &tensor, buffer);
	else if (rc == HR_E_END)
		close_within(self, -1);
	else if (rc != 1)
		native_fail(self->native);
	self->in_use = false;
	return pair;
}

static PyObject *close_feed(struct feed_object *self, PyObject *args, PyObject *kwargs)
{
	double seconds;
	bool good;

	if (!native_timeout(args, kwargs, "|O:close", &seconds) || !take(self))
		return NULL;
	good = !self->feed || close_within(self, seconds >= 0 ? native_now() + seconds : -1);
	self->in_use = false;
	if (!good)
		return NULL;
	Py_RETURN_NONE;
}

static PyObject *stats(struct feed_object *self, PyObject *unused)
{
	struct hr_stats found = HR_STATS_INIT;
	int rc;

	(void)unused;
	if (!take(self))
		return NULL;
	rc = self->feed ? hr_feed_stats(self->feed, &found) : 0;
	self->in_use = false;
	if (rc)
		return native_fail(self->native);
	if (self->feed)
		return native_stats(&found);
	return self->last_stats ? PyDict_Copy(self->last_stats) : PyDict_New();
}

static PyObject *enter(PyObject *self, PyObject *unused)
{
	(void)unused;
	return Py_NewRef(self);
}

static PyObject *leave(struct feed_object *self, PyObject *unused)
{
	PyObject *empty = PyTuple_New(0), *made = empty ? close_feed(self, empty, NULL) : NULL;

	(void)unused;
	Py_XDECREF(empty);
	return made;
}

static PyMethodDef methods[] = {
	{"stats", (PyCFunction)(void (*)(void))stats, METH_NOARGS,
	 "stats($self)\n--\n\nWhat it has done so far, as a dict."},
	{"close", (PyCFunction)(void (*)(void))close_feed, METH_VARARGS | METH_KEYWORDS,
	 "close($self, timeout=None)\n--\n\nEnds the feed early. What it handed out stays good."},
	{"__enter__", enter, METH_NOARGS, NULL},
	{"__exit__", (PyCFunction)(void (*)(void))leave, METH_VARARGS, NULL},
	{NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
	{Py_tp_dealloc, (void *)(uintptr_t)dealloc},
	{Py_tp_iter, (void *)(uintptr_t)PyObject_SelfIter},
	{Py_tp_iternext, (void *)(uintptr_t)next},
	{Py_tp_methods, methods},
	{Py_tp_doc,
	 "An iterator of (TensorInfo, Array): tensors one after the other, each complete and in memory of its own."},
	{0, NULL},
};

PyType_Spec native_feed_spec = {
	.name = "headrace.Feed",
	.basicsize = sizeof(struct feed_object),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
	.slots = slots,
};
