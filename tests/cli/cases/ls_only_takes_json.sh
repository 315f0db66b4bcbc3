# shellcheck shell=bash
headrace ls two --only --json
