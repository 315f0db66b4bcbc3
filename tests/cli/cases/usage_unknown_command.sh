headrace lod two
