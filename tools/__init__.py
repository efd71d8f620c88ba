"""What one does with a run, or before one."""
import argparse
from pathlib import Path


def empty_folder(text):
    """Parses a folder to write."""
    folder = Path(text)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise argparse.ArgumentTypeError(f"{folder} exists and is not an empty folder")
    return folder
