"""The results file: {"schema", "machine", "records"}. Written whole, read with distrust, never silently merged."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilerelay.bench.records import CellKey, Record
from tilerelay.errors import InvalidInput

SCHEMA = 1

# What makes two runs comparable; the rest of the machine's facts is for reading.
IDENTITY = ("gpu", "host", "driver", "cuda", "nccl", "torch", "triton", "commit")


@dataclass
class Results:
    """What one machine measured at one commit."""

    machine: dict[str, Any]
    records: list[Record] = field(default_factory=list)

    def measured(self, key: CellKey) -> set[str]:
        """Methods that have a record for a cell, whatever came of them."""
        return {r.method for r in self.records if r.key == key}

    def put(self, key: CellKey, records: Sequence[Record]) -> None:
        """Replace a cell as a whole: figures from different rounds never stand beside each other."""
        self.records = [r for r in self.records if r.key != key] + list(records)

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "machine": self.machine, "records": [r.to_json() for r in self.records]}


def save(results: Results, path: Path) -> None:
    """Write beside the file, then replace it: a reader sees the old results or the new ones, never half of them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(results.to_json(), indent=1, allow_nan=False) + "\n")
    os.replace(part, path)


def load(path: Path) -> Results:
    """Raises InvalidInput: no such file, not JSON (half written?), another version, or records that cannot be."""
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise InvalidInput(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise InvalidInput(f"{path}: not whole JSON, perhaps half written ({error})") from None
    if not isinstance(data, Mapping) or not {"schema", "machine", "records"} <= set(data):
        raise InvalidInput(f"{path}: not a results file; it needs schema, machine and records")
    if data["schema"] != SCHEMA:
        raise InvalidInput(
            f"{path}: written by another version (schema {data['schema']!r}, this one reads {SCHEMA}); measure again"
        )
    machine = data["machine"]
    if not isinstance(machine, Mapping) or not isinstance(machine.get("gpu"), str):
        raise InvalidInput(f"{path}: does not say which machine it is from")
    if not isinstance(data["records"], list):
        raise InvalidInput(f"{path}: records is not a list")
    try:
        records = [Record.from_json(entry) for entry in data["records"]]
    except (InvalidInput, TypeError) as error:
        raise InvalidInput(f"{path}: {error}") from None
    seen = [(r.key, r.method) for r in records]
    if len(set(seen)) != len(seen):
        raise InvalidInput(f"{path}: a method has two records for one cell")
    return Results(dict(machine), records)


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """What keeps two machines' facts from being the same run's: "driver 580.1 / 570.2"."""
    return [f"{name} {one.get(name)} / {other.get(name)}" for name in IDENTITY if one.get(name) != other.get(name)]


def resume(path: Path | None, machine: dict[str, Any]) -> Results:
    """The results to go on with: those in the file when it exists and is from this machine and commit.

    Raises:
        InvalidInput: the file is bad, or from another machine, version or commit.
    """
    if path is None or not path.exists():
        return Results(machine)
    results = load(path)
    unlike = differences(results.machine, machine)
    if unlike:
        raise InvalidInput(f"{path} is from another machine or version ({'; '.join(unlike)}); give another --out")
    return results


def load_all(paths: Iterable[Path]) -> list[Results]:
    """Several files; those of the same machine and commit become one, others stay apart.

    Raises:
        InvalidInput: a bad file, or two files of one machine that hold the same cell.
    """
    loaded: list[Results] = []
    for path in paths:
        results = load(path)
        same = next((r for r in loaded if not differences(r.machine, results.machine)), None)
        if same is None:
            loaded.append(results)
            continue
        twice = {r.key for r in same.records} & {r.key for r in results.records}
        if twice:
            key = min(twice, key=lambda k: k.cell)
            raise InvalidInput(f"{path}: {key.cell} ({key.process_set}) is also in an earlier file; give one of them")
        same.records += results.records
    return loaded


def machine_name(machine: Mapping[str, Any]) -> str:
    """One line that tells machines and commits apart."""
    parts = [f"{machine.get('gpus', '?')} x {machine['gpu']}", f"host {machine.get('host', '?')}"]
    parts += [f"{name} {machine[name]}" for name in ("driver", "torch", "triton", "nccl") if machine.get(name)]
    return ", ".join([*parts, f"commit {machine.get('commit') or 'unknown'}"])
