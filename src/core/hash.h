/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Hashes: a keyed one for tables of names from hostile files (SipHash-1-3), SHA-256 (libcrypto), and CRC-32C, which
 * guards the records and the digest blocks of a store.
 */
#ifndef HR_CORE_HASH_H
#define HR_CORE_HASH_H

#include <stddef.h>
#include <stdint.h>

struct hr__hash_key {
	uint64_t k0, k1;
};

/* A fresh random key. Never fails: falls back to clock and addresses where getrandom(2) is refused. */
void hr__hash_key_new(struct hr__hash_key *key);
uint64_t hr__hash(const struct hr__hash_key *key, const void *bytes, size_t n);

typedef struct hr__sha256 hr__sha256; /* opaque: a running digest */
int hr__sha256_new(hr__sha256 **out); /* HR_E_NOMEM */
int hr__sha256_update(hr__sha256 *sha, const void *bytes, size_t n);
int hr__sha256_final(hr__sha256 *sha, uint8_t out[32]); /* and start anew */
void hr__sha256_free(hr__sha256 *sha);
/* Of one block of memory; cannot fail. */
void hr__sha256_of(const void *bytes, size_t n, uint8_t out[32]);

/* CRC-32C (Castagnoli) of `bytes` behind what gave `crc`; 0 to start with. By the CPU's instruction where there is one
 * (x86-64 with SSE4.2: 15 to 32 GB/s), else by tables. Threads: any. */
uint32_t hr__crc32c(uint32_t crc, const void *bytes, size_t n);
/* By tables alone, for tests. */
uint32_t hr__crc32c_by_table(uint32_t crc, const void *bytes, size_t n);

#endif
