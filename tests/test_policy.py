"""The built-in policy and its tokenizer: what Hugging Face's tools and the trainer ask of them."""

import copy

import pytest
import torch
from crest_train.cache import GrowingCache, prompt_cache
from crest_train.environments.desk_world import VOCABULARY
from crest_train.policy import TinyConfig, TinyForCausalLM, TinyModel
from crest_train.tokenizer import build_tokenizer
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, DynamicCache

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def make_model(**sizes):
    """A policy with random weights, also in the head, which starts at zero."""
    torch.manual_seed(1)
    model = TinyForCausalLM(TinyConfig(vocab_size=len(VOCABULARY), **sizes)).eval()
    torch.nn.init.normal_(model.head.weight, std=0.1)
    return model


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture(scope="module")
def ids():
    return torch.randint(1, len(VOCABULARY), (3, 17), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def no_gradient():
    with torch.no_grad():
        yield


def reference_logits(model, ids_T):
    """The policy written out for one row in float64: no heads as batch, no fused attention, no cache."""
    weights = {name: value.double() for name, value in model.state_dict().items()}
    config = model.config
    D, H, W = config.hidden_size, config.num_attention_heads, config.head_dim

    def norm(x, name):
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.pow(2).mean(-1, keepdim=True) + config.norm_eps).sqrt() * weights[name]

    def rotate(x, position):
        half = W // 2
        angle = position * config.rope_base ** (-torch.arange(half).double() / half)
        left, right = x[:half], x[half:]
        return torch.cat([left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()])

    before = [config.pad_token_id, *ids_T[:-1].tolist()]
    x = weights["model.embedding.weight"][ids_T] + weights["model.previous_embedding.weight"][before]
    for block in range(config.num_blocks):
        prefix = f"model.blocks.{block}."
        qkv = norm(x, prefix + "attention_norm.weight") @ weights[prefix + "qkv.weight"].T
        mixed = torch.zeros_like(x)
        for t in range(len(ids_T)):
            for head in range(H):
                query = rotate(qkv[t, head * W : (head + 1) * W], t)
                scores = torch.stack([query @ rotate(qkv[s, D : D + W], s) for s in range(t + 1)]) / W**0.5
                mixed[t, head * W : (head + 1) * W] = scores.softmax(0) @ qkv[: t + 1, D + W :]
        x = x + mixed @ weights[prefix + "attention_out.weight"].T
        inner = norm(x, prefix + "swiglu_norm.weight") @ weights[prefix + "gate_up.weight"].T
        gate, up = inner.chunk(2, -1)
        x = x + (gate * gate.sigmoid() * up) @ weights[prefix + "down.weight"].T
    return norm(x, "model.norm.weight") @ weights["head.weight"].T


def test_logits_are_those_of_the_architecture(model, ids):
    torch.testing.assert_close(model(ids[:1]).logits[0].double(), reference_logits(model, ids[0]), **CLOSE)


def test_it_has_a_fifth_of_a_million_parameters_and_starts_at_the_uniform_policy():
    model = TinyForCausalLM(TinyConfig(vocab_size=len(VOCABULARY)))
    assert 190_000 < sum(parameter.numel() for parameter in model.parameters()) < 215_000
    assert model(torch.tensor([[2, 3, 4]])).logits.abs().max() == 0
    assert abs(model.model.embedding.weight.std() - 1) < 0.05
    assert abs(model.model.previous_embedding.weight.std() - 0.5) < 0.03
    assert abs(model.model.blocks[0].down.weight.std() * 240**0.5 * 2**0.5 - 0.5) < 0.03


@pytest.mark.parametrize("make_cache", [DynamicCache, GrowingCache])
@pytest.mark.parametrize("widths", [[1] * 17, [5, 1, 1, 7, 3], [16, 1]])
def test_steps_with_a_cache_give_the_full_forward(model, ids, make_cache, widths):
    cache, parts = make_cache(), []
    for part in ids.split(widths, dim=1):
        parts.append(model(part, cache=cache).logits)
    assert cache.get_seq_length() == 17
    torch.testing.assert_close(torch.cat(parts, 1), model(ids).logits, **CLOSE)


def test_a_cache_made_from_the_config_fits(model, ids):
    cache = DynamicCache(config=model.config)
    model(ids[:, :4], past_key_values=cache)
    torch.testing.assert_close(model(ids[:, 4:], past_key_values=cache).logits, model(ids).logits[:, 4:], **CLOSE)


@pytest.mark.parametrize(
    "make_cache, select",
    [
        (DynamicCache, lambda cache, rows: cache.batch_select_indices(torch.tensor(rows))),
        (DynamicCache, lambda cache, rows: cache.reorder_cache(torch.tensor(rows))),
        (GrowingCache, lambda cache, rows: cache.select(rows)),
    ],
)
def test_rows_of_the_cache_may_be_dropped_and_repeated(model, ids, make_cache, select):
    cache = make_cache()
    model(ids[:, :9], cache=cache)
    rows = [2, 0, 0, 1]
    select(cache, rows)
    torch.testing.assert_close(model(ids[rows, 9:], cache=cache).logits, model(ids[rows]).logits[:, 9:], **CLOSE)


def test_a_shared_prompt_in_the_cache_passes_gradients(ids):
    model = make_model()
    with torch.enable_grad():
        cache = DynamicCache()
        model(ids[:1, :6], cache=cache)
        behind = prompt_cache([(layer.keys, layer.values) for layer in cache.layers])
        rows = torch.cat([ids[:1, :6].expand(3, -1), ids[:, 6:]], dim=1)
        logits = model(ids[:, 6:], cache=behind).logits
        logits.square().sum().backward()
        found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        model.zero_grad()
        wanted = model(rows).logits[:, 6:]
        wanted.square().sum().backward()
    torch.testing.assert_close(logits, wanted, **CLOSE)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-4)


def test_left_padding_changes_nothing(model, ids):
    padded = torch.cat([torch.full((3, 4), 5), ids], 1)
    mask = torch.ones_like(padded)
    mask[:, :4] = 0
    wanted = model(ids).logits
    torch.testing.assert_close(model(padded, attention_mask=mask).logits[:, 4:], wanted, **CLOSE)
    cache = DynamicCache()
    model(padded[:, :9], attention_mask=mask[:, :9], cache=cache)
    last = [model(padded[:, t : t + 1], attention_mask=mask[:, : t + 1], cache=cache).logits for t in range(9, 21)]
    torch.testing.assert_close(torch.cat(last, 1), wanted[:, 5:], **CLOSE)


def test_generate_is_the_greedy_continuation(model, ids):
    wanted = ids
    for _ in range(10):
        wanted = torch.cat([wanted, model(wanted).logits[:, -1:].argmax(-1)], 1)
    options = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
    assert torch.equal(model.generate(ids, **options), wanted)
    padded = torch.cat([torch.zeros(3, 4, dtype=torch.int64), ids], 1)
    mask = (padded != 0).long()
    assert torch.equal(model.generate(padded, attention_mask=mask, **options)[:, 4:], wanted)


def test_beam_search_scores_are_those_of_its_sequences(model, ids):
    """Beams are reordered at every step, so that a token carried to the wrong row would show."""
    found = model.generate(
        ids,
        max_new_tokens=6,
        num_beams=4,
        do_sample=False,
        eos_token_id=None,
        length_penalty=0.0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    logp = model(found.sequences).logits[:, 16:-1].log_softmax(-1)
    score = logp.gather(2, found.sequences[:, 17:, None]).sum((1, 2))
    torch.testing.assert_close(found.sequences_scores, score, **CLOSE)


def test_generate_stops_at_the_end_of_the_action(ids):
    tokenizer = build_tokenizer(VOCABULARY)
    model = TinyForCausalLM(TinyConfig(vocab_size=len(VOCABULARY), eos_token_id=tokenizer.eos_token_id))
    model.head.weight[tokenizer.eos_token_id] = model.model(ids[:1]).last_hidden_state[0, -1]
    assert model.generate(ids[:1], max_new_tokens=10, do_sample=False)[0, 17:].tolist() == [tokenizer.eos_token_id]


def test_a_padded_row_that_is_all_padding_harms_no_other(model, ids):
    mask = torch.ones_like(ids)
    mask[1] = 0
    logits = model(ids, attention_mask=mask).logits
    assert logits.isfinite().all()
    torch.testing.assert_close(logits[[0, 2]], model(ids[[0, 2]]).logits, **CLOSE)


def test_saved_and_loaded_through_the_auto_classes(tmp_path, ids):
    model, tokenizer = make_model(num_blocks=3, rope_base=500.0), build_tokenizer(VOCABULARY)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is TinyForCausalLM
    assert {**loaded.config.to_dict(), "_name_or_path": ""} == {**model.config.to_dict(), "_name_or_path": ""}
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=0, atol=0)
    base = AutoModel.from_pretrained(tmp_path)
    assert type(base) is TinyModel
    torch.testing.assert_close(base(ids).last_hidden_state, model.model(ids).last_hidden_state, rtol=0, atol=0)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.get_vocab() == tokenizer.get_vocab()
    assert again.chat_template == tokenizer.chat_template
    assert (again.eos_token, again.pad_token) == (";", "<pad>")


def test_the_trainer_finds_hidden_states_and_head(model, ids):
    hidden = model.base_model(ids).last_hidden_state
    assert hidden.shape == (3, 17, 96)
    torch.testing.assert_close(model.get_output_embeddings()(hidden), model(ids).logits, rtol=0, atol=0)
    torch.testing.assert_close(model(ids, logits_to_keep=2).logits, model(ids).logits[:, -2:], **CLOSE)


def test_misuse_is_refused(model, ids):
    with pytest.raises(ValueError, match=r"attention_mask has shape \(3, 5\); wanted \[rows, positions\] \(3, 17\)"):
        model(ids, attention_mask=torch.ones(3, 5))
    with pytest.raises(ValueError, match="max_position_embeddings, 8"):
        make_model(max_position_embeddings=8)(ids)
    with pytest.raises(ValueError, match="hidden_size is 90"):
        TinyConfig(hidden_size=90)
    with pytest.raises(ValueError, match="words lacks"):
        build_tokenizer(("<pad>", ";"))


def test_chat_layout_is_literal():
    tokenizer = build_tokenizer(VOCABULARY)
    messages = [
        {"role": "user", "content": "move f3 d1"},
        {"role": "assistant", "content": "mv f3 d1"},
        {"role": "tool", "content": "ok"},
        {"role": "assistant", "content": "done"},
        {"role": "user", "content": "owner f2 <hint> cat f2 ; answer o3 ; </hint>"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<user> move f3 d1 > mv f3 d1 ; <obs> ok > done ; <user> owner f2 <hint> cat f2 ; answer o3 ; </hint> >"
    )
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert [VOCABULARY[i] for i in ids] == text.split()
    assert tokenizer.decode(ids) == text
    half = tokenizer.apply_chat_template(messages[:3], tokenize=False, add_generation_prompt=True)
    assert half == "<user> move f3 d1 > mv f3 d1 ; <obs> ok >"
    assert tokenizer.encode("move it", add_special_tokens=False) == [VOCABULARY.index("move"), 1]
    with pytest.raises(Exception, match="no role system"):
        tokenizer.apply_chat_template([{"role": "system", "content": "be brief"}], tokenize=False)


def test_a_model_can_be_copied(model, ids):
    torch.testing.assert_close(copy.deepcopy(model)(ids).logits, model(ids).logits, rtol=0, atol=0)
