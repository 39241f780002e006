"""The conversation with curl of ``docs/conversation.md``, as it is printed there."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.support.dev_stack import DevStack

pytestmark = pytest.mark.xdist_group("cli")
ROOT = Path(__file__).parents[2]


def test_the_conversation_of_the_docs_goes_as_printed(stack: DevStack) -> None:
    script = ROOT / "examples" / "first_steps" / "conversation.sh"
    run = subprocess.run(
        [script, stack.home / "dev.json"], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    page = (ROOT / "docs" / "conversation.md").read_text(encoding="utf-8")
    [printed] = re.findall(r"conversation\.sh \.tracelake/dev\.json\n(.*?)```", page, re.DOTALL)
    assert run.stdout == printed
