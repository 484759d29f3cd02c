"""How many tokens' logits exist at a time. TensorFlow-free."""

MAX_LOGITS = 1 << 25  # of a chunk: 128 MiB in float32
# Fewer spend their time on adding up (V, D) gradients. CPU seconds of head and loss, 2048 tokens,
# D 384, V 50257: whole logits 5.5; chunks of 2048 5.2, 1024 5.8, 667 6.4.
MIN_TOKENS = 1024


def chunk_tokens(vocab_size: int) -> int:
    """Returns the tokens of a chunk.

    Args:
      vocab_size: of what is here of the vocabulary.

    >>> chunk_tokens(50257), chunk_tokens(4096)
    (1024, 8192)
    """
    return max(MIN_TOKENS, MAX_LOGITS // vocab_size)
