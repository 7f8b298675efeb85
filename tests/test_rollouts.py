"""Rollouts: what they record is what the model does, for any architecture; stop rules, cuts, the teacher stream."""

import pytest
import torch
from crest_train import evaluate
from crest_train.chat import make_chat
from crest_train.config import load_config
from crest_train.engines import lockstep
from crest_train.environments.protocol import Step
from crest_train.model import check_policy, hidden_states
from crest_train.rollouts import Sampling, demonstrate, rollout
from toy import WORDS, Toy, toy_model, toy_tokenizer
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

SMALL = dict(
    vocab_size=len(WORDS),
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=512,
    pad_token_id=0,
    eos_token_id=WORDS.index(";"),
    bos_token_id=None,
)
ARCHITECTURES = {
    "llama": {},
    "gemma2": dict(final_logit_softcapping=2.0, sliding_window=8, query_pre_attn_scalar=8),
    "mistral": dict(sliding_window=8),
    "cohere": dict(logit_scale=0.25),
    "granite": dict(logits_scaling=4.0),
    "gpt2": dict(n_embd=32, n_layer=2, n_head=4, n_positions=512),
}


def small_model(name):
    torch.manual_seed(0)
    config = CONFIG_MAPPING[name](**(SMALL | ARCHITECTURES[name]))
    model = AutoModelForCausalLM.from_config(config).eval()
    for weight in model.parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=0.3)
    return model


def play(model, toys, seeds, generator_seed=0, **sampling):
    generator = torch.Generator().manual_seed(generator_seed)
    options = Sampling(**{"max_action_tokens": 4} | sampling)
    return rollout(model, make_chat(toy_tokenizer()), toys, seeds, generator=generator, sampling=options)


def expected_logp(model, session, temperature):
    """Log-probs of a session's tokens by one plain forward pass of the whole model, in float64."""
    ids = torch.tensor([session.prompt + session.ids])
    with torch.no_grad():
        logp = (model.double()(ids).logits / temperature).log_softmax(-1)[0, :-1]
    model.float()
    logp = torch.cat([torch.zeros(1), logp.gather(1, ids[0, 1:, None])[:, 0]])
    return logp[len(session.prompt) :]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_recorded_log_probs_are_the_models(name):
    model = small_model(name)
    check_policy(model)
    played = play(model, [Toy(2, "be brief"), Toy(4, "be brief"), Toy(3)], [1, 2, 3], temperature=0.7)
    assert not played.cut_sessions
    for row, session in enumerate(played.sessions):
        wanted = expected_logp(model, session, 0.7)
        written = played.policy[row, : len(session.ids)]
        error = (played.old_logp[row, : len(session.ids)] - wanted)[written].abs().max()
        assert error < 1e-4
        assert (played.old_logp[row][~played.policy[row]] == 0).all()


def test_check_policy_refuses_a_model_with_other_logits():
    model = toy_model()
    forward = model.forward

    def doubled(**arguments):
        output = forward(**arguments)
        output.logits = output.logits * 2
        return output

    model.forward = doubled
    with pytest.raises(ValueError, match="policy.model: LlamaForCausalLM computes its logits"):
        check_policy(model)


def test_rows_that_end_early_leave_the_others_right():
    model = toy_model()
    played = play(model, [Toy(k) for k in (1, 1, 1, 1, 2, 2, 5, 6)], list(range(8)))
    for row, session in enumerate(played.sessions):
        wanted = expected_logp(model, session, 1.0)
        written = played.policy[row, : len(session.ids)]
        assert (played.old_logp[row, : len(session.ids)] - wanted)[written].abs().max() < 1e-4
    assert played.num_turns.tolist() == [1, 1, 1, 1, 2, 2, 5, 6]
    assert played.reached.sum(1).tolist() == [1, 1, 1, 1, 2, 2, 5, 6]


def test_environment_hears_what_was_written_and_only_that_is_marked():
    toys, tokenizer = [Toy(3) for _ in range(5)], toy_tokenizer()
    played = play(toy_model(), toys, [7, 8, 9, 10, 11])
    end = WORDS.index(";")
    for row, (toy, session) in enumerate(zip(toys, played.sessions, strict=True)):
        assert toy.heard == [action.text for action in session.actions]
        marked = torch.zeros(played.ids.shape[1], dtype=torch.bool)
        for action in session.actions:
            place = slice(action.start, action.start + len(action.tokens))
            assert session.ids[place] == action.tokens
            assert (played.turn[row, place] == action.turn).all()
            assert action.text == tokenizer.decode([t for t in action.tokens if t != end])
            assert action.cut == (action.tokens[-1] != end)
            marked[place] = True
        assert torch.equal(marked, played.policy[row])
        assert (played.turn[row][~marked] == -1).all()
        assert tokenizer.decode(session.ids[:4]) == f"<user> say {toy.letters[0]} >"
        assert (played.ids[row, len(session.ids) :] == 0).all()


def test_cut_action_is_played_and_closed_by_a_token_that_is_not_trained():
    played = play(toy_model(), [Toy(2)], [1], max_action_tokens=1)
    session = played.sessions[0]
    cut = next(action for action in session.actions[:-1] if action.cut)
    assert cut.text
    assert session.ids[cut.start + 1] == WORDS.index(";")
    assert not played.policy[0, cut.start + 1]


def test_same_seed_same_tokens():
    model = toy_model()
    first, again, other = (play(model, [Toy(3) for _ in range(4)], [1, 2, 3, 4], seed) for seed in (5, 5, 6))
    assert torch.equal(first.ids, again.ids) and torch.equal(first.old_logp, again.old_logp)
    assert first.ids.shape != other.ids.shape or not torch.equal(first.ids, other.ids)


def test_every_token_is_fed_once(monkeypatch):
    fed = []
    monkeypatch.setattr(
        lockstep, "hidden_states", lambda model, ids, cache: fed.append(ids.shape) or hidden_states(model, ids, cache)
    )
    played = play(toy_model(), [Toy(6, "be brief") for _ in range(4)], [3, 3, 3, 3])
    prompt, *steps = fed
    assert prompt == (1, len(played.sessions[0].prompt))  # once for all rows
    # The last action's final token has nothing to predict, and lockstep is as long as the longest session.
    assert sum(width for _, width in steps) == max(len(session.ids) for session in played.sessions) - 1


def test_context_full_fails_the_turn_under_way_and_keeps_finished_ones():
    whole = play(toy_model(), [Toy(6)], [3]).sessions[0]
    second = next(action for action in whole.actions if action.turn == 1)
    for context in range(second.start, second.start + len(second.tokens) + 1):
        played = play(toy_model(context=context), [Toy(6)], [3])
        session, inside = played.sessions[0], context > second.start
        assert session.cut and played.cut_sessions == 1
        assert session.ids == whole.ids[:context] if inside else whole.ids[: len(session.ids)]
        assert played.policy[0, len(session.ids) - 1]
        assert session.turn_reward == whole.turn_reward[:1] + [0.0] * inside
        assert played.reached.tolist() == [[True, inside, False, False, False, False]]
        assert played.turn_reward.shape == (1, 6)


def test_session_whose_first_request_does_not_fit_is_cut_at_once():
    played = play(toy_model(context=6), [Toy(2, "be brief"), Toy(2)], [1, 2])
    assert played.cut_sessions == 2 and played.policy.any(1).tolist() == [False, True]
    assert played.reached.tolist() == [[False, False], [True, False]]


def test_ground_truth_is_recorded_where_asked_for():
    toys = [Toy(3, "be brief"), Toy(2)]
    played = play(toy_model(), toys, [1, 2], gold=True)
    assert [session.gold for session in played.sessions] == [toy.letters for toy in toys]
    assert [session.system for session in played.sessions] == ["be brief", ""]
    session = play(toy_model(context=8), [Toy(6)], [3], gold=True).sessions[0]
    assert session.cut and len(session.gold) == len(session.requests) < 6
    assert all(session.gold == [] for session in play(toy_model(), toys, [1, 2]).sessions)


def test_recorded_entropy_is_the_models():
    model = toy_model()
    played = play(model, [Toy(2, "be brief"), Toy(3)], [1, 2], temperature=0.7)
    for row, session in enumerate(played.sessions):
        with torch.no_grad():
            logits = model(torch.tensor([session.prompt + session.ids])).logits[0]
        p = (logits.double() / 0.7).softmax(-1)
        wanted = -(p * p.log()).sum(-1)
        at = played.policy[row].nonzero().flatten()
        assert (played.entropy[row, at] - wanted[at + len(session.prompt) - 1]).abs().max() < 1e-4
        assert (played.entropy[row][~played.policy[row]] == 0).all()


def test_state_keys_are_equal_where_the_turn_and_what_was_shown_in_it_are():
    keys: dict[tuple, set[int]] = {}
    played = play(toy_model(), [Toy(3) for _ in range(6)], [4, 4, 4, 5, 5, 5])
    for session in played.sessions:
        shown = []
        for action in session.actions:
            if action.turn >= len(shown):
                shown.append([session.requests[action.turn]])
            keys.setdefault((action.turn, *shown[-1]), set()).add(action.state_key)
            shown[-1].append(action.observation)
    assert all(len(found) == 1 for found in keys.values())
    assert len(set.union(*keys.values())) == len(keys) > 6
    assert all(0 <= key < 2**63 for found in keys.values() for key in found)


class Numbered(Toy):
    """Tells its states' keys, the last step's aside."""

    def step(self, action):
        step = super().step(action)
        return Step(step.observation, step.turn_reward, step.request, {} if step.done else {"state_key": self.turn})


def test_state_key_of_the_environment_comes_first():
    *told, last = play(toy_model(), [Numbered(3)], [4]).sessions[0].actions
    assert {action.state_key for action in told} <= {0, 1, 2}
    assert last.state_key > 2


def test_context_without_room_for_an_action_is_refused():
    toys = [Toy(2, "be brief"), Toy(2)]  # the second one's request takes 4 tokens: <user> say x >
    with pytest.raises(ValueError, match="no action fits into its context of 4 tokens; wanted 5 or more"):
        play(toy_model(context=4), toys, [1, 2])
    assert play(toy_model(context=5), toys, [1, 2]).sampled_tokens == 1


class Rude(Toy):
    """A toy that answers its second action with the step that it was made with."""

    def __init__(self, answer=None, **fields):
        super().__init__(2)
        self.answer, self.fields, self.acted = answer, fields, 0

    def reset(self, seed):
        first = super().reset(seed)
        vars(self).update({name: value for name, value in self.fields.items() if name != "first"})
        return self.fields.get("first", first)

    def step(self, action):
        self.acted += 1
        step = Step(turn_reward=1.0, request="say a")
        return step if self.acted == 1 else self.answer


@pytest.mark.parametrize(
    ("rude", "complaint"),
    [
        (Rude(("ok", 1.0)), r"step\(\) gave in turn 1 \('ok', 1.0\); wanted a .*protocol.Step"),
        (Rude(None), r"step\(\) gave in turn 1 None"),
        (Rude(Step(turn_reward=1.5)), r"Step.turn_reward of turn 1 is 1.5; wanted a number in \[0, 1\], or None"),
        (Rude(Step(turn_reward=-0.5)), "Step.turn_reward of turn 1 is -0.5"),
        (Rude(Step(turn_reward=float("nan"))), "Step.turn_reward of turn 1 is nan"),
        (Rude(Step(turn_reward="1")), "Step.turn_reward of turn 1 is '1'"),
        (Rude(Step(turn_reward=1.0, request="say b")), "Step.request of turn 1 is 'say b'; .*num_turns is 2"),
        (Rude(Step(request="say b")), "Step.turn_reward of turn 1 is None; wanted a number, as a request follows"),
        (Rude(Step(turn_reward=1.0, request=3)), "Step.request of turn 1 is 3; wanted a text or None"),
        (Rude(Step(observation=b"no")), "Step.observation of turn 1 is b'no'; wanted a text or None"),
        (Rude(Step(info=None)), "Step.info of turn 1 is None; wanted a dict"),
        (
            Rude(Step(info={"state_key": "x"})),
            r"Step.info\['state_key'\] of turn 1 is 'x'; wanted a whole number of 64",
        ),
        (Rude(Step(info={"state_key": 1.5})), "of turn 1 is 1.5"),
        (Rude(Step(info={"state_key": True})), "of turn 1 is True"),
        (Rude(Step(info={"state_key": 2**63})), "of turn 1 is 9223372036854775808"),
        (Rude(first=None), r"reset\(\) gave None; wanted the first request, a text"),
        (Rude(system=None), "system is None; wanted a text"),
        (Rude(num_turns="2"), "num_turns is '2'; wanted a whole number of at least 1"),
        (Rude(num_turns=0), "num_turns is 0"),
        (Rude(gold=lambda: ["a"]), r"gold\(\) gave in turn 0 \['a'\]; wanted a text"),
    ],
)
def test_environment_that_breaks_the_protocol_is_told_where(rude, complaint):
    with pytest.raises(ValueError, match=f"^environment Rude: .*{complaint}"):
        play(toy_model(), [rude], [1], gold=True)


def test_environment_may_end_a_session_early_and_give_numbers_of_other_kinds():
    early = Rude(Step(turn_reward=True))
    assert play(toy_model(), [early], [1]).turn_reward.tolist() == [[1, 1]]
    early.num_turns, early.fields, early.acted = 2, {"num_turns": 5}, 0
    played = play(toy_model(), [early], [1])
    assert played.turn_reward.tolist() == [[1, 1, 0, 0, 0]] and played.reached.sum() == 2


def test_sessions_of_different_prompts_come_back_in_order():
    toys = [Toy(2, "be brief"), Toy(2), Toy(2, "say no"), Toy(2, "be brief")]
    played = play(toy_model(), toys, [1, 2, 3, 4])
    tokenizer = toy_tokenizer()
    assert [session.seed for session in played.sessions] == [1, 2, 3, 4]
    prompts = [tokenizer.decode(session.prompt) for session in played.sessions]
    assert [prompt[:15] for prompt in prompts] == ["<sys> be brief ", "", "<sys> say no <u", "<sys> be brief "]
    shared = played.by_prompt([0, 1, 2, 3])
    assert sorted(sorted(members) for _, members in shared) == [[0, 3], [1], [2]]
    for prompt, members in shared:
        assert all(played.sessions[row].prompt == prompt for row in members)
        assert played.lengths[members].tolist() == sorted(played.lengths[members].tolist())


def test_demonstrations_play_the_ground_truth():
    toys = [Toy(3), Toy(2, "be brief")]
    sampling = Sampling()
    played = demonstrate(toy_model(), make_chat(toy_tokenizer()), toys, [1, 2], sampling=sampling)
    assert played.turn_reward.tolist() == [[1, 1, 1], [1, 1, 0]]
    assert [toy.heard for toy in toys] == [toy.letters for toy in toys]
    assert (played.old_logp == 0).all()
    assert played.policy.sum(1).tolist() == [6, 4]  # a letter and the end of the action each


def test_demonstration_stops_at_the_end_of_the_turn():
    toy = Toy(2)
    toy.gold = lambda: "no\nno\na\na"  # the turn is over, failed, after two
    played = demonstrate(toy_model(), make_chat(toy_tokenizer()), [toy], [1], sampling=Sampling())
    assert toy.heard == ["no", "no", "no", "no"] and played.turn_reward.tolist() == [[0, 0]]
    toy.gold = lambda: " "
    with pytest.raises(ValueError, match=r"gold\(\) is empty in turn 0 of session 1"):
        demonstrate(toy_model(), make_chat(toy_tokenizer()), [toy], [1], sampling=Sampling())


def test_evaluation_samples_at_its_own_temperature(monkeypatch):
    taken = []
    monkeypatch.setattr(
        evaluate, "rollout", lambda *args, **options: taken.append(options["sampling"]) or rollout(*args, **options)
    )
    tables = {"environment": {"name": "toy:Toy"}, "rollout": {"temperature": 0.5}, "evaluation": {"sessions": 2}}
    chat = make_chat(toy_tokenizer())
    evaluate.evaluate(toy_model(), chat, load_config(None, tables))
    tables["evaluation"]["temperature"] = 0.25
    evaluate.evaluate(toy_model(), chat, load_config(None, tables))
    assert [sampling.temperature for sampling in taken] == [1.0, 0.25]


def test_lockstep_smaller_than_the_batch():
    played = play(toy_model(), [Toy(2) for _ in range(5)], [1, 2, 3, 4, 5], rows=2)
    assert [session.seed for session in played.sessions] == [1, 2, 3, 4, 5]
    assert played.reached.all()
