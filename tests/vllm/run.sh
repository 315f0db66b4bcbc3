#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# run.sh --prepare          makes the environment with vLLM (tools/vllm_env.sh) and a wheel of this tree, unpacked beside it;
#                           ends with status 3 and the reason if that cannot be had here
# run.sh FILE [TEST...]     runs a file of tests with both; prints TAP
# run.sh --contract VERSION runs test_contract.py with the Python files of another version of vLLM; status 3 if they cannot be had
#
# HR_VLLM_VERSION=0.26.0 before either of the first two: with that version instead of 0.32.0, in .cache/vllm-0.26.0.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

env=.cache/vllm-0.32
[ "${HR_VLLM_VERSION:-0.32.0}" = 0.32.0 ] || env=.cache/vllm-$HR_VLLM_VERSION
unpacked=$PWD/.cache/vllm-headrace

if [ "$1" = --prepare ]; then
	tools/vllm_env.sh "$env" "${HR_VLLM_VERSION:-0.32.0}"
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

export PYTHONPATH=$unpacked PYTHONDONTWRITEBYTECODE=1
if [ "$1" = --contract ]; then
	files=.cache/vllm-files-$2
	tools/vllm_files.sh "$2" "$files" || exit
	export HR_VLLM_VERSION=$2 PYTHONPATH=$PWD/$files:$PYTHONPATH
	set -- test_contract.py
fi
file=$1
shift
unset ASAN_OPTIONS UBSAN_OPTIONS TSAN_OPTIONS
# vLLM's own words go to a file: they would drown the results.
log=.cache/vllm-${file%.py}.log
"$PWD/$env/bin/python" "tests/vllm/$file" "$@" 2>"$log" && exit 0
printf '# what was said on stderr is in %s\n' "$log"
exit 1
