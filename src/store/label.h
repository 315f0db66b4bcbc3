/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The label: what a store is called, how large its region is and which device it was made on. Written once, two copies.
 * And what all records have in common: magic, CRC-32C, version, the store's UUID.
 */
#ifndef HR_STORE_LABEL_H
#define HR_STORE_LABEL_H

#include "block.h"
#include "layout.h"

struct hr__label {
	uint8_t uuid[16];
	uint64_t region_len;
	uint64_t data_off;
	uint64_t init_time_ns;
	uint32_t lba_bytes, phys_bytes;
	struct hr__ident ident;
	char name[65];
	uint16_t minor;
	bool no_write; /* it has a feature that this version must not write beside */
};

/* What is the matter with a record. */
enum hr__record_state {
	HR__RECORD_GOOD,
	HR__RECORD_NONE,    /* something else stands there */
	HR__RECORD_DAMAGED, /* the magic is right, the CRC or a field is not */
	HR__RECORD_VERSION, /* sound, but of a format that this version does not read */
	HR__RECORD_FOREIGN, /* sound, but of another store or written for another place */
};

/* Sets the head and then the CRC of a record of 4096 bytes. */
void hr__record_seal(void *record, const char magic[8], const uint8_t uuid[16]);
/* `uuid` NULL: any store's. Looks at the head only. */
enum hr__record_state hr__record_look(const void *record, const char magic[8], const uint8_t uuid[16]);
int hr__uuid_new(uint8_t uuid[16]); /* random; HR_E_IO */
bool hr__is_zero(const void *bytes, size_t n);

/* The label as it is written at `self_off`. */
void hr__label_encode(const struct hr__label *label, uint64_t self_off, void *record);
/* From bytes to a label; looks at nothing but the bytes. */
enum hr__record_state hr__label_decode(const void *record, uint64_t self_off, struct hr__label *out);
/* Where the copies of label and roots are; copy 0 at the head, 1 at the tail. */
uint64_t hr__label_off(uint64_t region_len, unsigned copy);
uint64_t hr__root_off(uint64_t region_len, unsigned slot, unsigned copy);

/* Reads the label, either copy, and compares it with the region: HR_E_NOT_A_STORE, HR_E_STORE_VERSION,
 * HR_E_CORRUPT, HR_E_GEOMETRY (smaller than the store, other sectors). */
int hr__label_read(struct hr__region *region, struct hr__label *out);
/* HR_E_IDENTITY if the region is on another device than the one that the store was made on, as far as both say. */
int hr__label_identify(const struct hr__region *region, const struct hr__label *label);

#endif
