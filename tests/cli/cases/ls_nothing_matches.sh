# shellcheck shell=bash
headrace ls two --only nope; exit $?
