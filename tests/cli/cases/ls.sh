# shellcheck shell=bash
headrace ls two
