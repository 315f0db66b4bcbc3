#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# compare.sh PROGRAM FILE: what the program prints must be what the file holds.
"$1" | diff -u "$2" -
