headrace cat one.safetensors
