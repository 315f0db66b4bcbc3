/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What lies on a region, byte for byte: format version 1. docs/store-format.md is the normative description, and this
 * file is that description in C; nothing here is used in memory longer than it takes to read or write a record.
 *
 * All integers are little-endian; hr__le16/32/64() go both ways. Positions are asserted below, so a compiler that would
 * lay a struct out differently does not build this.
 */
#ifndef HR_STORE_LAYOUT_H
#define HR_STORE_LAYOUT_H

#include <assert.h>
#include <endian.h>
#include <stddef.h>
#include <stdint.h>

#define HR__STORE_MAJOR 1
#define HR__STORE_MINOR 0

/* ---- where things are ---- */

#define HR__RECORD_BYTES    4096u
#define HR__EXTENT_ALIGN    UINT64_C(65536)
#define HR__LABEL_OFF       UINT64_C(65536)
#define HR__ROOT_OFF(slot)  (UINT64_C(131072) + UINT64_C(65536) * (slot)) /* slot 0 is A, slot 1 is B */
#define HR__GUARD_BYTES     (UINT64_C(4) << 20) /* at both ends, free of what strangers choose */
#define HR__TAIL_BYTES      (UINT64_C(1) << 20) /* the second copies begin so far before the region's end */
#define HR__TAIL_STEP       UINT64_C(65536)
#define HR__REGION_ALIGN    (UINT64_C(1) << 20)
#define HR__REGION_MIN      (UINT64_C(16) << 20)
#define HR__MAX_NAME        1024u
#define HR__MAX_OBJECTS     65536u
#define HR__MAX_MODELS      4096u
#define HR__MAX_MEMBERS     (UINT32_C(1) << 20)
#define HR__MAX_RETIRED     (UINT32_C(1) << 20)
#define HR__MAX_BODY        (UINT64_C(64) << 20)
#define HR__MAX_PAYLOAD     (UINT64_C(1) << 48)
#define HR__MAX_GENERATION  ((UINT64_C(1) << 62) - 1)
#define HR__LOCK_WRITER     (UINT64_C(1) << 62) /* byte that the writer locks */
#define HR__LOCK_LEASE(gen) ((UINT64_C(1) << 62) + 1 + (gen))

#define HR__MAGIC_LABEL    "HRLABEL1"
#define HR__MAGIC_ROOT     "HRROOT01"
#define HR__MAGIC_MANIFEST "HRMANIF1"
#define HR__MAGIC_FOOTER   "HROBJFT1"

/* ---- integers ---- */

static inline uint16_t hr__le16(uint16_t value)
{
	return htole16(value);
}

static inline uint32_t hr__le32(uint32_t value)
{
	return htole32(value);
}

static inline uint64_t hr__le64(uint64_t value)
{
	return htole64(value);
}

/* ---- records ---- */

/* At the beginning of every record and of a manifest body. */
struct hr__disk_head {
	char magic[8];
	uint32_t crc32c; /* over the record with this field zero; 0 in a manifest body */
	uint16_t major, minor;
	uint8_t store_uuid[16];
};

struct hr__disk_label {
	struct hr__disk_head head;
	uint64_t feat_compat, feat_ro_compat, feat_incompat;
	uint64_t self_off;
	uint64_t region_base, region_len;
	uint64_t device_bytes;
	uint32_t lba_bytes, phys_bytes;
	uint8_t align_log2, block_log2, reserved[2];
	uint32_t zero;
	uint64_t data_off;
	uint64_t init_time_ns;
	uint32_t ident_kind, nsid;
	uint8_t nguid[16], eui64[8], ns_uuid[16];
	char serial[20], model[40], wwid[96];
	uint8_t partuuid[16];
	char name[64];
	uint8_t rest[3692];
};

struct hr__disk_root {
	struct hr__disk_head head;
	uint64_t generation;
	uint64_t self_off;
	uint64_t floor_gen;
	uint64_t data_end;
	uint64_t body_len, body_off[2];
	uint8_t body_sha256[32];
	uint32_t n_objects, n_models;
	uint64_t live_bytes;
	uint8_t writer_id[16];
	uint64_t commit_time_ns;
	uint64_t feat_incompat;
	uint8_t rest[3928];
};

struct hr__disk_table {
	uint64_t off; /* in the body */
	uint32_t count, rec_size;
};

struct hr__disk_manifest {
	struct hr__disk_head head;
	uint64_t generation;
	uint64_t body_len;
	struct hr__disk_table objects, models, members, retired;
	uint64_t strings_off, strings_len;
	uint8_t rest[32];
};

struct hr__disk_object {
	uint8_t uuid[16];
	uint64_t ext_off, ext_len;
	uint32_t payload_off;
	uint8_t kind, block_log2;
	uint16_t flags;
	uint64_t payload_len, header_len;
	uint8_t payload_sha256[32], header_sha256[32];
	uint64_t meta_off, meta_len; /* meta_off in the extent */
	uint8_t meta_sha256[32];
	uint32_t n_tensors, zero;
	uint64_t created_gen;
	uint8_t rest[72];
};

struct hr__disk_model {
	uint64_t name_off; /* in the strings */
	uint32_t name_len, n_members, first_member, flags;
	uint8_t uuid[16];
	uint64_t created_gen;
	uint64_t provenance_off;
	uint32_t provenance_len, zero;
};

struct hr__disk_member {
	uint64_t name_off; /* in the strings */
	uint32_t object;   /* number in the table of objects */
	uint32_t name_len;
};

struct hr__disk_retired {
	uint64_t off, len, last_gen;
};

struct hr__disk_footer {
	struct hr__disk_head head;
	uint8_t object_uuid[16];
	uint64_t ext_off, ext_len;
	uint64_t payload_len;
	uint32_t payload_off;
	uint8_t kind, block_log2;
	uint16_t flags;
	uint64_t created_gen;
	uint64_t header_len;
	uint8_t payload_sha256[32], header_sha256[32];
	uint64_t meta_off, meta_len;
	uint32_t n_tensors;
	uint8_t rest[3916];
};

/* ---- and where each field is ---- */

#define HR__AT(type, field, position) static_assert(offsetof(struct type, field) == (position), #type "." #field)
#define HR__IS(type, bytes)           static_assert(sizeof(struct type) == (bytes), #type)

HR__AT(hr__disk_head, crc32c, 8);
HR__AT(hr__disk_head, major, 12);
HR__AT(hr__disk_head, minor, 14);
HR__AT(hr__disk_head, store_uuid, 16);
HR__IS(hr__disk_head, 32);

HR__AT(hr__disk_label, feat_compat, 32);
HR__AT(hr__disk_label, feat_ro_compat, 40);
HR__AT(hr__disk_label, feat_incompat, 48);
HR__AT(hr__disk_label, self_off, 56);
HR__AT(hr__disk_label, region_base, 64);
HR__AT(hr__disk_label, region_len, 72);
HR__AT(hr__disk_label, device_bytes, 80);
HR__AT(hr__disk_label, lba_bytes, 88);
HR__AT(hr__disk_label, phys_bytes, 92);
HR__AT(hr__disk_label, align_log2, 96);
HR__AT(hr__disk_label, block_log2, 97);
HR__AT(hr__disk_label, reserved, 98);
HR__AT(hr__disk_label, zero, 100);
HR__AT(hr__disk_label, data_off, 104);
HR__AT(hr__disk_label, init_time_ns, 112);
HR__AT(hr__disk_label, ident_kind, 120);
HR__AT(hr__disk_label, nsid, 124);
HR__AT(hr__disk_label, nguid, 128);
HR__AT(hr__disk_label, eui64, 144);
HR__AT(hr__disk_label, ns_uuid, 152);
HR__AT(hr__disk_label, serial, 168);
HR__AT(hr__disk_label, model, 188);
HR__AT(hr__disk_label, wwid, 228);
HR__AT(hr__disk_label, partuuid, 324);
HR__AT(hr__disk_label, name, 340);
HR__AT(hr__disk_label, rest, 404);
HR__IS(hr__disk_label, HR__RECORD_BYTES);

HR__AT(hr__disk_root, generation, 32);
HR__AT(hr__disk_root, self_off, 40);
HR__AT(hr__disk_root, floor_gen, 48);
HR__AT(hr__disk_root, data_end, 56);
HR__AT(hr__disk_root, body_len, 64);
HR__AT(hr__disk_root, body_off, 72);
HR__AT(hr__disk_root, body_sha256, 88);
HR__AT(hr__disk_root, n_objects, 120);
HR__AT(hr__disk_root, n_models, 124);
HR__AT(hr__disk_root, live_bytes, 128);
HR__AT(hr__disk_root, writer_id, 136);
HR__AT(hr__disk_root, commit_time_ns, 152);
HR__AT(hr__disk_root, feat_incompat, 160);
HR__AT(hr__disk_root, rest, 168);
HR__IS(hr__disk_root, HR__RECORD_BYTES);

HR__AT(hr__disk_manifest, generation, 32);
HR__AT(hr__disk_manifest, body_len, 40);
HR__AT(hr__disk_manifest, objects, 48);
HR__AT(hr__disk_manifest, models, 64);
HR__AT(hr__disk_manifest, members, 80);
HR__AT(hr__disk_manifest, retired, 96);
HR__AT(hr__disk_manifest, strings_off, 112);
HR__AT(hr__disk_manifest, strings_len, 120);
HR__AT(hr__disk_manifest, rest, 128);
HR__IS(hr__disk_manifest, 160);
HR__AT(hr__disk_table, count, 8);
HR__AT(hr__disk_table, rec_size, 12);
HR__IS(hr__disk_table, 16);

HR__AT(hr__disk_object, ext_off, 16);
HR__AT(hr__disk_object, ext_len, 24);
HR__AT(hr__disk_object, payload_off, 32);
HR__AT(hr__disk_object, kind, 36);
HR__AT(hr__disk_object, block_log2, 37);
HR__AT(hr__disk_object, flags, 38);
HR__AT(hr__disk_object, payload_len, 40);
HR__AT(hr__disk_object, header_len, 48);
HR__AT(hr__disk_object, payload_sha256, 56);
HR__AT(hr__disk_object, header_sha256, 88);
HR__AT(hr__disk_object, meta_off, 120);
HR__AT(hr__disk_object, meta_len, 128);
HR__AT(hr__disk_object, meta_sha256, 136);
HR__AT(hr__disk_object, n_tensors, 168);
HR__AT(hr__disk_object, zero, 172);
HR__AT(hr__disk_object, created_gen, 176);
HR__AT(hr__disk_object, rest, 184);
HR__IS(hr__disk_object, 256);

HR__AT(hr__disk_model, name_len, 8);
HR__AT(hr__disk_model, n_members, 12);
HR__AT(hr__disk_model, first_member, 16);
HR__AT(hr__disk_model, flags, 20);
HR__AT(hr__disk_model, uuid, 24);
HR__AT(hr__disk_model, created_gen, 40);
HR__AT(hr__disk_model, provenance_off, 48);
HR__AT(hr__disk_model, provenance_len, 56);
HR__AT(hr__disk_model, zero, 60);
HR__IS(hr__disk_model, 64);

HR__AT(hr__disk_member, object, 8);
HR__AT(hr__disk_member, name_len, 12);
HR__IS(hr__disk_member, 16);

HR__AT(hr__disk_retired, len, 8);
HR__AT(hr__disk_retired, last_gen, 16);
HR__IS(hr__disk_retired, 24);

HR__AT(hr__disk_footer, object_uuid, 32);
HR__AT(hr__disk_footer, ext_off, 48);
HR__AT(hr__disk_footer, ext_len, 56);
HR__AT(hr__disk_footer, payload_len, 64);
HR__AT(hr__disk_footer, payload_off, 72);
HR__AT(hr__disk_footer, kind, 76);
HR__AT(hr__disk_footer, block_log2, 77);
HR__AT(hr__disk_footer, flags, 78);
HR__AT(hr__disk_footer, created_gen, 80);
HR__AT(hr__disk_footer, header_len, 88);
HR__AT(hr__disk_footer, payload_sha256, 96);
HR__AT(hr__disk_footer, header_sha256, 128);
HR__AT(hr__disk_footer, meta_off, 160);
HR__AT(hr__disk_footer, meta_len, 168);
HR__AT(hr__disk_footer, n_tensors, 176);
HR__AT(hr__disk_footer, rest, 180);
HR__IS(hr__disk_footer, HR__RECORD_BYTES);

#undef HR__AT
#undef HR__IS

#endif
