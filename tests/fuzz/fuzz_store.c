/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Any bytes as a record of a store: the first byte says which (0 label, 1 root, 2 footer, else a manifest). Checksums
 * are put right first, as a hostile writer would, unless the byte is above 127. What is accepted can be used to its
 * last field, and a manifest that is taken apart and put together again says the same.
 */
#include "fuzz.h"

#include "store/manifest.h"

#define REGION_LEN (UINT64_C(64) << 20)

static const struct hr__label label = {
	.region_len = REGION_LEN, .data_off = HR__GUARD_BYTES, .uuid = "0123456789abcde"};

static void check_label(const uint8_t *record)
{
	struct hr__label found;

	if (hr__label_decode(record, HR__LABEL_OFF, &found) != HR__RECORD_GOOD)
		return;
	fuzz_check(found.region_len >= HR__REGION_MIN && found.region_len % HR__REGION_ALIGN == 0);
	fuzz_check(found.data_off >= HR__GUARD_BYTES && found.data_off <= found.region_len);
	fuzz_check(found.lba_bytes == 512 || found.lba_bytes == 4096);
	fuzz_check(strlen(found.name) <= 64);
}

static void check_root(const uint8_t *record)
{
	struct hr__root found;

	if (hr__root_decode(record, &label, HR__ROOT_OFF(0), &found) != HR__RECORD_GOOD)
		return;
	fuzz_check(found.generation >= 1 && found.generation <= HR__MAX_GENERATION);
	fuzz_check(found.floor_gen <= found.generation && found.body_len <= HR__MAX_BODY);
	for (int copy = 0; copy < 2; copy++)
		fuzz_check(found.body_off[copy] >= label.data_off &&
			   found.body_off[copy] + found.body_len <= found.data_end);
}

static void check_object(const struct hr__object *object)
{
	fuzz_check(object->payload_off + object->payload_len <= object->meta_off);
	fuzz_check(object->meta_off + object->meta_len <= object->ext_len);
	fuzz_check(object->meta_len == HR__RECORD_BYTES + 4 * hr__object_n_blocks(object));
	fuzz_check(object->header_len == 0 || object->header_len + 8 <= object->payload_len);
}

static void check_footer(const uint8_t *record)
{
	struct hr__object object;

	if (hr__footer_decode(record, label.uuid, &object) == HR__RECORD_GOOD &&
	    hr__object_check(&object, HR__GUARD_BYTES, REGION_LEN - HR__GUARD_BYTES) == 0)
		check_object(&object);
}

/* ---- manifests ---- */

static void check_members(const struct hr__manifest *manifest, uint32_t number, const struct hr__model_record *model)
{
	for (uint32_t i = 0; i < model->n_members; i++) {
		struct hr__member member;
		uint32_t found;

		hr__manifest_member(manifest, model->first_member + i, &member);
		fuzz_check(member.object < manifest->objects.n);
		fuzz_check(hr__store_name_is_good(member.name, member.name_len, true));
		fuzz_check(member.name[0] != '/' && member.name[member.name_len - 1] != '/');
		fuzz_check(hr__manifest_find_member(manifest, number, member.name, member.name_len, &found));
		fuzz_check(found == model->first_member + i);
	}
}

static void check_manifest(const struct hr__manifest *manifest)
{
	for (uint32_t i = 0; i < manifest->objects.n; i++) {
		struct hr__object object;

		hr__manifest_object(manifest, i, &object);
		check_object(&object);
	}
	for (uint32_t i = 0; i < manifest->models.n; i++) {
		struct hr__model_record model;
		uint32_t found;

		hr__manifest_model(manifest, i, &model);
		fuzz_check(hr__manifest_find_model(manifest, model.name, model.name_len, &found) && found == i);
		check_members(manifest, i, &model);
	}
}

/* Provenance may hold what no string can: then less of it comes back. */
static void check_round_trip(const struct hr__manifest *manifest, const struct hr__root *root)
{
	struct hr__root again = *root;
	struct hr__manifest copy;
	struct hr__draft draft;
	uint8_t *body;
	size_t bytes;
	int rc = hr__draft_from(manifest, &draft);

	if (!rc) {
		rc = hr__draft_build(&draft, &label, root->generation, &body, &bytes);
		hr__draft_free(&draft);
	}
	if (rc) {
		fuzz_check(rc == HR_E_NOMEM);
		return;
	}
	again.body_len = bytes;
	again.body_off[0] = REGION_LEN; /* out of the way of what the input names */
	again.body_off[1] = REGION_LEN + HR__EXTENT_ALIGN * 2048;
	again.data_end = root->data_end;
	rc = hr__manifest_parse(body, bytes, &label, &again, &copy);
	if (rc != HR_E_NOMEM) {
		fuzz_check(rc == 0);
		fuzz_check(copy.objects.n == manifest->objects.n && copy.members.n == manifest->members.n);
		check_manifest(&copy);
	}
	hr__region_memory_free(body, (bytes + HR__EXTENT_ALIGN - 1) / HR__EXTENT_ALIGN * HR__EXTENT_ALIGN);
}

static void fuzz_manifest(const uint8_t *bytes, size_t n)
{
	uint8_t *body = fuzz_copy(bytes, n);
	struct hr__root root = {.generation = 5, .data_end = REGION_LEN - HR__GUARD_BYTES, .body_len = n};
	struct hr__disk_manifest *disk = (void *)body;
	struct hr__manifest manifest;
	int rc;

	if (n >= sizeof(*disk)) {
		memcpy(disk->head.magic, HR__MAGIC_MANIFEST, 8);
		memcpy(disk->head.store_uuid, label.uuid, 16);
		disk->body_len = hr__le64(n);
		disk->generation = hr__le64(5);
		root.n_objects = hr__le32(disk->objects.count);
		root.n_models = hr__le32(disk->models.count);
	}
	/* The manifest's own copies: where nothing of the input can be. */
	root.body_off[0] = REGION_LEN;
	root.body_off[1] = REGION_LEN + HR__EXTENT_ALIGN * 2048;
	rc = hr__manifest_parse(body, n, &label, &root, &manifest);
	if (rc) {
		fuzz_check(hr_error_last()->code == rc && hr_error_last()->message[0]);
		fuzz_check(rc == HR_E_CORRUPT || rc == HR_E_STORE_VERSION || rc == HR_E_NOMEM);
	} else {
		check_manifest(&manifest);
		check_round_trip(&manifest, &root);
	}
	free(body);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n)
{
	static const char magics[3][9] = {HR__MAGIC_LABEL, HR__MAGIC_ROOT, HR__MAGIC_FOOTER};
	static void (*const checks[3])(const uint8_t *record) = {check_label, check_root, check_footer};
	_Alignas(16) uint8_t record[HR__RECORD_BYTES] = {0};
	unsigned kind;

	if (n < FUZZ_PREFIX + 1)
		return 0;
	kind = bytes[FUZZ_PREFIX] & 127;
	n -= FUZZ_PREFIX + 1;
	fuzz_arm(bytes);
	if (kind > 2) {
		fuzz_manifest(bytes + FUZZ_PREFIX + 1, n);
	} else {
		memcpy(record, bytes + FUZZ_PREFIX + 1, n < sizeof(record) ? n : sizeof(record));
		if (bytes[FUZZ_PREFIX] < 128)
			hr__record_seal(record, magics[kind], label.uuid);
		checks[kind](record);
	}
	fuzz_fired();
	return 0;
}
