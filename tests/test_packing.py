"""Micro-batches: every layout gives the same gradient, and none is larger than it may be."""

from contextlib import nullcontext

import pytest
import torch
from crest_train import packing
from crest_train.config import PolicySection, TrainingSection
from crest_train.loading import load_pretrained
from crest_train.packing import layout_of, micro_batches, parts
from crest_train.policy import TinyConfig, TinyForCausalLM
from crest_train.update import accumulate_gradient, within_memory
from test_loop import play
from test_rollouts import small_model
from toy import WORDS, Toy, toy_tokenizer

from crest_ops import Credit, PPOClip

TURNS = [1, 3, 2, 4, 1, 2]


def tiny():
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=48, num_attention_heads=2, max_position_embeddings=512)
    model = TinyForCausalLM(TinyConfig(vocab_size=len(WORDS), eos_token_id=WORDS.index(";"), **sizes)).eval()
    torch.nn.init.normal_(model.head.weight, std=0.2)  # it starts at zero, where no gradient reaches the body
    return model


def credit_of(played):
    credit_BT = torch.randn(played.policy.shape, generator=torch.Generator().manual_seed(0)) * played.policy
    return Credit(credit_BT.flatten(), (played.policy / played.policy.sum()).flatten(), PPOClip(0.2, 0.28))


def gradients(model, played, layout, tokens, monkeypatch):
    monkeypatch.setattr(packing, "layout_of", lambda model: layout)
    model.zero_grad()
    section = TrainingSection(tokens_per_micro_batch=tokens)
    sums = accumulate_gradient(model, played, credit_of(played), list(range(len(TURNS))), section, temperature=0.8)
    return float(sums["loss"]), [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("system", ["", "be brief"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "granite"])
def test_packed_sessions_do_not_see_each_other(name, system, monkeypatch):
    """transformers makes block masks for torch's attention from the positions that flash-attn's kernels are told by."""
    model = small_model(name).double()
    played = play(model, [Toy(k, system) for k in TURNS])
    loss, wanted = gradients(model, played, "shared", 10**6, monkeypatch)
    for layout, tokens in (("packed", 10**6), ("packed", 70), ("padded", 10**6), ("padded", 90), ("shared", 1)):
        other, found = gradients(model, played, layout, tokens, monkeypatch)
        assert other == pytest.approx(loss, abs=1e-7)
        for one, two in zip(found, wanted, strict=True):
            assert torch.allclose(one, two, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("make", [tiny, lambda: small_model("llama")], ids=["built-in", "llama"])
def test_recomputed_activations_give_the_same_gradient_and_leave_rollouts_their_cache(make, tmp_path, monkeypatch):
    model = make()
    model.save_pretrained(tmp_path)
    toy_tokenizer().save_pretrained(tmp_path)
    recomputed, _ = load_pretrained(tmp_path, PolicySection(gradient_checkpointing=True))
    recomputed.eval()
    assert layout_of(model) == "shared" and layout_of(recomputed) == "padded"
    played, again = (play(m, [Toy(k, "be brief") for k in TURNS]) for m in (model, recomputed))
    assert torch.equal(played.ids, again.ids) and torch.equal(played.old_logp, again.old_logp)

    calls = []
    layer = packing.recomputing_layers(recomputed)[0]
    layer.register_forward_hook(lambda *_: calls.append(1))
    model.double(), recomputed.double()
    _, wanted = gradients(model, played, "shared", 10**6, monkeypatch)
    _, found = gradients(recomputed, played, "padded", 10**6, monkeypatch)
    for one, two in zip(found, wanted, strict=True):
        assert torch.allclose(one, two, rtol=1e-5, atol=1e-7)
    assert not any(module.training for module in recomputed.modules())


def test_layers_keep_no_activation_that_they_recompute(tmp_path):
    """The bytes that autograd holds between the passes, per token."""
    model = tiny()
    model.save_pretrained(tmp_path)
    toy_tokenizer().save_pretrained(tmp_path)
    held = {}
    for checkpointing in (False, True):
        model, _ = load_pretrained(tmp_path, PolicySection(gradient_checkpointing=checkpointing))
        model.eval()
        kept = {}

        def keep(tensor, kept=kept):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), packing_context(model):
            model.model(torch.zeros(1, 256, dtype=torch.int64))
        held[checkpointing] = sum(size for place, size in kept.items() if place not in weights) / 256
    width, blocks = 32, 2
    assert held[True] < 4 * width * (blocks + 6) < held[False] / 3


def packing_context(model):
    from crest_train.model import recomputing

    return recomputing(model) if packing.recomputing_layers(model) else nullcontext()


def test_parts_stay_within_the_budget_in_order_and_none_is_empty():
    lengths = torch.tensor([3, 3, 4, 9, 20, 1])
    rows = [5, 0, 1, 2, 3, 4]
    assert list(parts(rows, lengths, 9)) == [[5, 0, 1], [2], [3], [4]]  # 3 x 3, then 2 x 9 and 20 are too many
    assert list(parts(rows, lengths, 11, padded=False)) == [[5, 0, 1, 2], [3], [4]]
    assert list(parts([], lengths, 9)) == []


def test_budget_counts_padding_where_there_is_some_and_prompts_where_they_are_fed():
    model = small_model("llama")
    played = play(model, [Toy(k, "be brief") for k in TURNS])
    rows = list(range(len(TURNS)))
    prompt = len(played.sessions[0].prompt)
    for layout, prompt_fed in (("packed", prompt), ("padded", prompt), ("shared", 0)):
        batches = list(micro_batches(model, played, rows, 100, layout))
        assert sorted(row for batch in batches for row in batch.rows) == rows and 1 < len(batches) < len(rows)
        for batch in batches:
            assert batch.ids.numel() <= 100
            assert int(batch.written.sum()) == int(played.policy[batch.rows].sum())
            lengths = [len(played.sessions[row].ids) + prompt_fed for row in batch.rows]
            assert batch.ids.numel() == (sum(lengths) if layout == "packed" else max(lengths) * len(lengths))


def test_memory_that_runs_out_is_met_once_with_half_the_tokens():
    section, asked = TrainingSection(tokens_per_micro_batch=100), []

    def short_of_memory(section, fits=60):
        asked.append(section.tokens_per_micro_batch)
        if section.tokens_per_micro_batch > fits:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")
        return "done"

    found, used = within_memory(short_of_memory, section)
    assert found == "done" and used.tokens_per_micro_batch == 50 and asked == [100, 50]
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        within_memory(lambda section: short_of_memory(section, fits=10), section)
    with pytest.raises(RuntimeError, match="another"):
        within_memory(lambda section: (_ for _ in ()).throw(RuntimeError("another")), section)
