headrace ls one.safetensors --json
