headrace ls names.safetensors
