"""`hidden_states` calls the model as it stands: what wraps it stays at work, and nothing of the call is left on it."""

import copy
from functools import partial

import pytest
import torch
from ranks import run_ranks
from test_model_families import BATCH, IDS, TARGETS, H, V, tiny
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn.parallel import DistributedDataParallel

from crest_ops import check_head, hidden_states, linear_policy_loss, resolve_head


def states_of(model, batch=BATCH):
    return model.base_model(**batch).last_hidden_state


def policy_loss(hidden, head, rows=slice(None), old_logp=None):
    """A loss whose gradient by every token differs; its weights are of the whole batch, whatever the rows."""
    weight = torch.linspace(0.5, 1.5, TARGETS.numel()).view(TARGETS.shape) / TARGETS.numel()
    credit = torch.linspace(-1, 1, TARGETS.numel()).view(TARGETS.shape)
    return linear_policy_loss(
        hidden, head.weight, TARGETS[rows], credit[rows], token_weight=weight[rows], old_logp=old_logp, **head.options
    ).loss


def test_no_row_goes_through_the_head():
    model, seen = tiny("llama"), []
    hook = model.lm_head.register_forward_hook(lambda module, args, output: seen.append(output))
    hidden = hidden_states(model, BATCH)
    hook.remove()
    assert [output.shape for output in seen] == [(2, 0, V)]
    torch.testing.assert_close(hidden, states_of(model))


def test_positions_kept():
    model = tiny("llama")
    found = hidden_states(model, {**BATCH, "logits_to_keep": 3})
    torch.testing.assert_close(found, states_of(model)[:, -3:])
    torch.testing.assert_close(hidden_states(model, {**BATCH, "return_dict": False}), states_of(model))


def test_nothing_is_left_on_the_model():
    model = tiny("gemma2")
    before = copy.deepcopy({name: set(vars(module)) for name, module in model.named_modules()})
    wanted = model(**BATCH).logits
    hidden_states(model, BATCH)
    hidden_states(model, BATCH, then=torch.sum)
    for broken in ({"input_ids": IDS + V}, {"input_ids": IDS, "attention_mask": "none"}):
        with pytest.raises((IndexError, ValueError, AttributeError, TypeError)):
            hidden_states(model, broken)
    with pytest.raises(ZeroDivisionError):
        hidden_states(model, BATCH, then=lambda hidden: 1 / 0)
    assert before == {name: set(vars(module)) for name, module in model.named_modules()}
    assert torch.equal(model(**BATCH).logits, wanted)


def test_a_forward_of_the_instance_runs_and_stays():
    """As Accelerate sets it for mixed precision and for offloading."""
    model, calls = tiny("llama"), []

    def counted(forward, *args, **kwargs):
        calls.append(1)
        return forward(*args, **kwargs)

    model.forward = of_model = partial(counted, model.forward)
    model.lm_head.forward = of_head = partial(counted, model.lm_head.forward)
    hidden = hidden_states(model, BATCH)
    assert len(calls) == 2 and model.forward is of_model and model.lm_head.forward is of_head
    torch.testing.assert_close(hidden, states_of(model))
    with pytest.raises(ValueError, match="forward set on the instance"):  # the weight alone would pass it by
        hidden_states(model, BATCH, then=lambda hidden: resolve_head(model).weight)


def test_then_runs_inside_the_forward():
    model = tiny("llama")
    seen = []
    model.register_forward_hook(lambda *_: seen.append("after"))
    loss = hidden_states(model, BATCH, then=lambda h: seen.append("then") or policy_loss(h, resolve_head(model)))
    assert seen == ["then", "after"]
    torch.testing.assert_close(loss, policy_loss(states_of(model), resolve_head(model)))


def test_gradient_checkpointing_stays_at_work():
    model = tiny("llama").train()
    policy_loss(hidden_states(model, BATCH), resolve_head(model)).backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    calls = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    model.gradient_checkpointing_enable()
    policy_loss(hidden_states(model, BATCH), resolve_head(model)).backward()
    assert len(calls) == 2  # forward, and again in backward
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], msg=name)


def test_compiled():
    """Two graphs, one for states and one for logits, whose calls may take turns."""
    torch.compiler.reset()
    counter = CompileCounter()
    model, batch = tiny("llama"), {"input_ids": IDS}
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for _ in range(3):
        assert compiled(**batch).logits.shape == (2, 7, V)
        torch.testing.assert_close(hidden_states(compiled, batch), states_of(model, batch))
    assert counter.frame_count == 2
    assert resolve_head(compiled).weight is model.lm_head.weight


def test_accelerate_with_autocast():
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare(tiny("llama"))
    hidden = hidden_states(model, BATCH)
    assert hidden.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(hidden, states_of(model).float())
    policy_loss(hidden, resolve_head(model)).backward()
    assert all(p.grad.any() for p in model.parameters())


class CallsItsHead(nn.Module):
    """A causal LM of nobody's, which calls its head so many times."""

    def __init__(self, times):
        super().__init__()
        self.embed, self.lm_head, self.times = nn.Embedding(V, H), nn.Linear(H, V), times

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids):
        hidden = self.embed(input_ids)
        return [self.lm_head(hidden) for _ in range(self.times)] or [hidden @ self.lm_head.weight.T]


def test_any_module_with_output_embeddings():
    model = CallsItsHead(1)
    assert torch.equal(hidden_states(model, {"input_ids": IDS}), model.embed(IDS))
    assert resolve_head(model).bias is model.lm_head.bias


REFUSED = {
    "no head": (lambda: tiny("llama").model, BATCH, "model is .*LlamaModel without output embeddings"),
    "no model": (lambda: nn.Linear(H, V), BATCH, "model is .*Linear without output embeddings, want a causal LM"),
    "head never called": (lambda: CallsItsHead(0), {"input_ids": IDS}, "called its head 0 times, want once"),
    "head called twice": (lambda: CallsItsHead(2), {"input_ids": IDS}, "called its head 2 times, want once"),
    "replicas": (lambda: nn.DataParallel(tiny("llama")), BATCH, "model is a DataParallel, want .*Distributed"),
    "labels": (lambda: tiny("llama"), {**BATCH, "labels": IDS}, "batch has labels, want none"),
    "a tensor": (lambda: tiny("llama"), IDS, "batch is torch.Tensor, want a mapping"),
    "keys of no forward": (
        lambda: tiny("llama"),
        {**BATCH, "tool_mask": IDS, "advantages": IDS},
        "batch has advantages, tool_mask, want arguments of the forward of .*LlamaForCausalLM alone",
    ),
}


@pytest.mark.parametrize("model, batch, message", REFUSED.values(), ids=REFUSED)
def test_refused(model, batch, message):
    with pytest.raises(ValueError, match=f"^{message}|{message}$"):
        hidden_states(model(), batch)


# --- two processes ----------------------------------------------------------------------------------------------------


def gradients(model):
    """Of all parameters by their name in the bare model, whole."""
    found = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        name = name.replace("module.", "").replace("_fsdp_wrapped_", "")
        found[name] = grad if grad is None or type(grad) is torch.Tensor else grad.full_tensor()
    return found


def with_lora_head(model):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(target_modules=["q_proj", "lm_head"], init_lora_weights=False))


def step(model, rank, inside=False, size=2):
    """Gradients of the loss of this rank's row; data parallelism takes their mean over the ranks, hence times size."""
    rows = slice(rank, rank + 1)
    batch = {name: value[rows] for name, value in BATCH.items()}
    model.zero_grad()
    if inside:
        loss = hidden_states(model, batch, then=lambda hidden: policy_loss(hidden, resolve_head(model), rows))
    else:
        loss = policy_loss(hidden_states(model, batch), resolve_head(model), rows)
    (size * loss).backward()


def one_process(family, lora=False):
    model = with_lora_head(tiny(family)) if lora else tiny(family)
    policy_loss(hidden_states(model, BATCH), resolve_head(model)).backward()
    return gradients(model)


def on_two_ranks(rank):
    """{case: largest difference from one process over all parameters, or a message}"""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    found = {}
    mesh = torch.distributed.init_device_mesh("cpu", (2,))

    def note(case, model, wanted):
        got = gradients(model)
        assert got.keys() == wanted.keys()
        missing = [name for name in wanted if (got[name] is None) != (wanted[name] is None)]
        errors = [(got[name] - wanted[name]).abs().max() for name in wanted if wanted[name] is not None]
        found[case] = missing or float(max(errors))

    for family in ("llama", "llama, tied"):
        wanted = one_process(family)
        for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
            model = DistributedDataParallel(tiny(family), **options)
            for _ in range(2):  # static_graph learns in the first
                step(model, rank)
            note(("ddp", family, *options), model, wanted)
        model = tiny(family)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for inside in (False, True):
            step(model, rank, inside)
            note(("fsdp2", family, inside), model, wanted)
        check_head(model, IDS)
    wanted = one_process("llama", lora=True)
    model = DistributedDataParallel(with_lora_head(tiny("llama")), find_unused_parameters=True)
    step(model, rank)
    note(("ddp", "lora on the head"), model, wanted)

    model = fully_shard(tiny("llama"), mesh=mesh, reshard_after_forward=True)
    step(model, rank, inside=True)
    note(("fsdp2", "root resharded"), model, one_process("llama"))
    with pytest.raises(ValueError, match="DTensor.*then="):
        step(model, rank)

    model = FullyShardedDataParallel(tiny("llama"), use_orig_params=True, device_id=torch.device("cpu"))
    step(model, rank, inside=True)
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        note(("fsdp1",), model, one_process("llama"))
    with pytest.raises(ValueError, match="shard of FSDP.*then="):
        step(model, rank)
    return found


def test_two_ranks_give_the_gradients_of_one_process(tmp_path):
    for found in run_ranks(on_two_ranks, tmp_path, 2):
        assert len(found) == 13
        assert {case: error for case, error in found.items() if not (type(error) is float and error < 1e-6)} == {}
