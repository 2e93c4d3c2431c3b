"""The data tools as a user starts them: flags, exit codes, streams, signals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from megatron_lite.data.indexed_builder import IndexedDatasetBuilder
from megatron_lite.data.indexed_dataset import IndexedDataset
from megatron_lite.data.tokenizer import build_tokenizer

REPOSITORY = Path(__file__).resolve().parents[3]
TOOLS = (
    *("make_corpus", "train_tokenizer", "preprocess_data", "preprocess_chat"),
    *("merge_datasets", "inspect_data"),
)


def _command(tool: str, *arguments: object) -> list[str]:
    return [sys.executable, f"tools/{tool}.py", *map(str, arguments)]


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}


def _run(tool: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        _command(tool, *arguments),
        cwd=REPOSITORY,
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("tool", TOOLS)
def test_help_and_bad_usage(tool: str) -> None:
    helped = _run(tool, "--help")
    assert helped.returncode == 0 and helped.stdout.startswith("usage:")
    refused = _run(tool, "--no-such-flag")
    assert refused.returncode == 2 and "usage:" in refused.stderr
    assert "Traceback" not in refused.stderr and refused.stdout == ""


def test_no_tool_imports_torch() -> None:
    modules = (
        "corpus sentencepiece_training bpe_training columnar preprocess inspection "
        "tokenizer_files tool_runner build chat merge provenance training_order"
    )
    names = ", ".join(f"megatron_lite.data.{name}" for name in modules.split())
    code = f"import sys, {names}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=_environment()).returncode == 0


def test_from_conversations_to_packs(tmp_path: Path) -> None:
    line = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'
    source = tmp_path / "chat.jsonl"
    flags = ["--input", source, "--output-prefix", tmp_path / "out", "--seq-length", 64]
    flags += ["--tokenizer-type", "ByteTokenizer", "--chat-template", "plain"]
    source.write_text(f"{line}\n{{}}\n")
    refused = _run("preprocess_chat", *flags)
    assert refused.returncode == 2 and "chat.jsonl: line 2: field 'messages'" in refused.stderr
    assert "Traceback" not in refused.stderr and not list(tmp_path.glob("out*"))
    source.write_text(f"{line}\n{line}\n{line}\n")
    made = _run("preprocess_chat", *flags)
    assert made.returncode == 0 and "3 conversations, 81 tokens, 6 of them" in made.stdout
    for prefix in ("out_messages_document", "out_messages_document_loss_mask"):
        assert "documents    2" in _run("inspect_data", tmp_path / prefix).stdout


def test_from_text_to_inspection(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "hello"}\n{"text": ""}\n{"text": "world"}\n')
    made = _run(
        *("preprocess_data", "--input", source, "--output-prefix", tmp_path / "new/c"),
        *("--tokenizer-type", "ByteTokenizer", "--append-eod", "--workers", 2, "--log-interval", 1),
    )
    assert made.returncode == 0, made.stderr
    assert "special tokens: begin of document no, end of document yes" in made.stdout
    assert "text: 2 documents, 12 tokens (uint16)" in made.stdout
    assert "empty documents dropped: 1" in made.stdout
    assert re.search(
        r"processed 3 documents, 0.0 of 0.0 MB, [\d.]+ MB/s, \d+ documents/s, \d+ tokens/s, "
        r"00:00 left",
        made.stderr,
    )
    assert "engine: native (gigatoken is used for byte-level BPE only)" in made.stdout
    assert "4 to          7 tokens            2  ####" in made.stdout
    shown = _run(
        *("inspect_data", tmp_path / "new/c_text_document", "--check", "--show", 2),
        *("--tokenizer-type", "ByteTokenizer"),
    )
    assert shown.returncode == 0, shown.stderr
    assert "'hello'" in shown.stdout and "'world'" in shown.stdout
    assert "token range  100 to 256" in shown.stdout and "passed" in shown.stdout


def test_merging_and_comparing(tmp_path: Path) -> None:
    for name, tokens in (("a", [1, 2]), ("b", [3])):
        with IndexedDatasetBuilder(tmp_path / "in" / name, "<u2") as builder:
            builder.add_document(tokens)
            builder.finalize()
    merged = _run("merge_datasets", "--input", tmp_path / "in", "--output-prefix", tmp_path / "c")
    assert merged.returncode == 0, merged.stderr
    assert f"{tmp_path}/c: 2 documents, 3 tokens (uint16) of 2 pairs" in merged.stdout
    one = _run("inspect_data", tmp_path / "c", "--diff", tmp_path / "in/a", "--check")
    assert one.returncode == 1 and "documents: 2, 1" in one.stderr
    same = _run("inspect_data", tmp_path / "c", "--diff", tmp_path / "c", "--vocab-size", 4)
    assert same.returncode == 0 and f"equal to {tmp_path}/c" in same.stdout
    small = _run("inspect_data", tmp_path / "c", "--check", "--vocab-size", 3)
    assert small.returncode == 2 and "token id 3, but the vocabulary has 3" in small.stderr


def test_a_faulty_question_about_an_iteration_is_told(tmp_path: Path) -> None:
    config = tmp_path / "run.json"
    config.write_text("{}")
    for arguments, told in (
        ((), "give a prefix, or --which-documents"),
        (("--which-documents", config), "needs --iteration N"),
        (("--which-documents", config, "--iteration", 2, "--check"), "are for a prefix"),
        (("x", "--iteration", 2), "are for --which-documents"),
        (("x", "--tokenizer-model", "y"), "need --tokenizer-type"),
        (("--which-documents", config, "--iteration", 2), "is required"),
        (("--which-documents", config, "--iteration", 2, "--load", tmp_path), "no checkpoint bef"),
    ):
        refused = _run("inspect_data", *arguments)
        assert refused.returncode == 2 and told in refused.stderr
        assert "Traceback" not in refused.stderr


def test_train_tokenizer_is_quiet(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("".join(f'{{"body": "some text {n} and {n * n}"}}\n' for n in range(300)))
    trained = _run(
        *("train_tokenizer", "--input", source, "--output", tmp_path / "t.model"),
        *("--vocab-size", 290, "--json-key", "body", "--model-type", "bpe"),
    )
    assert trained.returncode == 0 and trained.stderr == ""
    assert trained.stdout.count("\n") == 1
    assert (tmp_path / "t.model").stat().st_size > 1000


def test_byte_level_bpe_from_a_folder_of_texts(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(20):
        text = "".join(f"text {number} and {line * number} <|endoftext|>\n" for line in range(9))
        (tmp_path / f"texts/{number:02}.txt").write_text(text)
    trained = _run(
        *("train_tokenizer", "--input", tmp_path / "texts", "--output", tmp_path / "t.json"),
        *("--vocab-size", 280, "--model-type", "byte-level-bpe"),
    )
    assert trained.returncode == 0, trained.stderr
    made = _run(
        *("preprocess_data", "--input", tmp_path / "texts", "--output-prefix", tmp_path / "out/c"),
        *("--tokenizer-type", "HFTokenizer", "--tokenizer-model", tmp_path / "t.json"),
        *("--tokenizer-engine", "gigatoken", "--check-every", 1, "--append-eod"),
    )
    assert made.returncode == 0, made.stderr
    assert "engine: gigatoken 0.10.0" in made.stdout
    dataset = IndexedDataset(tmp_path / "out/c_text_document")
    tokenizer = build_tokenizer("HFTokenizer", model=str(tmp_path / "t.json"))
    assert len(dataset) == 20 and tokenizer.eod is not None
    text = (tmp_path / "texts/03.txt").read_text()
    assert dataset[3].tolist() == [*tokenizer.tokenize(text), tokenizer.eod]


def test_preprocessing_loads_only_what_it_needs() -> None:
    code = "import sys, megatron_lite.data.preprocess as p; print(*sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", code], env=_environment(), capture_output=True, text=True, check=True
    )
    slow = {"torch", "datasets", "pyarrow", "transformers", "gigatoken", "sentencepiece"}
    assert not slow & set(ran.stdout.split())


def test_the_benchmark_runs() -> None:
    ran = subprocess.run(
        [sys.executable, "tests/benchmarks/preprocess.py", "--quick"],
        cwd=REPOSITORY,
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout.splitlines()[-1])
    assert told["quick"] is True and len(told["mb_per_s"]) == 9
    ratios = "hf_bpe_vs_gigatoken hf_bpe_vs_tokenizers sp_bpe_vs_raw sp_unigram_vs_raw"
    assert all(told[name] > 0 for name in f"{ratios} hf_vs_datasets_map peak_rss_mb".split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("inspect_data", "/nowhere/x"), "/nowhere/x.idx: no such file"),
        (("make_corpus", "--output", "/proc/x/y.jsonl"), "/proc/x/y.jsonl: can't be written"),
        (
            ("train_tokenizer", "--input", "/nowhere/x", "--output", "y"),
            "/nowhere/x: no such file",
        ),
        (
            (
                *["preprocess_data", "--input", "/nowhere/x", "--output-prefix", "y"],
                "--tokenizer-type",
                "ByteTokenizer",
            ),
            "/nowhere/x: no such file",
        ),
        (
            [
                "preprocess_data",
                "--input",
                "x",
                "--output-prefix",
                "y",
                "--tokenizer-type",
                "Unknown",
            ],
            "invalid choice",
        ),
    ],
)
def test_bad_input_is_two_without_a_traceback(arguments: tuple[str, ...], message: str) -> None:
    result = _run(*arguments)
    assert result.returncode == 2
    assert message in result.stderr and "Traceback" not in result.stderr


def test_b04_a_bad_line_ends_with_code_2(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "hello"}\n{"text": \n')
    result = _run(
        *("preprocess_data", "--input", source, "--output-prefix", tmp_path / "out/c"),
        *("--tokenizer-type", "ByteTokenizer", "--workers", 2),
    )
    assert result.returncode == 2
    assert f"{source}: line 2: not a whole JSON object" in result.stderr
    assert "Traceback" not in result.stderr
    assert list((tmp_path / "out").iterdir()) == []


def _heed_interrupts() -> None:
    """A suite that a shell started in the background ignores SIGINT, and so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _long_run(folder: Path, out: str = "out/c") -> list[str]:
    """Return the command of a run of several seconds with two workers."""
    source = folder / "long.jsonl"
    if not source.exists():
        lines = (f'{{"text": "{number % 9} ' + "1 2 3 " * 200 + '"}\n' for number in range(5_000))
        source.write_text("".join(lines))
    return _command(
        *("preprocess_data", "--input", source, "--output-prefix", folder / out),
        *("--tokenizer-type", "NullTokenizer", "--vocab-size", 9, "--workers", 2),
    )


def _start(command: list[str], folder: Path) -> subprocess.Popen[str]:
    """Start a long run and wait until it has something to lose."""
    process = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=_heed_interrupts,
    )
    documents = folder / "out/c.preprocess/0.sequences"
    for _ in range(2):  # when the second block is there, the first one counts as work
        size = documents.stat().st_size if documents.exists() else 0
        _wait_until(lambda size=size: documents.exists() and documents.stat().st_size > size)
    return process


def _pair(prefix: Path) -> list[bytes]:
    return [Path(f"{prefix}_text_document.{end}").read_bytes() for end in ("bin", "idx")]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_b07_an_interrupted_run_goes_on(tmp_path: Path, number: int, code: int) -> None:
    command = _long_run(tmp_path)
    with _start(command, tmp_path) as process:
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) == 2
        os.killpg(process.pid, number)  # as Ctrl-C does: parent and workers
        _, errors = process.communicate(timeout=30)
    assert process.returncode == code
    assert "Traceback" not in errors
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["c.preprocess"]
    assert not any(child.is_running() for child in children)
    committed = json.loads((tmp_path / "out/c.preprocess/committed.json").read_text())
    assert 0 < committed["state"]["position"]["block"] < 6
    again = subprocess.run(command, cwd=REPOSITORY, env=_environment(), timeout=60)
    whole = subprocess.run(_long_run(tmp_path, "whole/c"), cwd=REPOSITORY, env=_environment())
    assert (again.returncode, whole.returncode) == (0, 0)
    assert _pair(tmp_path / "out/c") == _pair(tmp_path / "whole/c")
    assert len(list((tmp_path / "out").iterdir())) == 2


def test_b07_workers_go_with_a_killed_parent(tmp_path: Path) -> None:
    with _start(_long_run(tmp_path), tmp_path) as process:
        children = psutil.Process(process.pid).children()
        assert len(children) == 2
        process.kill()
        process.wait(timeout=30)
        _wait_until(lambda: not any(map(_alive, children)))
    assert not list((tmp_path / "out").glob("*.idx"))


def _alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
