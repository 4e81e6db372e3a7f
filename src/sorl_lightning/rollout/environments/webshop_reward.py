"""The score of a purchase in WebShop, in [0, 1].

    score = type * (attributes found + options chosen + price kept) / (attributes + options + 1)

Source: Yao et al. 2022, arXiv:2207.01206, appendix A.4, and the public shop's own arithmetic. The shop compares the
*nouns* of two titles by a large language model of spaCy; here all words of a title but the commonest count.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

from sorl_lightning.errors import ConfigurationError
from sorl_lightning.rollout.environments.webshop_catalogue import Goal, Product

MATCH = 85  # token_set_ratio, rounded, of 100, above which two phrases are the same
COMMON_WORDS = frozenset(
    re.findall(r"\w+", "a an and are as at by for from in is it of on or that the this to with your")
)
# An option's value that names one of these is that colour ("midnight blue 2" is "blue"); the first in this order.
COLOURS = tuple(
    re.findall(
        r"\w+",
        """
        alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown burgundy camel camo
        caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac copper coral cranberry cream
        crystal dark denim eggplant elephant espresso fuchsia gold granite grape graphite grass gray green grey heather
        indigo ivory ivy khaki lavender lemon leopard light lilac lime magenta maroon mauve merlot midnight mint mocha
        multicolor mushroom mustard natural navy nude olive orange peach pewter pink plum purple rainbow red rose royal
        rust sand sapphire seashell silver skull slate steel stone stonewash sunflower tan taupe teal tiger turquoise
        violet walnut wheat white wine yellow
        """,
    )
)


def purchase_score(product: Product, wanted: Product, goal: Goal, chosen: Iterable[str]) -> float:
    """The score for buying ``product`` with the option values ``chosen``.

    Args:
        wanted: the product that the goal was written for.
    """
    found = attributes_found(product, goal) + options_chosen(chosen, goal) + (product.price <= goal.price_upper)
    return type_factor(product, wanted) * found / (len(goal.attributes) + len(goal.options) + 1)


def type_factor(product: Product, wanted: Product) -> float:
    """1 for the same kind of article, 0.5 or 0.1 for a kindred one, 0 for another."""
    words = title_words(wanted.name)
    overlap = len(words & title_words(product.name)) / len(words) if words else 0.2
    shared = categories(product) & categories(wanted)
    if overlap == 0:
        return 0.0
    if overlap < 0.1:
        return 0.1
    return 1.0 if product.query == wanted.query or len(shared) >= 2 or overlap > 0.2 else 0.5


def attributes_found(product: Product, goal: Goal) -> int:
    """Wanted attributes that the product has, in its list or anywhere in its texts."""
    texts = (product.name.lower(), " ".join(product.bullets).lower(), product.description.lower())
    return sum(
        any(alike(attribute, own) for own in product.attributes) or any(attribute in text for text in texts)
        for attribute in goal.attributes
    )


def options_chosen(chosen: Iterable[str], goal: Goal) -> int:
    """Wanted option values among those chosen."""
    values = [colour_of(value) for value in chosen]
    return sum(any(alike(value, colour_of(wanted)) for value in values) for wanted in goal.options)


def title_words(title: str) -> frozenset[str]:
    """Words of a title, lower case, without the commonest."""
    return frozenset(re.findall(r"[^\W_]+", title.lower())) - COMMON_WORDS


def categories(product: Product) -> set[str]:
    """Names along the path of categories."""
    return {name.strip() for name in product.product_category.split("›")}


def colour_of(value: str) -> str:
    """The colour that an option's value names, or the value itself."""
    return next((colour for colour in COLOURS if colour in value), value)


@lru_cache(maxsize=65_536)
def alike(one: str, other: str) -> bool:
    """Whether two phrases are the same up to word order and additions."""
    return round(token_set_ratio()(one, other)) > MATCH


def token_set_ratio() -> Callable[[str, str], float]:
    """rapidfuzz's ratio; imported only here, since it comes with an extra."""
    try:
        from rapidfuzz import fuzz, utils
    except ImportError as error:
        raise ConfigurationError(
            "rapidfuzz is not installed; install the extra: pip install 'sorl-lightning[webshop]'"
        ) from error
    return lambda one, other: fuzz.token_set_ratio(one, other, processor=utils.default_process)


def attainable_score(product: Product, wanted: Product, goal: Goal) -> tuple[float, Sequence[tuple[str, str]]]:
    """The best score that this product allows, and the options to choose for it, as (name, value)."""
    choices = []
    for option in goal.options:
        pairs = [(name, value) for name, values in product.options.items() for value in values]
        exact = [pair for pair in pairs if pair[1] == option]
        close = [pair for pair in pairs if alike(colour_of(pair[1]), colour_of(option))]
        choices += (exact or close)[:1]
    kept = dict(choices)  # one value a name, as the page keeps them
    return purchase_score(product, wanted, goal, kept.values()), tuple(kept.items())
