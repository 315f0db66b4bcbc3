headrace load two --staging
