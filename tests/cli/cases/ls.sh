headrace ls two
