"""A slot's process starts without pandas, which pyarrow would load with its first value."""

import subprocess
import sys

PROGRAM = """
import sys
from tracelake.query.engine import boot
try:
    boot.main()
except IndexError:
    pass  # the setup is missing: everything is loaded, nothing has run
import pyarrow
assert "tracelake.query.engine.child" in sys.modules
print(pyarrow.scalar(1).as_py(), "pandas" in sys.modules)
"""


def test_a_slots_process_never_loads_pandas() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split() == ["1", "False"]
