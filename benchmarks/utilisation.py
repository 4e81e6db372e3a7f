"""How much of a processor's matrix rate a training step uses, and what normalization and a divergence add to it.

    python benchmarks/utilisation.py --output utilisation.json
    python benchmarks/utilisation.py --device cuda --dtype bfloat16 --hidden 896 --layers 24 --heads 14 --kv_heads 2 \
        --intermediate 4864 --vocabulary 151936 --rows 32 --prompt 512 --turns 8 --turn 256   # 0.5B parameters, a GPU

Siblings of two prompts, of which half of each turn is generated. A step is the forward and backward pass of token
log-probabilities. The work counted is that of the model over the tokens as rows, padding left out, recomputed logits
not counted: 2 FLOPs a parameter and token forward, twice as many backward, attention over what is visible. A prompt that
siblings share is counted once, as it is computed. Seconds are of the wall on a GPU and of the processor on a CPU.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from sorl_lightning.functional.chunked_divergence import chunked_divergence
from sorl_lightning.functional.lines import Line, line_of, shortest_on
from sorl_lightning.functional.turns import row_lengths
from sorl_lightning.networks import PolicyNetwork

Rows = tuple[Tensor, Tensor, Tensor]


def seconds_of(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median over ``repeats`` after a first."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return clock()

    work()
    spent = []
    for _ in range(repeats):
        start = now()
        work()
        spent.append(now() - start)
    return statistics.median(spent)


def matrix_rate(device: torch.device, dtype: torch.dtype, repeats: int) -> float:
    """FLOPs a second of a product of square matrices."""
    size = 1024 if device.type == "cpu" else 8192
    left, right = torch.randn(2, size, size, device=device).to(dtype)
    return 2 * size**3 / seconds_of(lambda: left @ right, device, 4 * repeats)


def rows_of(options: argparse.Namespace, device: torch.device) -> Rows:
    """Ids, positions, and what was generated."""
    generator = torch.Generator().manual_seed(0)
    width = options.prompt + options.turns * options.turn
    ids = torch.randint(options.vocabulary, (options.rows, width), generator=generator)
    half = options.rows // 2
    ids[:half, : options.prompt], ids[half:, : options.prompt] = ids[0, : options.prompt], ids[-1, : options.prompt]
    places = torch.arange(width).expand(ids.shape)
    generated = (places >= options.prompt) & ((places - options.prompt) % options.turn < options.turn // 2)
    return ids.to(device), places.to(device), generated.to(device)


def flops(model: Qwen2ForCausalLM, line: Line, generated: Tensor) -> float:
    """Of a step: layers and attention over the line, logits of the generated tokens."""
    config = model.config
    layers = sum(p.numel() for p in model.model.layers.parameters())
    seen, ends = 0.0, []
    for size, opening in line.pieces:
        before = ends[opening] if opening is not None else 0
        seen += size * before + size * (size + 1) / 2
        ends.append(before + size)
    width = config.num_attention_heads * config.head_dim
    attention = 4 * seen * width * config.num_hidden_layers
    logits = 2 * int(generated.sum()) * config.vocab_size * config.hidden_size
    return 3 * (2 * layers * len(line.source) + attention + logits)


def versions(policy: PolicyNetwork, teacher: PolicyNetwork, rows: Rows) -> dict[str, Callable[[], None]]:
    """A step, the same with a second backward pass as normalization takes it, and with a teacher's divergence."""

    def step() -> None:
        policy.zero_grad()
        policy(*rows)[0].sum().backward()

    def normalized() -> None:
        policy.zero_grad()
        logprobs = policy(*rows)[0]
        trained = [p for p in policy.parameters() if p.requires_grad]
        torch.autograd.grad(logprobs[:, ::2].sum(), trained, retain_graph=True, allow_unused=True)
        logprobs.sum().backward()

    def distilled() -> None:
        policy.zero_grad()
        with torch.no_grad():
            theirs = teacher.readout(*rows)
        policy(*rows, compare=lambda own, _: chunked_divergence(*own, *theirs))[2].sum().backward()

    return {"step": step, "with normalization": normalized, "distillation": distilled}


def measure(options: argparse.Namespace) -> dict[str, object]:
    """All figures."""
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=options.vocabulary, hidden_size=options.hidden, num_hidden_layers=options.layers,
        intermediate_size=options.intermediate, num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads, head_dim=options.hidden // options.heads, tie_word_embeddings=True,
        max_position_embeddings=options.prompt + options.turns * options.turn,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).to(device, dtype)
    policy, teacher = PolicyNetwork(model), PolicyNetwork(copy.deepcopy(model)).requires_grad_(False)
    rows = rows_of(options, device)
    line = line_of(rows[0], row_lengths(rows[2]), shortest_on(device))
    rate, work = matrix_rate(device, dtype, options.repeats), flops(model, line, rows[2])
    found = {}
    for name, version in versions(policy, teacher, rows).items():
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = seconds_of(version, device, options.repeats)
        cuda = device.type == "cuda"
        peak = torch.cuda.max_memory_allocated() if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        found[name] = {"seconds": seconds, "peak_bytes_so_far" if not cuda else "peak_bytes": peak}
    tokens = row_lengths(rows[2]).sum().item()
    seconds = found["step"]["seconds"]
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "row_tokens": tokens,
        "computed_tokens": len(line.source),
        "generated_tokens": int(rows[2].sum()),
        "matrix_flops_per_second": rate,
        "step_flops": work,
        "utilisation": work / seconds / rate,
        "row_tokens_per_second": tokens / seconds,
        "normalization": found["with normalization"]["seconds"] / seconds,
        "distillation": found["distillation"]["seconds"] / seconds,
        "versions": found,
    }


def main() -> None:
    """Parse, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    shape = {"hidden": 256, "layers": 6, "heads": 4, "kv_heads": 1, "intermediate": 768, "vocabulary": 8192}
    for name, value in {**shape, "rows": 16, "prompt": 256, "turns": 8, "turn": 80, "repeats": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.device == "cpu":
        torch.set_num_threads(1)
    found = measure(options)
    print(
        f"{found['parameters'] / 1e6:.0f}M parameters, {found['row_tokens']} tokens of rows, {found['computed_tokens']} "
        f"computed; matrix rate {found['matrix_flops_per_second'] / 1e9:.0f} GFLOP/s, utilisation "
        f"{found['utilisation']:.0%}, {found['row_tokens_per_second']:.0f} tokens/s; times a step: with a second backward "
        f"pass {found['normalization']:.2f}, distillation {found['distillation']:.2f}"
    )
    if options.output:
        settings = {name: value for name, value in vars(options).items() if name != "output"}
        machine = platform.machine() if options.device == "cpu" else torch.cuda.get_device_name()
        report = {"settings": settings, "torch": torch.__version__, "machine": machine, **found}
        options.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
