# shellcheck shell=bash
headrace digest two --shards
