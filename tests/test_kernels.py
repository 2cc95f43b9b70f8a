"""The kernels of kernels.py without a GPU: Triton's interpreter runs them, and they compile for an
H100."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from test_all import HERE, cases

pytest.importorskip("triton", reason="make slow installs triton")
pytestmark = pytest.mark.slow
MANY = (2, 9)  # numbers of sources, in the kernels of attnres compiled for an H100


def run_python(*command, **env):
    env = os.environ | {"OMP_NUM_THREADS": "1"} | env
    done = subprocess.run(
        [sys.executable, *command], cwd=HERE, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@cases("which", ["of_nag", "of_attnres", "a_model or dtypes", "streams"])
def test_kernels_in_the_interpreter(which):
    options = ("-q", "-x", "-p", "no:cacheprovider", "-k", which)
    told = run_python("-m", "pytest", "tests/kernel_checks.py", *options, TRITON_INTERPRET="1")
    assert "skipped" not in told


# ------------------------------------------------------------------------------------------------
# On an H100, without one


def passes_of_two_sublayers(mode, d, tokens, sources=2):
    """What the kernels of two sublayers read and write, over the bytes of a bfloat16 stream.

    A second loop over the same tile is not counted. What surrounds the kernels is in `others`.
    sources: of the first sublayer. C = 32 directions, 256 parts of sums over the tokens.
    """
    if mode == "nag":
        forward, backward = 3, 5
        products = 2 * 32 / d  # written, read, and again as gradients
        others = 2 + 3  # the product for the gradient of w, twice, and one sum of two gradients
        return 2 * (forward + backward + 2 * products) + others
    parts = 2 * 256 * 2 / tokens  # one vector of sums in float32, written and read
    first = (sources + 2) + (2 * sources + 2) + 3 * parts  # y and o; their gradients
    second = (2 + 1) + (3 + 2) + 2 * parts  # o and the newest source
    return first + second + 3  # the newest source has two gradients, which are added


def test_kernels_move_few_bytes():
    prenorm = 19.08  # python runs/h100.py --modes=prenorm
    for mode, sources, goal in (("nag", 0, 1.2), ("attnres", 2, 1.22), ("attnres", 1, 1.22)):
        assert passes_of_two_sublayers(mode, 2048, 4096, sources) / prenorm < goal


def compile_read_kernels():
    """Print the bytes of memory that a thread of each kernel of attnres keeps registers in."""
    import triton
    from triton.backends.compiler import GPUTarget

    import kernels

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    numbers = dict(D=2048, BLOCK=2048, EPS=1e-6, NORM_EPS=1e-6)
    for older in MANY:
        for kernel in (kernels.read_forward, kernels.read_backward):
            types = dict.fromkeys(kernel.arg_names, "*fp32") | {"N": "i32"}
            types |= dict.fromkeys(("vs", "of_vs"), ("*bf16",) * older)
            types |= dict.fromkeys(("y_ptr", "o2_ptr", "of_y_ptr", "of_o2_ptr"), "*bf16")
            absent = dict.fromkeys(("ran_ptr", "o_ptr", "lse_ptr"))
            fixed = {n: v for n, v in (numbers | dict(SHARED=older) | absent).items()
                     if n in kernel.arg_names}  # fmt: skip
            types = {n: "constexpr" if n in fixed else types[n] for n in kernel.arg_names}
            lists = [at for at, kind in enumerate(types.values()) if isinstance(kind, tuple)]
            aligned = [(at,) for at, kind in enumerate(types.values()) if kind[0] == "*"]
            aligned += [(at, i) for at in lists for i in range(older)]
            aligned = dict.fromkeys(aligned, [["tt.divisibility", 16]])
            source = triton.compiler.ASTSource(kernel, types, fixed, aligned)
            compiled = triton.compile(source, GPUTarget("cuda", 90, 32), dict(num_warps=8))
            with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
                file.write(compiled.asm["cubin"])
                file.flush()
                command = [tool, "-res-usage", file.name]
                told = subprocess.run(command, capture_output=True, text=True).stdout
            print("spilled", sum(map(int, re.findall(r"(?:STACK|LOCAL):(\d+)", told))))


@pytest.mark.skipif(sys.platform != "linux", reason="triton is for Linux")
def test_kernels_compile_for_an_h100_without_graph_breaks(tmp_path):
    argv = ["--modes=nag,attnres", f"--out={tmp_path / 'found'}"]
    run_python("runs/h100.py", *argv)
    for found in json.loads((tmp_path / "found").read_text())["modes"].values():
        assert found["breaks"] == found["spill"] == 0 and found["kernels"] <= 16
    path = f"import sys; sys.path[:0] = ['tests', '.']; import {Path(__file__).stem} as here; "
    told = run_python("-c", path + "here.compile_read_kernels()")
    spilled = [*map(int, re.findall(r"spilled (\d+)", told))]
    assert len(spilled) == 2 * len(MANY) and max(spilled) <= 16  # of 9 sources, backward: 16


@pytest.mark.skipif(sys.platform != "linux", reason="triton is for Linux")
def test_a_block_with_kernels_compiles_for_an_h100(tmp_path):
    """Without a graph break, and without registers in memory."""
    argv = ["--modes=ihc", "--what=step", "--parts=dense", f"--out={tmp_path / 'found'}"]
    run_python("runs/h100.py", *argv)
    (found,) = json.loads((tmp_path / "found").read_text())["modes"].values()
    assert found["breaks"] == found["spill"] == 0 and len(found["ours"]) == 4
