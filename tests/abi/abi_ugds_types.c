/* SPDX-License-Identifier: Apache-2.0 */
/* Our own types of uGDS beside its: the same sizes, the same places. See abi_ugds.c. */
#include "engine/ugds_syms.h"

#include <stdio.h>

int abi_ugds_sizes(size_t *sizes);

int main(void)
{
	const size_t ours[] = {sizeof(struct hr__ug_error), sizeof(struct hr__ug_descr),
			       offsetof(struct hr__ug_descr, handle), offsetof(struct hr__ug_error, cu_err)};
	size_t theirs[4];
	int n = abi_ugds_sizes(theirs), wrong = 0;

	for (int i = 0; i < n; i++)
		if (ours[i] != theirs[i]) {
			printf("size or offset %d is %zu here and %zu there\n", i, ours[i], theirs[i]);
			wrong = 1;
		}
	return wrong;
}
