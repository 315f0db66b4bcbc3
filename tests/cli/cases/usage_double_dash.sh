# shellcheck shell=bash
headrace ls -- --json
