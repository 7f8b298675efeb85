"""Head and hidden states of tiny random models of transformers' families give the log-probs and gradients of their own
logits."""

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from crest_ops import check_head, hidden_states, linear_token_stats, resolve_head

V, H = 37, 16
TINY = {
    "vocab_size": V,
    "hidden_size": H,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MLA = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 8}
FAMILIES = {
    "llama": {},
    "llama, tied": {"tie_word_embeddings": True},
    "qwen2, tied": {"tie_word_embeddings": True},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    "gemma": {},
    "gemma2": {"final_logit_softcapping": 1.5},
    "gemma3_text": {"final_logit_softcapping": 1.5},
    "mistral": {},
    "phi": {},  # a head with bias
    "phi3": {},
    "gpt2": {"n_embd": H, "n_layer": 2, "n_head": 2},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 4.0},
    "minicpm3": {"dim_model_base": 4, "num_key_value_heads": 2, **MLA},  # divides the states before its head
    "olmo": {},
    "olmo2": {},
    "opt": {"ffn_dim": 24, "word_embed_proj_dim": 8},  # a head narrower than the model
    "gpt_neox": {},
    "mamba": {"state_size": 4},
}
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8, 9, 7]])
BATCH = {"input_ids": IDS, "attention_mask": (torch.arange(7) < torch.tensor([[7], [5]])).long()}
TARGETS = IDS.roll(-1, 1)


def tiny(family):
    """A random model without dropout whose logits are of order 1 and beyond."""
    kind = family.split(",")[0]
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"transformers has no {kind}")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**(TINY | FAMILIES[family]))).float().eval()
    with torch.no_grad():
        head = model.get_output_embeddings()
        head.weight.normal_()
        if head.bias is not None:
            head.bias.normal_()
    return model


def assert_own_logits(model, batch=BATCH, targets=TARGETS):
    """Of `linear_token_stats` on the model's states and head: the values, and the gradients of all its parameters."""
    own = model(**batch).logits.double()
    stats = linear_token_stats(
        hidden_states(model, batch), (head := resolve_head(model)).weight, targets, **head.options
    )
    own = own[..., : head.vocab_size].log_softmax(-1)
    own_logp = own.gather(-1, targets[..., None])[..., 0]
    own_entropy = -(own.exp() * own).sum(-1)
    torch.testing.assert_close(stats.logp.double(), own_logp, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(stats.entropy.double(), own_entropy, atol=2e-5, rtol=2e-5)
    upstream = torch.linspace(-1, 1, targets.numel(), dtype=torch.float64).view(targets.shape)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = [
        torch.autograd.grad(((logp + entropy) * upstream).sum(), [*parameters.values()], allow_unused=True)
        for logp, entropy in ((stats.logp, stats.entropy), (own_logp, own_entropy))
    ]
    for name, ours, theirs in zip(parameters, *gradients, strict=True):
        if theirs is None:
            assert ours is None or not ours.any(), name
            continue
        torch.testing.assert_close(ours, theirs, atol=1e-5 * max(1.0, float(theirs.abs().max())), rtol=1e-4, msg=name)
    return dict(zip(parameters, gradients[0], strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_own_logits(family):
    model = tiny(family)
    assert_own_logits(model)
    check_head(model, IDS)


def test_the_families_are_what_they_stand_for():
    heads = {name: resolve_head(tiny(name)) for name in ("phi", "gemma2", "cohere", "granite", "minicpm3", "opt")}
    assert heads["phi"].bias.abs().max() > 0.1
    assert heads["gemma2"].softcap == 1.5
    assert [heads[name].logit_scale for name in ("cohere", "granite", "minicpm3")] == [0.25, 0.25, 0.25]
    assert heads["opt"].weight.shape == (V, 8)


def test_last_hidden_state_goes_with_the_head():
    """Also where the model divides the states before its head."""
    for family in ("llama", "gemma2", "minicpm3"):
        model = tiny(family)
        wanted = model.base_model(**BATCH).last_hidden_state
        torch.testing.assert_close(hidden_states(model, BATCH), wanted, atol=1e-6, rtol=1e-6)


def test_padded_vocabulary():
    """The rows past the config's vocab_size have no part in the log-probs, and no gradient."""
    model = tiny("llama")
    model.config.vocab_size = 30
    assert resolve_head(model).vocab_size == resolve_head(model).options["vocab_size"] == 30
    gradient = assert_own_logits(model)["lm_head.weight"]
    assert gradient[:30].any() and not gradient[30:].any()
    check_head(model, IDS)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
class TestPEFT:
    @pytest.fixture(autouse=True)
    def peft(self):
        self.peft = pytest.importorskip("peft")

    def adapted(self, family="llama", **options):
        torch.manual_seed(1)
        config = self.peft.LoraConfig(r=2, lora_alpha=6, init_lora_weights=False, **options)
        return self.peft.get_peft_model(tiny(family), config).eval()

    @pytest.mark.parametrize("family", ["llama", "llama, tied", "gemma2", "cohere"])
    def test_lora_on_the_body(self, family):
        gradients = assert_own_logits(self.adapted(family, target_modules=["q_proj", "down_proj"]))
        assert len(gradients) == 8 and not any("lm_head" in name for name in gradients)

    @pytest.mark.parametrize("family", ["llama", "llama, tied", "gemma2", "granite"])
    def test_lora_on_body_and_head(self, family):
        gradients = assert_own_logits(self.adapted(family, target_modules=["q_proj", "lm_head"]))
        assert sum("lm_head" in name and gradient.any() for name, gradient in gradients.items()) == 2

    @pytest.mark.parametrize("family", ["llama", "cohere"])
    def test_modules_to_save(self, family):
        model = self.adapted(family, target_modules=["q_proj"], modules_to_save=["lm_head"])
        with torch.no_grad():
            model.get_output_embeddings().modules_to_save["default"].weight.add_(torch.randn(V, H))
        gradients = assert_own_logits(model)
        assert [name for name in gradients if "lm_head" in name and gradients[name].any()]

    def test_prompt_tuning(self):
        """The states of the virtual tokens come first, as in the model's own logits."""
        config = self.peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        model = self.peft.get_peft_model(tiny("llama"), config).eval()
        targets = torch.cat([torch.zeros(2, 3, dtype=torch.int64), TARGETS], 1)
        gradients = assert_own_logits(model, targets=targets)
        assert all(gradient.any() for gradient in gradients.values())

    def test_dora_on_the_head_is_refused_and_on_the_body_taken(self):
        assert_own_logits(self.adapted(target_modules=["q_proj"], use_dora=True))
        with pytest.raises(ValueError, match="of kind Dora.*leave the head out of target_modules"):
            resolve_head(self.adapted(target_modules=["lm_head"], use_dora=True))


class Linear8bit(torch.nn.Linear):
    """As quantised layers are: a Linear by class, with a forward and a weight of its own."""

    def forward(self, hidden):
        return hidden @ (self.weight.float() * 0.01).T


def test_a_quantised_head_is_refused():
    model = tiny("llama")
    model.lm_head = Linear8bit(H, V, bias=False)
    assert hidden_states(model, BATCH).shape == (2, 7, H)
    with pytest.raises(ValueError, match="Linear8bit.*keep the head out of quantisation"):
        resolve_head(model)
    model.lm_head.weight = torch.nn.Parameter(torch.ones(V, H, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match="of int8, want .*keep the head out of quantisation"):
        resolve_head(model)


def test_a_partitioned_head_is_refused():
    """As DeepSpeed ZeRO-3 leaves a parameter between uses."""
    model = tiny("llama")
    weight = torch.nn.Parameter(torch.empty(0))
    weight.ds_id, weight.ds_status = 7, "ZeroParamStatus.NOT_AVAILABLE"
    model.lm_head.weight = weight
    with pytest.raises(ValueError, match="ZeRO-3.*GatheredParameters"):
        resolve_head(model)
