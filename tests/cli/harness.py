# SPDX-License-Identifier: Apache-2.0
"""A few lines of test framework: functions marked @test run in order, each with a context, and are told as TAP."""
import json
import os
import shutil
import subprocess
import sys
import tempfile
import traceback

TESTS = []


class Skip(Exception):
    pass


def test(title, suite="main"):
    def mark(function):
        TESTS.append((suite, title, function))
        return function
    return mark


def no_duplicates(pairs):
    keys = [key for key, _ in pairs]
    if len(set(keys)) != len(keys):
        raise AssertionError(f"a key occurs twice in {keys}")
    return dict(pairs)


class Context:
    """What a test needs: the command, a folder with checkpoints, and the options of this run."""

    def __init__(self, options, work):
        self.options = options
        self.headrace = os.path.abspath(options.exe)
        self.source = os.path.abspath(options.source)
        self.work = work
        self.environment = {**os.environ, "LC_ALL": "C.UTF-8", "TERM": "xterm"}
        self.environment["PATH"] = os.path.dirname(self.headrace) + os.pathsep + self.environment["PATH"]

    def run(self, *args, rc=0, environment=None, timeout=120, **more):
        """Runs the command; bytes out and err. rc=None: any status."""
        done = subprocess.run([self.headrace, *args], cwd=self.work, env={**self.environment, **(environment or {})},
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=timeout, **more,
                              check=False)
        if rc is not None and done.returncode != rc:
            raise AssertionError(f"headrace {' '.join(args)}: status {done.returncode}, not {rc}\n{done.stderr.decode()}")
        return done

    def json(self, *args, rc=0, **more):
        """Its one JSON object."""
        done = self.run(*args, "--json", rc=rc, **more)
        return json.loads(done.stdout.decode("utf-8"), object_pairs_hook=no_duplicates)

    def gds(self):
        """The environment of a look-alike GPU with GPUDirect Storage."""
        if not self.options.fake_cuda or not self.options.fake_kernel or self.options.sanitized:
            raise Skip("no look-alike libraries were built, or they cannot be preloaded over a sanitizer")
        return {"LD_LIBRARY_PATH": os.path.abspath(self.options.fake_cuda), "HR_FAKE_ROOT": self.options.fake_root,
                "LD_PRELOAD": os.path.abspath(self.options.fake_kernel)}

    def start(self, *args, environment=None, **more):
        return subprocess.Popen([self.headrace, *args], cwd=self.work, env={**self.environment, **(environment or {})}, **more)

    def path(self, *parts):
        return os.path.join(self.work, *parts)

    def read(self, *parts):
        with open(os.path.join(self.source, *parts), encoding="utf-8") as file:
            return file.read()


def tell(number, title, function, context):
    try:
        function(context)
    except Skip as reason:
        print(f"ok {number} - {title} # SKIP {' '.join(str(reason).split())}", flush=True)
        return True
    except Exception:  # pylint: disable=broad-except
        print(f"not ok {number} - {title}")
        for line in traceback.format_exc().splitlines():
            print(f"# {line}")
        sys.stdout.flush()
        return False
    print(f"ok {number} - {title}", flush=True)
    return True


def main(options, prepare):
    chosen = [t for t in TESTS if t[0] == options.suite and (not options.only or options.only in t[1])]
    print(f"1..{len(chosen)}")
    work = tempfile.mkdtemp(prefix="headrace-cli-", dir=os.environ.get("TMPDIR") or "/var/tmp")
    try:
        prepare(work)
        results = [tell(i + 1, t[1], t[2], Context(options, work)) for i, t in enumerate(chosen)]
    finally:
        shutil.rmtree(work)
    return 0 if all(results) else 1
