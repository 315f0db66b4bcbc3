# shellcheck shell=bash
headrace check missing
