"""The Tinker API on one side, the head's commands on the other. Never schedules, keeps nothing."""

from plexrl.gateway.tinker import TinkerGateway

__all__ = ["TinkerGateway"]
