headrace ls two --only nope; exit $?
