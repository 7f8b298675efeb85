"""What a rollout needs of whatever writes for the policy: token ids in, token ids and log-probs out, weights pushed."""

from dataclasses import dataclass, field
from typing import Protocol

import torch
from transformers import PreTrainedModel

from crest_train.sampling import Sampling


@dataclass
class Answer:
    """What was written for one row, the token that ended it included.

    sampler_logp: log-prob of each token under the distribution that it was drawn from (temperature, cuts and all).
    logp, entropy: of the policy's whole distribution at the sampling temperature; NaN where the engine cannot say.
    """

    tokens: list[int] = field(default_factory=list)
    sampler_logp: list[float] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    entropy: list[float] = field(default_factory=list)


class Writer(Protocol):
    """Writes for some rows, each asked again and again until nobody asks for it any more."""

    def ask(self, row: int, ids: list[int], limit: int) -> None:
        """Have a row go on behind `ids`, which follow its prompt and all that it was asked and has answered before.

        It is answered when it writes the end token, or `limit` >= 1 tokens without.
        """

    def answers(self) -> list[tuple[int, Answer]]:
        """The rows that are answered by now; waits for one at least. Empty when no row is being written."""


class Engine(Protocol):
    """Writes with the policy's weights as they were last pushed.

    lockstep: whether rows that are opened together have to begin with the same prompt.
    exact: whether its log-probs and entropies are those of the policy in training; else these are made by one pass.
    """

    lockstep: bool
    exact: bool

    def open(self, prompts: list[list[int]], sampling: Sampling, end_token: int, generator: torch.Generator) -> Writer:
        """Begin a row behind each prompt, the rows of this process; the other processes do the same with theirs."""

    def push(self, model: PreTrainedModel) -> None:
        """Take the policy's weights as they are now."""
