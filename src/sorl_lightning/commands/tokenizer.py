"""``sorl tokenizer FOLDER``: train the tokenizer of the small text-world models on expert transcripts."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from sorl_lightning.rollout.environment import observation_text, open_episode
from sorl_lightning.rollout.environments import TextWorldExpress
from sorl_lightning.types import Task

PAD, USER, ASSISTANT, END = "<|pad|>", "<|user|>", "<|assistant|>", "<|end|>"
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Words with their leading space, numbers digit by digit, the rest character by character.
WORDS = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]|\s"
GAMES: Mapping[str, Mapping[str, int]] = {
    "coin": {"numLocations": 6, "includeDoors": 1},
    "twc": {"numLocations": 1, "numItemsToPutAway": 3, "includeDoors": 0, "limitInventorySize": 0},
    "mapreader": {},
    "cookingworld": {"numLocations": 4, "numIngredients": 2},
    "arithmetic": {},
    "sorting": {},
    "simonsays": {},
}


def tokenizer(folder: str, vocab_size: int = 1024, tasks_per_game: int = 100) -> None:
    """Train a byte-level tokenizer with a chat template on the expert's episodes of every game's train split.

    The package ships its result as "sorl:textworld". The same command gives the same files.

    Args:
        folder: where to write the Hugging Face tokenizer.
        vocab_size: tokens, of which 256 are bytes and 4 are special.
        tasks_per_game: episodes of each game.
    """
    texts = (text for game in GAMES for text in transcripts(game, tasks_per_game))
    train(texts, vocab_size).save_pretrained(folder)
    print(f"sorl: wrote a tokenizer of {vocab_size} tokens to {folder}")


def transcripts(game: str, tasks: int) -> Iterator[str]:
    """Everything said in the expert's episodes of ``game``."""
    environment = TextWorldExpress(game=game, parameters=dict(GAMES[game]), train_tasks=tasks, show_admissible=True)
    for task in environment.tasks("train"):
        yield from episode(environment, task)


def episode(environment: TextWorldExpress, task: Task) -> Iterator[str]:
    """The texts of one expert episode."""
    world = open_episode(environment)
    assert isinstance(world, TextWorldExpress)
    yield from (message["content"] for message in world.reset(task))
    terminated = False
    while not terminated:
        action = world.expert_action()
        step = world.step(action)
        assert not inspect.isawaitable(step)
        terminated = step.terminated
        yield from (action, observation_text(step.observation))


def train(texts: Iterator[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, which can write any text, with the chat template of the small models."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(WORDS), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, USER, ASSISTANT, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    result = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, eos_token=END, additional_special_tokens=[USER, ASSISTANT]
    )
    result.chat_template = TEMPLATE
    return result
