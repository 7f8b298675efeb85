"""The memory that a run will take, part by part, before a weight is loaded.

Bytes are those of tensors: what passes take is counted on meta tensors (footprint.py), what the loss takes is
`crest_ops.estimate_memory`, the rest is arithmetic on sizes. Above them comes what a process holds that has imported
everything: some 400 MiB, and on a GPU its driver's share and what the allocator cannot use. Attention is counted as
torch's fused kernels have it, whatever policy.attention says.

T = tokens of a micro-batch, padding counted, R = those that the policy wrote, H = hidden size, V = vocabulary.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM

from crest_ops import estimate_memory
from crest_ops.heads import logit_options
from crest_train.architectures import architecture
from crest_train.config import Config
from crest_train.credit import needs_of
from crest_train.footprint import UpdatePass, meta_tensors, rollout_pass, scoring_pass, update_pass
from crest_train.loading import with_options
from crest_train.model import context_length, recomputing_layers

SHARE = 0.25
"""Of a session's tokens, the part that the policy writes, where nothing else is known."""

_SHORT = 512  # tokens: the shortest session, but for one token, whose passes `longest` counts


@dataclass(frozen=True)
class Sizes:
    """A run's sessions: tokens of the longest one, of which the first `prompt` are shared by all that play it, and the
    part of the others that the policy writes."""

    tokens: int
    prompt: int = 0
    share: float = SHARE


@dataclass(frozen=True)
class Plan:
    """Bytes of each part of a run; its phases add them up.

    Always there: weights; reference, a frozen copy of them for the methods that read one; optimizer, moments and
    float32 copies of narrower weights. Rollout: cache, keys and values of all rows; sampling, what a step of it takes.
    Teacher: scoring, forward passes without gradient, and their head. Update: gradients, accumulated; activations, held
    between a forward and its backward pass; head, chunks of logits and what else the loss from hidden states takes;
    backward, the most that is held in a backward pass, activations among it; stepping, what the optimizer's step takes.
    full_logits: what would stand in head's place where all [T,V] logits are kept in float32, with their gradient.
    micro_batch: T.
    """

    micro_batch: int
    weights: int
    reference: int
    optimizer: int
    cache: int
    sampling: int
    scoring: int
    gradients: int
    activations: int
    head: int
    backward: int
    stepping: int
    full_logits: int

    @property
    def resident(self) -> int:
        """What is there in every phase."""
        return self.weights + self.reference + self.optimizer

    @property
    def phases(self) -> dict[str, int]:
        """Peak of each phase."""
        return {
            "rollout": self.resident + self.cache + self.sampling,
            "teacher": self.resident + self.scoring,
            "update": self._update(self.head),
        }

    @property
    def peak(self) -> int:
        """The highest of the phases' peaks."""
        return max(self.phases.values())

    @property
    def with_full_logits(self) -> int:
        """The update's peak with all logits."""
        return self._update(self.full_logits)

    def _update(self, head: int) -> int:
        return self.resident + self.gradients + max(self.activations + head, self.backward, self.stepping)


class Planner:
    """Plans of a configuration, whose policy is made of meta tensors.

    Raises ValueError where the policy's architecture is not to be had, or not to be trained as [policy] says.
    """

    def __init__(self, config: Config):
        self.config, section = config, config.policy
        sizes = architecture(section)
        self.context = getattr(sizes.get_text_config(), "max_position_embeddings", None) or 2**31
        with meta_tensors():
            dtype = getattr(torch, section.dtype)
            model = AutoModelForCausalLM.from_config(sizes, dtype=dtype, attn_implementation="sdpa")
            self.model = with_options(model, section.model_copy(update={"liger": False})).eval()
        self.dtype, self.width, self.vocabulary = dtype, *reversed(self.model.get_output_embeddings().weight.shape)

    def plan(self, sizes: Sizes) -> Plan:
        """The plan for sessions of these sizes. Raises ValueError where they have no room for an action."""
        config, needs = self.config, needs_of(self.config.method)
        if not 0 <= sizes.prompt <= sizes.tokens - 3:
            raise ValueError(
                f"prompt: found {sizes.prompt}, wanted 0 or more and less than --tokens {sizes.tokens} - 2"
            )
        rows, length, prompt = self._micro_batch(sizes)
        micro_batch, written = rows * length, max(1, round(rows * (sizes.tokens - sizes.prompt) * sizes.share))
        learning = [p for p in self.model.parameters() if p.requires_grad]
        weights = sum(p.nbytes for p in (*self.model.parameters(), *self.model.buffers()))
        cache = sampling = scoring = 0
        with meta_tensors():
            self._widen(sizes.tokens)
            passed = update_pass(self.model, rows, length, prompt, written)
            if config.rollout.engine == "transformers":
                played = rollout_pass(self.model, self.rows, sizes.tokens, sizes.prompt, logit_options(self.model))
                cache, sampling = played.cache, played.step
            if "teacher_gap_N" in needs or "skill_gap_N" in needs:
                scoring = scoring_pass(self.model, rows, sizes.tokens - sizes.prompt, sizes.prompt)
                scoring += self._head(written, frozen=True)
        return Plan(
            micro_batch=micro_batch,
            weights=weights,
            reference=weights if "gold_logp" in needs else 0,
            optimizer=sum(p.numel() for p in learning) * self._bytes_of_optimizer(),
            cache=cache,
            sampling=sampling,
            scoring=scoring,
            gradients=sum(p.nbytes for p in learning),
            activations=passed.saved,
            head=self._head(written),
            backward=passed.backward,
            stepping=self._stepping([p.numel() for p in learning]),
            full_logits=8 * micro_batch * self.vocabulary,
        )

    def longest(self, memory: int, plan: Plan, share: float = SHARE) -> tuple[int, int]:
        """Tokens of the longest session whose update, as a micro-batch of its own, fits into so many bytes, and those
        with full logits; 0: none. plan: of any sessions."""
        room = memory - plan.resident - plan.gradients

        @functools.cache
        def passed(tokens: int) -> UpdatePass:
            with meta_tensors():
                self._widen(tokens)
                return update_pass(self.model, 1, tokens, 0, max(1, round(tokens * share)))

        def last(head: Callable[[int], int]) -> int:
            # Passes are counted at lengths four times apart, and taken as lines between them, which they hardly leave.
            def fits(tokens: int, low: int, high: int) -> bool:
                part = (tokens - low) / (high - low)
                saved, backward = (
                    (1 - part) * getattr(passed(low), name) + part * getattr(passed(high), name)
                    for name in ("saved", "backward")
                )
                return max(saved + head(tokens), backward, plan.stepping) <= room

            low, high = 1, _SHORT
            while fits(high, low, high) and high < 2**31:
                low, high = high, 4 * high
            return _last(lambda tokens: fits(tokens, low, high), high)

        return (
            last(lambda tokens: self._head(max(1, round(tokens * share)))),
            last(lambda tokens: 8 * tokens * self.vocabulary),
        )

    def longest_played(self, memory: int, plan: Plan, sizes: Sizes) -> int:
        """Tokens of the longest sessions that fit when all rows of a rollout are so long. plan: that of these sizes."""
        return max(0, (memory - plan.resident) * sizes.tokens // max(1, plan.cache + plan.sampling))

    def _micro_batch(self, sizes: Sizes) -> tuple[int, int, int]:
        """Rows, their tokens, and those of the prompt before them, as packing.py lays out sessions of one length."""
        budget = self.config.training.tokens_per_micro_batch
        if self.config.policy.attention == "flash_attention_2":
            return 1, max(budget, sizes.tokens), 0
        prompt = 0 if recomputing_layers(self.model) else sizes.prompt
        length = sizes.tokens - prompt
        return max(1, budget // length), length, prompt

    @property
    def rows(self) -> int:
        """How many sessions are played at a time at most."""
        config = self.config
        sessions = max(config.rollout.sessions * config.rollout.group_size, config.evaluation.sessions)
        return min(config.rollout.rows, sessions)

    def _head(self, written: int, frozen: bool | None = None) -> int:
        weight = self.model.get_output_embeddings().weight
        return estimate_memory(
            written,
            1.0,
            self.width,
            self.vocabulary,
            dtype=self.dtype,
            frozen_head=not weight.requires_grad if frozen is None else frozen,
            device=self.config.policy.device,
        )

    def _bytes_of_optimizer(self) -> int:
        if self.config.training.optimizer == "adam_8bit":
            return 2
        return 8 if self.dtype == torch.float32 else 12

    def _stepping(self, sizes: list[int]) -> int:
        """Adam's root of the second moments, twice, and a float32 gradient beside a narrower one: of one parameter at a
        time, but of all on a GPU where torch takes float32 parameters together."""
        if self.config.training.optimizer == "adam_8bit":
            return 0
        if self.dtype != torch.float32:
            return 12 * max(sizes)
        return 8 * max(sizes) if self.config.policy.device == "cpu" else 4 * sum(sizes)

    def _widen(self, tokens: int) -> None:
        config = self.model.config.get_text_config()
        config.max_position_embeddings = max(tokens, context_length(self.model))


def _last(fits: Callable[[int], bool], high: int) -> int:
    """The largest number below `high` that fits, where all smaller ones do; 0 if 1 does not."""
    low = 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
