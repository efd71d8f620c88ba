"""Training that outlives its processes: `torchrun ... -m survive` (__main__.py).

docs/failures.md is its page.
"""
import train    # noqa: F401, first, since it quiets torch, which would print pages at a lost store
