"""Worlds that ship with the package; what an optional one needs is imported when it is used."""

from sorl_lightning.rollout.environments.alfworld import AlfWorld
from sorl_lightning.rollout.environments.gymnasium_text import GymnasiumActions, GymnasiumText
from sorl_lightning.rollout.environments.mixture import Member, Mixture
from sorl_lightning.rollout.environments.multi_hop_search import MultiHopSearch
from sorl_lightning.rollout.environments.multiple_choice import MultipleChoice
from sorl_lightning.rollout.environments.recorded_chats import RecordedChats
from sorl_lightning.rollout.environments.scienceworld import ScienceWorld
from sorl_lightning.rollout.environments.textworld_express import TextWorldExpress
from sorl_lightning.rollout.environments.tool_use import ToolUse
from sorl_lightning.rollout.environments.webshop import WebShop
from sorl_lightning.rollout.environments.webshop_server import ShopServer
from sorl_lightning.rollout.environments.webshop_shops import GeneratedShop, ShopFiles

__all__ = [
    "TextWorldExpress",
    "AlfWorld",
    "ScienceWorld",
    "WebShop",
    "GeneratedShop",
    "ShopFiles",
    "ShopServer",
    "MultipleChoice",
    "MultiHopSearch",
    "ToolUse",
    "RecordedChats",
    "Mixture",
    "Member",
    "GymnasiumText",
    "GymnasiumActions",
]
