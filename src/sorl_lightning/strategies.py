"""FSDP2 with the settings of this project."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy, Strategy
from typing_extensions import override

from sorl_lightning.checkpoints import install_folder, put_back, unfinished
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.sharding import Precision, ShardingPlan

FSDP1 = (
    "trainer.strategy=fsdp (FSDP1) cannot clip gradient norms in Lightning, which training here relies on: "
    "use FSDP2, --config sorl:strategy/fsdp2"
)


class FSDP2(ModelParallelStrategy):
    """Weights, gradients and optimiser sharded over all ranks, each decoder layer by itself.

    Args:
        compute_dtype: type that layers compute in: float32, bfloat16 or float16; None: that of the weights.
        reduce_dtype: type in which gradients are averaged over ranks; None: that of the weights.
        activation_checkpointing: recompute activations of each decoder layer in the backward pass.
        cpu_offload: keep shards of weights, gradients and optimiser in the CPU's memory.
        save_distributed_checkpoint: a folder with a file a rank, which FSDP2 on any number of ranks can resume; false
            is one file, assembled in the memory of rank 0, which any strategy can resume.
        process_group_backend: None is nccl on GPUs, gloo on CPUs.
        timeout_minutes: longest that ranks wait for one another, the slowest rollout included.
    """

    def __init__(
        self,
        compute_dtype: Precision | None = None,
        reduce_dtype: Precision | None = None,
        activation_checkpointing: bool = False,
        cpu_offload: bool = False,
        save_distributed_checkpoint: bool = False,
        process_group_backend: str | None = None,
        timeout_minutes: float = 60.0,
    ) -> None:
        if not timeout_minutes > 0:
            raise ConfigurationError(f"strategy.timeout_minutes must be above 0, got {timeout_minutes}")
        super().__init__(
            tensor_parallel_size=1,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timedelta(minutes=timeout_minutes),
        )
        self.sharding = ShardingPlan(
            compute_dtype=compute_dtype,
            reduce_dtype=reduce_dtype,
            activation_checkpointing=activation_checkpointing,
            cpu_offload=cpu_offload,
        )

    @override
    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if not self._save_distributed_checkpoint:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        target = Path(self.broadcast(filepath))
        super().save_checkpoint(checkpoint, unfinished(target), storage_options)
        self.barrier()
        if self.is_global_zero:
            install_folder(unfinished(target), target)
        self.barrier()

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        if self.is_global_zero:
            put_back(Path(checkpoint_path))
        self.barrier()
        try:
            return super().load_checkpoint(checkpoint_path, weights_only)
        except Exception as error:  # whatever weights, optimisers and foreign files may raise
            raise ConfigurationError(f"ckpt_path {str(checkpoint_path)!r} cannot be resumed from: {error}") from error

    @override
    def model_to_device(self) -> None:
        if not self.sharding.cpu_offload:  # shards stay on the CPU; buffers have moved when they were sharded
            super().model_to_device()


def check_strategy(strategy: Strategy) -> None:
    """Refuse strategies under which gradients or weights would not be what the rest relies on.

    Raises:
        ConfigurationError: neither one device, nor DDP, nor FSDP2.
    """
    if isinstance(strategy, ModelParallelStrategy):
        mesh: Any = strategy.device_mesh
        if mesh["tensor_parallel"].size() > 1:
            raise ConfigurationError(
                f"strategy.tensor_parallel_size must be 1, got {mesh['tensor_parallel'].size()}: tensor parallelism is "
                "an extension point of AgentModule.configure_model"
            )
    elif not isinstance(strategy, (SingleDeviceStrategy, DDPStrategy)):
        name = type(strategy).__name__
        raise ConfigurationError(
            FSDP1
            if name == "FSDPStrategy"
            else f"trainer.strategy {name} is not supported: use ddp or sorl_lightning."
            "strategies.FSDP2 (--config sorl:strategy/fsdp2)"
        )
