/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The native part of headrace.Cache. Loader.cache() makes it; it keeps its Loader, which cannot be closed before it.
 *
 * Getting waits in slices, so that Ctrl-C works. Whoever is inside a call is counted in `users`, since the C library
 * wants nobody inside while a cache is closed.
 */
#include "native.h"

#include <string.h>

/* How long a get without a time-out waits for room that others have pinned. Room that nobody gives back would else be
 * waited for without end, by a thread that may hold it itself. */
#define ROOM_SECONDS 30.0

struct cache_object {
	PyObject_HEAD struct native *native;
	hr_cache *cache; /* NULL after close() */
	struct loader_object *loader;
	PyObject *groups; /* dict: (Model, names) to Group, for get() with names */
	unsigned users;
	bool closing;
};

/* A failure; what a caller's allocator raised on the way is its cause. */
static PyObject *fail(const struct cache_object *self)
{
	native_fail(self->native);
	native_hooks_cause(self->loader->hooks);
	return NULL;
}

static bool policy_of(const char *text, uint32_t *out)
{
	*out = !strcmp(text, "loop") ? HR_POLICY_LOOP : HR_POLICY_LRU;
	if (*out == HR_POLICY_LOOP || !strcmp(text, "lru"))
		return true;
	PyErr_Format(PyExc_ValueError, "policy is \"%s\": use \"lru\" or \"loop\"", text);
	return false;
}

static PyObject *cache_new(struct loader_object *loader, const struct hr_cache_opts *opts)
{
	struct cache_object *self = PyObject_New(struct cache_object, loader->native->cache_type);
	int rc;

	if (!self)
		return NULL;
	self->native = loader->native;
	self->cache = NULL;
	self->loader = (struct loader_object *)Py_NewRef((PyObject *)loader);
	self->users = 0;
	self->closing = false;
	self->groups = PyDict_New();
	if (self->groups) {
		Py_BEGIN_ALLOW_THREADS rc = hr_cache_open(loader->loader, opts, &self->cache);
		Py_END_ALLOW_THREADS if (!rc)
		{
			loader->n_caches++;
			return (PyObject *)self;
		}
		native_fail(loader->native);
	}
	Py_DECREF((PyObject *)self);
	return NULL;
}

PyObject *native_loader_cache(struct loader_object *self, PyObject *args, PyObject *kwargs)
{
	static char *keywords[] = {"budget", "policy", "host_budget", "granularity", "io_timeout", "n_events", NULL};
	struct hr_cache_opts opts = HR_CACHE_OPTS_INIT;
	PyObject *budget, *host = Py_None, *granularity = Py_None, *timeout = Py_None, *cache;
	const char *policy = "lru";
	unsigned int n_events = 0;
	double seconds;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|sOOOI:cache", keywords, &budget, &policy, &host, &granularity,
					 &timeout, &n_events) ||
	    !native_size(budget, &opts.budget_bytes) || !native_size(host, &opts.host_budget_bytes) ||
	    !native_size(granularity, &opts.granularity_bytes) || !policy_of(policy, &opts.policy) ||
	    !native_seconds(timeout, &seconds))
		return NULL;
	opts.io_timeout_ms = seconds < 0 ? 0 : seconds >= 4e6 ? UINT32_MAX - 1 : (uint32_t)(seconds * 1000) + 1;
	opts.n_events = n_events;
	if (!native_loader_enter(self))
		return NULL;
	cache = cache_new(self, &opts);
	native_loader_leave(self);
	return cache;
}

static void dealloc(struct cache_object *self)
{
	PyTypeObject *type = Py_TYPE((PyObject *)self);
	const struct parked parked = {.cache = self->cache, .owner = (PyObject *)self->loader};

	if (self->cache)
		self->loader->n_caches--;
	if (self->cache && hr_cache_close(self->cache, 0) == HR_E_BUSY)
		native_park(self->native, &parked);
	else
		Py_DECREF((PyObject *)self->loader);
	Py_XDECREF(self->groups);
	PyObject_Free(self);
	Py_DECREF(type);
}

static bool enter_cache(struct cache_object *self)
{
	if (!self->cache || self->closing) {
		PyErr_SetString(PyExc_ValueError, "the cache is closed");
		return false;
	}
	if (self->native->parked)
		native_unpark(self->native);
	self->users++;
	return true;
}

/* ------------------------------------------------------------------------------------------------------- getting */

/* The group that is meant by a Group, or by a Model and names; a new reference. */
static PyObject *group_of(struct cache_object *self, PyObject *what, PyObject *names)
{
	PyObject *key, *tuple, *group;

	if (names == Py_None)
		return native_group_handle(self->native, what) ? Py_NewRef(what) : NULL;
	tuple = PyUnicode_Check(names) || PyLong_Check(names) ? Py_NewRef(names) : PySequence_Tuple(names);
	key = tuple ? PyTuple_Pack(2, what, tuple) : NULL;
	Py_XDECREF(tuple);
	if (!key)
		return NULL;
	group = Py_XNewRef(PyDict_GetItemWithError(self->groups, key));
	if (!group && !PyErr_Occurred()) {
		group = native_group(self->native, what, names);
		if (group && PyDict_SetItem(self->groups, key, group) < 0)
			Py_CLEAR(group);
	}
	Py_DECREF(key);
	return group;
}

/* Gets in slices. 0 with the buffer, a code, or 1 with an exception set. */
static int get_slice_by_slice(struct cache_object *self, hr_group *group, void *stream, double timeout, hr_buffer **out)
{
	struct hr_cache_get_opts opts = HR_CACHE_GET_OPTS_INIT;
	double start = 0, room = timeout >= 0 ? timeout : ROOM_SECONDS;
	int rc;

	opts.wait_stream = stream;
	opts.signal_stream = stream;
	opts.load_timeout_ms = SLICE_MS;
	opts.room_timeout_ms = timeout == 0 ? 0 : SLICE_MS;
	for (;;) {
		double now;

		Py_BEGIN_ALLOW_THREADS rc = hr_cache_get(self->cache, group, &opts, out);
		Py_END_ALLOW_THREADS if (rc != HR_E_PENDING && rc != HR_E_FULL) return rc;
		now = native_now();
		start = start > 0 ? start : now - SLICE_MS / 1e3;
		if (rc == HR_E_FULL && now - start >= room)
			return rc;
		if (rc == HR_E_PENDING && timeout >= 0 && now - start >= timeout)
			return rc;
		if (PyErr_CheckSignals() < 0)
			return 1;
		if (self->closing) {
			native_fail_with(self->native, HR_E_CANCELLED, "the cache is being closed");
			return 1;
		}
	}
}

static PyObject *get_group(struct cache_object *self, PyObject *group, void *stream, double timeout)
{
	hr_buffer *buffer = NULL;
	int rc;

	if (!enter_cache(self))
		return NULL;
	rc = get_slice_by_slice(self, native_group_handle(self->native, group), stream, timeout, &buffer);
	self->users--;
	if (rc == 0)
		return native_lease(self->native, group, buffer, self->loader->device_name);
	return rc == 1 ? NULL : fail(self);
}

/* The arguments of get(), by hand: parsing them by a format would cost more than a hit does. */
static bool get_arguments(PyObject *const *args, Py_ssize_t n, PyObject *keywords, PyObject **values)
{
	static const char *const names[] = {"group", "names", "stream", "timeout"};
	Py_ssize_t n_keywords = keywords ? PyTuple_Size(keywords) : 0;

	if (n > 4) {
		PyErr_Format(PyExc_TypeError, "get() takes at most 4 arguments, not %zd", n);
		return false;
	}
	for (Py_ssize_t i = 0; i < n; i++)
		values[i] = args[i];
	for (Py_ssize_t i = 0; i < n_keywords; i++) {
		PyObject *keyword = PyTuple_GetItem(keywords, i);
		size_t at = 0;

		while (at < 4 && PyUnicode_CompareWithASCIIString(keyword, names[at]) != 0)
			at++;
		if (at == 4 || (Py_ssize_t)at < n) {
			PyErr_Format(PyExc_TypeError, "get() got an unexpected argument %R", keyword);
			return false;
		}
		values[at] = args[n + i];
	}
	if (values[0])
		return true;
	PyErr_SetString(PyExc_TypeError, "get() needs a Group, or a Model and names");
	return false;
}

static PyObject *get(struct cache_object *self, PyObject *const *args, Py_ssize_t n, PyObject *keywords)
{
	PyObject *values[4] = {NULL, Py_None, NULL, Py_None}, *group, *lease;
	unsigned long long stream = 0;
	double timeout;

	if (!get_arguments(args, n, keywords, values) || !native_seconds(values[3], &timeout))
		return NULL;
	if (values[2]) {
		stream = PyLong_AsUnsignedLongLong(values[2]);
		if (stream == (unsigned long long)-1 && PyErr_Occurred())
			return NULL;
	}
	group = group_of(self, values[0], values[1]);
	lease = group ? get_group(self, group, (void *)(uintptr_t)stream, timeout) : NULL;
	Py_XDECREF(group);
	return lease;
}

static PyObject *group(struct cache_object *self, PyObject *args)
{
	PyObject *model, *names;

	if (!PyArg_ParseTuple(args, "OO:group", &model, &names))
		return NULL;
	return group_of(self, model, names);
}

static PyObject *prefetch(struct cache_object *self, PyObject *args)
{
	struct hr_cache_get_opts opts = HR_CACHE_GET_OPTS_INIT;
	PyObject *what, *names = Py_None, *found;
	unsigned long long stream = 0;
	int rc;

	if (!PyArg_ParseTuple(args, "O|OK:prefetch", &what, &names, &stream))
		return NULL;
	found = group_of(self, what, names);
	if (!found || !enter_cache(self)) {
		Py_XDECREF(found);
		return NULL;
	}
	opts.wait_stream = (void *)(uintptr_t)stream;
	Py_BEGIN_ALLOW_THREADS rc = hr_cache_prefetch(self->cache, native_group_handle(self->native, found), &opts);
	Py_END_ALLOW_THREADS self->users--;
	Py_DECREF(found);
	if (rc)
		return fail(self);
	Py_RETURN_NONE;
}

static PyObject *evict(struct cache_object *self, PyObject *args)
{
	PyObject *what, *names = Py_None, *found;
	uint64_t freed = 0;
	int rc;

	if (!PyArg_ParseTuple(args, "O|O:evict", &what, &names))
		return NULL;
	found = group_of(self, what, names);
	if (!found || !enter_cache(self)) {
		Py_XDECREF(found);
		return NULL;
	}
	Py_BEGIN_ALLOW_THREADS rc = hr_cache_evict(self->cache, native_group_handle(self->native, found), &freed);
	Py_END_ALLOW_THREADS self->users--;
	Py_DECREF(found);
	return rc ? fail(self) : PyLong_FromUnsignedLongLong(freed);
}

static PyObject *charge(struct cache_object *self, PyObject *args)
{
	PyObject *what, *names = Py_None, *found, *bytes = NULL;

	if (!PyArg_ParseTuple(args, "O|O:charge", &what, &names))
		return NULL;
	found = group_of(self, what, names);
	if (found && enter_cache(self)) {
		bytes = PyLong_FromUnsignedLongLong(
			hr_cache_charge(self->cache, native_group_handle(self->native, found)));
		self->users--;
	}
	Py_XDECREF(found);
	return bytes;
}

/* ----------------------------------------------------------------------------------------------- memory and closing */

static PyObject *trim(struct cache_object *self, PyObject *value)
{
	uint64_t bytes = UINT64_MAX, freed = 0;
	int rc;

	if ((value != Py_None && !native_size(value, &bytes)) || !enter_cache(self))
		return NULL;
	Py_BEGIN_ALLOW_THREADS rc = hr_cache_trim(self->cache, bytes, &freed);
	Py_END_ALLOW_THREADS self->users--;
	return rc ? fail(self) : PyLong_FromUnsignedLongLong(freed);
}

static PyObject *set_budget(struct cache_object *self, PyObject *value)
{
	uint64_t bytes;
	int rc;

	if (!native_size(value, &bytes) || !enter_cache(self))
		return NULL;
	Py_BEGIN_ALLOW_THREADS rc = hr_cache_set_budget(self->cache, bytes);
	Py_END_ALLOW_THREADS self->users--;
	if (rc)
		return fail(self);
	Py_RETURN_NONE;
}

static PyObject *stats(struct cache_object *self, PyObject *model_object)
{
	struct hr_cache_stats found = HR_CACHE_STATS_INIT;
	hr_model *model = NULL;
	int rc;

	if (model_object != Py_None) {
		model = native_model(self->native, model_object);
		if (!model)
			return NULL;
	}
	if (!enter_cache(self)) {
		hr_model_close(model);
		return NULL;
	}
	rc = hr_cache_stats(self->cache, model, &found);
	self->users--;
	hr_model_close(model);
	return rc ? native_fail(self->native) : native_cache_stats(&found);
}

/* The events not taken yet, as (kind, start_ns, duration_ns, group, bytes, prefetch), and how many were lost. */
static PyObject *events(struct cache_object *self, PyObject *unused)
{
	struct hr_cache_event some[64];
	PyObject *list = PyList_New(0);
	uint64_t lost = 0, lost_now = 0;
	size_t n = 0;
	int rc = 0;

	(void)unused;
	if (!list || !enter_cache(self)) {
		Py_XDECREF(list);
		return NULL;
	}
	do {
		rc = hr_cache_events(self->cache, some, sizeof(some) / sizeof(some[0]), &n, &lost_now);
		lost += lost_now;
		for (size_t i = 0; !rc && list && i < n; i++) {
			PyObject *event = Py_BuildValue(
				"IKKKKi", (unsigned)some[i].kind, (unsigned long long)some[i].start_ns,
				(unsigned long long)some[i].duration_ns, (unsigned long long)some[i].group,
				(unsigned long long)some[i].bytes, (int)some[i].prefetch);

			if (!event || PyList_Append(list, event) < 0)
				Py_CLEAR(list);
			Py_XDECREF(event);
		}
	} while (!rc && list && n == sizeof(some) / sizeof(some[0]));
	self->users--;
	if (rc || !list) {
		Py_XDECREF(list);
		return rc ? native_fail(self->native) : NULL;
	}
	return Py_BuildValue("NK", list, (unsigned long long)lost);
}

static bool close_within(struct cache_object *self, double until)
{
	int rc;

	if (!native_wait_unused(&self->users, until)) {
		if (!PyErr_Occurred())
			native_fail_with(self->native, HR_E_BUSY,
					 "another thread is still inside a call with this cache; nothing was closed");
		return false;
	}
	for (;;) {
		Py_BEGIN_ALLOW_THREADS rc = hr_cache_close(self->cache,
							   until >= 0 && native_now() >= until ? 0 : SLICE_MS);
		Py_END_ALLOW_THREADS if (rc != HR_E_BUSY || (until >= 0 && native_now() >= until)) break;
		if (PyErr_CheckSignals() < 0)
			return false;
	}
	if (rc) {
		native_fail(self->native);
		return false;
	}
	self->cache = NULL;
	self->loader->n_caches--;
	PyDict_Clear(self->groups);
	return true;
}

static PyObject *close_cache(struct cache_object *self, PyObject *args, PyObject *kwargs)
{
	double seconds;
	bool good;

	if (!native_timeout(args, kwargs, "|O:close", &seconds))
		return NULL;
	if (!self->cache)
		Py_RETURN_NONE;
	if (self->closing)
		return native_fail_with(self->native, HR_E_BUSY, "another thread is closing this cache");
	self->closing = true;
	good = close_within(self, seconds >= 0 ? native_now() + seconds : -1);
	self->closing = false;
	if (!good)
		return NULL;
	Py_RETURN_NONE;
}

static PyObject *get_closed(struct cache_object *self, void *unused)
{
	(void)unused;
	return PyBool_FromLong(!self->cache);
}

static PyMethodDef methods[] = {
	{"group", (PyCFunction)(void (*)(void))group, METH_VARARGS,
	 "group($self, model, names, /)\n--\n\nThe Group of these tensors."},
	{"get", (PyCFunction)(void (*)(void))get, METH_FASTCALL | METH_KEYWORDS,
	 "get($self, group, names=None, stream=0, timeout=None)\n--\n\nA Lease. See headrace.Cache."},
	{"prefetch", (PyCFunction)(void (*)(void))prefetch, METH_VARARGS,
	 "prefetch($self, group, names=None, stream=0, /)\n--\n\nBegins to bring a group in."},
	{"evict", (PyCFunction)(void (*)(void))evict, METH_VARARGS,
	 "evict($self, group, names=None, /)\n--\n\nEvicts a group; answers with the bytes that are free by it."},
	{"charge", (PyCFunction)(void (*)(void))charge, METH_VARARGS,
	 "charge($self, group, names=None, /)\n--\n\nWhat a group counts against the budget."},
	{"trim", (PyCFunction)(void (*)(void))trim, METH_O,
	 "trim($self, nbytes, /)\n--\n\nGives memory back to the device; None: all that can be had. Answers with the bytes."},
	{"set_budget", (PyCFunction)(void (*)(void))set_budget, METH_O,
	 "set_budget($self, budget, /)\n--\n\nAnother budget."},
	{"stats", (PyCFunction)(void (*)(void))stats, METH_O,
	 "stats($self, model, /)\n--\n\nOf all, or of a Model's groups."},
	{"events", (PyCFunction)(void (*)(void))events, METH_NOARGS,
	 "events($self)\n--\n\n([(kind, start_ns, duration_ns, group, nbytes, prefetch)], lost) since the last call."},
	{"close", (PyCFunction)(void (*)(void))close_cache, METH_VARARGS | METH_KEYWORDS,
	 "close($self, timeout=None)\n--\n\nGives all memory back."},
	{NULL, NULL, 0, NULL},
};

static PyGetSetDef properties[] = {
	{"closed", (getter)get_closed, NULL, "Whether close() has closed it.", NULL},
	{NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
	{Py_tp_dealloc, (void *)(uintptr_t)dealloc},
	{Py_tp_methods, methods},
	{Py_tp_getset, properties},
	{Py_tp_doc, "What headrace.Cache is made of."},
	{0, NULL},
};

PyType_Spec native_cache_spec = {
	.name = "headrace._native.Cache",
	.basicsize = sizeof(struct cache_object),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
	.slots = slots,
};
