/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reading roots. A copy counts if its CRC holds, it is of this store and stands where it says. Of the two copies of a
 * slot the newer one is the slot's; of the two slots the newer one is the store's. Two sound records that differ and
 * claim the same generation are the work of two writers: nothing is guessed then.
 */
#include "roots.h"

#include "core/arith.h"
#include "core/error.h"

#include <string.h>

void hr__root_encode(const struct hr__root *root, const uint8_t uuid[16], uint64_t self_off, void *record)
{
	struct hr__disk_root *disk = record;

	memset(disk, 0, sizeof(*disk));
	disk->generation = hr__le64(root->generation);
	disk->self_off = hr__le64(self_off);
	disk->floor_gen = hr__le64(root->floor_gen);
	disk->data_end = hr__le64(root->data_end);
	disk->body_len = hr__le64(root->body_len);
	disk->body_off[0] = hr__le64(root->body_off[0]);
	disk->body_off[1] = hr__le64(root->body_off[1]);
	memcpy(disk->body_sha256, root->body_sha256, 32);
	disk->n_objects = hr__le32(root->n_objects);
	disk->n_models = hr__le32(root->n_models);
	disk->live_bytes = hr__le64(root->live_bytes);
	memcpy(disk->writer_id, root->writer_id, 16);
	disk->commit_time_ns = hr__le64(root->commit_time_ns);
	hr__record_seal(disk, HR__MAGIC_ROOT, uuid);
}

static bool root_makes_sense(const struct hr__root *root, const struct hr__label *label)
{
	if (root->generation < 1 || root->generation > HR__MAX_GENERATION || root->floor_gen > root->generation ||
	    root->data_end % HR__EXTENT_ALIGN != 0 || root->data_end < label->data_off || root->data_end > INT64_MAX ||
	    root->body_len < sizeof(struct hr__disk_manifest) || root->body_len > HR__MAX_BODY ||
	    root->n_objects > HR__MAX_OBJECTS || root->n_models > HR__MAX_MODELS)
		return false;
	for (int copy = 0; copy < 2; copy++)
		if (root->body_off[copy] % HR__EXTENT_ALIGN != 0 || root->body_off[copy] < label->data_off ||
		    root->body_off[copy] > root->data_end ||
		    hr__round_up(root->body_len, HR__EXTENT_ALIGN) > root->data_end - root->body_off[copy])
			return false;
	return true;
}

enum hr__record_state hr__root_decode(const void *record, const struct hr__label *label, uint64_t self_off,
				      struct hr__root *out)
{
	const struct hr__disk_root *disk = record;
	enum hr__record_state state = hr__record_look(record, HR__MAGIC_ROOT, label->uuid);

	memset(out, 0, sizeof(*out));
	if (state != HR__RECORD_GOOD)
		return state;
	if (hr__le64(disk->self_off) != self_off)
		return HR__RECORD_FOREIGN; /* a write that went to the wrong place */
	if (hr__le64(disk->feat_incompat) != 0)
		return HR__RECORD_VERSION;
	if (hr__le16(disk->head.minor) <= HR__STORE_MINOR && !hr__is_zero(disk->rest, sizeof(disk->rest)))
		return HR__RECORD_DAMAGED;
	out->generation = hr__le64(disk->generation);
	out->floor_gen = hr__le64(disk->floor_gen);
	out->data_end = hr__le64(disk->data_end);
	out->body_len = hr__le64(disk->body_len);
	out->body_off[0] = hr__le64(disk->body_off[0]);
	out->body_off[1] = hr__le64(disk->body_off[1]);
	memcpy(out->body_sha256, disk->body_sha256, 32);
	out->n_objects = hr__le32(disk->n_objects);
	out->n_models = hr__le32(disk->n_models);
	out->live_bytes = hr__le64(disk->live_bytes);
	memcpy(out->writer_id, disk->writer_id, 16);
	out->commit_time_ns = hr__le64(disk->commit_time_ns);
	if (root_makes_sense(out, label))
		return HR__RECORD_GOOD;
	memset(out, 0, sizeof(*out));
	return HR__RECORD_DAMAGED;
}

static int fail_diverged(const struct hr__region *region, uint64_t generation)
{
	return hr__fail_at(
		&(struct hr__where){.stage = "root", .path = region->path, .offset = HR_NO_OFFSET}, HR_E_DIVERGED,
		"%s has two different records of generation %" PRIu64
		": two writers were at work, or parts of two copies were mixed; restore the region from one of them",
		region->path, generation);
}

static bool same_root(const struct hr__root *a, const struct hr__root *b)
{
	return memcmp(a, b, sizeof(*a)) == 0; /* both began as zeros, so padding is equal */
}

/* Takes a sound copy into its slot. */
static int take(const struct hr__region *region, struct hr__roots *roots, unsigned slot, unsigned copy,
		const struct hr__root *root)
{
	struct hr__root *own = &roots->roots[slot];

	if (own->generation == root->generation && !same_root(own, root))
		return fail_diverged(region, root->generation);
	if (own->generation > root->generation) {
		roots->states[slot][copy] = HR__RECORD_FOREIGN;
	} else {
		if (own->generation && own->generation < root->generation)
			roots->states[slot][0] = HR__RECORD_FOREIGN;
		*own = *root;
	}
	return 0;
}

static int fail_none(const struct hr__region *region)
{
	return hr__fail_at(
		&(struct hr__where){.stage = "root", .path = region->path, .offset = HR__ROOT_OFF(0)}, HR_E_CORRUPT,
		"%s: no root of the store is sound, at either end; \"headrace store check --salvage\" lists what can "
		"still be read",
		region->path);
}

/* A newer format's root may be the newest: what stands beside it is not taken in its place. */
static int check_versions(const struct hr__region *region, const struct hr__roots *roots)
{
	for (unsigned i = 0; i < 4; i++)
		if (roots->states[i / 2][i % 2] == HR__RECORD_VERSION)
			return hr__fail_at(
				&(struct hr__where){.stage = "root", .path = region->path, .offset = HR_NO_OFFSET},
				HR_E_STORE_VERSION,
				"%s was last written by a newer headrace, with a feature that this version does not know",
				region->path);
	return 0;
}

/* Both copies of a slot; one that cannot be read is as good as a damaged one, since that is what the other is for. */
static int read_slot(struct hr__region *region, const struct hr__label *label, unsigned slot, void *record,
		     struct hr__roots *out)
{
	int code = 0, n_unread = 0;

	for (unsigned copy = 0; copy < 2; copy++) {
		uint64_t off = hr__root_off(label->region_len, slot, copy);
		struct hr__root root;

		code = hr__region_read(region, off, record, HR__RECORD_BYTES, "a root");
		out->states[slot][copy] = code ? HR__RECORD_DAMAGED : hr__root_decode(record, label, off, &root);
		n_unread += code != 0;
		if (code == HR_E_REGION_CHANGED || n_unread == 2)
			return code;
		code = 0;
		if (out->states[slot][copy] == HR__RECORD_GOOD)
			code = take(region, out, slot, copy, &root);
		if (code)
			return code;
	}
	return 0;
}

int hr__roots_read(struct hr__region *region, const struct hr__label *label, struct hr__roots *out)
{
	void *record;
	int code;

	memset(out, 0, sizeof(*out));
	code = hr__region_memory(HR__RECORD_BYTES, &record);
	for (unsigned slot = 0; slot < 2 && !code; slot++)
		code = read_slot(region, label, slot, record, out);
	hr__region_memory_free(record, HR__RECORD_BYTES);
	if (!code)
		code = check_versions(region, out);
	if (code)
		return code;
	if (!out->roots[0].generation && !out->roots[1].generation)
		return fail_none(region);
	if (out->roots[0].generation == out->roots[1].generation)
		return fail_diverged(region, out->roots[0].generation);
	out->newest = out->roots[1].generation > out->roots[0].generation;
	return 0;
}
