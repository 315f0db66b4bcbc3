# shellcheck shell=bash
echo '# nothing' > d.txt
headrace check one.safetensors --digests d.txt
