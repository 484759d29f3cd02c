"""The doctor, where rank 1's clock is five seconds ahead. usage: doctor_worker.py FLAG..."""

import sys
import time

from tfbig import doctor
from tfbig.command import launched_rank

if __name__ == "__main__":
    if launched_rank() == 1:
        true_time = time.time
        time.time = lambda: true_time() + 5.0
    doctor.main(sys.argv[1:])
