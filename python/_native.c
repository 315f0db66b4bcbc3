/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The module headrace._native: its set-up, how errors become exceptions, sizes and times from Python, and the handles
 * that were dropped before they could be closed. native.h says what holds everywhere; read it first.
 */
#include "native.h"

#include <math.h>
#include <string.h>
#include <time.h>

/* ----------------------------------------------------------------------------------------------------------------
 * errors */

static PyObject *text(const char *bytes)
{
	return PyUnicode_DecodeUTF8(bytes, (Py_ssize_t)strlen(bytes), "backslashreplace");
}

/* Gives make_error() all there is to know; it answers with the exception to raise. */
static void raise(const struct native *native, const struct hr_error *error)
{
	PyObject *made;

	if (!native->make_error) { /* the interpreter is ending */
		PyErr_SetString(PyExc_OSError, error->message);
		return;
	}
	made = PyObject_CallFunction(
		native->make_error, "isiNNNNN", (int)error->code, hr_error_name(error->code), (int)error->system,
		text(error->stage), text(error->message), PyUnicode_DecodeFSDefault(error->path), text(error->tensor),
		error->offset == HR_NO_OFFSET ? Py_NewRef(Py_None) : PyLong_FromUnsignedLongLong(error->offset));
	if (made)
		PyErr_SetObject((PyObject *)Py_TYPE(made), made);
	Py_XDECREF(made);
}

PyObject *native_fail(const struct native *native)
{
	raise(native, hr_error_last());
	return NULL;
}

PyObject *native_fail_with(const struct native *native, int code, const char *message)
{
	const struct hr_error error = {code, 0, HR_NO_OFFSET, "call", "", "", message};

	raise(native, &error);
	return NULL;
}

struct native *native_of(PyTypeObject *type)
{
	return PyType_GetModuleState(type);
}

/* ------------------------------------------------------------------------------------------------------- sizes and
 * times */

static bool multiply(const char *unit, uint64_t *out)
{
	static const struct {
		const char *name;
		uint64_t factor;
	} units[] = {{"", 1},
		     {"B", 1},
		     {"kB", 1000},
		     {"KB", 1000},
		     {"MB", 1000000},
		     {"GB", 1000000000},
		     {"TB", 1000000000000},
		     {"KiB", 1 << 10},
		     {"MiB", 1 << 20},
		     {"GiB", 1 << 30},
		     {"TiB", UINT64_C(1) << 40},
		     {"K", 1 << 10},
		     {"M", 1 << 20},
		     {"G", 1 << 30},
		     {"T", UINT64_C(1) << 40}};

	while (*unit == ' ')
		unit++;
	for (size_t i = 0; i < sizeof(units) / sizeof(units[0]); i++)
		if (!strcmp(unit, units[i].name))
			return !__builtin_mul_overflow(*out, units[i].factor, out);
	return false;
}

/* "64MiB", "1 GB", "4096": false if it is none of these. */
static bool size_of_text(const char *at, uint64_t *out)
{
	*out = 0;
	if (*at < '0' || *at > '9')
		return false;
	for (; *at >= '0' && *at <= '9'; at++)
		if (__builtin_mul_overflow(*out, UINT64_C(10), out) ||
		    __builtin_add_overflow(*out, (uint64_t)(*at - '0'), out))
			return false;
	return multiply(at, out);
}

bool native_size(PyObject *value, uint64_t *out)
{
	*out = 0;
	if (value == Py_None)
		return true;
	if (PyUnicode_Check(value)) {
		Py_ssize_t length;
		const char *bytes = PyUnicode_AsUTF8AndSize(value, &length);

		if (bytes && strlen(bytes) == (size_t)length && size_of_text(bytes, out))
			return true;
		PyErr_Clear();
		PyErr_Format(PyExc_ValueError,
			     "%R is not a size: use bytes, or a number with a unit as in \"64MiB\" or \"1GB\"", value);
		return false;
	}
	if (PyBool_Check(value) || !PyLong_Check(value)) {
		PyErr_Format(PyExc_TypeError, "a size is an int or a str, not %R", value);
		return false;
	}
	*out = PyLong_AsUnsignedLongLong(value);
	if (*out == UINT64_MAX && PyErr_Occurred()) {
		PyErr_Clear();
		PyErr_Format(PyExc_ValueError, "%R is not a size: it must be from 0 to 2**64 - 1", value);
		return false;
	}
	return true;
}

static PyObject *parse_size(PyObject *module, PyObject *value)
{
	uint64_t size;

	(void)module;
	if (value == Py_None)
		return PyErr_Format(PyExc_TypeError, "a size is an int or a str, not None");
	return native_size(value, &size) ? PyLong_FromUnsignedLongLong(size) : NULL;
}

bool native_seconds(PyObject *value, double *out)
{
	*out = -1;
	if (!value || value == Py_None)
		return true;
	*out = PyFloat_AsDouble(value);
	if (*out == -1 && PyErr_Occurred())
		return false;
	if (!isnan(*out) && *out >= 0)
		return true;
	PyErr_Format(PyExc_ValueError, "%R is not a time-out: give seconds from 0 on, or None to wait for ever", value);
	return false;
}

bool native_timeout(PyObject *args, PyObject *kwargs, const char *format, double *seconds)
{
	static char *keywords[] = {"timeout", NULL};
	PyObject *timeout = NULL;

	return PyArg_ParseTupleAndKeywords(args, kwargs, format, keywords, &timeout) &&
	       native_seconds(timeout, seconds);
}

double native_now(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

bool native_wait_unused(const unsigned *users, double until)
{
	static const struct timespec a_while = {.tv_nsec = 1000000};

	while (*users > 0) {
		if (PyErr_CheckSignals() < 0)
			return false;
		if (until >= 0 && native_now() >= until)
			return false;
		Py_BEGIN_ALLOW_THREADS nanosleep(&a_while, NULL);
		Py_END_ALLOW_THREADS
	}
	return true;
}

/* ------------------------------------------------------------------------------------------------------- parked
 * handles */

void native_park(struct native *native, const struct parked *what)
{
	struct parked *entry = PyMem_Malloc(sizeof(*entry));

	/* Without memory for the note the handle leaks, and what it writes to stays alive with it. */
	if (!entry)
		return;
	*entry = *what;
	entry->next = native->parked;
	native->parked = entry;
}

static int close_parked(const struct parked *entry)
{
	if (entry->job)
		return hr_job_close(entry->job, 0);
	if (entry->feed)
		return hr_feed_close(entry->feed, 0);
	if (entry->cache)
		return hr_cache_close(entry->cache, 0);
	return hr_loader_close(entry->loader, 0);
}

void native_unpark(struct native *native)
{
	struct parked **link = &native->parked;
	struct parked *done = NULL, *entry;

	if (!native->parked)
		return;
	while (*link) {
		entry = *link;
		if (close_parked(entry) == HR_E_BUSY) {
			link = &entry->next;
			continue;
		}
		*link = entry->next;
		entry->next = done;
		done = entry;
	}
	/* Dropping what they kept may run any code, this function too: the list is whole again by now. */
	while (done) {
		entry = done;
		done = entry->next;
		Py_XDECREF(entry->keep);
		Py_XDECREF(entry->owner);
		PyMem_Free(entry);
	}
}

static PyObject *n_parked(PyObject *module, PyObject *unused)
{
	struct native *native = PyModule_GetState(module);
	long n = 0;

	(void)unused;
	native_unpark(native);
	for (const struct parked *entry = native->parked; entry; entry = entry->next)
		n++;
	return PyLong_FromLong(n);
}

/* ------------------------------------------------------------------------------------------------------------
 * statistics */

static bool put(PyObject *dict, const char *key, PyObject *value)
{
	int rc = value ? PyDict_SetItemString(dict, key, value) : -1;

	Py_XDECREF(value);
	return rc == 0;
}

static PyObject *by_engine(const uint64_t *bytes)
{
	PyObject *dict = PyDict_New();

	for (uint32_t i = 0; dict && i < HR_N_ENGINES; i++)
		if (bytes[i] && hr_engine_name(i) &&
		    !put(dict, hr_engine_name(i), PyLong_FromUnsignedLongLong(bytes[i])))
			Py_CLEAR(dict);
	return dict;
}

PyObject *native_stats(const struct hr_stats *stats)
{
	const struct {
		const char *name;
		uint64_t value;
	} numbers[] = {{"total_bytes", stats->total_bytes},     {"done_bytes", stats->done_bytes},
		       {"total_tensors", stats->total_tensors}, {"read_bytes", stats->read_bytes},
		       {"n_chunks", stats->n_chunks},           {"n_copies", stats->n_copies},
		       {"n_batches", stats->n_batches},         {"elapsed_ns", stats->elapsed_ns},
		       {"first_ns", stats->first_ns},           {"storage_wait_ns", stats->storage_wait_ns},
		       {"copy_wait_ns", stats->copy_wait_ns},   {"read_cpu_ns", stats->read_cpu_ns},
		       {"staging_bytes", stats->staging_bytes}, {"peak_staging_bytes", stats->peak_staging_bytes},
		       {"lost_bytes", stats->lost_bytes},       {"peak_buffer_bytes", stats->peak_buffer_bytes},
		       {"n_readers", stats->n_readers},         {"n_slots", stats->n_slots}};
	PyObject *dict = PyDict_New();
	bool good = dict != NULL;

	for (size_t i = 0; good && i < sizeof(numbers) / sizeof(numbers[0]); i++)
		good = put(dict, numbers[i].name, PyLong_FromUnsignedLongLong(numbers[i].value));
	good = good && put(dict, "cached_bytes", by_engine(stats->cached_bytes));
	good = good && put(dict, "direct_bytes", by_engine(stats->direct_bytes));
	good = good && put(dict, "note", text(stats->note));
	if (!good)
		Py_CLEAR(dict);
	return dict;
}

PyObject *native_cache_stats(const struct hr_cache_stats *stats)
{
	static const struct {
		const char *name;
		size_t at;
	} fields[] = {
#define FIELD(name) {#name, offsetof(struct hr_cache_stats, name)}
		FIELD(budget_bytes),   FIELD(used_bytes),        FIELD(pinned_bytes),    FIELD(free_bytes),
		FIELD(peak_bytes),     FIELD(n_groups),          FIELD(n_pinned),        FIELD(n_hits),
		FIELD(n_joins),        FIELD(n_misses),          FIELD(n_loads),         FIELD(n_failures),
		FIELD(n_evictions),    FIELD(n_waits),           FIELD(n_prefetches),    FIELD(n_passed_over),
		FIELD(hit_bytes),      FIELD(loaded_bytes),      FIELD(evicted_bytes),   FIELD(load_wait_ns),
		FIELD(room_wait_ns),   FIELD(host_budget_bytes), FIELD(host_used_bytes), FIELD(host_peak_bytes),
		FIELD(n_host_groups),  FIELD(n_host_hits),       FIELD(n_host_saves),    FIELD(n_host_evictions),
		FIELD(host_hit_bytes),
#undef FIELD
	};
	PyObject *dict = PyDict_New();

	for (size_t i = 0; dict && i < sizeof(fields) / sizeof(fields[0]); i++) {
		uint64_t value;

		memcpy(&value, (const char *)stats + fields[i].at, sizeof(value));
		if (!put(dict, fields[i].name, PyLong_FromUnsignedLongLong(value)))
			Py_CLEAR(dict);
	}
	return dict;
}

/* Rows of what `headrace engines` prints: (kind, name, usable, reason). */
static PyObject *probe(PyObject *module, PyObject *model_object)
{
	const struct native *native = PyModule_GetState(module);
	struct hr_probe_row rows[32];
	hr_model *model = NULL;
	PyObject *list;
	size_t n = 0;
	int rc;

	if (model_object != Py_None) {
		model = native_model(native, model_object);
		if (!model)
			return NULL;
	}
	Py_BEGIN_ALLOW_THREADS rc = hr_probe(model, rows, sizeof(rows) / sizeof(rows[0]), &n);
	hr_model_close(model);
	Py_END_ALLOW_THREADS if (rc) return native_fail(native);
	list = PyList_New(0);
	for (size_t i = 0; list && i < n && i < sizeof(rows) / sizeof(rows[0]); i++) {
		PyObject *row = Py_BuildValue("ssNN", rows[i].kind, rows[i].name, PyBool_FromLong(rows[i].usable),
					      text(rows[i].reason));

		if (!row || PyList_Append(list, row) < 0)
			Py_CLEAR(list);
		Py_XDECREF(row);
	}
	return list;
}

/* ----------------------------------------------------------------------------------------------------------------
 * module */

static bool add_type(PyObject *module, PyTypeObject **out, PyType_Spec *spec)
{
	*out = (PyTypeObject *)PyType_FromModuleAndSpec(module, spec, NULL);
	return *out && PyModule_AddType(module, *out) == 0;
}

static int exec(PyObject *module)
{
	struct native *native = PyModule_GetState(module);
	PyObject *errors;

	if (PyInterpreterState_GetID(PyInterpreterState_Get()) != 0) {
		PyErr_SetString(PyExc_ImportError,
				"headrace works in the main interpreter only, not in a sub-interpreter");
		return -1;
	}
	errors = PyImport_ImportModule("headrace._errors");
	native->make_error = errors ? PyObject_GetAttrString(errors, "make") : NULL;
	Py_XDECREF(errors);
	if (!native->make_error || !native_model_types(native, module))
		return -1;
	if (!add_type(module, &native->model_type, &native_model_spec) ||
	    !add_type(module, &native->loader_type, &native_loader_spec) ||
	    !add_type(module, &native->job_type, &native_job_spec) ||
	    !add_type(module, &native->feed_type, &native_feed_spec) ||
	    !add_type(module, &native->array_type, &native_array_spec) ||
	    !add_type(module, &native->cache_type, &native_cache_spec) ||
	    !add_type(module, &native->group_type, &native_group_spec) ||
	    !add_type(module, &native->lease_type, &native_lease_spec))
		return -1;
	return PyModule_AddStringConstant(module, "version", hr_version());
}

static int traverse(PyObject *module, visitproc visit, void *arg)
{
	const struct native *native = PyModule_GetState(module);

	if (!native)
		return 0;
	Py_VISIT(native->make_error);
	Py_VISIT((PyObject *)native->model_type);
	Py_VISIT((PyObject *)native->loader_type);
	Py_VISIT((PyObject *)native->job_type);
	Py_VISIT((PyObject *)native->feed_type);
	Py_VISIT((PyObject *)native->array_type);
	Py_VISIT((PyObject *)native->cache_type);
	Py_VISIT((PyObject *)native->group_type);
	Py_VISIT((PyObject *)native->lease_type);
	Py_VISIT((PyObject *)native->tensor_type);
	Py_VISIT((PyObject *)native->shard_type);
	return 0;
}

static int clear(PyObject *module)
{
	struct native *native = PyModule_GetState(module);

	if (!native)
		return 0;
	Py_CLEAR(native->make_error);
	Py_CLEAR(native->model_type);
	Py_CLEAR(native->loader_type);
	Py_CLEAR(native->job_type);
	Py_CLEAR(native->feed_type);
	Py_CLEAR(native->array_type);
	Py_CLEAR(native->cache_type);
	Py_CLEAR(native->group_type);
	Py_CLEAR(native->lease_type);
	Py_CLEAR(native->tensor_type);
	Py_CLEAR(native->shard_type);
	return 0;
}

static PyMethodDef methods[] = {
	{"open", (PyCFunction)(void (*)(void))native_open, METH_VARARGS | METH_KEYWORDS,
	 "open(source, *, no_symlinks=False)\n--\n\n"
	 "Opens a checkpoint and checks all its headers; reads no tensor data.\n\n"
	 "source: a directory, an index (\"model.safetensors.index.json\"), a file, or a list of files that form one model.\n"
	 "no_symlinks: refuse symbolic links (the Hugging Face cache consists of them).\n"
	 "Raises headrace.Error, with the file and the byte where there is one."},
	{"parse_size", parse_size, METH_O,
	 "parse_size(value, /)\n--\n\nBytes of \"64MiB\", \"1GB\", \"4096\" or 4096. Raises ValueError for what is none."},
	{"probe", probe, METH_O,
	 "probe(model, /)\n--\n\n"
	 "Which engines and devices can be used here, as (kind, name, usable, reason); with a Model, for its files. None: in general."},
	{"_n_parked", n_parked, METH_NOARGS,
	 "_n_parked()\n--\n\nTries to close the handles that were dropped while in use; answers how many are left. For tests."},
	{NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)(uintptr_t)exec}, {0, NULL}};

static struct PyModuleDef definition = {
	.m_base = PyModuleDef_HEAD_INIT,
	.m_name = "headrace._native",
	.m_doc = "The C library of headrace, as headrace's Python code uses it. Use the package headrace instead.",
	.m_size = sizeof(struct native),
	.m_methods = methods,
	.m_slots = slots,
	.m_traverse = traverse,
	.m_clear = clear,
};

PyMODINIT_FUNC PyInit__native(void);

PyMODINIT_FUNC PyInit__native(void)
{
	return PyModuleDef_Init(&definition);
}
