"""Where XLA's scheduler put the pushes, from the text of a compiled program (``compiled.as_text()``).

A scheduled module lists the instructions of a computation in the order in which they are launched. Calls (a command buffer
is one) are read in place. A gradient is *ready* behind the last instruction that a push of it waits for; a push is *early*
if it stands before the last gradient of all is ready. Pure.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.gpu.settings import NotMeasured

PUSH, PULL = "jmo_push", "jmo_pull"
_FREE = frozenset({"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all"})
_BITS = re.compile(r"(?:pred|[a-z]+)(\d+)")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPERATION = re.compile(r"([a-z][\w\-]*)\(")
_OPERAND = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"\bto_apply=%?([\w.\-]+)")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a computation."""

    name: str
    shape: str
    operation: str
    operands: tuple[str, ...]
    target: str | None  # of a custom call
    called: str | None  # computation of a call

    @property
    def result_bytes(self) -> int:
        """Bytes of all arrays of its result."""
        return sum(
            _itemsize(dtype) * math.prod(int(size) for size in sizes.split(",") if size)
            for dtype, sizes in _ARRAY.findall(self.shape)
        )


def computations(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """Instructions of each computation, in order, and the name of the entry.

    Raises:
      ValueError: if there is no entry.
    """
    found: dict[str, list[Instruction]] = {}
    entry = current = None
    for line in text.splitlines():
        if line.startswith("}"):
            current = None
        elif current is not None:
            if (instruction := _instruction(line)) is not None:
                found[current].append(instruction)
        elif (opened := _COMPUTATION.match(line)) and not line.startswith("HloModule"):
            current = opened[2]
            found[current] = []
            entry = current if opened[1] else entry
    if entry is None:
        raise ValueError("the text has no ENTRY computation; it is no HLO module")
    return found, entry


def placement(text: str) -> dict[str, Any]:
    """Where the pushes of a scheduled module stand.

    Returns:
      ``pushes`` and ``pulls``; ``early`` pushes; ``could_be_early``: those whose own gradients are ready before the last
      one is; ``early_bytes_share``: of the bytes that could be pushed early, the part that are (None: no push could);
      ``most_late``: most instructions that stand between a push and the moment when it could have been made;
      ``pulls_behind_all_pushes``; ``instructions`` in all.

    Raises:
      NotMeasured: if the program has no push.
      ValueError: if the text is no scheduled module.
    """
    if "is_scheduled=true" not in text.partition("\n")[0]:
        raise ValueError("the module is not scheduled; compile it first")
    found, entry = computations(text)
    order = list(_flattened(found, entry, {}))
    position = {instruction.name: at for at, (instruction, _) in enumerate(order)}
    pushes = [(at, instruction, names) for at, (instruction, names) in enumerate(order) if instruction.target == PUSH]
    pulls = [at for at, (instruction, _) in enumerate(order) if instruction.target == PULL]
    if not pushes:
        raise NotMeasured(f"the program has no {PUSH}: on this platform the update is one op")
    by_name = {instruction.name: (instruction, names) for instruction, names in order}
    ready = [_ready(instruction, names, position, by_name) for _, instruction, names in pushes]
    last = max(ready)
    sizes = [instruction.result_bytes for _, instruction, _ in pushes]
    could = [index for index, at in enumerate(ready) if at < last]
    early = [index for index in could if pushes[index][0] < last]
    busy = [at for at, (instruction, _) in enumerate(order) if instruction.operation not in _FREE]
    late = [sum(ready[i] < at < pushes[i][0] for at in busy) for i in range(len(pushes))]
    could_bytes = sum(sizes[index] for index in could)
    return {
        "instructions": len(busy),
        "pushes": len(pushes),
        "pulls": len(pulls),
        "early": len(early),
        "could_be_early": len(could),
        "early_bytes_share": sum(sizes[index] for index in early) / could_bytes if could_bytes else None,
        "most_late": max(late),
        "pulls_behind_all_pushes": all(at > pushes[-1][0] for at in pulls),
    }


def _instruction(line: str) -> Instruction | None:
    matched = _INSTRUCTION.match(line)
    if matched is None:
        return None
    name, rest = matched[1], matched[2]
    shape_end = _end_of_shape(rest)
    shape, rest = rest[:shape_end], rest[shape_end:].lstrip()
    operation = _OPERATION.match(rest)
    if operation is None:
        return None
    arguments = _in_brackets(rest, operation.end() - 1)
    target, called = _TARGET.search(rest), _CALLED.search(rest)
    return Instruction(
        name,
        shape,
        operation[1],
        tuple(_OPERAND.findall(arguments)),
        target[1] if target else None,
        called[1] if called and operation[1] == "call" else None,
    )


def _end_of_shape(text: str) -> int:
    """Where the shape at the begin of a text ends: a tuple in brackets, or a word."""
    if text.startswith("("):
        return len(_in_brackets(text, 0)) + 2
    return text.index(" ") if " " in text else len(text)


def _in_brackets(text: str, begin: int) -> str:
    """What stands between the bracket at ``begin`` and the one that closes it."""
    depth = 0
    for at in range(begin, len(text)):
        depth += (text[at] == "(") - (text[at] == ")")
        if depth == 0:
            return text[begin + 1 : at]
    raise ValueError(f"a bracket is not closed: {text[:80]!r}")


def _flattened(
    found: dict[str, list[Instruction]], name: str, given: dict[str, str]
) -> Iterator[tuple[Instruction, dict[str, str]]]:
    """Instructions in the order of their launch, with what the parameters of the call around them stand for."""
    for instruction in found[name]:
        if instruction.called is None or instruction.called not in found:
            yield instruction, given
            continue
        body = found[instruction.called]
        parameters = [inner.name for inner in body if inner.operation == "parameter"]
        outer = [given.get(operand, operand) for operand in instruction.operands]
        yield from _flattened(found, instruction.called, dict(zip(parameters, outer, strict=False)))
        yield instruction, given


def _ready(
    push: Instruction,
    names: dict[str, str],
    position: dict[str, int],
    by_name: dict[str, tuple[Instruction, dict[str, str]]],
) -> int:
    """Position of the last instruction that a push waits for; those that do nothing count as what they stand for."""
    at, waiting, seen = -1, _sources(push.operands, names), set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen or name not in position:
            continue
        seen.add(name)
        instruction, inner = by_name[name]
        if instruction.operation in _FREE:
            waiting += _sources(instruction.operands, inner)
        else:
            at = max(at, position[name])
    return at


def _sources(operands: Sequence[str], names: dict[str, str]) -> list[str]:
    return [names.get(operand, operand) for operand in operands]


def _itemsize(dtype: str) -> int:
    """Bytes of an element, from the width in its name."""
    width = _BITS.match(dtype)
    return max(1, int(width[1]) // 8) if width else 1
