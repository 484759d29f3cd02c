"""What `tfbig serve` can be told. TensorFlow-free."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Which model answers, where, and within which limits."""

    run: str = ""
    """Run folder to read."""
    checkpoint: int = -1
    """Step of the checkpoint; -1 means the newest."""
    model_name: str = ""
    """Name that clients ask for; empty means the run folder's."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 lets other machines in."""
    port: int = 8080
    """Port to listen on; 0 takes a free one."""
    allowed_hosts: tuple[str, ...] = ()
    """Further names of a server on 127.0.0.1, e.g. a proxy's; repeat the flag for more."""
    api_key: str = ""
    """Bearer token that clients must send; empty takes TFBIG_API_KEY's, or lets anyone in."""
    num_rows: int = 8
    """Texts that are written at the same time; others wait."""
    queue_size: int = 64
    """Texts that may wait; further requests get 429 and when to try again."""
    request_seconds: float = 60.0
    """Seconds after which a request that is not answered yet ends with 504."""
    body_seconds: float = 10.0
    """Seconds in which a request's head must have arrived, and again its body."""
    max_connections: int = 256
    """Connections whose requests are answered; those beyond get 503, and twice as many nothing."""
    max_body_bytes: int = 6_291_456
    """Largest body of a request; SageMaker's own limit is this."""
    max_tokens_limit: int = 0
    """Most tokens one text may ask for; 0 means the model's positions."""
    max_choices: int = 8
    """Most texts one request may ask for: its prompts x n."""
    drain_seconds: float = 15.0
    """Seconds that requests under way are given after SIGTERM; horovodrun kills after 20."""
    log_prompts: bool = False
    """Whether prompts and answers are written to the log."""

    def __repr__(self) -> str:
        return f"ServeConfig(run={self.run!r}, host={self.host!r}, port={self.port})"  # no key
