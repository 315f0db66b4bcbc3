/* SPDX-License-Identifier: Apache-2.0 */
/* Our own types of cuFile beside NVIDIA's: the same sizes, the same places. See abi_cufile.c. */
#include "engine/cufile_syms.h"

#include <stdio.h>

int abi_cufile_sizes(size_t *sizes);

int main(void)
{
	const size_t ours[] = {
		sizeof(struct hr__cf_error),           sizeof(struct hr__cf_descr),
		sizeof(struct hr__cf_props),           offsetof(struct hr__cf_descr, handle),
		offsetof(struct hr__cf_descr, fs_ops), offsetof(struct hr__cf_props, nvfs.dcontrolflags)};
	size_t theirs[8];
	int n = abi_cufile_sizes(theirs), wrong = 0;

	for (int i = 0; i < n; i++)
		if (ours[i] != theirs[i]) {
			printf("size or offset %d is %zu here and %zu there\n", i, ours[i], theirs[i]);
			wrong = 1;
		}
	return wrong;
}
