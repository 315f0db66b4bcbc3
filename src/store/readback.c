/* SPDX-License-Identifier: Apache-2.0 */
#include "readback.h"

#include "core/arith.h"
#include "core/error.h"
#include "core/hash.h"
#include "layout.h"

#include <errno.h>

int hr__read_back(struct hr__read_back *back)
{
	uint64_t block = UINT64_C(1) << back->block_log2;
	int error = back->region->ops->read(back->region, back->at, back->memory,
					    (size_t)hr__round_up(back->bytes, HR__RECORD_BYTES));

	for (uint64_t done = 0; done < back->bytes && !error; done += block) {
		back->bad_at = back->at + done;
		back->expected = back->digests[done >> back->block_log2];
		back->found = hr__crc32c(0, (const uint8_t *)back->memory + done,
					 (size_t)hr__min_u64(block, back->bytes - done));
		error = back->found == back->expected ? 0 : EBADMSG;
	}
	return error;
}

int hr__fail_read_back(const struct hr__read_back *back, uint64_t object_at)
{
	const char *path = back->region->path;

	return hr__fail_at(&(struct hr__where){.stage = "verify", .path = path, .offset = back->bad_at}, HR_E_DIGEST,
			   "%s does not give back what was written at %" PRIu64 ": CRC-32C %08" PRIx32
			   " instead of %08" PRIx32 " (object at %" PRIu64 "); memory, cable or device is at fault",
			   path, back->bad_at, back->found, back->expected, object_at);
}
