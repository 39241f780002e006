"""``noop`` as a function: does nothing, and by returning nothing says that its scope is done."""


def handler(event: object, context: object) -> None:
    return None
