"""Host files: the machines of a run without a queueing system, one `worker-1 slots=4` a line.

Strict where other readers guess: what is not understood is an error, never a smaller run. Pure;
launch/hosts.py reads them.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_LINE = re.compile(r"(?:([A-Za-z0-9_][\w.-]*)@)?(\S+)\s+slots=([0-9]+)", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*", re.ASCII)


class HostFileError(ValueError):
    """All faults of a host file, one a line."""


@dataclass(frozen=True)
class Host:
    """A machine."""

    address: str
    """Its name or IP address, without user and brackets."""
    slots: int
    """Processes on it."""
    user: str | None = None
    """Who logs in there; None: as ssh decides."""

    @property
    def login(self) -> str:
        """What ssh is given."""
        return self.address if self.user is None else f"{self.user}@{self.address}"

    @property
    def is_loopback(self) -> bool:
        """Whether the address means another machine on each machine."""
        if self.address.lower() in ("localhost", "localhost.localdomain"):
            return True
        try:
            return ipaddress.ip_address(self.address).is_loopback
        except ValueError:
            return False


def read_hosts(path: Path) -> list[Host]:
    """The hosts in the order of the file; `#` begins a comment, blank lines mean nothing.

    HostFileError with every bad line's number and text; also where the file is missing or empty.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise HostFileError(f"{path}: can't be read as a host file: {error}") from error
    faults: list[str] = []
    hosts: list[Host] = []
    lines: dict[str, int] = {}
    for number, line in _lines(text):
        host = _host(line)
        if isinstance(host, str):
            faults.append(f"{path}: line {number}: {line!r}: {host}")
        elif (key := host.address.lower()) in lines:
            faults.append(f"{path}: line {number}: {line!r}: the host of line {lines[key]} again")
        else:
            lines[key] = number
            hosts.append(host)
    if not hosts and not faults:
        faults.append(f"{path}: no host in it; a line is like: worker-1 slots=4")
    if faults:
        raise HostFileError("\n".join(faults))
    return hosts


def _lines(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.partition("#")[0].strip()
        if content:
            yield number, content


def _host(line: str) -> Host | str:
    """The host of a line, or what is wrong with it."""
    match = _LINE.fullmatch(line)
    if match is None:
        return "must be like `worker-1 slots=4` or `user@10.0.0.7 slots=4`"
    user, address, slots = match[1], match[2], int(match[3])
    if slots < 1:
        return "slots must be at least 1"
    if address.startswith("[") and address.endswith("]"):
        address = address[1:-1]
    try:
        # One spelling for each address, so that a host which is named twice is found.
        address = str(ipaddress.ip_address(address))
    except ValueError:
        if _NAME.fullmatch(address) is None:
            return f"{address!r} is neither the name of a host nor an IP address"
    return Host(address, slots, user)
