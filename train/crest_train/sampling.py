"""How a policy's next token is drawn: temperature first, then what cuts the distribution, then one uniform number.

R = rows, V = vocabulary.
"""

from dataclasses import dataclass

import torch
from transformers import LogitsProcessorList, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper


@dataclass(frozen=True)
class Sampling:
    """How the policy writes: temperature > 0, at most max_action_tokens per action, `rows` sessions played at a time.

    rows: of all processes together. gold: record the ground truth of every turn begun.
    top_p, top_k, min_p: what is left of the distribution behind the temperature; 1, 0 and 0 leave it whole.
    """

    temperature: float = 1.0
    max_action_tokens: int = 8
    rows: int = 128
    gold: bool = False
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @property
    def cuts(self) -> LogitsProcessorList:
        """What sets the logits [R,V] of tokens that are not to be sampled to -inf, in vLLM's order; empty for none."""
        cuts = LogitsProcessorList()
        if self.min_p > 0:
            cuts.append(MinPLogitsWarper(self.min_p))
        if self.top_k > 0:
            cuts.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            cuts.append(TopPLogitsWarper(self.top_p))
        return cuts


@dataclass(frozen=True)
class Drawn:
    """One token per row: logp and entropy of the policy's whole distribution, sampler_logp of the one drawn from."""

    token: list[int]
    logp: list[float]
    entropy: list[float]
    sampler_logp: list[float]


def draw(logits: torch.Tensor, uniform: torch.Tensor, temperature: float, cuts: LogitsProcessorList) -> Drawn:
    """A token for each row of logits [R,V] float32: where its number of uniform [R,1] falls among summed probabilities.

    The distribution drawn from is softmax(cut(logits / temperature)): what is left by the cuts, renormalised.
    """
    scaled_RV = logits / temperature
    logp_RV = scaled_RV.log_softmax(-1)
    entropy_R = torch.special.entr(logp_RV.exp()).sum(-1)
    sampler_RV = cuts(None, scaled_RV).log_softmax(-1) if cuts else logp_RV
    sum_RV = sampler_RV.exp().cumsum(-1, dtype=torch.float64)
    chosen_R1 = torch.searchsorted(sum_RV, uniform * sum_RV[:, -1:], right=True)
    logp_R, sampler_R = (values.gather(1, chosen_R1).squeeze(1) for values in (logp_RV, sampler_RV))
    return Drawn(chosen_R1.squeeze(1).tolist(), logp_R.tolist(), entropy_R.tolist(), sampler_R.tolist())
