"""The tests, and the changes in them, that the specification cites exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.kernels.test_ptx_rules import MUTATIONS, TURN_MUTATIONS

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
FILES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in ROOT.glob("tests/**/*.py")}


@pytest.mark.parametrize("cited", sorted(set(re.findall(r"`((?:tests/[\w/]+/)?test_\w+\.py)", TEXT))))
def test_cited_files_exist(cited: str) -> None:
    assert cited in FILES or ("/" not in cited and any(path.endswith(f"/{cited}") for path in FILES))


def test_cited_tests_exist() -> None:
    defined = set(re.findall(r"^def (test_\w+)\(", "\n".join(FILES.values()), re.MULTILINE))
    cited = set(re.findall(r"(?:::|`)(test_\w+)`", TEXT))
    assert len(cited) > 8 and cited <= defined


def test_cited_changes_exist() -> None:
    quoted = set()
    for changes in re.findall(r"`test_ptx_rules\.py`\s+\(([^)]*)\)", TEXT):
        quoted |= {" ".join(change.split()) for change in re.findall(r'"([^"]+)"', changes)}
    assert len(quoted) > 15 and quoted <= {mutation[0] for mutation in [*MUTATIONS, *TURN_MUTATIONS]}
