headrace one.safetensors
