"""One file for each part of the code; what several share is in harness.py, oracles.py and conftest.py."""

import pytest

pytest.register_assert_rewrite("tests.harness", "tests.oracles")
