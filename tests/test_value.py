"""Values of states: what is restored and played on, what spreads credit evenly, what the head learns and keeps."""

from dataclasses import replace

import pytest
import torch
from crest_train import continuations, value
from crest_train.chat import make_chat
from crest_train.config import load_config
from crest_train.continuations import choose_places, continued_reward
from crest_train.credit import action_reward, session_reward, spans_of
from crest_train.model import hidden_states
from crest_train.rollouts import Sampling, rollout
from crest_train.value import StateValue, ValueHead, boundary_states, earned_before, even_value, with_place
from toy import Toy, toy_model, toy_tokenizer

from crest_ops import Spans
from crest_ops.advantages import leave_one_out_advantage
from crest_ops.returns import discounted_return, td_credit
from crest_ops.segments import segment_sum

CHAT = make_chat(toy_tokenizer())


def config_of(turns=3, kind="mean", **changes):
    tables = {
        "environment": {"name": "toy:Toy", "options": {"turns": turns}},
        "method": {"name": "grpo", "session_reward": kind},
        "rollout": {"max_action_tokens": 2},
        "value": changes,
    }
    return load_config(None, tables)


def play(model, seeds, turns=3, system=""):
    toys, generator = [Toy(turns, system) for _ in seeds], torch.Generator().manual_seed(3)
    return rollout(model, CHAT, toys, seeds, generator=generator, sampling=Sampling(max_action_tokens=2))


def spans_by_seed(batch):
    seeds = [session.seed for session in batch.sessions]
    return spans_of(batch, torch.tensor([sorted(set(seeds)).index(seed) for seed in seeds]))


def spans_of_sizes(sizes, group):
    """One-token actions, a turn each."""
    rows = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    place = torch.cat([torch.arange(size) for size in sizes])
    return Spans(torch.arange(len(rows)), torch.arange(len(rows)), rows, torch.tensor(group), place)


def test_continuations_begin_as_the_session_did_and_go_on_by_themselves(monkeypatch):
    model, config = toy_model(), config_of(continuations=3)
    batch = play(model, [5, 6])
    kept = []
    monkeypatch.setattr(continuations, "rollout", lambda *a, **k: kept.append(rollout(*a, **k)) or kept[-1])
    places = [(0, 2), (1, 1), (0, 1)]
    generator = torch.Generator().manual_seed(0)
    found = continued_reward(model, CHAT, batch, places, config, generator)
    sessions = kept[0].sessions
    by_length = sorted(places, key=lambda place: batch.sessions[place[0]].actions[place[1]].start)
    for index, (row, t) in enumerate(by_length):
        whole, before = batch.sessions[row], batch.sessions[row].actions[t]
        mine = sessions[3 * index : 3 * index + 3]
        for session in mine:
            assert session.ids[: before.start] == whole.ids[: before.start]
            for action, again in zip(whole.actions[:t], session.actions, strict=False):
                zeros = [0.0] * len(action.tokens)
                assert again == replace(action, logp=zeros, sampler_logp=zeros, entropy=again.entropy)
            assert session.actions[t].turn == before.turn and session.actions[t].start == before.start
        assert len({tuple(session.ids) for session in mine}) > 1
        mean = sum(sum(session.turn_reward) / 3 for session in mine) / 3
        assert found[places.index((row, t))] == pytest.approx(mean)


def test_continuation_ends_after_max_turns():
    model = toy_model()
    batch = play(model, [5, 5, 5, 5], turns=6)
    t = next(i for i, action in enumerate(batch.sessions[0].actions) if action.turn == 2)
    ended = continuations._Limited(Toy(6), 3)
    ended.reset(5)
    steps = [ended.step(batch.sessions[0].actions[0].text)]
    while not steps[-1].done:
        steps.append(ended.step("no"))
    assert sum(step.turn_reward is not None for step in steps) == 3
    certain = [continued_reward(model, CHAT, batch, [(0, t)], config_of(6, max_turns=n), generator(1)) for n in (1, 4)]
    before = sum(batch.sessions[0].turn_reward[:2]) / 6
    assert before <= float(certain[0]) <= before + 1 / 6 + 1e-6  # the turn under way alone counts
    assert float(certain[1]) >= before


def generator(seed):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("per_session", [1, 2, 3])
def test_places_are_one_from_each_part(per_session):
    batch = play(toy_model(), list(range(40)), turns=8)
    for count, session in enumerate(batch.sessions):
        session.actions = session.actions[: count % 9]
    drawn = [choose_places(batch, per_session, generator(seed)) for seed in range(60)]
    assert choose_places(batch, per_session, generator(0)) == drawn[0]
    for row, session in enumerate(batch.sessions):
        T = len(session.actions)
        own = [[t for r, t in places if r == row] for places in drawn]
        if T <= 1:
            assert own == [[]] * 60
        elif T < 2 * per_session:
            assert own == [[1 + (T - 1) // 2]] * 60
        else:
            assert all(len(places) == per_session for places in own)
            reached = {t for places in own for t in places}
            assert reached == set(range(1, T))  # every inner state, never the first
            parts = list(zip(*own, strict=True))
            assert all(max(left) < min(right) for left, right in zip(parts, parts[1:], strict=False))


def test_value_between_places_spreads_credit_evenly():
    # Two rollouts of a task: 4 actions earn 0 1 0 0, 2 actions earn 0 0. One place, before action 1 of the first,
    # from where sessions earn 0.25 in all. Baselines: 0 and 1 (each the other's reward).
    spans = spans_of_sizes([4, 2], [0, 0])
    reward_S = torch.tensor([0.0, 1, 0, 0, 0, 0])
    found = even_value([(0, 1)], torch.tensor([0.25]), reward_S, spans)
    # Q: 0, .25, .5, .75, (1) and 1, .5, (0); minus what was earned before: 0 0 1 1 and 0 0.
    torch.testing.assert_close(found, torch.tensor([0, 0.25, -0.5, -0.25, 1, 0.5]))
    baseline_B = torch.tensor([0.0, 1.0])
    torch.testing.assert_close(
        td_credit(reward_S, found, baseline_B, spans), torch.tensor([0.25, 0.25, 0.25, 0.25, -0.5, -0.5])
    )


def test_value_from_continuations_keeps_the_sum_and_is_drawn_from_the_seeds_alone():
    model, config = toy_model(), config_of(source="continuations", checkpoints=2, continuations=2)
    batch = play(model, [5, 5, 6, 6])
    spans = spans_by_seed(batch)
    found = StateValue(model, CHAT, config).estimate(batch, spans)
    assert torch.equal(found, StateValue(model, CHAT, config).estimate(batch, spans))
    reward_S, reward_B = action_reward(batch, "mean"), session_reward(batch, "mean")
    advantage_B = leave_one_out_advantage(reward_B, spans)
    credit_S = td_credit(reward_S, found, reward_B - advantage_B, spans)
    torch.testing.assert_close(segment_sum(credit_S, spans.trajectory_of_action, 4), advantage_B)
    assert StateValue(model, CHAT, config).learn(batch, spans) == {}
    assert StateValue(model, CHAT, config).state_dict() == {}


def test_boundary_states_are_those_before_each_action():
    model = toy_model()
    batch = play(model, [1, 2, 3], system="be brief")
    states_SH = boundary_states(model, batch, spans_by_seed(batch), tokens_per_micro_batch=40)
    wanted = []
    for session in batch.sessions:
        with torch.no_grad():
            hidden_TH = hidden_states(model, torch.tensor([session.prompt + session.ids]))[0]
        wanted += [hidden_TH[len(session.prompt) + action.start - 1] for action in session.actions]
    torch.testing.assert_close(states_SH, torch.stack(wanted), rtol=1e-4, atol=1e-4)
    assert not states_SH.requires_grad


def test_head_is_told_the_place_in_the_session():
    batch = play(toy_model(), [5, 6], turns=4)
    states_SH = boundary_states(toy_model(), batch, spans_by_seed(batch), tokens_per_micro_batch=40)
    found = with_place(states_SH, batch)
    turns = [action.turn for session in batch.sessions for action in session.actions]
    assert found[:, -1].tolist() == [turn - 2.0 for turn in turns]
    assert found[:, :-1].mean(1).abs().max() < 1e-5 and (found[:, :-1].var(1, correction=0) - 1).abs().max() < 1e-2


def test_earned_before():
    spans = spans_of_sizes([3, 2], [0, 1])
    found = earned_before(torch.tensor([1.0, 2, 4, 8, 16]), spans)
    assert found.tolist() == [0, 1, 3, 0, 8]


def test_head_is_zero_before_it_learned_and_fits_what_it_saw():
    section = config_of(hidden=16).value
    head = ValueHead(6, section, 0, torch.device("cpu"))
    states = torch.randn(64, 6, generator=generator(0))
    target = (states[:, 0] > states[:, 1]).float()
    assert (head.estimate(states) == 0).all()
    first = head.learn(states, target)
    assert first == pytest.approx(float(target.square().mean()))
    for _ in range(9):
        last = head.learn(states, target)
    assert last < 0.25 * float(target.var())


def test_average_is_the_weighted_mean_of_the_steps():
    section = config_of(hidden=2, polyak=0.75).value
    head = ValueHead(3, section, 0, torch.device("cpu"))
    weight, seen = head.network[0].bias, []
    for step in range(3):
        weight.data.fill_(float(4**step))
        head._follow()
        seen.append(float(head.average[0].bias[0]))
    # Weights .75^(n-i): 1; (.75 * 1 + 4) / 1.75; (.5625 * 1 + .75 * 4 + 16) / 2.3125.
    assert seen == pytest.approx([1.0, 4.75 / 1.75, 19.5625 / 2.3125])


def test_replay_holds_the_last_steps():
    head = ValueHead(3, config_of(replay=2).value, 0, torch.device("cpu"))
    for step in range(4):
        head.learn(torch.randn(5, 3), torch.full((5,), float(step)))
    assert [float(target[0]) for _, target in head.replay] == [2.0, 3.0]


@pytest.mark.parametrize("checkpoints", [0, 2])
def test_learning_goes_on_from_a_saved_state_bit_for_bit(checkpoints):
    model, config = toy_model(), config_of(checkpoints=checkpoints, continuations=2)
    batches = [play(model, seeds) for seeds in ([1, 1], [2, 2], [3, 3])]
    whole, half = StateValue(model, CHAT, config), StateValue(model, CHAT, config)
    for batch in batches[:2]:
        for one in (whole, half):
            assert "value_loss" in one.learn(batch, spans_by_seed(batch))
    resumed = StateValue(model, CHAT, config)
    resumed.load_state_dict({name: tensor.clone() for name, tensor in half.state_dict().items()})
    spans = spans_by_seed(batches[2])
    assert torch.equal(whole.estimate(batches[2], spans), resumed.estimate(batches[2], spans))
    assert whole.learn(batches[2], spans) == resumed.learn(batches[2], spans)
    assert all(torch.equal(tensor, resumed.state_dict()[name]) for name, tensor in whole.state_dict().items())


def test_targets_are_own_returns_or_those_of_continuations(monkeypatch):
    model = toy_model()
    batch = play(model, [5, 5])
    spans = spans_by_seed(batch)
    seen = []
    monkeypatch.setattr(value.ValueHead, "learn", lambda self, states, target: seen.append((states, target)) or 0.0)
    StateValue(model, CHAT, config_of()).learn(batch, spans)
    states_SH = with_place(boundary_states(model, batch, spans, tokens_per_micro_batch=160), batch)
    reward_S = action_reward(batch, "mean")
    assert torch.equal(seen[0][0], states_SH) and torch.equal(seen[0][1], discounted_return(reward_S, spans, 1.0))
    monkeypatch.setattr(value, "choose_places", lambda *a: [(0, 1), (1, 2)])
    monkeypatch.setattr(value, "continued_reward", lambda *a: torch.tensor([0.5, 1.0]))
    StateValue(model, CHAT, config_of(checkpoints=2)).learn(batch, spans)
    chosen = [1, len(batch.sessions[0].actions) + 2]
    assert torch.equal(seen[1][0], states_SH[chosen])
    torch.testing.assert_close(seen[1][1], torch.tensor([0.5, 1.0]) - earned_before(reward_S, spans)[chosen])


def test_drawing_leaves_the_global_generator_alone():
    torch.manual_seed(0)
    wanted = torch.rand(1)
    torch.manual_seed(0)
    model, config = toy_model(), config_of(checkpoints=2)
    batch = play(model, [1, 1])
    torch.manual_seed(0)
    StateValue(model, CHAT, config).learn(batch, spans_by_seed(batch))
    assert torch.equal(torch.rand(1), wanted)


def test_places_and_continuations_are_drawn_apart(monkeypatch):
    """From one stream of numbers, where a session is taken up would tell what is written there."""
    drawn = []
    monkeypatch.setattr(value, "choose_places", lambda batch, per_session, g: drawn.append(torch.rand(8, generator=g)))
    monkeypatch.setattr(value, "continued_reward", lambda *a: drawn.append(torch.rand(8, generator=a[-1])))
    batch = play(toy_model(), [5, 6])
    StateValue(toy_model(), CHAT, config_of(checkpoints=2))._continue(batch)
    assert not torch.equal(*drawn)
