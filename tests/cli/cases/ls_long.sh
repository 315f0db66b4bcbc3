headrace ls -l one.safetensors
