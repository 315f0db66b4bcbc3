headrace check ambiguous
