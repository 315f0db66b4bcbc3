# shellcheck shell=bash
headrace load two --caching sometimes
