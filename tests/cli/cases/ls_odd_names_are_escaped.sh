# shellcheck shell=bash
headrace ls names.safetensors
