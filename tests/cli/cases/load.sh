headrace load two --device cpu --verify
