/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the look-alikes of libraries that read from storage into device memory share: memory that is registered, reads
 * in motion, and what the driver remembers of them by address. Included by fake_cufile.c and fake_ugds.c behind their
 * settings, `lock`, `controls` and error(), which it uses.
 */
#ifndef HR_TESTS_FAKE_READER_H
#define HR_TESTS_FAKE_READER_H

#include "fake_controls.h"
#include "fake_cuda.h"

#include <stdlib.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#define MAX_BUFFERS 64
#define MAX_READS   256
#define MAX_REQUEST ((size_t)8 << 20)
#define GPU_PAGE    ((uintptr_t)64 << 10)

static struct buffer {
	char *base;
	size_t bytes;
	unsigned n_reads;
} buffers[MAX_BUFFERS];
/* What a read holds on to, by address: while it runs, and until the driver has forgotten it. */
static struct key {
	char *at;
	size_t bytes;
	bool is_running;
	uint64_t gone_ns;
} keys[MAX_READS];
static long long n_reading, n_most_reading;
static uint64_t n_reads;
static struct fake_cuda cuda;

static uint64_t now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

/* ---- memory ---- */

enum registering {
	REGISTERED,
	ALREADY_REGISTERED,
	NO_ROOM,
};

static enum registering register_buffer(const void *base, size_t bytes)
{
	struct buffer *room = NULL;
	size_t kib = bytes >> 10;

	if ((uintptr_t)base % GPU_PAGE || bytes % GPU_PAGE)
		error("memory at %p, %zu bytes, is registered across a 64 KiB border", base, bytes);
	for (int i = 0; i < MAX_BUFFERS; i++) {
		if (!buffers[i].base) {
			room = room ? room : &buffers[i];
			continue;
		}
		if ((const char *)base < buffers[i].base + buffers[i].bytes &&
		    buffers[i].base < (const char *)base + bytes)
			return ALREADY_REGISTERED;
		kib += buffers[i].bytes >> 10;
	}
	if (!room || (settings.room_kib && kib > (size_t)settings.room_kib))
		return NO_ROOM;
	*room = (struct buffer){(char *)(uintptr_t)base, bytes, 0};
	return REGISTERED;
}

enum deregistering {
	DEREGISTERED,
	NOT_REGISTERED,
	BUSY,
};

static enum deregistering deregister_buffer(const void *base)
{
	for (int i = 0; i < MAX_BUFFERS; i++) {
		if (buffers[i].base != base || !base)
			continue;
		if (buffers[i].n_reads)
			error("memory is taken away from %u reads", buffers[i].n_reads);
		if (buffers[i].n_reads || settings.busy > 0) {
			settings.busy -= settings.busy > 0;
			return BUSY;
		}
		buffers[i].base = NULL;
		return DEREGISTERED;
	}
	return NOT_REGISTERED;
}

static long long n_registered(void)
{
	long long n = 0;

	for (int i = 0; i < MAX_BUFFERS; i++)
		n += buffers[i].base != NULL;
	return n;
}

/* Of what a test may ask for by name: -1 if it is none of these. Under the lock. */
static long long reader_live(const char *kind)
{
	long long kib = 0;

	for (int i = 0; i < MAX_BUFFERS; i++)
		kib += buffers[i].base ? (long long)(buffers[i].bytes >> 10) : 0;
	return strcmp(kind, "buffers") == 0      ? n_registered()
	       : strcmp(kind, "reads") == 0      ? n_reading
	       : strcmp(kind, "peak_reads") == 0 ? n_most_reading
	       : strcmp(kind, "kib") == 0        ? kib
						 : -1;
}

static void reader_reset(void)
{
	memset(keys, 0, sizeof(keys));
	n_reads = 0;
	n_most_reading = n_reading;
}

/* ---- reads ---- */

static struct buffer *buffer_of(const char *base, size_t bytes, off_t offset)
{
	for (int i = 0; i < MAX_BUFFERS; i++)
		if (buffers[i].base && base == buffers[i].base && offset >= 0 &&
		    (size_t)offset + bytes <= buffers[i].bytes)
			return &buffers[i];
	return NULL;
}

/* Remembers a read by its address, and tells of one that meets another there. */
static struct key *take_key(char *at, size_t bytes)
{
	uint64_t now = now_ns();
	struct key *room = NULL;

	for (int i = 0; i < MAX_READS; i++) {
		struct key *key = &keys[i];

		if (!key->is_running && key->gone_ns <= now) {
			room = room ? room : key;
			continue;
		}
		if (at < key->at + key->bytes && key->at < at + bytes)
			error("corruption: %zu bytes are read to where a read %s", bytes,
			      key->is_running ? "is going on" : "has not been torn down");
	}
	if (!room)
		abort();
	*room = (struct key){at, bytes, true, 0};
	return room;
}

/* One read: its key, the memory it goes to (NULL: none that is registered), and what else counts reads in motion. */
struct reading {
	struct buffer *buffer;
	struct key *key;
	unsigned *n_reads;
	bool is_short;
};

/* Under the lock. */
static struct reading begin_reading(char *base, char *at, size_t bytes, off_t offset, unsigned *n_reads_of_source)
{
	struct reading reading = {.buffer = buffer_of(base, bytes, offset), .n_reads = n_reads_of_source};

	if (!reading.buffer)
		error("%zu bytes are read to memory that is not registered, or not by its first byte", bytes);
	if (bytes > MAX_REQUEST)
		error("a read of %zu bytes will be cut up", bytes);
	reading.key = take_key(at, bytes);
	++*reading.n_reads;
	if (reading.buffer)
		reading.buffer->n_reads++;
	n_reading++;
	n_most_reading = n_reading > n_most_reading ? n_reading : n_most_reading;
	n_reads++;
	reading.is_short = settings.short_every && n_reads % (uint64_t)settings.short_every == 0;
	return reading;
}

/* Under the lock. */
static void end_reading(const struct reading *reading)
{
	reading->key->is_running = false;
	reading->key->gone_ns = now_ns() + (uint64_t)settings.teardown_us * 1000;
	--*reading->n_reads;
	if (reading->buffer)
		reading->buffer->n_reads--;
	n_reading--;
}

static ssize_t read_all(int fd, char *bytes, size_t n, off_t offset)
{
	ssize_t got = 0, part = 1;

	while (part > 0 && (size_t)got < n) {
		part = pread(fd, bytes + got, n - (size_t)got, offset + got);
		got += part > 0 ? part : 0;
	}
	return part < 0 ? -1 : got;
}

static void dawdle(void)
{
	uint64_t ns;

	pthread_mutex_lock(&lock);
	ns = settings.delay_us ? fake_draw(&controls) % ((uint64_t)settings.delay_us * 1000) : 0;
	pthread_mutex_unlock(&lock);
	if (ns)
		nanosleep(&(struct timespec){(time_t)(ns / 1000000000), (long)(ns % 1000000000)}, NULL);
}

/* The bytes on their way, by a descriptor (-1: it cannot be read from). No lock. How many came, or -1; a short read
 * spoils the rest. */
static ssize_t transfer(const struct reading *reading, int fd, char *at, size_t bytes, off_t offset)
{
	char *copy = malloc(bytes ? bytes : 1);
	ssize_t got = fd < 0 ? -1 : read_all(fd, copy, bytes, offset);

	dawdle();
	if (reading->is_short && got > 512)
		got -= 512;
	if (got >= 0 && (size_t)got < bytes)
		memset(copy + got, 0x5e, bytes - (size_t)got); /* what a bounce buffer held before */
	if (got >= 0 && cuda.store)
		cuda.store((unsigned long long)(uintptr_t)at, copy, bytes);
	free(copy);
	return got;
}

#endif
