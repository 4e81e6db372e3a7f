"""Games that go forward only, kept and played again."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from sorl_lightning.rollout.environments.live_games import LiveGames


class Counting(LiveGames):
    """A game is the list of its actions; starts and ends are counted."""

    def __init__(self, capacity=2):
        self.started, self.ended, self.played = 0, [], 0
        super().__init__(self.begin, self.act, self.ended.append, capacity)

    def begin(self, key):
        self.started += 1
        return [key]

    def act(self, game, action):
        self.played += 1
        game.append(action)

    def at(self, key, *actions):
        with self.after(key, actions) as game:
            return tuple(game)


def test_a_game_is_played_on_from_where_it_stands() -> None:
    games = Counting()
    assert games.at("a", "x") == ("a", "x")
    assert games.at("a", "x", "y", "z") == ("a", "x", "y", "z")
    assert (games.started, games.played) == (1, 3)
    assert games.at("a", "x") == ("a", "x")  # it cannot go back: another is played
    assert (games.started, games.played) == (2, 4)


def test_the_game_played_longest_ago_makes_room() -> None:
    games = Counting(capacity=2)
    for key in "abc":
        games.at(key, "x")
    assert games.ended == [["a", "x"]]
    assert games.at("a", "x", "y") == ("a", "x", "y")
    assert games.started == 4


def test_a_game_that_raised_is_not_kept() -> None:
    games = Counting()
    games.play = lambda game, action: game.missing
    for _ in range(2):
        try:
            games.at("a", "x")
        except AttributeError:
            continue
    assert games.started == 2


def test_threads_play_games_of_their_own() -> None:
    games = Counting(capacity=64)
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda n: games.at("a", *["x"] * (n % 5), "y"), range(200)))
    assert found == [("a", *["x"] * (n % 5), "y") for n in range(200)]
