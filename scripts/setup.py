"""Makes .venv ready to run tilerelay. Needs nothing but Python 3.10 to 3.13.

`make` calls this before every target. When nothing changed since the last
call it returns at once; .venv/.ready holds what the last call saw.
"""

# A Python too old for the project must still get as far as the refusal in
# main(): no `from __future__` here, and list[str] only in quotes.
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / ".ready"
BIN = VENV / "bin" / "python"
REQUIREMENTS = ROOT / "requirements"
VERSION = ".".join(str(part) for part in sys.version_info[:3])

# Triton 3.6.0, which the project is written for, is the one torch 2.11.0 pins.
# A CPU build pins no triton, so a later one does as well where 2.11.0 has none.
TORCH = "torch==2.11.0"
TORCH_CPU = ["torch==2.11.0+cpu", "torch==2.13.0+cpu"]
# `torch==2.11.0` also admits a CPU build, if the index has one.
TORCH_CUDA = TORCH + ",!=2.11.0+cpu"

# What pip says when an index does not offer what was asked for. Anything else,
# such as a full disk, must not end in a download of several GB.
NOT_OFFERED = ("No matching distribution found for torch==", "ResolutionImpossible")


def say(line: str) -> None:
    print(line, flush=True)


def has_nvidia_gpu() -> bool:
    if shutil.which("nvidia-smi") is None:
        return False
    done = subprocess.run(["nvidia-smi", "-L"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False)
    return done.returncode == 0 and b"GPU " in done.stdout


def fingerprint() -> str:
    """A hash over every file that says what to install."""
    digest = hashlib.sha256()
    for path in [Path(__file__), ROOT / "pyproject.toml", *sorted(REQUIREMENTS.glob("*.txt"))]:
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()


def pip(*arguments: str) -> "list[str]":
    """A pip command. -I keeps PYTHONPATH and the user's own packages out of it."""
    command = [str(BIN), "-I", "-m", "pip", "--disable-pip-version-check", "install", "--no-input"]
    # torch shares packages with tilerelay, so what runtime.txt pins holds for torch too.
    for name in ("constraints.txt", "runtime.txt"):
        command += ["--constraint", str(REQUIREMENTS / name)]
    return [*command, *arguments]


def attempt(command: "list[str]", show: bool = False) -> "tuple[int, str]":
    """Exit code and output. Output is kept for the case of a failure, unless it is to be shown as it comes."""
    out, err = (None, None) if show else (subprocess.PIPE, subprocess.STDOUT)
    done = subprocess.run(
        command, cwd=str(ROOT), stdin=subprocess.DEVNULL, stdout=out, stderr=err, text=True, check=False
    )
    return done.returncode, done.stdout or ""


def run(command: "list[str]", show: bool = False) -> None:
    code, output = attempt(command, show)
    if code:
        sys.exit(f"{output}set-up failed (exit code {code}): {' '.join(command)}")


def make_venv() -> None:
    say("==> making .venv with Python " + VERSION)
    command = [sys.executable, "-m", "venv", "--clear", str(VENV)]
    if subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode:
        sys.exit("set-up failed: this Python cannot make a venv (Debian and Ubuntu keep that in python3-venv)")


def install_torch(gpu: bool) -> None:
    if gpu:
        say("==> installing torch (CUDA build, several GB): an NVIDIA GPU is here")
        run(pip(TORCH_CUDA), show=True)
        return
    if platform.machine() in ("x86_64", "AMD64"):
        for build in TORCH_CPU:
            say(f"==> installing {build} (CPU build, ~200 MB)")
            code, output = attempt(pip(build))
            if code == 0:
                return
            if not any(words in output for words in NOT_OFFERED):
                sys.exit(f"{output}set-up failed: pip could not install {build}")
            say("    the package index offers no such build for Python " + VERSION)
        say("==> no CPU build of torch on offer: installing the CUDA build instead (several GB; it runs without a GPU)")
        say("    to avoid it, set PIP_EXTRA_INDEX_URL to a package index with CPU builds and call make again")
    else:
        say(f"==> installing {TORCH} for {platform.machine()}")
    run(pip(TORCH), show=True)


def main() -> None:
    if not (3, 10) <= sys.version_info[:2] <= (3, 13):
        sys.exit(f"tilerelay needs Python 3.10 to 3.13, and this is {VERSION}; try: make demo PYTHON=python3.12")
    if sys.platform != "linux":
        sys.exit("tilerelay needs Linux: triton is published for no other system")

    os.environ["PIP_USER"] = "0"  # somebody's pip may be set to --user, which no venv allows
    gpu = has_nvidia_gpu()
    # A change in the first line asks for a new .venv, one in the second for an update.
    identity = f"Python {VERSION} of {sys.base_prefix}, gpu={gpu}, in {ROOT}"
    wanted = [identity, fingerprint()]
    found = STAMP.read_text().splitlines() if STAMP.exists() and BIN.exists() else []
    if found == wanted:
        return

    # The stamp goes first and comes back last: a set-up that stops half-way
    # leaves none, and the next call starts from an empty .venv.
    if found[:1] == [identity]:
        say("==> updating .venv: what it needs has changed")
        STAMP.unlink()
    else:
        make_venv()
    say("==> installing pip and setuptools")
    run(pip("--requirement", str(REQUIREMENTS / "build.txt")))
    install_torch(gpu)
    say("==> installing the other packages that tilerelay and its tests need (~250 MB)")
    files = [str(REQUIREMENTS / name) for name in ("runtime.txt", "dev.txt")]
    run(pip("--requirement", files[0], "--requirement", files[1]))
    say("==> installing tilerelay itself")
    # Everything is here by now. Without build isolation pip asks no index.
    run(pip("--no-deps", "--no-build-isolation", "--editable", str(ROOT)))
    STAMP.write_text("\n".join(wanted) + "\n")
    say("==> .venv is ready")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\nset-up interrupted; the next call starts over")
