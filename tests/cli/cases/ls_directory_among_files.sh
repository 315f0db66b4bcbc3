headrace ls two one.safetensors
