headrace check nothing
