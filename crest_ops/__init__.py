"""Custom-kernel accelerated credit assignment and loss for agentic RL."""

from .advantages import group_advantage, leave_one_out_advantage, turn_advantage
from .crest_policy_loss import crest_policy_loss
from .divergence import TokenDivergence, token_divergence
from .heads import Head, check_head, head_of
from .linear import linear_token_stats
from .linear_divergence import linear_token_divergence
from .linear_policy_loss import linear_policy_loss
from .memory import estimate_memory
from .methods import METHODS
from .methods.crest import CrestConfig
from .methods.grpo import GRPOConfig
from .methods.turn_grpo import TurnGRPOConfig
from .policy_loss import PolicyLoss, policy_loss
from .reductions import action_mean, fixed_length, sequence_mean, token_mean, turn_mean
from .signals import Credit, Signals
from .spans import Spans
from .surrogates import CISPO, GSPO, SAPO, PPOClip
from .token_stats import TokenStats, token_stats

__all__ = [
    "CISPO",
    "Credit",
    "CrestConfig",
    "GRPOConfig",
    "GSPO",
    "Head",
    "METHODS",
    "PPOClip",
    "PolicyLoss",
    "SAPO",
    "Signals",
    "Spans",
    "TokenDivergence",
    "TokenStats",
    "TurnGRPOConfig",
    "action_mean",
    "check_head",
    "crest_policy_loss",
    "estimate_memory",
    "fixed_length",
    "group_advantage",
    "head_of",
    "leave_one_out_advantage",
    "linear_policy_loss",
    "linear_token_divergence",
    "linear_token_stats",
    "policy_loss",
    "sequence_mean",
    "token_divergence",
    "token_mean",
    "token_stats",
    "turn_advantage",
    "turn_mean",
]
