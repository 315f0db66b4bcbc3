/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How long opening a large store takes: 1,000 models of 100 shards, which is nearly all the objects that a store can
 * have (65,536): 65 of each model's own, 35 that it shares with the others.
 *
 *     open_store REGION [ROUNDS]
 *
 * Makes the store in a new file of 16 GiB with no payload in it, since opening looks at none. Tells for each round how
 * long opening a snapshot took, and how long reading the manifest alone takes with the same calls, in milliseconds.
 */
#include "store/store.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#define N_MODELS 1000u
#define N_SHARDS 100u
#define N_SHARED 35u
#define REGION   (UINT64_C(16) << 30)

static void need(int code, const char *what)
{
	if (!code)
		return;
	fprintf(stderr, "%s: %s\n", what, hr_error_last()->message);
	exit(1);
}

static uint32_t add_object(hr_store *store, struct hr__draft *draft)
{
	struct hr__object object = {.payload_len = 100000,
				    .header_len = 4096,
				    .kind = HR__OBJECT_SHARD,
				    .n_tensors = 8,
				    .block_log2 = 16,
				    .created_gen = hr__store_next_generation(store)};
	uint32_t number;

	object.meta_off = 131072;
	object.meta_len = hr__object_meta_bytes(object.payload_len, object.block_log2);
	object.ext_len = 196608;
	need(hr__uuid_new(object.uuid), "a UUID");
	memcpy(object.payload_sha256, object.uuid, sizeof(object.uuid));
	need(hr__store_take(store, object.ext_len, &object.ext_off), "space");
	need(hr__draft_add_object(draft, &object, &number), "an object");
	return number;
}

static void add_model(hr_store *store, struct hr__draft *draft, const uint32_t *shared, unsigned m)
{
	struct hr__draft_model model = {.created_gen = hr__store_next_generation(store), .n_members = N_SHARDS};
	char name[64];

	snprintf(name, sizeof(name), "organisation/model-%04u", m);
	model.name = strdup(name);
	model.provenance = strdup("bench");
	model.members = calloc(N_SHARDS, sizeof(*model.members));
	need(hr__uuid_new(model.uuid), "a UUID");
	for (unsigned i = 0; i < N_SHARDS; i++) {
		snprintf(name, sizeof(name), "model-%05u-of-%05u.safetensors", i + 1, N_SHARDS);
		model.members[i] = (struct hr__draft_member){strdup(name),
							     i < N_SHARED ? shared[i] : add_object(store, draft)};
	}
	need(hr__draft_add_model(draft, &model), "a model");
}

static void make(const char *path)
{
	struct hr_store_init_opts init = HR_STORE_INIT_OPTS_INIT;
	struct hr_store_opts opts = HR_STORE_OPTS_INIT;
	struct hr__draft draft = {0};
	uint32_t shared[N_SHARED];
	hr_store *store;

	init.bytes = REGION;
	need(hr_store_init(path, &init), "init");
	opts.flags = HR_STORE_WRITE;
	need(hr_store_open(path, &opts, &store), "open");
	need(hr__store_begin(store), "begin");
	need(hr__draft_from(&store->now->manifest, &draft), "draft");
	for (unsigned i = 0; i < N_SHARED; i++)
		shared[i] = add_object(store, &draft);
	for (unsigned m = 0; m < N_MODELS; m++)
		add_model(store, &draft, shared, m);
	need(hr__store_commit(store, &(struct hr__commit){.draft = &draft, .first_fresh = UINT32_MAX}), "commit");
	hr__draft_free(&draft);
	hr__store_end(store);
	hr_store_close(store);
}

static double ms_since(uint64_t start_ns)
{
	return (double)(hr__os_now_ns() - start_ns) / 1e6;
}

static double cpu_ms(void)
{
	struct rusage usage;

	getrusage(RUSAGE_SELF, &usage);
	return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1e3 +
	       (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e3;
}

static void measure(const char *path)
{
	struct hr__snapshot *snapshot;
	double before = cpu_ms(), opened, read_ms, cpu;
	uint64_t start = hr__os_now_ns();
	void *memory;
	size_t room;

	need(hr__snapshot_open(path, &(struct hr__snapshot_want){0}, &snapshot), "snapshot");
	opened = ms_since(start);
	cpu = cpu_ms() - before;
	room = (size_t)((snapshot->root.body_len + 4095) / 4096 * 4096);
	need(hr__region_memory(room, &memory), "memory");
	memset(memory, 1, room); /* a fresh page costs no less in the other */
	start = hr__os_now_ns();
	need(hr__region_read(snapshot->region, snapshot->root.body_off[0], memory, room, "the manifest"), "read");
	read_ms = ms_since(start);
	printf("opened in %.1f ms (%.1f ms of CPU); reading its manifest of %.1f MB alone: %.1f ms; %u models, %u objects\n",
	       opened, cpu, (double)snapshot->root.body_len / 1e6, read_ms, snapshot->manifest.models.n,
	       snapshot->manifest.objects.n);
	hr__region_memory_free(memory, room);
	hr__snapshot_release(snapshot);
}

int main(int argc, char **argv)
{
	int rounds = argc > 2 ? (int)strtol(argv[2], NULL, 10) : 5;
	struct rusage usage;

	if (argc < 2 || access(argv[1], F_OK) == 0) {
		fprintf(stderr, "open_store REGION [ROUNDS]: REGION is a new file\n");
		return 2;
	}
	make(argv[1]);
	for (int i = 0; i < rounds; i++)
		measure(argv[1]);
	getrusage(RUSAGE_SELF, &usage);
	printf("resident at most, making it included: %ld KiB\n", usage.ru_maxrss);
	unlink(argv[1]);
	return 0;
}
