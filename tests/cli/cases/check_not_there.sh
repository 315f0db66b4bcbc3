headrace check nowhere
