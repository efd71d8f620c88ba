"""The wheel: what it holds, what it asks for, and that it installs."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.harness import HERE


def test_the_wheel_holds_five_modules_and_installs(tmp_path):
    pytest.importorskip("build")
    modules = ["noloco", "skippipe", "model", "train", "bench_sync"]
    for name in ("pyproject.toml", "README.md", "LICENSE", *(m + ".py" for m in modules)):
        shutil.copy(HERE / name, tmp_path)
    run_in = lambda *command: subprocess.run(
        [sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    built = run_in("-m", "build", "--no-isolation")  # an sdist, and the wheel from it
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert {n for n in archive.namelist() if ".dist-info/" not in n} == {m + ".py" for m in modules}
        about = archive.read(next(n for n in archive.namelist() if n.endswith("METADATA"))).decode()
    assert re.findall(r"^Provides-Extra: (.*)$", about, re.M) == ["plot", "hf", "test", "all"]
    assert re.findall(r"^Requires-Dist: (\w+)>=[\d.]+$", about, re.M) == ["torch", "einops", "tqdm"]
    assert (
        run_in(
            "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", "fresh", str(wheel)
        ).returncode
        == 0
    )
    code = "import sys; sys.path.insert(0, 'fresh'); import noloco, skippipe, model; "
    code += "print(noloco.__file__, skippipe.__file__, model.__file__)"
    found = run_in("-c", code).stdout
    assert [Path(f).parent.name for f in found.split()] == ["fresh"] * 3
