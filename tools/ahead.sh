#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# ahead.sh CHECK_PID: the part of tools/check --all that compiles and reads sources, which it starts and then waits for piece by
# piece. It runs beside the tests and takes only what they leave of the CPUs: many of them wait for a disk, a time-out or a single
# thread. It stays behind them by the lowest priority, so that no test runs later for it; where Linux gives each session its fair
# share (autogroup), by that of its session too, for which it needs one of its own (setsid).
set -euo pipefail
# shellcheck source=tools/setup.sh
. "$(dirname "$0")/setup.sh"
# shellcheck source=tools/steps.sh
. tools/steps.sh
steps=$results/steps-ahead.json
check=$1

renice -n 19 -p $$ >/dev/null
{ echo 19 >/proc/$$/autogroup; } 2>/dev/null || true

sources() { find src cli -name '*.c' | sort; }

# No build system, no options: what a user has who drops src/ into a tree of his own.
bare_build() {
	local work
	work=$(mktemp -d)
	mapfile -t files < <(find src -name '*.c')
	printf '#include <headrace.h>\nint main(void)\n{\n\treturn hr_version()[0] != 48;\n}\n' >"$work/main.c"
	cc -std=c11 -D_GNU_SOURCE -DHR_EXPERIMENTAL -O1 -Iinclude -Isrc "$work/main.c" "${files[@]}" -luring -lcrypto -ldl -lpthread -o "$work/main" &&
		"$work/main"
	local status=$?
	rm -rf "$work"
	return $status
}
check_tidy() {
	sources | xargs -r -P "$(nproc)" -n 1 clang-tidy --quiet -p build 2>/dev/null
}
check_cppcheck() {
	cppcheck -q --std=c11 --language=c -j "$(nproc)" --enable=warning,portability --inline-suppr --error-exitcode=1 \
		--suppress=missingIncludeSystem --suppress=unmatchedSuppression --suppress=legacyUninitvar \
		-D_GNU_SOURCE -D__linux__ -Iinclude -Isrc src cli
}
export -f bare_build check_tidy check_cppcheck sources

read_sources() {
	step "bare cc, without a build system" 600 bash -c bare_build || true
	case $(clang-format --version 2>/dev/null) in
	*version\ 14*) step "format" 600 tools/format.py --check || true ;;
	*) skip "format" "clang-format 14 is not here" ;;
	esac
	if has clang-tidy; then
		step "clang-tidy" 1200 bash -o pipefail -c check_tidy || true
	else
		skip "clang-tidy" "clang-tidy is not here"
	fi
	if has cppcheck; then
		step "cppcheck" 1200 bash -c check_cppcheck || true
	else
		skip "cppcheck" "cppcheck is not here"
	fi
}
prepare_vllm() { tests/vllm/run.sh --prepare >"$results/vllm-prepare.log" 2>&1 </dev/null; }
prepare_fuzz() { ! has clang || tools/fuzz 0 >"$results/fuzz-build.log" 2>&1 </dev/null; }

finish release compile build-check-release -Dbuildtype=release -Dwerror=true -Ddocs=false
finish asan compile build-check-asan -Db_sanitize=address,undefined -Db_lundef=false -Ddocs=false
finish tsan compile build-check-tsan -Db_sanitize=thread -Db_lundef=false -Ddocs=false
outcome build "$check" || true # clang-tidy reads how its files were compiled
finish vllm prepare_vllm
finish fuzz prepare_fuzz
finish sources read_sources
