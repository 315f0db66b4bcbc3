# shellcheck shell=bash
headrace load two --verify=yes
