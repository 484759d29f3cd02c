"""Which trainer --strategy=horovod is, by how much its ranks share."""

from tfbig.config import Config
from trainers.fully_sharded import GradientShardedTrainer, ParameterShardedTrainer
from trainers.horovod import HorovodTrainer
from trainers.sharded import ShardedTrainer

# By ZeRO's stage.
TRAINERS: tuple[type[HorovodTrainer], ...] = (
    HorovodTrainer,
    ShardedTrainer,
    GradientShardedTrainer,
    ParameterShardedTrainer,
)


def horovod_trainer(config: Config) -> HorovodTrainer:
    """Returns the trainer of a run that holds the whole model in each process, or parts of it."""
    return TRAINERS[config.parallel.sharding_level](config)
