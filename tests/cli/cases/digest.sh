headrace digest one.safetensors
