# shellcheck shell=bash
headrace ls none.safetensors
