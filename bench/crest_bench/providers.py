"""Who computes a PPO-clip policy loss from hidden states: ours, plain torch, the peers; and the floor of products.

Peers get the policy rows gathered. They are imported only when they are measured.

Shape letters: N packed tokens, V vocabulary, H hidden size, R policy tokens, C rows of a chunk.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from crest_bench.cases import Inputs
from crest_bench.contract import (
    CLIP_HIGH,
    CLIP_LOW,
    CROSS_ENTROPY,
    PRODUCTS,
    Output,
    Provider,
    logp_and_entropy,
    loss_of_rows,
    ppo_loss,
)


def _crest() -> Callable[[Inputs], Output]:
    from crest_ops import PPOClip, linear_policy_loss

    surrogate = PPOClip(CLIP_LOW, CLIP_HIGH)

    def run(inputs: Inputs) -> Output:
        found = linear_policy_loss(
            inputs.hidden, inputs.head_weight, inputs.targets, inputs.credit, token_weight=inputs.token_weight,
            old_logp=inputs.old_logp, mask=inputs.mask, surrogate=surrogate,
        )  # fmt: skip
        return Output(found.loss, found.logp, found.entropy)

    return run


def _crest_composable() -> Callable[[Inputs], Output]:
    from crest_ops import linear_token_stats

    def run(inputs: Inputs) -> Output:
        stats = linear_token_stats(inputs.hidden, inputs.head_weight, inputs.targets, mask=inputs.mask)
        return Output(loss_of_rows(stats.logp[inputs.mask], inputs), stats.logp, stats.entropy)

    return run


def _plain(hidden: Tensor, head_weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """(logp, entropy without gradient) from the float32 log-softmax of all the logits."""
    return logp_and_entropy((hidden @ head_weight.t()).float().log_softmax(-1), targets, entropy_gradient=False)


def _eager() -> Callable[[Inputs], Output]:
    def run(inputs: Inputs) -> Output:
        at = inputs.mask
        logp_R, entropy_R = _plain(inputs.hidden[at], inputs.head_weight, inputs.targets[at])
        return Output(loss_of_rows(logp_R, inputs), logp_R, entropy_R)

    return run


def _eager_all_rows() -> Callable[[Inputs], Output]:
    def run(inputs: Inputs) -> Output:
        logp_N, entropy_N = _plain(inputs.hidden, inputs.head_weight, inputs.targets)
        return Output(ppo_loss(logp_N, inputs.credit, inputs.old_logp, inputs.token_weight), logp_N, entropy_N)

    return run


class _Products(torch.autograd.Function):
    """Logits, dH and dW of the policy rows in the operands' dtype, chunk by chunk, with nothing in between."""

    @staticmethod
    def forward(ctx, hidden_RH, head_weight_VH, chunk):
        dW_VH = torch.empty_like(head_weight_VH)
        dH_RH = torch.empty_like(hidden_RH)
        rows = min(chunk, hidden_RH.shape[0])
        logits_CV = hidden_RH.new_empty(rows, head_weight_VH.shape[0])
        for start in range(0, hidden_RH.shape[0], rows):
            hidden_CH = hidden_RH[start : start + rows]
            logits = torch.mm(hidden_CH, head_weight_VH.t(), out=logits_CV[: hidden_CH.shape[0]])
            torch.mm(logits, head_weight_VH, out=dH_RH[start : start + rows])
            torch.addmm(dW_VH, logits.t(), hidden_CH, beta=1 if start else 0, out=dW_VH)
        ctx.save_for_backward(dH_RH, dW_VH)
        return hidden_RH.new_zeros(())

    @staticmethod
    def backward(ctx, grad):
        return *ctx.saved_tensors, None


def _products(chunk: int) -> Callable[[], Callable[[Inputs], Output]]:
    def run(inputs: Inputs) -> Output:
        return Output(_Products.apply(inputs.hidden[inputs.mask], inputs.head_weight, chunk))

    return lambda: run


def _trl() -> Callable[[Inputs], Output]:
    """As trl.trainer.utils calls it, for the rows that its callers keep."""
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as columns

    def run(inputs: Inputs) -> Output:
        at = inputs.mask
        logp_R, entropy_R, *_ = ChunkedLogProbFunction.apply(
            inputs.hidden[at], inputs.head_weight, None, inputs.targets[at], 1.0, columns, None, 1.0,
            ("log_probs", "entropy"),
        )  # fmt: skip
        return Output(loss_of_rows(logp_R, inputs), logp_R, entropy_R)

    return run


def _liger(chunk: int) -> Callable[[], Callable[[Inputs], Output]]:
    """Every policy row as a sequence of its own: advantages and chunks, of `chunk` sequences, are by sequence."""

    def load() -> Callable[[Inputs], Output]:
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

        loss = LigerFusedLinearGRPOLoss(
            beta=0.0, use_ref_model=False, epsilon_low=CLIP_LOW, epsilon_high=CLIP_HIGH, chunk_size=chunk
        )

        def run(inputs: Inputs) -> Output:
            at = inputs.mask
            value, _ = loss(
                inputs.hidden[at][:, None], inputs.head_weight, inputs.targets[at][:, None], inputs.mask[at][:, None],
                inputs.credit[at], old_per_token_logps=inputs.old_logp[at][:, None],
            )  # fmt: skip
            return Output(value)

        return run

    return load


def _lce_options():
    """Chunks of 512 rows. Its own choice is 1 to 16 rows for these heads, about ten times slower on a CPU."""
    return torch.nn.LinearCrossEntropyOptions(chunking_method=None, batch_chunk_size=512)


def _torch_lce() -> Callable[[Inputs], Output]:
    """Negative log-probs without reduction; its backward computes the logits again."""
    cross_entropy, options = functional.linear_cross_entropy, _lce_options()

    def run(inputs: Inputs) -> Output:
        at = inputs.mask
        logp_R = -cross_entropy(
            inputs.hidden[at], inputs.head_weight, inputs.targets[at], reduction="none", options=options
        )
        return Output(loss_of_rows(logp_R, inputs), logp_R)

    return run


def _torch_lce_mean() -> Callable[[Inputs], Output]:
    """The mean, whose gradient is made in forward: no ratio, no credit, no log-probs."""
    cross_entropy, options = functional.linear_cross_entropy, _lce_options()

    def run(inputs: Inputs) -> Output:
        at = inputs.mask
        return Output(cross_entropy(inputs.hidden[at], inputs.head_weight, inputs.targets[at], options=options))

    return run


def _cce(implementation: str) -> Callable[[], Callable[[Inputs], Output]]:
    def load() -> Callable[[Inputs], Output]:
        from cut_cross_entropy import linear_cross_entropy

        def run(inputs: Inputs) -> Output:
            at = inputs.mask
            logp_R = -linear_cross_entropy(
                inputs.hidden[at], inputs.head_weight, inputs.targets[at], reduction="none", impl=implementation
            )
            return Output(loss_of_rows(logp_R, inputs), logp_R)

        return run

    return load


FLOOR_CHUNKS = (256, 512)  # rows; the floor is the faster one
LIGER_ONE_CHUNK = 1 << 30  # its fastest; it still works on tiles of 2048 rows by 4096 columns
PROVIDERS = {
    provider.name: provider
    for provider in (
        Provider("crest", _crest, "crest-ops", entropy=True, entropy_gradient=True),
        Provider("crest-composable", _crest_composable, "crest-ops", entropy=True, entropy_gradient=True),
        Provider("eager", _eager, "torch", entropy=True, full_logits=True),
        Provider("eager-all-rows", _eager_all_rows, "torch", entropy=True, full_logits=True),
        Provider("trl", _trl, "trl", entropy=True, entropy_gradient=True),
        Provider("liger", _liger(LIGER_ONE_CHUNK), "liger-kernel"),
        Provider("liger-64", _liger(64), "liger-kernel"),
        Provider("torch-lce", _torch_lce, "torch"),
        Provider("torch-lce-mean", _torch_lce_mean, "torch", CROSS_ENTROPY),
        Provider("cce-compile", _cce("torch_compile"), "cut-cross-entropy", full_logits=True),
        Provider("cce", _cce("cce"), "cut-cross-entropy", cuda_only=True),
        *(Provider(f"floor-{chunk}", _products(chunk), "torch", PRODUCTS) for chunk in FLOOR_CHUNKS),
    )
}
FLOORS = tuple(name for name, provider in PROVIDERS.items() if provider.objective == PRODUCTS)
