# shellcheck shell=bash
headrace ls --long odd.safetensors
