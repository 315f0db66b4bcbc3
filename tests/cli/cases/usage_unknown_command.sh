# shellcheck shell=bash
headrace enginez two
