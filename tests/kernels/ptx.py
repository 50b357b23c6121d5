"""Reads PTX text as a control-flow graph of instructions, and knows which parameters an address comes from."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

_REGISTER = re.compile(r"%[a-z]+\d*(?:\.[xyz])?")
_STATEMENT = re.compile(r"\s*(?:(?P<label>[$\w]+):(?!:)|(?P<brace>[{}])|(?P<text>[^;]*);)", re.DOTALL)
_INSTRUCTION = re.compile(r"(?:@(?P<guard>!?%?\w+)\s+)?(?P<opcode>[a-z][\w.:]*)\s*(?P<operands>.*)", re.DOTALL)
_PARAMETER = re.compile(
    r"\.param\s+(?P<type>(?:\.align \d+ )?\.\w+)(?P<pointer> \.ptr[^,)]*?)?\s+\w+_param_(?P<number>\d+)"
)
_NO_RESULT = tuple("st. red. cp. bar fence stmatrix mbarrier.init mbarrier.inval bra brx ret setmaxnreg".split())


@dataclass(eq=False)
class Instruction:
    """One instruction; `guard` is its predicate (`%p1`, `!%p1`) or empty, `next` the indices of its successors."""

    index: int
    guard: str
    opcode: str
    operands: str
    next: list[int] = field(default_factory=list)

    @property
    def parts(self) -> list[str]:
        """Operands: what the commas outside brackets separate."""
        parts, depth = [""], 0
        for character in self.operands:
            depth += (character in "[{") - (character in "]}")
            if character == "," and not depth:
                parts.append("")
            else:
                parts[-1] += character
        return [part.strip() for part in parts]

    @property
    def result(self) -> list[str]:
        """Registers that it sets."""
        if self.opcode.startswith(_NO_RESULT) or not self.operands:
            return []
        return _REGISTER.findall(self.parts[0])

    @property
    def address(self) -> str:
        """The first operand in square brackets, or empty."""
        found = re.search(r"\[([^\]]*)\]", self.operands)
        return found.group(1) if found else ""

    def __str__(self) -> str:
        return f"{'@' + self.guard + ' ' if self.guard else ''}{self.opcode} {self.operands}".strip()


Test = Callable[[Instruction], bool]


class Program:
    """The one kernel of a PTX text.

    Args:
        names: of the parameters, in order.
    """

    def __init__(self, text: str, names: Sequence[str]) -> None:
        text = re.sub(r"//[^\n]*|^\s*\.loc\s[^\n]*", "", text, flags=re.MULTILINE)
        head, body = re.split(r"\n\{", text[text.index(".entry") :], maxsplit=1)
        self.parameters = [(m["type"].split()[-1], bool(m["pointer"])) for m in _PARAMETER.finditer(head)]
        self._names = list(names)
        self.instructions: list[Instruction] = []
        self._labels: dict[str, int] = {}
        self._tables: dict[str, list[str]] = {}
        self._jumps: list[tuple[int, str, tuple[int, ...]]] = []
        self._read(body[: body.index("\n}\n\t.file")] if "\n}\n\t.file" in body else body)
        self._connect()

    def _read(self, body: str) -> None:
        position, scopes, opened = 0, (), 0
        while found := _STATEMENT.match(body, position):
            position = found.end()
            if found["label"]:
                self._labels[_scoped(found["label"], scopes)] = len(self.instructions)
                table = re.compile(r"\s*\.branchtargets\s+([^;]*);").match(body, position)
                if table:
                    self._tables[found["label"]] = [label.strip() for label in table[1].split(",")]
                    position = table.end()
            elif found["brace"]:  # a scope: operands in braces never begin a statement
                opened += 1
                scopes = (*scopes, opened) if found["brace"] == "{" else scopes[:-1]
            elif (text := found["text"].strip()) and not text.startswith("."):
                instruction = _INSTRUCTION.fullmatch(text)
                assert instruction, f"not an instruction: {text!r}"
                index, (guard, opcode, operands) = len(self.instructions), instruction.groups("")
                self.instructions.append(Instruction(index, guard, opcode, operands.strip()))
                if opcode.startswith("bra"):
                    self._jumps.append((index, operands.strip(), scopes))

    def _connect(self) -> None:
        targets = {}
        for index, label, scopes in self._jumps:
            # The innermost scope that has the label: inline assembly re-uses names.
            targets[index] = next(
                self._labels[_scoped(label, scopes[:depth])]
                for depth in range(len(scopes), -1, -1)
                if _scoped(label, scopes[:depth]) in self._labels
            )
        for i in self.instructions:
            falls_through = bool(i.guard) or i.opcode.split(".")[0] not in ("bra", "brx", "ret", "exit", "trap")
            if i.opcode.startswith("brx"):
                i.next += [self._labels[label] for label in self._tables[i.parts[-1]]]
            if i.index in targets:
                i.next.append(targets[i.index])
            if falls_through and i.index + 1 < len(self.instructions):
                i.next.append(i.index + 1)

    def where(self, test: Test) -> list[Instruction]:
        return [i for i in self.instructions if test(i)]

    @property
    def roles(self) -> list[int]:
        """First instructions of the warp roles: the targets of the jump table; none without warp specialisation."""
        return [target for i in self.where(lambda i: i.opcode.startswith("brx")) for target in i.next]

    def reached(self, start: Iterable[int], stop: Test = lambda _: False) -> set[int]:
        """Instructions on the paths from `start` up to a `stop`, which is included, or to the end of the warp role."""
        seen: set[int] = set()
        todo = list(start)
        while todo:
            index = todo.pop()
            if index in seen:
                continue
            seen.add(index)
            i = self.instructions[index]
            if not stop(i) and not i.opcode.startswith("brx"):
                todo += i.next
        return seen

    def after(self, instruction: Instruction, stop: Test = lambda _: False) -> set[int]:
        return self.reached(instruction.next, stop)

    def between_split_and_join(self, branch: Instruction) -> set[int]:
        """Instructions on the paths from a branch to the first one that all its paths meet again."""
        after = self.after(branch)
        ends = {n for n in after if not self.instructions[n].next or self.instructions[n].opcode.startswith("brx")}
        joins = {n for n in after if not (ends - {n}) & self.after(branch, stop=lambda i, n=n: i.index == n)}
        return self.after(branch, stop=lambda i: i.index in joins) - joins

    def unordered(self, start: Test, sequence: Sequence[Test], end: Test) -> list[tuple[Instruction, Instruction, int]]:
        """Pairs joined by a path of one role on which `sequence` does not happen in this order between them.

        Each comes with the number of steps of the sequence that did happen. What a predicate guards may not happen.
        """
        found = []
        for first in self.where(start):
            seen: set[tuple[int, int]] = set()
            todo = [(index, 0) for index in first.next]
            while todo:
                index, done = todo.pop()
                if (index, done) in seen:
                    continue
                seen.add((index, done))
                i = self.instructions[index]
                if end(i):
                    found.append((first, i, done))
                    continue
                if not i.guard and sequence[done](i):
                    done += 1
                if done < len(sequence) and not i.opcode.startswith("brx"):
                    todo += [(n, done) for n in i.next]
        return found

    @cached_property
    def _origins(self) -> dict[str, frozenset[str]]:
        """Register -> pointer parameters that its value was computed from; `*p`: an address loaded through p."""
        origins: dict[str, frozenset[str]] = {}
        changed = True
        while changed:
            changed = False
            for i in self.instructions:
                value = self._origin_of(i, origins)
                for register in i.result:
                    union = origins.get(register, frozenset()) | value
                    changed |= union != origins.get(register, frozenset())
                    origins[register] = union
        return origins

    def _origin_of(self, i: Instruction, origins: dict[str, frozenset[str]]) -> frozenset[str]:
        if "globaltimer" in i.operands:
            return frozenset(["globaltimer"])
        if parameter := re.search(r"_param_(\d+)", i.operands):
            number = int(parameter[1])
            pointer = self.parameters[number][1] or self.parameters[number][0] == ".b8"
            return frozenset([self._names[number]] if pointer else [])
        if i.opcode.startswith(("atom", "ld.")):
            if ".shared" in i.opcode:
                return frozenset()
            prefix = "*" if i.guard or ".volatile" not in i.opcode else "volatile *"
            if prefix == "*" and not i.opcode.endswith("64"):
                return frozenset()  # no address
            names = self._of(i.address, origins)
            return frozenset(prefix + name for name in names if not name.startswith(("*", "volatile")))
        return self._of(",".join(i.parts[1:]), origins)

    def _of(self, operands: str, origins: dict[str, frozenset[str]]) -> frozenset[str]:
        return frozenset().union(*(origins.get(r, frozenset()) for r in _REGISTER.findall(operands)))

    def origins(self, register: str) -> frozenset[str]:
        """Where a register's value comes from; `volatile *p`: each thread loaded it on its own."""
        return self._origins.get(register.lstrip("!"), frozenset())

    def memory(self, i: Instruction) -> str:
        """Name of the pointer parameter that the instruction's address comes from, or empty."""
        names = {n for r in _REGISTER.findall(i.address) for n in self.origins(r) if not n.startswith("volatile")}
        pointers = {n for n in names if not n.startswith("*")} or names
        assert len(pointers) <= 1, f"the address of {i} comes from {sorted(pointers)}"
        return next(iter(pointers), "")


def _scoped(label: str, scopes: Sequence[int]) -> str:
    return ".".join([label, *map(str, scopes)])
