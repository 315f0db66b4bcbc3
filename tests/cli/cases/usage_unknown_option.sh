# shellcheck shell=bash
headrace load two --verfy
