headrace help load ls
