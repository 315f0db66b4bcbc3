# shellcheck shell=bash
headrace check nowhere
