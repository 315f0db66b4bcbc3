headrace check broken
