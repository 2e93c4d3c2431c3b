"""B47: what a host file may hold, and that nothing else is taken for a smaller run."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_lite.hostfile import Host, HostFileError, read_hosts


def test_blanks_comments_tabs_and_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_bytes(
        b"\xef\xbb\xbf# the cluster\r\n\r\n  \t \r\nworker-2\tslots=2\r\n"
        b"worker-1   slots=4  # a new one\r\n\tme@10.0.0.7 slots=1\r\n"
        b"[fe80::00:1] slots=3\nroot@2001:db8::2 slots=8"
    )
    hosts = read_hosts(path)
    assert hosts == [
        Host("worker-2", 2),
        Host("worker-1", 4),
        Host("10.0.0.7", 1, "me"),
        Host("fe80::1", 3),
        Host("2001:db8::2", 8, "root"),
    ]
    assert [host.login for host in hosts][2:] == ["me@10.0.0.7", "fe80::1", "root@2001:db8::2"]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("worker slots=0", "slots must be at least 1"),
        ("worker slots=x", "must be like"),
        ("worker slots=-1", "must be like"),
        ("worker slot=4", "must be like"),
        ("worker slots = 4", "must be like"),
        ("worker", "must be like"),
        ("worker slots=4 gpus=2", "must be like"),
        ("worker slots=٤", "must be like"),
        ("worker:22 slots=4", "neither the name of a host nor an IP address"),
        ("-oProxyCommand=evil slots=4", "neither the name"),
        ("me@-w slots=4", "neither the name"),
        ("a;b slots=4", "neither the name"),
    ],
)
def test_a_bad_line_is_told_with_its_number_and_text(line: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(f"# first\nworker-1 slots=4\n{line}  # why\n\nworker-9\n")
    with pytest.raises(HostFileError) as error:
        read_hosts(path)
    first, second = str(error.value).splitlines()
    assert first.startswith(f"{path}: line 3: {line!r}: ") and told in first
    assert second.startswith(f"{path}: line 5: 'worker-9'"), "all faults at once"


@pytest.mark.parametrize(
    ("one", "other"),
    [("a", "a"), ("a", "me@A"), ("::1", "[0:0::1]"), ("me@a", "you@a")],
)
def test_a_host_that_is_named_twice(one: str, other: str, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(f"{one} slots=1\nb slots=1\n{other} slots=1\n")
    with pytest.raises(HostFileError, match=r"line 3: .*: the host of line 1 again"):
        read_hosts(path)


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(HostFileError, match=r"nowhere: can't be read as a host file"):
        read_hosts(tmp_path / "nowhere")
    with pytest.raises(HostFileError, match="can't be read"):
        read_hosts(tmp_path)
    (tmp_path / "empty").write_text("# nobody\n\n")
    with pytest.raises(HostFileError, match="no host in it"):
        read_hosts(tmp_path / "empty")


def test_addresses_that_mean_another_machine_on_each() -> None:
    names = ("localhost", "127.0.0.1", "::1", "worker", "10.0.0.7")
    assert [Host(name, 1).is_loopback for name in names] == [True, True, True, False, False]
