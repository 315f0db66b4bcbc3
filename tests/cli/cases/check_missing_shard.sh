headrace check missing
