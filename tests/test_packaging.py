"""The files that stand alone, each by itself and in the wheel."""

import itertools
import re
import shutil
import subprocess
import sys
import zipfile

import pytest
import torch
from torch.utils._pytree import tree_leaves

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
    offline = ["--quiet", "--no-deps", "--no-index", "--target", "fresh"]
    assert run_in("-m", "pip", "install", *offline, str(wheel)).returncode == 0
    fresh = tmp_path / "fresh"
    assert {path.name for path in fresh.glob("*.py")} == FILES
    assert all((fresh / file).read_bytes() == (HERE / file).read_bytes() for file in FILES)


def example(name):
    """A whole program of examples/."""
    return (HERE / "examples" / name).read_text()


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


def test_skippipe_alone_runs_its_example_without_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('there is no torch')")
    program = example("paths.py")
    promised = [line.split("# ")[1] for line in program.splitlines() if "print(" in line]
    status, printed = alone(copied(tmp_path, program, "skippipe"), "mine.py")
    assert status == 0, printed
    for line, words in zip(printed.splitlines(), promised, strict=True):
        assert all(number in line for number in re.findall(r"\d+\.\d+", words)), (line, words)


# ---- programs that one fresh Python runs: it imports torch once, and each rank finds only its own folder

TRAIN_A_MODEL = """import torch
from model import Config, Llama
model, tokens = Llama(Config()), torch.randint(256, (2, 8))
model.loss(model.blocks(model.embed(tokens)), tokens).backward()
print(all(p.grad.any() for p in model.parameters()))"""
# The ground floor: six files, and torch, einops and tqdm
SIX = ("noloco.py", "skippipe.py", "model.py", "train.py", "bench_sync.py", "test_minimal.py")
RUNS = [        # processes, options; each run has a name of its own, and a second line resumes it
    (4, "--stages 2,2 --name noloco"), (4, "--resume runs/noloco --steps 8"),
    (2, "--method diloco --inner-steps 2 --name diloco"), (2, "--method ddp --name ddp"),
    (4, "--stages 1,1,1,1 --skip 0.5 --microbatches 3 --name skip"),
    (1, "--name one"), (4, "--resume runs/noloco --steps 9"),
]
# A few of their tests; `make test` runs all of them.
SOME = """import pytest
raise SystemExit(int(pytest.main(["-q", "-p", "no:cacheprovider", "test_minimal.py", "-k",
                                  "n1_n2_n3 or groups or b2 or s2_to_s5 or cc1 or tc2"])))"""
REFUSED = ("--wire int8", "--delay 2", "--fragments 2", "--optimizer muon", "--method ddp --wire bf16",
           "--tokenizer x.json", "--routing stronger --stages 1,1")
TRAINERS = (HERE / "docs/trainers.md").read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """noloco/, loop/, model/ and six/: copies of a file or of six, and programs; nothing else of ours."""
    folder = tmp_path_factory.mktemp("alone")
    for name in ("noloco", "model", "loop/whole", "loop/stopped", "six/more"):
        (folder / name).mkdir(parents=True)
    copied(folder / "noloco", example("averaging.py"), "noloco")
    copied(folder / "model", TRAIN_A_MODEL, "model")
    shutil.copy(HERE / "noloco.py", folder / "loop")
    (program,) = re.findall(r"## A loop of your own.*?```python\n(.*?)```", TRAINERS, re.S)
    (folder / "loop/mine.py").write_text(program)
    shorter = program.replace("STEPS, MICROBATCHES = 200", "STEPS, MICROBATCHES = 53").replace("% 50", "% 53")
    assert shorter.count("53") == 2
    (folder / "loop/shorter.py").write_text(shorter)
    for name in SIX:
        shutil.copy(HERE / name, folder / "six")
    write_corpus(folder / "six/data")
    (folder / "six/more/some.py").write_text(SOME)
    return folder


@pytest.fixture(scope="module")
def found(folder):
    """{name of a program: [exit status, what is printed] of each rank of each of its runs}"""
    small = ["--steps", 6, *SMALL]
    trained = []
    for world, options in RUNS:
        words = options.split()
        if "--resume" not in words:
            words += small
            if "one" not in words:              # that run takes the default text
                words += ["--data", "data"]
        trained.append((world, "train.py", words, "six"))
    programs = {
        "noloco": [(2, "mine.py", [], "noloco")],
        "model": [(1, "mine.py", [], "model")],
        "loop": [(2, "../mine.py", [], "loop/whole"), (2, "../shorter.py", [], "loop/stopped"),
                 (2, "../mine.py", [], "loop/stopped")],
        "train": trained,
        "bench": [(2, "bench_sync.py", ["--params", "1e5", "--trials", 2], "six")],
        "plan": [(1, "skippipe.py", [], "six")],
        "test": [(1, "more/some.py", [], "six")],
        "refused": [(2, "train.py", [*options.split(), *small, "--name", "x"], "six") for options in REFUSED],
    }
    every = iter(runs_alone(folder, *itertools.chain(*programs.values())))
    return {name: list(itertools.islice(every, len(runs))) for name, runs in programs.items()}


def test_noloco_alone_runs_its_example(found):
    (ranks,) = found["noloco"]
    for rank, (status, said) in enumerate(ranks):
        assert status == 0 and re.search(rf"rank {rank}: loss \d\.\de-", said), ranks


def test_model_alone_runs(found):
    assert found["model"] == [[[0, "True\n"]]]


def test_the_pages_own_loop_trains_and_goes_on_to_the_bit_with_noloco_alone(folder, found):
    """With microbatches, a schedule, autocast in bf16 and its own checkpoint, of a step between meetings."""
    assert all(status == 0 for ranks in found["loop"] for status, _ in ranks), found["loop"]
    losses = [float(re.search(r"rank \d: loss ([\d.e+-]+)", said)[1]) for _, said in found["loop"][0]]
    assert len(losses) == 2 and max(losses) < 0.1
    for rank in range(2):
        whole, resumed = (torch.load(folder / f"loop/{run}/rank{rank}.pt") for run in ("whole", "stopped"))
        assert whole["outer"]["steps"] == 200
        for a, b in zip(tree_leaves(whole), tree_leaves(resumed), strict=True):
            assert torch.equal(a, b) if torch.is_tensor(a) else a == b


def test_six_files_alone_train_resume_skip_bench_plan_and_test(folder, found):
    (benched,), (planned,), (tested,) = found["bench"], found["plan"], found["test"]
    for ranks in (*found["train"], benched, planned, tested):
        assert all(status == 0 for status, _ in ranks), ranks
    assert all("held-out loss" in ranks[0][1] for ranks in found["train"])
    assert "from step 8" in found["train"][-1][0][1] and "NoLoCo" in benched[0][1] and " > " in planned[0][1]
    assert re.search(r"^\d\d passed", tested[0][1], re.M), tested
    assert {path.name for path in (folder / "six").glob("*.py")} == set(SIX)


def test_what_is_not_of_the_papers_is_refused_in_one_line_without_its_folder(folder, found):
    for options, ranks in zip(REFUSED, found["refused"], strict=True):
        (status, said), other = ranks
        assert status == 2 and said.startswith("error: ") and said.count("\n") == 1, (options, said)
        unknown = "unrecognized arguments" in said or "--routing: invalid choice" in said
        assert unknown and other == [2, ""], (options, said)
    assert not (folder / "six/runs/x").exists()
