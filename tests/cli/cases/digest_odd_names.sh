# shellcheck shell=bash
headrace digest names.safetensors
