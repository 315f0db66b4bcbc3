#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Finds functions and words that have no place in headrace.

Comments and strings do not count, except where a rule is about words. With --self-test it checks instead that each rule finds
its bad sample and lets its good one pass.
"""
import re
import sys

import sources

SYSTEM_CALLS = (
    "open openat openat2 creat close read write readv writev pread preadv preadv2 pread64 pwrite pwritev lseek "
    "fstat stat lstat fstatat statx statfs fstatfs ioctl fcntl syscall readlink readlinkat opendir fdopendir readdir closedir "
    "mmap munmap mremap mprotect madvise mincore mlock munlock mlockall posix_fadvise posix_madvise readahead "
    "fopen fdopen fclose fread fwrite fgets getline unlink rename mkdir rmdir fsync fdatasync ftruncate fallocate "
    "pipe pipe2 dup dup2 dup3 eventfd poll ppoll select epoll_create1 epoll_ctl epoll_wait fork vfork execve waitpid kill "
    "signal sigaction pthread_sigmask pthread_create pthread_setaffinity_np sched_getaffinity sched_setaffinity sysconf "
    "clock_gettime gettimeofday time nanosleep clock_nanosleep usleep sleep getrandom getpid gettid geteuid getuid "
    "getenv setenv system"
).split()


def calls(*names):
    """A call of one of these functions: not a member of that name, nor a name that only ends with it."""
    return re.compile(r"(?<![\w.])(?<!->)(?:" + "|".join(names) + r")\s*\((?!\*)")


def in_src(path):
    return path.startswith("src/")


def in_product(path):
    return path.startswith(("src/", "cli/", "include/"))


# name, where it holds, what it matches, "code" or "text", what to do instead, a bad sample, a good sample
RULES = [
    ("unbounded string function", in_product, calls("sprintf", "vsprintf", "strcpy", "stpcpy", "strcat", "strtok", "gets"),
     "code", "use snprintf, memcpy or hr__format", "strcpy(a, b);", "snprintf(a, 4, \"strcpy(\"); my_strcpy(a);"),
    ("alloca", in_product, calls("alloca", "__builtin_alloca"), "code", "use a fixed array or hr__malloc",
     "p = alloca (n);", "/* alloca(n) */"),
    ("atoi", in_product, calls("atoi", "atol", "atoll", "atof"), "code", "use strtoull and look at its end pointer",
     "n = atoi(text);", "n = my.atoi(text);"),
    ("allocation outside core/mem.c", lambda p: in_src(p) and p != "src/core/mem.c",
     calls("malloc", "calloc", "realloc", "reallocarray", "free", "strdup", "strndup", "asprintf", "vasprintf",
           "aligned_alloc", "posix_memalign", "memalign", "valloc", "open_memstream"),
     "code", "use core/mem.h, so that failure is reported and can be tested", "free(x);", "hr__free(x); ops->free(x); o.free(x);"),
    ("system call outside core/os.c", lambda p: in_src(p) and p not in ("src/core/os.c", "src/core/os_disk.c", "src/core/os_library.c", "src/core/dl.c", "src/engine/uring.c"),
     calls(*SYSTEM_CALLS), "code", "put it behind core/os.h, so that it can fail in tests", "n = pread(fd, b, n, 0);",
     "hr__os_pread(fd, b, n, 0, &got); ops->open(e); int (*close)(int); hr_model_open(n);"),
    ("io_uring outside engine/uring.c", lambda p: in_src(p) and p != "src/engine/uring.c",
     re.compile(r"\bio_uring_\w+\s*\("), "code", "the engine is the only one who knows", "io_uring_submit(&ring);", "uring(&x);"),
    ("dlopen outside core/dl.c", lambda p: in_src(p) and p != "src/core/dl.c",
     calls("dlopen", "dlsym", "dlclose", "dlerror", "dlvsym"), "code", "use core/dl.h", "dlsym(h, n);", "hr__dl_sym(h, n);"),
    ("printing outside cli/", in_src,
     calls("printf", "fprintf", "vprintf", "vfprintf", "dprintf", "puts", "fputs", "putchar", "putc", "fputc", "perror"),
     "code", "a library says what it has to say in hr_error_last() or in statistics", "fprintf(stderr, x);",
     "snprintf(b, 4, x); __attribute__((format(printf, 1, 2)));"),
    ("process exit in a library", in_src, calls("exit", "_exit", "abort", "quick_exit", "atexit"), "code",
     "return an error; assert() is for broken invariants", "exit(1);", "on_exit_of(1); thread_exit(2);"),
    ("unfinished work", in_product, re.compile(r"\b(TODO|FIXME|XXX|HACK|stub(?:s|bed)?|placeholders?|not implemented)\b", re.I),
     "text", "finish it, or open an issue and leave it out", "/* TODO: more */", "mkstemp(\"aXXXXXX\"); /* stubborn */"),
    ("missing licence line", lambda p: True, re.compile(r"\A(?!/\* SPDX-License-Identifier: Apache-2\.0 \*/\n)"), "text",
     "begin with /* SPDX-License-Identifier: Apache-2.0 */", "int x;\n", "/* SPDX-License-Identifier: Apache-2.0 */\nint x;\n"),
    ("space at the end of a line", lambda p: True, re.compile(r"[ \t]+$", re.MULTILINE), "text", "remove it", "int x; \n",
     "int x;\n"),
]

CONDITION = re.compile(r"\b(?:if|while|switch)\s*\(")
ASSIGNMENT = re.compile(r"(?<![=!<>])=(?!=)")


def assignments(code):
    """Positions of assignments inside conditions."""
    for match in CONDITION.finditer(code):
        depth = 0
        for at in range(match.end() - 1, len(code)):
            depth += (code[at] == "(") - (code[at] == ")")
            if depth == 0:
                break
        inner = code[match.end():at]
        # Compound literals and designated initialisers hold "=" that assigns nothing.
        inner = re.sub(r"\{[^{}]*\}", lambda m: " " * len(m.group(0)), inner)
        for found in ASSIGNMENT.finditer(inner):
            yield match.end() + found.start()


def check(path, text, rules):
    forms = {"code": sources.blank(text), "text": text}
    for name, applies, pattern, form, instead, _, _ in rules:
        if applies(path):
            for match in pattern.finditer(forms[form]):
                yield f"{path}:{sources.line_of(forms[form], match.start())}: {name}: {match.group(0).strip()[:50]!r}; {instead}"
    for at in assignments(forms["code"]):
        yield f"{path}:{sources.line_of(text, at)}: assignment in a condition; assign first, then test"


def self_test():
    problems = []
    for rule in RULES:
        name, _, _, _, _, bad, good = rule
        if not list(check("src/loader/sample.c", bad, [rule])):
            problems.append(f"'{name}' does not find {bad!r}")
        problems += [f"false alarm: {p}" for p in check("src/loader/sample.c", good, [rule])]
    for name in ("src/core/mem.c", "src/core/os.c", "src/core/dl.c"):
        allowed = {"src/core/mem.c": "malloc(1);", "src/core/os.c": "read(0, b, 1);", "src/core/dl.c": "dlopen(x, 0);"}[name]
        problems += [f"false alarm: {p}" for p in check(name, allowed, RULES) if "licence" not in p]
    for bad in ("if ((n = f(1)))", "while ((c = next()) != 0)", "if (a && (b += 2))"):
        if not list(assignments(bad)):
            problems.append(f"assignment in a condition: does not find {bad!r}")
    for good in ("if (a == b && c <= d && e != f && g >= h)", "for (i = 0; i < n; i++)", "if (f(&(struct s){.a = 1}))"):
        if list(assignments(good)):
            problems.append(f"assignment in a condition: false alarm for {good!r}")
    return problems


def main():
    if "--self-test" in sys.argv:
        return sources.finish(self_test(), "rules that do not work")
    problems = []
    for path in sources.c_files("src", "cli", "include", "tests", "bench"):
        problems += check(path, sources.read(path), RULES)
    return sources.finish(problems, "banned things")


if __name__ == "__main__":
    sys.exit(main())
