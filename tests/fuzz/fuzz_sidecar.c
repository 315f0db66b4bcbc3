/* SPDX-License-Identifier: Apache-2.0 */
/* Any bytes as an exported manifest. What is accepted has a path that is whole, and the rest filled. */
#include "fuzz.h"

#include "store/pin.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n)
{
	struct hr__sidecar sidecar;
	uint8_t *json;
	int rc;

	if (n < FUZZ_PREFIX)
		return 0;
	n -= FUZZ_PREFIX;
	json = fuzz_copy(bytes + FUZZ_PREFIX, n);
	fuzz_arm(bytes);
	rc = hr__sidecar_parse("/a/side.json", json, n, &sidecar);
	if (fuzz_fired())
		fuzz_check(rc == HR_E_NOMEM);
	if (rc)
		fuzz_check(!sidecar.path && hr_error_last()->code == rc && hr_error_last()->message[0]);
	else
		fuzz_check(sidecar.path[0] == '/' && sidecar.path[1]);
	hr__sidecar_free(&sidecar);
	free(json);
	return 0;
}
