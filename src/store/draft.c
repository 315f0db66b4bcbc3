/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A generation in the making: the records of the one before it, taken apart, changed, and put together to a new body.
 * Sorting happens at the end, so objects keep their numbers as long as somebody works on the draft.
 */
#include "manifest.h"

#include "core/arith.h"
#include "core/error.h"
#include "core/mem.h"

#include <stdlib.h>
#include <string.h>

/* Room for one more record in an array that grows by doubling. */
static void *grown(void *array, uint32_t n, uint32_t *room, size_t record)
{
	void *bigger;

	if (n < *room)
		return array;
	bigger = hr__realloc(array, *room ? (size_t)*room * 2 : 16, record);
	if (bigger)
		*room = *room ? *room * 2 : 16;
	return bigger;
}

int hr__draft_add_object(struct hr__draft *draft, const struct hr__object *object, uint32_t *number)
{
	struct hr__object *objects;

	if (draft->n_objects >= HR__MAX_OBJECTS)
		return hr__fail(HR_E_LIMIT, "the store has %u objects, which is as many as a store may have",
				HR__MAX_OBJECTS);
	objects = grown(draft->objects, draft->n_objects, &draft->room_objects, sizeof(*objects));
	if (!objects)
		return HR_E_NOMEM;
	draft->objects = objects;
	objects[draft->n_objects] = *object;
	*number = draft->n_objects;
	draft->n_objects++;
	return 0;
}

void hr__draft_model_free(struct hr__draft_model *model)
{
	for (uint32_t i = 0; i < model->n_members; i++)
		hr__free(model->members[i].name);
	hr__free(model->members);
	hr__free(model->name);
	hr__free(model->provenance);
	memset(model, 0, sizeof(*model));
}

int hr__draft_add_model(struct hr__draft *draft, struct hr__draft_model *model)
{
	struct hr__draft_model *models = NULL;
	int code = HR_E_NOMEM;

	if (draft->n_models >= HR__MAX_MODELS)
		code = hr__fail(HR_E_LIMIT, "the store has %u models, which is as many as a store may have",
				HR__MAX_MODELS);
	else
		models = grown(draft->models, draft->n_models, &draft->room_models, sizeof(*models));
	if (!models) {
		hr__draft_model_free(model);
		return code;
	}
	draft->models = models;
	models[draft->n_models] = *model;
	draft->n_models++;
	memset(model, 0, sizeof(*model));
	return 0;
}

void hr__draft_remove_model(struct hr__draft *draft, uint32_t number)
{
	hr__draft_model_free(&draft->models[number]);
	draft->n_models--;
	memmove(&draft->models[number], &draft->models[number + 1],
		(draft->n_models - number) * sizeof(*draft->models));
}

int hr__draft_retire(struct hr__draft *draft, uint64_t off, uint64_t len, uint64_t last_gen)
{
	struct hr__retired *retired;

	if (draft->n_retired >= HR__MAX_RETIRED)
		return hr__fail(HR_E_LIMIT, "the store has %u extents that wait to be used again; reclaim them first",
				HR__MAX_RETIRED);
	retired = grown(draft->retired, draft->n_retired, &draft->room_retired, sizeof(*retired));
	if (!retired)
		return HR_E_NOMEM;
	draft->retired = retired;
	retired[draft->n_retired] = (struct hr__retired){off, len, last_gen};
	draft->n_retired++;
	return 0;
}

void hr__draft_unbound(const struct hr__draft *draft, uint8_t *marks)
{
	memset(marks, 1, draft->n_objects);
	for (uint32_t m = 0; m < draft->n_models; m++)
		for (uint32_t i = 0; i < draft->models[m].n_members; i++)
			marks[draft->models[m].members[i].object] = 0;
}

int hr__draft_drop_objects(struct hr__draft *draft, const uint8_t *drop, uint64_t last_gen)
{
	uint32_t *numbers = hr__malloc(draft->n_objects * sizeof(*numbers)), n = 0;
	int code = numbers ? 0 : HR_E_NOMEM;

	for (uint32_t i = 0; i < draft->n_objects && !code; i++)
		if (drop[i])
			code = hr__draft_retire(draft, draft->objects[i].ext_off, draft->objects[i].ext_len, last_gen);
	for (uint32_t i = 0; i < draft->n_objects && !code; i++) {
		numbers[i] = n;
		if (drop[i])
			continue;
		draft->objects[n] = draft->objects[i];
		n++;
	}
	for (uint32_t m = 0; m < draft->n_models && !code; m++)
		for (uint32_t i = 0; i < draft->models[m].n_members; i++)
			draft->models[m].members[i].object = numbers[draft->models[m].members[i].object];
	if (!code)
		draft->n_objects = n;
	hr__free(numbers);
	return code;
}

int hr__draft_drop_model(struct hr__draft *draft, uint32_t number, uint64_t last_gen)
{
	const struct hr__draft_model *model = &draft->models[number];
	uint8_t *its = hr__calloc(draft->n_objects, 1), *unbound = hr__calloc(draft->n_objects, 1);
	int code = its && unbound ? 0 : HR_E_NOMEM;

	for (uint32_t i = 0; i < model->n_members && !code; i++)
		its[model->members[i].object] = 1;
	if (!code) {
		hr__draft_remove_model(draft, number);
		hr__draft_unbound(draft, unbound);
		for (uint32_t i = 0; i < draft->n_objects; i++)
			its[i] &= unbound[i];
		code = hr__draft_drop_objects(draft, its, last_gen);
	}
	hr__free(its);
	hr__free(unbound);
	return code;
}

/* ---- from a manifest ---- */

static int copy_model(const struct hr__manifest *manifest, uint32_t number, struct hr__draft *draft)
{
	struct hr__draft_model copy = {.name = NULL};
	struct hr__model_record model;

	hr__manifest_model(manifest, number, &model);
	memcpy(copy.uuid, model.uuid, 16);
	copy.created_gen = model.created_gen;
	copy.name = hr__strndup(model.name, model.name_len);
	copy.provenance = hr__strndup(model.provenance, model.provenance_len);
	copy.members = hr__calloc(model.n_members, sizeof(*copy.members));
	if (!copy.name || !copy.provenance || !copy.members)
		goto out;
	for (uint32_t i = 0; i < model.n_members; i++) {
		struct hr__member member;

		hr__manifest_member(manifest, model.first_member + i, &member);
		copy.members[i].object = member.object;
		copy.members[i].name = hr__strndup(member.name, member.name_len);
		copy.n_members = i + 1;
		if (!copy.members[i].name)
			goto out;
	}
	return hr__draft_add_model(draft, &copy);
out:
	hr__draft_model_free(&copy);
	return HR_E_NOMEM;
}

int hr__draft_from(const struct hr__manifest *manifest, struct hr__draft *out)
{
	int code = 0;

	memset(out, 0, sizeof(*out));
	for (uint32_t i = 0; i < manifest->objects.n && !code; i++) {
		struct hr__object object;
		uint32_t number;

		hr__manifest_object(manifest, i, &object);
		code = hr__draft_add_object(out, &object, &number);
	}
	for (uint32_t i = 0; i < manifest->models.n && !code; i++)
		code = copy_model(manifest, i, out);
	for (uint32_t i = 0; i < manifest->retired.n && !code; i++) {
		struct hr__retired retired;

		hr__manifest_retired(manifest, i, &retired);
		code = hr__draft_retire(out, retired.off, retired.len, retired.last_gen);
	}
	if (code)
		hr__draft_free(out);
	return code;
}

void hr__draft_free(struct hr__draft *draft)
{
	for (uint32_t i = 0; i < draft->n_models; i++)
		hr__draft_model_free(&draft->models[i]);
	hr__free(draft->models);
	hr__free(draft->objects);
	hr__free(draft->retired);
	memset(draft, 0, sizeof(*draft));
}

/* ---- to a body ---- */

struct builder {
	const struct hr__draft *draft;
	uint8_t *body;
	uint32_t *order;   /* objects by UUID */
	uint32_t *numbers; /* where each of the draft's objects is in the body */
	uint64_t objects, models, members, retired, strings, bytes; /* positions in the body, and its size */
	uint32_t n_members;
};

static int compare_objects(const void *a, const void *b, void *ctx)
{
	const struct hr__object *objects = ctx;

	return memcmp(objects[*(const uint32_t *)a].uuid, objects[*(const uint32_t *)b].uuid, 16);
}

static int compare_models(const void *a, const void *b)
{
	return strcmp(((const struct hr__draft_model *)a)->name, ((const struct hr__draft_model *)b)->name);
}

static int compare_members(const void *a, const void *b)
{
	return strcmp(((const struct hr__draft_member *)a)->name, ((const struct hr__draft_member *)b)->name);
}

/* Names are sorted in the draft itself: their numbers matter to nobody. strcmp() orders by unsigned bytes, as
 * readers do. */
static int measure(struct builder *builder)
{
	const struct hr__draft *draft = builder->draft;
	uint64_t strings = 0, n_members = 0;

	if (draft->n_models)
		qsort(draft->models, draft->n_models, sizeof(*draft->models), compare_models);
	for (uint32_t i = 0; i < draft->n_models; i++) {
		struct hr__draft_model *model = &draft->models[i];

		qsort(model->members, model->n_members, sizeof(*model->members), compare_members);
		strings += strlen(model->name) + strlen(model->provenance);
		n_members += model->n_members;
		for (uint32_t k = 0; k < model->n_members; k++)
			strings += strlen(model->members[k].name);
	}
	builder->objects = sizeof(struct hr__disk_manifest);
	builder->models = builder->objects + (uint64_t)draft->n_objects * sizeof(struct hr__disk_object);
	builder->members = builder->models + (uint64_t)draft->n_models * sizeof(struct hr__disk_model);
	builder->retired = builder->members + n_members * sizeof(struct hr__disk_member);
	builder->strings = builder->retired + (uint64_t)draft->n_retired * sizeof(struct hr__disk_retired);
	builder->bytes = builder->strings + strings;
	builder->n_members = (uint32_t)n_members;
	if (n_members > HR__MAX_MEMBERS || builder->bytes > HR__MAX_BODY)
		return hr__fail(HR_E_LIMIT,
				"the store's manifest would have %" PRIu64 " files and %" PRIu64
				" bytes; %u and %" PRIu64 " are the most",
				n_members, builder->bytes, HR__MAX_MEMBERS, HR__MAX_BODY);
	return 0;
}

static int order_objects(struct builder *builder)
{
	uint32_t n = builder->draft->n_objects;

	builder->order = hr__malloc(n * sizeof(*builder->order));
	builder->numbers = hr__malloc(n * sizeof(*builder->numbers));
	if (!builder->order || !builder->numbers)
		return HR_E_NOMEM;
	for (uint32_t i = 0; i < n; i++)
		builder->order[i] = i;
	if (n)
		qsort_r(builder->order, n, sizeof(*builder->order), compare_objects, builder->draft->objects);
	for (uint32_t i = 0; i < n; i++)
		builder->numbers[builder->order[i]] = i;
	return 0;
}

static void put_objects(struct builder *builder)
{
	struct hr__disk_object *disk = (void *)(builder->body + builder->objects);

	for (uint32_t i = 0; i < builder->draft->n_objects; i++, disk++) {
		const struct hr__object *object = &builder->draft->objects[builder->order[i]];

		memcpy(disk->uuid, object->uuid, 16);
		disk->ext_off = hr__le64(object->ext_off);
		disk->ext_len = hr__le64(object->ext_len);
		disk->payload_off = hr__le32((uint32_t)object->payload_off);
		disk->kind = (uint8_t)object->kind;
		disk->block_log2 = (uint8_t)object->block_log2;
		disk->payload_len = hr__le64(object->payload_len);
		disk->header_len = hr__le64(object->header_len);
		memcpy(disk->payload_sha256, object->payload_sha256, 32);
		memcpy(disk->header_sha256, object->header_sha256, 32);
		disk->meta_off = hr__le64(object->meta_off);
		disk->meta_len = hr__le64(object->meta_len);
		memcpy(disk->meta_sha256, object->meta_sha256, 32);
		disk->n_tensors = hr__le32(object->n_tensors);
		disk->created_gen = hr__le64(object->created_gen);
	}
}

static uint64_t put_text(struct builder *builder, uint64_t *at, const char *text, uint32_t *length)
{
	uint64_t off = *at;

	*length = (uint32_t)strlen(text);
	memcpy(builder->body + builder->strings + off, text, *length);
	*at += *length;
	return off;
}

static void put_models(struct builder *builder)
{
	struct hr__disk_model *disk = (void *)(builder->body + builder->models);
	struct hr__disk_member *member = (void *)(builder->body + builder->members);
	uint64_t strings = 0;
	uint32_t first = 0;

	for (uint32_t i = 0; i < builder->draft->n_models; i++, disk++) {
		const struct hr__draft_model *model = &builder->draft->models[i];
		uint32_t length;

		disk->name_off = hr__le64(put_text(builder, &strings, model->name, &length));
		disk->name_len = hr__le32(length);
		disk->provenance_off = hr__le64(put_text(builder, &strings, model->provenance, &length));
		disk->provenance_len = hr__le32(length);
		disk->first_member = hr__le32(first);
		disk->n_members = hr__le32(model->n_members);
		memcpy(disk->uuid, model->uuid, 16);
		disk->created_gen = hr__le64(model->created_gen);
		for (uint32_t k = 0; k < model->n_members; k++, member++) {
			member->name_off = hr__le64(put_text(builder, &strings, model->members[k].name, &length));
			member->name_len = hr__le32(length);
			member->object = hr__le32(builder->numbers[model->members[k].object]);
		}
		first += model->n_members;
	}
}

static void put_retired(struct builder *builder)
{
	struct hr__disk_retired *disk = (void *)(builder->body + builder->retired);

	for (uint32_t i = 0; i < builder->draft->n_retired; i++, disk++) {
		disk->off = hr__le64(builder->draft->retired[i].off);
		disk->len = hr__le64(builder->draft->retired[i].len);
		disk->last_gen = hr__le64(builder->draft->retired[i].last_gen);
	}
}

static struct hr__disk_table table(uint64_t off, uint32_t n, size_t record)
{
	return (struct hr__disk_table){hr__le64(off), hr__le32(n), hr__le32((uint32_t)record)};
}

static void put_head(struct builder *builder, const struct hr__label *label, uint64_t generation)
{
	struct hr__disk_manifest *disk = (void *)builder->body;
	const struct hr__draft *draft = builder->draft;

	memcpy(disk->head.magic, HR__MAGIC_MANIFEST, 8);
	disk->head.major = hr__le16(HR__STORE_MAJOR);
	disk->head.minor = hr__le16(HR__STORE_MINOR);
	memcpy(disk->head.store_uuid, label->uuid, 16);
	disk->generation = hr__le64(generation);
	disk->body_len = hr__le64(builder->bytes);
	disk->objects = table(builder->objects, draft->n_objects, sizeof(struct hr__disk_object));
	disk->models = table(builder->models, draft->n_models, sizeof(struct hr__disk_model));
	disk->members = table(builder->members, builder->n_members, sizeof(struct hr__disk_member));
	disk->retired = table(builder->retired, draft->n_retired, sizeof(struct hr__disk_retired));
	disk->strings_off = hr__le64(builder->strings);
	disk->strings_len = hr__le64(builder->bytes - builder->strings);
}

int hr__draft_build(const struct hr__draft *draft, const struct hr__label *label, uint64_t generation, uint8_t **body,
		    size_t *bytes)
{
	struct builder builder = {.draft = draft};
	int code = measure(&builder);
	void *memory = NULL;

	if (!code)
		code = order_objects(&builder);
	if (!code)
		code = hr__region_memory((size_t)hr__round_up(builder.bytes, HR__EXTENT_ALIGN), &memory);
	if (!code) {
		builder.body = memory;
		put_head(&builder, label, generation);
		put_objects(&builder);
		put_models(&builder);
		put_retired(&builder);
		*body = memory;
		*bytes = (size_t)builder.bytes;
	}
	hr__free(builder.order);
	hr__free(builder.numbers);
	return code;
}
