"""Files that change as a whole or not at all."""
import contextlib
import os


@contextlib.contextmanager
def atomic(file):
    """The file, open to write bytes; it changes as a whole or not at all."""
    half = file.with_suffix(".tmp")
    try:
        with open(half, "wb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        os.replace(half, file)
    finally:
        half.unlink(missing_ok=True)            # it is there only after an error


def replace(file, text):
    """Write a text file, as a whole or not at all."""
    with atomic(file) as out:
        out.write(text.encode())
