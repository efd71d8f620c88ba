"""What the command lines of this room share."""
import argparse
from pathlib import Path


class PlanningParser(argparse.ArgumentParser):
    """argparse without abbreviations, whose errors are one line, whatever is wrong."""

    def __init__(self, program, text):
        super().__init__(program, description=text, allow_abbrev=False,
                         formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message):
        self.exit(2, "error: " + " ".join(str(message).split()) + "\n")


def make_writable(file):
    """Create the file where it is missing, and its folder. Raises OSError where it cannot be
    written, so before any work is lost."""
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    with open(file, "a"):
        pass
