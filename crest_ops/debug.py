"""CREST_DEBUG=1: a few rows of what an op over a head has found, beside the plain definition in float64.

Shape letters: N tokens, V vocabulary, H hidden size, R rows that are compared.
"""

import torch
from torch import Tensor

from .chunks import VOCABULARY_TILE
from .rows import LOWEST, UNWANTED

NUM_ROWS = 4


@torch.no_grad()
def compare_rows(call, head_weight: Tensor, head_bias: Tensor | None, logp_N: Tensor, entropy_N: Tensor | None) -> None:
    """Raise RuntimeError naming the row and the values where log-prob or entropy differ by more than rounding."""
    rows = (call.target_N != UNWANTED).nonzero()[:, 0]
    generator = torch.Generator()  # of its own: the run's random numbers stay what they are
    generator.seed()
    rows = rows[torch.randperm(len(rows), generator=generator)[:NUM_ROWS].to(rows.device)]
    if not len(rows):
        return
    hidden_RH = call.hidden_NH[rows].to(call.compute_dtype).double()
    tiles = head_weight[: call.num_columns].split(VOCABULARY_TILE)
    x_RV = torch.cat([hidden_RH @ tile.to(call.compute_dtype).double().t() for tile in tiles], 1)
    if head_bias is not None:
        x_RV += head_bias[: call.num_columns].double()
    z_RV = x_RV * call.logit_scale
    if call.softcap:
        z_RV = call.softcap * torch.tanh(z_RV / call.softcap)
    z_RV = z_RV.masked_fill(x_RV <= LOWEST, -torch.inf)
    z_RV = z_RV / (call.temperature[rows, None] if len(call.temperature) > 1 else call.temperature)
    plain = torch.distributions.Categorical(logits=z_RV, validate_args=False)
    wanted = {"logp": (logp_N, plain.log_prob(call.target_N[rows]))}
    if entropy_N is not None:
        wanted["entropy"] = (entropy_N, plain.entropy())
    # The rounding of a logit of either dtype, and of the products that make it, at this size of logits.
    size_R = torch.where(z_RV > -torch.inf, z_RV, 0).abs().amax(1).clamp(min=1)
    eps = torch.finfo(call.logits_dtype).eps
    if call.compute_dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        eps = 2**-10  # of TF32
    allowed_R = 8 * eps * size_R + 1e-4
    for name, (found_N, plain_R) in wanted.items():
        for row, plain_value, allowed in zip(rows.tolist(), plain_R.tolist(), allowed_R.tolist(), strict=True):
            found = float(found_N[row])
            if not (abs(found - plain_value) <= allowed or found == plain_value or plain_value != plain_value):
                raise RuntimeError(
                    f"CREST_DEBUG: {name} of row {row} is {found}, by the plain definition {plain_value} (off by "
                    f"{abs(found - plain_value):.3g}, rounding explains {allowed:.3g})"
                )
