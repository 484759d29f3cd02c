"""Prints what the rules see in a run now, as JSON: `python -m tfbig.profiler.live_findings RUN`."""

import os
import sys
import time

import orjson

from tfbig.profiler.rules.catalogue import look_at
from tfbig.profiler.run_data import read_run


def main() -> None:
    """Prints the findings of the run that the first argument names."""
    os.nice(10)  # the steps go first
    findings = [finding.to_dict() for finding in look_at(read_run(sys.argv[1], time.time()))]
    sys.stdout.buffer.write(orjson.dumps(findings, option=orjson.OPT_SERIALIZE_NUMPY))


if __name__ == "__main__":
    main()
