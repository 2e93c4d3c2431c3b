"""Start a run on the hosts of a host file, one process a slot, through ssh and without a queue.

Not by deepspeed's launcher: it takes a host file that is not there for leave to run on this machine
alone, and puts values into a shell's command line within double quotes, where `$HOME` expands. Not
by torchrun either: it gives ranks half a minute to save when they are asked to leave, and turns
exit code 3 into 1. launch/node.py on each host is told what to do on its standard input, which also
is its life line: when this program or a connection is gone, the ranks of that host end.

Passed on, to the byte and expanded nowhere: the variables that --env names, PYTHONPATH, MASTER_ADDR
and MASTER_PORT. The same folder, code and interpreter are expected on every host.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import selectors
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_lite.config.errors import ConfigError
from megatron_lite.config.load import load_config
from megatron_lite.hostfile import Host, HostFileError, read_hosts
from megatron_lite.rendezvous import FIRST_PORT, PORTS

ROOT = Path(__file__).resolve().parents[1]
REFUSED, REQUEUE = 2, 3
SSH = "ssh -o BatchMode=yes -o ServerAliveInterval=5 -o ServerAliveCountMax=4"
GRACE = 28.0
"""Seconds that the other hosts have when one is lost; each kills what is left after 20."""
OWN = ("PYTHONPATH", "MASTER_ADDR", "MASTER_PORT")


class Refused(Exception):
    """The input is at fault."""


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path, help="JSON file that describes the run")
    parser.add_argument(
        "--hostfile", type=Path, required=True, help="lines such as `worker-1 slots=4`"
    )
    parser.add_argument("--run-dir", type=Path, help="default: runs/<config file's stem>")
    parser.add_argument(
        "--set", action="append", default=[], metavar="section.key=JSON", help="override a value"
    )
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME", help="pass this variable on"
    )
    parser.add_argument("--ssh-command", default=SSH, help=f"default: {SSH}")
    parser.add_argument("--python", default=sys.executable, help="interpreter on the hosts")
    parser.add_argument("--module", default="megatron_lite.train", help="what the ranks run")
    parser.add_argument("--dry-run", action="store_true", help="show what would be started")
    return parser.parse_args()


def main() -> int:
    """Run; returns the exit code."""
    args = parse()
    try:
        hosts = read_hosts(args.hostfile)
        ranks = sum(host.slots for host in hosts)
        load_config(args.config, args.set, ranks, check_files=True)
        orders = render(hosts, args, os.environ)
    except (ConfigError, HostFileError, Refused, OSError) as error:
        print(error, file=sys.stderr)
        return REFUSED
    command = [*shlex.split(args.ssh_command)]
    remote = f"exec {shlex.quote(args.python)} {shlex.quote(str(ROOT / 'launch/node.py'))}"
    for host, order in zip(hosts, orders, strict=True):
        last = order["first_rank"] + host.slots - 1
        print(f" {host.login} | ranks {order['first_rank']} to {last} of {ranks} |", flush=True)
    if args.dry_run:
        print(f" passed on: {', '.join(sorted(orders[0]['environment']))} |")
        print(f" {shlex.join([*command, 'HOST', remote])}")
        return 0
    return Job([[*command, host.login, remote] for host in hosts], orders).run()


def render(
    hosts: Sequence[Host], args: argparse.Namespace, env: Mapping[str, str]
) -> list[dict[str, Any]]:
    """What each host is told."""
    if unset := [name for name in args.env if name not in env]:
        raise Refused(f"--env {' '.join(unset)}: not set here")
    elsewhere = not all(host.is_loopback for host in hosts)
    if hosts[0].is_loopback and elsewhere and "MASTER_ADDR" not in env:
        raise Refused(
            f"{args.hostfile}: the ranks meet on the first host, but {hosts[0].address} means "
            "another machine on each of them: use its name in the network, or set MASTER_ADDR"
        )
    passed = {name: env[name] for name in (*args.env, *OWN) if name in env}
    passed["WORLD_SIZE"] = str(sum(host.slots for host in hosts))
    passed.setdefault("MASTER_ADDR", hosts[0].address)
    # Of two jobs at once each has its own; a third one's port may be taken, and that is told.
    passed.setdefault("MASTER_PORT", str(FIRST_PORT + random.randrange(PORTS)))
    run_dir = args.run_dir or Path("runs") / args.config.stem
    sets = [word for value in args.set for word in ("--set", value)]
    orders, first = [], 0
    for host in hosts:
        orders.append(
            {
                "host": host.address,
                "first_rank": first,
                "slots": host.slots,
                "folder": os.getcwd(),
                "run_dir": str(run_dir),
                "environment": passed,
                "module": args.module,
                "arguments": [str(args.config), "--run-dir", str(run_dir), *sets],
            }
        )
        first += host.slots
    return orders


class Job:
    """The connections to all hosts."""

    def __init__(self, commands: Sequence[Sequence[str]], orders: Sequence[dict[str, Any]]) -> None:
        self._commands, self._orders = commands, orders
        self._nodes: dict[int, tuple[str, subprocess.Popen[bytes]]] = {}
        self._codes: list[int] = []
        self._signals = 0
        self._ending = False
        self._deadline: float | None = None
        self._selector = selectors.DefaultSelector()

    def run(self) -> int:
        """Until all hosts have ended; returns the code of the first that failed, if any."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        self._selector.register(reader, selectors.EVENT_READ)
        for command, order in zip(self._commands, self._orders, strict=True):
            self._start(command, order)
        while self._nodes:
            left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
            events = self._selector.select(left)
            if not events:
                self._deadline = None
                for _, process in self._nodes.values():
                    process.kill()
            for key, _ in events:
                if key.fd == reader:
                    self._signalled(len(os.read(reader, 64)))
                else:
                    self._reap(key.fd)
        failed = [code for code in self._codes if code not in (0, REQUEUE)]
        return failed[0] if failed else max(self._codes)

    def _start(self, command: Sequence[str], order: dict[str, Any]) -> None:
        # In a session of its own Ctrl-C does not end the connection before the ranks have saved.
        process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        self._say(process, json.dumps(order))
        handle = os.pidfd_open(process.pid)
        self._nodes[handle] = (order["host"], process)
        self._selector.register(handle, selectors.EVENT_READ)

    def _say(self, process: subprocess.Popen[bytes], line: str) -> None:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the loop learns in a moment that it has ended
            process.stdin.write(f"{line}\n".encode())
            process.stdin.flush()

    def _signalled(self, count: int) -> None:
        """The first signal asks all ranks to save and leave, another one ends them."""
        self._signals += count
        if self._signals > 1:
            self._end()
            return
        for _, process in self._nodes.values():
            self._say(process, "leave")

    def _reap(self, handle: int) -> None:
        self._selector.unregister(handle)
        os.close(handle)
        host, process = self._nodes.pop(handle)
        code = process.wait()
        self._codes.append(code if code >= 0 else 128 - code)
        if code not in (0, REQUEUE) and not self._ending:
            print(f"{host}: ended with code {code}", file=sys.stderr, flush=True)
            self._end()

    def _end(self) -> None:
        self._ending, self._deadline = True, time.monotonic() + GRACE
        for _, process in self._nodes.values():
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()


if __name__ == "__main__":
    sys.exit(main())
