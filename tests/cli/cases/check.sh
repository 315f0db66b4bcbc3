# shellcheck shell=bash
headrace check two
headrace check one.safetensors
headrace check two/model.safetensors.index.json
headrace check none.safetensors
