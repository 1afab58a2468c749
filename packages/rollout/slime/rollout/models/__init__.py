"""Several models in one run: their engines, their fleets, and the addresses by which plug-ins call them."""

from slime.rollout.models.addresses import model_url

__all__ = ["model_url"]
