# shellcheck shell=bash
headrace load two --device cpu --verify
