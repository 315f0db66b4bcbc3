# shellcheck shell=bash
headrace ls two one.safetensors
