"""What each room may import, where each equation is defined, and how long things may be."""

import ast
import re

import pytest

from tests.harness import HERE

ROOMS = ("noloco.py", "model.py", "skippipe.py", "train.py", "bench_sync.py", "test_minimal.py",
         "gossip", "planning", "survive", "tools", "experiments", "tests")
IMPORTS = {     # of ours; a room that is not named here may import everything
    "noloco.py": [], "model.py": [],
    "bench_sync.py": ["noloco"],
    "skippipe.py": [],
    "gossip": ["noloco", "gossip"],
    "train.py": ["noloco", "model", "skippipe", "gossip.more"],
    "planning": ["skippipe", "planning"],
    "survive": ["noloco", "skippipe", "train", "gossip", "planning", "survive"],
    "tools": ["noloco", "model", "skippipe", "train", "gossip", "planning", "tools"],
}
# Options of train.py and a program of its own: nothing in their rooms imports them.
FILES = {
    "gossip/more.py": ["skippipe", "gossip", "planning.training", "tools.tokenizer"],
    "planning/measure.py": ["train"],
}
EQUATIONS = {"N": "noloco.py", "S": "skippipe.py", "B": "bench_sync.py", "M": "gossip/onebyte.py",
             "Q": "gossip/sums.py", "B5": "experiments/sync.py"}       # B5 is ours, not the paper's


def sources(*rooms):
    """{path from the repository's root: text} of files, folders' Python files, and patterns."""
    found = [path for room in rooms for path in HERE.glob(room)]
    files = [file for path in found for file in ([path] if path.is_file() else path.rglob("*.py"))]
    return {file.relative_to(HERE).as_posix(): file.read_text() for file in files}


@pytest.mark.parametrize("room", IMPORTS)
def test_imports_point_down(room):
    ours = {name.removesuffix(".py") for name in ROOMS}
    for file, text in sources(room).items():
        for node in (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Import | ast.ImportFrom)):
            before = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for name in (before + alias.name for alias in node.names):
                lower = FILES.get(file, IMPORTS[room])
                allowed = any(f"{name}.".startswith(f"{low}.") for low in lower)
                assert allowed or name.split(".")[0] not in ours, f"{file} imports {name}"


def test_an_equations_number_is_defined_once():
    found = []
    for file, text in sources(*ROOMS).items():
        numbers = re.findall(r"\(([NSBMQ]\d)\)$", ast.get_docstring(ast.parse(text)) or "", re.M)
        found += numbers
        for number in numbers:
            assert EQUATIONS.get(number, EQUATIONS[number[0]]) == file, f"{file} defines {number}"
    assert sorted(found) == "B1 B2 B3 B4 B5 M1 M2 M3 M4 N1 N2 N3 Q1 Q2 Q3 S1 S2 S3 S4 S5".split()


# Alarms with room to spare: what is longer is hardly read once. Files in tests/ may be longer.
LINES = {"skippipe.py": 700, "train.py": 1475, "test_minimal.py": 850}


def own_files():
    """{path: text} of all Python files but those in tests/."""
    rooms = [room for room in ROOMS if room != "tests"]
    return sources(*rooms)


def test_no_line_is_over_100_columns():
    long_lines = [f"{file}:{number}" for file, text in own_files().items()
                  for number, line in enumerate(text.splitlines(), 1) if len(line) > 100]
    assert long_lines == []


def test_no_function_is_over_60_lines():
    for file, text in own_files().items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 60, f"{file}: {node.name}"


def test_no_file_is_over_450_lines():
    for file, text in own_files().items():
        assert len(text.splitlines()) <= LINES.get(file, 450), file


def places_in(text):
    """The anchors of a page: of its headings, as GitHub names them, and those that it gives."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)     # comments are no headings
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    named = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    return {*named, *re.findall(r'<a id="([^"]+)">', text)}


def test_links_between_pages_lead_somewhere():
    pages = {file: file.read_text() for file in (HERE / "README.md", *HERE.glob("docs/*.md"))}
    lost = []
    for file, text in pages.items():
        for path, place in re.findall(r"\]\(([^)#:]*)#?([^):]*)\)", text):
            target = (file.parent / path).resolve() if path else file
            exists = target.exists() or "actions/workflows" in path         # the badge, on GitHub
            if not exists or place and place not in places_in(pages[target]):
                lost.append((file.name, path, place))
    assert lost == []
