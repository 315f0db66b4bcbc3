# bash completion for headrace                                             -*- shell-script -*-
# SPDX-License-Identifier: Apache-2.0
# A test holds the lists below against "headrace help".

_headrace_options() {
	local loader='--device --staging --slot --engine --caching --cufile --readers'

	case $1 in
	ls) echo "--long --only --expect --ugds --json --help" ;;
	check) echo "--digests --expect --ugds --json --help" ;;
	load) echo "$loader --only --verify --expect --ugds --json --help" ;;
	cat) echo "--force --expect --ugds --help" ;;
	digest) echo "--shards --expect --ugds --json --help" ;;
	plan) echo "$loader --only --expect --ugds --json --help" ;;
	engines) echo "--ugds --json --help" ;;
	doctor) echo "--device --staging --cufile --trial --sample --seconds --json --help" ;;
	verify) echo "--against --window $loader --only --expect --ugds --json --help" ;;
	bench)
		echo "--synthetic --dir --keep --rounds --cold --warm --feed --open --partly --loop --budget --host-budget --passes --sweep --sweep-slots" \
			"$loader --only --json --help"
		;;
	store)
		echo "--size --name --as --force --plan --replace --unverified --digests --repair --rollback --salvage" \
			"--to --moved --json --help"
		;;
	help | version) echo "--help" ;;
	esac
}

_headrace_files() {
	local path

	compopt -o filenames 2>/dev/null
	COMPREPLY=()
	while IFS= read -r path; do
		if [[ -d $path || $path == *.safetensors || $path == *.safetensors.index.json ]]; then
			COMPREPLY+=("$path")
		fi
	done < <(compgen -f -- "$1")
}

_headrace() {
	local commands='ls check load cat digest plan engines verify doctor bench store help version'
	local word=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD - 1]} command=${COMP_WORDS[1]}

	if [ "$COMP_CWORD" -eq 1 ]; then
		mapfile -t COMPREPLY < <(compgen -W "$commands --help --version" -- "$word")
		return
	fi
	case $previous in
	--device) mapfile -t COMPREPLY < <(compgen -W 'cpu cuda cuda:0 cuda:1' -- "$word") && return ;;
	--engine) mapfile -t COMPREPLY < <(compgen -W 'auto pread uring mapped cufile ugds' -- "$word") && return ;;
	--caching) mapfile -t COMPREPLY < <(compgen -W 'auto fill bypass' -- "$word") && return ;;
	--cufile) mapfile -t COMPREPLY < <(compgen -W 'direct compat' -- "$word") && return ;;
	--staging) mapfile -t COMPREPLY < <(compgen -W '16MiB 32MiB 64MiB 128MiB' -- "$word") && return ;;
	--slot) mapfile -t COMPREPLY < <(compgen -W '512KiB 1MiB 2MiB 4MiB' -- "$word") && return ;;
	--synthetic) mapfile -t COMPREPLY < <(compgen -W 'llama: small: one:' -- "$word") && compopt -o nospace && return ;;
	--size) mapfile -t COMPREPLY < <(compgen -W '1GiB 40GiB 200GiB' -- "$word") && return ;;
	--ugds) compopt -o filenames && mapfile -t COMPREPLY < <(compgen -f -- "${word:-/dev/ugds_drv}") && return ;;
	--expect) compopt -o filenames && mapfile -t COMPREPLY < <(compgen -f -- "$word") && return ;;
	--digests) [ "$command" != store ] && compopt -o filenames && mapfile -t COMPREPLY < <(compgen -f -- "$word") && return ;;
	--against) compopt -o filenames && mapfile -t COMPREPLY < <(compgen -f -- "$word") && return ;;
	--window) mapfile -t COMPREPLY < <(compgen -W '16MiB 128MiB 1GiB' -- "$word") && return ;;
	--dir | --to) compopt -o filenames && mapfile -t COMPREPLY < <(compgen -d -- "$word") && return ;;
	--sample) mapfile -t COMPREPLY < <(compgen -W '256MiB 2GiB 8GiB' -- "$word") && return ;;
	--readers | --rounds | --only | --seconds | --as | --name) return ;;
	esac
	if [[ $word == -* ]]; then
		mapfile -t COMPREPLY < <(compgen -W "$(_headrace_options "$command")" -- "$word")
	elif [ "$command" = store ] && [ "$COMP_CWORD" -eq 2 ]; then
		mapfile -t COMPREPLY < <(compgen -W 'init import ls check rm reclaim export get' -- "$word")
	elif [ "$command" = store ]; then
		compopt -o filenames 2>/dev/null
		mapfile -t COMPREPLY < <(compgen -f -- "$word")
	elif [ "$command" = help ]; then
		mapfile -t COMPREPLY < <(compgen -W "$commands" -- "$word")
	else
		_headrace_files "$word"
	fi
}

complete -F _headrace headrace
