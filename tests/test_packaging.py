"""The files that stand alone, each by itself and in the wheel."""

import os
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

from tests.harness import HERE, processes, torchrun

FILES = {"noloco.py", "skippipe.py"}         # no model.py: `model` is the name of many a file


def test_the_wheel_holds_two_modules_and_installs(tmp_path):
    pytest.importorskip("build")
    for name in ("pyproject.toml", "README.md", "LICENSE", "model.py", "train.py", *FILES):
        shutil.copy(HERE / name, tmp_path)

    def run_in(*command):
        return subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True,
                              text=True, timeout=120)

    built = run_in("-m", "build", "--no-isolation")  # an sdist, and the wheel from it
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert {n for n in archive.namelist() if ".dist-info/" not in n} == FILES
        about = archive.read(next(n for n in archive.namelist() if n.endswith("METADATA"))).decode()
    assert re.findall(r"^Provides-Extra: (.*)$", about, re.M) == ["plot", "hf", "lightning", "test", "all"]
    assert re.findall(r"^Requires-Dist: (\w+)>=[\d.]+$", about, re.M) == ["torch", "einops", "tqdm"]
    offline = ["--quiet", "--no-deps", "--no-index", "--target", "fresh"]
    assert run_in("-m", "pip", "install", *offline, str(wheel)).returncode == 0
    fresh = tmp_path / "fresh"
    assert {path.name for path in fresh.glob("*.py")} == FILES
    assert all((fresh / file).read_bytes() == (HERE / file).read_bytes() for file in FILES)


def readme_program(module):
    """The README's whole program that uses the module."""
    blocks = re.findall(r"```python\n(.*?)```", (HERE / "README.md").read_text(), re.S)
    found = [block for block in blocks if re.search(rf"^(import|from) {module}\b", block, re.M)]
    assert len(found) == 1, found
    return found[0]


def copied(folder, program, *modules):
    """The folder, with a program mine.py and copies of these files.

    The program makes sure that it finds nothing else of ours.
    """
    for module in modules:
        shutil.copy(HERE / f"{module}.py", folder)
    others = {path.stem for path in HERE.glob("*.py")} - {*modules}
    others |= {"gossip", "plumbing", "planning", "survive", "tools"}
    (folder / "mine.py").write_text(f"""{program}
import importlib.util, os
assert all(__import__(m).__file__ == os.path.join(os.getcwd(), m + ".py") for m in {modules})
assert not any(importlib.util.find_spec(m) for m in {sorted(others)})
""")
    return folder


def run_alone(folder, *program_and_modules):
    """What it prints."""
    env = dict(os.environ)
    env.pop("PYTHONPATH", None)
    folder = copied(folder, *program_and_modules)
    done = subprocess.run([sys.executable, "mine.py"], cwd=folder, env=env, capture_output=True,
                          text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_noloco_alone_runs_the_readmes_example(tmp_path):
    processes(1, torchrun, "mine.py", cwd=copied(tmp_path, readme_program("noloco"), "noloco"))
    said = (tmp_path / "said").read_text()
    # They may print into one line.
    assert sorted(re.findall(r"rank (\d): loss \d\.\de-", said)) == ["0", "1"]


def test_skippipe_alone_runs_the_readmes_example_without_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('there is no torch')")
    program = readme_program("skippipe")
    promised = [line.split("# ")[1] for line in program.splitlines() if "print(" in line]
    printed = run_alone(tmp_path, program, "skippipe").splitlines()
    for line, words in zip(printed, promised, strict=True):
        assert all(number in line for number in re.findall(r"\d+\.\d+", words)), (line, words)


def test_model_alone_runs(tmp_path):
    assert run_alone(tmp_path, """import torch
from model import Config, Llama
model, tokens = Llama(Config()), torch.randint(256, (2, 8))
model.loss(model.blocks(model.embed(tokens)), tokens).backward()
print(all(p.grad.any() for p in model.parameters()))""", "model") == "True\n"
