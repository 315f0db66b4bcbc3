/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the tests of the loader share: a bed of two shards with many odd-sized tensors, a device and a loader over it,
 * and ways to load from it that compare every byte with a plain read of the file (hr_model_read_shard, which shares no
 * code with the loader).
 *
 * Functions that may run on a thread of a test answer by value, since cmocka asserts on the main thread only.
 */
#ifndef HR_TESTS_LOADTEST_H
#define HR_TESTS_LOADTEST_H

#include "hrtest.h"

/* HR_TEST_ENGINE in the environment is the engine of every loader on a GPU for which a test names none. */
int test_loader_open(hr_device *device, const struct hr_loader_opts *opts, hr_loader **out);
#define hr_loader_open test_loader_open

/* With HR_TEST_ENGINE=ugds every model is imported into a store first and opened through uGDS, over the
 * look-alikes: the store's image stands for the node. What cannot be imported is opened as it is, to fail as it
 * does elsewhere. */
int test_model_open(const char *name, const struct hr_model_opts *opts, hr_model **out);
int test_model_open_files(const char *const *paths, size_t n, const struct hr_model_opts *opts, hr_model **out);
#define hr_model_open       test_model_open
#define hr_model_open_files test_model_open_files
/* Whether models are opened so: then nothing of a file that is changed later is noticed, and so on. */
bool is_through_ugds(void);
/* Writes the exported manifest of a store. */
void write_sidecar(const char *region, const char *path);

struct bed {
	char *dir;
	char *paths[2]; /* the shards */
	uint64_t n_tensors, bytes;
	hr_model *model;
	hr_device *device;
	hr_loader *loader;
};

/* Writes two shards with `n_tensors` tensors of 0 to `max_bytes` bytes, most of them odd and some of them empty,
 * and opens them as one model. The files' times are set back. */
void bed_open(struct bed *bed, uint64_t seed, size_t n_tensors, uint64_t max_bytes);
/* The same in a directory that is there already ("/dev/shm/..."). Takes `dir` over. */
void bed_open_in(struct bed *bed, char *dir, uint64_t seed, size_t n_tensors, uint64_t max_bytes);
/* A bed over what is there: a checkpoint. */
void bed_open_model(struct bed *bed, const char *name);
/* Adds a device and a loader. `opts` may be NULL. */
void bed_load(struct bed *bed, const char *device, const struct hr_loader_opts *opts);
/* Closes what is open, in that order, and removes the files. */
void bed_close(struct bed *bed);

/* Sets a file's times back, so that a change right afterwards shows on any clock. */
void set_time_back(const char *path);

/* The bytes of a tensor by a plain read, to be freed; NULL if that failed. */
unsigned char *plain_read(const hr_model *model, const struct hr_tensor *tensor);
/* Whether a buffer holds the tensor's bytes. */
bool buffer_is_right(const hr_model *model, const struct hr_tensor *tensor, hr_buffer *buffer);

/* Loads all tensors by one job, into buffers of the loader's; 0, or the failure; 1 if a byte is wrong. */
int load_by_job(hr_loader *loader, hr_model *model, const struct hr_job_opts *opts);
/* The same by a feed; `keep`: all buffers are kept until the end and compared then, else each is compared and
 * released at once. `n_out` (may be NULL): how many were handed out. */
int load_by_feed(hr_loader *loader, hr_model *model, const struct hr_feed_opts *opts, bool keep, size_t *n_out);

/* Whether a device of this name can be opened here. */
bool has_device(const char *spec);
/* Whether a loader with this engine can be opened on it. */
bool has_engine(const char *device, const char *engine);
/* What /proc/self/status says of a field ("VmRSS", "Threads"); 0 if it is not there. */
uint64_t proc_status(const char *field);
uint64_t now_ms(void);

#endif
