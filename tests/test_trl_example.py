"""The TRL example, shortened, with the built-in policy before its warm start."""

import sys
from pathlib import Path

import torch
from crest_train.chat import make_chat
from crest_train.environments.desk_world import VOCABULARY
from crest_train.tokenizer import build_tokenizer
from crest_train.warm_start import new_policy

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
import trl_multi_turn


def test_rollouts_hold_what_was_said():
    """Masked in is what the policy wrote, an action at a time, in the turn that it was written in."""

    class Trainer:
        model = new_policy(0)
        accelerator = type("Accelerator", (), {"unwrap_model": staticmethod(lambda model: model)})

    tokenizer = build_tokenizer(VOCABULARY)
    found = trl_multi_turn.player(make_chat(tokenizer), 3)(["5", "5", "6"], Trainer)
    for row, ids in enumerate(found["completion_ids"]):
        mask, turn = found["env_mask"][row], found["turn_ids"][row]
        assert len(mask) == len(turn) == len(ids) == len(found["logprobs"][row])
        words = tokenizer.convert_ids_to_tokens(ids)
        assert mask[0] == 1 and found["prompt_ids"][row][-1] == tokenizer.convert_tokens_to_ids(">")
        assert all(words[at - 1] == ">" for at in range(1, len(ids)) if mask[at] and not mask[at - 1])
        assert max(turn) + 1 == len(found["turn_rewards"][row]) == 3
        assert all((logp < 0) == bool(m) for logp, m in zip(found["logprobs"][row], mask, strict=True))


def test_it_trains(monkeypatch):
    """Given rewards that differ, as an untrained policy earns none, the policy moves."""

    def any_reward(turn_rewards, **kwargs):
        return [[float(row % 3 + turn) for turn in range(len(rewards))] for row, rewards in enumerate(turn_rewards)]

    monkeypatch.setattr(trl_multi_turn, "turn_success", any_reward)
    model = new_policy(0)
    before = [p.detach().clone() for p in model.parameters()]
    success = trl_multi_turn.train(model, build_tokenizer(VOCABULARY), steps=2, sessions=2, turns=2)
    assert len(success) == 1
    assert not all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
