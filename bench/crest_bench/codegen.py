"""What the vocabulary kernels issue per logit, counted in their machine code. No GPU is needed.

Triton compiles for any target without a driver, and its wheel ships NVIDIA's disassembler. Every entry of KERNELS is
compiled as its launcher would for aligned bf16 logits, and the loops that read the vocabulary are counted.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import triton
from crest_kernels.device import GRAD_TILES, STATS_TILES
from crest_kernels.divergence import PAIR_TILES, jsd_kernel, kl_kernel
from crest_kernels.divergence_grad import TILES as PAIR_GRAD_TILES
from crest_kernels.divergence_grad import divergence_grad_kernel
from crest_kernels.policy_loss import ROW_LANES, policy_loss_kernel
from crest_kernels.teacher_pair import teacher_pair_kernel
from crest_kernels.token_stats import tile_options, token_stats_grad_kernel, token_stats_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from crest_bench.machine_code import GCN, SASS, Body, bodies
from crest_bench.rows_file import read_rows, write_rows

TARGETS = MappingProxyType(
    {f"sm_{capability}": GPUTarget("cuda", capability, 32) for capability in (80, 90, 100)}
    | {"gfx942": GPUTarget("hip", "gfx942", 64)}
)
OURS = "crest-ops"
LOGIT_BITS = 16
VOCABULARY = 151936  # of Qwen2.5 and Qwen3: the launchers choose their tiles for it


@dataclass(frozen=True)
class Kernel:
    """One Triton kernel as it is launched.

    types: argument -> Triton type; constexprs: argument -> value; aligned: arguments divisible by 16; options:
    num_warps and the like; logits_per_thread: logits that one thread handles in one iteration of its hot loop, the
    smallest number where there are several such loops.
    """

    name: str
    role: str
    fn: triton.JITFunction
    types: dict[str, str]
    constexprs: dict[str, Any]
    aligned: tuple[str, ...]
    options: dict[str, Any]
    logits_per_thread: int
    package: str = OURS


@dataclass(frozen=True)
class Count:
    """One loop of one kernel for one target.

    loop: "hot"; "tail" for one that handles fewer logits at a time; "kernel" where there is no loop and all is counted.
    logits: that one thread handles in one iteration. Instructions and exponentials are per logit; barriers, shuffles
    and local (spill) accesses per iteration. load_bits, store_bits: the widths of global accesses that occur.
    local_bytes: stack and spills per thread.
    """

    package: str
    kernel: str
    role: str
    target: str
    triton: str
    loop: str
    logits: int
    instructions: float
    exponentials: float
    load_bits: str
    store_bits: str
    barriers: int
    shuffles: int
    local_accesses: int
    local_bytes: int
    registers: int


def launched_on(kernel: Kernel, target: GPUTarget) -> Kernel:
    """The entry as launched where a warp holds 64 threads: ours in as many threads, the peers' in as many warps."""
    wider = target.warp_size // 32
    if kernel.package == OURS:
        return replace(kernel, options=kernel.options | {"num_warps": kernel.options["num_warps"] // wider})
    return replace(kernel, logits_per_thread=kernel.logits_per_thread // wider)


def compile_kernel(kernel: Kernel, target: GPUTarget) -> CompiledKernel:
    """Compile one entry for a target, without a driver. Raises ValueError under TRITON_INTERPRET=1."""
    if not isinstance(kernel.fn, triton.JITFunction):
        raise ValueError(f"{kernel.name}: Triton is interpreting; TRITON_INTERPRET must be unset before it is imported")
    names = kernel.fn.arg_names
    source = ASTSource(
        fn=kernel.fn,
        signature={name: "constexpr" if name in kernel.constexprs else kernel.types[name] for name in names},
        constexprs=kernel.constexprs,
        attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in kernel.aligned},
    )
    return triton.compile(source, target=target, options=kernel.options)


def count(kernel: Kernel, target_name: str) -> list[Count]:
    """Compile an entry for one of TARGETS and count its loops over the vocabulary."""
    target = TARGETS[target_name]
    kernel = launched_on(kernel, target)
    compiled = compile_kernel(kernel, target)
    if target.backend == "cuda":
        found, registers, local_bytes = _read_cubin(compiled.asm["cubin"])
    else:
        found, registers, local_bytes = _read_gcn(compiled.asm["amdgcn"])
    return [_row(kernel, target_name, body, registers, local_bytes) for body in found]


def _row(kernel: Kernel, target_name: str, body: Body, registers: int, local_bytes: int) -> Count:
    logits, loop = kernel.logits_per_thread, "kernel"
    if body.is_loop:
        logits = sum(body.loads) // LOGIT_BITS
        loop = "hot" if logits >= kernel.logits_per_thread else "tail"
    return Count(
        package=kernel.package,
        kernel=kernel.name,
        role=kernel.role,
        target=target_name,
        triton=triton.__version__,
        loop=loop,
        logits=logits,
        instructions=round(body.instructions / logits, 3),
        exponentials=round(body.exponentials / logits, 3),
        load_bits="+".join(map(str, sorted(set(body.loads)))),
        store_bits="+".join(map(str, sorted(set(body.stores)))),
        barriers=body.barriers,
        shuffles=body.shuffles,
        local_accesses=body.local_accesses,
        local_bytes=local_bytes,
        registers=registers,
    )


def _read_cubin(cubin: bytes) -> tuple[list[Body], int, int]:
    """(bodies, registers, local bytes) of a cubin, by the disassembler of Triton's wheel."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage, listing = (
            subprocess.run([tools / tool, option, path], capture_output=True, text=True, check=True).stdout
            for tool, option in (("cuobjdump", "--dump-resource-usage"), ("nvdisasm", "--print-code"))
        )
    registers, stack, local = (int(re.search(rf"\b{key}:(\d+)", usage)[1]) for key in ("REG", "STACK", "LOCAL"))
    return bodies(listing, SASS), registers, stack + local


def _read_gcn(listing: str) -> tuple[list[Body], int, int]:
    """(bodies, vector registers, scratch bytes) of an AMD assembly listing."""
    registers, scratch = (
        int(re.search(rf"\.amdhsa_{key} (\d+)", listing)[1]) for key in ("next_free_vgpr", "private_segment_fixed_size")
    )
    return bodies(listing, GCN), registers, scratch


def write_csv(rows: Iterable[Count], path: Path) -> None:
    """Write rows, whole or not at all. Rows already there stay unless package, target and Triton are the same.

    Raises ValueError with file and line where the file is damaged or of other columns.
    """
    new = [asdict(row) for row in rows]
    key = ("package", "target", "triton")
    replaced = {tuple(row[name] for name in key) for row in new}
    before = read_rows(path, Count) if path.exists() else []
    kept = [row for row in before if tuple(row[name] for name in key) not in replaced]
    found = sorted(kept + new, key=lambda row: (row["package"] != OURS, row["package"], row["target"]))
    write_rows([Count(**row) for row in found], path)


_TYPES = {
    "logits_ptr": "*bf16",
    "teacher_ptr": "*bf16",
    "grad_ptr": "*bf16",
    "target_ptr": "*i64",
    "temperature_ptr": "*fp32",
    "logp_ptr": "*fp32",
    "entropy_ptr": "*fp32",
    "lse_ptr": "*fp32",
    "teacher_logp_ptr": "*fp32",
    "student_kl_ptr": "*fp32",
    "divergence_ptr": "*fp32",
    "grad_student_kl_ptr": "*fp32",
    "grad_divergence_ptr": "*fp32",
    "sum_sq_ptr": "*fp32",
    "normaliser_ptr": "*fp32",
    "grad_logp_ptr": "*fp32",
    "grad_entropy_ptr": "*fp32",
    "credit_ptr": "*fp32",
    "weight_ptr": "*fp32",
    "old_logp_ptr": "*fp32",
    "ref_logp_ptr": "*fp32",
    "importance_ptr": "*fp32",
    "active_ptr": "*u8",
    "num_rows": "i32",
    "rows_per_batch": "i32",
    "teacher_rows_per_batch": "i32",
    "num_columns": "i32",
    "width": "i32",
    "stride_batch": "i64",
    "stride_row": "i64",
    "stride_teacher_batch": "i64",
    "stride_teacher_row": "i64",
    "stride_temperature": "i32",
    "stride_grad_batch": "i64",
    "stride_grad_row": "i64",
    "stride_old": "i32",
    "stride_ref": "i32",
    "stride_importance": "i32",
    "on_policy": "i32",
    "kind": "i32",
    "logit_scale": "fp32",
    "softcap": "fp32",
    "kl_coef": "fp32",
    "entropy_coef": "fp32",
    "a": "fp32",
    "b": "fp32",
    "c": "fp32",
    "jsd_weight": "fp32",
    "bound": "fp32",
}
_ALIGNED = (
    "logits_ptr", "teacher_ptr", "grad_ptr", "num_columns", "width", "stride_batch", "stride_row",
    "stride_teacher_batch", "stride_teacher_row", "stride_grad_batch", "stride_grad_row",
)  # fmt: skip
_LANES, _VECTOR, _WARPS = tile_options(VOCABULARY, LOGIT_BITS // 8)


def _ours(name: str, role: str, fn: triton.JITFunction, logits_per_thread: int, **constexprs) -> Kernel:
    lanes = constexprs.get("LANES", _LANES)
    options = {"num_warps": _WARPS * lanes // _LANES, "enable_fp_fusion": True}
    return Kernel(name, role, fn, _TYPES, constexprs, _ALIGNED, options, logits_per_thread)


KERNELS = [
    _ours(
        "token_stats", "stats", token_stats_kernel, STATS_TILES.value * _VECTOR,
        SOFTCAP=False, SUM_SQ=False, LANES=_LANES, VEC=_VECTOR,
    ),
    *(
        _ours(
            f"token_stats_{role}", role, token_stats_grad_kernel, GRAD_TILES.value * _VECTOR,
            ENTROPY=role == "grad_entropy", SOFTCAP=False, BLOCK=_LANES * _VECTOR,
        )
        for role in ("grad", "grad_entropy")
    ),
    _ours(
        "teacher_pair", "pair", teacher_pair_kernel, STATS_TILES.value * _VECTOR,
        SOFTCAP=False, LANES=_LANES, VEC=_VECTOR, TEACHER_VEC=_VECTOR,
    ),
    *(
        _ours(
            f"policy_loss{suffix}", f"fused{suffix}", policy_loss_kernel, STATS_TILES.value * _VECTOR,
            ENTROPY=bool(suffix), SOFTCAP=False, LANES=ROW_LANES, VEC=_VECTOR,
        )
        for suffix in ("", "_entropy")
    ),
    _ours(
        "divergence_kl", "pair", kl_kernel, 2 * PAIR_TILES.value * _VECTOR,
        SOFTCAP=False, LANES=_LANES, VEC=_VECTOR,
    ),
    _ours(
        "divergence_jsd", "pair", jsd_kernel, STATS_TILES.value * _VECTOR,
        SOFTCAP=False, LANES=_LANES, VEC=_VECTOR,
    ),
    *(
        _ours(
            f"divergence_{kind}_grad", "grad_pair", divergence_grad_kernel,
            2 * PAIR_GRAD_TILES.value * _VECTOR, JSD=kind == "jsd", SOFTCAP=False, BLOCK=_LANES * _VECTOR,
        )
        for kind in ("kl", "jsd")
    ),
]  # fmt: skip
