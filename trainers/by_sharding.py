"""Which trainer a strategy on Horovod is, by how much its data ranks share."""

from tfbig.config import Config
from trainers.fully_sharded import GradientShardedTrainer, ParameterShardedTrainer
from trainers.horovod import HorovodTrainer
from trainers.pipeline import PipelineTrainer
from trainers.sharded import ShardedTrainer
from trainers.sharded_mesh import ShardedMeshTrainer

# By ZeRO's stage.
HOROVOD: tuple[type[HorovodTrainer], ...] = (
    HorovodTrainer,
    ShardedTrainer,
    GradientShardedTrainer,
    ParameterShardedTrainer,
)
PIPELINE: tuple[type[PipelineTrainer], ...] = (
    PipelineTrainer,
    PipelineTrainer,
    ShardedMeshTrainer,
    ShardedMeshTrainer,
)


def horovod_trainer(config: Config) -> HorovodTrainer:
    """Returns the trainer of --strategy=horovod."""
    return HOROVOD[config.parallel.sharding_level](config)


def pipeline_trainer(config: Config) -> PipelineTrainer:
    """Returns the trainer of --strategy=pipeline."""
    return PIPELINE[config.parallel.sharding_level](config)
