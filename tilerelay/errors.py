"""The exceptions that tilerelay raises.

TilerelayError
├── InvalidInput          (also a ValueError) the request cannot work; the message says what to change
│   ├── PlacementError    stages, devices and SM shares that do not fit together
│   └── ShapeError        shapes, dtypes or strides that do not match
├── UnsupportedMachine    this machine cannot run the request (GPUs, peers, driver, versions)
└── PipelineAborted       a run was ended by a deadline; names who waited for what
"""


class TilerelayError(Exception):
    """Base of every exception of this package."""


class InvalidInput(TilerelayError, ValueError):
    """The request cannot work, whatever the machine."""


class PlacementError(InvalidInput):
    """Stages, devices and SM shares do not fit together."""


class ShapeError(InvalidInput):
    """Shapes, dtypes or strides do not match."""


class UnsupportedMachine(TilerelayError, RuntimeError):
    """This machine cannot run the request."""


class PipelineAborted(TilerelayError, RuntimeError):
    """A wait ran past its deadline and the run was ended; the pipeline can be run again.

    Attributes:
        waits: one line for every device that gave up, naming stage, tile, and the missing producer tiles.
    """

    def __init__(self, message: str, waits: list[str] | None = None) -> None:
        super().__init__(message)
        self.waits = waits or []
