/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Checking a manifest body. Its bytes may be anybody's: every count, position and name is looked at before it is used,
 * sums are checked, and what overlaps is refused. What passes here can be read without looking again.
 *
 * The order: header and tables, objects one by one, extents against each other, names, models and their members.
 */
#include "manifest.h"

#include "core/arith.h"
#include "core/error.h"
#include "core/hash.h"
#include "core/mem.h"
#include "extents.h"

#include <string.h>

static int bad(const char *what, uint64_t number)
{
	return hr__fail_at(&(struct hr__where){.stage = "manifest", .offset = HR_NO_OFFSET}, HR_E_CORRUPT,
			   "the store's manifest is not sound: %s (%" PRIu64 ")", what, number);
}

/* ---- names ---- */

/* Length of a whole UTF-8 sequence that is neither a control byte nor overlong, or 0. */
static size_t utf8_length(const unsigned char *text, size_t left)
{
	unsigned char b = text[0];
	size_t need = b < 0x80 ? 1 : b >= 0xc2 && b < 0xe0 ? 2 : (b & 0xf0) == 0xe0 ? 3 : b >= 0xf0 && b < 0xf5 ? 4 : 0;

	if (b < 0x20 || b == 0x7f || need == 0 || need > left)
		return 0;
	for (size_t i = 1; i < need; i++)
		if ((text[i] & 0xc0) != 0x80)
			return 0;
	if ((b == 0xe0 && text[1] < 0xa0) || (b == 0xf0 && text[1] < 0x90) || (b == 0xed && text[1] > 0x9f) ||
	    (b == 0xf4 && text[1] > 0x8f))
		return 0;
	return need;
}

static bool part_is_good(const char *part, size_t length)
{
	return length > 0 && length < 256 && !(length == 1 && part[0] == '.') &&
	       !(length == 2 && part[0] == '.' && part[1] == '.');
}

bool hr__store_name_is_good(const char *name, size_t length, bool is_path)
{
	size_t begin = 0;

	if (length == 0 || length > HR__MAX_NAME)
		return false;
	for (size_t i = 0; i < length;) {
		size_t n = utf8_length((const unsigned char *)name + i, length - i);

		if (n == 0)
			return false;
		if (is_path && name[i] == '/') {
			if (!part_is_good(name + begin, i - begin))
				return false;
			begin = i + 1;
		}
		i += n;
	}
	return !is_path || part_is_good(name + begin, length - begin);
}

static int compare_names(const char *a, size_t a_length, const char *b, size_t b_length)
{
	int order = memcmp(a, b, a_length < b_length ? a_length : b_length);

	return order ? order : (a_length > b_length) - (a_length < b_length);
}

/* ---- records ---- */

uint64_t hr__object_n_blocks(const struct hr__object *object)
{
	uint64_t block = UINT64_C(1) << object->block_log2;

	return object->payload_len / block + (object->payload_len % block != 0);
}

uint64_t hr__object_meta_bytes(uint64_t payload_len, uint32_t block_log2)
{
	struct hr__object object = {.payload_len = payload_len, .block_log2 = block_log2};

	return HR__RECORD_BYTES + 4 * hr__object_n_blocks(&object);
}

void hr__manifest_object(const struct hr__manifest *manifest, uint32_t number, struct hr__object *out)
{
	const struct hr__disk_object *disk = (const void *)(manifest->objects.at +
							    (size_t)number * manifest->objects.step);

	memcpy(out->uuid, disk->uuid, 16);
	out->ext_off = hr__le64(disk->ext_off);
	out->ext_len = hr__le64(disk->ext_len);
	out->payload_off = hr__le32(disk->payload_off);
	out->payload_len = hr__le64(disk->payload_len);
	out->header_len = hr__le64(disk->header_len);
	memcpy(out->payload_sha256, disk->payload_sha256, 32);
	memcpy(out->header_sha256, disk->header_sha256, 32);
	out->meta_off = hr__le64(disk->meta_off);
	out->meta_len = hr__le64(disk->meta_len);
	memcpy(out->meta_sha256, disk->meta_sha256, 32);
	out->n_tensors = hr__le32(disk->n_tensors);
	out->kind = disk->kind;
	out->block_log2 = disk->block_log2;
	out->created_gen = hr__le64(disk->created_gen);
}

void hr__manifest_model(const struct hr__manifest *manifest, uint32_t number, struct hr__model_record *out)
{
	const struct hr__disk_model *disk = (const void *)(manifest->models.at +
							   (size_t)number * manifest->models.step);

	out->name = manifest->strings + hr__le64(disk->name_off);
	out->name_len = hr__le32(disk->name_len);
	out->first_member = hr__le32(disk->first_member);
	out->n_members = hr__le32(disk->n_members);
	memcpy(out->uuid, disk->uuid, 16);
	out->created_gen = hr__le64(disk->created_gen);
	out->provenance = manifest->strings + hr__le64(disk->provenance_off);
	out->provenance_len = hr__le32(disk->provenance_len);
}

void hr__manifest_member(const struct hr__manifest *manifest, uint32_t number, struct hr__member *out)
{
	const struct hr__disk_member *disk = (const void *)(manifest->members.at +
							    (size_t)number * manifest->members.step);

	out->name = manifest->strings + hr__le64(disk->name_off);
	out->name_len = hr__le32(disk->name_len);
	out->object = hr__le32(disk->object);
}

void hr__manifest_retired(const struct hr__manifest *manifest, uint32_t number, struct hr__retired *out)
{
	const struct hr__disk_retired *disk = (const void *)(manifest->retired.at +
							     (size_t)number * manifest->retired.step);

	out->off = hr__le64(disk->off);
	out->len = hr__le64(disk->len);
	out->last_gen = hr__le64(disk->last_gen);
}

/* Binary search: both tables are sorted, which is checked. */
bool hr__manifest_find_model(const struct hr__manifest *manifest, const char *name, size_t length, uint32_t *number)
{
	uint32_t low = 0, high = manifest->models.n;

	while (low < high) {
		uint32_t middle = low + (high - low) / 2;
		struct hr__model_record model;
		int order;

		hr__manifest_model(manifest, middle, &model);
		order = compare_names(name, length, model.name, model.name_len);
		*number = middle;
		if (order == 0)
			return true;
		if (order < 0)
			high = middle;
		else
			low = middle + 1;
	}
	return false;
}

bool hr__manifest_find_member(const struct hr__manifest *manifest, uint32_t model, const char *name, size_t length,
			      uint32_t *number)
{
	struct hr__model_record record;
	uint32_t low, high;

	hr__manifest_model(manifest, model, &record);
	low = record.first_member;
	high = low + record.n_members;
	while (low < high) {
		uint32_t middle = low + (high - low) / 2;
		struct hr__member member;
		int order;

		hr__manifest_member(manifest, middle, &member);
		order = compare_names(name, length, member.name, member.name_len);
		*number = middle;
		if (order == 0)
			return true;
		if (order < 0)
			high = middle;
		else
			low = middle + 1;
	}
	return false;
}

/* ---- checks ---- */

int hr__object_check(const struct hr__object *object, uint64_t data_off, uint64_t data_end)
{
	uint64_t payload_end = object->payload_off + object->payload_len; /* below 2^49 once looked at */

	if (object->kind != HR__OBJECT_SHARD && object->kind != HR__OBJECT_BLOB)
		return bad("an object is of an unknown kind", object->kind);
	if (object->block_log2 < 16 || object->block_log2 > 20)
		return bad("an object's digest blocks have an impossible size", object->block_log2);
	if (object->ext_off % HR__EXTENT_ALIGN || object->ext_len % HR__EXTENT_ALIGN || object->ext_len == 0 ||
	    object->ext_off < data_off || object->ext_off > data_end || object->ext_len > data_end - object->ext_off)
		return bad("an object's extent does not lie in the data area", object->ext_off);
	if (object->payload_off % HR__RECORD_BYTES || object->payload_len >= HR__MAX_PAYLOAD ||
	    payload_end > object->ext_len)
		return bad("an object's payload does not lie in its extent", object->payload_len);
	if (object->meta_off % HR__RECORD_BYTES || object->meta_off < payload_end ||
	    object->meta_len != hr__object_meta_bytes(object->payload_len, object->block_log2) ||
	    object->meta_off > object->ext_len || object->meta_len > object->ext_len - object->meta_off)
		return bad("an object's footer does not lie behind its payload", object->meta_off);
	if (object->kind == HR__OBJECT_BLOB ? object->header_len != 0
					    : object->payload_len < 8 || object->header_len > object->payload_len - 8)
		return bad("an object's header does not lie in its payload", object->header_len);
	return 0;
}

static int check_table(const struct hr__manifest *manifest, const struct hr__disk_table *disk, size_t record,
		       uint32_t limit, struct hr__table *out)
{
	uint64_t off = hr__le64(disk->off);
	uint32_t n = hr__le32(disk->count), step = hr__le32(disk->rec_size);

	if (n > limit)
		return bad("a table has more records than is allowed", n);
	if (step < record || step % 8 || step > 4096 || off % 8 || off < sizeof(struct hr__disk_manifest) ||
	    off > manifest->bytes || (uint64_t)n * step > manifest->bytes - off)
		return bad("a table does not lie in the body", off);
	*out = (struct hr__table){manifest->body + off, n, step};
	return 0;
}

static int check_head(struct hr__manifest *manifest, const struct hr__label *label, const struct hr__root *root)
{
	const struct hr__disk_manifest *disk = (const void *)manifest->body;
	uint64_t strings_off;
	int code;

	if (manifest->bytes < sizeof(*disk) || memcmp(disk->head.magic, HR__MAGIC_MANIFEST, 8) != 0)
		return bad("it does not begin as a manifest", manifest->bytes);
	if (hr__le16(disk->head.major) != HR__STORE_MAJOR)
		return hr__fail(HR_E_STORE_VERSION, "the store's manifest has format %u; this headrace reads %d",
				hr__le16(disk->head.major), HR__STORE_MAJOR);
	if (memcmp(disk->head.store_uuid, label->uuid, 16) != 0)
		return bad("it belongs to another store", 0);
	if (hr__le64(disk->generation) != root->generation || hr__le64(disk->body_len) != manifest->bytes)
		return bad("it is not of the generation that its root names", hr__le64(disk->generation));
	if (disk->head.crc32c != 0 ||
	    (hr__le16(disk->head.minor) <= HR__STORE_MINOR && !hr__is_zero(disk->rest, sizeof(disk->rest))))
		return bad("a reserved byte is not zero", 0);
	manifest->generation = root->generation;
	code = check_table(manifest, &disk->objects, sizeof(struct hr__disk_object), HR__MAX_OBJECTS,
			   &manifest->objects);
	if (!code)
		code = check_table(manifest, &disk->models, sizeof(struct hr__disk_model), HR__MAX_MODELS,
				   &manifest->models);
	if (!code)
		code = check_table(manifest, &disk->members, sizeof(struct hr__disk_member), HR__MAX_MEMBERS,
				   &manifest->members);
	if (!code)
		code = check_table(manifest, &disk->retired, sizeof(struct hr__disk_retired), HR__MAX_RETIRED,
				   &manifest->retired);
	if (code)
		return code;
	strings_off = hr__le64(disk->strings_off);
	manifest->strings_len = hr__le64(disk->strings_len);
	if (strings_off < sizeof(*disk) || strings_off > manifest->bytes ||
	    manifest->strings_len > manifest->bytes - strings_off)
		return bad("its names do not lie in the body", strings_off);
	manifest->strings = (const char *)manifest->body + strings_off;
	if (manifest->objects.n != root->n_objects || manifest->models.n != root->n_models)
		return bad("it has not as many objects or models as its root says", manifest->objects.n);
	return 0;
}

static int check_objects(const struct hr__manifest *manifest, const struct hr__label *label,
			 const struct hr__root *root, struct hr__space *space)
{
	uint8_t before[16] = {0};

	for (uint32_t i = 0; i < manifest->objects.n; i++) {
		struct hr__object object;
		int code;

		hr__manifest_object(manifest, i, &object);
		code = hr__object_check(&object, label->data_off, root->data_end);
		if (!code && object.created_gen > manifest->generation)
			code = bad("an object is younger than its manifest", object.created_gen);
		if (!code && i > 0 && memcmp(before, object.uuid, 16) >= 0)
			code = bad("objects are not in order", i);
		if (!code)
			code = hr__space_add(space, object.ext_off, object.ext_len);
		if (code)
			return code;
		memcpy(before, object.uuid, 16);
	}
	return 0;
}

static int check_retired(const struct hr__manifest *manifest, const struct hr__label *label,
			 const struct hr__root *root, struct hr__space *space)
{
	for (uint32_t i = 0; i < manifest->retired.n; i++) {
		struct hr__retired retired;
		int code;

		hr__manifest_retired(manifest, i, &retired);
		if (retired.off % HR__EXTENT_ALIGN || retired.len % HR__EXTENT_ALIGN || retired.len == 0 ||
		    retired.off < label->data_off || retired.off > root->data_end ||
		    retired.len > root->data_end - retired.off || retired.last_gen >= manifest->generation)
			return bad("a retired extent does not lie in the data area", retired.off);
		code = hr__space_add(space, retired.off, retired.len);
		if (code)
			return code;
	}
	return 0;
}

/* No two extents share a byte: objects, retired ones, and the two copies of the body. */
static int check_extents(const struct hr__manifest *manifest, const struct hr__label *label,
			 const struct hr__root *root)
{
	uint64_t body_len = hr__round_up(root->body_len, HR__EXTENT_ALIGN), at;
	struct hr__space space = {.begin = label->data_off, .end = root->data_end};
	int code = hr__space_reserve(&space, (size_t)manifest->objects.n + manifest->retired.n + 3);

	if (!code)
		code = check_objects(manifest, label, root, &space);
	if (!code)
		code = check_retired(manifest, label, root, &space);
	for (int copy = 0; copy < 2 && !code; copy++)
		code = hr__space_add(&space, root->body_off[copy], body_len);
	/* Where the region has grown, what were its last records stay where they are. */
	if (!code && root->data_end > label->region_len - HR__GUARD_BYTES)
		code = hr__space_add(&space, label->region_len - HR__GUARD_BYTES, HR__GUARD_BYTES);
	if (!code && !hr__space_sort(&space, &at))
		code = bad("two extents overlap", at);
	hr__space_free(&space);
	return code;
}

static bool text_is_inside(const struct hr__manifest *manifest, uint64_t off, uint32_t length)
{
	return off <= manifest->strings_len && length <= manifest->strings_len - off;
}

static int check_members(const struct hr__manifest *manifest, const struct hr__model_record *model)
{
	struct hr__member before = {0};

	for (uint32_t i = 0; i < model->n_members; i++) {
		uint32_t number = model->first_member + i;
		const struct hr__disk_member *disk = (const void *)(manifest->members.at +
								    (size_t)number * manifest->members.step);
		struct hr__member member;

		if (!text_is_inside(manifest, hr__le64(disk->name_off), hr__le32(disk->name_len)))
			return bad("a file's name does not lie in the body", number);
		hr__manifest_member(manifest, number, &member);
		if (member.object >= manifest->objects.n)
			return bad("a file names an object that is not there", member.object);
		if (!hr__store_name_is_good(member.name, member.name_len, true))
			return bad("a file's name is not a plain relative path", number);
		if (i > 0 && compare_names(before.name, before.name_len, member.name, member.name_len) >= 0)
			return bad("files of a model are not in order", number);
		before = member;
	}
	return 0;
}

static int check_models(const struct hr__manifest *manifest)
{
	struct hr__model_record before = {0};
	uint32_t next = 0;

	for (uint32_t i = 0; i < manifest->models.n; i++) {
		const struct hr__disk_model *disk = (const void *)(manifest->models.at +
								   (size_t)i * manifest->models.step);
		struct hr__model_record model;
		int code;

		if (!text_is_inside(manifest, hr__le64(disk->name_off), hr__le32(disk->name_len)) ||
		    !text_is_inside(manifest, hr__le64(disk->provenance_off), hr__le32(disk->provenance_len)))
			return bad("a model's name does not lie in the body", i);
		hr__manifest_model(manifest, i, &model);
		if (!hr__store_name_is_good(model.name, model.name_len, false))
			return bad("a model's name is empty, too long or not UTF-8", i);
		if (i > 0 && compare_names(before.name, before.name_len, model.name, model.name_len) >= 0)
			return bad("models are not in order", i);
		/* Members follow one another, so that each belongs to one model. */
		if (model.first_member != next || model.n_members > manifest->members.n - next || model.n_members == 0)
			return bad("a model's files are not where they should be", i);
		code = check_members(manifest, &model);
		if (code)
			return code;
		next += model.n_members;
		before = model;
	}
	return next == manifest->members.n ? 0 : bad("a file belongs to no model", next);
}

int hr__manifest_parse(uint8_t *body, size_t bytes, const struct hr__label *label, const struct hr__root *root,
		       struct hr__manifest *out)
{
	int code;

	*out = (struct hr__manifest){.body = body, .bytes = bytes};
	code = check_head(out, label, root);
	if (!code)
		code = check_extents(out, label, root);
	if (!code)
		code = check_models(out);
	return code;
}

/* ---- from the region ---- */

static int read_copy(struct hr__region *region, const struct hr__root *root, int copy, uint8_t *body, bool *is_right)
{
	size_t whole = (size_t)hr__round_up(root->body_len, HR__RECORD_BYTES);
	uint8_t sha256[32];
	int code = hr__region_read(region, root->body_off[copy], body, whole, "the manifest");

	*is_right = false;
	if (code)
		return code;
	hr__sha256_of(body, (size_t)root->body_len, sha256);
	*is_right = memcmp(sha256, root->body_sha256, 32) == 0;
	return 0;
}

int hr__body_check(struct hr__region *region, const struct hr__root *root, int copy, bool *is_right)
{
	size_t room = (size_t)hr__round_up(root->body_len, HR__RECORD_BYTES);
	void *body;
	int code = hr__region_memory(room, &body);

	*is_right = false;
	if (code)
		return code;
	code = read_copy(region, root, copy, body, is_right);
	hr__region_memory_free(body, room);
	return code;
}

int hr__manifest_read(struct hr__region *region, const struct hr__label *label, const struct hr__root *root,
		      struct hr__manifest *out)
{
	const struct hr__where at = {.stage = "manifest", .path = region->path, .offset = root->body_off[0]};
	size_t room = (size_t)hr__round_up(root->body_len, HR__RECORD_BYTES);
	bool is_right = false;
	void *body;
	int code;

	memset(out, 0, sizeof(*out));
	if (root->data_end > hr__max_u64(region->facts.bytes, label->region_len - HR__GUARD_BYTES))
		return hr__fail_at(&at, HR_E_CORRUPT,
				   "%s: the store's data area ends at %" PRIu64 ", outside of its region", region->path,
				   root->data_end);
	code = hr__region_memory(room, &body);
	if (code)
		return code;
	for (int copy = 0; copy < 2 && !is_right; copy++)
		code = read_copy(region, root, copy, body, &is_right);
	if (is_right) {
		code = hr__manifest_parse(body, (size_t)root->body_len, label, root, out);
		if (code)
			hr__error_locate("manifest", region->path, NULL, 0);
	} else if (!code) {
		code = hr__fail_at(
			&at, HR_E_CORRUPT,
			"%s: both copies of the manifest of generation %" PRIu64
			" are damaged; \"headrace store check --rollback\" goes back to the generation before it",
			region->path, root->generation);
	}
	out->body = body;
	out->room = room;
	if (code)
		hr__manifest_free(out);
	return code;
}

void hr__manifest_free(struct hr__manifest *manifest)
{
	hr__region_memory_free(manifest->body, manifest->room);
	memset(manifest, 0, sizeof(*manifest));
}

/* ---- footers ---- */

void hr__footer_encode(const struct hr__object *object, const uint8_t store_uuid[16], void *record)
{
	struct hr__disk_footer *disk = record;

	memset(disk, 0, sizeof(*disk));
	memcpy(disk->object_uuid, object->uuid, 16);
	disk->ext_off = hr__le64(object->ext_off);
	disk->ext_len = hr__le64(object->ext_len);
	disk->payload_len = hr__le64(object->payload_len);
	disk->payload_off = hr__le32((uint32_t)object->payload_off);
	disk->kind = (uint8_t)object->kind;
	disk->block_log2 = (uint8_t)object->block_log2;
	disk->created_gen = hr__le64(object->created_gen);
	disk->header_len = hr__le64(object->header_len);
	memcpy(disk->payload_sha256, object->payload_sha256, 32);
	memcpy(disk->header_sha256, object->header_sha256, 32);
	disk->meta_off = hr__le64(object->meta_off);
	disk->meta_len = hr__le64(object->meta_len);
	disk->n_tensors = hr__le32(object->n_tensors);
	hr__record_seal(disk, HR__MAGIC_FOOTER, store_uuid);
}

enum hr__record_state hr__footer_decode(const void *record, const uint8_t uuid[16], struct hr__object *out)
{
	const struct hr__disk_footer *disk = record;
	enum hr__record_state state = hr__record_look(record, HR__MAGIC_FOOTER, uuid);

	memset(out, 0, sizeof(*out));
	if (state != HR__RECORD_GOOD)
		return state;
	if (hr__le16(disk->head.minor) <= HR__STORE_MINOR && !hr__is_zero(disk->rest, sizeof(disk->rest)))
		return HR__RECORD_DAMAGED;
	memcpy(out->uuid, disk->object_uuid, 16);
	out->ext_off = hr__le64(disk->ext_off);
	out->ext_len = hr__le64(disk->ext_len);
	out->payload_len = hr__le64(disk->payload_len);
	out->payload_off = hr__le32(disk->payload_off);
	out->kind = disk->kind;
	out->block_log2 = disk->block_log2;
	out->created_gen = hr__le64(disk->created_gen);
	out->header_len = hr__le64(disk->header_len);
	memcpy(out->payload_sha256, disk->payload_sha256, 32);
	memcpy(out->header_sha256, disk->header_sha256, 32);
	out->meta_off = hr__le64(disk->meta_off);
	out->meta_len = hr__le64(disk->meta_len);
	out->n_tensors = hr__le32(disk->n_tensors);
	return HR__RECORD_GOOD;
}
