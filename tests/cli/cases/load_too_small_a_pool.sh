# shellcheck shell=bash
headrace load two --device cpu --staging 64K
