"""Data, output folder, checks and report of the training command, each on its own."""

import abc
import argparse
import inspect
import itertools
import sys

import pytest
import torch

from moe_patch.errors import UnsupportedOptionError
from moe_patch.train import checks, data, report
from moe_patch.train.config import DataConfig
from moe_patch.train.loop import Trained
from moe_patch.train.output import MARKER, OutputFolder
from tests.support.train_nodes import TEXT


def test_docstrings_are_the_librarys():
    """Read the docstrings of the first files, in order.

    test_quickstart_scaled_down reads the whole standard library.
    """
    texts = list(itertools.islice(data.stdlib_docstrings(), 700))
    assert inspect.cleandoc(abc.__doc__) in texts
    assert inspect.cleandoc(argparse.ArgumentParser.__doc__) in texts
    assert texts == list(itertools.islice(data.stdlib_docstrings(), 700))


def test_text_and_jsonl(tmp_path):
    text = tmp_path / "a.md"
    text.write_text("one\n\ntwo\n")
    rows = tmp_path / "a.jsonl"
    rows.write_text('{"body": "one"}\n\n{"body": " "}\n{"body": "two"}\n')
    assert data.read_texts(DataConfig(str(text))) == ["one\n\ntwo\n"]
    assert data.read_texts(DataConfig(str(rows), text_field="body")) == ["one", "two"]


ROWS = '{"text": "one\u2028more"}\r\n\r\n{"text": "two é"}\r\n'


@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "BOM"])
@pytest.mark.parametrize(
    ("name", "content", "texts"),
    [
        ("a.txt", "one\r\ntwo é\r", ["one\ntwo é\n"]),
        ("a.jsonl", ROWS, ["one\u2028more", "two é"]),
        ("a.json", ROWS, ["one\u2028more", "two é"]),
        ("a.json", '[{"text": "one"},\r\n {"text": "two é"}]', ["one", "two é"]),
    ],
)
def test_a_byte_order_mark_and_any_line_ends_are_read(tmp_path, mark, name, content, texts):
    (tmp_path / name).write_bytes((mark + content).encode())
    assert data.read_texts(DataConfig(str(tmp_path / name))) == texts


@pytest.mark.parametrize("name", ["a.txt", "a.json", "a.jsonl"])
@pytest.mark.parametrize(
    ("encoding", "message"),
    [
        ("utf-16", "it is UTF-16; accepted: UTF-8"),
        ("utf-32", "it is UTF-32; accepted: UTF-8"),
        ("utf-16-le", "byte 1 is zero, as in UTF-16"),
        ("latin-1", "it is not UTF-8"),
    ],
)
def test_other_encodings_are_refused_by_name(tmp_path, name, encoding, message):
    text = '{"text": "one é"}' if encoding == "latin-1" else '{"text": "one"}'
    (tmp_path / name).write_bytes(text.encode(encoding))
    with pytest.raises(UnsupportedOptionError, match=message):
        data.read_texts(DataConfig(str(tmp_path / name)))


BAD_ROWS = [
    ('{"text": "a"}\n{"text": \n', "line 2"),
    ('{"text": "a"}\n{"body": "b"}\n', "line 2: no text in the field 'text'"),
    ('{"text": 3}\n', "line 1: no text"),
    ("[1]\n", "line 1: no text"),
    ('{"text": ""}\n', "holds no text"),
]


@pytest.mark.parametrize(("rows", "message"), BAD_ROWS)
def test_bad_jsonl(tmp_path, rows, message):
    path = tmp_path / "a.jsonl"
    path.write_text(rows)
    with pytest.raises(UnsupportedOptionError, match=message):
        data.read_texts(DataConfig(str(path)))


def test_bad_items_of_a_json_array_are_named(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('[{"text": "a"}, {"body": "b"}]')
    with pytest.raises(UnsupportedOptionError, match="item 2: no text in the field 'text'"):
        data.read_texts(DataConfig(str(path)))


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("a.txt", {"split": "validation"}),
        ("a.txt", {"subset": "wiki"}),
        ("a.txt", {"text_field": "body"}),
        ("a.jsonl", {"split": "validation"}),
        (data.DOCSTRINGS, {"text_field": "body"}),
    ],
)
def test_what_a_source_does_not_have_is_not_passed_over(tmp_path, name, given):
    path = tmp_path / name
    path.write_text('{"text": "one"}\n')
    source = name if name == data.DOCSTRINGS else str(path)
    ((option, value),) = given.items()
    with pytest.raises(UnsupportedOptionError, match=rf"data\.{option} is '{value}', but .* none"):
        data.read_texts(DataConfig(source, **given))


def test_missing_data_file_and_package(tmp_path, monkeypatch):
    with pytest.raises(UnsupportedOptionError, match="no such file"):
        data.read_texts(DataConfig(str(tmp_path / "none.jsonl")))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UnsupportedOptionError, match=r"pip install 'moe-patch\[train\]'"):
        data.read_texts(DataConfig("someone/something"))


def test_tokenizer_is_lossless_and_repeatable():
    texts = [TEXT, "zebra \u00e9\u4e16\U0001f600 \x00"]
    first, second = (data.train_tokenizer([TEXT], 300) for _ in range(2))
    assert first.get_vocab() == second.get_vocab()
    assert len(first) == 300
    for text in texts:
        assert first.decode(first(text)["input_ids"]) == text
    with pytest.raises(UnsupportedOptionError, match="at least 257"):
        data.train_tokenizer([TEXT], 256)


def test_blocks_hold_the_text_in_order():
    tokenizer = data.train_tokenizer([TEXT], 300)
    blocks = data.make_blocks(["abc", "de"] * 9, tokenizer, 8)
    joined = tokenizer.decode(blocks.ids_NL.flatten())
    assert (("abc" + data.END_OF_TEXT + "de" + data.END_OF_TEXT) * 9).startswith(joined)
    # 9 * 7 ids (letters and ends) fill 7 rows of 8.
    assert blocks.ids_NL.shape == (7, 8)
    assert torch.equal(blocks[2]["labels"], blocks.ids_NL[2])
    with pytest.raises(UnsupportedOptionError, match="do not fill one block"):
        data.make_blocks(["abc"], tokenizer, 8)


def test_output_appears_only_when_finished(tmp_path):
    output = OutputFolder(tmp_path / "a" / "out")
    output.check()
    assert not (tmp_path / "a").exists()
    with output.open() as folder:
        (folder / MARKER).write_text("{}")
        assert not output.path.exists()
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["out"]
    assert (output.path / MARKER).exists()


def fail_after_a_checkpoint(folder):
    (folder / "checkpoints" / "checkpoint-5").mkdir(parents=True)
    (folder / "checkpoints").mkdir()


def test_output_is_removed_after_an_error_but_not_checkpoints(tmp_path, capsys):
    output = OutputFolder(tmp_path / "out")
    with pytest.raises(ZeroDivisionError), output.open():
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileExistsError), output.open() as folder:
        fail_after_a_checkpoint(folder)
    assert str(output.partial) in capsys.readouterr().err
    for overwrite in (False, True):
        with pytest.raises(UnsupportedOptionError, match="holds checkpoints"):
            OutputFolder(tmp_path / "out", overwrite).check()


def test_output_of_a_killed_run_is_removed_when_asked(tmp_path):
    output = OutputFolder(tmp_path / "out")
    output.partial.mkdir()
    with pytest.raises(UnsupportedOptionError, match="left by an interrupted run"):
        output.check()
    again = OutputFolder(tmp_path / "out", overwrite=True)
    again.check()
    with again.open():
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_output_never_replaces_what_is_not_a_run(tmp_path):
    taken = tmp_path / "out"
    taken.mkdir()
    (taken / "thesis.tex").write_text("x")
    with pytest.raises(UnsupportedOptionError, match="not empty"):
        OutputFolder(taken).check()
    with pytest.raises(UnsupportedOptionError, match="left alone"):
        OutputFolder(taken, overwrite=True).check()
    (taken / MARKER).write_text("{}")
    output = OutputFolder(taken, overwrite=True)
    output.check()
    with output.open() as folder:
        (folder / "new").touch()
    assert [p.name for p in taken.iterdir()] == ["new"]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_output_does_not_replace_what_the_run_begins_with(tmp_path):
    output = OutputFolder(tmp_path / "out", overwrite=True)
    output.check(reads=tmp_path / "outside" / "checkpoint-2")
    with pytest.raises(UnsupportedOptionError, match="checkpoint-2 is inside it, and would be"):
        output.check(reads=str(tmp_path / "out" / "checkpoints" / "checkpoint-2"))


def test_unwritable_output(tmp_path):
    """A path below a file: permission bits would not stop root, which tests may run as."""
    (tmp_path / "file").touch()
    with pytest.raises(UnsupportedOptionError, match="cannot be written"):
        OutputFolder(tmp_path / "file" / "out").check()


def test_loss_check_finds_early_late_and_nan():
    base = dict.fromkeys(range(1, 31), 5.0)
    for change, expected in [
        ({}, [True, True]),
        ({3: 5.001}, [True, True]),
        (dict.fromkeys(range(1, 7), 5.001), [False, True]),
        ({25: 5.001}, [True, True]),
        ({25: 5.1}, [True, False]),
        ({25: float("nan")}, [True, False]),
        ({3: float("nan")}, [False, False]),
    ]:
        found = checks.compare_losses({**base, **change}, base, torch.float32)
        assert [check.passed for check in found] == expected, change
    assert not checks.compare_losses({1: 5.0}, {2: 5.0}, torch.float32)[0].passed


def test_first_step_apart_is_said():
    base = dict.fromkeys(range(1, 31), 5.0)
    assert checks.first_apart(base, base) == "losses equal to 1e-06 at all 30 steps"
    for value in (5.001, float("nan")):
        assert "before step 12;" in checks.first_apart({**base, 12: value, 20: 6.0}, base)


def test_logits_check():
    logits = torch.randn(2, 3, 5)
    assert checks.check_logits(logits, logits * (1 + 1e-6), torch.float32).passed
    assert not checks.check_logits(logits, logits * (1 + 1e-3), torch.float32).passed
    assert not checks.check_logits(logits, logits * float("nan"), torch.float32).passed


def test_loss_table_has_first_last_and_dashes():
    table = report.loss_table({s: float(s) for s in range(1, 101)}, {1: 1.0}).splitlines()
    assert table[1].split() == ["1", "1.0000000", "1.0000000"]
    assert table[-1].split() == ["100", "100.0000000", "-"]
    assert len(table) == 9


def test_missing_matplotlib_is_said(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    line = report.draw_losses(tmp_path / "a.png", {"patched": {1: 1.0}}, "t")
    assert "matplotlib is missing (pip install" in line
    assert not (tmp_path / "a.png").exists()


def test_the_time_told_leaves_the_first_steps_out_and_says_so():
    losses = dict.fromkeys(range(1, 11), 1.0)
    told = report.time_line("patched", Trained(losses, 9.0, steps=7, steady=2.1))
    assert told == (
        "patched: 10 losses logged, 2.1 s for 7 steps (300.0 ms each), without the 6.9 s of the "
        "start and the first 3 steps, which compile"
    )
    told = report.time_line("unpatched", Trained({1: 1.0}, 9.0))
    assert told == "unpatched: 1 losses logged, 9.0 s, first steps and compilation included"
