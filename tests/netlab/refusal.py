"""The one reason not to have a lab: this machine does not permit it."""

from __future__ import annotations

import os
import shutil
import sys
import unittest

TOOLS = ("ip", "tc", "unshare", "nsenter", "taskset")
SIGNS = ("not permitted", "not supported", "denied", "unknown", "read-only", "busy")


class NotPermitted(unittest.SkipTest):
    """A lab cannot be built here; the text says why. A test in which it is raised is skipped."""


def check_machine() -> None:
    if not sys.platform.startswith("linux"):
        raise NotPermitted("a lab needs Linux")
    if os.geteuid() != 0:
        raise NotPermitted("a lab needs root, to make namespaces and set links")
    missing = [tool for tool in TOOLS if not shutil.which(tool)]
    if missing:
        raise NotPermitted(f"a lab needs {', '.join(missing)} (iproute2 and util-linux)")


def failure(doing: str, said: str) -> Exception:
    """The machine's refusal is told from our own mistakes by what the tool says."""
    text = f"{doing}: {said.strip()}"
    refused = any(sign in said.lower() for sign in SIGNS)
    return NotPermitted(text) if refused else RuntimeError(text)
