# shellcheck shell=bash
headrace help lsx
