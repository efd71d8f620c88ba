"""The three files that stand alone, each by itself and in the wheel."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.harness import HERE

MODULES = ["noloco", "skippipe", "model"]


def test_the_wheel_holds_three_modules_and_installs(tmp_path):
    pytest.importorskip("build")
    for name in ("pyproject.toml", "README.md", "LICENSE", *(m + ".py" for m in MODULES)):
        shutil.copy(HERE / name, tmp_path)
    run_in = lambda *command: subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True,
                                             text=True, timeout=120)
    built = run_in("-m", "build", "--no-isolation")  # an sdist, and the wheel from it
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert {n for n in archive.namelist() if ".dist-info/" not in n} == {m + ".py" for m in MODULES}
        about = archive.read(next(n for n in archive.namelist() if n.endswith("METADATA"))).decode()
    assert re.findall(r"^Provides-Extra: (.*)$", about, re.M) == ["plot", "hf", "test", "all"]
    assert re.findall(r"^Requires-Dist: (\w+)>=[\d.]+$", about, re.M) == ["torch", "einops", "tqdm"]
    offline = ["--quiet", "--no-deps", "--no-index", "--target", "fresh"]
    assert run_in("-m", "pip", "install", *offline, str(wheel)).returncode == 0
    code = "import noloco, skippipe, model; print(noloco.__file__, skippipe.__file__, model.__file__)"
    found = run_alone(tmp_path / "fresh", "-c", code)
    assert [Path(f).parent for f in found.split()] == [tmp_path / "fresh"] * 3


def run_alone(folder, *command):
    """What Python prints where there is nothing of this repository but what the folder holds."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True,
                          timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def readme_programs(module):
    """Its whole programs that use the module."""
    blocks = re.findall(r"```python\n(.*?)```", (HERE / "README.md").read_text(), re.S)
    return [block for block in blocks if re.search(rf"^(import|from) {module}\b", block, re.M)]


def put(folder, module, program):
    shutil.copy(HERE / f"{module}.py", folder)
    (folder / "mine.py").write_text(program)


@pytest.mark.parametrize("module", MODULES)
def test_a_file_copied_into_an_empty_folder_finds_nothing_else_of_ours(module, tmp_path):
    put(tmp_path, module, f"import {module}; print({module}.__file__)")
    assert Path(run_alone(tmp_path, "mine.py").strip()) == tmp_path / f"{module}.py"
    others = {p.stem for p in HERE.glob("*.py")} - {module} | {"plumbing", "planning", "survive", "tools"}
    code = f"import importlib.util\nprint([m for m in {sorted(others)} if importlib.util.find_spec(m)])"
    assert run_alone(tmp_path, "-c", code) == "[]\n"


def test_noloco_alone_runs_the_readmes_examples(tmp_path):
    programs = readme_programs("noloco")
    for program in programs:
        put(tmp_path, "noloco", program)
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        out = run_alone(tmp_path, *launcher, "mine.py")         # the two may print into one line
        assert sorted(re.findall(r"rank (\d): loss 0\.00", out)) == ["0", "1"]
    assert programs


def test_skippipe_alone_runs_the_readmes_examples_without_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('there is no torch')")
    programs = readme_programs("skippipe")
    for program in programs:
        put(tmp_path, "skippipe", program)
        lines = run_alone(tmp_path, "mine.py").splitlines()
        promised = [line.split("# ")[1] for line in program.splitlines() if "print(" in line]
        assert len(lines) == len(promised)
        for line, words in zip(lines, promised):
            assert all(number in line for number in re.findall(r"\d+\.\d+", words)), (line, words)
    assert programs


STAGES = """
import torch
from model import Config, Llama

whole = Llama(Config())
first, last = Llama(Config(), layers=[0, 1]), Llama(Config(), layers=[2, 3], ends=False)
tokens = torch.randint(256, (2, 8))
x = last.blocks(first.blocks(first.embed(tokens)))
first.loss(x, tokens).backward()
print(torch.allclose(first.logits(x), whole(tokens), atol=1e-5))
print(all(p.grad.any() for p in [*first.parameters(), *last.parameters()]))
"""


def test_model_alone_runs_whole_and_in_stages(tmp_path):
    for program in [STAGES, *readme_programs("model")]:
        put(tmp_path, "model", program)
        printed = run_alone(tmp_path, "mine.py")
        assert program != STAGES or printed == "True\nTrue\n"
