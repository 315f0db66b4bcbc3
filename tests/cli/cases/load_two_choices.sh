# shellcheck shell=bash
headrace load two --caching "auto|fill"
