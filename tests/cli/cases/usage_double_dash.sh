headrace ls -- --json
