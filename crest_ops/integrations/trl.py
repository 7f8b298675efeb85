"""TRL's GRPOTrainer with this package's credit methods and its loss from hidden states.

Written against TRL 1.16. Shape letters: B rollouts, P padded prompt length, T padded completion length, N = B * T,
H hidden size, K turns, G rollouts of a group.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing

from ..heads import Head, resolve_head
from ..hidden_states import hidden_states
from ..linear import linear_token_stats
from ..linear_policy_loss import linear_policy_loss
from ..methods import METHODS, needs_of
from ..signals import Signals
from ..spans import Spans
from .rollouts import action_places
from .trl_credit import (
    TurnRewards,
    action_reward,
    assign,
    check_evaluation,
    check_method,
    check_told,
    environment_rewards,
    followed_by,
    groups,
    turn_ids_of,
    turn_list,
    turn_reward,
    turns_of_actions,
    turns_of_tokens,
    with_given,
    with_prompts,
    written_tokens,
)
from .trl_loss import check_replaced, fused_surrogate, importance_weight, loss_metrics, loss_weight

BATCH_KEYS = {
    "prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "advantages", "num_items_in_batch",
    "old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps", "importance_sampling_ratio",
}  # fmt: skip
"""What TRL puts into a batch of text."""
CREDIT_KEYS = {"token_weight", "turn", "distill"}
"""What a credit method adds, all [B, T]; its credit stands in advantages [B, T]."""
SignalsOf = Callable[[dict[str, Tensor], Spans, "CrestGRPOTrainer"], dict[str, Tensor]]


class CrestGRPOTrainer(GRPOTrainer):
    """GRPOTrainer whose loss comes from hidden states, and whose credit may come from any method of METHODS.

    The arguments are GRPOTrainer's, and:

    credit_method, credit_config: name in METHODS and an instance of its Config (None: its defaults). The config decides
        surrogate and reduction, whose count is that of the whole generation batch over all processes. "grpo" without a
        config is TRL's own: its advantages, loss_type, epsilon, delta, importance_sampling_level and so on, with TRL's
        loss and gradients up to rounding. Any other takes a beta with use_bias_correction_kl=False only (TRL 1.16's
        default is True): its penalty is the plain k3.
    signals: gives what a method needs beyond reward_B, turn_reward_K, action_reward_S, surprisal_N and entropy_N:
        signals(batch, spans, trainer) -> dict of fields of Signals. batch: TRL's tensors of the generation batch;
        spans: its policy tokens, N = B * T; trainer.environments: one environment per rollout.

    An action is a run of policy tokens, as tool_mask (a rollout_func's env_mask) shows them. Turns count from 0:

    - an environment with the attribute `turn_rewards`, the list of the rewards of the turns that ended so far (emptied
      by reset; an attribute, since TRL offers every public method to the model): an action belongs to turn
      len(turn_rewards) at the time it is written, and a turn that never ended has reward 0. Where one action ends
      several turns, those in which nothing was written must have reward 0;
    - a rollout_func may return "turn_ids", per completion the turn of every token;
    - otherwise every action is a turn. A reward function may return a list of numbers, one per turn, in place of a
      number: their sum is the reward that TRL sees. All sources add up, with TRL's reward_weights.

    Loss settings of TRL that `linear_policy_loss` does not cover (trl_loss.fused_surrogate says which) run TRL's own
    loss on log-probs and entropies of `linear_token_stats`.

    Raises ValueError, naming the setting and the way out: an unknown method, a config of another method, a method whose
    needs nobody gives, settings of TRL that the method would leave unread, groups split over processes (also of an
    evaluation, when it starts), args.cast_lm_head_to_fp32, processors (images); in training, unknown batch keys, turns
    and turn rewards that are no numbers, rewards that do not fit their turns or whose turn has no action, distillation
    over the vocabulary.
    """

    def __init__(
        self,
        *args: Any,
        credit_method: str = "grpo",
        credit_config: Any = None,
        signals: SignalsOf | None = None,
        **kwargs: Any,
    ) -> None:
        method = METHODS[credit_method]
        if credit_config is not None and not isinstance(credit_config, method.Config):
            raise ValueError(
                f"credit_config is {type(credit_config).__name__}, want {method.Config.__name__} for credit_method "
                f"{credit_method!r}"
            )
        self.credit_method = credit_method
        self.credit_config = method.Config() if credit_config is None else credit_config
        self.signals = signals
        self._uses_trl_credit = credit_method == "grpo" and credit_config is None
        super().__init__(*args, **kwargs)
        if self._is_vlm:
            raise ValueError("processing_class is a processor, want a tokenizer: only batches of text are supported")
        if self.args.cast_lm_head_to_fp32:
            raise ValueError("args.cast_lm_head_to_fp32 is True, want False: the loss applies the head's weight itself")
        resolve_head(self.model)
        if self._uses_trl_credit:
            if signals is not None:
                raise ValueError("signals is given, but credit_method 'grpo' without a credit_config asks for none")
            self._surrogate = None if self.aux_loss_enabled else fused_surrogate(self.args)
        else:
            check_replaced(self.args, credit_method, self.credit_config, aux_loss=self.aux_loss_enabled)
            check_method(credit_method, self.credit_config, signals is not None, self.accelerator, self.args)
            self._surrogate = self.credit_config.surrogate
        self._turns_begun: list[list[int | None]] = []
        self._turn_rewards: dict[int, list] = {}
        self.reward_funcs = [
            function
            if isinstance(function, nn.Module)
            else followed_by(function, functools.partial(self._note_turns, place))
            for place, function in enumerate(self.reward_funcs)
        ]

    # --- rollouts -----------------------------------------------------------------------------------------------------

    def _note_turns(self, place: int, rewards: list) -> list:
        """What TRL takes from the reward function at a place: sums of the lists of turn rewards, which are noted."""
        name = self.reward_func_names[place]
        turns = [turn_list(name, row, found) for row, found in enumerate(rewards)]
        self._turn_rewards[place] = turns
        return [found if of is None else sum(of) for found, of in zip(rewards, turns, strict=True)]

    def _generate_single_turn(self, *args, **kwargs):
        """TRL's, after noting the turn that every environment is in: the k-th call writes the k-th action."""
        rewards = environment_rewards(self.environments)
        if not self._turns_begun and any(rewards):
            raise ValueError("an environment has turn_rewards after its reset, want it emptied by reset")
        self._turns_begun.append([None if found is None else len(found) for found in rewards])
        return super()._generate_single_turn(*args, **kwargs)

    def _calculate_rewards(self, *args, **kwargs):
        self._rewards_per_func = super()._calculate_rewards(*args, **kwargs)
        return self._rewards_per_func

    def _generate(self, *args, **kwargs):
        found = super()._generate(*args, **kwargs)
        self._turn_ids = None if self._uses_trl_credit else turn_ids_of(found[5], len(found[1]))
        return found

    def _generate_and_score_completions(self, inputs):
        if not self._uses_trl_credit and not self.model.training:
            check_evaluation(self.accelerator, self.args)
        self._turns_begun, self._turn_rewards = [], {}
        batch = super()._generate_and_score_completions(inputs)
        return batch if self._uses_trl_credit else batch | self._credit(batch)

    @torch.no_grad()
    def _credit(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """What the credit method says of a scored generation batch: advantages, token_weight, turn, distill [B, T]."""
        written_BT = written_tokens(batch)
        turn_BT = self._turns(batch, written_BT)
        spans = Spans.from_mask(written_BT, turn=turn_BT, group=torch.arange(len(turn_BT), device=turn_BT.device))
        reward_B, known_B = self._rewards(len(turn_BT))
        turn_reward_K, told_B = turn_reward(spans, self._turn_sources())
        check_told(self.credit_method, self.credit_config, known_B, told_B)
        size = self.num_generations if self.model.training else self.num_generations_eval
        spans = replace(spans, group_of_trajectory=groups(size, known_B))
        signals = Signals(
            reward_B=reward_B,
            turn_reward_K=turn_reward_K,
            action_reward_S=action_reward(spans, reward_B, turn_reward_K, told_B),
            **self._policy_signals(batch),
        )
        if self.signals is not None:
            signals = with_given(signals, self.signals(batch | {"turn": turn_BT}, spans, self))
        credit = assign(
            self.credit_method, self.credit_config, spans, signals, self.accelerator, self.state.global_step
        )
        found = {"advantages": credit.credit_N, "token_weight": credit.token_weight_N, "distill": credit.distill_N}
        found = {name: values.view(written_BT.shape) for name, values in found.items() if values is not None}
        for name in found.keys() - {"token_weight"}:
            found[name] = torch.where(known_B[:, None], found[name], 0)
        return found | {"turn": turn_BT}

    def _rewards(self, num_rollouts: int) -> tuple[Tensor, Tensor]:
        """TRL's reward [B] of this process's rollouts, and [B] bool: some reward function scored it."""
        first = self.accelerator.process_index * num_rollouts
        reward_BF = self._rewards_per_func[first : first + num_rollouts]
        return (reward_BF * self.reward_weights.to(reward_BF)).nansum(1), ~reward_BF.isnan().all(1)

    def _turns(self, batch: dict[str, Tensor], written_BT: Tensor) -> Tensor:
        """The turn [B, T] of every policy token."""
        if self._turn_ids is not None:
            return turns_of_tokens(batch, self._turn_ids)
        if not self.environments or not self._turns_begun:
            return action_places(written_BT).clamp(min=0)
        rollouts = zip(*self._turns_begun, strict=True)
        turns = [[place if turn is None else turn for place, turn in enumerate(rollout)] for rollout in rollouts]
        return turns_of_actions(written_BT, turns)

    def _turn_sources(self) -> list[TurnRewards]:
        """The turn rewards that reward functions and environments gave for the batch being scored."""
        sources = [
            TurnRewards(self.reward_func_names[place], float(self.reward_weights[place]), rewards, exact=True)
            for place, rewards in self._turn_rewards.items()
        ]
        of_environments = environment_rewards(self.environments)
        sources.append(TurnRewards("environment.turn_rewards", 1.0, of_environments, exact=False))
        return [source for source in sources if any(rewards is not None for rewards in source.rewards)]

    def _policy_signals(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """surprisal_N and entropy_N of the policy that wrote the batch, where the method needs one of them."""
        if not {"surprisal_N", "entropy_N"} & set(needs_of(self.credit_method, self.credit_config)):
            return {}
        ids_BL, mask_BL, length = with_prompts(batch)
        rows = self.args.per_device_train_batch_size if self.model.training else self.args.per_device_eval_batch_size
        with disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            logp_BT, entropy_BT, _ = self._get_per_token_logps_and_entropies(
                self.model, ids_BL, mask_BL, length, batch_size=rows, compute_entropy=True
            )
        return {"surprisal_N": -logp_BT.flatten(), "entropy_N": entropy_BT.flatten()}

    # --- loss ---------------------------------------------------------------------------------------------------------

    def _get_per_token_logps_and_entropies(
        self,
        model,
        input_ids,
        attention_mask,
        logits_to_keep,
        batch_size=None,
        compute_entropy=False,
        compute_aux_loss=False,
        **multimodal,
    ):
        """TRL's, from `linear_token_stats`; with a router's loss TRL's own."""
        if compute_aux_loss:
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy, True, **multimodal
            )
        parts = zip(*(tensor.split(batch_size or len(tensor)) for tensor in (input_ids, attention_mask)), strict=True)
        found = [self._token_stats(model, *part, logits_to_keep, compute_entropy) for part in parts]
        logp_BT, entropy_BT = (torch.cat(tensors) for tensors in zip(*found, strict=True))
        return logp_BT, entropy_BT if compute_entropy else None, None

    def _token_stats(self, model, ids_BL: Tensor, mask_BL: Tensor, length: int, entropy: bool) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies (or zeros) [B, T] of the last `length` tokens."""

        def stats(hidden_BTH, head):
            found = linear_token_stats(
                hidden_BTH,
                head.weight,
                ids_BL[:, -length:],
                mask=mask_BL[:, -length:].bool(),
                temperature=self.temperature,
                outputs=("logp", "entropy") if entropy else ("logp",),
                **head.options,
            )
            return found.logp, found.entropy if entropy else torch.zeros_like(found.logp)

        return self._in_forward(model, ids_BL, mask_BL, length, stats)

    def _in_forward(self, model, ids_BL: Tensor, mask_BL: Tensor, length: int, then: Callable) -> Any:
        """then(hidden [B, T, H], head) inside the model's forward; hidden predicts the last `length` tokens."""
        batch = {"input_ids": ids_BL, "attention_mask": mask_BL, "use_cache": False}
        with self.accelerator.autocast():
            return hidden_states(model, batch, lambda h: then(h[:, -length - 1 : -1], resolve_head(model)))

    def _compute_loss(self, model, inputs):
        known = BATCH_KEYS if self._uses_trl_credit else BATCH_KEYS | CREDIT_KEYS
        if not inputs.keys() <= known:
            raise ValueError(f"batch has {sorted(inputs.keys() - known)}, want keys among {sorted(known)}")
        if self._surrogate is None:
            return super()._compute_loss(model, inputs)
        mode = "train" if self.model.training else "eval"
        mask_BT, surrogate = written_tokens(inputs), self._surrogate
        rows = torch.arange(len(mask_BT), device=mask_BT.device)
        spans = Spans.from_mask(mask_BT, turn=inputs.get("turn"), group=rows)
        credit_BT = inputs["advantages"]
        credit_BT = credit_BT[:, None].expand(mask_BT.shape) if credit_BT.dim() == 1 else credit_BT
        found = []

        def loss(hidden_BTH, head):
            found.append(
                linear_policy_loss(
                    hidden_BTH,
                    head.weight,
                    inputs["completion_ids"],
                    credit_BT,
                    token_weight=self._token_weight(inputs, spans, mode).view(mask_BT.shape),
                    old_logp=inputs.get("old_per_token_logps"),
                    ref_logp=inputs.get("ref_per_token_logps") if self.beta else None,
                    kl_coef=self.beta,
                    surrogate=surrogate,
                    importance_weight=importance_weight(
                        inputs.get("importance_sampling_ratio"), mask_BT, surrogate.level
                    ),
                    spans=spans,
                    temperature=self.temperature,
                    **head.options,
                )
            )
            return found[0].loss + self._distillation(inputs, hidden_BTH, head, mode)

        total = self._in_forward(model, *with_prompts(inputs), loss)
        for name, value in loss_metrics(found[0], credit_BT, mask_BT, surrogate, self.accelerator):
            self._metrics[mode][name].append(value)
        return total

    def _window(self, mode: str) -> float:
        """Optimizer steps per generation batch: what turns its mean into the mean of an accumulation window."""
        if mode == "eval":
            return 1.0
        return self.args.steps_per_generation / self.current_gradient_accumulation_steps

    def _token_weight(self, inputs: dict[str, Tensor], spans: Spans, mode: str) -> Tensor:
        """token_weight [N] of a micro-batch."""
        if not self._uses_trl_credit:
            return (inputs["token_weight"] * self._window(mode)).flatten()
        return loss_weight(
            self.loss_type,
            spans,
            max_completion_length=self.max_completion_length,
            accumulation=self.current_gradient_accumulation_steps if mode == "train" else 1,
            window_tokens=inputs["num_items_in_batch"].clamp(min=1)
            / (self.accelerator.num_processes * self._window(mode)),
        )

    def _distillation(self, inputs: dict[str, Tensor], hidden_BTH: Tensor, head: Head, mode: str) -> Tensor | float:
        """sum of distill * logp over the tokens that a method distils; 0 without."""
        if "distill" not in inputs:
            return 0.0
        stats = linear_token_stats(
            hidden_BTH,
            head.weight,
            inputs["completion_ids"],
            mask=inputs["distill"] != 0,
            temperature=self.temperature,
            outputs=("logp",),
            **head.options,
        )
        return self._window(mode) * (inputs["distill"] * stats.logp).sum()
