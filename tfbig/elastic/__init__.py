"""Runs whose ranks come and go while they go on: `tfbig train --elastic`."""
