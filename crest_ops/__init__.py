"""Custom-kernel accelerated credit assignment and loss for agentic RL."""

from .advantages import anchor_advantage, group_advantage, leave_one_out_advantage, turn_advantage
from .crest_policy_loss import crest_policy_loss
from .divergence import TokenDivergence, token_divergence
from .heads import Head, resolve_head
from .hidden_states import check_head, hidden_states
from .linear import linear_token_stats
from .linear_divergence import linear_token_divergence
from .linear_policy_loss import linear_policy_loss
from .memory import estimate_memory
from .methods import METHODS
from .methods.abc import ABCConfig, clue_score, sft_weight
from .methods.cispo import CISPOConfig
from .methods.crest import CrestConfig
from .methods.dapo import DAPOConfig, dynamic_sampling
from .methods.dr_grpo import DrGRPOConfig
from .methods.efca import EFCAConfig
from .methods.factor import FactorConfig
from .methods.gigpo import GiGPOConfig
from .methods.grpo import GRPOConfig
from .methods.gspo import GSPOConfig
from .methods.mt_grpo import MTGRPOConfig
from .methods.responsibility import ResponsibilityConfig, redistribute
from .methods.rlsd import RLSDConfig
from .methods.serl import SERLConfig
from .methods.toolopd import ToolOPDConfig
from .methods.trace import TraceConfig
from .methods.triage import TriageConfig, role_projection
from .methods.turn_grpo import TurnGRPOConfig
from .policy_loss import PolicyLoss, policy_loss
from .reductions import action_mean, fixed_length, sequence_mean, token_mean, turn_mean
from .returns import discounted_return, k_step_credit, log_ratio_td, td_credit
from .signals import AdditiveCredit, Credit, MultiplicativeCredit, Signals
from .spans import Spans
from .surrogates import CISPO, GSPO, SAPO, PPOClip
from .token_stats import TokenStats, token_stats

__all__ = [
    "ABCConfig",
    "AdditiveCredit",
    "CISPO",
    "CISPOConfig",
    "Credit",
    "CrestConfig",
    "DAPOConfig",
    "DrGRPOConfig",
    "EFCAConfig",
    "FactorConfig",
    "GRPOConfig",
    "GSPO",
    "GSPOConfig",
    "GiGPOConfig",
    "Head",
    "METHODS",
    "MTGRPOConfig",
    "MultiplicativeCredit",
    "PPOClip",
    "PolicyLoss",
    "RLSDConfig",
    "ResponsibilityConfig",
    "SAPO",
    "SERLConfig",
    "Signals",
    "Spans",
    "TokenDivergence",
    "TokenStats",
    "ToolOPDConfig",
    "TraceConfig",
    "TriageConfig",
    "TurnGRPOConfig",
    "action_mean",
    "anchor_advantage",
    "check_head",
    "clue_score",
    "crest_policy_loss",
    "discounted_return",
    "dynamic_sampling",
    "estimate_memory",
    "fixed_length",
    "group_advantage",
    "hidden_states",
    "k_step_credit",
    "leave_one_out_advantage",
    "linear_policy_loss",
    "linear_token_divergence",
    "linear_token_stats",
    "log_ratio_td",
    "policy_loss",
    "redistribute",
    "resolve_head",
    "role_projection",
    "sequence_mean",
    "sft_weight",
    "td_credit",
    "token_divergence",
    "token_mean",
    "token_stats",
    "turn_advantage",
    "turn_mean",
]
