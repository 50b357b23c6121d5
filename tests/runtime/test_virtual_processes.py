"""Processes and memory of virtual devices: nothing stays behind, whoever ends and however."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tilerelay import Pipeline, TilerelayError, dense_chain, pipelined
from tilerelay.graph.cut import cut
from tilerelay.kernels.config import configure
from tilerelay.protocol.layout import ProtocolLayout
from tilerelay.runtime import virtual, virtual_workers
from tilerelay.runtime.virtual_memory import SharedTensors
from tilerelay.runtime.virtual_workers import Workers

sys.path.append(str(Path(__file__).parent))
from faulty_program import FaultyProgram

ROOT = Path(__file__).resolve().parents[2]
WORKLOAD = dense_chain(130, [64, 64, 64], tile=(64, 64))
X = torch.randn(130, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)

SCRIPT = """
import os, signal, sys, threading, time, torch
from tilerelay import Pipeline, dense_chain
print("parent", flush=True)
workload = dense_chain(2048, [256, 256, 256], tile=(64, 64))
weights = [torch.full((256, 256), 1 / 256, dtype=torch.bfloat16) for _ in workload.stages]
pipeline = Pipeline(workload, weights)
print(*pipeline._run._workers.pids, flush=True)
if sys.argv[1] == "killed":
    threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGKILL]).start()
elif sys.argv[1] == "forked":
    if os.fork() == 0:  # holds copies of the parent's sockets for longer than the test looks
        os.close(1)
        os.close(2)
        time.sleep(15)
        os._exit(0)
    threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGKILL]).start()
y = pipeline(torch.ones(2048, 256, dtype=torch.bfloat16))
assert bool((y == 1).all())
if sys.argv[1] == "raises":
    raise KeyError("the user's own")
"""


def running(pid: int) -> bool:
    """Alive; a zombie whose parent does not reap it is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def children() -> set[int]:
    """This process's children, zombies among them."""
    return {int(p) for task in Path("/proc/self/task").iterdir() for p in (task / "children").read_text().split()}


def shared_mappings(pid: int | str = "self") -> int:
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:tilerelay")


def gone(pids: list[int], within_s: float = 10.0) -> bool:
    end = time.monotonic() + within_s
    while any(running(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(running(pid) for pid in pids)


def pipeline_on(workers: Workers | None, timeout_s: float = 60.0, **options: Any) -> virtual.VirtualPipeline:
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(64, 64, generator=generator).to(torch.bfloat16) for _ in WORKLOAD.stages]
    kind = type("Faulty", (virtual.VirtualPipeline,), {"program": options.pop("program", FaultyProgram)})
    placed = cut(WORKLOAD, pipelined([0, 1]))
    pipeline: virtual.VirtualPipeline = kind(
        placed, weights, [None, None], ProtocolLayout(placed.workload, placed.placement, "queue"),
        [configure("classical", (64, 64))] * 2, timeout_us=int(timeout_s * 1e6), workers=workers, **options,
    )  # fmt: skip
    return pipeline


def misbehave(pipeline: virtual.VirtualPipeline, stage: int, fault: str) -> None:
    pipeline._workers.call(stage, pipeline._key, "misbehave", fault)
    pipeline._workers.gather([stage], 30, "misbehave")


def is_right(pipeline: virtual.VirtualPipeline) -> bool:
    for output in pipeline.tensors.values():
        output.fill_(float("nan"))
    pipeline.run([X])
    return all(torch.equal(a, b) for a, b in zip(pipeline.tensors.values(), pipeline.oracle(X), strict=True))


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """After every test of this file: no child, no mapping, no file in /dev/shm that was not there before."""
    before = children(), shared_mappings(), sorted(os.listdir("/dev/shm"))
    yield
    assert (children(), shared_mappings(), sorted(os.listdir("/dev/shm"))) == before


def test_close_ends_the_processes_and_frees_the_memory() -> None:
    weights = [torch.eye(64, dtype=torch.bfloat16) for _ in WORKLOAD.stages]
    with Pipeline(WORKLOAD, weights) as pipeline:
        run: Any = pipeline._run
        pids = run._workers.pids
        assert set(pids) <= children() and shared_mappings() == 1 and all(shared_mappings(pid) == 1 for pid in pids)
        y = pipeline(X)
        assert torch.equal(y, X)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids), "a process, or a zombie, is left"
    assert torch.equal(y, X), "a tensor that the caller still holds stays valid"
    pipeline.close()


def test_an_unclosed_pipeline_ends_with_its_last_reference() -> None:
    pipeline = pipeline_on(None)
    pids = pipeline._workers.pids
    del pipeline
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_constructor_that_fails_leaves_nothing() -> None:
    with pytest.raises(TilerelayError, match=r"virtual device 0 failed to make its program: .*Traceback"):
        pipeline_on(None, program=SharedTensors)  # its constructor takes other arguments


def test_a_process_that_cannot_start_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Python finds this package, but not NumPy, torch and Triton."""
    monkeypatch.setattr(sys, "path", [str(ROOT), *(p for p in sys.path if "site-packages" not in p and p)])
    with pytest.raises(TilerelayError, match=r"failed to start: (the process ended with exit code 1|Traceback)"):
        Workers(1)


def test_a_process_that_does_not_start_in_time_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_workers, "START_TIMEOUT_S", 0.05)
    with pytest.raises(TilerelayError, match=r"virtual device 1 did not start within 0\.05 s"):
        Workers(2)


def test_shared_workers_outlive_a_pipeline_but_not_its_memory() -> None:
    workers = Workers(2)
    try:
        for _ in range(2):
            pipeline = pipeline_on(workers)
            assert is_right(pipeline)
            pipeline.close()
            assert [shared_mappings(pid) for pid in workers.pids] == [0, 0]
        with pytest.raises(TilerelayError):
            pipeline_on(workers, program=SharedTensors)
        assert is_right(pipeline_on(workers)), "a failed constructor spoiled the workers"
    finally:
        workers.close()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("die", r"stage 0 \(layer0\) on virtual device 0: the process ended with exit code 3"),
        ("hang", r"stage 0 \(layer0\) on virtual device 0: the process was stuck and was ended"),
        ("killed", r"stage 0 \(layer0\) on virtual device 0: the process was ended by signal 9"),
    ],
)
def test_a_process_that_dies_or_hangs_ends_the_run(monkeypatch: pytest.MonkeyPatch, fault: str, message: str) -> None:
    """Its consumer waits for minutes: it is the parent that releases it, soon."""
    monkeypatch.setattr(virtual, "GRACE_S", 0.5)
    pipeline = pipeline_on(None, timeout_s=0.5 if fault == "hang" else 300.0)
    if fault == "killed":
        os.kill(pipeline._workers.pids[0], signal.SIGKILL)
    else:
        misbehave(pipeline, 0, fault)
    start = time.monotonic()
    with pytest.raises(TilerelayError, match=message):
        pipeline.run([X])
    assert time.monotonic() - start < 15
    with pytest.raises(TilerelayError, match="cannot be run any more"):
        pipeline.run([X])
    pipeline.close()


def test_a_stopped_process_ends_the_run_and_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGSTOP to the consumer: nobody gives up by a deadline of the kernels, only the parent looks."""
    monkeypatch.setattr(virtual, "GRACE_S", 0.5)
    pipeline = pipeline_on(None, timeout_s=0.5)
    os.kill(pipeline._workers.pids[1], signal.SIGSTOP)
    with pytest.raises(TilerelayError, match=r"stage 1 \(layer1\) on virtual device 1: the process was stuck"):
        pipeline.run([X])
    pipeline.close()


def test_an_interrupted_run_cannot_be_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = pipeline_on(None)
    with monkeypatch.context() as patch:

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        patch.setattr(pipeline._workers, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pipeline.run([X])
    with pytest.raises(TilerelayError, match="interrupted"):
        pipeline.oracle(X)
    pipeline.close()


@pytest.mark.parametrize("how", ["ends", "raises", "killed", "forked"])
def test_a_script_without_a_main_guard_leaves_no_process(tmp_path: Path, how: str) -> None:
    """It never closes its pipeline; killed, it is in the middle of a run."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    # Files, not pipes: the end of a pipe would come only when the workers have ended too.
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        command = [sys.executable, str(script), how]
        result = subprocess.run(command, stdout=out, stderr=err, timeout=100, cwd=tmp_path, env=environment)
    lines = (tmp_path / "out").read_text().split("\n")
    assert lines[0] == "parent" and lines[2:] == [""], "the workers ran the script"
    assert result.returncode == {"ends": 0, "raises": 1}.get(how, -signal.SIGKILL), (tmp_path / "err").read_text()
    pids = [int(pid) for pid in lines[1].split()]
    assert len(pids) == 2 and gone(pids)
