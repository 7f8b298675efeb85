"""A run's records: every number of every token where it belongs, texts that join, a file that probe reads."""

import json
import math

import pandas
import pytest
import torch
from crest_train.chat import make_chat
from crest_train.fetch import path_of
from crest_train.recording import read_rollouts
from crest_train.records import records_of, token_texts
from crest_train.rollouts import Sampling, rollout
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from toy import WORDS, Toy, toy_model, toy_tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from crest_ops import Credit, PPOClip, Signals

GROUP = torch.tensor([0, 0, 1, 1])


def recorded(most_bytes=10**9, **changed):
    """A rollout, the numbers given to each of its positions n (credit n, weight 2n, gap -n), and its records."""
    generator, sampling = torch.Generator().manual_seed(0), Sampling(max_action_tokens=3)
    toys = [Toy(2) for _ in GROUP]
    played = rollout(
        toy_model(), make_chat(toy_tokenizer()), toys, [1, 1, 2, 2], generator=generator, sampling=sampling
    )
    place_N = torch.arange(played.policy.numel(), dtype=torch.float32)
    numbers = {"credit": place_N, "weight": 2 * place_N, "logp": played.old_logp + math.log(2)} | changed
    credit = Credit(numbers["credit"], numbers["weight"], PPOClip(0.2, 0.28))
    signals = Signals(teacher_gap_N=-place_N)
    text = records_of(7, played, GROUP, credit, signals, numbers["logp"], toy_tokenizer(), most_bytes)
    return played, text


def test_every_token_has_its_own_numbers():
    played, text = recorded()
    lines = [json.loads(line) for line in text.splitlines()]
    places = [(line["batch"], line["group"], line["seed"]) for line in lines]
    assert places == [(7, 0, 1), (7, 0, 1), (7, 1, 2), (7, 1, 2)]
    width = played.policy.shape[1]
    for row, line in enumerate(lines):
        assert "".join(line["texts"]) == toy_tokenizer().decode(line["ids"])
        for action in line["actions"]:
            places = [row * width + action["start"] + i for i in range(len(action["tokens"]))]
            assert [line["ids"][place - row * width] for place in places] == action["tokens"]
            assert action["credit"] == places and action["token_weight"] == [2 * n for n in places]
            assert action["teacher_gap"] == [-n for n in places] and "distill" not in action
            assert action["ratio"] == pytest.approx([2] * len(places), rel=1e-5)


def test_probe_reads_them_and_pandas_too(tmp_path):
    played, text = recorded()
    path = tmp_path / "step-00007.jsonl"
    path.write_text(text)
    ((read, group),) = read_rollouts(path, len(WORDS))
    assert torch.equal(read.ids, played.ids) and torch.equal(read.policy, played.policy)
    assert torch.equal(group, GROUP) and torch.equal(read.turn_reward, played.turn_reward)
    torch.testing.assert_close(read.old_logp, played.old_logp, rtol=1e-5, atol=0)
    actions = pandas.json_normalize(pandas.read_json(path, lines=True).explode("actions")["actions"])
    tokens = actions.explode(["tokens", "logp", "entropy", "credit", "token_weight"])
    assert len(tokens) == played.policy.sum()
    assert tokens["credit"].sum() == played.policy.flatten().nonzero().sum()


def test_numbers_that_are_not_finite_are_left_out(tmp_path):
    shape = recorded()[0].policy.shape
    _, text = recorded(logp=torch.full(shape, math.inf), credit=torch.full((shape.numel(),), math.nan))
    (tmp_path / "r.jsonl").write_text(text)
    next(read_rollouts(tmp_path / "r.jsonl", len(WORDS)))
    action = json.loads(text.splitlines()[0])["actions"][0]
    assert action["credit"] == action["ratio"] == [] and action["teacher_gap"]


def test_groups_that_do_not_fit_are_left_out_whole():
    text = recorded()[1]
    first = "".join(line + "\n" for line in text.splitlines()[:2])
    assert recorded(most_bytes=0)[1] == first
    assert recorded(most_bytes=len(text.encode()) - 1)[1] == first
    assert recorded(most_bytes=len(text.encode()))[1] == text


def byte_tokenizer():
    """A token per byte: most characters are made of several."""
    alphabet = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(BPE(alphabet, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@given(st.text(min_size=1, max_size=30))
def test_texts_of_bytes_join_to_the_text(text):
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(text)
    texts = token_texts(tokenizer, ids)
    assert len(texts) == len(ids) == len(text.encode()) and "".join(texts) == text
    assert [len(one) for one in texts if one] == [1] * len(text)


@given(st.lists(st.integers(0, 255), min_size=1, max_size=20))
def test_texts_of_bytes_that_are_no_text_join_too(ids):
    tokenizer = byte_tokenizer()
    assert "".join(token_texts(tokenizer, ids)) == tokenizer.decode(ids, clean_up_tokenization_spaces=False)


@pytest.mark.fetched
def test_texts_of_a_real_tokenizer():
    try:
        tokenizer = AutoTokenizer.from_pretrained(path_of("smollm2"))
    except ValueError as error:
        pytest.skip(str(error))
    text = "caf\u00e9 \U0001f469\u200d\U0001f680 <|im_end|>\n  \u65e5\u672c\u8a9e"
    ids = tokenizer.encode(text)
    assert "".join(token_texts(tokenizer, ids)) == text and len(token_texts(tokenizer, ids)) == len(ids)
