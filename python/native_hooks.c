/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Device memory from Python: what Loader(alloc=, release=) was given, called from the C library.
 *
 * The library calls them on a thread that is inside one of its calls, where the GIL was let go, or where the last owner
 * of a buffer let go after the loader was closed. Buffers may outlive the Loader, so the hooks live until the Loader is
 * gone and all that they gave out has come back. All fields are touched with the GIL held.
 */
#include "native.h"

struct hooks {
	PyObject *alloc, *release;
	PyObject *raised; /* what alloc raised last, or NULL: becomes the cause of the library's error */
	unsigned long long outstanding;
	bool has_loader;
};

static void free_if_unused(struct hooks *hooks)
{
	if (hooks->has_loader || hooks->outstanding)
		return;
	Py_CLEAR(hooks->alloc);
	Py_CLEAR(hooks->release);
	Py_CLEAR(hooks->raised);
	PyMem_Free(hooks);
}

/* The exception that is set, normalised; the indicator is cleared. */
static PyObject *take_exception(void)
{
	PyObject *type, *value, *trace;

	PyErr_Fetch(&type, &value, &trace);
	PyErr_NormalizeException(&type, &value, &trace);
	if (trace && value)
		PyException_SetTraceback(value, trace);
	Py_XDECREF(type);
	Py_XDECREF(trace);
	return value;
}

static void *call_alloc(void *ctx, uint64_t bytes, uint64_t align, void *stream)
{
	struct hooks *hooks = ctx;
	PyGILState_STATE gil = PyGILState_Ensure();
	PyObject *answer = PyObject_CallFunction(hooks->alloc, "KKK", (unsigned long long)bytes,
						 (unsigned long long)align, (unsigned long long)(uintptr_t)stream);
	void *memory = answer && answer != Py_None ? PyLong_AsVoidPtr(answer) : NULL;

	Py_XDECREF(answer);
	if (PyErr_Occurred()) {
		Py_XDECREF(hooks->raised);
		hooks->raised = take_exception();
		memory = NULL;
	}
	if (memory)
		hooks->outstanding++;
	PyGILState_Release(gil);
	return memory;
}

static void call_release(void *ctx, void *memory, uint64_t bytes, void *stream)
{
	struct hooks *hooks = ctx;
	PyGILState_STATE gil;
	PyObject *answer, *unrelated;

	if (!Py_IsInitialized()) /* the interpreter has ended: the process's end takes the memory back */
		return;
	gil = PyGILState_Ensure();
	/* This may run while an exception is on its way. */
	unrelated = PyErr_Occurred() ? take_exception() : NULL;
	answer = PyObject_CallFunction(hooks->release, "KKK", (unsigned long long)(uintptr_t)memory,
				       (unsigned long long)bytes, (unsigned long long)(uintptr_t)stream);
	if (!answer)
		PyErr_WriteUnraisable(hooks->release);
	Py_XDECREF(answer);
	hooks->outstanding--;
	free_if_unused(hooks);
	if (unrelated)
		PyErr_Restore(Py_NewRef((PyObject *)Py_TYPE(unrelated)), unrelated,
			      PyException_GetTraceback(unrelated));
	PyGILState_Release(gil);
}

bool native_hooks(PyObject *alloc, PyObject *release, struct hr_loader_opts *opts, struct hooks **out)
{
	struct hooks *hooks;

	*out = NULL;
	if (alloc == Py_None && release == Py_None)
		return true;
	if (!PyCallable_Check(alloc) || !PyCallable_Check(release)) {
		PyErr_SetString(PyExc_TypeError, "alloc and release are two functions: give both or neither");
		return false;
	}
	hooks = PyMem_Calloc(1, sizeof(*hooks));
	if (!hooks) {
		PyErr_NoMemory();
		return false;
	}
	hooks->alloc = Py_NewRef(alloc);
	hooks->release = Py_NewRef(release);
	hooks->has_loader = true;
	opts->alloc = call_alloc;
	opts->release = call_release;
	opts->alloc_ctx = hooks;
	*out = hooks;
	return true;
}

void native_hooks_drop(struct hooks *hooks)
{
	if (!hooks)
		return;
	hooks->has_loader = false;
	free_if_unused(hooks);
}

void native_hooks_cause(struct hooks *hooks)
{
	PyObject *type, *value, *trace;

	if (!hooks || !hooks->raised)
		return;
	PyErr_Fetch(&type, &value, &trace);
	PyErr_NormalizeException(&type, &value, &trace);
	if (value) {
		PyException_SetCause(value, hooks->raised);
		hooks->raised = NULL;
	}
	PyErr_Restore(type, value, trace);
}
