"""WebShop: find and buy what a customer asks for, in the shop's own text protocol (Yao et al. 2022, arXiv:2207.01206).

Worked example:

    user        WebShop [SEP] Instruction: [SEP] i am looking for a desk lamp that has usb port ... [SEP] Search
    assistant   search[desk lamp usb port blue]
    user        Instruction: [SEP] ... [SEP] Back to Search [SEP] Page 1 (Total results: 50) [SEP] B000001046 ...
    assistant   click[b000001046]
    user        Instruction: [SEP] ... [SEP] < Prev [SEP] color [SEP] black [SEP] blue [SEP] ... [SEP] Buy Now
    assistant   click[blue]
    assistant   click[buy now]          the score of the purchase, terminated; success at a score of 1
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from sorl_lightning.errors import ConfigurationError
from sorl_lightning.rollout.environments.text_game import Scene, TextGame
from sorl_lightning.rollout.environments.webshop_pages import parsed_action
from sorl_lightning.rollout.environments.webshop_server import ShopServer
from sorl_lightning.rollout.environments.webshop_shops import GeneratedShop, Shop
from sorl_lightning.types import Task

RULES = (
    "You shop online for a customer. Each turn, write one action: search[words] looks for products, click[label] "
    "follows a label of the page: a product's number, an option, a button. Buy what fits the instruction."
)


class WebShop(TextGame):
    """Shopping by instruction. Needs the extra: ``pip install 'sorl-lightning[webshop]'`` (not with ``ShopServer``).

    Args:
        shop: ``GeneratedShop`` (None: 1,000 made-up products), ``ShopFiles`` (the public data files) or ``ShopServer``
            (a running WebShop).
        test_goals: the first so many goals are the test split, as in the paper.
        validation_goals: so many after them; all others are the train split.
        rules: open with a sentence on the two actions.
        max_steps: steps after which an episode is truncated; None leaves that to the collector's turn limit.
        reward: "score": of the purchase, in [0, 1]; "success": 1 for a purchase with a score of 1.
        invalid_penalty: taken off the reward of an action that is not understood.
        action_tags: the policy thinks first and writes its action within <action> tags; the expert writes them too.
        show_admissible: append the page's actions to every observation, as verl-agent does.

    Step info: as ``TextGame``'s; "score" is 0 before the purchase.
    """

    example_action = "click[buy now]"

    def __init__(
        self,
        shop: Shop | None = None,
        test_goals: int = 500,
        validation_goals: int = 1000,
        rules: bool = True,
        max_steps: int | None = None,
        reward: Literal["score", "success"] = "score",
        invalid_penalty: float = 0.0,
        action_tags: bool = False,
        show_admissible: bool = False,
    ) -> None:
        super().__init__(max_steps, reward, invalid_penalty, action_tags, show_admissible)
        if min(test_goals, validation_goals) < 0:
            raise ConfigurationError(
                f"test_goals and validation_goals must be 0 or more, got {test_goals} and {validation_goals}"
            )
        self.shop = shop if shop is not None else GeneratedShop()
        self.test_goals = test_goals
        self.validation_goals = validation_goals
        self.rules = rules
        # A server is waited for; a shop in this process answers at once.
        self.waits = isinstance(self.shop, ShopServer)

    def tasks(self, split: str) -> Sequence[Task]:
        """Goals in the shop's order, parted as in the paper; ids are their numbers ("webshop-17")."""
        held_out = self.test_goals + self.validation_goals
        spans = {"test": (0, self.test_goals), "validation": (self.test_goals, held_out), "train": (held_out, None)}
        if split not in spans:
            raise ConfigurationError(f"split is {split!r}, it can be one of: {', '.join(spans)}")
        count = self.shop.goal_count()
        if count <= held_out:
            raise ConfigurationError(
                f"the shop has {count} goals, test_goals and validation_goals take {held_out}: train gets none"
            )
        first, end = spans[split]
        return [Task(id=f"webshop-{goal}", payload=goal) for goal in range(count)[first:end]]

    def begin(self, task: Task) -> Scene:
        self._visit = self.shop.visit(task.payload)
        opening = self._visit.page.observation
        return Scene(f"{RULES}\n\n{opening}" if self.rules else opening)

    def act(self, action: str) -> Scene | None:
        parsed = parsed_action(action)
        after = self._visit.act(*parsed) if parsed else None
        if after is None:
            return None
        self._visit, score = after, after.score
        if score is not None:
            return Scene("", score, success=score == 1, over=True)
        return Scene(after.page.observation)

    def refusal(self, action: str) -> str:
        """The page once more, as the public shop answers."""
        return self._visit.page.observation

    def understood(self) -> list[str]:
        """The page's labels; where it has a search bar, a search for the instruction's words."""
        page = self._visit.page
        searches = [f"search[{page.observation.split(' [SEP] ')[2].lower()}]"] if page.has_search_bar else []
        return sorted({*searches, *(f"click[{label}]" for label in page.clickables)})

    def shown_actions(self) -> list[str]:
        page = self._visit.page
        return ["search[<your query>]"] * page.has_search_bar + [f"click[{label}]" for label in page.clickables]

    def gold_action(self) -> str:
        return self._visit.expert_action()
