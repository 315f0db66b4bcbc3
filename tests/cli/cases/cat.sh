# shellcheck shell=bash
headrace cat one.safetensors b | od -An -tx1
