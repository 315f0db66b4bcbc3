/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A label is believed only if its CRC holds, it stands where it says it stands, and every field makes sense by itself;
 * then it is compared with the region under it. The tail copy is looked for where the region's present size would put
 * it if the head copy is gone; a head copy says itself where the tail is.
 */
#include "label.h"

#include "core/arith.h"
#include "core/error.h"
#include "core/hash.h"

#include <stdio.h>
#include <string.h>

bool hr__is_zero(const void *bytes, size_t n)
{
	const unsigned char *p = bytes;

	return n == 0 || (p[0] == 0 && memcmp(p, p + 1, n - 1) == 0);
}

int hr__uuid_new(uint8_t uuid[16])
{
	int error = hr__os_random(uuid, 16);

	if (error)
		return hr__fail_errno(&(struct hr__where){.stage = "store", .offset = HR_NO_OFFSET}, error,
				      "get random bytes");
	uuid[6] = (uint8_t)((uuid[6] & 0x0f) | 0x40); /* a version 4 UUID */
	uuid[8] = (uint8_t)((uuid[8] & 0x3f) | 0x80);
	return 0;
}

static uint32_t crc_of(const void *record)
{
	static const unsigned char none[4];
	const unsigned char *p = record;
	size_t at = offsetof(struct hr__disk_head, crc32c);
	uint32_t crc = hr__crc32c(0, p, at);

	crc = hr__crc32c(crc, none, 4);
	return hr__crc32c(crc, p + at + 4, HR__RECORD_BYTES - at - 4);
}

void hr__record_seal(void *record, const char magic[8], const uint8_t uuid[16])
{
	struct hr__disk_head *head = record;

	memcpy(head->magic, magic, 8);
	head->major = hr__le16(HR__STORE_MAJOR);
	head->minor = hr__le16(HR__STORE_MINOR);
	memcpy(head->store_uuid, uuid, 16);
	head->crc32c = hr__le32(crc_of(record));
}

enum hr__record_state hr__record_look(const void *record, const char magic[8], const uint8_t uuid[16])
{
	const struct hr__disk_head *head = record;

	if (memcmp(head->magic, magic, 8) != 0)
		return HR__RECORD_NONE;
	if (hr__le32(head->crc32c) != crc_of(record))
		return HR__RECORD_DAMAGED;
	if (hr__le16(head->major) != HR__STORE_MAJOR)
		return HR__RECORD_VERSION;
	if (uuid && memcmp(head->store_uuid, uuid, 16) != 0)
		return HR__RECORD_FOREIGN;
	return HR__RECORD_GOOD;
}

uint64_t hr__label_off(uint64_t region_len, unsigned copy)
{
	return copy ? region_len - HR__TAIL_BYTES : HR__LABEL_OFF;
}

uint64_t hr__root_off(uint64_t region_len, unsigned slot, unsigned copy)
{
	return copy ? region_len - HR__TAIL_BYTES + HR__TAIL_STEP * (slot + 1) : HR__ROOT_OFF(slot);
}

void hr__label_encode(const struct hr__label *label, uint64_t self_off, void *record)
{
	struct hr__disk_label *disk = record;
	const struct hr__ident *ident = &label->ident;

	memset(disk, 0, sizeof(*disk));
	disk->self_off = hr__le64(self_off);
	disk->region_base = hr__le64(ident->region_base);
	disk->region_len = hr__le64(label->region_len);
	disk->device_bytes = hr__le64(ident->device_bytes);
	disk->lba_bytes = hr__le32(label->lba_bytes);
	disk->phys_bytes = hr__le32(label->phys_bytes);
	disk->align_log2 = 16;
	disk->block_log2 = 12;
	disk->data_off = hr__le64(label->data_off);
	disk->init_time_ns = hr__le64(label->init_time_ns);
	disk->ident_kind = hr__le32(ident->kind);
	disk->nsid = hr__le32(ident->nsid);
	memcpy(disk->nguid, ident->nguid, sizeof(disk->nguid));
	memcpy(disk->eui64, ident->eui64, sizeof(disk->eui64));
	memcpy(disk->ns_uuid, ident->ns_uuid, sizeof(disk->ns_uuid));
	memcpy(disk->serial, ident->serial, sizeof(disk->serial));
	memcpy(disk->model, ident->model, sizeof(disk->model));
	memcpy(disk->wwid, ident->wwid, sizeof(disk->wwid));
	memcpy(disk->partuuid, ident->partuuid, sizeof(disk->partuuid));
	memcpy(disk->name, label->name, sizeof(disk->name));
	hr__record_seal(disk, HR__MAGIC_LABEL, label->uuid);
}

static bool label_makes_sense(const struct hr__disk_label *disk, uint64_t self_off)
{
	uint64_t region_len = hr__le64(disk->region_len), data_off = hr__le64(disk->data_off);
	uint32_t lba = hr__le32(disk->lba_bytes);

	if (hr__le64(disk->self_off) != self_off || region_len < HR__REGION_MIN || region_len > INT64_MAX ||
	    region_len % HR__REGION_ALIGN != 0 || (lba != 512 && lba != 4096) || disk->align_log2 != 16 ||
	    disk->block_log2 != 12 || data_off < HR__GUARD_BYTES || data_off % HR__EXTENT_ALIGN != 0 ||
	    data_off > region_len - HR__GUARD_BYTES || hr__is_zero(disk->head.store_uuid, 16))
		return false;
	if (self_off != hr__label_off(region_len, 0) && self_off != hr__label_off(region_len, 1))
		return false;
	return hr__le16(disk->head.minor) > HR__STORE_MINOR ||
	       (disk->zero == 0 && hr__is_zero(disk->reserved, 2) && hr__is_zero(disk->rest, sizeof(disk->rest)));
}

enum hr__record_state hr__label_decode(const void *record, uint64_t self_off, struct hr__label *out)
{
	const struct hr__disk_label *disk = record;
	enum hr__record_state state = hr__record_look(record, HR__MAGIC_LABEL, NULL);

	memset(out, 0, sizeof(*out));
	if (state != HR__RECORD_GOOD)
		return state;
	if (hr__le64(disk->feat_incompat) != 0)
		return HR__RECORD_VERSION;
	if (!label_makes_sense(disk, self_off))
		return HR__RECORD_DAMAGED;
	memcpy(out->uuid, disk->head.store_uuid, 16);
	out->minor = hr__le16(disk->head.minor);
	out->no_write = disk->feat_ro_compat != 0;
	out->region_len = hr__le64(disk->region_len);
	out->data_off = hr__le64(disk->data_off);
	out->init_time_ns = hr__le64(disk->init_time_ns);
	out->lba_bytes = hr__le32(disk->lba_bytes);
	out->phys_bytes = hr__le32(disk->phys_bytes);
	out->ident = (struct hr__ident){.kind = hr__le32(disk->ident_kind),
					.nsid = hr__le32(disk->nsid),
					.region_base = hr__le64(disk->region_base),
					.device_bytes = hr__le64(disk->device_bytes)};
	memcpy(out->ident.nguid, disk->nguid, sizeof(disk->nguid));
	memcpy(out->ident.eui64, disk->eui64, sizeof(disk->eui64));
	memcpy(out->ident.ns_uuid, disk->ns_uuid, sizeof(disk->ns_uuid));
	memcpy(out->ident.serial, disk->serial, sizeof(disk->serial));
	memcpy(out->ident.model, disk->model, sizeof(disk->model));
	memcpy(out->ident.wwid, disk->wwid, sizeof(disk->wwid));
	memcpy(out->ident.partuuid, disk->partuuid, sizeof(disk->partuuid));
	memcpy(out->name, disk->name, sizeof(disk->name));
	return HR__RECORD_GOOD;
}

/* ---- against the region ---- */

static int fail_label(const struct hr__region *region, enum hr__record_state state)
{
	const struct hr__where at = {.stage = "label", .path = region->path, .offset = HR__LABEL_OFF};

	if (state == HR__RECORD_VERSION)
		return hr__fail_at(
			&at, HR_E_STORE_VERSION,
			"%s holds a store of a format that this version of headrace does not read; use a newer one",
			region->path);
	if (state == HR__RECORD_DAMAGED)
		return hr__fail_at(
			&at, HR_E_CORRUPT,
			"%s: both copies of the store's label are damaged; \"headrace store check --salvage\" lists "
			"what can still be read",
			region->path);
	return hr__fail_at(&at, HR_E_NOT_A_STORE, "%s holds no store; \"headrace store init\" makes one", region->path);
}

static int compare_geometry(const struct hr__region *region, const struct hr__label *label)
{
	const struct hr__where at = {.stage = "label", .path = region->path, .offset = HR_NO_OFFSET};

	if (region->facts.bytes < label->region_len)
		return hr__fail_at(&at, HR_E_GEOMETRY,
				   "%s has %" PRIu64 " bytes, and the store in it was made for %" PRIu64
				   ": the region was cut, or the store was copied to a smaller one",
				   region->path, region->facts.bytes, label->region_len);
	if (region->facts.is_block && region->facts.lba_bytes > label->lba_bytes)
		return hr__fail_at(&at, HR_E_GEOMETRY,
				   "%s has sectors of %" PRIu32
				   " bytes, and the store in it was made for sectors of %" PRIu32
				   "; import the models into a new store",
				   region->path, region->facts.lba_bytes, label->lba_bytes);
	return 0;
}

int hr__label_read(struct hr__region *region, struct hr__label *out)
{
	uint64_t size = hr__round_down(region->facts.bytes, HR__REGION_ALIGN);
	enum hr__record_state states[2] = {HR__RECORD_NONE, HR__RECORD_NONE};
	void *record;
	int code;

	memset(out, 0, sizeof(*out));
	if (size < HR__REGION_MIN)
		return fail_label(region, HR__RECORD_NONE);
	code = hr__region_memory(HR__RECORD_BYTES, &record);
	for (unsigned copy = 0; copy < 2 && !code; copy++) {
		uint64_t off = hr__label_off(size, copy);

		code = hr__region_read(region, off, record, HR__RECORD_BYTES, "the label");
		if (code)
			break;
		states[copy] = hr__label_decode(record, off, out);
		if (states[copy] == HR__RECORD_GOOD)
			break;
	}
	hr__region_memory_free(record, HR__RECORD_BYTES);
	if (code)
		return code;
	if (states[0] == HR__RECORD_GOOD || states[1] == HR__RECORD_GOOD)
		return compare_geometry(region, out);
	return fail_label(region, states[0] > states[1] ? states[0] : states[1]);
}

/* One name of a device: whether both have it and it differs. */
static bool differs(const void *a, const void *b, size_t n)
{
	return !hr__is_zero(a, n) && !hr__is_zero(b, n) && memcmp(a, b, n) != 0;
}

/* A plain file or a loop device has no identity of its own. */
static bool is_anonymous(const struct hr__ident *ident)
{
	return hr__is_zero(ident->wwid, sizeof(ident->wwid)) && hr__is_zero(ident->serial, sizeof(ident->serial)) &&
	       hr__is_zero(ident->nguid, sizeof(ident->nguid)) && hr__is_zero(ident->eui64, sizeof(ident->eui64)) &&
	       hr__is_zero(ident->ns_uuid, sizeof(ident->ns_uuid)) &&
	       hr__is_zero(ident->partuuid, sizeof(ident->partuuid));
}

int hr__label_identify(const struct hr__region *region, const struct hr__label *label)
{
	const struct hr__where at = {.stage = "label", .path = region->path, .offset = HR_NO_OFFSET};
	const struct hr__ident *was = &label->ident, *is = &region->ident;
	char before[4 * 96 + 4], now[4 * 96 + 4];

	if (is_anonymous(was))
		return 0;
	if (!is_anonymous(is) && !differs(was->wwid, is->wwid, sizeof(was->wwid)) &&
	    !differs(was->serial, is->serial, sizeof(was->serial)) &&
	    !differs(was->nguid, is->nguid, sizeof(was->nguid)) &&
	    !differs(was->eui64, is->eui64, sizeof(was->eui64)) &&
	    !differs(was->ns_uuid, is->ns_uuid, sizeof(was->ns_uuid)) &&
	    !differs(was->partuuid, is->partuuid, sizeof(was->partuuid)))
		return 0;
	hr__escape(before, sizeof(before), was->wwid[0] ? was->wwid : was->serial,
		   was->wwid[0] ? strnlen(was->wwid, sizeof(was->wwid)) : strnlen(was->serial, sizeof(was->serial)));
	hr__escape(now, sizeof(now), is->wwid[0] ? is->wwid : is->serial,
		   is->wwid[0] ? strnlen(is->wwid, sizeof(is->wwid)) : strnlen(is->serial, sizeof(is->serial)));
	return hr__fail_at(
		&at, HR_E_IDENTITY,
		"%s is on the device \"%s\", and its store was made on \"%s\": it is a copy, or the path names another "
		"device now; HR_STORE_MOVED (--moved) and HR_MODEL_MOVED open it all the same",
		region->path, now, before);
}
