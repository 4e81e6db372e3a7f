"""How weights travel from the trainer into vLLM servers."""

from sorl_lightning.rollout.vllm.transports.adapters import AdapterTransport
from sorl_lightning.rollout.vllm.transports.buckets import Bucket, BucketTransport, buckets
from sorl_lightning.rollout.vllm.transports.disk import DiskTransport
from sorl_lightning.rollout.vllm.transports.gloo import GlooTransport
from sorl_lightning.rollout.vllm.transports.ipc import IPCTransport
from sorl_lightning.rollout.vllm.transports.nccl import NCCLTransport
from sorl_lightning.rollout.vllm.transports.transport import Post, WeightTransport

__all__ = [
    "AdapterTransport",
    "Bucket",
    "BucketTransport",
    "DiskTransport",
    "GlooTransport",
    "IPCTransport",
    "NCCLTransport",
    "Post",
    "WeightTransport",
    "buckets",
]
