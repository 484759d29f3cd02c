"""Seconds that one device needs for a block's, the embedding's and the head's passes. TF-free.

A matrix product takes what the slower of arithmetic and memory takes (the roofline, Williams et
al. 2009), in whole waves of tiles; every other operation streams its operands once. Nothing here
was fitted but a device's two shares, `matmul` and `bandwidth`.

B = rows, T = positions, D = width, A = all heads' width, F = feed-forward width, H = heads,
V = vocabulary, t = tensor parallel degree.
"""

import math
from dataclasses import dataclass

from tfbig.config import Config
from tfbig.planner.cluster import Device
from tfbig.planner.software import Software
from tfbig.variables import part_of
from trainers.activations import COMPUTE_BYTES, group_size, is_blockwise
from trainers.state_bytes import HAVE_TOTALS, rank_counts

# Tiles (rows, columns) of an output that a processor computes, and their speed against the
# largest: NVIDIA, Matrix Multiplication Background User's Guide, 2023, section 3 (figure 4).
_TILES = ((256, 128, 1.0), (128, 128, 0.95), (128, 64, 0.82), (64, 64, 0.65))
_FLASH_BACKWARD = 2.5  # products of the backward pass per product of the forward pass
_CAUSAL = 0.5  # of the squares, fused attention computes the visible half


@dataclass(frozen=True)
class Traffic:
    """Times that each tensor of a block is read or written beside matrix products.

    Each field is (forward, backward): `hidden` of (B, T, D), norms and residual sums; `dropped` of
    the same where dropout is on; `heads` of (B, T, A/t); `wide` of (B, T, F/t); `scores` and
    `dropped_scores` of (B, H/t, T, T); `turned` of queries and keys under rotary embedding;
    `kernels` counts operations.
    """

    hidden: tuple[float, float]
    dropped: tuple[float, float]
    heads: tuple[float, float]
    wide: tuple[float, float]
    scores: tuple[float, float]
    dropped_scores: tuple[float, float]
    turned: tuple[float, float]
    kernels: tuple[float, float]


# fused: two layer norms (read, write: 4; backward 5 each, their input's gradient and their
# parameters' are two kernels), two sums of bias, dropout and residual in one kernel (3 each;
# backward the bias' sum, 1, and the residual's, 3, each), one transpose of attention's output,
# bias and GELU in one kernel, masked softmax in one.
# eager: the same operations one by one; softmax after a scaling and a masking.
# compiled: residual sums join the norms.
# neox: fused softmax and GELU, queries and keys copied where a part of them is turned.
# tensorflow: norms in float32 of several operations, GELU of nine.
TRAFFIC = {
    "fused": Traffic((10, 18), (1, 5), (2, 11), (2, 4), (2, 3), (2.5, 2.5), (6, 6), (20, 40)),
    "eager": Traffic((10, 18), (5, 5), (6, 12), (2, 4), (6, 7), (2.5, 2.5), (12, 12), (35, 70)),
    "neox": Traffic((10, 18), (5, 5), (10, 18), (2, 4), (2, 3), (2.5, 2.5), (12, 12), (40, 80)),
    "compiled": Traffic((8, 11), (1, 3), (2, 6), (2, 3), (2, 3), (1, 1), (3, 3), (15, 30)),
    "tensorflow": Traffic((20, 28), (4, 4), (6, 12), (18, 22), (8, 9), (4, 4), (12, 12), (60, 120)),
}
# Bytes read and written for each logit beside the product, forward and backward: to float32,
# maximum, exponential and sum, label; then softmax minus one-hot and back to the narrow dtype.
_LOGIT_BYTES = (22.0, 14.0)


@dataclass(frozen=True)
class Cost:
    """One microbatch's passes through a part of the model, on one device.

    Args:
      forward: seconds.
      backward: seconds, without what is computed again.
      again: seconds of the recomputation that the backward pass begins with.
      flops: of the matrix products, recomputation included.
    """

    forward: float
    backward: float
    again: float = 0.0
    flops: float = 0.0


class Kernels:
    """Costs of one layout's parts.

    Args:
      config: of the run.
      rows: sequences of a microbatch.
      device: that runs them.
      software: whose kernels they are.
      recompute: as in trainers/activations.py.
    """

    def __init__(
        self, config: Config, rows: int, device: Device, software: Software, recompute: str
    ) -> None:
        self._config, self._device, self._recompute = config, device, recompute
        self._software = software
        parallel, model = config.parallel, config.model
        self._rows, self._length = rows, config.data.sequence_length
        self._tokens = rows * self._length
        self._tensor = parallel.tensor_parallel_degree
        self._element = COMPUTE_BYTES[parallel.precision]
        self._peak = device.peak_flops(parallel.precision) * device.matmul
        self._bandwidth = device.memory_bandwidth * device.bandwidth
        self._traffic = TRAFFIC[
            "compiled" if parallel.jit_compile and software.name == "tfbig" else software.kernels
        ]
        self._heads = model.num_heads / self._tensor
        self._attention = model.num_heads * model.attention_head_dim / self._tensor
        self._wide = model.hidden_dim / self._tensor
        counts = rank_counts(model, tuple(config.optimizer.freeze), 1, (0, 1), False, False)
        own = software.name == "tfbig"
        self._in_place = parallel.strategy in HAVE_TOTALS
        self._has_totals = own and (self._in_place or parallel.microbatches > 1)
        self._on_host = own and not device.units
        # Of a frozen weight there is no gradient; under adapters all kernels are frozen.
        self._trained = 0.0 if model.lora_rank else counts.trained / counts.total

    def matmul(self, rows: float, columns: float, depth: float, count: float = 1.0) -> float:
        """Returns the seconds of `count` products (rows, depth) x (depth, columns)."""
        flops = 2.0 * rows * columns * depth * count
        moved = self._element * count * (rows * depth + depth * columns + rows * columns)
        return max(flops / self._peak * self._waves(rows, columns, count), moved / self._bandwidth)

    def _waves(self, rows: float, columns: float, count: float) -> float:
        """Returns by how much whole tiles in whole waves lengthen a product, at best."""
        units = self._device.units
        if not units:
            return 1.0

        def stretch(tile: tuple[int, int, float]) -> float:
            high, wide, speed = tile
            tiles = math.ceil(rows / high) * math.ceil(columns / wide) * count
            area = math.ceil(tiles / units) * units * high * wide
            return area / (rows * columns * count) / speed

        return min(map(stretch, _TILES))

    def _stream(self, elements: float, times: float) -> float:
        return elements * times * self._element / self._bandwidth

    def _linear(self, count_of_passes: int) -> float:
        """Returns the seconds of a block's four products with weights, forward or backward."""
        width, tokens = self._config.model.embed_dim, self._tokens
        shapes = (
            (3 * self._attention, width),
            (width, self._attention),
            (self._wide, width),
            (width, self._wide),
        )
        rank = self._config.model.lora_rank
        narrow = [(rank, depth) for _, depth in shapes] + [(columns, rank) for columns, _ in shapes]
        adapters = sum(self.matmul(tokens, *shape) for shape in narrow) if rank else 0.0
        if count_of_passes == 1:
            return adapters + sum(self.matmul(tokens, columns, depth) for columns, depth in shapes)
        inputs = sum(self.matmul(tokens, depth, columns) for columns, depth in shapes)
        weights = sum(self.matmul(depth, columns, tokens) for columns, depth in shapes)
        return inputs + self._trained * weights + 2 * adapters

    def _elementwise(self, direction: int) -> float:
        """Returns the seconds of norms, residuals, activation; direction 0 forward, 1 backward."""
        config, traffic = self._config, self._traffic
        shared = self._tensor if config.parallel.sequence_parallel else 1
        hidden = self._tokens * config.model.embed_dim / shared
        seconds = self._stream(hidden, traffic.hidden[direction])
        if config.model.dropout > 0:
            seconds += self._stream(hidden, traffic.dropped[direction])
        heads = self._tokens * self._attention
        seconds += self._stream(heads, traffic.heads[direction])
        turned = 2 * heads * config.model.rotary_dim / config.model.attention_head_dim
        seconds += self._stream(turned, traffic.turned[direction])
        seconds += self._stream(self._tokens * self._wide, traffic.wide[direction])
        return seconds + traffic.kernels[direction] * self._device.kernel_seconds

    def _attend(self, direction: int) -> float:
        """Returns the seconds of attention between its projections."""
        depth, length = self._config.model.attention_head_dim, self._length
        count = self._rows * self._heads
        if self._software.attention != "own":
            flops = 4.0 * count * length**2 * depth * _CAUSAL
            flops *= _FLASH_BACKWARD if direction else 1.0
            share = self._device.flash.get(self._software.attention, self._device.flash["flash"])
            return flops / (self._peak / self._device.matmul * share)
        products = [(length, length, depth), (length, depth, length)]  # scores, output
        if direction:
            products *= 2
        blockwise = is_blockwise(self._config)
        if blockwise and direction:
            products.append(products[0])  # scores are made again
        seconds = sum(self.matmul(*shape, count=count) for shape in products)
        scores = count * length**2
        seconds += self._stream(scores, self._traffic.scores[direction])
        if self._config.model.attention_dropout > 0:
            seconds += self._stream(scores, self._traffic.dropped_scores[direction])
        return seconds * (_CAUSAL if blockwise else 1.0)

    def _gradient(self, weights: float) -> float:
        """Returns the seconds that weights' float32 gradients take beyond their products.

        A microbatch's are added to the step's totals, in place or into new ones. In a host's memory
        all gradients of a pass lie where nothing lay before, as glibc gives back what was freed:
        each page is cleared first, as in the streaming that was measured (read and written).
        """
        once = 4 * weights
        seconds = 3 * once / self._bandwidth if self._has_totals else 0.0
        if self._on_host:
            new = 2 if self._has_totals and not self._in_place else 1
            seconds += new * 2 * once / self._device.memory_bandwidth
        return seconds

    def attention_flops(self) -> float:
        """Returns the FLOPs of attention's two products, the whole square, forward."""
        return 4.0 * self._rows * self._length**2 * self._attention

    def linear_flops(self) -> float:
        """Returns the FLOPs of a block's products with weights, forward."""
        return 2.0 * self._tokens * self._weights()

    def _weights(self) -> float:
        """Returns the elements of a block's four products' weights."""
        return self._config.model.embed_dim * (4 * self._attention + 2 * self._wide)

    def block(self) -> Cost:
        """Returns the cost of one block."""
        attend = self._attend(0)
        forward = self._linear(1) + self._elementwise(0) + attend
        backward = self._linear(2) + self._elementwise(1) + self._attend(1)
        backward += self._gradient(self._trained * self._weights())
        flops = (2 + self._trained) * self.linear_flops() + 3 * self.attention_flops()
        again = 0.0
        if group_size(self._recompute):
            again, flops = forward, flops + self.linear_flops() + self.attention_flops()
        elif self._recompute == "attention":
            again, flops = attend, flops + self.attention_flops()
        elif self._software.repeats_products:
            share = self._software.repeats_products
            again = share * self._linear(1) + self._elementwise(0)
            flops += share * self.linear_flops()
        return Cost(forward, backward, again, flops)

    def embedding(self) -> Cost:
        """Returns the cost of looking tokens up, and of their gradient."""
        width = self._config.model.embed_dim
        hidden = self._tokens * width
        table = part_of(self._config.model.vocab_size, self._tensor, 0)[1] * width
        backward = self._stream(hidden, 4) + self._stream(table, 3) + self._gradient(table)
        return Cost(self._stream(hidden, 4), backward)

    def head(self) -> Cost:
        """Returns the cost of the final norm, the product with the vocabulary and the loss."""
        width = self._config.model.embed_dim
        own = part_of(self._config.model.vocab_size, self._tensor, 0)[1]
        norm = self._stream(self._tokens * width, 2)
        logits = self._tokens * own / self._bandwidth
        forward = self.matmul(self._tokens, own, width) + logits * _LOGIT_BYTES[0] + norm
        backward = self.matmul(self._tokens, width, own) + self.matmul(width, own, self._tokens)
        backward += logits * _LOGIT_BYTES[1] + 2 * norm + self._gradient(own * width)
        return Cost(forward, backward, 0.0, 6.0 * self._tokens * own * width)
