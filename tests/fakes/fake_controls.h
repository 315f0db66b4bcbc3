/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What look-alike libraries share inside: settings by name, from tests and from the environment; calls that are made to
 * fail; calls that are counted; errors of the caller's; random numbers. Each library has one struct fake_controls and
 * calls these under a lock of its own, but for errors, which any thread may tell.
 */
#ifndef HR_TESTS_FAKE_CONTROLS_H
#define HR_TESTS_FAKE_CONTROLS_H

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FAKE_MAX_ARMED   16
#define FAKE_MAX_COUNTED 96

struct fake_setting {
	const char *name;
	long long *value, initial;
};

struct fake_controls {
	const char *who; /* "CUDA" */
	const struct fake_setting *settings;
	size_t n_settings;
	uint64_t random_state;
	_Atomic unsigned n_errors;
	char last_error[256];
	struct {
		char name[48];
		unsigned n;
		int code;
	} armed[FAKE_MAX_ARMED];
	struct {
		const char *name;
		unsigned long long n;
	} counted[FAKE_MAX_COUNTED];
};

/* ---- settings ---- */

static inline int fake_set(struct fake_controls *controls, const char *key, long long value)
{
	for (size_t i = 0; i < controls->n_settings; i++)
		if (strcmp(controls->settings[i].name, key) == 0) {
			*controls->settings[i].value = value;
			if (strcmp(key, "seed") == 0)
				controls->random_state = (uint64_t)value;
			return 0;
		}
	return -1;
}

/* Defaults, and on top of them "key=value,key=value" of the environment. */
static inline void fake_set_all(struct fake_controls *controls, const char *variable)
{
	const char *text = getenv(variable);
	char key[32];
	long long value;
	int used;

	for (size_t i = 0; i < controls->n_settings; i++)
		fake_set(controls, controls->settings[i].name, controls->settings[i].initial);
	while (text && sscanf(text, "%31[a-z_]=%lld%n", key, &value, &used) == 2) {
		if (fake_set(controls, key, value))
			fprintf(stderr, "%s has no setting %s\n", variable, key);
		text += used;
		text += *text == ',';
	}
	if (text && *text)
		fprintf(stderr, "%s is not understood from \"%s\" on\n", variable, text);
}

static inline uint64_t fake_draw(struct fake_controls *controls)
{
	controls->random_state = controls->random_state * 6364136223846793005u + 1442695040888963407u;
	return controls->random_state >> 33;
}

/* ---- errors of the caller's ---- */

static inline void fake_tell(struct fake_controls *controls, bool strict, const char *format, va_list args)
{
	vsnprintf(controls->last_error, sizeof(controls->last_error), format, args);
	controls->n_errors++;
	if (strict) {
		fprintf(stderr, "fake %s: %s\n", controls->who, controls->last_error);
		abort();
	}
}

static inline unsigned fake_told(const struct fake_controls *controls, char *text, size_t text_bytes)
{
	if (text && text_bytes)
		snprintf(text, text_bytes, "%s", controls->last_error);
	return controls->n_errors;
}

/* ---- calls ---- */

static inline void fake_arm(struct fake_controls *controls, const char *function, unsigned n, int code)
{
	if (n == 0)
		memset(controls->armed, 0, sizeof(controls->armed));
	for (int i = 0; i < FAKE_MAX_ARMED && n; i++) {
		if (controls->armed[i].n)
			continue;
		snprintf(controls->armed[i].name, sizeof(controls->armed[i].name), "%s", function);
		controls->armed[i].n = n;
		controls->armed[i].code = code;
		break;
	}
}

/* What this call is to answer, or 0. "*" stands for any function of the library's. */
static inline int fake_take_armed(struct fake_controls *controls, const char *function)
{
	int code = 0;

	for (int i = 0; i < FAKE_MAX_ARMED; i++) {
		bool is_meant = strcmp(controls->armed[i].name, function) == 0 ||
				(strcmp(controls->armed[i].name, "*") == 0 && strcmp(function, "async") != 0);

		if (controls->armed[i].n && is_meant && --controls->armed[i].n == 0)
			code = controls->armed[i].code;
	}
	return code;
}

static inline void fake_count(struct fake_controls *controls, const char *function)
{
	for (int i = 0; i < FAKE_MAX_COUNTED; i++) {
		if (!controls->counted[i].name)
			controls->counted[i].name = function;
		if (strcmp(controls->counted[i].name, function) == 0) {
			controls->counted[i].n++;
			return;
		}
	}
}

static inline unsigned long long fake_calls(const struct fake_controls *controls, const char *function)
{
	unsigned long long n = 0;

	for (int i = 0; i < FAKE_MAX_COUNTED && controls->counted[i].name; i++)
		if (!function || strcmp(function, controls->counted[i].name) == 0)
			n += controls->counted[i].n;
	return n;
}

/* Counters 0, nothing armed. */
static inline void fake_controls_reset(struct fake_controls *controls)
{
	memset(controls->armed, 0, sizeof(controls->armed));
	memset(controls->counted, 0, sizeof(controls->counted));
	controls->n_errors = 0;
	controls->last_error[0] = '\0';
}

#endif
