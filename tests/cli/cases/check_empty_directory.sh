# shellcheck shell=bash
headrace check nothing
