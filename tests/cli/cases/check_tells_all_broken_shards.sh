# shellcheck shell=bash
headrace check broken
