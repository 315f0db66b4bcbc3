headrace engines
