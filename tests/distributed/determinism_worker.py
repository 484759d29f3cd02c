"""Trains three times in this process: straight, straight again, and stopped and resumed.

usage: determinism_worker.py FOLDER FLAG ...
"""

import sys

from tfbig import train

STEPS, STOP = 5, 3


def main() -> None:
    folder, flags = sys.argv[1], sys.argv[2:]
    for name, ends in {"first": [STEPS], "second": [STEPS], "resumed": [STOP, STEPS]}.items():
        for steps in ends:
            assert train._body([*flags, f"--run_dir={folder}/{name}", f"--steps={steps}"]) == 0


if __name__ == "__main__":
    main()
