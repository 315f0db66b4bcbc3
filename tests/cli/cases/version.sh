headrace --version; headrace version; headrace -V
