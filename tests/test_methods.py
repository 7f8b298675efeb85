"""METHODS and Signals: names, needs, missing and malformed signals; GRPO by hand."""

from collections.abc import Mapping
from dataclasses import FrozenInstanceError, fields, replace

import pytest
import torch
from every_signal import random_signals

from crest_ops import CrestConfig, FactorConfig, TriageConfig
from crest_ops.methods import METHODS, needs_of
from crest_ops.methods.grpo import GRPOConfig
from crest_ops.reductions import token_mean
from crest_ops.signals import Credit, Signals
from crest_ops.spans import Spans

# Trajectory 0: two turns of 1 and 2 tokens with tool output between; trajectory 1: one turn of 1 token.
SPANS = Spans.from_mask(
    torch.tensor([[0, 1, 0, 1, 1], [0, 0, 1, 0, 0]], dtype=torch.bool),
    group=torch.tensor([0, 0]),
    turn=torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 0, 0]]),
)
EVERYTHING = replace(
    random_signals(SPANS, 0, torch.float32),
    reward_B=torch.tensor([1.0, 0.0]),
    turn_reward_K=torch.tensor([1.0, 0.0, 0.0]),
)


def test_grpo_by_hand():
    credit = METHODS["grpo"].assign(SPANS, EVERYTHING, GRPOConfig(std_eps=0.0))
    half = 0.5**0.5
    torch.testing.assert_close(credit.credit_N, torch.tensor([0, half, 0, half, half, 0, 0, -half, 0, 0]))
    torch.testing.assert_close(credit.token_weight_N, torch.tensor([0, 1 / 6, 0, 1 / 6, 1 / 6, 0, 0, 1 / 2, 0, 0]))
    centred = METHODS["grpo"].assign(SPANS, EVERYTHING, GRPOConfig(scale="none", reduction="token_mean"))
    torch.testing.assert_close(centred.credit_N, torch.tensor([0, 0.5, 0, 0.5, 0.5, 0, 0, -0.5, 0, 0]))
    assert torch.equal(centred.token_weight_N, token_mean(SPANS))


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_the_same_face(name):
    method = METHODS[name]
    config = method.Config()
    with pytest.raises(FrozenInstanceError):
        config.reduction = "action_mean"
    credit = method.assign(SPANS, EVERYTHING)
    assert isinstance(credit, Credit) and (credit.distill_N is None) == (credit.distill_kind is None)
    assert credit.surrogate is config.surrogate
    assert credit.credit_N.shape == credit.token_weight_N.shape == (10,)
    assert not credit.credit_N[~SPANS.mask].any() and not credit.token_weight_N[~SPANS.mask].any()
    if hasattr(config, "reduction"):
        piece = method.assign(SPANS, EVERYTHING, replace(config, reduction="token_mean"), total=8)
        assert torch.equal(piece.token_weight_N, token_mean(SPANS, total=8))
        with pytest.raises(ValueError, match="reduction is 'median'"):
            method.Config(reduction="median")
    if hasattr(config, "std_eps"):
        with pytest.raises(ValueError, match="std_eps is -1"):
            method.Config(std_eps=-1)
    for missing in method.needs:
        with pytest.raises(ValueError, match=f"signal {missing} is missing"):
            method.assign(SPANS, replace(EVERYTHING, **{missing: None}))
        broken = getattr(EVERYTHING, missing).clone()
        with pytest.raises(ValueError, match=rf"signal {missing} has shape \[11\], want"):
            method.assign(SPANS, replace(EVERYTHING, **{missing: broken[:1].expand(11)}))
        if broken.is_floating_point():
            broken[1] = float("nan")
            with pytest.raises(ValueError, match=rf"signal {missing}\[1\] is nan"):
                method.assign(SPANS, replace(EVERYTHING, **{missing: broken}))


def test_crest_with_the_entropy_gate_needs_the_entropy():
    crest = METHODS["crest"]
    with pytest.raises(ValueError, match="signal entropy_N is missing"):
        crest.assign(SPANS, replace(EVERYTHING, entropy_N=None), crest.Config(gate="entropy"))
    crest.assign(SPANS, replace(EVERYTHING, surprisal_N=None), crest.Config(gate="entropy"))


def test_unknown_names_are_answered_with_the_known_ones():
    assert isinstance(METHODS, Mapping)
    baselines = ["grpo", "turn_grpo", "dr_grpo", "dapo", "gspo", "cispo", "gigpo", "mt_grpo", "rlsd"]
    papers = ["serl", "crest", "factor", "trace", "efca", "triage", "abc", "toolopd", "responsibility"]
    assert list(METHODS) == baselines + papers
    with pytest.raises(ValueError, match="method 'ppo' is unknown, want one of grpo, turn_grpo, dr_grpo"):
        METHODS["ppo"]
    assert "ppo" not in METHODS


def test_needs_are_signals():
    known = {field.name for field in fields(Signals)}
    for method in METHODS.values():
        assert set(method.needs) <= known


def test_needs_follow_the_settings_where_they_decide():
    assert needs_of("turn_grpo", METHODS["turn_grpo"].Config()) == ("turn_reward_K",)
    by_base = {base: needs_of("responsibility", METHODS["responsibility"].Config(base)) for base in ("turn", "group")}
    assert by_base == {"turn": ("turn_reward_K", "error_S", "cause_S"), "group": ("reward_B", "error_S", "cause_S")}


@pytest.mark.parametrize("name", METHODS)
def test_arguments_of_another_type_are_named(name):
    method = METHODS[name]
    other = METHODS["grpo" if name == "crest" else "crest"].Config()
    for arguments, named in (
        ((SPANS, EVERYTHING, other), "config is"),
        ((SPANS, EVERYTHING, None), "config is NoneType"),
        ((SPANS, None, method.Config()), "signals is NoneType"),
        ((None, EVERYTHING, method.Config()), "spans is NoneType"),
        (
            (SPANS, Signals(**{need: [1.0] for need in method.needs}), method.Config()),
            f"signal {method.needs[0]} is list",
        ),
    ):
        with pytest.raises(ValueError, match=named):
            method.assign(*arguments)
    with pytest.raises(ValueError, match="surrogate is 'ppo'"):
        method.Config(surrogate="ppo")


@pytest.mark.parametrize("name", METHODS)
def test_settings_of_another_type_are_named(name):
    """No truth values for numbers, nothing but truth values for flags, no NaN anywhere."""
    config = METHODS[name].Config
    for field in fields(config):
        wrong = {bool: (None, 1, "no", torch.tensor(True))}.get(field.type, ("1", None, True, float("nan"), [0.5]))
        wrong = () if field.name == "failure_table" else wrong
        for value in wrong:
            with pytest.raises(ValueError, match=f"{field.name} is "):
                config(**{field.name: value})


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [(CrestConfig, "lam", 1e300), (TriageConfig, "table", (1e300, 0.0, 0.0, 0.0)), (FactorConfig, "tau", 1e-39)],
)
def test_settings_that_float32_cannot_hold_are_refused(config, field, value):
    with pytest.raises(ValueError, match=f"{field} is "):
        config(**{field: value})
