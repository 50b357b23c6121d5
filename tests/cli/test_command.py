"""The command: one line and status 2 for bad input, an object for --json, and what it says is what ran."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tilerelay.cli import main


def tilerelay(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tilerelay", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("run --m 0", "m=0: sizes must be positive"),
        ("run --n -8", "n=-8"),
        ("run --m 999999999999999999999999", "below 2**31"),
        ("run --n 1000000 --k 1000000 --m 64", "are free; choose smaller sizes"),
        ("run --layers 0", "--layers"),
        ("run --layers many", "--layers"),
        ("run --n 100", "n=100 is not a multiple of 8"),
        ("run --dtype fp64", "unknown dtype 'fp64'"),
        ("run --devices 0", "give one for each"),
        ("run --devices 0,0", "repeated"),
        ("run --devices 0,x", "not of the form 0,1"),
        ("run --placement 0,0", "takes all of it"),
        ("run --placement 0:a,1", "not of the form"),
        ("run --placement 0:66,0:66", "can keep it from running; use another device"),
        ("run --signalling smoke", "unknown signalling"),
        ("run --placement sharded --signalling queue", "several"),
        ("run --kernel persistent", "virtual devices run the classical kernel"),
        ("run --kernel magic", "virtual devices run the classical kernel"),
        ("run --backend tpu", "unknown backend"),
        ("run --dependencies none", "unknown dependencies"),
        ("run --repeat 0", "at least one run"),
        ("run --timeout 0", "deadline"),
        ("run --timeout nan", "deadline"),
        ("run --timeout 0.000001 --layers 2", "ran past its deadline"),
        ("run --replicate", "not cut"),
        ("run --unknown", "No such option"),
        ("demo --seed -1", "--seed"),
        ("trace show no-such-file.json", "no-such-file.json"),
        ("bench --suite paper-fig6", "unknown suite"),
        ("fly", "No such command"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    arguments: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tilerelay", *arguments.split()])
    with pytest.raises(SystemExit) as left:
        main()
    said = capsys.readouterr().err
    assert left.value.code == 2, said
    assert words in said
    assert len(said.strip().splitlines()) == 1 and said.startswith("tilerelay")


def test_the_status_reaches_the_shell() -> None:
    result = tilerelay("run", "--m", "0")
    assert result.returncode == 2 and result.stderr.startswith("tilerelay: m=0") and not result.stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--layers 3 --signalling counter", {"placement": "pipelined: 0,1,2", "signalling": "counter", "layers": 3}),
        ("--dependencies per-tile --dtype fp16 --m 70", {"dependencies": "per-tile", "dtype": "fp16", "m": 70}),
        (
            "--placement sharded --devices 0,1 --replicate",
            {"placement": "sharded: 0[0:64]+1[64:128],0[0:64]+1[64:128]", "replicate": True, "signalling": "counter"},
        ),
    ],
)
def test_run_prints_one_object(arguments: str, expected: dict[str, object]) -> None:
    result = tilerelay("run", "--json", "--repeat", "2", "--backend", "cpu", *arguments.split())
    assert result.returncode == 0, result.stderr
    record = json.loads(result.stdout)
    keys = "backend devices placement signalling kernel m n k layers dtype tiles bit_equal latency_us repeats"
    assert {*keys.split(), "max_rel_err_fp32"} <= set(record)
    assert record["bit_equal"] is True and record["max_rel_err_fp32"] < 0.02 and record["repeats"] == 2
    assert set(record["latency_us"]) == {"median", "min", "max"}
    assert {key: record[key] for key in expected} == expected


def test_doctor_says_what_can_run_and_why_not() -> None:
    report = json.loads(tilerelay("doctor", "--json").stdout)
    assert set(report) == {"versions", "gpus", "peers", "can_run"}
    assert report["can_run"]["virtual devices"] is None
    if not report["gpus"]:
        assert "no GPU" in report["can_run"]["one GPU"]


def test_demo_is_checked_and_drawn() -> None:
    result = tilerelay("demo")
    assert result.returncode == 0 and "bit-equal to the layer-by-layer result: yes" in result.stdout
    assert result.stdout.count("stage ") >= 3 and "#" in result.stdout
