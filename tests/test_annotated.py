"""docs/annotated.md: it is made of the present code, names tests that are there, and leaves nothing out."""

import ast
import re

import pytest

from tests.harness import HERE
from tools import annotate

TEXT = annotate.PAGE.read_text()
SUBJECTS = ["N1", "N2", "N3", "Theorem 1", "Eq. 74", "Fig. 2", "Fig. 3", "Fig. 4", "Fig. 5A", "Fig. 5B", "B1",
            "B2", "B3", "B4", "B5", "S1", "S2", "S3", "S4", "S5", "CC1", "CC2", "CC3", "TC1", "TC2"]


def test_the_page_shows_the_present_code():
    assert TEXT == annotate.refreshed(TEXT), "run python -m tools.annotate"


def test_every_block_of_code_follows_a_comment_that_names_it():
    blocks = len(re.findall(r"^```python$", TEXT, re.M))
    assert blocks > 20 and len(annotate.BLOCK.findall(TEXT)) == blocks


def test_a_stale_block_is_refreshed_in_place():
    page = "Above.\n\n<!-- noloco.padded | return -->\n```python\n{}\n```\n\nBelow, `code`.\n"
    fresh = page.format("# noloco.padded\nreturn -(-p.numel() // 16) * 16")
    for stale in ("return 0", "# noloco.padded\n\nreturn p.numel()"):
        assert annotate.refreshed(page.format(stale)) == fresh
    assert annotate.refreshed(fresh) == fresh
    with pytest.raises(ValueError, match="there is no gone in it"):
        annotate.refreshed(fresh.replace("padded | return", "gone"))


def test_every_equation_constraint_and_figure_has_a_heading():
    headings = " ".join(re.findall(r"^#+ (.*)$", TEXT, re.M))
    missing = [subject for subject in SUBJECTS if not re.search(rf"{re.escape(subject)}\b", headings)]
    assert missing == []


def test_inline_mathematics_has_nothing_that_markdown_would_unescape():
    """GitHub takes the backslash from \\, and its like between dollars; not in blocks."""
    text = re.sub(r"^```.*?^```$", "", TEXT, flags=re.M | re.S)
    assert text.count("$") > 100 and text.count("$") % 2 == 0
    assert re.findall(r"\\[^A-Za-z]", text) == []


def test_every_test_that_the_page_names_is_there():
    there = set()
    for file in (HERE / "test_minimal.py", *HERE.glob("tests/test_*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef):
                there.add(f"{file.stem}.{node.name}")
    named = re.findall(r"`(test_\w+\.test_\w+)`", TEXT)
    assert len(named) > 20 and [name for name in named if name not in there] == []


def test_only_code_that_is_there_can_be_put_in():
    assert annotate.code_of("noloco.padded") == ["def padded(p):", "    return -(-p.numel() // 16) * 16"]
    for name, line in (("noloco.gone", "there is no gone in it"), ("nowhere.step", "there is no such file")):
        with pytest.raises(ValueError, match=line):
            annotate.code_of(name)
    with pytest.raises(ValueError, match="no line from there on has 'N9'"):
        annotate.between("it", ["# N1"], "N9")
