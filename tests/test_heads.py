"""The head that the linear ops get from a model gives the model's own logits, or is refused."""

import inspect

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from crest_ops import Head, check_head, resolve_head
from crest_ops.head_arguments import check_head_arguments

V, H = 23, 8
TINY = {
    "vocab_size": V,
    "hidden_size": H,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "pad_token_id": 0,
}
GRIFFIN = {"lru_width": H, "block_types": ["attention"], "attention_window_size": 8}
MAMBA = {"mamba_d_ssm": 8, "mamba_n_heads": 2, "mamba_d_head": 4, "mamba_d_state": 4, "mamba_expand": 1}
FAMILIES = {
    "tied": ("llama", {"tie_word_embeddings": True}, {}),
    "untied": ("llama", {"tie_word_embeddings": False}, {}),
    "softcap": ("gemma2", {"final_logit_softcapping": 1.5}, {"softcap": 1.5}),
    "logit_scale": ("cohere", {"logit_scale": 0.25}, {"logit_scale": 0.25}),
    "logits_scaling divides": ("granite", {"logits_scaling": 4.0}, {"logit_scale": 0.25}),
    "logits_scaling multiplies": ("hyperclovax", {"logits_scaling": 4.0}, {"logit_scale": 4.0}),
    "lm_head_multiplier": ("falcon_h1", {"lm_head_multiplier": 3.0, **MAMBA}, {"logit_scale": 3.0}),
    "logits_mup_width_multiplier": (
        "inkling_text",
        {"logits_mup_width_multiplier": 4.0, "unpadded_vocab_size": 20},
        {"logit_scale": 0.25, "vocab_size": 20},
    ),
    "logits_soft_cap": ("recurrent_gemma", {"logits_soft_cap": 1.5, **GRIFFIN}, {"softcap": 1.5}),
}
IDS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


def tiny(family="untied", dtype=torch.float64):
    """A random model whose logits are of order 1 and beyond, so that a softcap bends them."""
    kind, options, _ = FAMILIES[family]
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"transformers has no {kind}")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**(TINY | options))).to(dtype).eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.normal_()
    return model


def logits_of(head, hidden):
    z = (hidden @ head.weight.T + (0 if head.bias is None else head.bias)) * head.logit_scale
    return z if head.softcap is None else head.softcap * torch.tanh(z / head.softcap)


def assert_own_logits(model, tolerance=1e-6):
    """Of the head on the model's last hidden states; gives both, with their graphs."""
    own = model(input_ids=IDS, output_hidden_states=True)
    head = resolve_head(model)
    found = logits_of(head, own.hidden_states[-1])[..., : head.vocab_size]
    torch.testing.assert_close(found.to(own.logits.dtype), own.logits, atol=tolerance, rtol=tolerance)
    return found, own.logits


@pytest.mark.parametrize("family", FAMILIES)
def test_model_families(family):
    model = tiny(family, torch.float32)
    head = resolve_head(model)
    assert head.weight is model.get_output_embeddings().weight and head.bias is None
    assert (
        head.options
        == {"head_bias": None, "softcap": None, "logit_scale": 1.0, "vocab_size": None} | FAMILIES[family][2]
    )
    assert_own_logits(model, 1e-5)
    check_head(model, IDS)


def test_a_head_alone():
    layer = nn.Linear(H, V)
    head = resolve_head(layer)
    assert head.weight is layer.weight and head.bias is layer.bias
    assert (head.softcap, head.logit_scale) == (None, 1.0)


def test_a_parametrized_head_is_what_it_computes():
    class Doubled(nn.Module):
        def forward(self, weight):
            return 2 * weight

    layer = nn.Linear(H, V, bias=False)
    plain = layer.weight.detach().clone()
    nn.utils.parametrize.register_parametrization(layer, "weight", Doubled())
    assert torch.equal(resolve_head(layer).weight, 2 * plain)


def test_check_head_finds_a_forward_of_another_kind():
    kind = type(tiny())

    class Doubled(kind):
        def forward(self, *args, **kwargs):
            found = super().forward(*args, **kwargs)
            found.logits = 2 * found.logits
            return found

    model = tiny()
    model.__class__ = Doubled
    with pytest.raises(ValueError, match="Doubled, whose logits are not those of its head"):
        check_head(model, IDS)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`", "ignore:`is_gradient_checkpointing`")
class TestPEFT:
    """Adapters on the head; two adapters of different rank and scaling where several matter."""

    @pytest.fixture(autouse=True)
    def peft(self):
        self.peft = pytest.importorskip("peft")

    def lora(self, family="untied", dtype=torch.float64, target="lm_head", **options):
        """A model with random B, so that the adapter counts."""
        config = self.config(target_modules=[target], **options)
        return self.peft.get_peft_model(tiny(family, dtype), config).eval()

    def config(self, **options):
        return self.peft.LoraConfig(**({"r": 2, "lora_alpha": 6, "init_lora_weights": False} | options))

    @pytest.mark.parametrize("family", FAMILIES)
    def test_lora(self, family):
        model = self.lora(family, torch.float32)
        assert_own_logits(model, 1e-5)
        base = model.get_output_embeddings().base_layer.weight
        assert (resolve_head(model).weight - base).abs().max() > 0.1
        check_head(model, IDS)

    def test_lora_by_hand(self):
        layer = self.lora().get_output_embeddings()
        a_RH, b_VR = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        wanted = layer.base_layer.weight + 3.0 * b_VR @ a_RH  # lora_alpha / r = 3
        torch.testing.assert_close(resolve_head(layer).weight, wanted)

    def test_rank_stabilised_scaling(self):
        assert_own_logits(self.lora(use_rslora=True))

    def test_gradients_are_the_models_own(self):
        model = self.lora("softcap")
        upstream = torch.randn(*IDS.shape, V, dtype=torch.float64)
        weights = [w for name, w in model.named_parameters() if w.requires_grad and "lm_head" in name]
        both = assert_own_logits(model)
        found, own = (torch.autograd.grad((z * upstream).sum(), weights, retain_graph=True) for z in both)
        assert len(weights) == 2
        for ours, theirs in zip(found, own, strict=True):
            assert theirs.abs().max() > 0.01
            torch.testing.assert_close(ours, theirs)

    def test_two_active_adapters(self):
        model = self.lora()
        model.add_adapter("other", self.config(target_modules=["lm_head"], r=3, lora_alpha=3))
        one = resolve_head(model).weight
        model.base_model.set_adapter(["default", "other"])
        assert_own_logits(model)
        assert (resolve_head(model).weight - one).abs().max() > 0.1

    def test_an_adapter_that_is_not_on_the_head(self):
        model = self.lora()
        model.add_adapter("body", self.config(target_modules=["q_proj"]))
        model.set_adapter("body")
        assert_own_logits(model)
        assert torch.equal(resolve_head(model).weight, model.get_output_embeddings().base_layer.weight)

    def test_merged(self):
        model = self.lora()
        before = resolve_head(model).weight
        model.merge_adapter()
        assert_own_logits(model)
        assert resolve_head(model).weight is model.get_output_embeddings().base_layer.weight
        torch.testing.assert_close(resolve_head(model).weight, before)

    def test_disabled(self):
        model = self.lora()
        with model.disable_adapter():
            assert_own_logits(model)
            assert resolve_head(model).weight is model.get_output_embeddings().base_layer.weight

    def test_merged_and_disabled_is_refused(self):
        """Its next forward would unmerge the weight."""
        model = self.lora()
        model.merge_adapter()
        with model.disable_adapter(), pytest.raises(ValueError, match=r"merged.*unmerge_adapter"):
            resolve_head(model)

    def test_bias_of_an_adapter(self):
        model = tiny()
        model.lm_head = nn.Linear(H, V).double()
        model = self.peft.get_peft_model(model, self.config(target_modules=["lm_head"], lora_bias=True)).eval()
        layer = model.get_output_embeddings()
        with torch.no_grad():
            layer.lora_B["default"].bias.fill_(0.5)
        assert_own_logits(model)
        torch.testing.assert_close(resolve_head(model).bias, layer.base_layer.bias + 1.5)

    @pytest.mark.filterwarnings("ignore:.lora_bias=True. was passed")
    def test_bias_of_an_adapter_on_a_head_without(self):
        layer = self.lora(lora_bias=True).get_output_embeddings()
        with torch.no_grad():
            layer.lora_B["default"].bias.fill_(0.5)
        assert torch.equal(resolve_head(layer).bias, torch.full((V,), 1.5, dtype=torch.float64))

    def test_low_precision_base_keeps_its_dtype(self):
        """A float32 adapter on a bfloat16 head is added before the rounding, also under autocast."""
        model = self.lora(dtype=torch.bfloat16)
        layer = model.get_output_embeddings()
        assert layer.lora_A["default"].weight.dtype == torch.float32
        layers = (layer.base_layer, layer.lora_B["default"], layer.lora_A["default"])
        with torch.no_grad():
            for part in layers[1:]:
                part.weight.normal_()  # of all 24 bits
        base_VH, b_VR, a_RH = (part.weight.double() for part in layers)
        wide = base_VH + 3 * b_VR @ a_RH
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = resolve_head(model).weight
        assert found.dtype == torch.bfloat16
        assert ((found.double() - wide).abs() <= wide.abs() * 2**-8).all()
        unrounded = resolve_head(model, dtype=torch.float32).weight
        assert unrounded.dtype == torch.float32
        assert torch.allclose(unrounded.double(), wide, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("family", ["tied", "untied"])
    def test_modules_to_save(self, family):
        config = self.config(target_modules=["q_proj"], modules_to_save=["lm_head"])
        model = self.peft.get_peft_model(tiny(family), config).eval()
        wrapper = model.get_output_embeddings()
        with torch.no_grad():
            wrapper.modules_to_save["default"].weight.add_(1)
        assert_own_logits(model)
        assert resolve_head(model).weight is wrapper.modules_to_save["default"].weight
        with model.disable_adapter():
            assert_own_logits(model)
            assert resolve_head(model).weight is wrapper.original_module.weight

    def test_lora_on_tied_embeddings_alone(self):
        """The model's own head does not see it: neither does ours."""
        model = self.lora("tied", target="embed_tokens")
        assert_own_logits(model)

    def test_dropout(self):
        model = self.lora(lora_dropout=0.1)
        assert_own_logits(model)
        model.train()
        with pytest.raises(ValueError, match=r"head has the adapter 'default' with active dropout .*lora_dropout=0"):
            resolve_head(model)

    def test_dora_is_refused(self):
        with pytest.raises(ValueError, match=r"'default' of kind Dora.*merge_and_unload"):
            resolve_head(self.lora(use_dora=True))

    def test_variants_of_lora_are_refused(self):
        if "alora_invocation_tokens" not in inspect.signature(self.peft.LoraConfig).parameters:
            pytest.skip("this PEFT has no activated LoRA")
        with pytest.raises(ValueError, match=r"'default' of kind ALoraLinearVariant.*merge_and_unload"):
            resolve_head(self.lora(alora_invocation_tokens=[1], task_type="CAUSAL_LM"))

    @pytest.mark.parametrize("kind", ["LoHaConfig", "IA3Config", "VeraConfig", "OFTConfig"])
    def test_other_adapters_are_refused(self, kind):
        options = {"target_modules": ["lm_head"]}
        if kind == "IA3Config":
            options["feedforward_modules"] = []
        if kind == "OFTConfig":
            options |= {"oft_block_size": 4}
        model = self.peft.get_peft_model(tiny(), getattr(self.peft, kind)(**options))
        with pytest.raises(ValueError, match=r"head is peft\.tuners.*want a torch.nn.Linear, LoRA on one"):
            resolve_head(model)

    def test_trainable_tokens_of_a_tied_head_are_refused(self):
        config = self.config(target_modules=["q_proj"], trainable_token_indices={"embed_tokens": [1, 2]})
        model = self.peft.get_peft_model(tiny("tied"), config)
        with pytest.raises(ValueError, match="TrainableTokens"):
            resolve_head(model)

    def test_hooks_inside_an_adapter_are_refused(self):
        layer = self.lora().get_output_embeddings()
        layer.lora_B["default"].register_forward_hook(lambda *_: None)
        with pytest.raises(ValueError, match=r"head\.lora_B\.default .*with hooks"):
            resolve_head(layer)


def linear_with(**attributes):
    layer = nn.Linear(H, V, bias=False)
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


class Packed(torch.Tensor):
    """A wrapper around its data, as quantised tensors are."""

    @staticmethod
    def __new__(cls, shape):
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)

    def __tensor_flatten__(self):
        return [], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return args[0] if func is torch.ops.aten.detach.default else NotImplemented


class Linear4bit(nn.Linear):
    def forward(self, hidden):
        return hidden


def partitioned(status="ZeroParamStatus.NOT_AVAILABLE", shape=(0,)):
    """What DeepSpeed ZeRO-3 leaves of a parameter."""
    weight = nn.Parameter(torch.empty(shape))
    weight.ds_id, weight.ds_status = 7, status
    return weight


def freed():
    """What FSDP leaves of the view of a weight whose flat parameter it resharded."""
    weight = torch.randn(V, H)
    weight.untyped_storage().resize_(0)
    return weight


BAD_WEIGHTS = {
    "zero 3": (partitioned, r"\[0\].*ZeRO-3.*GatheredParameters"),
    "zero 3, not empty": (lambda: partitioned(shape=(V, H)), "ZeRO-3"),
    "fsdp, empty": (lambda: nn.Parameter(torch.empty(0)), r"\[0\].*want \[V, H\].*FSDP.*summon_full_params"),
    "fsdp, flat": (lambda: nn.Parameter(torch.empty(V * H)), r"\[184\].*want \[V, H\].*FSDP.*summon_full_params"),
    "fsdp, freed": (freed, r"memory was freed.*summon_full_params"),
    "meta": (lambda: torch.empty(V, H, device="meta"), "meta device"),
    "int8": (lambda: torch.zeros(V, H, dtype=torch.int8), "of int8, want .*keep the head out of quantisation"),
    "float8": (lambda: torch.zeros(V, H).to(torch.float8_e4m3fn), "of float8_e4m3fn, want .*quantisation"),
    "wrapper": (lambda: Packed((V, H)), "Packed .*want a plain tensor"),
}


@pytest.mark.parametrize("weight, message", BAD_WEIGHTS.values(), ids=BAD_WEIGHTS)
def test_weights_that_are_not_whole(weight, message):
    layer = nn.Linear(H, V, bias=False)
    del layer.weight
    layer.weight = weight()
    with pytest.raises(ValueError, match=rf"^head\.weight is .*{message}"):
        resolve_head(layer)
    with pytest.raises(ValueError, match=rf"^head_weight is .*{message}"):
        check(head_weight=weight())


def test_a_gathered_zero_3_weight_is_taken():
    weight = partitioned("ZeroParamStatus.AVAILABLE", (V, H))
    check(head_weight=weight)
    assert resolve_head(linear_with(weight=weight)).weight is weight


@pytest.fixture
def mesh():
    """One process, which may shard over itself."""
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed.init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def test_sharded_by_fsdp2(mesh):
    from torch.distributed.fsdp import fully_shard

    layer = fully_shard(nn.Linear(H, V, bias=False), mesh=mesh)
    with pytest.raises(ValueError, match=r"^head\.weight is DTensor .*full_tensor\(grad_placements=.*process_group"):
        resolve_head(layer)
    with pytest.raises(ValueError, match=r"^hidden is DTensor"):
        check(hidden=torch.distributed.tensor.distribute_tensor(torch.randn(5, H), mesh))
    layer.unshard()
    with pytest.raises(ValueError, match=r"with hooks \(FSDPState"):  # its gradient is reduced in the module's hooks
        resolve_head(layer)


def hooked(kind):
    layer = nn.Linear(H, V)
    getattr(layer, kind)(lambda *_: None)
    return layer


NO_HEADS = {
    "forward hook": (lambda: hooked("register_forward_hook"), "with hooks .*lambda"),
    "forward pre-hook": (lambda: hooked("register_forward_pre_hook"), "with hooks"),
    "backward hook": (lambda: hooked("register_full_backward_hook"), "with hooks"),
    "forward of the instance": (lambda: linear_with(forward=lambda x: x), "forward set on the instance"),
    "forward of a subclass": (lambda: Linear4bit(H, V), "Linear4bit, want a torch.nn.Linear that keeps its forward"),
    "another module": (lambda: nn.Embedding(V, H), "Embedding, want a torch.nn.Linear"),
    "a wrapper": (lambda: nn.Sequential(nn.Linear(H, V)), "Sequential, want a torch.nn.Linear"),
    "a tensor": (lambda: torch.randn(V, H), "Tensor, want a torch.nn.Linear"),
    "nothing": (lambda: None, "NoneType, want a torch.nn.Linear"),
}


@pytest.mark.parametrize("module, message", NO_HEADS.values(), ids=NO_HEADS)
def test_heads_that_a_weight_does_not_express(module, message):
    with pytest.raises(ValueError, match=rf"^head is .*{message}"):
        resolve_head(module())


def test_a_model_without_a_head():
    with pytest.raises(ValueError, match="LlamaModel without output embeddings"):
        resolve_head(tiny().model)


def test_a_scale_that_is_none():
    model = tiny("logit_scale")
    model.config.logit_scale = -1.0
    with pytest.raises(ValueError, match="logit_scale of the model's config is -1.0, want a number > 0"):
        resolve_head(model)


def check(**changed):
    arguments = {
        "hidden": torch.randn(5, H),
        "head_weight": torch.randn(V, H),
        "head_bias": None,
        "targets": torch.zeros(5, dtype=torch.int64),
    }
    check_head_arguments(**(arguments | changed))


BAD_ARGUMENTS = {
    "module": ({"head_weight": nn.Linear(H, V)}, r"head_weight is the module .*Linear.*resolve_head\(module\)\.weight"),
    "list": ({"head_weight": [1.0]}, "head_weight is builtins.list, want a tensor"),
    "transposed": ({"head_weight": torch.randn(H, V)}, r"head_weight is \[8, 23\], want \[V, 8\]"),
    "bias shape": ({"head_bias": torch.randn(V + 1)}, r"head_bias is \[24\], want \[23\]"),
    "bias of ZeRO-3": ({"head_bias": partitioned()}, "head_bias is .*ZeRO-3"),
    "bias dtype": ({"head_bias": torch.zeros(V, dtype=torch.int64)}, "head_bias is .*int64"),
    "hidden dtype": ({"hidden": torch.zeros(5, H, dtype=torch.int64)}, "hidden is .*int64"),
    "hidden rows": ({"hidden": torch.randn(6, H)}, r"hidden is \[6, 8\], want \[5, H\]"),
    "hidden dims": ({"hidden": torch.randn(H)}, r"hidden is \[8\], want \[5, H\]"),
    "hidden without width": ({"hidden": torch.randn(5, 0)}, r"hidden is \[5, 0\], want \[5, H\]"),
    "scalar hidden": ({"hidden": torch.tensor(1.0), "targets": torch.tensor(1)}, r"hidden is \[\], want \[H\]"),
    "targets": ({"targets": [1] * 5}, "targets is builtins.list, want a tensor"),
    "targets elsewhere": ({"targets": torch.zeros(5, device="meta")}, "targets is on meta, want cpu"),
    "prefix": ({"prefix": "teacher_", "head_weight": torch.randn(V, 9)}, r"teacher_head_weight .*for teacher_hidden"),
}


@pytest.mark.parametrize("changed, message", BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS)
def test_bad_arguments(changed, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        check(**changed)


def test_good_arguments():
    check()
    check(head_bias=torch.randn(V), hidden=torch.randn(5, H, dtype=torch.bfloat16))
    check(hidden=torch.randn(2, 3, H), targets=torch.zeros(2, 3, dtype=torch.int64))
    check(hidden=torch.randn(0, H), targets=torch.zeros(0, dtype=torch.int64))


def test_checks_do_not_break_a_graph():
    layer = nn.Linear(H, V)

    @torch.compile(fullgraph=True, dynamic=True, backend="eager")
    def compiled(hidden, targets):
        check_head_arguments(hidden, layer.weight, layer.bias, targets)
        return F.linear(hidden, layer.weight, layer.bias)

    for rows in (3, 5):
        hidden = torch.randn(rows, H)
        assert torch.equal(compiled(hidden, torch.zeros(rows, dtype=torch.int64)), layer(hidden))


def test_options_are_keyword_arguments():
    head = Head(torch.randn(V, H), softcap=30.0)
    assert head.options == {"head_bias": None, "softcap": 30.0, "logit_scale": 1.0, "vocab_size": None}
