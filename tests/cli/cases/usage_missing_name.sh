# shellcheck shell=bash
headrace ls
