# shellcheck shell=bash
headrace cat one.safetensors c
