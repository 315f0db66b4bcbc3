#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""link.py SOURCE PACKAGE EXTENSION STAMP: makes PACKAGE a folder of links to what is in SOURCE, and to the built extension."""
import os
import sys

source, package, extension, stamp = map(os.path.abspath, sys.argv[1:])
wanted = {name: os.path.join(source, name) for name in os.listdir(source) if name != "__pycache__"}
wanted[os.path.basename(extension)] = extension
os.makedirs(package, exist_ok=True)
for name in os.listdir(package):
    path = os.path.join(package, name)
    if os.path.islink(path) and os.readlink(path) != wanted.get(name):
        os.unlink(path)
for name, target in wanted.items():
    if not os.path.lexists(os.path.join(package, name)):
        os.symlink(target, os.path.join(package, name))
with open(stamp, "w", encoding="utf-8"):
    pass
