# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
#
# What tools/check and tools/ahead.sh share, beside tools/setup.sh: a result is a line of JSON as Meson writes them, in
# $results; what one does and the other waits for is known by a name.
#
#   record NAME RESULT SECONDS FILE    a line for a step; the file has its output or the reason of a skip
#   skip NAME REASON
#   step NAME SECONDS COMMAND...       a check that passes or fails as a whole
#   finish NAME COMMAND...             runs a command and leaves word how it ended
#   outcome NAME PID                   waits for that word, as long as PID lives; ends as the command did
#   compile DIR SETUP_ARGS...          configures and builds a folder; a failure is recorded
results=${cache:?}/check
steps=$results/steps.json

record() {
	python3 - "$@" >>"$steps" <<-'PYTHON'
		import json, os, sys
		name, result, seconds, path = sys.argv[1:]
		with open(path, errors="replace") as file:
		    line = json.dumps({"name": name, "result": result, "duration": float(seconds), "stdout": file.read()[-20000:]})
		os.write(1, (line + "\n").encode())  # in one piece: others append too
	PYTHON
}

skip() {
	local file
	file=$(mktemp "$results/skip.XXXXXX")
	printf '%s\n' "$2" >"$file"
	record "$1" SKIP 0 "$file"
	rm -f "$file"
}

step() {
	local name=$1 limit=$2 log=$results/${1//[^a-z0-9]/-}.log result=OK start=$SECONDS
	shift 2

	timeout -k 10 "$limit" "$@" >"$log" 2>&1 </dev/null || result=FAIL
	[ "$result" = OK ] || printf 'ended with an error, or after its %s s\n' "$limit" >>"$log"
	record "$name" "$result" $((SECONDS - start)) "$log"
	say "$name: $((SECONDS - start)) s"
	[ "$result" = OK ]
}

finish() {
	local name=$1 status=0
	shift

	"$@" || status=$?
	printf '%s\n' "$status" >"$results/$name.new"
	mv "$results/$name.new" "$results/$name.status"
}

outcome() {
	until [ -e "$results/$1.status" ]; do
		if ! kill -0 "$2" 2>/dev/null && [ ! -e "$results/$1.status" ]; then
			printf 'what should have done it has ended before\n' >"$results/$1.lost"
			record "$1" FAIL 0 "$results/$1.lost"
			return 1
		fi
		sleep 0.1
	done
	return "$(cat "$results/$1.status")"
}

compile() {
	local dir=$1 start=$SECONDS
	shift

	if ! setup_build "$dir" "$@"; then
		record "configure $dir" FAIL $((SECONDS - start)) "$cache/setup-$dir.log"
		return 1
	fi
	if ! ninja -C "$dir" >"$results/$dir-build.log" 2>&1 </dev/null; then
		record "build $dir" FAIL $((SECONDS - start)) "$results/$dir-build.log"
		return 1
	fi
	say "$dir: built, $((SECONDS - start)) s"
}

has() { command -v "$1" >/dev/null 2>&1; }
