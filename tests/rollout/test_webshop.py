"""WebShop: the public protocol and score by hand, files of the public schema, a server, the generated shop."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import pytest
from shop_server import serving

from sorl_lightning.errors import ConfigurationError
from sorl_lightning.rollout.contract import check_environment
from sorl_lightning.rollout.environment import open_episode
from sorl_lightning.rollout.environments import GeneratedShop, ShopFiles, ShopServer, WebShop
from sorl_lightning.rollout.environments.webshop_catalogue import Goal, Product, prices_of
from sorl_lightning.rollout.environments.webshop_reward import colour_of, purchase_score, type_factor

SPEAKER = Product(
    asin="B000000001",
    name="Acme stereo sound bluetooth speaker",
    category="electronics",
    query="bluetooth speaker",
    product_category="Electronics › Audio › Speakers",
    description="Plays for twelve hours.",
    bullets=("Water resistant shell",),
    price=53.0,
    tag="$53.0",
    attributes=("high power", "stereo sound"),
    options={"color": ("black", "midnight blue"), "size": ("small", "large")},
)
GOAL = Goal(
    asin=SPEAKER.asin,
    instruction="i am looking for a bluetooth speaker",
    attributes=("high power", "stereo sound"),
    options=("blue",),
    price_upper=70.0,
)


def product(**changes):
    return dataclasses.replace(SPEAKER, **changes)


@pytest.mark.parametrize(
    ("bought", "goal", "chosen", "score"),
    [
        (product(), {}, ["midnight blue"], 1.0),  # 1 * (2 + 1 + 1) / 4
        (product(), {}, [], 3 / 4),  # the option is not chosen
        (product(), {}, ["black"], 3 / 4),
        (product(price=70.01), {}, ["midnight blue"], 3 / 4),  # too dear
        (product(price=70.0), {}, ["midnight blue"], 1.0),  # the limit itself is kept
        (product(attributes=("high power",), name="Acme bluetooth speaker"), {}, ["midnight blue"], 3 / 4),
        (product(attributes=("power high",)), {}, ["midnight blue"], 1.0),  # word order; "stereo sound" from the title
        (product(), {"attributes": ("water resistant",), "options": ()}, [], 1.0),  # found in a bullet
        (product(), {"attributes": ("plays for twelve",), "options": ()}, [], 1.0),  # found in the description
        (product(), {"options": ("blue", "large")}, ["midnight blue", "small"], 4 / 5),
        (product(name="Garden hose"), {"attributes": ("high power",)}, ["midnight blue"], 0.0),  # another kind
    ],
)
def test_the_score_is_the_public_formula(bought, goal, chosen, score) -> None:
    assert purchase_score(bought, SPEAKER, dataclasses.replace(GOAL, **goal), chosen) == pytest.approx(score)


@pytest.mark.parametrize(
    ("name", "query", "path", "factor"),
    [
        ("Acme bluetooth speaker", "other", "Other", 1.0),  # 3 of 5 words of the title
        ("one speaker", "bluetooth speaker", "Other", 1.0),  # 1 of 5 is not above 0.2, but the query is the same
        ("one speaker", "other", "Audio › Electronics", 1.0),  # two categories, in any order
        ("one speaker", "other", "Electronics", 0.5),  # one category, 1 of 5 words
        ("garden hose", "bluetooth speaker", "Electronics › Audio › Speakers", 0.0),  # no word in common
    ],
)
def test_the_type_factor_by_hand(name, query, path, factor) -> None:
    assert type_factor(product(name=name, query=query, product_category=path), SPEAKER) == factor


def test_a_title_that_overlaps_by_less_than_a_tenth_is_worth_a_tenth() -> None:
    wanted = product(name="a1 a2 a3 a4 a5 a6 a7 a8 a9 b1 b2")
    assert type_factor(product(name="a1 only"), wanted) == 0.1


def test_colours_and_prices_are_read_as_the_shop_reads_them() -> None:
    assert [colour_of(value) for value in ("midnight blue", "07 - off-white", "9 inch")] == ["blue", "white", "9 inch"]
    assert prices_of("$9.99") == [9.99]
    assert prices_of("$5.00$9.99") == [5.0, 9.99]
    assert prices_of("") == [100.0]


@pytest.fixture(scope="module")
def generated():
    return GeneratedShop(products=100)


def shop_of(shop, **settings):
    return WebShop(shop, **{"test_goals": 50, "validation_goals": 50} | settings)


def played(environment, task, actions=None):
    """The steps of these actions, or of the expert's."""

    async def run():
        episode, steps, said = open_episode(environment), [], []
        opening = await episode.reset(task)
        while not steps or not (steps[-1].terminated or steps[-1].truncated):
            said.append(episode.expert_action() if actions is None else actions[len(steps)])
            steps.append(await episode.step(said[-1]))
            if actions is not None and len(steps) == len(actions):
                break
        return opening, said, steps

    return asyncio.run(run())


@pytest.mark.parametrize("settings", [{}, {"action_tags": True, "show_admissible": True, "reward": "success"}])
def test_the_contract(generated, settings) -> None:
    check_environment(shop_of(generated, **settings))


def test_the_expert_fulfils_every_goal_it_was_made_for() -> None:
    environment = WebShop()
    for task in environment.tasks("test")[:50]:
        _, said, steps = played(environment, task)
        assert steps[-1].info["success"]
        assert steps[-1].reward == steps[-1].info["score"] == 1.0
        assert said[0].startswith("search[")
        assert len(said) <= 10


def test_splits_are_the_papers_and_need_enough_goals(generated) -> None:
    environment = WebShop()
    assert [len(environment.tasks(split)) for split in ("test", "validation", "train")] == [500, 1000, 1500]
    assert environment.tasks("test")[3].id == "webshop-3"
    with pytest.raises(ConfigurationError, match=r"the shop has 300 goals.*take 1500"):
        WebShop(generated).tasks("train")


def test_the_expert_finds_back_from_anywhere(generated) -> None:
    environment = shop_of(generated)

    async def run(detour):
        episode = open_episode(environment)
        await episode.reset(environment.tasks("train")[1])
        for action in detour:
            answer = await episode.step(action)
            assert answer.info["valid"] == 1.0
        for _ in range(12):
            step = await episode.step(episode.expert_action())
            if step.terminated:
                return step.info["success"]
        return False

    on_page_2 = ["search[blue]", "click[next >]"]
    for detour in (
        ["search[qwertyuiop]"],
        on_page_2,
        [*on_page_2, "click[< prev]"],
        ["search[blue]", "click[back to search]"],
    ):
        assert asyncio.run(run(detour))
    first = f"click[{generated.visit(0).act('search', 'blue').page.clickables[-1]}]"
    for sub in ([], ["click[description]"], ["click[features]", "click[< prev]", "click[reviews]"]):
        assert asyncio.run(run(["search[blue]", first, *sub]))


def test_pages_read_as_the_public_text_environment_writes_them(generated) -> None:
    visit = generated.visit(0)
    goal = visit.goal.instruction
    assert visit.page.observation == f"WebShop [SEP] Instruction: [SEP] {goal} [SEP] Search"
    results = visit.act("search", "blue")
    texts = results.page.observation.split(" [SEP] ")
    assert texts[:5] == [
        "Instruction:",
        goal,
        "Back to Search",
        f"Page 1 (Total results: {len(results.place.results)})",
        "Next >",
    ]
    assert results.page.clickables[:3] == ("back to search", "next >", texts[5].lower())
    item = results.act("click", texts[5].lower())
    assert item.page.observation.endswith("Rating: N.A. [SEP] Description [SEP] Features [SEP] Reviews [SEP] Buy Now")
    assert item.act("click", "no such label") is None
    assert item.act("click", "features").act("click", "< prev").page == item.page


def test_an_action_that_is_not_understood_is_answered_with_the_page_and_counted(generated) -> None:
    environment = shop_of(generated, invalid_penalty=0.1)
    _, _, steps = played(
        environment, environment.tasks("train")[0], ["buy it", "click[buy now]", "search[]", "search[red]"]
    )
    opening = generated.visit(100).page.observation
    assert [step.observation for step in steps[:3]] == [opening] * 3
    assert [step.reward for step in steps] == [-0.1, -0.1, -0.1, 0.0]
    assert steps[-1].info["valid_fraction"] == 0.25


def test_tags_are_asked_for_read_and_missed(generated) -> None:
    environment = shop_of(generated, action_tags=True)
    answers = [
        "search[red]",
        "<think>a <action>no</action></think><action> search[red] </action>",
        "<action>a</action><action>b</action>",
    ]
    opening, _, steps = played(environment, environment.tasks("train")[0], answers)
    assert "<action>click[buy now]</action>" in opening[0]["content"]
    assert [step.info["valid"] for step in steps] == [0.0, 1.0, 0.0]
    assert "within <action> </action> tags" in steps[0].observation
    assert played(environment, environment.tasks("train")[0])[1][0].startswith("<action>search[")


def test_the_reward_of_success_is_all_or_nothing(generated) -> None:
    environment = shop_of(generated, reward="success")
    task = environment.tasks("train")[0]
    _, said, _ = played(environment, task)
    hasty = [*said[:2], "click[buy now]"]  # without choosing options
    _, _, steps = played(environment, task, hasty)
    assert steps[-1].terminated
    assert steps[-1].reward == 0.0
    assert 0 < steps[-1].info["score"] < 1


# Files of the public schema


def record(asin, **changes):
    return {
        "asin": asin, "name": f"Acme speaker {asin}", "category": "electronics", "query": "Speaker",
        "product_category": "Electronics › Audio", "full_description": "Loud.", "small_description": ["Loud."],
        "pricing": "$19.99", "images": ["x.png"],
        "customization_options": {"Color": [{"value": "Blue/Red", "image": None}, {"value": "green", "image": None}]},
    } | changes  # fmt: skip


@pytest.fixture
def files(tmp_path):
    def write(items, attributes=None, human=None):
        if attributes is None:
            about = {"attributes": ["loud"], "instruction": "find me a speaker", "instruction_attributes": ["loud"]}
            attributes = {item["asin"]: about for item in items}
        paths = {}
        for name, content in {"items": items, "attributes": attributes, "human": human}.items():
            if content is not None:
                paths[name] = str(tmp_path / f"{name}.json")
                (tmp_path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
        return ShopFiles(**paths)

    return write


def test_public_files_make_a_goal_for_each_choice_of_options(files) -> None:
    shop = files(
        [record("B000000001"), record("B000000002"), record("B000000001"), record("nan"), record("12345678901")]
    )
    assert list(shop.catalogue.products) == ["B000000001", "B000000002"]
    assert sorted(goal.options for goal in shop.catalogue.goals) == [("blue | red",)] * 2 + [("green",)] * 2
    assert all(" with color: " in goal.instruction for goal in shop.catalogue.goals)
    assert all(goal.price_upper in (30.0, 40.0, 50.0, 60.0)[:4] for goal in shop.catalogue.goals)
    check_environment(shop_of(shop, test_goals=1, validation_goals=1), episodes=2)


def test_public_human_instructions_take_their_place(files) -> None:
    written = {"instruction": "a green speaker.", "instruction_attributes": ["loud"], "instruction_options": ["green"]}
    without = written | {"instruction_attributes": []}
    shop = files([record("B000000001", pricing="$2,000.00")], human={"B000000001": [written, without]})
    (goal,) = shop.catalogue.goals
    assert goal == Goal(
        asin="B000000001", instruction="a green speaker", attributes=("loud",), options=("green",), price_upper=1e6
    )


@pytest.mark.parametrize(
    ("items", "attributes", "sentence"),
    [
        ([], {"x": {}}, "items: .*items.json must hold a non-empty list of products"),
        ({"asin": {}}, {"x": {}}, "must hold a non-empty list of products"),
        ([{"asin": "B000000001"}], None, "items: product B000000001 of .*items.json has no name, category"),
        (["B000000001"], {"x": {}}, "items: product None"),
        ([record("B000000001")], {}, "attributes: .*attributes.json must hold a non-empty mapping"),
        ([record("B000000001")], {"B000000009": {}}, "no product of .*items.json has an instruction"),
    ],
)
def test_bad_files_are_named_in_one_sentence(files, items, attributes, sentence) -> None:
    shop = files(items, attributes)
    with pytest.raises(ConfigurationError, match=sentence):
        shop_of(shop).tasks("train")


def test_missing_files_and_other_formats_are_named(tmp_path) -> None:
    with pytest.raises(ConfigurationError, match=r"attributes: there is no file nowhere\.json"):
        ShopFiles("nowhere.json", "nowhere.json").goal_count()
    latin = tmp_path / "latin.json"
    latin.write_bytes(b'{"caf\xe9": 1}')
    with pytest.raises(ConfigurationError, match=r"latin.json is not JSON in UTF-8"):
        ShopFiles(str(latin), str(latin)).goal_count()


# A server


def test_a_server_over_http_is_the_same_shop(generated) -> None:
    here = shop_of(generated)
    with serving(generated) as url:
        there = shop_of(ShopServer(url, goals=300))
        for task in here.tasks("test")[:3]:
            opening, said, steps = played(here, task)
            opening_there, _, steps_there = played(there, task, said)
            assert opening_there == opening
            assert steps_there == steps
        check_environment_of_server(there)


def check_environment_of_server(environment) -> None:
    async def run():
        episode = open_episode(environment)
        await episode.reset(environment.tasks("train")[0])
        assert (await episode.step("click[nowhere]")).info["valid"] == 0.0
        assert episode.understood()[0].startswith("search[i am looking for")
        with pytest.raises(LookupError, match="does not tell"):
            episode.expert_action()

    asyncio.run(run())


def test_a_server_that_is_not_there_is_named_before_anything_is_sampled() -> None:
    with pytest.raises(ConfigurationError, match=r"no WebShop server answers at http://127\.0\.0\.1:9"):
        WebShop(ShopServer("http://127.0.0.1:9")).tasks("train")
    with pytest.raises(ConfigurationError, match="needs to start with http"):
        ShopServer("localhost:3000")
