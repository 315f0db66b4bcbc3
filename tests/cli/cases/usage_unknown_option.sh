headrace load two --verfy
