/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Takes one code point off a text that may hold anything. Gives how many bytes it has, or 0 where the bytes
 * are not UTF-8 (overlong forms and surrogates included): then *point is the first byte.
 */
#ifndef HR_CLI_UTF8_H
#define HR_CLI_UTF8_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

static inline size_t cli_utf8_next(const char *text, size_t len, uint32_t *point)
{
	static const uint32_t smallest[5] = {0, 0, 0x80, 0x800, 0x10000};
	const unsigned char *s = (const unsigned char *)text;
	size_t n = s[0] < 0x80 ? 1 : s[0] >= 0xf0 ? 4 : s[0] >= 0xe0 ? 3 : s[0] >= 0xc2 ? 2 : 0;
	uint32_t whole;

	*point = s[0];
	if (n == 1)
		return 1;
	if (!n || n > len || s[0] > 0xf4)
		return 0;
	whole = s[0] & (0x7fu >> n);
	for (size_t i = 1; i < n; i++) {
		if ((s[i] & 0xc0) != 0x80)
			return 0;
		whole = whole << 6 | (s[i] & 0x3fu);
	}
	if (whole < smallest[n] || whole > 0x10ffff || (whole >= 0xd800 && whole < 0xe000))
		return 0;
	*point = whole;
	return n;
}

/* What a terminal must not get as it is: controls, and characters that hide or turn round what follows. */
static inline bool cli_is_unprintable(uint32_t point)
{
	return point < 0x20 || (point >= 0x7f && point < 0xa0) || (point >= 0x200b && point <= 0x200f) ||
	       (point >= 0x2028 && point <= 0x202e) || (point >= 0x2060 && point <= 0x206f) || point == 0xfeff;
}

#endif
