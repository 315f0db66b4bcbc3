# shellcheck shell=bash
headrace ls two $'--\e[2J'
