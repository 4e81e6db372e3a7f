"""What only a CUDA device can show."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu


def logprobs_of(dtype: torch.dtype, attention: str = "sdpa") -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of a row on the device, by chunks and from whole logits."""
    from conftest import TINY
    from sorl_lightning.networks import PolicyNetwork

    model, _ = TINY.load()
    model.set_attn_implementation(attention)
    network = PolicyNetwork(model.to("cuda", dtype))
    ids = torch.arange(3, 203, device="cuda")[None]
    generated = torch.ones_like(ids, dtype=torch.bool)
    chunked, _ = network(ids, torch.arange(200, device="cuda")[None], generated)
    logits = model(input_ids=ids).logits.float()
    plain = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return chunked[:, 1:].float(), plain


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)])
def test_chunked_logprobs_are_the_plain_ones(dtype, tolerance) -> None:
    """The chunked head changes memory and not values, in float32 and in bfloat16."""
    chunked, plain = logprobs_of(dtype)
    torch.testing.assert_close(chunked, plain, rtol=0, atol=tolerance)


def test_fused_attention_is_the_eager_one() -> None:
    """Flash or memory-efficient SDPA under bfloat16 stays within bfloat16's rounding of eager attention."""
    torch.testing.assert_close(
        logprobs_of(torch.bfloat16, "sdpa")[0], logprobs_of(torch.bfloat16, "eager")[0], rtol=0, atol=1e-1
    )


@pytest.mark.parametrize("compute_dtype", [None, "bfloat16"])
def test_one_sharded_device_trains_as_one_that_is_not(compute_dtype) -> None:
    """FSDP2 on one GPU gives the update of a single device; computing in bfloat16 stays near it, weights in float32."""
    from processes import launch
    from scenarios import cuda_fit

    (plain,) = launch(cuda_fit, 1, None, None, seconds=300.0)
    (sharded,) = launch(cuda_fit, 1, "fsdp2", compute_dtype, seconds=300.0)
    assert sharded["dtype"] == "torch.float32"
    close = torch.tensor(sharded["parameters"]) - torch.tensor(plain["parameters"])
    assert float(close.abs().max()) < (1e-5 if compute_dtype is None else 5e-2)
