# shellcheck shell=bash
headrace ls --long unlisted
