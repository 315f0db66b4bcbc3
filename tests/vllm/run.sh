#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# run.sh --prepare          makes the environment with vLLM (tools/vllm_env.sh) and a wheel of this tree, unpacked beside it;
#                           ends with status 3 and the reason if that cannot be had here
# run.sh FILE [TEST...]     runs a file of tests with both; prints TAP
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

env=.cache/vllm-0.32
unpacked=$PWD/.cache/vllm-headrace

if [ "$1" = --prepare ]; then
	tools/vllm_env.sh "$env"
	log=.cache/vllm-headrace.log
	rm -rf "$unpacked" "$unpacked.new"
	"$env/bin/python" -m pip wheel -q --disable-pip-version-check --no-deps -w "$unpacked.new" . >"$log" 2>&1 || {
		tail -n 20 "$log"
		# What builds it comes from PyPI; anything else is a fault of ours.
		grep -qiE 'no matching distribution|connection|network|temporary failure' "$log" && exit 3
		exit 1
	}
	"$env/bin/python" -m pip install -q --disable-pip-version-check --no-deps --no-index --target "$unpacked" "$unpacked.new"/*.whl
	rm -rf "$unpacked.new"
	exit 0
fi

file=$1
shift
export PYTHONPATH=$unpacked PYTHONDONTWRITEBYTECODE=1
unset ASAN_OPTIONS UBSAN_OPTIONS TSAN_OPTIONS
# vLLM's own words go to a file: they would drown the results.
log=.cache/vllm-${file%.py}.log
"$PWD/$env/bin/python" "tests/vllm/$file" "$@" 2>"$log" && exit 0
printf '# what was said on stderr is in %s\n' "$log"
exit 1
