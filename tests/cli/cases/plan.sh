headrace plan two --device cpu --engine pread --caching bypass
