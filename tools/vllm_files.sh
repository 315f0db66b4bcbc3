#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# vllm_files.sh VERSION DIR: the Python files of one version of vLLM, for tests/vllm/test_contract.py. Without its compiled parts they
# are 53 MiB; the wheel that they come from (340 MB from PyPI, some 10 s) is removed again. Says nothing when all is there already.
#
# With the packages of the environment of vllm_env.sh they can be imported; no engine can be made of them. Ends with status 3 and the
# reason when they cannot be had.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

version=$1
dir=$2
[ "$(cat "$dir/.complete" 2>/dev/null)" = "$version" ] && exit 0

wheels=$dir.wheel
rm -rf "$dir" "$wheels"
.cache/vllm-0.32/bin/python -m pip download -q --disable-pip-version-check --no-deps --no-cache-dir --only-binary :all: --retries 2 --timeout 30 \
	-d "$wheels" "vllm==$version" >"$dir.log" 2>&1 || {
	printf 'vllm_files.sh: vLLM %s could not be had from PyPI: see %s.log\n' "$version" "$dir"
	exit 3
}
python3 - "$wheels" "$dir" <<'PYTHON'
import os
import sys
import zipfile

wheels, folder = sys.argv[1:]
(name,) = os.listdir(wheels)
with zipfile.ZipFile(os.path.join(wheels, name)) as wheel:
    wheel.extractall(folder, [item.filename for item in wheel.infolist() if not item.filename.endswith(".so") and item.file_size < 5 << 20])
PYTHON
rm -rf "$wheels"
printf '%s' "$version" >"$dir/.complete"
