"""A made-up catalogue in the manner of the public one: kinds of articles, attributes, options, prices, goals."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

from sorl_lightning.rollout.environments.webshop_catalogue import Catalogue, Goal, Product, price_limit

GOALS_PER_PRODUCT = 3
FIRST_ASIN = 1000
COLOURS = ("black", "blue", "green", "grey", "pink", "purple", "red", "silver", "white", "yellow")
CLOTHES_SIZES = ("small", "medium", "large", "x-large", "xx-large")
SYLLABLES = ("bar", "den", "fi", "gal", "hol", "ka", "lin", "mo", "nor", "pe", "quil", "ra", "sol", "tu", "ver", "zan")


class Kind(NamedTuple):
    """A kind of article.

    Attributes:
        path: categories, parted by "›".
        attributes: what such articles may be; each has three or four.
        options: values to choose from, by name.
        price: cheapest and dearest, dollars.
    """

    noun: str
    path: str
    attributes: tuple[str, ...]
    options: dict[str, tuple[str, ...]]
    price: tuple[float, float]


def kind(noun: str, path: str, attributes: str, options: dict[str, str], low: float, high: float) -> Kind:
    values = {name: COLOURS if listed == "COLOURS" else tuple(listed.split(", ")) for name, listed in options.items()}
    return Kind(noun, path, tuple(attributes.split(", ")), values, (low, high))


SIZES = ", ".join(CLOTHES_SIZES)
KINDS = (
    kind("bluetooth speaker", "Electronics › Portable Audio › Speakers",
         "high power, stereo sound, water resistant, hands free, wireless charging, long lasting battery",
         {"color": "COLOURS"}, 18, 140),
    kind("headphones", "Electronics › Headphones › Over Ear",
         "noise cancelling, high definition, fast charging, foldable design, carrying case, low latency",
         {"color": "COLOURS"}, 15, 220),
    kind("phone case", "Cell Phones › Accessories › Cases",
         "shock proof, glass screen, slim fit, dust proof, magnetic closure, anti slip",
         {"color": "COLOURS", "size": "mini, standard, plus, max"}, 6, 35),
    kind("usb cable", "Electronics › Accessories › Cables",
         "fast charging, gold plated, heavy duty, nylon braided, high speed, tangle free",
         {"size": "3 feet, 6 feet, 10 feet, 15 feet"}, 5, 30),
    kind("tv stand", "Home › Living Room Furniture › Stands",
         "easy assemble, solid wood, storage space, metal legs, white finish, height adjustable",
         {"color": "COLOURS"}, 70, 420),
    kind("dining chair", "Home › Kitchen Furniture › Chairs",
         "easy clean, faux leather, high density foam, mid century, non slip feet, stackable",
         {"color": "COLOURS", "size": "set of 1, set of 2, set of 4"}, 45, 320),
    kind("desk lamp", "Home › Lighting › Lamps",
         "eye protection, energy efficient, touch control, usb port, clear glass, adjustable arm",
         {"color": "COLOURS"}, 14, 90),
    kind("window curtain", "Home › Bedroom › Curtains",
         "machine washable, blackout lining, thermal insulated, easy install, rod pocket, soft velvet",
         {"color": "COLOURS", "size": "52x63 inch, 52x84 inch, 52x96 inch"}, 12, 80),
    kind("area rug", "Home › Decor › Rugs",
         "stain resistant, non slip backing, hand tufted, pet friendly, low pile, water absorbent",
         {"color": "COLOURS", "size": "2x3 ft, 4x6 ft, 5x8 ft"}, 20, 260),
    kind("running shoes", "Clothing › Shoes › Athletic",
         "rubber sole, arch support, memory foam, slip resistant, breathable mesh, lace closure",
         {"color": "COLOURS", "size": "7, 8, 9, 10, 11"}, 28, 160),
    kind("hoodie", "Clothing › Men › Hoodies",
         "long sleeve, machine wash, cotton blend, fleece lined, drawstring closure, classic fit",
         {"color": "COLOURS", "size": SIZES}, 16, 80),
    kind("summer dress", "Clothing › Women › Dresses",
         "short sleeve, hand wash, elastic waist, polyester spandex, button closure, floral print",
         {"color": "COLOURS", "size": SIZES}, 18, 95),
    kind("leggings", "Clothing › Women › Activewear",
         "high waist, tummy control, moisture wicking, four way stretch, quick drying, side pockets",
         {"color": "COLOURS", "size": SIZES}, 12, 60),
    kind("backpack", "Luggage › Bags › Backpacks",
         "water repellent, laptop compartment, padded straps, anti theft, light weight, large capacity",
         {"color": "COLOURS"}, 22, 130),
    kind("face moisturizer", "Beauty › Skin Care › Face",
         "cruelty free, hyaluronic acid, fragrance free, anti aging, vitamin c, sensitive skin",
         {"size": "1 ounce, 2 ounce, 4 ounce"}, 8, 70),
    kind("shampoo", "Beauty › Hair Care › Shampoo",
         "sulfate free, argan oil, damaged hair, paraben free, tea tree, color safe",
         {"size": "8 fl oz, 12 fl oz, 24 fl oz"}, 6, 40),
    kind("electric toothbrush", "Beauty › Oral Care › Toothbrushes",
         "fresh breath, teeth whitening, pressure sensor, travel size, rechargeable battery, soft bristles",
         {"color": "COLOURS"}, 15, 150),
    kind("protein bars", "Grocery › Snacks › Bars",
         "gluten free, low sugar, plant based, high fiber, dairy free, keto friendly",
         {"flavor": "chocolate chip, peanut butter, salted caramel, lemon", "size": "6 count, 12 count, 24 count"},
         9, 55),
    kind("ground coffee", "Grocery › Beverages › Coffee",
         "dark roast, fair trade, certified organic, low acid, single origin, medium grind",
         {"flavor": "vanilla, hazelnut, original, mocha", "size": "12 ounce, 24 ounce, 48 ounce"}, 8, 60),
    kind("trail mix", "Grocery › Snacks › Nuts",
         "non gmo, dry roasted, no artificial flavors, lightly salted, resealable bag, soy free",
         {"size": "pack of 1, pack of 3, pack of 6"}, 6, 45),
)  # fmt: skip


def generated_catalogue(products: int, seed: int) -> Catalogue:
    """``products`` articles and three goals for each, in a shuffled order."""
    chance = random.Random(seed)
    articles = [article(number, chance) for number in range(products)]
    goals = [goal for product in articles for goal in goals_of(product, chance)]
    chance.shuffle(goals)
    return Catalogue(products={product.asin: product for product in articles}, goals=goals)


def article(number: int, chance: random.Random) -> Product:
    """Article ``number``; kinds take turns."""
    of = KINDS[number % len(KINDS)]
    brand = "".join(chance.sample(SYLLABLES, 2)).capitalize()
    attributes = tuple(chance.sample(of.attributes, chance.choice((3, 4))))
    options = {
        name: tuple(v for v in values if v in picked)
        for name, values in of.options.items()
        for picked in [chance.sample(values, min(len(values), chance.choice((3, 4))))]
    }
    price = round(chance.uniform(*of.price), 2)
    return Product(
        asin=f"B{FIRST_ASIN + number:09d}",
        name=f"{brand} {attributes[0]} {of.noun}, {attributes[1]}",
        category=of.path.split(" › ")[0].lower(),
        query=of.noun,
        product_category=of.path,
        description=f"This {of.noun} by {brand} is made for every day. It comes with {attributes[-1]}.",
        bullets=tuple(f"{attribute.capitalize()}: what you need in a {of.noun}." for attribute in attributes),
        price=price,
        tag=f"${price}",
        attributes=attributes,
        options=options,
    )


def goals_of(product: Product, chance: random.Random) -> Iterator[Goal]:
    """Three different wishes that the product fulfils."""
    seen: set[tuple[tuple[str, ...], tuple[str, ...]]] = set()
    while len(seen) < GOALS_PER_PRODUCT:
        attributes = tuple(sorted(chance.sample(product.attributes, 2)))
        chosen = {name: chance.choice(values) for name, values in product.options.items()}
        options = tuple(chosen.values())
        if (attributes, options) in seen:
            continue
        seen.add((attributes, options))
        limit, words = price_limit(product, chance)
        listed = ", and ".join(f"{name}: {value}" for name, value in chosen.items())
        text = f"i am looking for a {product.query} that has {' and '.join(attributes)} with {listed}{words}"
        yield Goal(asin=product.asin, instruction=text, attributes=attributes, options=options, price_upper=limit)
