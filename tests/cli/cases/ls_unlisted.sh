headrace ls --long unlisted
