# shellcheck shell=bash
headrace --version; headrace version; headrace -V
