# shellcheck shell=bash
headrace help load ls
