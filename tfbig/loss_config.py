"""What is minimised besides the cross-entropy, as a frozen dataclass. TensorFlow-free."""

from collections.abc import Iterator
from dataclasses import dataclass

from tfbig.number_rules import as_float32, way_out


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """What training minimises; reported losses are the plain cross-entropy whatever these are."""

    z_loss: float = 0.0
    """Weight of (log of the softmax's sum)^2 in what is minimised, e.g. 1e-4; 0 means none."""
    label_smoothing: float = 0.0
    """Share of a label that is spread over the vocabulary in what is minimised; 0 means none."""

    @property
    def is_plain(self) -> bool:
        """Whether the cross-entropy alone is minimised."""
        return self.z_loss == 0.0 and self.label_smoothing == 0.0


def loss_problems(config: LossConfig) -> Iterator[str]:
    """Yields one line for each rule that the section breaks."""
    if not 0.0 <= config.z_loss <= 1.0:
        yield (
            f"--z_loss={config.z_loss} must be at least 0 and at most 1: "
            f"{way_out(config, 'z_loss')}"
        )
    if not 0.0 <= as_float32(config.label_smoothing) < 1.0:
        yield (
            f"--label_smoothing={config.label_smoothing} must be at least 0 and below 1, in float32"
            f" too: {way_out(config, 'label_smoothing')}"
        )
