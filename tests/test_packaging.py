"""The files that stand alone, each by itself and in the wheel."""

import json
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
    found = [block for block in blocks if re.search(rf"^(import|from) {module}\b", block, re.M)]
    assert found
    return found


def copied(folder, program, *modules, launcher=()):
    """What a program prints beside copies of these files, where nothing else of ours can be found."""
    for module in modules:
        shutil.copy(HERE / f"{module}.py", folder)
    others = {p.stem for p in HERE.glob("*.py")} - {*modules} | {"plumbing", "planning", "survive", "tools"}
    (folder / "mine.py").write_text(f"""{program}
import importlib.util, os
assert all(__import__(m).__file__ == os.path.join(os.getcwd(), m + ".py") for m in {modules})
assert not any(importlib.util.find_spec(m) for m in {sorted(others)})
""")
    return run_alone(folder, *launcher, "mine.py")


def test_noloco_alone_runs_the_readmes_examples(tmp_path):
    for program in readme_programs("noloco"):
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        out = copied(tmp_path, program, "noloco", launcher=launcher)    # the two may print into one line
        assert sorted(re.findall(r"rank (\d): loss 0\.00", out)) == ["0", "1"]


def test_skippipe_alone_runs_the_readmes_examples_without_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('there is no torch')")
    for program in readme_programs("skippipe"):
        lines = copied(tmp_path, program, "skippipe").splitlines()
        promised = [line.split("# ")[1] for line in program.splitlines() if "print(" in line]
        assert len(lines) == len(promised)
        for line, words in zip(lines, promised):
            assert all(number in line for number in re.findall(r"\d+\.\d+", words)), (line, words)


def test_model_alone_runs(tmp_path):
    assert copied(tmp_path, """import torch
from model import Config, Llama
model, tokens = Llama(Config()), torch.randint(256, (2, 8))
model.loss(model.blocks(model.embed(tokens)), tokens).backward()
print(all(p.grad.any() for p in model.parameters()))""", "model") == "True\n"


def test_bench_works_copied_beside_noloco_alone(tmp_path):
    """With two numbers of replicas: more take ten seconds."""
    out = copied(tmp_path, """import bench_sync
bench_sync.COUNTS = 4, 1024
bench_sync.main(["--simulate", "--draws", "0.001"])""", "bench_sync", "noloco")
    assert "| NoLoCo here, one exchange | " in out
    assert json.loads((tmp_path / "runs/results/sync_simulated.json").read_text())["params"] == 125e6
