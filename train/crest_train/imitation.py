"""Warm start of any policy: imitation of ground-truth calls, so that groups have rewards that differ.

B = sessions, T = token positions, R = policy-written positions.
"""

import torch
from rich.console import Console
from transformers import PreTrainedModel

from crest_ops import token_stats
from crest_ops.heads import logit_options
from crest_train.chat import Chat
from crest_train.config import Config, TeacherSection
from crest_train.contexts import hints, teacher_stream
from crest_train.display import progress
from crest_train.environments import FIRST_HELD_OUT_SEED, make_environment
from crest_train.evaluate import sampling_of
from crest_train.model import context_length, policy_logits, shared_prompt
from crest_train.optimizer import make_optimizer
from crest_train.packing import parts
from crest_train.ranks import share, total, total_gradients
from crest_train.rollouts import Rollout, demonstrate

Stream = tuple[torch.Tensor, torch.Tensor]
"""Token ids [B,T] int64 of sessions, and which of them the policy wrote [B,T] bool."""


def imitate(model: PreTrainedModel, chat: Chat, config: Config, console: Console) -> dict[str, float]:
    """Train on sessions played with their ground truth, and return the last loss (nats per token), if there is a step.

    Adam on the mean negative log-prob of the written tokens. Sessions are counted down from the last seed that is not
    held out. A share `hinted` of them is shown with the ground truth, in the places and the template of the
    self-teacher's hints, so that it learns to read them.
    """
    section = config.warm_start
    if not section.steps:
        return {}
    optimizer = make_optimizer(model, config.training, rate=section.rate)
    generator = torch.Generator().manual_seed(config.run.seed)
    with progress(console, "warm start", section.steps) as show:
        for step in range(section.steps):
            last = FIRST_HELD_OUT_SEED - 1 - step * section.sessions
            seeds = [last - i for i in range(section.sessions)]
            environments = [make_environment(config.environment.name, config.environment.options) for _ in seeds]
            played = demonstrate(model, chat, environments, seeds, sampling=sampling_of(config, gold=True))
            hinted = torch.rand(len(seeds), generator=generator) < section.hinted
            optimizer.zero_grad()
            streams = (played.ids, played.policy), _hinted_stream(model, chat, played, config.teacher)
            loss = _accumulate(model, played, streams, hinted, config.training.tokens_per_micro_batch)
            total_gradients(model.parameters())
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.training.clip, error_if_nonfinite=True)
            optimizer.step()
            show(step + 1, f"loss {loss:.4f}")
    return {"loss": loss}


def _accumulate(
    model: PreTrainedModel, played: Rollout, streams: tuple[Stream, Stream], hinted: torch.Tensor, tokens: int
) -> float:
    """Add this process's share of the gradient of the mean negative log-prob over all written tokens; return that mean.

    streams: the sessions without and with hints; hinted [B] bool: which of the two is taken.
    """
    num_written = sum(int(written_BT[hinted == with_hint].sum()) for with_hint, (_, written_BT) in enumerate(streams))
    loss = 0.0
    for with_hint, (ids_BT, written_BT) in enumerate(streams):
        chosen = (hinted == with_hint) & written_BT.any(1)
        length_B = (written_BT * torch.arange(1, written_BT.shape[1] + 1)).amax(1)
        for prompt, members in played.by_prompt(share(chosen.nonzero().flatten().tolist())):
            with shared_prompt(model, prompt) as cache:
                for rows in parts(members, length_B, tokens):
                    length = int(length_B[rows].max())
                    ids, written = (tensor[rows, :length].to(model.device) for tensor in (ids_BT, written_BT))
                    logits_RV = policy_logits(model, ids, written, cache())
                    stats = token_stats(logits_RV, ids[written], outputs=("logp",), **logit_options(model))
                    part = -stats.logp.sum() / num_written
                    part.backward()
                    loss += float(part.detach())
    return total(torch.tensor(loss, dtype=torch.float64)).item()


def _hinted_stream(model: PreTrainedModel, chat: Chat, played: Rollout, section: TeacherSection) -> Stream:
    """The sessions with the ground truth as hints; nothing counts as written beyond the model's context."""
    section = section.model_copy(update={"context": "ground_truth"})
    alone = torch.arange(len(played.sessions))
    ids_BT, position_BT = teacher_stream(chat, played, hints(played, alone, section), section)
    written_BT = torch.zeros_like(ids_BT, dtype=torch.bool)
    row_R, column_R = played.policy.nonzero(as_tuple=True)
    written_BT[row_R, position_BT[row_R, column_R]] = True
    prompt_B = torch.tensor([len(session.prompt) for session in played.sessions])
    inside_BT = torch.arange(ids_BT.shape[1]) < (context_length(model) - prompt_B)[:, None]
    return ids_BT, written_BT & inside_BT
