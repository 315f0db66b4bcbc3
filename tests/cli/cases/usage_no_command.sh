# shellcheck shell=bash
headrace
