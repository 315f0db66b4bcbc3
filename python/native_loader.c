/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Loader: one device, one pool of staging memory, the engines and their threads. Its methods enter and leave
 * (native_loader_enter), so that close() can wait for whoever is inside: `closing` makes them end early, and lets
 * nobody in.
 */
#include "native.h"

#include <string.h>

bool native_loader_enter(struct loader_object *self)
{
	if (!self->loader || self->closing) {
		PyErr_SetString(PyExc_ValueError, "the loader is closed");
		return false;
	}
	native_unpark(self->native);
	self->users++;
	return true;
}

void native_loader_leave(struct loader_object *self)
{
	self->users--;
}

static bool caching_of(const char *text, uint32_t *out)
{
	static const char *const names[] = {"auto", "fill", "bypass"};

	for (uint32_t i = 0; i < 3; i++) {
		if (!strcmp(text, names[i])) {
			*out = i;
			return true;
		}
	}
	PyErr_Format(PyExc_ValueError, "caching is \"%s\": use \"auto\", \"fill\" or \"bypass\"", text);
	return false;
}

static int open_both(struct loader_object *self, const char *device, const struct hr_loader_opts *opts)
{
	struct hr_device_info info = HR_DEVICE_INFO_INIT;
	int rc;

	Py_BEGIN_ALLOW_THREADS rc = hr_device_open(device, &self->device);
	if (!rc)
		rc = hr_device_info(self->device, &info);
	if (!rc)
		rc = hr_loader_open(self->device, opts, &self->loader);
	Py_END_ALLOW_THREADS memcpy(self->device_name, info.spec, sizeof(self->device_name));
	self->device_name[sizeof(self->device_name) - 1] = 0;
	return rc;
}

static PyObject *new (PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
	static char *keywords[] = {"device",  "staging_bytes", "slot_bytes", "engine",  "caching",
				   "readers", "cufile",        "alloc",      "release", NULL};
	struct native *native = native_of(type);
	PyObject *staging = Py_None, *slot = Py_None, *readers = Py_None, *alloc = Py_None, *release = Py_None;
	const char *device = "cpu", *engine = NULL, *caching = "auto", *cufile = "direct";
	struct hr_loader_opts opts = HR_LOADER_OPTS_INIT;
	struct loader_object *self;
	struct hooks *hooks;
	unsigned long n = 0;

	if (!native || !PyArg_ParseTupleAndKeywords(args, kwargs, "|s$OOzsOsOO:Loader", keywords, &device, &staging,
						    &slot, &engine, &caching, &readers, &cufile, &alloc, &release))
		return NULL;
	if (!native_size(staging, &opts.staging_bytes) || !native_size(slot, &opts.slot_bytes) ||
	    !caching_of(caching, &opts.caching))
		return NULL;
	if (readers != Py_None) {
		n = PyLong_AsUnsignedLong(readers);
		if (PyErr_Occurred())
			return NULL;
		if (n == 0 || n > UINT32_MAX)
			return PyErr_Format(PyExc_ValueError, "readers is %lu: it is the number of threads, from 1", n);
	}
	opts.readers = (uint32_t)n;
	opts.engine = engine;
	if (strcmp(cufile, "compat") == 0)
		opts.flags |= HR_LOADER_CUFILE_COMPAT;
	else if (strcmp(cufile, "direct") != 0)
		return PyErr_Format(PyExc_ValueError, "cufile is \"%s\": use \"direct\" or \"compat\"", cufile);
	native_unpark(native);
	if (!native_hooks(alloc, release, &opts, &hooks))
		return NULL;
	self = PyObject_New(struct loader_object, type);
	if (!self) {
		native_hooks_drop(hooks);
		return NULL;
	}
	self->native = native;
	self->loader = NULL;
	self->device = NULL;
	self->hooks = hooks;
	self->users = 0;
	self->n_caches = 0;
	self->closing = false;
	if (open_both(self, device, &opts) == 0)
		return (PyObject *)self;
	native_fail(native);
	Py_DECREF((PyObject *)self);
	return NULL;
}

/* No job or feed is left by now, for each holds its Loader; but a parked one may still be in flight. */
static void dealloc(struct loader_object *self)
{
	PyTypeObject *type = Py_TYPE((PyObject *)self);
	const struct parked parked = {.loader = self->loader};

	if (self->loader && hr_loader_close(self->loader, 0) == HR_E_BUSY)
		native_park(self->native, &parked);
	hr_device_close(self->device);
	native_hooks_drop(self->hooks);
	PyObject_Free(self);
	Py_DECREF(type);
}

/* ------------------------------------------------------------------------------------------------------- waiting
 * for jobs */

static int wait_slice(hr_job *job, uint32_t timeout_ms)
{
	int rc;

	Py_BEGIN_ALLOW_THREADS rc = hr_job_wait(job, timeout_ms);
	Py_END_ALLOW_THREADS return rc;
}

bool native_job_settle(const struct native *native, hr_job *job, const bool *closing, double timeout)
{
	double until = timeout >= 0 ? native_now() + timeout : -1;
	int rc;

	for (;;) {
		double left = until >= 0 ? until - native_now() : 1;

		rc = wait_slice(job, left <= 0 ? 0 : left * 1000 < SLICE_MS ? (uint32_t)(left * 1000) + 1 : SLICE_MS);
		if (rc != HR_E_PENDING)
			break;
		if (PyErr_CheckSignals() < 0) {
			hr_job_cancel(job);
			while (wait_slice(job, SLICE_MS) == HR_E_PENDING)
				;
			return false;
		}
		if (left <= 0)
			break;
		if (closing && *closing)
			hr_job_cancel(job);
	}
	if (rc)
		native_fail(native);
	return rc == 0;
}

/* Runs one read to its end: with that, nothing refers to the destination any more. */
static bool read_whole(struct loader_object *self, hr_model *model, const struct hr_read *read)
{
	hr_job *job;
	bool good;
	int rc;

	Py_BEGIN_ALLOW_THREADS rc = hr_job_start(self->loader, model, read, 1, NULL, &job);
	Py_END_ALLOW_THREADS if (rc)
	{
		native_fail(self->native);
		return false;
	}
	good = native_job_settle(self->native, job, &self->closing, -1);
	hr_job_close(job, HR_FOREVER); /* settled: it does not wait */
	return good;
}

static PyObject *get_entered(struct loader_object *self, hr_model *model, PyObject *key)
{
	struct hr_read read = {.length = UINT64_MAX};
	struct hr_tensor tensor = HR_TENSOR_INIT;
	hr_buffer *buffer = NULL;
	int rc;

	if (!native_tensor_number(self->native, model, key, &read.tensor))
		return NULL;
	Py_BEGIN_ALLOW_THREADS rc = hr_model_tensor(model, read.tensor, &tensor);
	if (!rc)
		rc = hr_buffer_new(self->loader, tensor.bytes, &buffer);
	Py_END_ALLOW_THREADS if (rc) return native_fail(self->native);
	read.dst = hr_buffer_data(buffer);
	read.dst_bytes = tensor.bytes;
	if (!read_whole(self, model, &read)) {
		hr_buffer_release(buffer);
		return NULL;
	}
	return native_array(self->native, &tensor, buffer, self->device_name);
}

static PyObject *get(struct loader_object *self, PyObject *args)
{
	PyObject *model_object, *key, *array = NULL;
	hr_model *model;

	if (!PyArg_ParseTuple(args, "OO:get", &model_object, &key) || !native_loader_enter(self))
		return NULL;
	model = native_model(self->native, model_object);
	if (model)
		array = get_entered(self, model, key);
	hr_model_close(model);
	native_loader_leave(self);
	return array;
}

static PyObject *read_into(struct loader_object *self, PyObject *args)
{
	struct hr_read read = {.length = UINT64_MAX};
	unsigned long long address, room;
	PyObject *model_object, *key;
	hr_model *model;
	bool good = false;

	if (!PyArg_ParseTuple(args, "OOKK:read_into", &model_object, &key, &address, &room) ||
	    !native_loader_enter(self))
		return NULL;
	model = native_model(self->native, model_object);
	if (model && native_tensor_number(self->native, model, key, &read.tensor)) {
		read.dst = (void *)(uintptr_t)address;
		read.dst_bytes = room;
		good = read_whole(self, model, &read);
	}
	hr_model_close(model);
	native_loader_leave(self);
	if (!good)
		return NULL;
	Py_RETURN_NONE;
}

static PyObject *stats(struct loader_object *self, PyObject *unused)
{
	struct hr_stats found = HR_STATS_INIT;
	int rc;

	(void)unused;
	if (!native_loader_enter(self))
		return NULL;
	rc = hr_loader_stats(self->loader, &found);
	native_loader_leave(self);
	return rc ? native_fail(self->native) : native_stats(&found);
}

/* ---------------------------------------------------------------------------------------------------------------
 * closing */

static int close_slice(hr_loader *loader, double until)
{
	double left = until >= 0 ? until - native_now() : 1;
	int rc;

	Py_BEGIN_ALLOW_THREADS rc = hr_loader_close(loader, left <= 0                ? 0
							    : left * 1000 < SLICE_MS ? (uint32_t)(left * 1000) + 1
										     : SLICE_MS);
	Py_END_ALLOW_THREADS return rc;
}

static bool close_within(struct loader_object *self, double until)
{
	int rc;

	if (!native_wait_unused(&self->users, until)) {
		if (!PyErr_Occurred())
			native_fail_with(self->native, HR_E_BUSY,
					 "another thread is still inside a call with this loader; nothing was closed");
		return false;
	}
	for (;;) {
		rc = close_slice(self->loader, until);
		if (rc != HR_E_BUSY)
			break;
		if (PyErr_CheckSignals() < 0)
			return false;
		if (until >= 0 && native_now() >= until)
			break;
	}
	if (rc) {
		native_fail(self->native);
		return false;
	}
	self->loader = NULL;
	return true;
}

static PyObject *close_loader(struct loader_object *self, PyObject *args, PyObject *kwargs)
{
	double seconds;
	bool good;

	if (!native_timeout(args, kwargs, "|O:close", &seconds))
		return NULL;
	if (!self->loader)
		Py_RETURN_NONE;
	if (self->n_caches)
		return native_fail_with(self->native, HR_E_BUSY,
					"a cache is open on this loader: close the cache first");
	if (self->closing)
		return native_fail_with(self->native, HR_E_BUSY, "another thread is closing this loader");
	self->closing = true;
	good = close_within(self, seconds >= 0 ? native_now() + seconds : -1);
	self->closing = false;
	native_unpark(self->native);
	if (!good)
		return NULL;
	Py_RETURN_NONE;
}

static PyObject *enter(PyObject *self, PyObject *unused)
{
	(void)unused;
	return Py_NewRef(self);
}

static PyObject *leave(struct loader_object *self, PyObject *unused)
{
	PyObject *empty = PyTuple_New(0), *made = empty ? close_loader(self, empty, NULL) : NULL;

	(void)unused;
	Py_XDECREF(empty);
	return made;
}

static PyObject *get_device(struct loader_object *self, void *unused)
{
	(void)unused;
	return PyUnicode_FromString(self->device_name);
}

static PyObject *get_closed(struct loader_object *self, void *unused)
{
	(void)unused;
	return PyBool_FromLong(!self->loader);
}

static PyMethodDef methods[] = {
	{"get", (PyCFunction)(void (*)(void))get, METH_VARARGS,
	 "get($self, model, name, /)\n--\n\nLoads one tensor, by name or number, into memory of its own: an Array. Waits."},
	{"read_into", (PyCFunction)(void (*)(void))read_into, METH_VARARGS,
	 "read_into($self, model, name, address, nbytes, /)\n--\n\n"
	 "Loads one tensor into memory of the caller's: at `address` on the loader's device, with `nbytes` of room. Waits.\n\n"
	 "After an exception no byte there may be trusted, but nothing writes there any more."},
	{"start", (PyCFunction)(void (*)(void))native_loader_start, METH_VARARGS | METH_KEYWORDS,
	 "start($self, model, reads, *, keep=None, wait_stream=0, signal_stream=0, io_timeout=None)\n--\n\n"
	 "Starts to load ranges of tensors into memory of the caller's; answers with a Job.\n\n"
	 "reads: tuples (name or number, offset, length, address, room): bytes of the tensor from `offset` on (length None or -1: to\n"
	 "its end), to `address` on the loader's device, with `room` bytes there. (places, address, room) stands for the tensors\n"
	 "of a block, as Model.blocks() lays them out. All are checked first: all start, or none.\n"
	 "keep: kept alive until nothing can write there any more, even if the Job is dropped before.\n"
	 "wait_stream, signal_stream: CUDA streams as int. Writing starts after what is queued on the first; what is queued on the\n"
	 "second after a good wait sees what was written. 0: none; 1: the legacy default stream (which torch calls 0).\n"
	 "io_timeout: seconds that one read may take, or None."},
	{"feed", (PyCFunction)(void (*)(void))native_loader_feed, METH_VARARGS | METH_KEYWORDS,
	 "feed($self, model, names=None, *, given_order=False, wait_stream=0, signal_stream=0, io_timeout=None)\n--\n\n"
	 "An iterator of (TensorInfo, Array) with bounded look-ahead: reading goes on in the pool while you use what came.\n\n"
	 "names: names or numbers; None: all. They come in file order, unless given_order is set."},
	{"cache", (PyCFunction)(void (*)(void))native_loader_cache, METH_VARARGS | METH_KEYWORDS,
	 "cache($self, budget, policy=\"lru\", host_budget=None, granularity=None, io_timeout=None, n_events=0)\n--\n\n"
	 "The native part of a headrace.Cache, which is what to use."},
	{"stats", (PyCFunction)(void (*)(void))stats, METH_NOARGS,
	 "stats($self)\n--\n\nAll that this loader ever did, as a dict: bytes, times in ns, reads by engine, memory."},
	{"close", (PyCFunction)(void (*)(void))close_loader, METH_VARARGS | METH_KEYWORDS,
	 "close($self, timeout=None)\n--\n\n"
	 "Cancels what is in flight, ends the threads, gives the pool back. Arrays stay good.\n\n"
	 "Raises headrace.Error (HR_E_BUSY) if something has not settled after `timeout` seconds: then nothing was closed."},
	{"__enter__", enter, METH_NOARGS, NULL},
	{"__exit__", (PyCFunction)(void (*)(void))leave, METH_VARARGS, NULL},
	{NULL, NULL, 0, NULL},
};

static PyGetSetDef properties[] = {
	{"device", (getter)get_device, NULL, "\"cpu\" or \"cuda:N\".", NULL},
	{"closed", (getter)get_closed, NULL, "Whether close() has closed it.", NULL},
	{NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
	{Py_tp_new, (void *)(uintptr_t) new},
	{Py_tp_dealloc, (void *)(uintptr_t)dealloc},
	{Py_tp_methods, methods},
	{Py_tp_getset, properties},
	{Py_tp_doc,
	 "Loader(device=\"cpu\", *, staging_bytes=None, slot_bytes=None, engine=None, caching=\"auto\", readers=None, "
	 "cufile=\"direct\", alloc=None, release=None)\n--\n\n"
	 "The thing that moves bytes: one device, one pool of staging memory, and threads. Good in any thread, for any number\n"
	 "of models; not in a forked child.\n\n"
	 "device: \"cpu\", \"cuda\" or \"cuda:N\".\n"
	 "staging_bytes: all the staging memory there will ever be, in bytes or as \"64MiB\" (the default).\n"
	 "slot_bytes: one read at most.\n"
	 "engine: \"pread\", \"uring\", \"mapped\", \"cufile\"; one asked for by name works or fails. None: chosen for each range.\n"
	 "caching: \"fill\" reads through the page cache, \"bypass\" around it; \"auto\" decides for each range.\n"
	 "readers: threads for blocking reads.\n"
	 "cufile: with engine=\"cufile\", whether its library may read through host memory: \"compat\".\n"
	 "alloc, release: where device memory of tensors comes from, instead of headrace's own pool: alloc(nbytes, align, stream) gives\n"
	 "an address, or None; release(address, nbytes, stream) takes it back. stream: CUDA's, as int, that uses it first or last; 0:\n"
	 "none. They run on a thread that is inside a call of this loader's, or where the last owner of memory drops it."},
	{0, NULL},
};

PyType_Spec native_loader_spec = {
	.name = "headrace.Loader",
	.basicsize = sizeof(struct loader_object),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
	.slots = slots,
};
