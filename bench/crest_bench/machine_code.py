"""Reads GPU assembly listings: where the loops are, and what one iteration issues.

Two assembly languages are known, NVIDIA's SASS (as nvdisasm prints it) and AMD's GCN (as LLVM prints it). What differs
between them stands in one table of patterns each; the counting is common.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Assembly:
    """How one assembly language writes what is counted.

    `instruction` and `label` match lines, with groups (guard, instruction), where the guard is the predicate that may
    switch it off, and (name). `branch`, with a group (target), `conditional` and `end` match instructions, the others
    mnemonics. `bits` are the widths of memory accesses by the part of the mnemonic that says them, `default_bits` where
    none does.
    """

    instruction: re.Pattern
    label: re.Pattern
    branch: re.Pattern
    conditional: re.Pattern
    end: re.Pattern
    exponential: re.Pattern
    load: re.Pattern
    store: re.Pattern
    barrier: re.Pattern
    shuffle: re.Pattern
    local: re.Pattern
    bits: dict[str, int]
    default_bits: int


SASS = Assembly(
    instruction=re.compile(r"\s*/\*[0-9a-f]+\*/\s+(@!?U?P\w+\s+)?([^;]+?)\s*;"),
    label=re.compile(r"\s*(\.L_x_\d+):"),
    branch=re.compile(r"(?:BRA|JMP)\b.*\((\.L_x_\d+)\)"),
    conditional=re.compile(r"(?:BRA|JMP)\S*\s+!?U?P\d"),
    end=re.compile(r"EXIT|RET|BRX|JMX"),
    exponential=re.compile(r"MUFU\.EX2"),
    load=re.compile(r"LDG"),  # also LDGSTS, the asynchronous copy to shared memory
    store=re.compile(r"STG"),
    barrier=re.compile(r"BAR\b|SYNCS\b"),
    shuffle=re.compile(r"SHFL|C?REDUX"),
    local=re.compile(r"LDL|STL"),
    bits={"256": 256, "128": 128, "64": 64, "U16": 16, "S16": 16, "U8": 8, "S8": 8},
    default_bits=32,
)
GCN = Assembly(
    instruction=re.compile(r"\t()([a-z]\w*(?:[ \t][^;]*?)?)\s*(?:;.*)?$"),
    label=re.compile(r"(\.LBB\d+_\d+):"),
    branch=re.compile(r"s_c?branch\S*\s+(\.LBB\d+_\d+)"),
    conditional=re.compile(r"s_cbranch"),
    end=re.compile(r"s_endpgm|s_setpc"),
    exponential=re.compile(r"v_exp_"),
    load=re.compile(r"(?:global|buffer|flat)_load_"),
    store=re.compile(r"(?:global|buffer|flat)_store_"),
    barrier=re.compile(r"s_barrier"),
    shuffle=re.compile(r"ds_(?:b?permute|swizzle)|v_readlane|v_permlane|v_\w+_dpp"),
    local=re.compile(r"scratch_"),
    bits={
        "dwordx4": 128, "dwordx3": 96, "dwordx2": 64,
        "ushort": 16, "sshort": 16, "short": 16, "ubyte": 8, "sbyte": 8, "byte": 8,
    },
    default_bits=32,
)  # fmt: skip


@dataclass(frozen=True)
class Body:
    """What one pass through a stretch of code issues, per thread; `loads` and `stores` are global ones, in bits each.
    `is_loop` is False where the stretch is a whole kernel that has no loop over global memory."""

    is_loop: bool
    instructions: int
    exponentials: int
    loads: tuple[int, ...]
    stores: tuple[int, ...]
    barriers: int
    shuffles: int
    local_accesses: int


def bodies(listing: str, assembly: Assembly) -> list[Body]:
    """The innermost loops that load from global memory, in order; the whole kernel when there is none."""
    lines, labels = _parse(listing, assembly)
    instructions = [text for _, text in lines]
    loops = _innermost_loops(_successors(lines, labels, assembly))
    counted = [_count([instructions[at] for at in sorted(loop)], assembly, is_loop=True) for loop in loops]
    counted = [body for body in counted if body.loads]
    if counted:
        return counted
    last = max(at for at, text in enumerate(instructions) if assembly.end.match(text))
    return [_count(instructions[: last + 1], assembly, is_loop=False)]


def _parse(listing: str, assembly: Assembly) -> tuple[list[tuple[bool, str]], dict[str, int]]:
    """(guarded, instruction) line by line, and the place each label points to."""
    lines: list[tuple[bool, str]] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if label := assembly.label.match(line):
            labels[label[1]] = len(lines)
        elif instruction := assembly.instruction.match(line):
            lines.append((bool(instruction[1]), instruction[2]))
    return lines, labels


def _successors(lines: list[tuple[bool, str]], labels: dict[str, int], assembly: Assembly) -> list[set[int]]:
    """Where control may go from each instruction."""
    successors: list[set[int]] = []
    for at, (guarded, text) in enumerate(lines):
        target = assembly.branch.match(text)
        leaves = not guarded and (assembly.end.match(text) or (target and not assembly.conditional.match(text)))
        following = set() if leaves or at + 1 == len(lines) else {at + 1}
        successors.append(following | ({labels[target[1]]} if target else set()))
    return successors


def _innermost_loops(successors: list[set[int]]) -> list[frozenset[int]]:
    """The loops that hold no other one, in order, as sets of instructions.

    A loop is what lies between a place and a jump back to it: all that the place reaches and that reaches the jump
    without passing the place again. A jump to an earlier place from which it is not reached (out of a block laid out of
    line) makes none, nor does a jump to itself (the guard behind a kernel).
    """
    predecessors: list[set[int]] = [set() for _ in successors]
    for at, following in enumerate(successors):
        for target in following:
            predecessors[target].add(at)
    loops: dict[int, set[int]] = {}
    for jump, following in enumerate(successors):
        for head in (target for target in following if target < jump):
            reached = _reachable(head, successors)
            if jump in reached:
                loops[head] = loops.get(head, {head}) | (reached & _reachable(jump, predecessors, stop=head))
    distinct = sorted({frozenset(loop) for loop in loops.values()}, key=min)
    return [loop for loop in distinct if not any(other < loop for other in distinct)]


def _reachable(start: int, edges: list[set[int]], stop: int | None = None) -> set[int]:
    """All that can be reached from `start`, itself included, without going on from `stop`."""
    seen, waiting = {start}, [start]
    while waiting:
        at = waiting.pop()
        if at != stop:
            new = edges[at] - seen
            seen |= new
            waiting += new
    return seen


def _count(instructions: Sequence[str], assembly: Assembly, *, is_loop: bool) -> Body:
    mnemonics = [text.split()[0] for text in instructions]

    def number(pattern: re.Pattern) -> int:
        return sum(bool(pattern.match(mnemonic)) for mnemonic in mnemonics)

    def widths(pattern: re.Pattern) -> tuple[int, ...]:
        return tuple(_bits(mnemonic, assembly) for mnemonic in mnemonics if pattern.match(mnemonic))

    return Body(
        is_loop=is_loop,
        instructions=len(mnemonics),
        exponentials=number(assembly.exponential),
        loads=widths(assembly.load),
        stores=widths(assembly.store),
        barriers=number(assembly.barrier),
        shuffles=number(assembly.shuffle),
        local_accesses=number(assembly.local),
    )


def _bits(mnemonic: str, assembly: Assembly) -> int:
    parts = re.split(r"[._]", mnemonic)
    return next((bits for part, bits in assembly.bits.items() if part in parts), assembly.default_bits)
