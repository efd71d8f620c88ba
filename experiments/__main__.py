"""All rows of README's table that need no root: tables, pictures, expected numbers.

    python -m experiments [ROW ...] [--scale try|plot|full] [--plot]

At the scale "plot" the last lines say each number, what was expected, and whether it is within the
tolerance. The exit status is 1 where a row failed or a number is outside. experiments/harness.py
has the scales.
"""
from experiments import (cities, failures, gamma, gap, many, missing, peers, race, routing,
                         shorter, skipping, sync, together)
from experiments.harness import command

# The short ones first.
ROWS = (shorter.ROW, sync.ROW, gamma.ROW, peers.ROW, failures.ROW, routing.ROW, skipping.ROW,
        missing.ROW, together.ROW, many.ROW, gap.ROW)
BETWEEN_HOSTS = race.ROW, cities.ROW        # each by its own command, as root

if __name__ == "__main__":
    command(__doc__, *ROWS)
