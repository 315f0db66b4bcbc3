#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the corpus of safetensors files: one small file for each oddity that must load and each fault that must be refused.

    make_corpus.py FOLDER [--big]

FOLDER gets the files and expected.json, a list of rows:
    id        "V01" (must load), "I31b" (must be refused); a letter tells the files of one row apart
    file      its name in FOLDER
    code      "HR_OK" or the error's name
    official  whether the official parser (safetensors 0.8.0) accepts it; for HR_OK always true
    tensors   with HR_OK: [name, dtype, shape, begin, end] sorted by (begin, end)
    metadata  with HR_OK: [key, value] in header order
    hint      words that the message must have
    big       made by --big only: a hundred megabytes or more
Rows that need a folder (index files, links) are elsewhere: this is about single files.
"""
import json
import os
import struct
import sys

CAP = 100_000_000
T = '{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'


def frame(header, data=b"", n=None):
    if isinstance(header, str):
        header = header.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(header) if n is None else n) + header + data


def entry(dtype, shape, begin, end):
    return '{"dtype":"%s","shape":%s,"data_offsets":[%d,%d]}' % (dtype, json.dumps(shape, separators=(",", ":")), begin, end)


def one(body, size=8, name="t"):
    """A file with one tensor whose entry is `body`."""
    return frame('{"%s":%s}' % (name, body), bytes(i % 251 for i in range(size)))


def shaped(shape, size=8, dtype="F32"):
    return one('{"dtype":"%s","shape":%s,"data_offsets":[0,%d]}' % (dtype, shape, size), size)


def ranged(offsets, size=8):
    return one('{"dtype":"F32","shape":[2],"data_offsets":%s}' % offsets, size)


def data(n):
    return bytes((i * 7 + 3) % 256 for i in range(n))


class Corpus:
    def __init__(self, folder):
        self.folder = folder
        self.rows = []
        self.letters = {}

    def _put(self, row, content):
        number = self.letters.get(row["id"], 0)
        self.letters[row["id"]] = number + 1
        row["id"] += chr(ord("a") + number) if number else ""
        row["file"] = row["id"] + ".safetensors"
        self.rows.append(row)
        with open(os.path.join(self.folder, row["file"]), "wb") as out:
            for piece in [content] if isinstance(content, bytes) else content:
                out.write(piece)

    def ok(self, row, content, tensors, metadata=(), **more):
        self._put(dict(id=row, code="HR_OK", official=True, tensors=[list(t) for t in tensors],
                       metadata=[list(p) for p in metadata], **more), content)

    def bad(self, row, content, code, official=False, **more):
        self._put(dict(id=row, code="HR_E_" + code, official=official, **more), content)

    def good_t(self, row, header, metadata=(), name="t", size=8):
        self.ok(row, frame(header, data(size)), [[name, "F32", [2], 0, 8]], metadata)


def valid_rows(c):
    plain = '{"t":%s}' % T
    c.good_t("V01", plain)
    c.ok("V02", frame("{}"), [])
    c.ok("V03", frame('{"__metadata__":{"format":"pt"}}'), [], [["format", "pt"]])
    c.good_t("V04", '{"__metadata__":null,"t":%s}' % T)
    c.good_t("V05", '{"__metadata__":{},"t":%s}' % T)
    c.good_t("V06", '{"t":%s,"__metadata__":{"a":"b"}}' % T, [["a", "b"]])
    c.good_t("V06", '{"\\u005f_metadata__":{"a":"b"},"t":%s}' % T, [["a", "b"]])
    c.good_t("V07", '{"__metadata__":{"a\\u0000":"\\u0000b"},"t":%s}' % T, [["a\0", "\0b"]])
    c.good_t("V08", '{"__metadata__":{"long":"%s"},"t":%s}' % ("x" * 200_000, T), [["long", "x" * 200_000]])
    c.good_t("V09", '{"__metadata__":{"__metadata__":"in"},"t":%s}' % T, [["__metadata__", "in"]])
    c.ok("V10", frame('{"s":%s}' % entry("I32", [], 0, 4), data(4)), [["s", "I32", [], 0, 4]])
    c.ok("V11", frame('{"z":%s}' % entry("F32", [2, 0], 0, 0)), [["z", "F32", [2, 0], 0, 0]])
    c.ok("V11", frame('{"z":%s}' % entry("F32", [0, 0], 0, 0)), [["z", "F32", [0, 0], 0, 0]])
    c.ok("V11", frame('{"z":%s}' % entry("U8", [0, 2**64 - 1, 2], 0, 0)), [["z", "U8", [0, 2**64 - 1, 2], 0, 0]])
    c.ok("V12", frame('{"z":%s,"t":%s}' % (entry("F32", [0], 0, 0), T), data(8)),
         [["z", "F32", [0], 0, 0], ["t", "F32", [2], 0, 8]])
    c.ok("V13", frame('{"t":%s,"z":%s}' % (T, entry("F32", [0], 8, 8)), data(8)),
         [["t", "F32", [2], 0, 8], ["z", "F32", [0], 8, 8]])
    c.ok("V14", frame('{"t":%s,"y":%s,"z":%s}' % (T, entry("F32", [0], 0, 0), entry("I8", [0, 3], 0, 0)), data(8)),
         [["y", "F32", [0], 0, 0], ["z", "I8", [0, 3], 0, 0], ["t", "F32", [2], 0, 8]])
    names = ["t%02d" % i for i in range(20)]
    c.ok("V16", frame("{" + ",".join('"%s":%s' % (n, entry("U8", [3], 3 * i, 3 * i + 3))
                                     for i, n in reversed(list(enumerate(names)))) + "}", data(60)),
         [[n, "U8", [3], 3 * i, 3 * i + 3] for i, n in enumerate(names)])
    c.good_t("V17", '{"t":{"data_offsets":[0,8],"shape":[2],"dtype":"F32"}}')
    c.good_t("V17", '{"t":{"shape":[2],"dtype":"F32","data_offsets":[0,8]}}')
    c.good_t("V18", plain + " " * 7)
    c.good_t("V19", plain + "\r\n\t ")
    c.good_t("V20", " \n\t\r" + plain)
    c.good_t("V22", ' { "__metadata__" : { "a" : "b" , "c" : "d" } ,\n"t" :\t{ "dtype" : "F32" , "shape" : [ 2 ] , '
             '"data_offsets" : [ 0 , 8 ] } } ', [["a", "b"], ["c", "d"]])
    c.good_t("V23", plain + " " * (1 - len(plain) % 2))
    c.ok("V24", frame('{"a":%s,"t":%s}' % (entry("U8", [1], 0, 1), entry("F32", [2], 1, 9)), data(9)),
         [["a", "U8", [1], 0, 1], ["t", "F32", [2], 1, 9]])
    deep = "[" * 16 + "1" + "]" * 16
    c.good_t("V26", '{"t":{"x":%s,"y":{"a":[1,-2.5e3,true,false,null,"s"]},"dtype":"F32","shape":[2],"z":{},"data_offsets":[0,8]}}'
             % deep)
    c.good_t("V26", '{"t":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"n":[0,-0,1e200,-1.5E-200,0.0,%s]}}' % ("1" * 32))
    c.good_t("V27", '{"t":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"__metadata__":{"k":"v"}}}')
    c.good_t("V28", '{"\\"\\\\\\/\\b\\f\\n\\r\\t":%s}' % T, name='"\\/\b\f\n\r\t')
    c.good_t("V29", '{"a\\u0000b":%s}' % T, name="a\0b")
    c.good_t("V30", '{"":%s}' % T, name="")
    c.good_t("V31", '{"重み😀":%s}' % T, name="重み😀")
    c.good_t("V31", '{"\\u91cd\\u307f\\uD83D\\uDE00":%s}' % T, name="重み😀")
    c.good_t("V32", '{"\uffff\u202e\x7f":%s}' % T, name="\uffff\u202e\x7f")
    c.good_t("V34", '{"%s":%s}' % ("n" * 65536, T), name="n" * 65536)
    c.good_t("V34", '{"%s":%s}' % ("\\u006e" * 65536, T), name="n" * 65536)
    c.good_t("V35", '{"../../etc/passwd":%s}' % T, name="../../etc/passwd")
    c.good_t("V36", '{"__metadata":%s}' % T, name="__metadata")
    c.good_t("V37", '{"t":{"d\\u0074ype":"F\\u00332","sh\\u0061pe":[2],"data\\u005Foffsets":[0,8]}}')
    c.ok("V38", frame('{"f":%s}' % entry("F4", [2, 2], 0, 2), data(2)), [["f", "F4", [2, 2], 0, 2]])
    c.ok("V39", frame('{"f":%s}' % entry("F4", [2, 3], 0, 3), data(3)), [["f", "F4", [2, 3], 0, 3]])
    c.ok("V40", frame('{"a":%s,"b":%s}' % (entry("F6_E2M3", [4], 0, 3), entry("F6_E3M2", [8], 3, 9)), data(9)),
         [["a", "F6_E2M3", [4], 0, 3], ["b", "F6_E3M2", [8], 3, 9]])
    for row, bits in (("V41", 8), ("V42", 16), ("V42", 32), ("V42", 64)):
        dtypes = [d for d, b in DTYPES if b == bits]
        size = bits // 8
        tensors = [[d.lower(), d, [2], 2 * size * i, 2 * size * (i + 1)] for i, d in enumerate(dtypes)]
        c.ok(row, frame("{" + ",".join('"%s":%s' % (t[0], entry(*t[1:])) for t in tensors) + "}", data(2 * size * len(dtypes))),
             tensors)
    c.ok("V43", frame('{"r":%s}' % entry("U8", [1] * 64, 0, 1), data(1)), [["r", "U8", [1] * 64, 0, 1]])
    c.ok("V44", frame('{"b":%s,"t":%s}' % (entry("BOOL", [1], 0, 1), entry("F32", [2], 1, 9)),
                      b"\2" + struct.pack("<ff", float("nan"), float("inf"))),
         [["b", "BOOL", [1], 0, 1], ["t", "F32", [2], 1, 9]])
    c.good_t("V45", '{"t":{"dtype":"F32","shape":[2],"data_offsets":[0,8]\n}\n}\n')


DTYPES = [("BOOL", 8), ("U8", 8), ("I8", 8), ("U16", 16), ("I16", 16), ("U32", 32), ("I32", 32), ("U64", 64), ("I64", 64),
          ("F16", 16), ("BF16", 16), ("F32", 32), ("F64", 64), ("C64", 64), ("F8_E5M2", 8), ("F8_E4M3", 8), ("F8_E8M0", 8),
          ("F8_E4M3FNUZ", 8), ("F8_E5M2FNUZ", 8), ("F6_E2M3", 6), ("F6_E3M2", 6), ("F4", 4)]


def frame_rows(c):
    plain = '{"t":%s}' % T
    good = frame(plain, data(8))
    size = len(plain)
    c.bad("I01", b"", "SMALL")
    c.bad("I02", b"\x02\0\0\0\0\0\0", "SMALL")
    c.bad("I03", bytes(8), "JSON")
    c.bad("I03", bytes(4096), "JSON")
    for n in (2**64 - 1, 2**64 - 8, 2**63):
        c.bad("I04", frame(plain, data(8), n), "HEADER_LARGE")
    c.bad("I05", frame(plain, data(8), CAP + 1), "HEADER_LARGE")
    c.bad("I06", frame(b"{}", n=CAP), "HEADER_LENGTH")
    c.bad("I07", frame(plain, n=len(plain) + 1), "HEADER_LENGTH")
    c.bad("I08", good[:40], "HEADER_LENGTH", hint="truncated")
    c.bad("I09", frame(plain, data(8), size - 1), "JSON")
    c.bad("I09", frame(plain, b" " * 8, size + 1)[:-1] + b"\1", "COVER")  # a space of data goes to the header
    c.bad("I09", frame(plain, data(8), size + 1), "JSON")
    c.bad("I10", struct.pack(">Q", size) + plain.encode() + data(8), "HEADER_LARGE", hint="big-endian")
    c.bad("I10", struct.pack("<I", size) + plain.encode() + data(8), "HEADER_LARGE")
    c.bad("I11", b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 4976698672\n" % (b"0" * 64),
          "HEADER_LARGE", hint="git-lfs")
    c.bad("I12", b"<!DOCTYPE html><html><body>Access denied</body></html>", "HEADER_LARGE", hint="HTML")
    c.bad("I12", plain.encode() + data(8), "HEADER_LARGE", hint="JSON")
    c.bad("I12", b"\n  <html></html>", "HEADER_LARGE", hint="HTML")
    c.bad("I13", b"PK\3\4" + bytes(60), "HEADER_LENGTH", hint="zip")
    c.bad("I13", b"GGUF\3\0\0\0" + bytes(60), "HEADER_LARGE", hint="GGUF")
    c.bad("I13", b"\x80\2}q\0X\1\0\0\0a" + bytes(50), "HEADER_LARGE", hint="pickle")
    c.bad("I13", b"\x28\xb5\x2f\xfd\x04\x58\x29\x00" + bytes(50), "HEADER_LARGE", hint="zstd")
    c.bad("I14", frame(b"\xef\xbb\xbf" + plain.encode(), data(8)), "JSON", hint="byte order mark")
    c.bad("I15", frame(plain.encode("utf-16"), data(8)), "UTF8")
    c.bad("I15", frame(plain.encode("utf-16-le"), data(8)), "JSON", hint="NUL")


def text_rows(c):
    for row, bytes_ in (("I16", b"\xff"), ("I17", b"\xc0\xaf"), ("I18", b"\xed\xa0\x80"), ("I19", b"\xf4\x90\x80\x80"),
                        ("I20", b"\xe2\x82"), ("I20", b"\x80"), ("I20", b"\xf0\x8f\xbf\xbf")):
        c.bad(row, frame(b'{"a' + bytes_ + b'":' + T.encode() + b"}", data(8)), "UTF8")
        c.bad(row, frame(b'{"__metadata__":{"a":"' + bytes_ + b'"},"t":' + T.encode() + b"}", data(8)), "UTF8")
    for name in ("\\ud800", "\\udc00", "\\ude00\\ud83d", "\\ud83d\\ud83d", "\\ud83dx", "\\ud83d\\n"):
        c.bad("I21", frame('{"%s":%s}' % (name, T), data(8)), "JSON", hint="surrogate")
    for name in ("\\x41", "\\u12", "\\u12G4", "\\", "\\U0041", "\\'", "\\0"):
        c.bad("I22", frame('{"%s":%s}' % (name, T), data(8)), "JSON")
    for name in ("a\nb", "a\0b", "\x1f"):
        c.bad("I23", frame('{"%s":%s}' % (name, T), data(8)), "JSON", hint="control")
    c.bad("I24", frame('{"t":%s}\0\0\0' % T, data(8)), "JSON", hint="NUL")
    c.bad("I24", frame('\0{"t":%s}' % T, data(8)), "JSON", hint="NUL")
    for header in ('{"t":%s,}' % T, '{"t":%s,,"u":%s}' % (T, T), '{,"t":%s}' % T,
                   '{"t":{"dtype":"F32","shape":[2,],"data_offsets":[0,8]}}',
                   '{"t":{"dtype":"F32","shape":[,2],"data_offsets":[0,8]}}',
                   '{"t":{"dtype":"F32","shape":[2],"data_offsets":[0,8],}}'):
        c.bad("I25", frame(header, data(8)), "JSON")
    for header in ('{/*x*/"t":%s}' % T, "{'t':%s}" % T, "{t:%s}" % T, '{"t":%s}//x' % T, '{"t":%s}#x' % T):
        c.bad("I26", frame(header, data(8)), "JSON")
    for header in ("{}{}", '{},"__metadata__":{"a":"b"}', '{"t":%s}\x7f' % T, '{"t":%s}]' % T, '{"t":%s},' % T):
        c.bad("I27", frame(header, data(8)), "JSON")
    for header in ('{"t":%s' % T, '{"t', '{"t":{"dtype":"F32","shape":[2', '{"t"%s}' % T, "{", '{"t":', '{"t":{"dtype":"F32',
                   '{"t":{"dtype":"F32"', '{"t":{"dtype":"F32",', '{"t":{"dtype"', '{"__metadata__":{"a":"b"', '{"t";%s}' % T):
        c.bad("I28", frame(header, data(8)), "JSON")
    for space in ("\v", "\u00a0", "\f", "\u2028", "\u3000"):
        c.bad("I29", frame('{%s"t":%s}' % (space, T), data(8)), "JSON")
    for header in ("[]", "null", '"t"', "1", "true", "[%s]" % T, "-1.5e3"):
        c.bad("I30", frame(header, data(8)), "TYPE")
    for header in ("nul", "truex", "-", "01", "1.", "1e", "NaN", "+1"):
        c.bad("I30", frame(header, data(8)), "TYPE" if header == "truex" else "JSON")


def schema_rows(c):
    for value in ("null", '"F32"', "3", "false"):
        c.bad("I31", frame('{"t":%s}' % value, data(8)), "TYPE")
    c.bad("I31", frame('{"t":{}}', data(8)), "FIELD")
    for body, missing in (('{"shape":[2],"data_offsets":[0,8]}', "dtype"), ('{"dtype":"F32","data_offsets":[0,8]}', "shape"),
                          ('{"dtype":"F32","shape":[2]}', "data_offsets")):
        c.bad("I32", one(body), "FIELD", hint=missing + " is missing")
    for body in ('{"dtype":"F32","Shape":[2],"data_offsets":[0,8]}', '{"DTYPE":"F32","shape":[2],"data_offsets":[0,8]}',
                 '{"dtype":"F32","shape":[2],"offsets":[0,8]}'):
        c.bad("I33", one(body), "FIELD")
    c.bad("I34", frame('{"layer":{"w":%s}}' % T, data(8)), "FIELD")
    for dtype in ("F128", "f32", "F32 ", "", "U3", "F", "F8_E4M3FNUZX", "x" * 100, "F\\u0000"):
        c.bad("I35", one('{"dtype":"%s","shape":[2],"data_offsets":[0,8]}' % dtype), "DTYPE")
    for dtype in ("null", "32", "[]", "true"):
        c.bad("I36", one('{"dtype":%s,"shape":[2],"data_offsets":[0,8]}' % dtype), "TYPE")
    c.bad("I37", one('{"dtype":{"F32":null},"shape":[2],"data_offsets":[0,8]}'), "TYPE", official=True)
    c.bad("I37", one('["F32",[2],[0,8]]'), "TYPE", official=True)
    for shape in ("[2.0]", "[2e0]", "[20e-1]", "[2E+0]"):
        c.bad("I38", shaped(shape), "TYPE", hint="not an integer")
    for shape in ("[-2]", "[-2,-4]", "[-0]"):
        c.bad("I39", shaped(shape), "TYPE", hint="negative")
    for shape in ('["2"]', "[true]", "[null]", "[[2]]", "[{}]"):
        c.bad("I40", shaped(shape), "TYPE")
    for shape in ("null", "2", '{"0":2}', '"2"'):
        c.bad("I41", shaped(shape), "TYPE")
    for shape in ("[02]", "[+2]", "[0x2]", "[2 0]", "[2;]", "[.5]", "[-]", "[2,]", "[00]", "[2.]"):
        c.bad("I42", shaped(shape), "JSON")
    for shape in ("[NaN]", "[Infinity]", "[-Infinity]", "[nan]"):
        c.bad("I43", shaped(shape), "JSON")
    for number in (str(2**64), "9" * 20, "9" * 40, "1" + "0" * 30):
        c.bad("I44", shaped("[%s]" % number), "TYPE", hint="out of range")
    for offsets in ("[0.0,8.0]", "[0,8e0]", "[0e0,8]"):
        c.bad("I53", ranged(offsets), "TYPE", hint="not an integer")
    c.bad("I54", ranged("[-8,0]"), "TYPE", hint="negative")
    for offsets in ("[]", "[0]", "[0,8,8]"):
        c.bad("I55", ranged(offsets), "TYPE", hint="two integers")
    for offsets in ('{"0":0,"1":8}', '["0","8"]', "null", "[false,true]", "8", "[null,null]"):
        c.bad("I56", ranged(offsets), "TYPE")
    c.bad("I57", ranged("[%d,%d]" % (2**64, 2**64)), "TYPE", hint="out of range")
    for value in ("1", "true", "null", "{}", "[]", "1.5"):
        c.bad("I76", frame('{"__metadata__":{"a":%s},"t":%s}' % (value, T), data(8)), "TYPE")
    for value in ('"pt"', "[]", "1", "false"):
        c.bad("I77", frame('{"__metadata__":%s,"t":%s}' % (value, T), data(8)), "TYPE")
    c.bad("I78", frame('{"__metadata__":%s}' % T, data(8)), "TYPE")
    for first, second in (('{"a":"b"}', '{"a":"b"}'), ("null", '{"a":"b"}'), ("{}", "null")):
        c.bad("I79", frame('{"__metadata__":%s,"t":%s,"__metadata__":%s}' % (first, T, second), data(8)), "DUPLICATE")
    c.bad("I79", frame('{"__metadata__":{},"\\u005f_metadata__":{},"t":%s}' % T, data(8)), "DUPLICATE")
    c.bad("I80", frame('{"t":%s,"t":%s}' % (T, T), data(8)), "DUPLICATE", official=True, hint="twice")
    c.bad("I80", frame('{"tt":%s,"t\\u0074":%s}' % (T, T), data(8)), "DUPLICATE", official=True)
    c.bad("I81", frame('{"t":%s,"t":%s}' % (T, entry("F32", [1], 0, 4)), data(4)), "DUPLICATE", official=True)
    c.bad("I81", frame('{"t":%s,"t":%s}' % (entry("F32", [7], 0, 8), T), data(8)), "DUPLICATE", official=True)
    c.bad("I83", frame('{"__metadata__":{"a":"b","a":"c"},"t":%s}' % T, data(8)), "DUPLICATE", official=True)
    c.bad("I83", frame('{"__metadata__":{"a":"b","\\u0061":"b"},"t":%s}' % T, data(8)), "DUPLICATE", official=True)
    for field in ('"dtype":"F32"', '"data_offsets":[0,8]', '"shape":[2]', '"d\\u0074ype":"F32"'):
        c.bad("I84", one('{"dtype":"F32","shape":[2],"data_offsets":[0,8],%s}' % field), "DUPLICATE")
    c.bad("I84", one('{"x":1,"dtype":"F32","shape":[2],"data_offsets":[0,8],"\\u0078":1}'), "DUPLICATE", official=True)


def limit_rows(c):
    c.bad("I85", shaped("[%s]" % ",".join(["1"] * 65), 1, "U8"), "LIMIT", official=True)
    c.bad("I85", shaped("[%s]" % ",".join(["1"] * 100_000), 1, "U8"), "LIMIT", official=True)
    c.bad("I86", frame('{"%s":%s}' % ("n" * 65_537, T), data(8)), "LIMIT", official=True)
    c.bad("I86", frame('{"%s":%s}' % ("n" * 1_000_000, T), data(8)), "LIMIT", official=True)
    c.bad("I87", frame("[" * 1_000_000), "TYPE")
    c.bad("I87", shaped("[" * 5_000 + "2" + "]" * 5_000), "TYPE")
    c.bad("I87", one('{"x":%s,"dtype":"F32","shape":[2],"data_offsets":[0,8]}' % ("[" * 1_000_000)), "LIMIT")
    c.bad("I88", one('{"x":%s1%s,"dtype":"F32","shape":[2],"data_offsets":[0,8]}' % ("[" * 17, "]" * 17)), "LIMIT", official=True)
    c.bad("I88", one('{"x":%s1%s,"dtype":"F32","shape":[2],"data_offsets":[0,8]}' % ('{"a":' * 17, "}" * 17)), "LIMIT",
          official=True)
    for value, code, official in (("1e999", "LIMIT", False), ("1e201", "LIMIT", True), ("1" * 33, "LIMIT", True),
                                  ("0." + "0" * 40, "LIMIT", True), ("tru", "JSON", False), ('"\\ud800"', "JSON", False),
                                  ('"\\q"', "JSON", False), ("01", "JSON", False), ("[1,]", "JSON", False),
                                  ('{"a"}', "JSON", False), ("[1}", "JSON", False), ('{"a":1]', "JSON", False)):
        c.bad("I89", one('{"x":%s,"dtype":"F32","shape":[2],"data_offsets":[0,8]}' % value), code, official=official)
    c.bad("I89", frame(b'{"t":{"x":"\xff","dtype":"F32","shape":[2],"data_offsets":[0,8]}}', data(8)), "UTF8")
    many = ",".join('"x%d":0' % i for i in range(17))
    c.bad("I82", one('{%s,"dtype":"F32","shape":[2],"data_offsets":[0,8]}' % many), "LIMIT", official=True)
    c.bad("I82", one('{"%s":0,"dtype":"F32","shape":[2],"data_offsets":[0,8]}' % ("x" * 257)), "LIMIT", official=True)


def range_rows(c):
    c.bad("I46", shaped("[2,%d]" % (2**64 - 2), 8, "I32"), "OVERFLOW")
    c.bad("I47", shaped("[2,%d]" % (2**63 - 1), 8, "I32"), "OVERFLOW")
    c.bad("I48", shaped("[%d,%d]" % (2**32, 2**32), 0, "U8"), "OVERFLOW")
    c.bad("I50", shaped("[%d,2,0]" % (2**64 - 1), 0, "U8"), "OVERFLOW")
    c.bad("I51", shaped("[%d]" % 2**61, 8, "U8"), "OVERFLOW")
    c.bad("I58", ranged("[8,0]"), "OFFSET")
    c.bad("I58", frame('{"a":%s,"b":%s}' % (entry("U8", [4], 0, 4), entry("U8", [0], 4, 2)), data(4)), "OFFSET")
    c.bad("I59", frame('{"t":%s}' % entry("F32", [2], 8, 16), data(16)), "OFFSET", hint="begin at 0")

    def pair(a, b, size):
        return frame('{"a":%s,"b":%s}' % (a, b), data(size))

    c.bad("I60", pair(T, entry("F32", [2], 16, 24), 24), "OFFSET", hint="hole of 8 bytes")
    c.bad("I61", pair(T, T, 8), "OFFSET", hint="overlap of 8 bytes")
    c.bad("I62", pair(T, entry("F32", [2], 4, 12), 12), "OFFSET", hint="overlap of 4 bytes")
    c.bad("I62", pair(entry("F32", [4], 0, 16), entry("F32", [1], 4, 8), 16), "OFFSET")
    c.bad("I63", pair(T, entry("F32", [0], 4, 4), 8), "OFFSET")
    c.bad("I66", ranged("[0,4]", 4), "SIZE")
    c.bad("I67", ranged("[0,12]", 12), "SIZE")
    c.bad("I68", shaped("[0]", 8), "SIZE")
    c.bad("I68", shaped("[4]", 0), "SIZE")
    for shape in ("[1]", "[]", "[1,3]"):
        c.bad("I69", shaped(shape, 1, "F4"), "SUBBYTE")
    c.bad("I70", shaped("[2]", 2, "F6_E2M3"), "SUBBYTE")
    c.bad("I70", shaped("[3]", 2, "F6_E3M2"), "SUBBYTE")
    c.bad("I71", shaped("[2]", 2, "F4"), "SIZE")
    good = frame('{"t":%s}' % T, data(8))
    c.bad("I72", good[:-1], "COVER", hint="short by 1;")
    c.bad("I72", good[:-8], "COVER", hint="short by 8;")
    c.bad("I73", good + b"x", "COVER", hint="1 bytes belong to no tensor")
    c.bad("I73", good + b"PK\5\6" + bytes(18), "COVER", hint="22 bytes belong to no tensor")
    c.bad("I73", frame("{}", b"x"), "COVER")
    c.bad("I74", frame('{"a":%s,"b":%s}' % (T, entry("F32", [2], 8, 16)), data(12)), "COVER")
    c.bad("I75", frame('{"t":%s}' % entry("U8", [2**42], 0, 2**42), data(8)), "COVER")
    huge = 2**61 - 1
    eight = ",".join('"t%d":%s' % (i, entry("U8", [huge], i * huge, (i + 1) * huge)) for i in range(8))
    c.bad("I75", frame("{%s}" % eight, data(8)), "COVER")


def big_rows(c):
    header = ('{"t":%s}' % T).encode()
    c.ok("V46", [frame(header, n=CAP), b" " * (CAP - len(header)), data(8)], [["t", "F32", [2], 0, 8]], big=True)
    tail = ':{"dtype":"U8","shape":[],"data_offsets":[0,1]}'

    def overlap_bomb():
        # As many entries as the cap allows, all on one range.
        size = len('"0000000"' + tail) + 1
        n = (CAP - 2) // size
        yield struct.pack("<Q", n * size - 1 + 2)
        for start in range(0, n, 50_000):
            text = ",".join('"%07x"%s' % (i, tail) for i in range(start, min(n, start + 50_000)))
            yield (("{" if start == 0 else ",") + text).encode()
        yield b"}" + b"x"

    c.bad("I65", overlap_bomb(), "OFFSET", big=True)

    def reversed_order():
        # 1.5 million good tensors in the worst order for sorting.
        n = 1_500_000
        head = [('"%x":{"dtype":"U8","shape":[],"data_offsets":[%d,%d]}' % (i, i, i + 1)) for i in range(n)]
        head = [head[(i * 611_953) % n] for i in range(n)]
        text = ("{" + ",".join(head) + "}").encode()
        assert len(text) <= CAP
        yield struct.pack("<Q", len(text)) + text
        yield bytes(n)

    c._put(dict(id="V56", code="HR_OK", official=True, n_tensors=1_500_000, big=True), reversed_order())


def make(folder, big=False):
    os.makedirs(folder, exist_ok=True)
    corpus = Corpus(folder)
    for rows in (valid_rows, frame_rows, text_rows, schema_rows, limit_rows, range_rows):
        rows(corpus)
    if big:
        big_rows(corpus)
    with open(os.path.join(folder, "expected.json"), "w", encoding="utf-8") as out:
        json.dump(corpus.rows, out, indent=0)
    return corpus.rows


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3) or sys.argv[2:] not in ([], ["--big"]):
        sys.exit(__doc__)
    print(len(make(sys.argv[1], "--big" in sys.argv)), "files")
