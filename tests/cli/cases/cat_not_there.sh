headrace cat one.safetensors c
