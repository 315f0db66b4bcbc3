headrace cat one.safetensors b | od -An -tx1
