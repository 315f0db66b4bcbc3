headrace ls
