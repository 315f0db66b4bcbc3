# shellcheck shell=bash
headrace ls two/model-00002-of-00002.safetensors two/model-00001-of-00002.safetensors --only "layer.*"
