"""The peers' kernels over bf16 logits, as their own launchers start them; only what is installed."""

import warnings
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from crest_bench.codegen import VOCABULARY, Kernel

_TRL_BLOCK = 1024
_TRL_WARPS = 4  # Triton's default


def installed() -> list[Kernel]:
    """Entries of the peers that are installed; one whose kernels have moved is left out with a warning."""
    kernels: list[Kernel] = []
    for distribution, entries in (("trl", _trl), ("liger-kernel", _liger)):
        try:
            package = f"{distribution} {version(distribution)}"
            kernels += entries(package)
        except PackageNotFoundError:
            continue
        except (ImportError, AttributeError, KeyError) as error:
            warnings.warn(f"{package}: kernels left out ({error})", stacklevel=2)
    return kernels


def _typed(triton_type: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), triton_type)


def _trl(package: str) -> Iterator[Kernel]:
    chunked = import_module("trl.kernels.chunked_logprob")
    full = import_module("trl.kernels.logprob_entropy")
    types = {
        **_typed("*bf16", "mm_ptr logits_ptr grad_logits_ptr"),
        **_typed("*i64", "targets_ptr index_ptr row_mask_ptr"),
        **_typed("*fp32", "max_ptr sum_exp_ptr x_sum_exp_ptr sq_sum_exp_ptr z_sum_ptr max_before_target_ptr"),
        **_typed("*fp32", "target_logit_ptr log_z_ptr entropy_ptr logprobs_ptr expected_logit_ptr"),
        **_typed("*fp32", "grad_logprobs_ptr grad_entropy_ptr"),
        **_typed("i32", "mm_stride vocab_start n_cols rows_per_batch logits_batch_stride logits_row_stride"),
        **_typed("i32", "index_batch_stride index_row_stride mask_batch_stride mask_row_stride"),
        **_typed("i32", "grad_logits_batch_stride grad_logits_row_stride"),
        **_typed("fp32", "logit_scale softcap inv_t"),
    }
    aligned = (
        *("mm_ptr", "mm_stride", "n_cols", "logits_ptr", "logits_batch_stride", "logits_row_stride"),
        *("grad_logits_ptr", "grad_logits_batch_stride", "grad_logits_row_stride"),
    )
    outputs = {"HAS_ENTROPY": True, "HAS_LOG_SUM_SQ_PROBS": False, "HAS_MEAN_LOGITS": False, "HAS_IS_TOP1": False}
    gradients = {"HAS_LOGPROB_GRAD": True, "HAS_ENTROPY_GRAD": True}
    row = {"n_cols": VOCABULARY, "TEMPERATURE": 1.0, "HAS_MASK": False}
    for name, role, fn, constexprs in (
        ("chunked forward", "stats", chunked._forward_kernel, {"HAS_SOFTCAP": False} | outputs),
        ("chunked backward", "grad_entropy", chunked._backward_kernel, {"HAS_SOFTCAP": False} | gradients),
        ("logprob+entropy forward", "stats", full._forward_kernel, row),
        ("logprob+entropy backward", "grad_entropy", full._backward_kernel, row | gradients),
    ):
        yield Kernel(
            name, role, fn, types, constexprs | {"BLOCK_SIZE": _TRL_BLOCK}, aligned, {"num_warps": _TRL_WARPS},
            logits_per_thread=_TRL_BLOCK // (_TRL_WARPS * 32), package=package,
        )  # fmt: skip


def _liger(package: str) -> Iterator[Kernel]:
    module = import_module("liger_kernel.ops.grpo_loss")
    types = {
        **_typed("*bf16", "LOGITS DLOGITS"),
        **_typed("*i64", "INPUT_IDS COMPLETION_MASK"),
        **_typed("*fp32", "OLD_LOGP ADVANTAGES LOSS LSE IS_CLIPPED DLOSS"),
        **_typed("i32", "VLLM_IS_RATIO_STRIDE loss_stride0 loss_stride1"),
    }
    loss = {"TEMPERATURE": 1.0, "BETA": 0.0, "EPS_LOW": 0.2, "EPS_HIGH": 0.28, "LOSS_TYPE": 0, "DELTA": 0.0}
    loss |= {"SAPO_TEMP_POS": 1.0, "SAPO_TEMP_NEG": 1.05, "USE_BIAS_CORRECTION_KL": False}
    loss |= {"REF_LOGP": None, "VLLM_IS_RATIO": None, "PHI_SEQ": None, "L": 1024, "N": VOCABULARY}
    for name, role, fn, constexprs, block, options in (
        ("GRPO forward", "stats", module._grpo_loss_fwd_kernel, {"KL": None}, 2048, {"num_stages": 2, "num_warps": 1}),
        ("GRPO backward", "grad", module._grpo_loss_bwd_kernel, {}, 4096, {"num_stages": 1, "num_warps": 16}),
    ):
        yield Kernel(
            name, role, fn, types, loss | constexprs | {"BLOCK_N": block}, ("LOGITS", "DLOGITS"), options,
            logits_per_thread=block // (options["num_warps"] * 32), package=package,
        )  # fmt: skip
