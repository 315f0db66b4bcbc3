# shellcheck shell=bash
headrace cat names.safetensors -- -dash | od -An -tx1
