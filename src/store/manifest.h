/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Manifest bodies: what one generation consists of. A body is checked as a whole by the SHA-256 in its root, then
 * every record by itself and against the others; after that it is read in place, a record at a time. So opening costs
 * one read, one hash and one walk, whatever is asked for later. Writers take it apart into a draft and make a new body
 * of that.
 */
#ifndef HR_STORE_MANIFEST_H
#define HR_STORE_MANIFEST_H

#include "roots.h"

#define HR__NO_OBJECT UINT32_MAX

enum hr__object_kind {
	HR__OBJECT_SHARD = 1,
	HR__OBJECT_BLOB = 2,
};

struct hr__object {
	uint8_t uuid[16];
	uint64_t ext_off, ext_len; /* of the region */
	uint64_t payload_off;      /* in the extent */
	uint64_t payload_len;
	uint64_t header_len; /* N of the shard's header; 0 for a blob */
	uint8_t payload_sha256[32], header_sha256[32];
	uint64_t meta_off, meta_len; /* footer and digests, in the extent */
	uint8_t meta_sha256[32];
	uint32_t n_tensors;
	uint32_t kind;
	uint32_t block_log2; /* of a digest block's bytes */
	uint64_t created_gen;
};

struct hr__model_record {
	const char *name; /* in the body; not NUL-terminated */
	uint32_t name_len;
	uint32_t first_member, n_members;
	uint8_t uuid[16];
	uint64_t created_gen;
	const char *provenance;
	uint32_t provenance_len;
};

struct hr__member {
	const char *name; /* in the body; not NUL-terminated */
	uint32_t name_len;
	uint32_t object;
};

struct hr__retired {
	uint64_t off, len, last_gen;
};

struct hr__table {
	const uint8_t *at;
	uint32_t n, step;
};

struct hr__manifest {
	uint8_t *body; /* owned: hr__region_memory() */
	size_t room, bytes;
	uint64_t generation;
	struct hr__table objects, models, members, retired;
	const char *strings;
	uint64_t strings_len;
};

/* Digest blocks of an object, and the bytes of its footer and digests. */
uint64_t hr__object_n_blocks(const struct hr__object *object);
uint64_t hr__object_meta_bytes(uint64_t payload_len, uint32_t block_log2);

/* Checks a body of `bytes` that the root's hash vouched for (or not: nothing here trusts it) and fills `out`, which
 * points into it. HR_E_CORRUPT, with what is wrong; HR_E_STORE_VERSION. */
int hr__manifest_parse(uint8_t *body, size_t bytes, const struct hr__label *label, const struct hr__root *root,
		       struct hr__manifest *out);
/* Reads a root's body, either copy, and parses it. */
int hr__manifest_read(struct hr__region *region, const struct hr__label *label, const struct hr__root *root,
		      struct hr__manifest *out);
void hr__manifest_free(struct hr__manifest *manifest);
/* Whether one copy of a root's body has its hash. HR_E_IO, HR_E_NOMEM, HR_E_REGION_CHANGED. */
int hr__body_check(struct hr__region *region, const struct hr__root *root, int copy, bool *is_right);

/* Records by number, which is in range. */
void hr__manifest_object(const struct hr__manifest *manifest, uint32_t number, struct hr__object *out);
void hr__manifest_model(const struct hr__manifest *manifest, uint32_t number, struct hr__model_record *out);
void hr__manifest_member(const struct hr__manifest *manifest, uint32_t number, struct hr__member *out);
void hr__manifest_retired(const struct hr__manifest *manifest, uint32_t number, struct hr__retired *out);
/* False: there is none of that name. `number` of a member counts over all models. */
bool hr__manifest_find_model(const struct hr__manifest *manifest, const char *name, size_t length, uint32_t *number);
bool hr__manifest_find_member(const struct hr__manifest *manifest, uint32_t model, const char *name, size_t length,
			      uint32_t *number);

/* Footers: a record as any other, with all that is needed to find an object again without a manifest. */
void hr__footer_encode(const struct hr__object *object, const uint8_t store_uuid[16], void *record);
/* `uuid` NULL: any store's. */
enum hr__record_state hr__footer_decode(const void *record, const uint8_t uuid[16], struct hr__object *out);
/* HR_E_CORRUPT unless the object agrees with itself and with the data area. */
int hr__object_check(const struct hr__object *object, uint64_t data_off, uint64_t data_end);

/* ---- making one ---- */

struct hr__draft_member {
	char *name;
	uint32_t object; /* in the draft */
};

struct hr__draft_model {
	char *name, *provenance;
	uint8_t uuid[16];
	uint64_t created_gen;
	struct hr__draft_member *members;
	uint32_t n_members;
};

/* A generation in the making. Objects keep their numbers until it is built. */
struct hr__draft {
	struct hr__object *objects;
	struct hr__draft_model *models;
	struct hr__retired *retired;
	uint32_t n_objects, n_models, n_retired;
	uint32_t room_objects, room_models, room_retired;
};

int hr__draft_from(const struct hr__manifest *manifest, struct hr__draft *out);
void hr__draft_free(struct hr__draft *draft);
int hr__draft_add_object(struct hr__draft *draft, const struct hr__object *object, uint32_t *number);
/* Takes over `model`, also when it fails. */
int hr__draft_add_model(struct hr__draft *draft, struct hr__draft_model *model);
void hr__draft_remove_model(struct hr__draft *draft, uint32_t number);
int hr__draft_retire(struct hr__draft *draft, uint64_t off, uint64_t len, uint64_t last_gen);
/* Retires objects that `drop` marks (one byte each) and takes them out; members keep pointing right. */
int hr__draft_drop_objects(struct hr__draft *draft, const uint8_t *drop, uint64_t last_gen);
/* Takes out a model, and retires the objects that only it had. */
int hr__draft_drop_model(struct hr__draft *draft, uint32_t number, uint64_t last_gen);
/* Marks objects that no model has with 1, others with 0. */
void hr__draft_unbound(const struct hr__draft *draft, uint8_t *marks);
/* The body of `generation`, in hr__region_memory() rounded up to whole extents. HR_E_LIMIT, HR_E_NOMEM. */
int hr__draft_build(const struct hr__draft *draft, const struct hr__label *label, uint64_t generation, uint8_t **body,
		    size_t *bytes);
void hr__draft_model_free(struct hr__draft_model *model);

/* Whether a text may be a model's or a member's name: UTF-8 without control bytes; as `is_path`, a relative path
 * without empty, "." and ".." parts. */
bool hr__store_name_is_good(const char *name, size_t length, bool is_path);

#endif
