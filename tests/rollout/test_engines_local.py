from __future__ import annotations

import asyncio
import copy
import math
import pickle
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from local_engine import (
    KEYS,
    SHAPE,
    VOCABULARY,
    ask,
    full_logprobs,
    llama,
    logprobs_of,
    play_all,
    qwen2,
    qwen3,
    request,
    serve,
    tokens_of,
)
from sorl_lightning.errors import ConfigurationError, RolloutError
from sorl_lightning.rollout.engine import RolloutEngine, TrajectoryKey, derive_seed
from sorl_lightning.rollout.engines.local import LocalEngine
from sorl_lightning.rollout.engines.open_turn import common_prefix, group_by_length
from sorl_lightning.rollout.engines.sampling import draw
from sorl_lightning.types import Completion


def test_it_is_an_engine() -> None:
    assert isinstance(LocalEngine(), RolloutEngine)


@pytest.mark.parametrize(
    "model",
    [
        llama(),
        llama(num_key_value_heads=4, tie_word_embeddings=True),
        llama(attn_implementation="eager"),
        qwen2(tie_word_embeddings=True),
        qwen3(),
    ],
    ids=["llama-gqa", "llama-tied", "llama-eager", "qwen2-tied", "qwen3"],
)
@pytest.mark.parametrize("max_batch", [256, 5])
def test_logprobs_are_those_of_a_full_forward(model: PreTrainedModel, max_batch: int) -> None:
    played = play_all(serve(model, max_batch=max_batch), temperature=0.7)
    reasons = Counter(completion.finish_reason for turns in played.values() for _, completion in turns)
    assert min(reasons["stop"], reasons["length"]) > 3
    for turns in played.values():
        for asked, completion in turns:
            # float32 on deliberately wide logits, at a temperature below 1
            assert completion.logprobs == pytest.approx(full_logprobs(model, asked, completion), abs=3e-5)


@pytest.mark.parametrize("model", [llama(), qwen3(tie_word_embeddings=True)], ids=["llama", "qwen3-tied"])
def test_greedy_tokens_are_those_of_generate(model: PreTrainedModel) -> None:
    model.generation_config.pad_token_id = 0
    for turns in play_all(serve(model), temperature=0.0).values():
        for asked, completion in turns:
            ids = torch.tensor([asked.prompt_ids])
            wanted = model.eval().generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=6, eos_token_id=[5, 6, 7]
            )
            assert completion.token_ids == tuple(wanted[0, len(asked.prompt_ids) :].tolist())
            # float32 on deliberately wide logits, at a temperature below 1
            assert completion.logprobs == pytest.approx(full_logprobs(model, asked, completion), abs=3e-5)


def test_turns_come_back_in_the_order_of_keys() -> None:
    engine, finished = serve(llama()), []

    async def one(key: TrajectoryKey) -> None:
        await engine.generate(request(range(4), key))
        finished.append(key)

    async def together() -> None:
        for key in KEYS:
            engine.open(key)
        await asyncio.gather(*map(one, random.Random(0).sample(KEYS, len(KEYS))))

    asyncio.run(together())
    assert finished == KEYS


def test_any_interleaving_gives_bitwise_the_same() -> None:
    model = llama()
    plain = play_all(serve(model))
    dice = random.Random(1)
    shuffled = play_all(
        serve(model), dice.sample(KEYS, len(KEYS)), delay=lambda key, turn: random.Random(key.task + turn).randrange(9)
    )
    assert tokens_of(shuffled) == tokens_of(plain)
    assert logprobs_of(shuffled) == logprobs_of(plain)


def test_stray_memory_is_never_seen() -> None:
    model = llama()
    plain = play_all(serve(model, max_batch=5))
    torch.use_deterministic_algorithms(True)  # fills fresh memory with NaN
    try:
        assert torch.empty(1).isnan().item()
        poisoned = play_all(serve(model, max_batch=5))
    finally:
        torch.use_deterministic_algorithms(False)
    assert logprobs_of(poisoned) == logprobs_of(plain)


def test_a_trajectory_alone_plays_as_in_company() -> None:
    model = llama()
    together = play_all(serve(model))
    for key in KEYS:
        alone = play_all(serve(model), [key])
        assert tokens_of(alone)[key] == tokens_of(together)[key]


def test_a_split_round_gives_the_same_tokens() -> None:
    model = llama()
    assert tokens_of(play_all(serve(model, max_batch=5))) == tokens_of(play_all(serve(model)))


def test_only_new_tokens_are_forwarded() -> None:
    engine = serve(llama())
    first = request(range(10), max_tokens=4)
    [completion] = ask(engine, first, release=False)
    assert engine.forwarded_tokens == 10 + 3  # the last sampled token has no successor yet
    longer = (*first.prompt_ids, *completion.token_ids, 1, 2)
    ask(engine, request(longer, max_tokens=4), opens=False, release=False)
    assert engine.forwarded_tokens == 13 + (1 + 2) + 3
    ask(engine, request(longer, max_tokens=1), opens=False)
    assert engine.forwarded_tokens == 19 + 1  # the same prompt again: its last token alone


def test_ragged_play_forwards_each_token_once_and_shared_openings_once() -> None:
    engine = serve(llama())
    played = play_all(engine)
    expected = sum(len(turns[-1][0].prompt_ids) + len(turns[-1][1].token_ids) - 1 for turns in played.values())
    shared = sum(2 * len(played[TrajectoryKey(task, 0)][0][0].prompt_ids) for task in range(4))
    assert engine.forwarded_tokens == expected - shared


def test_a_diverging_prompt_is_as_good_as_a_fresh_one() -> None:
    model = llama()
    engine = serve(model)
    ask(engine, request(range(20)), request(range(3, 30), (0, 1)), release=False)
    before = engine.forwarded_tokens
    changed = request([*range(12), 30, 31, 32], seed=3)
    [cropped, _] = ask(engine, changed, request(range(3, 31), (0, 1)), opens=False)
    assert engine.forwarded_tokens - before == 3 + 1 + 2 * 5
    [fresh] = ask(serve(model), changed)
    assert cropped.token_ids == fresh.token_ids
    assert cropped.logprobs == pytest.approx(fresh.logprobs, abs=1e-5)


def test_new_weights_answer_at_once_and_drop_the_cache() -> None:
    old, new = llama(0), llama(1)
    engine = serve(old, version=3)
    first = request(range(10))
    [completion] = ask(engine, first, release=False)
    assert completion.policy_version == (3,) * 6
    before = engine.forwarded_tokens
    engine.load_weights(new.state_dict().items(), version=4)
    second = request((*first.prompt_ids, *completion.token_ids, 2))
    [completion] = ask(engine, second, opens=False)
    assert completion.policy_version == (4,) * 6
    assert engine.forwarded_tokens - before == 17 + 5
    assert completion.logprobs == pytest.approx(full_logprobs(new, second, completion), abs=1e-5)
    assert full_logprobs(old, second, completion) != pytest.approx(completion.logprobs, abs=1e-2)


def test_the_policy_is_left_alone() -> None:
    model = llama().train()
    engine = serve(model)
    state = copy.deepcopy(model.state_dict())
    other = llama(1)
    generator = torch.get_rng_state()
    engine.load_weights(other.state_dict().items(), 1)
    play_all(engine)
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    assert torch.get_rng_state().equal(generator)


def test_a_policy_without_storage_is_built_from_its_configuration() -> None:
    model = llama(tie_word_embeddings=True)
    with torch.device("meta"):
        hollow = LlamaForCausalLM(copy.deepcopy(model.config))
    state = torch.get_rng_state()
    engine = LocalEngine()
    engine.attach(hollow)
    assert torch.get_rng_state().equal(state)
    engine.load_weights(model.state_dict().items(), 0)
    [filled], [plain] = ask(engine, request(range(9))), ask(serve(model), request(range(9)))
    assert filled == plain


def test_tied_weights_may_come_under_one_name_or_both() -> None:
    model = llama(tie_word_embeddings=True)
    once = dict(model.named_parameters())
    assert "lm_head.weight" not in once
    engine = LocalEngine()
    engine.attach(llama(1, tie_word_embeddings=True))
    engine.load_weights(once.items(), 0)
    assert ask(engine, request(range(9))) == ask(serve(model), request(range(9)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("model.norm.weight"), "did not come: model.norm.weight"),
        (lambda weights: weights.update(surplus=torch.ones(1)), "no weight named 'surplus'"),
        (lambda weights: weights.update({"model.norm.weight": torch.ones(1)}), r"'model.norm.weight' must have shape"),
    ],
    ids=["missing", "unknown", "shape"],
)
def test_weights_that_do_not_fit_are_named(change: Callable[[dict[str, Any]], Any], message: str) -> None:
    model = llama()
    engine = serve(model)
    weights = dict(model.state_dict())
    change(weights)
    with pytest.raises(ValueError, match=message):
        engine.load_weights(weights.items(), 1)
    with pytest.raises(RuntimeError, match="no weights"):
        ask(engine, request(range(3)))


def test_half_precision_is_close() -> None:
    model = llama()
    asked = request(range(20))
    [completion] = ask(serve(model, dtype="bfloat16"), asked)
    assert completion.logprobs == pytest.approx(full_logprobs(model, asked, completion), abs=0.3)
    assert completion.logprobs != pytest.approx(full_logprobs(model, asked, completion), abs=1e-4)


def test_stop_and_length() -> None:
    engine = serve(llama())
    [free] = ask(engine, request(range(8), temperature=0.0, max_tokens=5))
    assert (free.finish_reason, len(free.token_ids)) == ("length", 5)
    stop = free.token_ids[2]
    cut = free.token_ids.index(stop) + 1
    [stopped] = ask(engine, request(range(8), temperature=0.0, max_tokens=5, stop_token_ids=(999, stop)))
    assert (stopped.finish_reason, stopped.token_ids) == ("stop", free.token_ids[:cut])
    [last] = ask(engine, request(range(8), temperature=0.0, max_tokens=cut, stop_token_ids=(stop,)))
    assert last.finish_reason == "stop"


def test_requests_of_one_round_keep_their_own_temperature() -> None:
    model = llama()
    requests = [request(range(8), (0, i), temperature=t, seed=5) for i, t in enumerate((0.0, 0.5, 1.0, 2.0))]
    completions = ask(serve(model), *requests)
    for asked, completion in zip(requests, completions, strict=True):
        assert completion.logprobs == pytest.approx(full_logprobs(model, asked, completion), abs=1e-5)
    [greedy] = ask(serve(model), request(range(8), temperature=0.0, seed=77))
    assert completions[0].token_ids == greedy.token_ids


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampled_frequencies_are_the_probabilities(temperature: float) -> None:
    model, count = llama(initializer_range=0.15), 4000
    requests = [
        request([1, 2, 3], (0, i), max_tokens=1, temperature=temperature, seed=derive_seed(i)) for i in range(count)
    ]
    drawn = Counter(completion.token_ids[0] for completion in ask(serve(model), *requests))
    with torch.no_grad():
        logits = model.eval()(input_ids=torch.tensor([[1, 2, 3]])).logits[0, -1]
    expected = (logits / temperature).softmax(-1) * count
    common = expected >= 5
    observed = torch.tensor([float(drawn[token]) for token in range(VOCABULARY)])
    observed = torch.cat([observed[common], observed[~common].sum()[None]])
    expected = torch.cat([expected[common], expected[~common].sum()[None]])
    degrees = len(expected) - 1
    assert degrees > 10
    chi_square = ((observed - expected) ** 2 / expected.clamp_min(1e-9)).sum().item()
    assert chi_square < degrees + 4 * math.sqrt(2 * degrees)


def test_draw_inverts_the_cumulative_distribution() -> None:
    probabilities = torch.tensor([0.25, 0.0, 0.5, 0.25])
    uniform = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-53], dtype=torch.float64)
    rows = len(uniform)
    tokens, logprobs = draw(
        probabilities.log().expand(rows, 4), uniform, torch.ones(rows), torch.zeros(rows, dtype=torch.bool)
    )
    assert tokens.tolist() == [0, 0, 2, 2, 3, 3]
    torch.testing.assert_close(logprobs.exp(), probabilities[tokens])


def test_a_cancelled_request_holds_nobody_up() -> None:
    engine = serve(llama())
    left, right = request(range(5)), request(range(6), (0, 1))

    async def run() -> Completion:
        engine.open(left.trajectory)
        engine.open(right.trajectory)
        doomed = asyncio.ensure_future(engine.generate(left))
        await asyncio.sleep(0)
        doomed.cancel()
        await asyncio.gather(doomed, return_exceptions=True)
        assert doomed.cancelled()
        first = await asyncio.wait_for(engine.generate(right), 5)
        # It is waited for again once it asks again.
        waiting = asyncio.ensure_future(engine.generate(left))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await engine.generate(right)
        await waiting
        return first

    assert asyncio.run(run()) == ask(serve(llama()), right)[0]


def test_a_turn_cancelled_between_its_round_and_its_return_holds_nobody_up() -> None:
    engine = serve(llama())
    left, right = request(range(5)), request(range(6), (0, 1))

    async def run() -> Completion:
        engine.open(left.trajectory)
        engine.open(right.trajectory)
        doomed = asyncio.ensure_future(engine.generate(right))
        await engine.generate(left)
        doomed.cancel()
        completion = await asyncio.wait_for(engine.generate(left), 5)
        assert doomed.cancelled()
        return completion

    assert len(asyncio.run(run()).token_ids) == 6


def test_cancelling_or_releasing_the_last_one_missing_starts_the_round() -> None:
    engine = serve(llama())
    keys = [TrajectoryKey(0, sibling) for sibling in range(3)]

    async def run() -> Completion:
        for key in keys:
            engine.open(key)
        waiting = asyncio.ensure_future(engine.generate(request(range(5), keys[0])))
        doomed = asyncio.ensure_future(engine.generate(request(range(5), keys[1])))
        await asyncio.sleep(0.01)
        doomed.cancel()
        await asyncio.sleep(0.01)
        assert not waiting.done()
        engine.release(keys[2])
        return await asyncio.wait_for(waiting, 5)

    assert len(asyncio.run(run()).token_ids) == 6


def test_an_error_in_the_model_reaches_everyone_and_leaves_a_clean_engine() -> None:
    model = llama()
    engine = serve(model)
    broken = request([VOCABULARY], (0, 1))

    async def run() -> list[Any]:
        for sibling in range(3):
            engine.open(TrajectoryKey(0, sibling))
        requests = [request(range(5)), broken, request(range(7), (0, 2))]
        return await asyncio.gather(*(engine.generate(r) for r in requests), return_exceptions=True)

    assert [type(error) for error in asyncio.run(run())] == [IndexError] * 3
    sound = [request(range(5 + sibling), (0, sibling)) for sibling in range(3)]
    assert ask(engine, *sound, opens=False) == ask(serve(model), *sound)


def test_nan_names_the_trajectory() -> None:
    model = llama()
    torch.nn.init.constant_(model.lm_head.weight, math.nan)
    with pytest.raises(RolloutError, match="task 3, sibling 1"):
        ask(serve(model), request(range(5), (3, 1)))


def test_misuse_is_told() -> None:
    model, engine = llama(), LocalEngine()
    with pytest.raises(RuntimeError, match="attach"):
        engine.load_weights([], 0)
    with pytest.raises(RuntimeError, match="attach"):
        ask(engine, request(range(3)))
    engine = serve(model)
    with pytest.raises(RuntimeError, match="not open"):
        asyncio.run(engine.generate(request(range(3))))
    with pytest.raises(ConfigurationError, match="max_position_embeddings=256"):
        ask(engine, request([1] * 251))
    with pytest.raises(RuntimeError, match="open already"):
        engine.open(TrajectoryKey(0, 0))
    engine.close()
    engine.close()
    with pytest.raises(RuntimeError, match="attach"):
        ask(engine, request(range(3)))
    with pytest.raises(ConfigurationError, match="max_batch"):
        LocalEngine(max_batch=0)


def test_closing_fails_those_who_wait() -> None:
    engine = serve(llama())

    async def run() -> None:
        engine.open(TrajectoryKey(0, 0))
        engine.open(TrajectoryKey(0, 1))
        waiting = asyncio.ensure_future(engine.generate(request(range(3))))
        await asyncio.sleep(0)
        engine.close()
        await waiting

    with pytest.raises(RuntimeError, match="closed"):
        asyncio.run(run())
    model = llama()
    engine.attach(model)
    engine.load_weights(model.state_dict().items(), 0)
    assert ask(engine, request(range(3))) == ask(serve(model), request(range(3)))


def test_before_attach_it_can_be_copied_and_pickled() -> None:
    engine = LocalEngine(max_batch=7, dtype="bfloat16")
    for twin in (copy.deepcopy(engine), pickle.loads(pickle.dumps(engine))):
        assert (twin.max_batch, twin.dtype, twin.device) == (7, "bfloat16", None)


@pytest.mark.parametrize(
    "model",
    [
        MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=8)),
        qwen2(use_sliding_window=True, sliding_window=8, max_window_layers=1),
    ],
    ids=["mistral", "qwen2"],
)
def test_sliding_windows_are_refused(model: PreTrainedModel) -> None:
    with pytest.raises(ConfigurationError, match="sliding_attention"):
        LocalEngine().attach(model)


def test_grouping_covers_every_row_within_the_budget() -> None:
    lengths = {3: 10, 4: 1, 5: 30, 6: 9, 7: 200}
    groups = list(group_by_length(lengths, budget=40))
    assert sorted(row for group in groups for row in group) == sorted(lengths)
    assert groups == [[3, 4, 6], [5], [7]]


@pytest.mark.parametrize(
    ("left", "right", "length"), [((), (1,), 0), ((1, 2), (1, 2, 3), 2), ((1, 2, 3), (1, 2), 2), ((1, 2), (1, 3), 1)]
)
def test_common_prefix(left: tuple[int, ...], right: tuple[int, ...], length: int) -> None:
    assert common_prefix(left, right) == length
