"""The gold answer's log-prob at every boundary equals that of separate full passes, for any architecture."""

import pytest
import torch
from crest_train import gold
from crest_train.chat import make_chat
from crest_train.gold import answer_ids, gold_logp
from crest_train.policy import TinyConfig, TinyForCausalLM
from crest_train.rollouts import Sampling, rollout
from test_rollouts import ARCHITECTURES, small_model
from toy import WORDS, Toy, toy_model, toy_tokenizer

CHAT = make_chat(toy_tokenizer())
END = WORDS.index(";")


def play(model, toys, seeds, **sampling):
    options = Sampling(**{"max_action_tokens": 3, "gold": True} | sampling)
    return rollout(model, CHAT, toys, seeds, generator=torch.Generator().manual_seed(0), sampling=options)


def group_of(batch):
    seeds = [session.seed for session in batch.sessions]
    return torch.tensor([seeds.index(seed) for seed in seeds])


def tiny_model():
    torch.manual_seed(0)
    model = TinyForCausalLM(TinyConfig(vocab_size=len(WORDS), hidden_size=32, intermediate_size=48)).eval()
    torch.nn.init.normal_(model.head.weight, std=0.3)
    return model


def separately(model, batch, temperature):
    """One pass of the whole model, in float64, for every boundary: its prefix, then the answer."""
    found = []
    model.double()
    for session, answer in zip(batch.sessions, answer_ids(CHAT, batch, group_of(batch)), strict=True):
        last = session.actions[-1]
        after = session.ids + [END] * (last.tokens[-1] != END)
        after += CHAT.encode("> " if last.observation is None else f"<obs> {last.observation} >")
        for before in [*(session.ids[: action.start] for action in session.actions), after]:
            before = session.prompt + before
            with torch.no_grad():
                logp = (model(torch.tensor([before + answer])).logits[0] / temperature).log_softmax(-1)
            found.append(sum(float(logp[len(before) - 1 + n, y]) for n, y in enumerate(answer)) / len(answer))
    model.float()
    return torch.tensor(found)


@pytest.mark.parametrize("tokens", [40, 90, 2000])
@pytest.mark.parametrize("name", [*ARCHITECTURES, "tiny"])
def test_equals_a_full_pass_per_boundary(name, tokens):
    model = tiny_model() if name == "tiny" else small_model(name)
    toys = [Toy(2, "be brief"), Toy(4, "be brief"), Toy(3), Toy(1), Toy(3)]
    batch = play(model, toys, [1, 2, 3, 4, 3])
    found = gold_logp(model, CHAT, batch, group_of(batch), temperature=0.7, tokens_per_micro_batch=tokens)
    wanted = separately(model, batch, 0.7)
    assert found.dtype == torch.float32 and found.shape == wanted.shape
    assert len(found) == sum(len(session.actions) + 1 for session in batch.sessions)
    assert (found - wanted).abs().max() < 1e-5
    assert wanted.std() > 0.05  # boundaries differ: a mix-up of rows would be seen


def test_answer_is_the_ground_truth_of_all_turns_closed_once():
    batch = play(toy_model(), [Toy(3)], [5])
    letters = batch.sessions[0].gold
    assert len(letters) == 3
    assert answer_ids(CHAT, batch, group_of(batch)) == [[*map(WORDS.index, letters), END]]
    batch.sessions[0].gold = ["a ;", "b ;"]
    assert answer_ids(CHAT, batch, group_of(batch)) == [[WORDS.index("a"), END, WORDS.index("b"), END]]


def test_turns_not_begun_have_the_ground_truth_of_the_rollout_that_came_furthest():
    batch = play(toy_model(), [Toy(3), Toy(3), Toy(3)], [5, 5, 6])
    whole, other = answer_ids(CHAT, batch, group_of(batch))[0], answer_ids(CHAT, batch, group_of(batch))[2]
    batch.sessions[0].gold = ["d"]  # its own turn stands
    batch.sessions[2].gold = batch.sessions[2].gold[:2]  # no rollout of the same session came further
    assert answer_ids(CHAT, batch, group_of(batch)) == [[WORDS.index("d"), *whole[1:]], whole, [*other[:2], END]]


def test_boundary_beyond_the_context_gives_no_credit():
    model = toy_model()
    batch = play(model, [Toy(4), Toy(1)], [1, 2])
    whole = gold_logp(model, CHAT, batch, group_of(batch), temperature=1.0, tokens_per_micro_batch=160)
    starts = [action.start for action in batch.sessions[0].actions]
    longest = len(answer_ids(CHAT, batch, group_of(batch))[0])
    model.config.max_position_embeddings = starts[2] + longest  # the third boundary is the last that fits
    cut = gold_logp(model, CHAT, batch, group_of(batch), temperature=1.0, tokens_per_micro_batch=160)
    size = len(starts) + 1
    assert torch.equal(cut[3:size], cut[2].expand(size - 3))
    assert (cut[:3] - whole[:3]).abs().max() < 1e-6 and (cut[size:] - whole[size:]).abs().max() < 1e-6
    model.config.max_position_embeddings = starts[0] + longest - 1
    cut = gold_logp(model, CHAT, batch, group_of(batch), temperature=1.0, tokens_per_micro_batch=160)
    assert (cut[:size] == 0).all() and (cut[size:] < 0).all()


def test_session_that_the_context_ends_has_a_value_for_every_action():
    whole = play(toy_model(), [Toy(6)], [3]).sessions[0]
    model = toy_model(context=whole.actions[1].start + 1)
    batch = play(model, [Toy(6), Toy(6, "be brief be brief be brief be brief")], [3, 3])
    short, none = batch.sessions
    assert short.cut and not none.actions
    found = gold_logp(model, CHAT, batch, group_of(batch), temperature=1.0, tokens_per_micro_batch=160)
    assert len(found) == len(short.actions) + 2 and (found <= 0).all() and found[-1] == 0


def test_prefixes_are_encoded_once_and_passes_are_bounded(monkeypatch):
    model = toy_model()
    batch = play(model, [Toy(6, "be brief") for _ in range(4)], [3, 3, 4, 5])
    fed = []
    hidden_states = gold.hidden_states

    def watched(model, ids, cache, **others):
        fed.append((ids.shape, cache.get_seq_length()))
        return hidden_states(model, ids, cache, **others)

    monkeypatch.setattr(gold, "hidden_states", watched)
    gold_logp(model, CHAT, batch, group_of(batch), temperature=1.0, tokens_per_micro_batch=400)
    (prompt, _), (prefixes, _), *passes = fed
    assert prompt == (1, len(batch.sessions[0].prompt)) and prefixes[0] == 4
    assert sum(shape[0] for shape, _ in passes) == sum(len(session.actions) + 1 for session in batch.sessions)
    assert all(shape[0] * (shape[1] + cached) <= 400 for shape, cached in passes)
    assert len(passes) < sum(len(session.actions) for session in batch.sessions) / 2


def test_rollout_without_ground_truth_is_refused():
    model = toy_model()
    with pytest.raises(ValueError, match="wanted a rollout played with Sampling.gold"):
        gold_logp(
            model,
            CHAT,
            play(model, [Toy(2)], [1], gold=False),
            torch.tensor([0]),
            temperature=1.0,
            tokens_per_micro_batch=160,
        )
