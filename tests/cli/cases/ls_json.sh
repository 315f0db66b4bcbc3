# shellcheck shell=bash
headrace ls one.safetensors --json
