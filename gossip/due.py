"""When an outer optimizer's messages depart and land, by the number of the inner step, from 0 on.
"""
from typing import NamedTuple


class Due(NamedTuple):
    """m: inner steps from one departure to the next. delay: D, from a departure to its landing.
    late: by how many inner steps all this comes after others' (fragments)."""
    m: int
    delay: int = 0
    late: int = 0

    def departs(self, step):
        """Whether a message leaves at the end of this inner step."""
        return (step + 1 - self.late) % self.m == 0

    def lands(self, step):
        """Whether what left D steps before is merged at the end of this one."""
        return self.departs(step - self.delay)
