headrace help lod
