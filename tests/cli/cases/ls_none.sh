headrace ls none.safetensors
