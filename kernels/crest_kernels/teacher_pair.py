"""Student and teacher logits of the same tokens, each read once: the student's statistics and the teacher's log-prob.

The gradient by the student's logits is that of `token_stats`.
"""

import torch
import triton
import triton.language as tl

from .arguments import check_rows
from .device import row_logp, row_lse, row_pointer, row_scale, row_sums
from .token_stats import LENGTHS, PER_ROW, row_strides, store_stats, store_unwanted, tile_options


@triton.jit(do_not_specialize=[*LENGTHS, "teacher_rows_per_batch"], do_not_specialize_on_alignment=PER_ROW)
def teacher_pair_kernel(
    logits_ptr, teacher_ptr, target_ptr, temperature_ptr, logp_ptr, entropy_ptr, lse_ptr, normaliser_ptr,
    teacher_logp_ptr, num_rows, rows_per_batch, teacher_rows_per_batch, num_columns, stride_batch, stride_row,
    stride_teacher_batch, stride_teacher_row, stride_temperature, logit_scale, softcap,
    SOFTCAP: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr, TEACHER_VEC: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    y = tl.load(target_ptr + row)
    if y < 0:
        store_unwanted(row, num_rows, logp_ptr, entropy_ptr, normaliser_ptr)
        tl.store(lse_ptr + row, 0.0)
        tl.store(teacher_logp_ptr + row, 0.0)
        return
    _, scale = row_scale(temperature_ptr, row, stride_temperature, logit_scale, SOFTCAP)
    row_ptr = row_pointer(logits_ptr, row, rows_per_batch, stride_batch, stride_row)
    m, s, w, _ = row_sums(row_ptr, num_columns, scale, logit_scale, softcap, SOFTCAP, False, LANES, VEC)
    logp, _ = row_logp(row_ptr, y, num_columns, m, tl.log2(s), scale, logit_scale, softcap, SOFTCAP)
    store_stats(row, num_rows, num_columns, m, s, w, logp, logp_ptr, entropy_ptr, normaliser_ptr)
    tl.store(lse_ptr + row, row_lse(m, s))
    row_ptr = row_pointer(teacher_ptr, row, teacher_rows_per_batch, stride_teacher_batch, stride_teacher_row)
    m, s, _, _ = row_sums(row_ptr, num_columns, scale, logit_scale, softcap, SOFTCAP, False, LANES, TEACHER_VEC)
    logp, _ = row_logp(row_ptr, y, num_columns, m, tl.log2(s), scale, logit_scale, softcap, SOFTCAP)
    tl.store(teacher_logp_ptr + row, logp)


def teacher_pair(logits, teacher_logits, targets, temperature, num_columns, logit_scale=1.0, softcap=0.0):
    """`token_stats` of the student's logits and the teacher's log-prob of the target, in one read of both.

    logits, targets, temperature, num_columns, logit_scale, softcap, logp, entropy, lse as in `token_stats`;
    teacher_logits [B', T', V'] of as many rows, V' >= num_columns; teacher_logp = y_target - log sum_v exp y_v, y the
    teacher's z. The gradient is `token_stats_grad`. Returns (logp, entropy, lse, normaliser [2, N], teacher_logp),
    float32. Raises ValueError: tensors that the kernel would misread.
    """
    check_rows(targets, temperature, num_columns, logits=logits, teacher_logits=teacher_logits)
    num_rows = targets.numel()
    logp, entropy, lse, teacher_logp = (
        torch.empty(num_rows, dtype=torch.float32, device=logits.device) for _ in range(4)
    )
    normaliser = torch.empty(2, num_rows, dtype=torch.float32, device=logits.device)
    if not num_rows:
        return logp, entropy, lse, normaliser, teacher_logp
    lanes, vector, num_warps = tile_options(num_columns, logits.element_size())
    rows_per_batch, stride_batch, stride_row = row_strides(logits)
    teacher_rows_per_batch, stride_teacher_batch, stride_teacher_row = row_strides(teacher_logits)
    with torch.cuda.device_of(logits):
        teacher_pair_kernel[(num_rows,)](
            logits, teacher_logits, targets, temperature, logp, entropy, lse, normaliser, teacher_logp,
            num_rows, rows_per_batch, teacher_rows_per_batch, num_columns, stride_batch, stride_row,
            stride_teacher_batch, stride_teacher_row, int(temperature.numel() > 1), logit_scale, softcap,
            SOFTCAP=softcap > 0, LANES=lanes, VEC=vector, TEACHER_VEC=16 // teacher_logits.element_size(),
            num_warps=num_warps, enable_fp_fusion=True,
        )  # fmt: skip
    return logp, entropy, lse, normaliser, teacher_logp
