"""Where torch.compile and torch.func end for the ops over a vocabulary, and what Triton compiles for many lengths."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from compile_cases import case, compare, compiled, every_op, graphs, linear_loss, stats, with_leaves

from crest_ops import linear_token_divergence, linear_token_stats, policy_loss


def test_lengths_that_torch_specialises():
    """torch makes a graph of its own for size 1, and for size 0."""
    function = compiled(stats)
    for length in (3, 1, 0, 5, 1):
        compare(stats, function, length)
    assert graphs() <= 3


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++ on the CPU")
def test_inductor():
    function = compiled(stats, "inductor")
    for length in (3, 9, 17):
        compare(stats, function, length)
    assert graphs() == 1


def test_a_second_backward_is_the_same_or_refused():
    """With a frozen head. torch gives buffers of a compiled backward away by default, and says how to keep them."""
    given = case(5)
    leaves = [given["hidden"].requires_grad_()]
    (eager,) = torch.autograd.grad(linear_loss(given, 0.1, 0.2), leaves)
    with torch._functorch.config.patch(donated_buffer=False):
        loss = compiled(linear_loss)(given, 0.1, 0.2)
        first = torch.autograd.grad(loss, leaves, retain_graph=True)
        torch.testing.assert_close(first[0], eager, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(torch.autograd.grad(loss, leaves, retain_graph=True), first, rtol=0, atol=0)
        gradient = torch.autograd.grad(loss, leaves, create_graph=True)[0]
        with pytest.raises(RuntimeError, match="double backward"):
            gradient.sum().backward()


def test_a_second_backward_in_place_is_refused():
    given, (leaf,) = with_leaves(stats, case(5))
    logits, targets, weight = leaf * 1, given["targets"], given["token_weight"]
    with torch._functorch.config.patch(donated_buffer=False):
        loss = compiled(lambda z: policy_loss(z, targets, weight, token_weight=weight, inplace=True).loss)(logits)
        (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
        assert torch.equal(logits.detach(), gradient)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(loss, logits)


@every_op
def test_other_ways_to_differentiate_are_refused(op):
    given = case(4)
    name = "hidden" if op.__name__.startswith("linear") else "logits"

    def loss(tensor):
        return op(given | {name: tensor}, 0.1, 0.2)

    for transform in (
        lambda x: torch.func.grad(loss)(x),
        lambda x: torch.func.vmap(loss)(x[None]),
        lambda x: torch.func.jvp(loss, (x,), (x,)),
    ):
        with pytest.raises(ValueError, match=rf"^{name} is under torch\.func \(vmap"):
            transform(given[name])
    with torch.autograd.forward_ad.dual_level(), pytest.raises(ValueError, match=f"{name} .*forward-mode"):
        loss(torch.autograd.forward_ad.make_dual(given[name], given[name]))


@pytest.mark.parametrize("argument", ["head_weight", "head_bias", "teacher_hidden", "teacher_head_weight"])
def test_other_ways_to_differentiate_a_head_are_refused(argument):
    given = {
        "hidden": torch.randn(3, 4), "head_weight": torch.randn(7, 4), "head_bias": torch.randn(7),
        "targets": torch.tensor([0, 6, 2]), "teacher_hidden": torch.randn(3, 4),
        "teacher_head_weight": torch.randn(7, 4),
    }  # fmt: skip

    def loss(tensor):
        return linear_token_divergence(**(given | {argument: tensor})).divergence.sum()

    with pytest.raises(ValueError, match=rf"^{argument} is under torch\.func \(vmap"):
        torch.func.grad(loss)(given[argument])
    with torch.autograd.forward_ad.dual_level(), pytest.raises(ValueError, match=f"^{argument} has a forward-mode"):
        loss(torch.autograd.forward_ad.make_dual(given[argument], given[argument]))


def test_a_split_head_needs_breaks_in_the_graph():
    """The ranks of a process_group compare sizes first, which no graph holds: the error says what to do."""
    store = pytest.importorskip("torch.testing._internal.distributed.fake_pg").FakeStore()
    torch.distributed.init_process_group("fake", store=store, rank=0, world_size=2)
    try:
        given = case(4)

        def loss(hidden, weight, targets):
            return linear_token_stats(hidden, weight, targets, process_group=torch.distributed.group.WORLD).logp.sum()

        arguments = given["hidden"], given["weight"], given["targets"]
        with pytest.raises(Exception, match="process_group.*fullgraph=False"):
            compiled(loss, "eager")(*arguments)
    finally:
        torch.distributed.destroy_process_group()


# Counts what Triton would compile: the launches of all ops, by what its own binder says they specialise on.
VARIANTS = """
import importlib, json, sys
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature
import compile_cases

backend = make_backend(GPUTarget("cuda", 90, 32))
variants = {}

class Counted:
    def __init__(self, kernel):
        self.name, self.bind = kernel.__name__, create_function_from_signature(kernel.signature, kernel.params, backend)

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *arguments, **options):
        for tensor in arguments:
            if isinstance(tensor, torch.Tensor) and (tensor.is_floating_point() or tensor.dtype == torch.uint8):
                tensor.detach().zero_()
        _, specialised, rest = self.bind(*arguments, **options)
        variants.setdefault(self.name, set()).add(repr((specialised, sorted(rest.items()))))

for name in ("token_stats", "policy_loss", "divergence", "divergence_grad", "teacher_pair", "crest_segments"):
    module = importlib.import_module("crest_kernels." + name)
    for key, value in list(vars(module).items()):
        if isinstance(value, JITFunction) and key.endswith("_kernel"):
            setattr(module, key, Counted(value))
importlib.import_module("crest_kernels.policy_loss").launch_options = lambda *_: (8, 128)
for module in ("token_stats", "divergence", "crest_policy_loss", "linear_call", "linear_divergence"):
    importlib.import_module("crest_ops." + module).resolve_backend = lambda *_: "triton"
compile_cases.V, compile_cases.WIDER = 48, 64
for offset in (0, 1):
    for length in compile_cases.LENGTHS:
        given = compile_cases.case(length + offset)
        for name in ("logits", "teacher", "hidden", "teacher_hidden", "mask", "credit", "old_logp", "ref_logp",
                     "targets", "token_weight"):
            given[name] = given[name][offset:]
        given["spans"] = compile_cases.Spans.from_mask(torch.ones(1, length).bool(), group=torch.tensor([0]))
        for op in [*compile_cases.OPS, compile_cases.jsd]:
            given, leaves = compile_cases.with_leaves(op, given)
            torch.autograd.grad(op(given, 0.1, 0.2), leaves)
print(json.dumps({name: len(found) for name, found in variants.items()}))
"""


def test_a_kernel_is_compiled_once_for_all_lengths():
    """Also where per-token tensors are slices that start anywhere."""
    pytest.importorskip("triton")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(__file__).parent)
    done = subprocess.run([sys.executable, "-c", VARIANTS], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    variants = json.loads(done.stdout)
    assert variants.pop("divergence_grad_kernel") == 2  # one for the KLs, one for jsd
    assert len(variants) == 7 and set(variants.values()) == {1}
