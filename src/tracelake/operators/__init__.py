"""Operators: the code that a job runs, and the small API that it is written against.

    from tracelake.operators import Context, operator

    @operator("my_operator")
    def my_operator(ctx: Context) -> None: ...

A worker finds operators by name: the built-in ones, those that installed packages offer under the entry point
group ``tracelake.operators``, and those in the files or modules that it is given with ``--operators``.
Importing this package imports neither Spark nor Arrow: an operator pays for what it uses.
"""

from tracelake.contracts.dispatcher_api import InputFile
from tracelake.domain.operators.spec import Need, OperatorSpec, Setting
from tracelake.operators.context import Context
from tracelake.operators.inputs import Input
from tracelake.operators.outputs import Output
from tracelake.operators.registry import Operator, operator

__all__ = [
    "Context",
    "Input",
    "InputFile",
    "Need",
    "Operator",
    "OperatorSpec",
    "Output",
    "Setting",
    "operator",
]
