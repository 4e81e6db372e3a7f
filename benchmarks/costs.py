"""What decoding, training and a push of weights cost in seconds, from the data sheet of a GPU and the size of a model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds of a model on GPUs of one kind. Nothing here was measured on a GPU.

    Fields marked *assumed* are guesses of the usual size. The others are published: the model's shape in the config.json
    of Qwen2.5-1.5B, the GPU in NVIDIA's data sheets of the H100 SXM and of DGX H100.

    Attributes:
        parameters: of the policy.
        kv_bytes: of a token's keys and values: 2 x 28 layers x 2 heads x 128 x 2 bytes.
        bytes_per_parameter: of the weights, bfloat16.
        bandwidth: of a GPU's memory, bytes / second.
        rate: of dense bfloat16 matrix products, FLOPs / second.
        memory: of a GPU, bytes.
        link: of collectives between GPUs for each GPU, bytes / second: a node's eight 400 Gb/s adapters together, which
            a ring over nodes can use; within a node NVLink has 450e9 each way.
        push_bandwidth: of new weights to the engine, bytes / second: one 400 Gb/s adapter of the trainer.
        push_latency: of a push: pause, start, finish, resume; seconds, *assumed*.
        wake_latency: of a push where trainer and server share a GPU: the server's sleep and waking; seconds, *assumed*.
        bandwidth_utilisation: share of the memory's bandwidth that decoding reaches, *assumed*.
        decode_utilisation: share of the rate that decoding and prefill reach when they are bound by it, *assumed*.
        training_utilisation: share of the rate that training reaches, *assumed*.
        step_overhead: of a decode step beside the GPU's work: scheduling, sampling; seconds, *assumed*.
        updates: forward and backward passes of a collection, each of which gathers all weights twice and scatters
            the gradients once (FSDP2).
        state_bytes: of a trained parameter: weight and gradient in bfloat16, a float32 copy and two moments.
    """

    parameters: float = 1.5437e9
    kv_bytes: float = 28672.0
    bytes_per_parameter: float = 2.0
    bandwidth: float = 3.35e12
    rate: float = 989e12
    memory: float = 80e9
    link: float = 400e9
    push_bandwidth: float = 50e9
    push_latency: float = 0.5
    wake_latency: float = 2.0
    bandwidth_utilisation: float = 0.7
    decode_utilisation: float = 0.5
    training_utilisation: float = 0.35
    step_overhead: float = 0.002
    updates: int = 2
    state_bytes: float = 16.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 0.0 if name in ("push_latency", "wake_latency", "step_overhead", "kv_bytes") else 1e-12
            if not value >= least:
                raise ValueError(f"Costs.{name} must be {'0 or more' if not least else 'above 0'}, got {value}")

    @property
    def weight_bytes(self) -> float:
        """Of the policy as it is served and pushed."""
        return self.parameters * self.bytes_per_parameter

    def step(self, requests: int, context: float) -> float:
        """Seconds in which every one of ``requests`` gets a token; ``context`` tokens stand in their caches together."""
        memory = (self.weight_bytes + self.kv_bytes * context) / (self.bandwidth * self.bandwidth_utilisation)
        arithmetic = 2.0 * self.parameters * requests / (self.rate * self.decode_utilisation)
        return self.step_overhead + max(memory, arithmetic)

    def prefill(self, tokens: float) -> float:
        """Seconds to read ``tokens`` of a prompt that are not in the cache yet."""
        return 2.0 * self.parameters * tokens / (self.rate * self.decode_utilisation)

    def training(self, tokens: float, gpus: int) -> float:
        """Seconds to train a collection: 6 FLOPs a parameter and token, or the collectives, which hide behind them."""
        arithmetic = 6.0 * self.parameters * tokens / (self.rate * self.training_utilisation * gpus)
        collectives = self.updates * 3.0 * self.weight_bytes / self.link if gpus > 1 else 0.0
        return max(arithmetic, collectives)

    def push(self, shared: bool) -> float:
        """Seconds that new weights take to the engine; ``shared``: it is on the trainer's own GPUs."""
        if shared:
            return self.wake_latency + 2.0 * self.weight_bytes / self.bandwidth  # read and written once
        return self.push_latency + self.weight_bytes / self.push_bandwidth

    def fits(self, training_gpus: int) -> bool:
        """Whether weights, gradients and optimiser fit beside half a GPU of activations."""
        return self.state_bytes * self.parameters / training_gpus <= self.memory / 2
