/* SPDX-License-Identifier: Apache-2.0 */
#include "hash.h"

#include "error.h"
#include "mem.h"
#include "os.h"

/* The plain functions, which a later OpenSSL would rather not see used: through EVP, a static libcrypto brings
 * megabytes along. */
#define OPENSSL_SUPPRESS_DEPRECATED
#include <endian.h>
#include <openssl/sha.h>
#include <pthread.h>
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

void hr__sha256_of(const void *bytes, size_t n, uint8_t out[32])
{
	SHA256_CTX ctx; /* not SHA256(): that one goes through EVP */

	SHA256_Init(&ctx);
	SHA256_Update(&ctx, bytes, n);
	SHA256_Final(out, &ctx);
}

/* ---- CRC-32C ---- */

#define CRC_POLY UINT32_C(0x82f63b78) /* reflected */
/* Three streams of this many bytes go side by side, since the instruction takes three cycles and can start one each. */
#define CRC_LONG  4096u
#define CRC_SHORT 256u

static pthread_once_t crc_once = PTHREAD_ONCE_INIT;
static uint32_t crc_table[8][256];
/* What a CRC becomes behind so many zero bytes, by each of its four bytes. */
static uint32_t crc_long_shift[4][256], crc_short_shift[4][256];

/* Shifting is linear: 32 bits are shifted one by one, all other values are sums of those. */
static void fill_shift(uint32_t shift[4][256], unsigned zeros)
{
	for (unsigned byte = 0; byte < 4; byte++) {
		shift[byte][0] = 0;
		for (unsigned bit = 0; bit < 8; bit++) {
			uint32_t crc = UINT32_C(1) << (8 * byte + bit);

			for (unsigned i = 0; i < zeros; i++)
				crc = crc >> 8 ^ crc_table[0][crc & 0xff];
			for (unsigned i = 0; i < 1u << bit; i++)
				shift[byte][(1u << bit) + i] = shift[byte][i] ^ crc;
		}
	}
}

static void fill_crc_tables(void)
{
	for (uint32_t i = 0; i < 256; i++) {
		uint32_t crc = i;

		for (int bit = 0; bit < 8; bit++)
			crc = crc & 1 ? crc >> 1 ^ CRC_POLY : crc >> 1;
		crc_table[0][i] = crc;
	}
	for (int k = 1; k < 8; k++)
		for (uint32_t i = 0; i < 256; i++)
			crc_table[k][i] = crc_table[k - 1][i] >> 8 ^ crc_table[0][crc_table[k - 1][i] & 0xff];
	fill_shift(crc_long_shift, CRC_LONG);
	fill_shift(crc_short_shift, CRC_SHORT);
}

static uint64_t little_word(const unsigned char *p)
{
	uint64_t word;

	memcpy(&word, p, sizeof(word));
	return le64toh(word);
}

static uint32_t crc_by_table(uint32_t crc, const unsigned char *p, size_t n)
{
	for (; n >= 8; n -= 8, p += 8) {
		uint64_t word = little_word(p) ^ crc;

		crc = 0;
		for (int k = 0; k < 8; k++)
			crc ^= crc_table[7 - k][word >> (8 * k) & 0xff];
	}
	for (; n > 0; n--, p++)
		crc = crc >> 8 ^ crc_table[0][(crc ^ *p) & 0xff];
	return crc;
}

#ifdef __x86_64__
static uint32_t crc_shift(uint32_t shift[4][256], uint32_t crc)
{
	return shift[0][crc & 0xff] ^ shift[1][crc >> 8 & 0xff] ^ shift[2][crc >> 16 & 0xff] ^ shift[3][crc >> 24];
}

__attribute__((target("sse4.2"))) static uint32_t crc_three(uint32_t crc, const unsigned char *p, unsigned length,
							    uint32_t shift[4][256])
{
	uint64_t a = crc, b = 0, c = 0;

	for (unsigned i = 0; i < length; i += 8) {
		a = __builtin_ia32_crc32di(a, little_word(p + i));
		b = __builtin_ia32_crc32di(b, little_word(p + length + i));
		c = __builtin_ia32_crc32di(c, little_word(p + (size_t)2 * length + i));
	}
	return crc_shift(shift, crc_shift(shift, (uint32_t)a) ^ (uint32_t)b) ^ (uint32_t)c;
}

__attribute__((target("sse4.2"))) static uint32_t crc_by_instruction(uint32_t crc, const unsigned char *p, size_t n)
{
	for (; n >= (size_t)3 * CRC_LONG; n -= (size_t)3 * CRC_LONG, p += (size_t)3 * CRC_LONG)
		crc = crc_three(crc, p, CRC_LONG, crc_long_shift);
	for (; n >= (size_t)3 * CRC_SHORT; n -= (size_t)3 * CRC_SHORT, p += (size_t)3 * CRC_SHORT)
		crc = crc_three(crc, p, CRC_SHORT, crc_short_shift);
	for (; n >= 8; n -= 8, p += 8)
		crc = (uint32_t)__builtin_ia32_crc32di(crc, little_word(p));
	for (; n > 0; n--, p++)
		crc = __builtin_ia32_crc32qi(crc, *p);
	return crc;
}
#endif

uint32_t hr__crc32c(uint32_t crc, const void *bytes, size_t n)
{
	pthread_once(&crc_once, fill_crc_tables);
#ifdef __x86_64__
	if (__builtin_cpu_supports("sse4.2"))
		return ~crc_by_instruction(~crc, bytes, n);
#endif
	return ~crc_by_table(~crc, bytes, n);
}

uint32_t hr__crc32c_by_table(uint32_t crc, const void *bytes, size_t n)
{
	pthread_once(&crc_once, fill_crc_tables);
	return ~crc_by_table(~crc, bytes, n);
}
