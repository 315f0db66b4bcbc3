# shellcheck shell=bash
headrace one.safetensors
