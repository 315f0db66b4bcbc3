# shellcheck shell=bash
headrace ls two/model.safetensors.index.json --only "?mbed.[v-x]*"
