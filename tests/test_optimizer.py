"""Optimizers: float32 arithmetic for bfloat16 parameters, steps that are not made, what needs a GPU."""

import pytest
import torch
from crest_train.config import PolicySection, TrainingSection
from crest_train.loading import check_policy_section
from crest_train.optimizer import MasterAdam, check_optimizer, make_optimizer
from crest_train.update import update
from test_loop import play
from test_packing import credit_of
from toy import Toy, toy_model

RATE = 1e-5


def steps(optimizer, parameter, count):
    for step in range(count):
        parameter.grad = torch.full_like(parameter, 1.0 + 0.5 * (step % 2))
        optimizer.step()


def test_steps_below_the_resolution_of_bfloat16_add_up():
    start = torch.tensor([1.0, -3.0, 0.25])
    exact = torch.nn.Parameter(start.clone())
    steps(torch.optim.Adam([exact], lr=RATE), exact, 2000)
    rounded = torch.nn.Parameter(start.bfloat16())
    steps(MasterAdam([rounded], lr=RATE), rounded, 2000)
    assert torch.equal(rounded, exact.bfloat16()) and (rounded != start.bfloat16()).all()
    plain = torch.nn.Parameter(start.bfloat16())
    steps(torch.optim.Adam([plain], lr=RATE), plain, 2000)
    assert plain[1] == -3  # what the copies are for: stepped in place, it does not move at all


def test_a_restored_optimizer_goes_on_bit_for_bit():
    one, other = (torch.nn.Parameter(torch.ones(4).bfloat16()) for _ in range(2))
    whole, first = MasterAdam([one], lr=RATE), MasterAdam([other], lr=RATE)
    steps(whole, one, 6)
    steps(first, other, 3)
    restored = torch.nn.Parameter(torch.zeros(4).bfloat16())
    second = MasterAdam([restored], lr=RATE)
    second.load_state_dict(first.state_dict())
    assert torch.equal(restored, other)
    for step in range(3, 6):
        restored.grad = torch.full_like(restored, 1.0 + 0.5 * (step % 2))
        second.step()
    assert torch.equal(second.masters[0], whole.masters[0]) and torch.equal(restored, one)


def test_parameters_that_learn_in_the_dtype_they_have():
    section = TrainingSection(rate=0.01)
    model = toy_model()
    model.lm_head.requires_grad_(False)
    optimizer = make_optimizer(model, section, rate=0.5)
    assert type(optimizer) is torch.optim.Adam and optimizer.param_groups[0]["lr"] == 0.5
    assert model.lm_head.weight not in set(optimizer.param_groups[0]["params"])
    optimizer = make_optimizer(toy_model().bfloat16(), section)
    assert type(optimizer) is MasterAdam and all(m.dtype == torch.float32 for m in optimizer.masters)


@pytest.mark.parametrize("bad", ["loss", "gradient"])
def test_a_step_that_is_not_finite_is_not_made(bad):
    model = toy_model()
    played = play(model, [Toy(k) for k in (1, 2, 3, 2)])
    credit = credit_of(played)
    if bad == "loss":
        model.model.norm.weight.data[0] = torch.inf
    else:
        model.model.norm.weight.register_hook(lambda gradient: gradient * torch.inf)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = make_optimizer(model, TrainingSection())
    metrics = update(
        model, optimizer, played, credit, TrainingSection(minibatches=1), temperature=1.0, generator=torch.Generator()
    )
    assert metrics["skipped_steps"] == 1 and metrics["loss"] == 0
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert all(p.grad is None for p in model.parameters()) and not optimizer.state


def test_what_needs_a_gpu_is_refused_without_one():
    with pytest.raises(ValueError, match='training.optimizer: found "adam_8bit" with policy.device "cpu"'):
        check_optimizer(TrainingSection(optimizer="adam_8bit"), "cpu")
    with pytest.raises(ValueError, match='policy.attention: found "flash_attention_2" with device .cpu.'):
        check_policy_section(PolicySection(attention="flash_attention_2"))
    with pytest.raises(ValueError, match="policy.liger: found true with policy.device .cpu."):
        check_policy_section(PolicySection(liger=True))
    check_policy_section(PolicySection())
    check_optimizer(TrainingSection(), "cpu")
