headrace digest two --shards
