#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# readme_example.sh ROOT: the C program in the README compiles against the header, without a warning.
set -eu
awk '/^```c$/ { inside = 1; next } /^```$/ { inside = 0 } inside' "$1/README.md" |
	"${CC:-cc}" -std=c11 -Wall -Wextra -Wno-missing-field-initializers -Werror -I "$1/include" -fsyntax-only -x c -
awk '/^```c$/ { found = 1 } END { exit !found }' "$1/README.md"
