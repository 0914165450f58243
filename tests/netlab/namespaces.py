"""A machine that is none: namespaces that last as long as a pipe from this process is open."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Sequence

from netlab.refusal import failure

KINDS = ("net", "mount", "uts", "ipc", "pid")

# The node's first process. It ends with its standard input, and the kernel then kills all in it.
# No name server may be asked; IPv6 is off, or Gloo might take a link-local address.
HOLD = """
set -e
echo "$1" > /proc/sys/kernel/hostname
mount -t tmpfs netlab /dev/shm
printf %s "$2" > /dev/shm/hosts
mount --bind /dev/shm/hosts /etc/hosts
if [ -e /etc/resolv.conf ]; then mount --bind /dev/null /etc/resolv.conf; fi
for file in /proc/sys/net/ipv6/conf/*/disable_ipv6; do
    if [ -e "$file" ]; then echo 1 > "$file"; fi
done
echo ready
exec cat > /dev/null
"""


class Box:
    """Namespaces of one node; tools can be run in them."""

    def __init__(self, holder: int) -> None:
        self.holder = holder  # in the namespaces, all but the pid one: that one is its child's

    def enter(self, command: Sequence[str], kinds: Sequence[str] = KINDS) -> list[str]:
        """A command line that runs `command` inside, as the node's own process."""
        own = f"/proc/{self.holder}/ns/"
        files = {"mount": "mnt", "pid": "pid_for_children"}
        return ["nsenter", *(f"--{kind}={own}{files.get(kind, kind)}" for kind in kinds), *command]

    def batch(self, tool: str, lines: Sequence[str]) -> None:
        """Have `ip` or `tc` do several things in this network."""
        done = subprocess.run(
            self.enter([tool, "-batch", "-"], ["net"]), input="\n".join(lines) + "\n",
            capture_output=True, text=True, timeout=120, check=False,
        )
        if done.returncode:
            raise failure(f"{tool} {lines}", done.stderr or done.stdout)

    def signal(self, number: int) -> None:
        """Send a signal to everything that runs in the node, at once."""
        # -1 is all that the shell can see but itself and the holder: so it must see the node only
        subprocess.run(
            self.enter(["sh", "-c", f"kill -{number} -1"], ["mount", "pid"]),
            stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=120, check=False,
        )


@contextlib.contextmanager
def held(name: str, hosts: str) -> Iterator[Box]:
    """A box that closes, with everything in it, at the end or when this process is gone."""
    new = [f"--{kind}" for kind in KINDS]
    command = ["unshare", *new, "--fork", "--kill-child", "--mount-proc"]
    holder = subprocess.Popen(
        [*command, "sh", "-c", HOLD, "sh", name, hosts],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True, text=True,
    )
    try:
        if holder.stdout and holder.stdout.readline() != "ready\n":
            raise failure(f"the namespaces of {name}", holder.communicate(timeout=120)[1])
        yield Box(holder.pid)
    finally:
        holder.communicate(timeout=120)
