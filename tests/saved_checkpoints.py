"""Checkpoints that tests save."""

import math

import numpy as np

from tfbig.checkpoint import list_checkpoints
from tfbig.checkpoint_format import RunState, Slice
from tfbig.checkpoint_writer import CheckpointWriter


def whole(path, array, is_writer=True):
    return Slice(path, array.shape, (0,) * array.ndim, array, is_writer)


def part(path, array, rectangle, is_writer=True):
    return Slice(path, array.shape, rectangle.start, array[rectangle.slices], is_writer)


def save(checkpoints_dir, step, *slices_by_rank, attempt="a", **fields):
    """Saves with several ranks in turn, rank 0 last, as it waits for the others."""
    num_ranks = len(slices_by_rank)
    for rank in reversed(range(num_ranks)):
        writer = CheckpointWriter(checkpoints_dir, rank, num_ranks, timeout_seconds=0.1)
        path = writer.save(step, slices_by_rank[rank], RunState(**fields), attempt)
    return path


def matrix(seed=0, shape=(4, 6)):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def steps(checkpoints_dir):
    return [info.step for info in list_checkpoints(checkpoints_dir)]


def save_many(checkpoints_dir):
    losses = {10: 3.0, 20: 1.0, 30: math.nan, 40: 1.0, 50: 2.0, 60: 2.5}
    for step, loss in losses.items():
        save(checkpoints_dir, step, [whole("x", matrix())], metadata={"eval_loss": loss})
