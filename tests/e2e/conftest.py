"""One running stack for the tests that only talk to it."""

from collections.abc import Iterator

import pytest

from tests.support.dev_stack import DevStack


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevStack]:
    folder = tmp_path_factory.mktemp("stack")
    stack = DevStack(folder / "home", folder / "output")
    try:
        stack.until_ready()
        yield stack
    finally:
        stack.close()
