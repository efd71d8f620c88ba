"""The files that stand alone, each by itself and in the wheel."""

import re
import shutil
import subprocess
import sys
import zipfile

import pytest

from tests.harness import HERE, SMALL, alone, runs_alone, write_corpus

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
    others |= {"gossip", "planning", "survive", "tools"}
    (folder / "mine.py").write_text(f"""{program}
import importlib.util, os
assert all(__import__(m).__file__ == os.path.join(os.getcwd(), m + ".py") for m in {modules})
assert not any(importlib.util.find_spec(m) for m in {sorted(others)})
""")
    return folder


def test_noloco_alone_runs_the_readmes_example(tmp_path):
    copied(tmp_path, readme_program("noloco"), "noloco")
    (ranks,) = runs_alone(tmp_path, (2, "mine.py", []))
    for rank, (status, said) in enumerate(ranks):
        assert status == 0 and re.search(rf"rank {rank}: loss \d\.\de-", said), ranks


def test_skippipe_alone_runs_the_readmes_example_without_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('there is no torch')")
    program = readme_program("skippipe")
    promised = [line.split("# ")[1] for line in program.splitlines() if "print(" in line]
    status, printed = alone(copied(tmp_path, program, "skippipe"), "mine.py")
    assert status == 0, printed
    for line, words in zip(printed.splitlines(), promised, strict=True):
        assert all(number in line for number in re.findall(r"\d+\.\d+", words)), (line, words)


def test_model_alone_runs(tmp_path):
    program = """import torch
from model import Config, Llama
model, tokens = Llama(Config()), torch.randint(256, (2, 8))
model.loss(model.blocks(model.embed(tokens)), tokens).backward()
print(all(p.grad.any() for p in model.parameters()))"""
    assert alone(copied(tmp_path, program, "model"), "mine.py") == (0, "True\n")


# ---- the ground floor: six files, and torch, einops and tqdm

SIX = ("noloco.py", "skippipe.py", "model.py", "train.py", "bench_sync.py", "test_minimal.py")
RUNS = [        # processes, options; each run has a name of its own, and a second line resumes it
    (4, "--stages 2,2 --name noloco"), (4, "--resume runs/noloco --steps 8"),
    (2, "--method diloco --inner-steps 2 --name diloco"), (2, "--method ddp --name ddp"),
    (4, "--stages 1,1,1,1 --skip 0.5 --microbatches 3 --name skip"),
    (1, "--name one"), (4, "--resume runs/noloco --steps 9"),
]
REFUSED = ("--wire int8", "--delay 2", "--fragments 2", "--optimizer muon", "--method ddp --wire bf16",
           "--tokenizer x.json", "--routing stronger --stages 1,1")


@pytest.fixture(scope="module")
def six(tmp_path_factory):
    """A folder with the six files, a small text, and nothing else."""
    folder = tmp_path_factory.mktemp("six")
    for name in SIX:
        shutil.copy(HERE / name, folder)
    write_corpus(folder / "data")
    return folder


def test_six_files_alone_train_resume_skip_bench_and_plan(six):
    runs = []
    for world, options in RUNS:
        words = options.split()
        if "--resume" not in words:
            words += ["--steps", 6, *SMALL]
            if "one" not in words:              # that run takes the default text
                words += ["--data", "data"]
        runs.append((world, "train.py", words))
    bench = (2, "bench_sync.py", ["--params", "1e5", "--trials", 2])
    plan = (1, "skippipe.py", [])
    *trained, benched, planned = runs_alone(six, *runs, bench, plan)
    for ranks in (*trained, benched, planned):
        assert all(status == 0 for status, _ in ranks), ranks
    assert all("held-out loss" in ranks[0][1] for ranks in trained)
    assert "from step 8" in trained[-1][0][1] and "NoLoCo" in benched[0][1] and " > " in planned[0][1]
    assert {path.name for path in six.glob("*.py")} == set(SIX)


def test_what_is_not_of_the_papers_is_refused_in_one_line_without_its_folder(six):
    more = ["--steps", 2, "--name", "x", *SMALL]
    found = runs_alone(six, *[(2, "train.py", [*options.split(), *more]) for options in REFUSED])
    for options, ranks in zip(REFUSED, found, strict=True):
        (status, said), other = ranks
        assert status == 2 and said.startswith("error: ") and said.count("\n") == 1, (options, said)
        unknown = "unrecognized arguments" in said or "--routing: invalid choice" in said
        assert unknown and other == [2, ""], (options, said)
    assert not (six / "runs/x").exists()


def test_six_files_alone_pass_their_tests(six):
    """The processes that test_minimal.py asks for find it imported."""
    status, said = alone(six, "-c", """
import multiprocessing, pytest
multiprocessing.set_forkserver_preload(["test_minimal"])
raise SystemExit(pytest.main(["-q", "-p", "no:cacheprovider", "test_minimal.py"]))
""")
    assert status == 0, said
