# shellcheck shell=bash
headrace load two --device cuda:7 --staging 1M
