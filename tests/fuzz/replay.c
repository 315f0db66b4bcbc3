/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs a fuzz target without libFuzzer: over each file given, and over some hundred changes of it that are the same
 * every time. So the seeds and every input that once failed are an ordinary test, with any compiler.
 */
#include "fuzz.h"

#define N_CHANGES 300
#define MAX_BYTES (1 << 20)

static uint64_t state = 88172645463325252u;

static uint64_t next_random(void)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return state;
}

size_t LLVMFuzzerMutate(uint8_t *bytes, size_t n, size_t max)
{
	static const char tokens[] = "{}[],:\"\\u0d8e.-+ \0\xff\xc3";
	size_t at = n ? next_random() % n : 0, length = 1 + next_random() % 8;

	switch (next_random() % 4) {
	case 0:
		if (n)
			bytes[at] ^= (uint8_t)(1 << next_random() % 8);
		return n;
	case 1:
		if (n)
			bytes[at] = (uint8_t)tokens[next_random() % sizeof(tokens)];
		return n;
	case 2:
		length = length < n - at ? length : n - at;
		memmove(bytes + at, bytes + at + length, n - at - length);
		return n - length;
	default:
		if (n + length > max || length > n - at)
			return n;
		memmove(bytes + at + length, bytes + at, n - at);
		return n + length;
	}
}

/* Targets without a mutator of their own get this one. */
__attribute__((weak)) size_t LLVMFuzzerCustomMutator(uint8_t *bytes, size_t n, size_t max, unsigned seed)
{
	(void)seed;
	return LLVMFuzzerMutate(bytes, n, max);
}

static int replay(const char *path)
{
	static uint8_t original[MAX_BYTES], changed[MAX_BYTES];
	FILE *file = fopen(path, "rb");
	size_t n, m;

	if (!file) {
		fprintf(stderr, "cannot open %s\n", path);
		return 1;
	}
	n = fread(original, 1, sizeof(original), file);
	fclose(file);
	LLVMFuzzerTestOneInput(original, n);
	for (int i = 0; i < N_CHANGES; i++) {
		memcpy(changed, original, n);
		m = n;
		for (uint64_t times = 1 + next_random() % 3; times > 0; times--)
			m = LLVMFuzzerCustomMutator(changed, m, sizeof(changed), (unsigned)next_random());
		LLVMFuzzerTestOneInput(changed, m);
	}
	return 0;
}

int main(int argc, char **argv)
{
	for (int i = 1; i < argc; i++)
		if (replay(argv[i]) != 0)
			return 1;
	printf("%d inputs, each with %d changes\n", argc - 1, N_CHANGES);
	return argc > 1 ? 0 : 1;
}
