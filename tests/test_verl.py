"""The drop-in for verl against hand-worked values; `verl_conformance.py` compares it with verl itself."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from stand_ins import install, near, registrar

from crest_ops import METHODS, GRPOConfig
from crest_ops.integrations import verl
from crest_ops.integrations.rollouts import action_spans

MASK = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()


@pytest.fixture
def registries(monkeypatch):
    """verl 0.9.1: two dicts behind decorators."""
    losses, estimators = {}, {}
    install(
        monkeypatch,
        "verl.trainer.ppo.core_algos",
        register_policy_loss=registrar(losses),
        register_adv_est=registrar(estimators),
    )
    verl.register()
    return losses, estimators


def actor_config(**changes):
    """The fields of ActorConfig that are read."""
    fields = dict(
        clip_ratio=0.2, clip_ratio_low=None, clip_ratio_high=None, clip_ratio_c=3.0, tau_pos=1.0, tau_neg=1.05,
        global_batch_info={},
    )  # fmt: skip
    return SimpleNamespace(**(fields | changes))


def test_names(registries):
    losses, estimators = registries
    assert set(losses) == {"crest_ppo", "crest_gspo", "crest_gspo_action", "crest_cispo", "crest_sapo"}
    assert {"crest_grpo", "crest_turn_grpo", "crest_dr_grpo", "crest_mt_grpo"} <= set(estimators)
    assert "crest_crest" not in estimators


T = 4
LOCAL = {
    "token-mean": [1 / 4] * 4,
    "token-sum": [1.0] * 4,
    "seq-mean-token-sum": [1 / 2] * 4,
    "seq-mean-token-sum-norm": [1 / 2 / T] * 4,
    "seq-mean-token-mean": [1 / 6, 1 / 6, 1 / 6, 1 / 2],
}
GLOBAL = {
    "token-mean": [2 / 10] * 4,
    "token-sum": [2.0] * 4,
    "seq-mean-token-sum": [2 / 8] * 4,
    "seq-mean-token-sum-norm": [2 / 8 / 100] * 4,
    "seq-mean-token-mean": [2 / 24, 2 / 24, 2 / 24, 2 / 8],
}


@pytest.mark.parametrize("mode", verl.AGG_MODES)
def test_weights_of_every_mode(mode):
    info = dict(dp_size=2, batch_num_tokens=10, global_batch_size=8, loss_scale_factor=100)
    for wanted, found in (
        (LOCAL[mode], verl.token_weight(action_spans(MASK), mode, T)),
        (GLOBAL[mode], verl.token_weight(action_spans(MASK), mode, T, **info)),
    ):
        torch.testing.assert_close(found[MASK.flatten()], torch.tensor(wanted))
        assert (found[~MASK.flatten()] == 0).all()


@pytest.mark.parametrize("mode", verl.AGG_MODES)
def test_micro_batches_add_up_to_the_whole(mode):
    info = dict(batch_num_tokens=4, global_batch_size=2)
    whole = verl.token_weight(action_spans(MASK), mode, T, **info)
    pieces = [verl.token_weight(action_spans(row[None]), mode, T, **info) for row in MASK]
    torch.testing.assert_close(torch.cat(pieces), whole)


@pytest.mark.parametrize("mode", verl.AGG_MODES)
@pytest.mark.parametrize("info", [{}, {"dp_size": 2, "batch_num_tokens": 0, "global_batch_size": 0}])
def test_a_batch_of_which_everything_was_rejected(mode, info):
    assert (verl.token_weight(action_spans(MASK & False), mode, T, **info) == 0).all()


@pytest.mark.parametrize(
    "mode, info, match",
    [
        ("token-mean", {"dp_size": 2, "global_batch_size": 3}, "batch_num_tokens"),
        ("seq-mean-token-sum", {"dp_size": 2, "batch_num_tokens": 3}, "global_batch_size"),
        ("sequence-mean", {}, "loss_agg_mode"),
    ],
)
def test_weights_name_what_is_missing(mode, info, match):
    with pytest.raises(ValueError, match=match):
        verl.token_weight(action_spans(MASK), mode, T, **info)


OLD = torch.tensor([[-1.0, -1.0, 0.0, -2.0], [-1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
# ratios 1.5, 0.5, -, 4 | 1.1
NEW = OLD + torch.tensor([[1.5, 0.5, 1.0, 4.0], [1.1, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]]).log()
ADVANTAGES = torch.tensor([[1.0, 1.0, 9.0, -1.0], [2.0, 9.0, 9.0, 9.0], [9.0] * 4])


def call(losses, name, **changes):
    logp = NEW.clone().requires_grad_()
    arguments = dict(
        old_log_prob=OLD, log_prob=logp, advantages=ADVANTAGES, response_mask=MASK, loss_agg_mode="token-mean",
        config=actor_config(), rollout_is_weights=None,
    )  # fmt: skip
    loss, metrics = losses[name](**(arguments | changes))
    loss.backward()
    return float(loss.detach()), logp.grad, metrics


def test_ppo_by_hand(registries):
    """-min(1.5, 1.2), -min(0.5, 0.8), dual clip -(-1) * min(4, 3), -1.1 * 2; gradient where nothing is clipped."""
    loss, grad, metrics = call(registries[0], "crest_ppo")
    assert loss == near((-1.2 - 0.5 + 3.0 - 2.2) / 4)
    wanted = torch.zeros(3, 4)
    wanted[0, 1], wanted[1, 0] = -0.5 / 4, -2.2 / 4
    torch.testing.assert_close(grad, wanted)
    assert {key: float(value) for key, value in metrics.items()} == near(
        {
            "actor/pg_clipfrac": 1 / 4,
            "actor/pg_clipfrac_lower": 1 / 4,
            "actor/ppo_kl": -(math.log(1.5) + math.log(0.5) + math.log(4) + math.log(1.1)) / 4,
        }
    )


def test_separate_bounds_and_rollout_weights(registries):
    config = actor_config(clip_ratio_low=0.6, clip_ratio_high=0.4, clip_ratio_c=10.0)
    weights = torch.tensor([[2.0, 1.0, math.nan, 0.5], [1.0, 0.0, 0.0, 0.0], [math.nan] * 4])
    loss, _, _ = call(registries[0], "crest_ppo", config=config, rollout_is_weights=weights)
    assert loss == near((-2 * 1.4 - 0.5 + 0.5 * 4.0 - 2.2) / 4)


def test_gspo_by_hand(registries):
    """One ratio a row, (1.5 * 0.5 * 4)^(1/3); per action: (1.5 * 0.5)^(1/2) and 4. Clip .2."""
    row, first = 3 ** (1 / 3), 0.75**0.5
    loss, _, _ = call(registries[0], "crest_gspo")
    assert loss == near((-1.2 - 1.2 + row - 2.2) / 4)
    loss, grad, _ = call(registries[0], "crest_gspo_action")
    assert loss == near((-first - first + 4.0 - 2.2) / 4)
    torch.testing.assert_close(grad[0], torch.tensor([-first, -first, 0.0, 4.0]) / 4)


def test_cispo_by_hand(registries):
    loss, grad, _ = call(registries[0], "crest_cispo", loss_agg_mode="token-sum")
    weight = torch.tensor([1.2, 0.8, 1.2, 1.1])
    advantage, logp = ADVANTAGES[MASK], NEW[MASK]
    assert loss == near(float(-(weight * advantage * logp).sum()))
    torch.testing.assert_close(grad[MASK], -weight * advantage)


def test_sapo_by_hand_in_every_mode(registries):
    def gate(ratio, tau):
        return 4 / tau / (1 + math.exp(-tau * (ratio - 1)))

    tokens = [-gate(1.5, 1.0), -gate(0.5, 1.0), gate(4.0, 1.05), -2 * gate(1.1, 1.0)]
    loss, _, _ = call(registries[0], "crest_sapo", loss_agg_mode="seq-mean-token-mean")
    assert loss == near((sum(tokens[:3]) / 3 + tokens[3]) / 2)
    loss, _, _ = call(registries[0], "crest_sapo", loss_agg_mode="token-mean")
    assert loss == near(sum(tokens) / 4)


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"config": None}, "config"),
        ({"teacher_log_prob": OLD}, "teacher_log_prob"),
        ({"loss_agg_mode": "mean"}, "loss_agg_mode"),
        ({"response_mask": MASK[:2]}, "response_mask"),
        ({"advantages": ADVANTAGES[:, :1]}, "advantages"),
        ({"config": actor_config(clip_ratio=1.5)}, "low"),
    ],
)
def test_losses_name_what_is_wrong(registries, changes, match):
    with pytest.raises(ValueError, match=match):
        call(registries[0], "crest_ppo", **changes)


def test_unknown_counts_raise_and_empty_keywords_do_not(registries):
    with pytest.raises(TypeError, match="num_microbatches"):
        call(registries[0], "crest_ppo", config=actor_config(global_batch_info={"num_microbatches": 2}))
    call(registries[0], "crest_ppo", reserved=None)


# Two rollouts of one task and one of another; a reward on the last token of an action or on the reply to it.
TURNS = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 1], [1, 0, 0, 0]]).bool()
REWARDS = torch.tensor([[0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0], [2.0, 0.0, 0.0, 0.0]])
INDEX = np.array(["a", "a", "b"], dtype=object)


def estimate(estimators, name, **changes):
    arguments = dict(
        token_level_rewards=REWARDS, response_mask=TURNS.long(), index=INDEX,
        config=SimpleNamespace(norm_adv_by_std_in_grpo=True),
    )  # fmt: skip
    advantages, returns = estimators[name](**(arguments | changes))
    assert torch.equal(advantages, returns)
    return advantages


def test_turns_are_compared_by_their_place(registries):
    """Rewards of the first actions 1 and 0, of the second 0 and 1: z-scores of +-1/sqrt(2); nothing for a lone one."""
    score = 0.5 / (math.sqrt(0.5) + 1e-6)
    wanted = score * torch.tensor([[1.0, 0.0, -1.0, -1.0], [-1.0, -1.0, 0.0, 1.0], [0.0] * 4])
    torch.testing.assert_close(estimate(registries[1], "crest_turn_grpo"), wanted)


def test_outcomes_are_compared_by_their_sums(registries):
    rewards = REWARDS.clone()
    rewards[1, 3] = 3.0
    found = estimate(registries[1], "crest_dr_grpo", token_level_rewards=rewards, index=torch.tensor([7, 7, 8]))
    torch.testing.assert_close(found, torch.tensor([[-1.0], [1.0], [0.0]]) * TURNS)


def test_dividing_by_the_std_is_not_silently_kept(registries):
    config = SimpleNamespace(norm_adv_by_std_in_grpo=False)
    with pytest.raises(ValueError, match="norm_adv_by_std_in_grpo"):
        estimate(registries[1], "crest_turn_grpo", config=config)
    estimate(registries[1], "crest_dr_grpo", config=config)
    plain = verl.advantage_estimator("grpo", GRPOConfig(scale="none", singleton="reward"))
    found = estimate({"mine": plain}, "mine", config=config)
    torch.testing.assert_close(found, torch.tensor([[0.0], [0.0], [2.0]]) * TURNS)


def test_estimators_refuse_what_they_cannot_use(registries):
    with pytest.raises(ValueError, match="reward_baselines"):
        estimate(registries[1], "crest_grpo", reward_baselines=torch.zeros(3))
    with pytest.raises(ValueError, match="index"):
        estimate(registries[1], "crest_grpo", index=None)
    with pytest.raises(ValueError, match="teacher_gap_N.*verl"):
        verl.advantage_estimator("rlsd")
    with pytest.raises(ValueError, match="GRPOConfig"):
        verl.advantage_estimator("grpo", METHODS["turn_grpo"].Config())
    with pytest.raises(ValueError, match="nothing"):
        verl.advantage_estimator("nothing")
