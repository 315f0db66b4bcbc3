/* SPDX-License-Identifier: Apache-2.0 */
/* What the look-alikes share: settings from the environment, as "key=value,key=value". */
#ifndef HR_TESTS_FAKE_CONTROLS_H
#define HR_TESTS_FAKE_CONTROLS_H

#include <stdio.h>
#include <stdlib.h>

/* Gives each pair to `set`, which answers 0, or else for a key that there is not. */
static inline void fake_settings_read(const char *variable, int (*set)(const char *key, long long value))
{
	const char *text = getenv(variable);
	char key[32];
	long long value;
	int used;

	while (text && sscanf(text, "%31[a-z_]=%lld%n", key, &value, &used) == 2) {
		if (set(key, value))
			fprintf(stderr, "%s has no setting %s\n", variable, key);
		text += used;
		text += *text == ',';
	}
	if (text && *text)
		fprintf(stderr, "%s is not understood from \"%s\" on\n", variable, text);
}

#endif
