"""Checks of what a pipeline is given, before anything is allocated or launched."""

from __future__ import annotations

import torch

from tilerelay.errors import InvalidInput, ShapeError
from tilerelay.graph.placement import Placement
from tilerelay.graph.workload import Workload

DESCRIPTOR_BYTES = 16  # a tensor descriptor's address and row stride are multiples of this


def check_types(
    workload: object, weights: object, biases: object, placement: object, timeout_s: object, first_epoch: object
) -> None:
    """Raises InvalidInput: something is not of the kind that the rest of the constructor can say more about."""
    if not isinstance(workload, Workload):
        raise InvalidInput(f"the workload is a {type(workload).__name__}; make one with gemm_chain, mlp or dense_chain")
    if placement is not None and not isinstance(placement, Placement):
        raise InvalidInput(f"the placement is a {type(placement).__name__}; make one with pipelined, shared or sharded")
    for name, given in (("weights", weights), ("biases", biases)):
        if name == "biases" and given is None:
            continue
        if not isinstance(given, (list, tuple)):
            raise InvalidInput(f"{name} is a {type(given).__name__}; give a list with an entry for each stage")
        for entry in given:
            pieces = entry if isinstance(entry, (list, tuple)) else [entry]
            if not pieces or not all(isinstance(piece, torch.Tensor) for piece in pieces):
                raise InvalidInput(
                    f"{name} holds a {type(entry).__name__}; give tensors, or lists of a cut stage's parts"
                )
    if not isinstance(timeout_s, (int, float)) or isinstance(timeout_s, bool):
        raise InvalidInput(f"timeout_s={timeout_s!r}: give a number of seconds")
    if not isinstance(first_epoch, int) or not 0 <= first_epoch < 2**32:
        raise InvalidInput(f"first_epoch={first_epoch!r}: give a whole number below 2**32")


def tensors_of(x: object) -> list[torch.Tensor]:
    """x as a list of tensors.

    Raises:
        InvalidInput: it is neither a tensor nor a list of tensors.
    """
    given = list(x) if isinstance(x, (list, tuple)) else [x]
    tensors = [tensor for tensor in given if isinstance(tensor, torch.Tensor)]
    if not given or len(tensors) < len(given):
        raise InvalidInput(f"x is a {type(x).__name__}; give a tensor, or a list of tensors")
    return tensors


def check_tensor(
    what: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Raises ShapeError: the tensor is not what the kernels need; says how to make it so."""
    if tuple(tensor.shape) != shape:
        raise ShapeError(f"{what} has shape {list(tensor.shape)}, needs {list(shape)}")
    if tensor.dtype != dtype:
        raise ShapeError(f"{what} is {tensor.dtype}, the workload is {dtype}; convert it with .to({dtype})")
    if tensor.device != device:
        raise ShapeError(f"{what} is on {tensor.device}, its stage on {device}; move it with .to('{device}')")
    if not tensor.is_contiguous():
        raise ShapeError(f"{what} is not contiguous; pass .contiguous()")
    if tensor.data_ptr() % DESCRIPTOR_BYTES:
        raise ShapeError(f"{what} does not begin at a multiple of {DESCRIPTOR_BYTES} bytes; pass .clone()")
