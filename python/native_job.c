/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Job: one request, running. It holds its Loader, and `keep`: the memory that it writes. Both stay alive until nothing
 * can write there any more; if the Job is dropped before, they are parked with the handle.
 */
#include "native.h"

struct job_object {
	PyObject_HEAD struct native *native;
	hr_job *job; /* NULL after close() */
	PyObject *loader;
	PyObject *keep;
	unsigned users;
	bool closing;
};

/* (name or number, offset, length, address, room) */
static bool read_of(const struct native *native, const hr_model *model, PyObject *item, struct hr_read *read)
{
	unsigned long long offset, address, room;
	PyObject *key, *length;
	long long end;

	if (!PyTuple_Check(item) || !PyArg_ParseTuple(item, "OKOKK", &key, &offset, &length, &address, &room)) {
		if (!PyErr_Occurred())
			PyErr_Format(PyExc_TypeError, "a read is a tuple (name, offset, length, address, room), not %R",
				     item);
		return false;
	}
	read->length = UINT64_MAX;
	if (length != Py_None) {
		end = PyLong_AsLongLong(length);
		if (PyErr_Occurred())
			return false;
		if (end < -1) {
			PyErr_Format(PyExc_ValueError,
				     "a read's length is %lld: give bytes, or None for the rest of the tensor", end);
			return false;
		}
		if (end >= 0)
			read->length = (uint64_t)end;
	}
	read->offset = offset;
	read->dst = (void *)(uintptr_t)address;
	read->dst_bytes = room;
	return native_tensor_number(native, model, key, &read->tensor);
}

struct hr_read *native_reads_add(struct native_reads *reads)
{
	size_t room = reads->room ? 2 * reads->room : 64;
	struct hr_read *more;

	if (reads->n == reads->room) {
		more = PyMem_Realloc(reads->reads, room * sizeof(*more));
		if (!more) {
			PyErr_NoMemory();
			return NULL;
		}
		reads->reads = more;
		reads->room = room;
	}
	reads->reads[reads->n] = (struct hr_read){0};
	return &reads->reads[reads->n++];
}

/* A tuple of five is a read, one of three a block. */
static bool add_reads(const struct native *native, const hr_model *model, PyObject *item, struct native_reads *reads)
{
	struct hr_read *read;

	if (PyTuple_Check(item) && PyTuple_Size(item) == 3)
		return native_block_reads(item, reads);
	read = native_reads_add(reads);
	return read && read_of(native, model, item, read);
}

static bool reads_of(const struct native *native, const hr_model *model, PyObject *list, struct native_reads *reads)
{
	for (Py_ssize_t i = 0; i < PyList_Size(list); i++) {
		if (!add_reads(native, model, PyList_GetItem(list, i), reads))
			return false;
	}
	return true;
}

/* Seconds to milliseconds that are not 0, for 0 means "no deadline". */
static bool deadline_of(PyObject *value, uint32_t *out)
{
	double seconds;

	*out = 0;
	if (!native_seconds(value, &seconds))
		return false;
	if (seconds >= 0)
		*out = seconds >= 4e6 ? UINT32_MAX - 1 : (uint32_t)(seconds * 1000) + 1;
	return true;
}

static struct job_object *job_new(struct loader_object *loader, PyObject *keep)
{
	struct job_object *self = PyObject_New(struct job_object, loader->native->job_type);

	if (!self)
		return NULL;
	self->native = loader->native;
	self->job = NULL;
	self->loader = Py_NewRef((PyObject *)loader);
	self->keep = Py_NewRef(keep);
	self->users = 0;
	self->closing = false;
	return self;
}

static PyObject *start(struct loader_object *loader, hr_model *model, PyObject *list, const struct hr_job_opts *opts,
		       PyObject *keep)
{
	static const struct hr_read none;
	struct native_reads reads = {0};
	struct job_object *self = reads_of(loader->native, model, list, &reads) ? job_new(loader, keep) : NULL;
	int rc;

	if (!self) {
		PyMem_Free(reads.reads);
		return NULL;
	}
	Py_BEGIN_ALLOW_THREADS rc = hr_job_start(loader->loader, model, reads.n ? reads.reads : &none, reads.n, opts,
						 &self->job);
	Py_END_ALLOW_THREADS PyMem_Free(reads.reads);
	if (!rc)
		return (PyObject *)self;
	native_fail(loader->native);
	Py_DECREF((PyObject *)self);
	return NULL;
}

PyObject *native_loader_start(struct loader_object *self, PyObject *args, PyObject *kwargs)
{
	static char *keywords[] = {"model", "reads", "keep", "wait_stream", "signal_stream", "io_timeout", NULL};
	struct hr_job_opts opts = HR_JOB_OPTS_INIT;
	PyObject *model_object, *sequence, *list, *keep = Py_None, *timeout = Py_None, *job = NULL;
	unsigned long long wait_stream = 0, signal_stream = 0;
	hr_model *model;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|$OKKO:start", keywords, &model_object, &sequence, &keep,
					 &wait_stream, &signal_stream, &timeout) ||
	    !deadline_of(timeout, &opts.io_timeout_ms))
		return NULL;
	opts.wait_stream = (void *)(uintptr_t)wait_stream;
	opts.signal_stream = (void *)(uintptr_t)signal_stream;
	list = PySequence_List(sequence);
	if (!list || !native_loader_enter(self)) {
		Py_XDECREF(list);
		return NULL;
	}
	model = native_model(self->native, model_object);
	if (model)
		job = start(self, model, list, &opts, keep);
	hr_model_close(model);
	native_loader_leave(self);
	Py_DECREF(list);
	return job;
}

static void dealloc(struct job_object *self)
{
	PyTypeObject *type = Py_TYPE((PyObject *)self);
	const struct parked parked = {.job = self->job, .keep = self->keep, .owner = self->loader};

	if (self->job && hr_job_close(self->job, 0) == HR_E_BUSY) {
		native_park(self->native, &parked);
	} else {
		Py_XDECREF(self->keep);
		Py_XDECREF(self->loader);
	}
	PyObject_Free(self);
	Py_DECREF(type);
}

static bool is_open(const struct job_object *self)
{
	if (self->job && !self->closing)
		return true;
	PyErr_SetString(PyExc_ValueError, "the job is closed");
	return false;
}

static PyObject *wait_job(struct job_object *self, PyObject *args, PyObject *kwargs)
{
	double seconds;
	bool good;

	if (!native_timeout(args, kwargs, "|O:wait", &seconds))
		return NULL;
	if (!is_open(self))
		return NULL;
	self->users++;
	good = native_job_settle(self->native, self->job, NULL, seconds);
	self->users--;
	if (!good)
		return NULL;
	Py_RETURN_NONE;
}

static PyObject *cancel(struct job_object *self, PyObject *unused)
{
	(void)unused;
	if (!is_open(self))
		return NULL;
	if (hr_job_cancel(self->job))
		return native_fail(self->native);
	Py_RETURN_NONE;
}

static PyObject *stats(struct job_object *self, PyObject *unused)
{
	struct hr_stats found = HR_STATS_INIT;

	(void)unused;
	if (!is_open(self))
		return NULL;
	return hr_job_stats(self->job, &found) ? native_fail(self->native) : native_stats(&found);
}

static PyObject *fileno_of(struct job_object *self, PyObject *unused)
{
	int fd;

	(void)unused;
	if (!is_open(self))
		return NULL;
	return hr_job_fd(self->job, &fd) ? native_fail(self->native) : PyLong_FromLong(fd);
}

static PyObject *await(PyObject *self)
{
	PyObject *module = PyImport_ImportModule("headrace._aio");
	PyObject *coroutine = module ? PyObject_CallMethod(module, "settled", "O", self) : NULL;
	PyObject *iterator = coroutine ? PyObject_CallMethod(coroutine, "__await__", NULL) : NULL;

	Py_XDECREF(coroutine);
	Py_XDECREF(module);
	return iterator;
}

/* Cancels and waits until it has settled; what it ended with is of no interest any more. */
static bool close_within(struct job_object *self, double until)
{
	int rc = 0;

	hr_job_cancel(self->job);
	for (;;) {
		Py_BEGIN_ALLOW_THREADS rc = hr_job_wait(self->job, until >= 0 && native_now() >= until ? 0 : SLICE_MS);
		Py_END_ALLOW_THREADS if (rc != HR_E_PENDING || (until >= 0 && native_now() >= until)) break;
		if (PyErr_CheckSignals() < 0)
			return false;
	}
	if (rc == HR_E_PENDING || rc == HR_E_FORKED) {
		native_fail(self->native);
		return false;
	}
	if (!native_wait_unused(&self->users, until)) {
		if (!PyErr_Occurred())
			native_fail_with(self->native, HR_E_BUSY,
					 "another thread is still inside a call with this job");
		return false;
	}
	hr_job_close(self->job, HR_FOREVER); /* settled: it does not wait */
	self->job = NULL;
	return true;
}

static PyObject *close_job(struct job_object *self, PyObject *args, PyObject *kwargs)
{
	PyObject *keep;
	double seconds;
	bool good;

	if (!native_timeout(args, kwargs, "|O:close", &seconds))
		return NULL;
	if (!self->job)
		Py_RETURN_NONE;
	if (!is_open(self))
		return NULL;
	self->closing = true;
	good = close_within(self, seconds >= 0 ? native_now() + seconds : -1);
	self->closing = false;
	if (!good)
		return NULL;
	keep = self->keep;
	self->keep = NULL;
	Py_XDECREF(keep);
	Py_RETURN_NONE;
}

static PyObject *enter(PyObject *self, PyObject *unused)
{
	(void)unused;
	return Py_NewRef(self);
}

static PyObject *leave(struct job_object *self, PyObject *unused)
{
	PyObject *empty = PyTuple_New(0), *made = empty ? close_job(self, empty, NULL) : NULL;

	(void)unused;
	Py_XDECREF(empty);
	return made;
}

static PyMethodDef methods[] = {
	{"wait", (PyCFunction)(void (*)(void))wait_job, METH_VARARGS | METH_KEYWORDS,
	 "wait($self, timeout=None)\n--\n\n"
	 "Waits until every byte has arrived. Raises the job's error: then no byte at its destinations may be trusted, and nothing\n"
	 "writes there any more.\n\n"
	 "timeout: seconds. When it is over first, headrace.Unfinished (a TimeoutError) is raised and the job goes on: its memory is\n"
	 "still being written. Ctrl-C cancels the job and waits until nothing can write any more."},
	{"cancel", (PyCFunction)(void (*)(void))cancel, METH_NOARGS,
	 "cancel($self)\n--\n\nAsks the job to end early. Does not wait."},
	{"stats", (PyCFunction)(void (*)(void))stats, METH_NOARGS,
	 "stats($self)\n--\n\nWhat it has done so far, as a dict."},
	{"fileno", (PyCFunction)(void (*)(void))fileno_of, METH_NOARGS,
	 "fileno($self)\n--\n\nA file descriptor that becomes readable when the job has settled, for select. Do not close it."},
	{"close", (PyCFunction)(void (*)(void))close_job, METH_VARARGS | METH_KEYWORDS,
	 "close($self, timeout=None)\n--\n\nCancels, and waits until nothing can write to its destinations any more."},
	{"__enter__", enter, METH_NOARGS, NULL},
	{"__exit__", (PyCFunction)(void (*)(void))leave, METH_VARARGS, NULL},
	{NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
	{Py_tp_dealloc, (void *)(uintptr_t)dealloc},
	{Py_am_await, (void *)(uintptr_t)await},
	{Py_tp_methods, methods},
	{Py_tp_doc, "A request to a Loader, running. `await job` waits in asyncio; wait() waits here.\n\n"
		    "The memory it writes is its own until wait() or close() has answered, a time-out excepted."},
	{0, NULL},
};

PyType_Spec native_job_spec = {
	.name = "headrace.Job",
	.basicsize = sizeof(struct job_object),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
	.slots = slots,
};
