# shellcheck shell=bash
headrace ls -l one.safetensors
