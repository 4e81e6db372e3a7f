"""Worlds that ship with the package; what an optional one needs is imported when it is used."""

from sorl_lightning.rollout.environments.mixture import Member, Mixture
from sorl_lightning.rollout.environments.multi_hop_search import MultiHopSearch
from sorl_lightning.rollout.environments.textworld_express import TextWorldExpress

__all__ = ["Member", "Mixture", "MultiHopSearch", "TextWorldExpress"]
