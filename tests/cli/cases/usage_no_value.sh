# shellcheck shell=bash
headrace load two --staging
