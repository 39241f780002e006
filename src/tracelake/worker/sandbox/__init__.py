"""The sandbox for untrusted code: bubblewrap, a system call filter, limits, and a gateway as the only way out."""

from tracelake.worker.sandbox.check import SandboxProblem, SandboxReport
from tracelake.worker.sandbox.process import SandboxedProcess
from tracelake.worker.sandbox.sandbox import Sandbox
from tracelake.worker.sandbox.spec import (
    EndReason,
    ReadOnlyBind,
    SandboxExit,
    SandboxLimits,
    SandboxSpec,
)

__all__ = [
    "EndReason",
    "ReadOnlyBind",
    "Sandbox",
    "SandboxExit",
    "SandboxLimits",
    "SandboxProblem",
    "SandboxReport",
    "SandboxSpec",
    "SandboxedProcess",
]
