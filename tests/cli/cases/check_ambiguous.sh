# shellcheck shell=bash
headrace check ambiguous
