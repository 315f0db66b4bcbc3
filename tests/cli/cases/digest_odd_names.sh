headrace digest names.safetensors
