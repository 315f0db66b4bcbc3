# SPDX-License-Identifier: Apache-2.0
"""Libraries that torch's CUDA build links and a run on the CPU never calls, made of nothing: cuda_stubs.py

PyPI has torch for the CPU only as its CUDA build. What it links (cuBLAS, cuDNN, NCCL and others, 1.8 GB of downloads) is only
loaded, never called, so a library of the same name with the same symbols will do. They go beside torch's own, in the
environment whose Python runs this. Needs gcc and readelf. Run again, it writes the same.
"""
import collections
import glob
import re
import subprocess
import sysconfig
import tempfile

LIBRARIES = sysconfig.get_paths()["purelib"] + "/torch/lib"
# Small enough to be had from PyPI (cufile, cupti, cudart), or opened by torch at run time only.
REAL = {"libcuda.so.1", "libcudart.so.13", "libcufile.so.0", "libcupti.so.13"}
# Symbols without a version are told apart by their prefix.
OWNER = {
    "cublasLt": "libcublasLt.so.13",
    "cublas": "libcublas.so.13",
    "cudnn": "libcudnn.so.9",
    "cufft": "libcufft.so.12",
    "nccl": "libnccl.so.2",
    "pnccl": "libnccl.so.2",
    "cusparseLt": "libcusparseLt.so.0",
    "cusparse": "libcusparse.so.12",
    "nvrtc": "libnvrtc.so.13",
    "curand": "libcurand.so.10",
    "nvshmem": "libnvshmem_host.so.3",
}
PREFIXES = sorted(OWNER, key=len, reverse=True)
VERSIONS = re.compile(r"File: (\S+)\s+Cnt: \d+\n((?:\s+0x\w+:\s+Name: .*\n)+)")


def needed():
    """soname -> version -> symbols, over all of torch's libraries."""
    need = collections.defaultdict(lambda: collections.defaultdict(set))
    for path in glob.glob(LIBRARIES + "/*.so"):
        shown = subprocess.run(["readelf", "-WdV", "--dyn-syms", path], capture_output=True, text=True, check=True).stdout
        named = {n for n in re.findall(r"NEEDED.*\[(.*?)\]", shown) if re.match(r"lib(cu|nv|nccl)", n)} - REAL
        for soname in named:
            need[soname]  # a library that is linked and of which nothing is used still has to be there
        owner_of = {v: soname for soname, body in VERSIONS.findall(shown) for v in re.findall(r"Name: (\S+)", body)}
        for symbol, version in re.findall(r" UND (\w+)@(\S+)", shown):
            if owner_of.get(version) in named:
                need[owner_of[version]][version].add(symbol)
        for symbol in re.findall(r" UND (\w+)$", shown, re.M):
            prefix = next((p for p in PREFIXES if symbol.startswith(p)), None)
            if prefix:
                need[OWNER[prefix]][""].add(symbol)
    return need


def build(soname, by_version):
    symbols = sorted(set().union(*by_version.values()))
    with tempfile.TemporaryDirectory() as work:
        with open(work + "/s.c", "w") as file:
            file.write("".join(f"int {s}(void){{return 35;}}\n" for s in symbols) or "int unused_;\n")
        with open(work + "/s.map", "w") as file:
            for version, names in by_version.items():
                if version:
                    file.write(f"{version} {{ global: {'; '.join(sorted(names))}; }};\n")
        script = [f"-Wl,--version-script={work}/s.map"] if any(by_version) else []
        subprocess.run(
            ["gcc", "-w", "-fno-builtin", "-shared", "-fPIC", "-o", f"{LIBRARIES}/{soname}", work + "/s.c",
             f"-Wl,-soname,{soname}", *script],
            check=True,
        )


for name, versions in needed().items():
    build(name, versions)
