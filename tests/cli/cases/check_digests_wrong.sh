# shellcheck shell=bash
headrace digest one.safetensors | sed 's/  w$/  v/; s/one.safetensors/uno.safetensors/' > d.txt
echo 'not a line' >> d.txt
headrace check one.safetensors --digests d.txt
