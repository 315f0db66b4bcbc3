/* SPDX-License-Identifier: Apache-2.0 */
#include "hash.h"

#include "error.h"
#include "mem.h"
#include "os.h"

/* The plain functions, which a later OpenSSL would rather not see used: through EVP, a static libcrypto brings
 * megabytes along. */
#define OPENSSL_SUPPRESS_DEPRECATED
#include <openssl/sha.h>
#include <string.h>

static inline uint64_t rotl(uint64_t x, int by)
{
	return (x << by) | (x >> (64 - by));
}

static inline void sip_round(uint64_t v[4])
{
	v[0] += v[1];
	v[1] = rotl(v[1], 13) ^ v[0];
	v[0] = rotl(v[0], 32);
	v[2] += v[3];
	v[3] = rotl(v[3], 16) ^ v[2];
	v[0] += v[3];
	v[3] = rotl(v[3], 21) ^ v[0];
	v[2] += v[1];
	v[1] = rotl(v[1], 17) ^ v[2];
	v[2] = rotl(v[2], 32);
}

uint64_t hr__hash(const struct hr__hash_key *key, const void *bytes, size_t n)
{
	const unsigned char *p = bytes;
	uint64_t v[4] = {key->k0 ^ 0x736f6d6570736575u, key->k1 ^ 0x646f72616e646f6du, key->k0 ^ 0x6c7967656e657261u,
			 key->k1 ^ 0x7465646279746573u};
	uint64_t word, tail = (uint64_t)n << 56;
	size_t left = n;

	for (; left >= 8; left -= 8, p += 8) {
		memcpy(&word, p, 8);
		v[3] ^= word;
		sip_round(v);
		v[0] ^= word;
	}
	for (size_t i = 0; i < left; i++)
		tail |= (uint64_t)p[i] << (8 * i);
	v[3] ^= tail;
	sip_round(v);
	v[0] ^= tail;
	v[2] ^= 0xff;
	sip_round(v);
	sip_round(v);
	sip_round(v);
	return v[0] ^ v[1] ^ v[2] ^ v[3];
}

void hr__hash_key_new(struct hr__hash_key *key)
{
	if (hr__os_random(key, sizeof(*key)) == 0)
		return;
	key->k0 = hr__os_now_ns() * UINT64_C(0x9e3779b97f4a7c15);
	key->k1 = (uint64_t)(uintptr_t)key ^ rotl(key->k0, 29);
}

struct hr__sha256 {
	SHA256_CTX state;
};

int hr__sha256_new(hr__sha256 **out)
{
	hr__sha256 *sha = hr__calloc(1, sizeof(*sha));

	*out = sha;
	if (!sha)
		return HR_E_NOMEM;
	SHA256_Init(&sha->state);
	return 0;
}

int hr__sha256_update(hr__sha256 *sha, const void *bytes, size_t n)
{
	if (!SHA256_Update(&sha->state, bytes, n))
		return hr__fail(HR_E_UNSUPPORTED, "libcrypto refused to compute SHA-256");
	return 0;
}

int hr__sha256_final(hr__sha256 *sha, uint8_t out[32])
{
	if (!SHA256_Final(out, &sha->state) || !SHA256_Init(&sha->state))
		return hr__fail(HR_E_UNSUPPORTED, "libcrypto refused to compute SHA-256");
	return 0;
}

void hr__sha256_free(hr__sha256 *sha)
{
	hr__free(sha);
}
