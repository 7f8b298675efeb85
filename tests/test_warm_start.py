"""Demonstrations, the warm start of the built-in policy, and its cached file."""

import random
from io import StringIO
from pathlib import Path

import pytest
import torch
from crest_train import warm_start as module
from crest_train.chat import make_chat
from crest_train.environments.desk import Desk
from crest_train.environments.desk_demos import SLIP_RATE, demonstrate, slip
from crest_train.environments.desk_world import KINDS, VOCABULARY, ends_turn, parse
from crest_train.tokenizer import build_tokenizer
from crest_train.warm_start import WarmStart, built_in_policy, lay_out, warm_start
from rich.console import Console

TINY = WarmStart(steps=8, turns_per_step=8)


@pytest.fixture
def console():
    return Console(file=StringIO(), width=400)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CREST_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def rewards(hinted):
    rng = random.Random(0)
    played = [step for seed in range(200) for _, step in demonstrate(Desk(), seed, rng, hinted=hinted).played]
    return [step.turn_reward for step in played if step.turn_reward is not None]


def test_demonstrations_slip_and_hinted_ones_hardly():
    plain, hinted = rewards(False), rewards(True)
    assert len(plain) == len(hinted) == 200 * 8
    assert 0.55 < sum(plain) / len(plain) < 0.72
    assert 0.96 < sum(hinted) / len(hinted) < 1.0
    assert set(SLIP_RATE) == set(KINDS)


@pytest.mark.parametrize(
    "calls",
    [
        ["mv f3 d1", "done"],
        ["rm f3", "done"],
        ["ren f3 f9", "done"],
        ["cat f1", "answer o3"],
        ["cat f1", "set f2 n4", "done"],
        ["cat f1", "cat f2", "set f1 n9", "set f2 n4", "done"],
    ],
)
def test_slips_are_well_formed_calls_that_end_the_turn(calls):
    rng = random.Random(0)
    seen = [slip(rng, calls, ["f1", "f2", "f3"]) for _ in range(300)]
    for slipped in seen:
        words = [parse(call) for call in slipped]
        assert None not in words
        assert ends_turn(words[-1]) and not any(map(ends_turn, words[:-1]))
        assert len(slipped) <= len(calls) + 1
    assert sum(slipped != calls for slipped in seen) > 280


def test_hints_are_the_right_calls_of_the_turn():
    shown = demonstrate(Desk(num_turns=2), 3, random.Random(0), hinted=True)
    desk = Desk(num_turns=2)
    assert shown.request == f"{desk.reset(3)} <hint> {desk.gold()} </hint>"
    for action, step in shown.played:
        found = desk.step(action)
        if found.request is not None:
            assert step.request == f"{found.request} <hint> {desk.gold()} </hint>"
        assert (step.observation, step.turn_reward) == (found.observation, found.turn_reward)


@pytest.mark.parametrize("hinted", [False, True])
def test_layout_is_the_chat_template_with_the_actions_marked(hinted):
    tokenizer = build_tokenizer(VOCABULARY)
    shown = demonstrate(Desk(num_turns=6), 5, random.Random(1), hinted=hinted)
    ids, written = lay_out(make_chat(tokenizer), shown)
    messages = [{"role": "user", "content": shown.request}]
    for action, step in shown.played:
        messages.append({"role": "assistant", "content": action})
        if step.observation is not None and not step.done:
            messages.append({"role": "tool", "content": step.observation})
        if step.request is not None:
            messages.append({"role": "user", "content": step.request})
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert tokenizer.decode(ids).split() == text.split()
    marked = [VOCABULARY[token] for token, own in zip(ids, written, strict=True) if own]
    assert " ".join(marked) == " ".join(f"{action} ;" for action, _ in shown.played)


def test_a_short_warm_start_lowers_the_loss_and_repeats_exactly(console):
    settings = WarmStart(steps=30, turns_per_step=16)
    model, losses = warm_start(settings, console=console)
    again, losses_again = warm_start(settings, console=console)
    assert losses[0] == pytest.approx(torch.tensor(float(len(VOCABULARY))).log().item(), abs=1e-5)
    assert sum(losses[-5:]) / 5 < losses[0] - 0.8
    assert losses == losses_again
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name])
    assert warm_start(WarmStart(seed=1, steps=2, turns_per_step=16), console=console)[1] != losses[:2]


def test_training_does_not_touch_the_global_random_state(console):
    torch.manual_seed(7)
    wanted = torch.rand(3)
    torch.manual_seed(7)
    warm_start(TINY, console=console)
    assert torch.equal(torch.rand(3), wanted)


def test_the_trained_policy_is_kept_and_found_again(cache, console, monkeypatch):
    model, tokenizer = built_in_policy(TINY, console=console)
    assert tokenizer.chat_template
    (kept,) = cache.glob("*.safetensors")
    monkeypatch.setattr(module, "warm_start", lambda *args, **options: pytest.fail("trained again"))
    found, _ = built_in_policy(TINY, console=console)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, found.state_dict()[name])
    assert [path.name for path in cache.iterdir() if path.suffix not in (".safetensors", ".lock")] == []


def test_every_setting_has_a_file_of_its_own(cache, console):
    built_in_policy(TINY, console=console)
    built_in_policy(WarmStart(seed=1, steps=8, turns_per_step=8), console=console)
    assert len(list(cache.glob("*.safetensors"))) == 2


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "other"])
def test_a_damaged_file_is_noticed_and_built_again(cache, console, damage):
    model, _ = built_in_policy(TINY, console=console)
    (kept,) = cache.glob("*.safetensors")
    whole = kept.read_bytes()
    flipped = whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:]
    kept.write_bytes({"cut": whole[: len(whole) // 2], "flip": flipped, "empty": b"", "other": b"x" * 1000}[damage])
    found, _ = built_in_policy(TINY, console=console)
    assert "damaged" in console.file.getvalue()
    assert kept.read_bytes() == whole
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, found.state_dict()[name])


def test_an_interrupted_write_leaves_nothing(cache, console, monkeypatch):
    def interrupted(weights, path, metadata):
        Path(path).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        built_in_policy(TINY, console=console)
    assert [path.suffix for path in cache.iterdir()] in ([], [".lock"])
