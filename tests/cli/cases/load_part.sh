headrace load two --device cpu --only "layer.*" --verify
