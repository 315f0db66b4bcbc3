# shellcheck shell=bash
headrace plan two --device cpu --engine pread --caching bypass
