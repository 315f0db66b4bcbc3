# shellcheck shell=bash
headrace digest one.safetensors
