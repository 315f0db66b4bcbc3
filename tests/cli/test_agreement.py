# SPDX-License-Identifier: Apache-2.0
"""Help, parser, man pages and completions say the same."""
import os
import re
import shutil
import subprocess
import tempfile

from harness import Skip, test

OPTION = re.compile(r"^  (?:-(\w), )?--([a-z-]+)(?: ([A-Z]+))? ", re.MULTILINE)


def commands(context):
    text = context.run("help").stdout.decode()
    return re.findall(r"^  ([a-z]+) ", text.split("Commands:\n")[1], re.MULTILINE)


def help_options(context, command):
    """{name: (letter, value)} as help has them; help is made from the parser's table."""
    text = context.run("help", command).stdout.decode()
    return {name: (letter or None, value or None) for letter, name, value in OPTION.findall(text.split("\nOptions:\n")[1])}


def man_options(context, command):
    text = context.read("docs", "man", f"headrace-{command}.1.scd")
    found = re.findall(r"^(?:\*-(\w)\*, )?\*--([a-z-]+)\*(?: _([A-Z]+)_)?$", text, re.MULTILINE)
    return {name: (letter or None, value or None) for letter, name, value in found}


@test("help of every command names it, has examples, and ends well")
def help_is_complete(context):
    assert len(commands(context)) == 13, commands(context)
    for command in commands(context):
        text = context.run("help", command).stdout
        assert text == context.run(command, "--help").stdout == context.run(command, "-h").stdout, command
        assert text.startswith(f"headrace {command}: ".encode()), command
        assert b"\nExamples:\n" in text and b"\nExit status:" in text, command


@test("examples in help use only commands and options that there are")
def examples_are_true(context):
    for command in commands(context):
        examples = context.run("help", command).stdout.decode().split("\nExamples:\n")[1].split("\n\n")[0]
        for used, rest in re.findall(r"headrace ([a-z]+)((?: [^|>\n]*)?)", examples):
            known = help_options(context, used)
            for option in re.findall(r"(?<= )--([a-z-]+)", rest):
                assert option in known or used == "version", (command, used, option)


@test("the parser knows every option that help shows, and no other")
def parser_agrees(context):
    for command in commands(context):
        for name, (letter, value) in help_options(context, command).items():
            forms = [f"--{name}=1" if value else f"--{name}"] + ([f"-{letter}"] if letter else [])
            for form in forms:
                # The second option is what is complained of, unless the first one's value is.
                complaint = context.run(command, form, "--nonsense", rc=2).stderr.decode()
                assert "unknown option '--nonsense'" in complaint or complaint.startswith(f"headrace: --{name} "), (form, complaint)
            if value:
                assert f"--{name} needs a value" in context.run(command, f"--{name}", rc=2).stderr.decode(), name
            else:
                assert f"--{name} takes no value" in context.run(command, f"--{name}=1", rc=2).stderr.decode(), name
        assert b"unknown option '-Z'" in context.run(command, "-Z", rc=2).stderr


@test("man pages describe the options that help shows, with the same values")
def man_pages_agree(context):
    for command in commands(context):
        if command not in ("help", "version"):
            assert man_options(context, command) == help_options(context, command), command
    overview = context.read("docs", "man", "headrace.1.scd")
    described = re.findall(r"^\*([a-z]+)\*$", overview.split("# COMMANDS")[1].split("# OPTIONS")[0], re.MULTILINE)
    assert described == commands(context), described


@test("man pages are built by scdoc without complaint")
def man_pages_build(context):
    scdoc = shutil.which("scdoc")
    if not scdoc:
        raise Skip("scdoc is not installed")
    folder = os.path.join(context.source, "docs", "man")
    for name in sorted(os.listdir(folder)):
        with open(os.path.join(folder, name), "rb") as page:
            done = subprocess.run([scdoc], stdin=page, capture_output=True, check=False)
        assert done.returncode == 0 and not done.stderr, (name, done.stderr)


@test("bash completion offers the commands and options that help shows")
def bash_agrees(context):
    script = os.path.join(context.source, "cli", "completions", "headrace.bash")

    def complete(*words):
        ask = ('source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); compopt() { :; }; _headrace; '
               'printf "%s\\n" "${COMPREPLY[@]}"')
        done = subprocess.run(["bash", "-c", ask, "bash", script, *words], capture_output=True, cwd=context.work, check=True, text=True)
        return done.stdout.split()

    assert set(complete("headrace", "")) == {*commands(context), "--help", "--version"}
    for command in commands(context):
        assert set(complete("headrace", command, "--")) == {"--" + name for name in help_options(context, command)}, command
    assert complete("headrace", "load", "--caching", "b") == ["bypass"]
    assert set(complete("headrace", "ls", "o")) == {"one.safetensors", "odd.safetensors"}


@test("zsh completion offers the commands and options that help shows")
def zsh_agrees(context):
    text = context.read("cli", "completions", "_headrace")
    lists = dict(re.findall(r"^\t(\w+)=\((.*?)\)$", text, re.MULTILINE | re.DOTALL))
    offered = re.findall(r"^\t\t'([a-z]+):", lists["commands"], re.MULTILINE)
    assert offered == commands(context), offered
    for command in commands(context):
        branch = re.search(rf"^\t\t{command}\)(.*?);;", text, re.MULTILINE | re.DOTALL).group(1)
        branch = re.sub(r"\$(\w+)", lambda name: lists.get(name.group(1), ""), branch)
        branch = re.sub(r"\[[^\]]*\]", "", branch)
        names = set(re.findall(r"--([a-z-]+)", branch))
        assert names == set(help_options(context, command)), (command, names)
    zsh = shutil.which("zsh")
    if zsh:
        subprocess.run([zsh, "-n", os.path.join(context.source, "cli", "completions", "_headrace")], check=True)


@test("the example in libheadrace(3) compiles and runs")
def library_example_runs(context):
    compiler = shutil.which("cc")
    if not compiler or not context.options.library or context.options.sanitized:
        raise Skip("needs cc and a library without sanitizers")
    page = context.read("docs", "man", "libheadrace.3.scd")
    program = page.split("# A WHOLE PROGRAM")[1].split("```\n")[1].replace("\\\\", "\\")
    with tempfile.TemporaryDirectory() as folder:
        source = os.path.join(folder, "example.c")
        with open(source, "w", encoding="utf-8") as file:
            file.write(program)
        library = os.path.abspath(context.options.library)
        subprocess.run([compiler, "-std=c11", "-Wall", "-Wextra", "-Werror", "-I", os.path.join(context.source, "include"), source, "-o",
                        os.path.join(folder, "example"), "-L", library, "-lheadrace", f"-Wl,-rpath,{library}"], check=True)
        done = subprocess.run([os.path.join(folder, "example"), context.path("two"), "big"], capture_output=True, check=True)
        assert done.stdout == b"9000001 bytes, the first is 0xba\n", done.stdout
