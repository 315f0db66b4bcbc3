# shellcheck shell=bash
for name in short long json dtype tiny; do
	headrace check $name.safetensors
	echo "$name: status $?"
done
