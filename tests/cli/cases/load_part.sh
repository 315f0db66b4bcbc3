# shellcheck shell=bash
headrace load two --device cpu --only "layer.*" --verify
