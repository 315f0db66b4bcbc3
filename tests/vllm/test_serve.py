# SPDX-License-Identifier: Apache-2.0
"""The README's section on vLLM, run as it stands, and "vllm serve" over HTTP: test_serve.py [TEST...]

The names in the README are made true: a folder called Llama-3.1-8B has the small Llama of these tests.
"""
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import harness

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
NAME = "Llama-3.1-8B"
READY_SECONDS = 400
SMALL = ["--enforce-eager", "--max-model-len", "64", "--kv-cache-memory-bytes", str(64 << 20)]

MAKE = """
import sys, checkpoints
checkpoints.write(sys.argv[1], checkpoints.spread(checkpoints.train(checkpoints.SENTENCE)))
print(" ".join(checkpoints.SENTENCE))
"""


def readme_section():
    with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as file:
        return re.search(r"^## vLLM\n(.*?)(?=^## )", file.read(), re.M | re.S).group(1)


def make_model():
    paths = [os.path.dirname(os.path.abspath(__file__)), os.environ.get("PYTHONPATH", "")]
    environment = {**scene["environment"], "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-c", MAKE, os.path.join(scene["folder"], NAME)],
        env=environment, capture_output=True, text=True, check=True, timeout=300,
    )
    return done.stdout.split()


def ask(port, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.status, answer.read()


def free_port():
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        return chosen.getsockname()[1]


def wait_ready(server, port, log):
    end = time.monotonic() + READY_SECONDS
    while time.monotonic() < end:
        if server.poll() is not None:
            break
        try:
            if ask(port, "/health")[0] == 200:
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
    with open(log, errors="replace") as file:
        raise AssertionError(f"the server is not ready (exit status {server.poll()}):\n{file.read()[-4000:]}")


def serve(line, log):
    """The README's line, with what makes it small; "vllm" is the environment's."""
    words = line.split()
    assert words[:2] == ["vllm", "serve"], line
    port = free_port()
    command = [os.path.join(os.path.dirname(sys.executable), "vllm"), *words[1:], "--host", "127.0.0.1", "--port", str(port), *SMALL]
    with open(log, "w") as file:
        server = subprocess.Popen(
            command, cwd=scene["folder"], env={**scene["environment"], "VLLM_LOGGING_LEVEL": "INFO"},
            stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
        )
    return server, port


def stop(server):
    """SIGTERM to the server itself, as a supervisor would; then nothing of its group may be left."""
    server.send_signal(signal.SIGTERM)
    try:
        return server.wait(30)
    finally:
        try:
            os.killpg(server.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def test_the_readmes_line_serves_a_completion_over_http_and_ends_on_sigterm():
    line = re.search(r"^    (vllm serve \S+ --load-format headrace)$", readme_section(), re.M).group(1)
    log = os.path.join(scene["folder"], "serve.log")
    server, port = serve(line, log)
    try:
        wait_ready(server, port, log)
        words = scene["sentence"]
        body = {"model": NAME, "prompt": " ".join(words[:3]), "max_tokens": len(words) - 3, "temperature": 0, "return_token_ids": True}
        status, answer = ask(port, "/v1/completions", body)
        text = json.loads(answer)["choices"][0]["text"]
        assert status == 200
        assert text.split() == words[3:] or text.replace(" ", "") == "".join(words[3:]), text
    finally:
        start = time.monotonic()
        stop(server)
    assert time.monotonic() - start < 30
    with open(log, errors="replace") as file:
        report = [text for text in file if "headrace:" in text and "GB/s" in text]
    assert len(report) == 1, report


def test_a_damaged_file_is_one_clear_line_in_the_log_and_ends_the_server():
    folder = os.path.join(scene["folder"], "damaged")
    subprocess.run(["cp", "-r", os.path.join(scene["folder"], NAME), folder], check=True)
    victim = os.path.join(folder, "model-00002-of-00005.safetensors")
    os.truncate(victim, os.path.getsize(victim) - 1)
    log = os.path.join(scene["folder"], "damaged.log")
    server, _ = serve("vllm serve damaged --load-format headrace", log)
    try:
        assert server.wait(READY_SECONDS) != 0
    finally:
        stop(server)
    with open(log, errors="replace") as file:
        lines = [text for text in file if "model-00002-of-00005.safetensors" in text and "Error" in text]
    assert lines, open(log).read()[-3000:]


def test_the_readmes_python_runs_as_it_stands():
    (snippet,) = re.findall(r"^```python\n(.*?)^```", readme_section(), re.M | re.S)
    environment = {**scene["environment"], "VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_USE_AOT_COMPILE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", snippet], cwd=scene["folder"], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.strip(), done.stdout


if __name__ == "__main__":
    with harness.scratch_folder() as made:
        scene = {"folder": made, "environment": harness.quiet_environment(made)}
        scene["sentence"] = make_model()
        everything = [value for name, value in list(globals().items()) if name.startswith("test_")]
        sys.exit(harness.run(everything, sys.argv[1:]))
