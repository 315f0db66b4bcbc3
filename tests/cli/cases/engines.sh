# shellcheck shell=bash
headrace engines
