"""Placements: which device, or share of a device's SMs, computes which columns of which stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilerelay.errors import PlacementError


@dataclass(frozen=True)
class Part:
    """Columns of one stage on one device.

    Attributes:
        device: device index.
        sms: number of SMs; None: the whole device.
        columns: (first, end) output columns of a stage that is cut; None: all of them, uncut.
    """

    device: int
    sms: int | None = None
    columns: tuple[int, int] | None = None

    def __str__(self) -> str:
        share = "" if self.sms is None else f":{self.sms}"
        cut = "" if self.columns is None else f"[{self.columns[0]}:{self.columns[1]}]"
        return f"{self.device}{share}{cut}"


@dataclass(frozen=True)
class Placement:
    """The parts of every stage, `stages[i]` being those of stage i.

    Raises:
        PlacementError: see `pipelined` and `sharded`.
    """

    stages: tuple[tuple[Part, ...], ...]

    def __post_init__(self) -> None:
        if not self.stages:
            raise PlacementError("no stage is placed; name a device for each stage")
        for stage, parts in enumerate(self.stages):
            if not parts:
                raise PlacementError(f"stage {stage} is placed on no device; give it at least one")
            devices = [part.device for part in parts]
            if len(set(devices)) != len(devices):
                raise PlacementError(f"stage {stage} is cut over devices {devices}; name each device once")
            for part in parts:
                if part.device < 0:
                    raise PlacementError(f"stage {stage}: device {part.device} does not exist; devices count from 0")
                if part.sms is not None and part.sms <= 0:
                    raise PlacementError(f"stage {stage}: a share of {part.sms} SMs; give at least one")
            _check_columns(stage, parts)
        for device in self.devices:
            shares = [(s, p) for s, parts in enumerate(self.stages) for p in parts if p.device == device]
            # Cut stages follow each other on a device; uncut ones run at the same time and compete for its SMs.
            whole = [s for s, p in shares if p.sms is None]
            in_turn = len(shares) == 1 or all(p.sms is None and p.columns is not None for _, p in shares)
            if whole and not in_turn:
                raise PlacementError(
                    f"device {device} holds stages {[s for s, _ in shares]}, but stage {whole[0]} takes all of it; "
                    f"give each stage a share of its SMs, as in {device}:66"
                )

    @property
    def devices(self) -> tuple[int, ...]:
        """Devices in the order of first use."""
        return tuple(dict.fromkeys(part.device for parts in self.stages for part in parts))

    @property
    def is_pipelined(self) -> bool:
        """Every stage is whole, on one device or share."""
        return all(len(parts) == 1 and parts[0].columns is None for parts in self.stages)

    @property
    def kind(self) -> str:
        return "pipelined" if self.is_pipelined else "sharded"

    def device_of(self, stage: int) -> int:
        """The device of an uncut stage.

        Raises:
            PlacementError: the stage is cut over several devices.
        """
        if len(self.stages[stage]) != 1:
            raise PlacementError(
                f"stage {stage} is cut over {len(self.stages[stage])} devices; place it whole, on one device"
            )
        return self.stages[stage][0].device

    def check_sms(self, sms_of_device: dict[int, int]) -> None:
        """Raises PlacementError when the shares on a device need more SMs than it has."""
        for device in self.devices:
            taken = sum(p.sms or 0 for parts in self.stages for p in parts if p.device == device)
            if taken > sms_of_device[device]:
                raise PlacementError(
                    f"the shares on device {device} add up to {taken} SMs, it has {sms_of_device[device]}; "
                    f"make them smaller"
                )

    def __str__(self) -> str:
        return ",".join("+".join(str(p) for p in parts) for parts in self.stages)

    @classmethod
    def parse(cls, text: str) -> Placement:
        """One entry per stage, separated by commas: `0,1` (a stage per device) or `0:66,0:66,1:66,1:66` (SM shares).

        Stages that are cut by columns have no text form: `sharded` makes them.

        Raises:
            PlacementError: the text is not of that form.
        """
        try:
            fields = [entry.split(":") for entry in text.split(",")]
            parts = [Part(int(f[0]), int(f[1]) if len(f) > 1 else None) for f in fields]
            if any(len(f) > 2 for f in fields):
                raise ValueError
        except ValueError:
            raise PlacementError(f"placement {text!r} is not of the form 0,1 or 0:66,0:66,1:66,1:66") from None
        return cls(tuple((part,) for part in parts))


def _check_columns(stage: int, parts: tuple[Part, ...]) -> None:
    """One part without columns, or parts that follow each other; `cut` knows where the stage begins and ends."""
    if len(parts) == 1 and parts[0].columns is None:
        return
    end = None
    for part in parts:
        if part.columns is None:
            raise PlacementError(
                f"stage {stage} is cut, but its part on device {part.device} names no columns; "
                f"give every part columns=(first, end)"
            )
        first, last = part.columns
        if first < 0 or last <= first or end not in (None, first):
            raise PlacementError(
                f"stage {stage}: columns {[p.columns for p in parts]} leave a gap, overlap or are none; "
                f"let each part begin where the one before it ends"
            )
        end = last


def pipelined(devices: Sequence[int]) -> Placement:
    """Stage i on device `devices[i]`, each stage taking its whole device.

    Raises:
        PlacementError: no device, or a repeated one (`shared` gives SM shares).
    """
    if len(set(devices)) != len(devices):
        raise PlacementError(
            f"devices {list(devices)}: a device is repeated; give two stages on one device SM shares, as in 0:66,0:66"
        )
    return Placement(tuple((Part(device),) for device in devices))


def shared(stages: int, devices: Sequence[int], sms_per_device: int) -> Placement:
    """`stages` stages over fewer devices, neighbouring stages on one device with equal shares of its SMs.

    Raises:
        PlacementError: no stage, no device, repeated devices, or more stages on a device than it has SMs.
    """
    if stages < 1 or not devices:
        raise PlacementError(f"{stages} stages on devices {list(devices)}: give at least one of both")
    if len(set(devices)) != len(devices):
        raise PlacementError(f"devices {list(devices)}: name each device once")
    per_device = -(-stages // len(devices))
    share = sms_per_device // per_device
    if per_device == 1:
        return pipelined(devices[:stages])
    return Placement(tuple((Part(devices[stage // per_device], share),) for stage in range(stages)))


def sharded(columns: Sequence[int], devices: Sequence[int], *, multiple: int = 8) -> Placement:
    """Every stage cut by output columns over all devices, as evenly as multiples of `multiple` columns allow.

    Args:
        columns: output columns of each stage.

    Raises:
        PlacementError: no stage, no device, repeated devices, or fewer columns than devices times `multiple`.
    """
    if not columns or not devices:
        raise PlacementError(f"{len(columns)} stages on devices {list(devices)}: give at least one of both")
    stages = []
    for stage, total in enumerate(columns):
        units = -(-total // multiple)
        if units < len(devices):
            raise PlacementError(
                f"stage {stage}: {total} columns cannot be cut over {len(devices)} devices in multiples of {multiple}; "
                f"use fewer devices"
            )
        bounds = [min(units * i // len(devices) * multiple, total) for i in range(len(devices) + 1)]
        stages.append(tuple(Part(d, None, (bounds[i], bounds[i + 1])) for i, d in enumerate(devices)))
    return Placement(tuple(stages))
