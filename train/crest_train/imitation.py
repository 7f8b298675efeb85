"""Warm start of any policy: imitation of ground-truth calls, so that groups have rewards that differ.

B = sessions, T = token positions, R = policy-written positions.
"""

import torch
from rich.console import Console
from transformers import PreTrainedModel

from crest_ops import token_stats
from crest_ops.heads import logit_options
from crest_train.chat import Chat
from crest_train.config import Config
from crest_train.display import progress
from crest_train.environments import FIRST_HELD_OUT_SEED, make_environment
from crest_train.evaluate import sampling_of
from crest_train.model import policy_logits, shared_prompt
from crest_train.rollouts import Rollout, demonstrate


def imitate(model: PreTrainedModel, chat: Chat, config: Config, console: Console) -> dict[str, float]:
    """Train on sessions played with their ground truth, and return the last loss (nats per token), if there is a step.

    Adam on the mean negative log-prob of the written tokens. Sessions are counted down from the last seed that is not
    held out. A share `hinted` of them is shown as the self-teacher sees it, so that it learns to read its hints.
    """
    section = config.warm_start
    if not section.steps:
        return {}
    optimizer = torch.optim.Adam(model.parameters(), lr=section.rate, betas=config.training.betas)
    generator = torch.Generator().manual_seed(config.run.seed)
    with progress(console, "warm start", section.steps) as show:
        for step in range(section.steps):
            last = FIRST_HELD_OUT_SEED - 1 - step * section.sessions
            seeds = [last - i for i in range(section.sessions)]
            environments = [make_environment(config.environment.name, config.environment.options) for _ in seeds]
            played = demonstrate(model, chat, environments, seeds, sampling=sampling_of(config, with_teacher=True))
            hinted = torch.rand(len(seeds), generator=generator) < section.hinted
            optimizer.zero_grad()
            loss = _accumulate(model, played, hinted, config.training.rows_per_micro_batch)
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.training.clip, error_if_nonfinite=True)
            optimizer.step()
            show(step + 1, f"loss {loss:.4f}")
    return {"loss": loss}


def _accumulate(model: PreTrainedModel, played: Rollout, hinted: torch.Tensor, size: int) -> float:
    """Add the gradient of the mean negative log-prob over all written tokens, and return that mean."""
    total = int(played.policy.sum())
    loss = 0.0
    for with_hint in (False, True):
        ids_BT, written_BT = _stream(played, with_hint)
        chosen = (hinted == with_hint) & played.policy.any(1)
        for prompt, members in played.by_prompt(chosen.nonzero().flatten().tolist()):
            with shared_prompt(model, prompt) as cache:
                for start in range(0, len(members), size):
                    rows = members[start : start + size]
                    length = int(written_BT[rows].any(0).nonzero().max()) + 1
                    ids, written = (tensor[rows, :length].to(model.device) for tensor in (ids_BT, written_BT))
                    logits_RV = policy_logits(model, ids, written, cache())
                    stats = token_stats(logits_RV, ids[written], outputs=("logp",), **logit_options(model))
                    part = -stats.logp.sum() / total
                    part.backward()
                    loss += float(part.detach())
    return loss


def _stream(played: Rollout, with_hint: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and written positions [B,T] of the sessions as the policy sees them, or as the self-teacher does."""
    if not with_hint:
        return played.ids, played.policy
    written = torch.zeros_like(played.teacher_ids, dtype=torch.bool)
    row_R, column_R = played.policy.nonzero(as_tuple=True)
    written[row_R, played.teacher_position[row_R, column_R]] = True
    return played.teacher_ids, written
