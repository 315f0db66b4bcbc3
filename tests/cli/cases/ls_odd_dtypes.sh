headrace ls --long odd.safetensors
