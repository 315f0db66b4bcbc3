headrace load two --verify=yes
