# shellcheck shell=bash
headrace digest two > d.txt
headrace check two --digests d.txt
sha256sum -c d.txt
grep -v '^#' d.txt > shards.txt
headrace check two --digests=shards.txt
(cd two && sha256sum *.safetensors) > d.txt
headrace check two --digests d.txt
