"""A customer who knows the shop: finds an article that fulfils the goal whole, chooses its options and buys it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sorl_lightning.rollout.environments.webshop_catalogue import Catalogue, Goal
from sorl_lightning.rollout.environments.webshop_pages import BACK, BUY, NEXT, PREVIOUS, RESULTS_PER_PAGE, Place
from sorl_lightning.rollout.environments.webshop_reward import attainable_score

Search = Callable[[str], Sequence[str]]


def next_action(catalogue: Catalogue, search: Search, goal: Goal, place: Place) -> str:
    """The next action on the way to a score of 1, from any page.

    Raises:
        LookupError: no article in reach fulfils the goal, or it has been bought.
    """
    if place.kind == "done":
        raise LookupError("the purchase is made")
    query = goal_query(catalogue, search, goal)
    if place.kind == "search":
        return f"search[{query}]"
    if place.kind == "results":
        return on_results(catalogue, goal, place)
    missing = options_to_choose(catalogue, goal, place)
    if place.kind == "sub":
        return f"click[{BACK if missing is None else PREVIOUS}]"
    if missing is None:
        return f"click[{BACK}]"
    return f"click[{missing[0] if missing else BUY}]"


def goal_query(catalogue: Catalogue, search: Search, goal: Goal) -> str:
    """Words that find a fulfilling article: those of the goal, or the title of the article it was written for.

    Raises:
        LookupError: neither does.
    """
    wanted = catalogue.products[goal.asin]
    for query in (" ".join((wanted.query, *goal.attributes, *goal.options)), wanted.name.lower()):
        if aim(catalogue, goal, search(query)) is not None:
            return query
    raise LookupError(f"no product in reach of a search fulfils the goal {goal.instruction!r}")


def on_results(catalogue: Catalogue, goal: Goal, place: Place) -> str:
    """Click the article aimed at, turn to its page, or search anew where there is none."""
    position = aim(catalogue, goal, place.results)
    if position is None:
        return f"click[{BACK}]"
    number = position // RESULTS_PER_PAGE + 1
    if number == place.number:
        return f"click[{place.results[position].lower()}]"
    return f"click[{NEXT if number > place.number else PREVIOUS}]"


def options_to_choose(catalogue: Catalogue, goal: Goal, place: Place) -> list[str] | None:
    """Values of the article at hand that have still to be chosen; None where it does not fulfil the goal."""
    score, options = attainable_score(catalogue.products[place.asin], catalogue.products[goal.asin], goal)
    if score < 1:
        return None
    chosen = dict(place.options)
    return [value for name, value in options if chosen.get(name) != value]


def aim(catalogue: Catalogue, goal: Goal, results: Sequence[str]) -> int | None:
    """Position of the first article that can score 1, rather one that has every wanted option by that very name."""
    wanted = catalogue.products[goal.asin]
    best = [attainable_score(catalogue.products[asin], wanted, goal) for asin in results]
    fulfilling = [n for n, (score, _) in enumerate(best) if score == 1]
    exact = [n for n in fulfilling if {value for _, value in best[n][1]} >= set(goal.options)]
    return next(iter([*exact, *fulfilling]), None)
