"""What is said to a vLLM server, and what its answers mean: the one place that knows its requests and its version."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sorl_lightning.errors import ConfigurationError, EngineOutage, RolloutError
from sorl_lightning.rollout.engine import GenerationRequest
from sorl_lightning.rollout.vllm.client import Client, ServerError
from sorl_lightning.types import FinishReason

OLDEST = (0, 29)  # the weight-transfer routes had other bodies before
ROUTE: dict[str, str] = {"generate": "/inference/v1/generate", "completions": "/v1/completions"}
TIMEOUT = 120.0  # seconds, for questions about the server, which asks its whole system for some of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A generated turn, as the server put it.

    Attributes:
        token_ids: the generated tokens.
        logprobs: of each, nats.
        finish_reason: "stop" or "length".
        versions: the server's name of the weights that sampled each token; None where the route does not say.
        prompt_logprobs: of each prompt token but the first, nats, where they were asked for.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    versions: tuple[str, ...] | None
    prompt_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A server that was asked what it can do.

    Attributes:
        client: connections to it.
        version: of vLLM.
        route: where turns are asked for.
        workers: processes that take weights, over all its parallel dimensions.
        context_limit: most tokens of a sequence.
        backend: weight-transfer backend that it was started with; None for none.
        adapters: whether it loads adapters on request.
    """

    client: Client
    version: str
    route: Literal["generate", "completions"]
    workers: int
    context_limit: int
    backend: str | None = None
    adapters: bool = False


async def inspect(client: Client, model: str) -> Server:
    """Ask a healthy server what it is, and refuse what could not work.

    Raises:
        ConfigurationError: it is too old, lacks routes or the model, or reports raw log-probabilities.
        EngineOutage: it does not answer.
    """
    version = str((await client.get("/version", TIMEOUT)).get("version", ""))
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is not None and tuple(map(int, numbers.groups())) < OLDEST:
        raise ConfigurationError(
            f"{client.url} runs vLLM {version}, whose weight-transfer routes this package does not speak; it needs "
            f"{'.'.join(map(str, OLDEST))} or newer (tested: 0.32)"
        )
    info = await optional(client, "/server_info?config_format=json")
    if info is None:
        raise ConfigurationError(
            f"{client.url} has no routes for new weights: start it with VLLM_SERVER_DEV_MODE=1 in its environment"
        )
    config = info["vllm_config"]
    await check_model(client, model)
    logprobs_mode = config["model_config"].get("logprobs_mode")
    if logprobs_mode not in (None, "processed_logprobs"):
        raise ConfigurationError(
            f"{client.url} reports {logprobs_mode}, which leave the sampling temperature out: start it with "
            "--logprobs-mode processed_logprobs"
        )
    backend = (config.get("weight_transfer_config") or {}).get("backend")
    world = await client.get("/get_world_size", TIMEOUT)
    return Server(
        client=client,
        version=version,
        route=await turn_route(client),
        workers=int(world["world_size"]),
        context_limit=int(config["model_config"]["max_model_len"]),
        backend=backend,
        adapters=bool(config.get("lora_config")) and await is_open(client, "/v1/load_lora_adapter"),
    )


async def check_model(client: Client, model: str) -> None:
    """Refuse a server that serves other names only."""
    served = [entry["id"] for entry in (await client.get("/v1/models", TIMEOUT))["data"]]
    if model not in served:
        raise ConfigurationError(f"{client.url} serves {served} and no model {model!r}: set VLLMEngine.model")


async def turn_route(client: Client) -> Literal["generate", "completions"]:
    """The route that takes and gives tokens."""
    return "generate" if await is_open(client, ROUTE["generate"]) else "completions"


async def is_open(client: Client, route: str) -> bool:
    """Whether a route that takes a POST is there. It knows no GET, and says so (405) only where it is."""
    try:
        await client.get(route, TIMEOUT)
    except ServerError as error:
        return error.status == 405
    return True


async def optional(client: Client, route: str) -> dict[str, Any] | None:
    """The answer, or None where the server has no such route."""
    try:
        return await client.get(route, TIMEOUT)
    except ServerError as error:
        if error.status in (403, 404, 405):
            return None
        raise


def body(server: Server, model: str, request: GenerationRequest, salt: str, prompt_logprobs: bool = False) -> Any:
    """The request for one turn. Whatever could change the distribution is said, and not left to the server's defaults.

    Args:
        salt: keeps cached prefixes of other weights from being reused.
        prompt_logprobs: ask for the log-probabilities of the prompt's tokens too.
    """
    settings: dict[str, Any] = {
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "seed": request.seed,
        "stop_token_ids": list(request.stop_token_ids),
        "ignore_eos": True,  # the turn ends at the stop tokens of the request, whatever the model's folder says
        "logprobs": 0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }
    if prompt_logprobs:
        settings["prompt_logprobs"] = 0
    head = {"model": model, "cache_salt": salt}
    if server.route == "generate":
        prompt = {"token_ids": list(request.prompt_ids)}
        return {**head, **prompt, "sampling_params": {**settings, "detokenize": False}}
    return {**head, "prompt": list(request.prompt_ids), "return_token_ids": True, **settings}


def parse(server: Server, answer: dict[str, Any], max_tokens: int) -> Answer:
    """The turn in a server's answer.

    Raises:
        EngineOutage: the turn was cut off by an abort.
        RolloutError: tokens, log-probabilities and limits do not fit together, or a log-probability is no number.
    """
    url = server.client.url
    try:
        (choice,) = answer["choices"]
        token_ids = tuple(choice["token_ids"])
        if server.route == "generate":
            logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        else:
            logprobs = choice["logprobs"]["token_logprobs"]
        spans, finish_reason = choice.get("weight_versions"), choice["finish_reason"]
    except (KeyError, TypeError, ValueError) as error:
        raise RolloutError(f"{url} gave a turn without its tokens and log-probabilities: {answer!r:.600}") from error
    if finish_reason in ("abort", "error"):
        raise EngineOutage(f"{url} cut a turn off after {len(token_ids)} tokens ({finish_reason})")
    if finish_reason not in ("stop", "length"):
        raise RolloutError(f"{url} ended a turn for the unknown reason {finish_reason!r}")
    if len(logprobs) != len(token_ids) or len(token_ids) > max_tokens:
        raise RolloutError(
            f"{url} gave {len(token_ids)} tokens and {len(logprobs)} log-probabilities where at most {max_tokens} "
            "of each were asked for"
        )
    return Answer(
        token_ids=token_ids,
        logprobs=numbers_of(url, logprobs),
        finish_reason=finish_reason,
        versions=None if spans is None else versions_of(url, spans, len(token_ids)),
        prompt_logprobs=prompt_logprobs_of(url, answer),
    )


def numbers_of(url: str, logprobs: Sequence[Any]) -> tuple[float, ...]:
    """Log-probabilities that are finite numbers."""
    if not all(isinstance(value, (int, float)) and math.isfinite(value) for value in logprobs):
        raise RolloutError(f"{url} gave log-probabilities that are no finite numbers: {list(logprobs)!r:.200}")
    return tuple(map(float, logprobs))


def versions_of(url: str, spans: Sequence[dict[str, Any]], length: int) -> tuple[str, ...]:
    """One name of weights a token, from the spans of tokens that share one."""
    versions = [str(span["version"]) for span in spans for _ in range(span["start"], span["end"])]
    if len(versions) != length:
        raise RolloutError(f"{url} gave weight versions of {len(versions)} tokens for {length}: {spans!r:.200}")
    return tuple(versions)


def prompt_logprobs_of(url: str, answer: dict[str, Any]) -> tuple[float, ...]:
    """The prompt's log-probabilities, which stand beside the choices or in the first of them."""
    entries = answer.get("prompt_logprobs") or answer["choices"][0].get("prompt_logprobs") or [None]
    ids = answer.get("prompt_token_ids") or answer["choices"][0].get("prompt_token_ids")
    values = []
    for position, entry in enumerate(entries[1:], start=1):
        # With prompt_logprobs=0 the token itself is the only entry; by its id where the server gives ids back.
        token = str(ids[position]) if ids else next(iter(entry))
        values.append(entry[token]["logprob"])
    return numbers_of(url, values)
