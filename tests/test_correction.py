"""Importance weights of tokens drawn from another distribution than the policy's: their values, their place, cuts."""

import math
from dataclasses import replace

import pytest
import torch
from crest_train.chat import make_chat
from crest_train.correction import corrected, importance_weight
from crest_train.credit import spans_of
from crest_train.rollouts import Sampling, rollout
from crest_train.sampling import draw
from toy import Toy, toy_model, toy_tokenizer

from crest_ops import Credit, PPOClip


def played(**sampling):
    options = Sampling(**{"max_action_tokens": 4} | sampling)
    generator = torch.Generator().manual_seed(0)
    toys = [Toy(1), Toy(3, "be brief"), Toy(2)]
    return rollout(toy_model(), make_chat(toy_tokenizer()), toys, [1, 2, 3], generator=generator, sampling=options)


def some_credit(batch):
    mask_N = spans_of(batch, torch.arange(len(batch.sessions))).mask
    return Credit(torch.ones(len(mask_N)), mask_N / 8.0, PPOClip())


def test_weight_is_the_ratio_up_to_the_cap():
    old_logp = torch.tensor([0.5, 0.1, 0.3, 0.4]).log()
    sampler_logp = torch.tensor([0.25, 0.2, 0.1, 0.4]).log()
    assert importance_weight(old_logp, sampler_logp, 2.5).tolist() == pytest.approx([2, 0.5, 2.5, 1])


def test_rollouts_of_the_policy_itself_keep_their_credit():
    batch = played()
    credit = some_credit(batch)
    assert corrected(credit, batch, 2.0) == (credit, {})


@pytest.mark.parametrize("cuts", [{"top_p": 0.6}, {"top_k": 3}, {"min_p": 0.5}])
def test_cut_rollouts_are_weighed_with_the_mass_that_was_left(cuts):
    batch = played(temperature=0.8, **cuts)
    credit, metrics = corrected(some_credit(batch), batch, 2.0)
    weight_BT = (credit.token_weight_N * 8).view_as(batch.policy)
    assert (weight_BT[~batch.policy] == 0).all()
    for row, session in enumerate(batch.sessions):
        with torch.no_grad():
            logits = toy_model()(torch.tensor([session.prompt + session.ids])).logits[0].double() / 0.8
        for place in batch.policy[row].nonzero().flatten().tolist():
            p = logits[len(session.prompt) + place - 1].softmax(-1).sort(descending=True).values
            before = p.cumsum(0) - p
            kept = {"top_p": before < 0.6, "top_k": torch.arange(len(p)) < 3, "min_p": p >= 0.5 * p[0]}[
                next(iter(cuts))
            ]
            assert float(weight_BT[row, place]) == pytest.approx(float(p[kept].sum()), abs=1e-4)
    assert (
        0 < metrics["sampling/importance_sampling_ratio/min"] < metrics["sampling/importance_sampling_ratio/max"] <= 1
    )
    assert metrics["sampling/importance_sampling_ratio/truncated"] == 0
    turn_2 = (batch.old_logp - batch.sampler_logp).abs()[batch.turn == 1].mean()
    assert metrics["sampling/sampling_logp_difference/mean/turn_2"] == pytest.approx(float(turn_2))


def test_truncated_share_counts_the_tokens_above_the_cap():
    batch = played()
    batch = replace(batch, sampler_logp=torch.where(batch.turn == 0, batch.old_logp - math.log(3), batch.sampler_logp))
    credit, metrics = corrected(some_credit(batch), batch, 2.0)
    weight_BT = (credit.token_weight_N * 8).view_as(batch.policy)
    assert (weight_BT[batch.turn == 0] == 2).all() and (weight_BT[batch.turn > 0] == 1).all()
    name = "sampling/importance_sampling_ratio/truncated"
    assert metrics[name] == pytest.approx(float((batch.turn == 0).sum() / batch.policy.sum()))
    assert (metrics[f"{name}/turn_1"], metrics[f"{name}/turn_2"]) == (1, 0)


def test_weighted_mean_over_a_cut_is_the_policys_within_the_support():
    p, f = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05]), torch.tensor([1.0, -2.0, 5.0, 3.0, 7.0])
    count = 100_000
    uniform = torch.rand(count, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = draw(p.log().expand(count, -1), uniform, 1.0, Sampling(top_k=3).cuts)
    weight = importance_weight(torch.tensor(found.logp), torch.tensor(found.sampler_logp), 2.0)
    value = weight * f[torch.tensor(found.token)]
    wanted = float((p * f)[:3].sum())
    assert abs(float(value.mean()) - wanted) < 5 * float(value.std()) / count**0.5
    assert abs(float((p * f).sum()) - wanted) > 0.5  # the rest is never seen
