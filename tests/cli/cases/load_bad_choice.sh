headrace load two --caching sometimes
