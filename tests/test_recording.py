"""Recorded rollouts: what is written is what is read, and a line that does not fit is named."""

import json

import pytest
import torch
from crest_train.chat import make_chat
from crest_train.recording import CREDITED, RecordedAction, RecordedSession, read_rollouts, record
from crest_train.rollouts import Sampling, rollout
from crest_train.sessions import Action, Session
from toy import WORDS, Toy, toy_model, toy_tokenizer

LEAST = {
    "batch": 0,
    "group": 0,
    "num_turns": 2,
    "turn_reward": [1.0, 0.0],
    "ids": [5, 8, 9, 4, 6, 9],
    "actions": [{"turn": 0, "start": 1, "tokens": [8, 9]}, {"turn": 1, "start": 4, "tokens": [6, 9]}],
}


def play(seed, context=512):
    toys = [Toy(2, "be brief") for _ in range(4)]
    sampling = Sampling(max_action_tokens=3, gold=True)
    generator = torch.Generator().manual_seed(seed)
    model = toy_model(context=context)
    return rollout(model, make_chat(toy_tokenizer()), toys, [1, 1, 2, 2], generator=generator, sampling=sampling)


def write(path, *lines):
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_what_is_written_is_read(tmp_path):
    batches = [(play(0), torch.tensor([0, 0, 1, 1])), (play(1, context=20), torch.tensor([1, 1, 0, 0]))]
    assert batches[1][0].cut_sessions
    with open(tmp_path / "r.jsonl", "w") as file:
        for number, batch in enumerate(batches):
            record(file, number, *batch)
    found = list(read_rollouts(tmp_path / "r.jsonl", len(WORDS)))
    assert len(found) == 2
    for (wanted, group), (read, read_group) in zip(batches, found, strict=True):
        assert read.sessions == wanted.sessions
        assert ((group[:, None] == group) == (read_group[:, None] == read_group)).all() and read_group.max() == 1
        for name, tensor in vars(wanted).items():
            if isinstance(tensor, torch.Tensor):
                assert torch.equal(getattr(read, name), tensor), name


def test_every_field_of_a_session_is_recorded_and_described():
    assert {*Session.__dataclass_fields__} == {*RecordedSession.model_fields} - {"batch", "group", "texts"}
    assert {*Action.__dataclass_fields__} == {*RecordedAction.model_fields} - {*CREDITED}
    for kind in (RecordedSession, RecordedAction):
        assert all(name in kind.__doc__ for name in kind.model_fields)


def test_least_session_and_lines_in_any_order(tmp_path):
    """Batch 7 before batch 2 in the file, an empty line between: batch 2 comes first."""
    path = write(tmp_path / "r.jsonl", LEAST | {"batch": 7, "group": 5}, "", LEAST | {"batch": 2, "cut": True})
    (first, group), (second, _) = read_rollouts(path, 10)
    assert first.sessions[0].cut and not second.sessions[0].cut and group.tolist() == [0]
    assert first.policy.tolist() == [[False, True, True, False, True, True]]
    assert first.turn.tolist() == [[-1, 0, 0, -1, 1, 1]]
    assert first.old_logp.isnan().tolist() == first.entropy.isnan().tolist() == first.policy.tolist()
    assert first.turn_reward.tolist() == [[1, 0]] and first.reached.all()


def changed(**changes):
    return LEAST | changes


def action(**changes):
    return changed(actions=[LEAST["actions"][0] | changes])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2: Invalid JSON"),
        ("[]", "line 2: "),
        ({k: v for k, v in LEAST.items() if k != "group"}, "line 2: group: Field required"),
        (changed(groups=1), "line 2: groups: Extra inputs"),
        (changed(batch=-1), "line 2: batch: "),
        (changed(batch=True), "line 2: batch: "),
        (changed(turn_reward=[1.0, 0.0, 1.0]), "line 2: 3 turn_reward for num_turns turns"),
        ('{"turn_reward": [NaN]}', "line 2: .*"),
        (changed(ids=[]), "line 2: ids: "),
        (changed(ids=[5, 8, 9, 4, 6, 10], actions=[]), r"line 2: ids\[5\] is 10, the policy's vocabulary is 0..9"),
        (changed(prompt=[-1]), r"line 2: prompt\[0\] is -1"),
        (action(turn=2), r"line 2: actions\[0\].turn is 2, want 0..num_turns - 1"),
        (action(start=0, tokens=[5]), r"line 2: actions\[0\].start is 0, want 1 or more"),
        (action(tokens=[8, 8]), r"line 2: actions\[0\].tokens are not ids\[1:3\]"),
        (action(tokens=[]), r"line 2: actions.0.tokens: "),
        (action(logp=[-1.0]), r"line 2: actions\[0\].logp has 1 numbers, want one per token"),
        (action(entropy=[0.1, 0.2, 0.3]), r"line 2: actions\[0\].entropy has 3 numbers"),
        (
            changed(actions=[{"turn": 0, "start": 1, "tokens": [8, 9]}, {"turn": 0, "start": 2, "tokens": [9]}]),
            r"line 2: actions\[1\].start is 2, want 3 or more",
        ),
        (
            changed(actions=[{"turn": 1, "start": 1, "tokens": [8]}, {"turn": 0, "start": 4, "tokens": [6]}]),
            r"line 2: actions\[1\].turn is 0, want 1..num_turns - 1",
        ),
    ],
)
def test_a_line_that_does_not_fit_is_named(tmp_path, line, words):
    path = write(tmp_path / "r.jsonl", LEAST, line)
    with pytest.raises(ValueError, match=f"^--rollouts: .*r.jsonl, {words}"):
        next(read_rollouts(path, 10))


def test_files_that_cannot_be_read_and_info_that_cannot_be_written(tmp_path):
    with pytest.raises(ValueError, match="--rollouts: .*none.jsonl could not be read"):
        next(read_rollouts(tmp_path / "none.jsonl", 10))
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="could not be read"):
        next(read_rollouts(tmp_path / "b.jsonl", 10))
    played = play(0)
    played.sessions[0].actions[0].info["what"] = object()
    with open(tmp_path / "r.jsonl", "w") as file, pytest.raises(ValueError, match="info of session 1 is no JSON"):
        record(file, 0, played, torch.zeros(4, dtype=torch.int64))
