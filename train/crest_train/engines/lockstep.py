"""The built-in engine: the policy itself, all rows in lockstep over one key-value cache, kept from ask to ask.

Every row feeds exactly as many tokens as every other, forced or sampled (one at a time unless all have more queued):
all rows share one cache index, no mask is needed, and a session costs one visit per token. Several processes (see
ranks.py) write for their shares of the rows in one lockstep too: whoever's turn it is to sample takes the random number
that would be its own if a single process wrote for them all.

B = rows, R = rows that sample, H = hidden size, V = vocabulary.
"""

from collections import deque

import torch
from transformers import PreTrainedModel

from crest_ops.heads import logit_options
from crest_train.cache import GrowingCache
from crest_train.engines.protocol import Answer
from crest_train.model import head_logits, hidden_states, shaped_logits
from crest_train.ranks import rank, size, total
from crest_train.sampling import Sampling, draw


class LockstepEngine:
    """Writes with the model that is being trained: nothing is pushed, and the log-probs are its own."""

    lockstep = exact = True

    def __init__(self, model: PreTrainedModel):
        self.model = model

    def open(
        self, prompts: list[list[int]], sampling: Sampling, end_token: int, generator: torch.Generator
    ) -> "LockstepWriter":
        """Begin a row behind each prompt; they are all the same. generator: on the model's device."""
        return LockstepWriter(self.model, prompts, sampling, end_token, generator)

    def push(self, model: PreTrainedModel) -> None:
        """Nothing: the model is the policy."""


class LockstepWriter:
    """Rows in one cache, `slots` says whose. A row without a queue is over, its place fed with nothing of meaning."""

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: list[list[int]],
        sampling: Sampling,
        end_token: int,
        generator: torch.Generator,
    ):
        self.model, self.generator, self.end_token = model, generator, end_token
        self.temperature, self.cuts, self.options = sampling.temperature, sampling.cuts, logit_options(model)
        self.slots = list(range(len(prompts)))
        self.queued: dict[int, deque[int]] = {}
        self.written: dict[int, Answer] = {}
        self.limits: dict[int, int] = {}
        self.cache = GrowingCache()
        if prompts and prompts[0]:
            with torch.no_grad():
                hidden_states(model, torch.tensor([prompts[0]], device=model.device), self.cache)
            self.cache.select([0] * len(prompts))

    def ask(self, row: int, ids: list[int], limit: int) -> None:
        """Queue the row's last token, which was not fed yet, and the ids."""
        unfed = self.written[row].tokens[-1:] if row in self.written else []
        self.queued[row] = deque(unfed + ids)
        self.written[row], self.limits[row] = Answer(), limit

    @torch.no_grad()
    def answers(self) -> list[tuple[int, Answer]]:
        """Feed and sample until a row is answered here; without one left, until all are in the other processes."""
        while True:
            width, num_ready = _next([len(queue) for queue in self.queued.values()])
            if not width:
                return []
            drawn_R1 = torch.rand(
                sum(num_ready), 1, dtype=torch.float64, device=self.model.device, generator=self.generator
            )
            if answered := self._step(width, drawn_R1.split(num_ready)[rank()]):
                return answered

    def _step(self, width: int, uniform_R1: torch.Tensor) -> list[tuple[int, Answer]]:
        """Feed `width` tokens of every row, sample for those that have none left, and return what is answered."""
        if not self.queued:
            return []
        if 4 * len(self.queued) <= 3 * len(self.slots):
            self.cache.select([place for place, slot in enumerate(self.slots) if slot in self.queued])
            self.slots = [slot for slot in self.slots if slot in self.queued]
        fed = [[self.queued[slot].popleft() for _ in range(width)] if slot in self.queued else [0] * width
               for slot in self.slots]  # fmt: skip
        hidden_BH = hidden_states(self.model, torch.tensor(fed, device=self.model.device), self.cache)[:, -1]
        places = [place for place, slot in enumerate(self.slots) if slot in self.queued and not self.queued[slot]]
        if not places:
            return []
        logits_RV = shaped_logits(head_logits(self.model, hidden_BH[places]), **self.options)
        drawn = draw(logits_RV, uniform_R1, self.temperature, self.cuts)
        answered = []
        for r, slot in enumerate(self.slots[place] for place in places):
            answer, token = self.written[slot], drawn.token[r]
            answer.tokens.append(token)
            answer.sampler_logp.append(drawn.sampler_logp[r])
            answer.logp.append(drawn.logp[r])
            answer.entropy.append(drawn.entropy[r])
            if token == self.end_token or len(answer.tokens) == self.limits[slot]:
                del self.queued[slot]
                answered.append((slot, answer))
            else:
                self.queued[slot].append(token)
        return answered


def _next(queued: list[int]) -> tuple[int, list[int]]:
    """How many tokens every row feeds next, 0 when all are over, and how many rows of each process then sample.

    queued: of each row that is written here, how many tokens wait to be fed.
    """
    shortest = min(queued, default=0)
    told_P2 = torch.zeros(size(), 2, dtype=torch.int64)
    told_P2[rank()] = torch.tensor([shortest, queued.count(shortest)])
    told = total(told_P2).tolist()
    width = min((length for length, _ in told if length), default=0)
    return width, [count if length == width else 0 for length, count in told]
