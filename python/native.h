/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the files of the Python binding share. It sees headrace.h alone, and keeps to CPython's limited API of 3.11, so
 * that one file serves every later CPython.
 *
 * What always holds:
 *  - Handles of headrace are used without the GIL, and freed only when nobody else is inside a call with them: `users`
 *    counts who is. It, `closing` and the list of parked handles are touched only with the GIL held.
 *  - Nothing that the collector drops blocks: what cannot be closed at once is parked, with all that it needs to stay
 *    alive, and closed by a later call (native_unpark).
 *  - Memory handed out belongs to hr_buffer and is counted there; it outlives model, loader and module.
 */
#ifndef HR_PYTHON_NATIVE_H
#define HR_PYTHON_NATIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "headrace.h"

#include <stdbool.h>

/* How long a wait lasts before signals are looked for. */
#define SLICE_MS 50u

/* A job, feed or cache that was dropped before it could be closed, or a loader that had something in flight. */
struct parked {
	struct parked *next;
	hr_job *job;
	hr_feed *feed;
	hr_cache *cache;
	hr_loader *loader;
	PyObject *keep;  /* memory that the job may still write */
	PyObject *owner; /* what the handle was opened with */
};

/* The module's state. There is one: the module refuses to be loaded in a second interpreter. */
struct native {
	PyObject *make_error; /* headrace._errors.make */
	PyTypeObject *model_type, *loader_type, *job_type, *feed_type, *array_type;
	PyTypeObject *cache_type, *group_type, *lease_type;
	PyTypeObject *tensor_type, *shard_type; /* struct sequences */
	struct parked *parked;
};

struct model_object {
	PyObject_HEAD struct native *native;
	hr_model *model; /* NULL after close() */
	PyObject *names; /* list of str, made when first asked for; likewise */
	PyObject *tensors;
};

struct hooks; /* where device memory comes from, if from Python */

struct loader_object {
	PyObject_HEAD struct native *native;
	hr_loader *loader; /* NULL after close() */
	hr_device *device;
	struct hooks *hooks; /* or NULL */
	char device_name[16];
	unsigned users;
	unsigned n_caches; /* that are open: they keep it from being closed */
	bool closing;
};

/* In native_model.c */
extern PyType_Spec native_model_spec;
bool native_model_types(struct native *native, PyObject *module);
PyObject *native_open(PyObject *module, PyObject *args, PyObject *kwargs);
/* The handle, counted, or NULL with an exception. */
hr_model *native_model(const struct native *native, PyObject *object);
/* The number of a tensor given by name or number. */
bool native_tensor_number(const struct native *native, const hr_model *model, PyObject *key, uint64_t *index);
PyObject *native_tensor_info(const struct native *native, const struct hr_tensor *tensor);
PyObject *native_name(const struct hr_tensor *tensor);
PyObject *native_shape(const struct hr_tensor *tensor);

/* In native_blocks.c. A tensor's number, and where it begins in its block: Python sees an array of these as bytes. */
struct native_place {
	uint64_t number, start;
};
/* Reads on their way to a job. */
struct native_reads {
	struct hr_read *reads;
	size_t n, room;
};
PyObject *native_model_blocks(struct model_object *self, PyObject *args, PyObject *kwargs);
/* Adds the reads of a block, a tuple (places, address, room). */
bool native_block_reads(PyObject *item, struct native_reads *reads);

/* In native_array.c */
extern PyType_Spec native_array_spec;
/* Takes the buffer over, whatever the outcome. */
PyObject *native_array(const struct native *native, const struct hr_tensor *tensor, hr_buffer *buffer,
		       const char *device);
/* The same for a part of a buffer. */
struct array_part {
	uint64_t offset; /* where it begins */
	bool is_shared;  /* others see the same memory: it is shown read-only */
};
PyObject *native_array_part(const struct native *native, const struct hr_tensor *tensor, hr_buffer *buffer,
			    const char *device, const struct array_part *part);

/* In native_group.c, native_cache.c */
extern PyType_Spec native_group_spec, native_lease_spec, native_cache_spec;
PyObject *native_group(const struct native *native, PyObject *model, PyObject *names);
hr_group *native_group_handle(const struct native *native, PyObject *object);
/* Takes the buffer over, whatever the outcome. */
PyObject *native_lease(const struct native *native, PyObject *group, hr_buffer *buffer, const char *device);
PyObject *native_loader_cache(struct loader_object *self, PyObject *args, PyObject *kwargs);

/* In native_hooks.c. Sets the options' allocator to two Python functions; None twice: leaves them alone. */
bool native_hooks(PyObject *alloc, PyObject *release, struct hr_loader_opts *opts, struct hooks **out);
void native_hooks_drop(struct hooks *hooks);
/* With an exception set: what alloc raised becomes its cause. */
void native_hooks_cause(struct hooks *hooks);

/* In native_loader.c, native_job.c, native_feed.c */
extern PyType_Spec native_loader_spec, native_job_spec, native_feed_spec;
bool native_loader_enter(struct loader_object *self);
void native_loader_leave(struct loader_object *self);
PyObject *native_loader_start(struct loader_object *self, PyObject *args, PyObject *kwargs);
PyObject *native_loader_feed(struct loader_object *self, PyObject *args, PyObject *kwargs);
/* One more read, zeroed; NULL with an exception. */
struct hr_read *native_reads_add(struct native_reads *reads);
/* Waits for a job in slices. On a signal's exception it cancels first, and waits until nothing can touch the
 * destinations. */
bool native_job_settle(const struct native *native, hr_job *job, const bool *closing, double timeout);

/* In _native.c: all answer NULL or false with an exception set. */
PyObject *native_fail(const struct native *native);
PyObject *native_fail_with(const struct native *native, int code, const char *message);
struct native *native_of(PyTypeObject *type);
PyObject *native_stats(const struct hr_stats *stats);
PyObject *native_cache_stats(const struct hr_cache_stats *stats);
bool native_size(PyObject *value, uint64_t *out);
/* Seconds, or None for ever (then a negative number). */
bool native_seconds(PyObject *value, double *out);
/* The arguments of a call that takes `timeout` and nothing else; `format` is "|O:" and its name. */
bool native_timeout(PyObject *args, PyObject *kwargs, const char *format, double *seconds);
double native_now(void);
void native_park(struct native *native, const struct parked *what);
void native_unpark(struct native *native);
/* Waits until nobody is inside a call with a handle; false on a signal or after `until`. */
bool native_wait_unused(const unsigned *users, double until);

#endif
