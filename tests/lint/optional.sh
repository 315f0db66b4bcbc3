#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# optional.sh TOOL ROOT: checks that need a tool which not every machine has; without it the test is skipped.
set -eu
cd "$2"
if ! command -v "$1" >/dev/null; then
	echo "$1 is not installed"
	exit 77
fi
case $1 in
codespell)
	exec codespell --ignore-words-list=extents,ser,ot,nulll README.md NEWS.md CONTRIBUTING.md docs include src cli tools bench \
		tests/unit tests/support tests/lint
	;;
shellcheck)
	exec shellcheck -x tools/demo tools/check tools/fuzz tools/setup.sh .ci/run tests/lint/*.sh
	;;
esac
