"""The row of `poplar pair`: what it may contain, its headline and table; the sizes of models."""

from __future__ import annotations

import getpass
import platform
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import pairs
from typer.testing import CliRunner

from poplar.cli.app import app
from poplar.pair.cards import peer_to_peer
from poplar.pair.llama import SIZES, Llama, chosen_sizes
from poplar.pair.row import EVEN, NAMES, PLANNED, Card, CaseResult, PairRow

TEXTS = {
    "name": r"[\w .()@+-]{1,60}",
    "compute_capability": r"(\d+\.\d)?",
    "links": r"(NVLink( \d)? x\d+|PCIe \d x\d+( \(of x\d+\))?)",
    "emulated": r"([\w :.-]{1,40})?",
    "poplar": r"\d+\.\d+\.\d+\w*",
    "commit": r"[0-9a-f]{7,40}(-dirty)?",
    "torch": r"[\d.]+(\.dev\d+)?(\+\w+)?",
    "CUDA": r"[\d.]+",
    "NCCL": r"[\d.]+",
    "driver": r"[\d.]+",
    "model": r"[\w.]+",
    "training": r"full|LoRA",
    "dtype": r"float32|float16|bfloat16",
    "missing": r"(not tried: (plain passes|planning) )?(did not fit|failed: \w+)",
}
"""Of each field with text, what it may be."""
NUMBERS = {
    *("version", "memory_gib", "peer_to_peer", "hosts", "context", "global_batch", "stage"),
    *("micro_batches", "shares", "solo_speeds", "speeds", "rounds"),
}
PARTS = {"cards", "versions", "cases"}


def check_is_public(row: dict[str, Any]) -> None:
    """Every field is known, and none has a text that may name a host, a user or a place."""
    for field, value in leaves(row):
        if isinstance(value, str):
            assert re.fullmatch(TEXTS[field], value), f"{field}: {value!r}"
            for private in (platform.node(), getpass.getuser(), str(Path.home())):
                assert not re.search(rf"\b{re.escape(private)}\b", value)
        else:
            assert field in NUMBERS


def leaves(value: Any, field: str = "") -> Any:
    """Every value with the name of its field; engines are under the field that they are in."""
    if isinstance(value, dict):
        for name, part in value.items():
            if field in ("speeds", "missing"):
                assert name in NAMES
                yield from leaves(part, field)
            else:
                assert name in TEXTS.keys() | NUMBERS | PARTS
                yield from leaves(part, name)
    elif isinstance(value, list):
        for part in value:
            yield from leaves(part, field)
    else:
        yield field, value


def case(**changes: Any) -> CaseResult:
    values = {
        "model": "1.1B",
        "training": "full",
        "dtype": "bfloat16",
        "context": 1024,
        "global_batch": 32,
        "stage": 2,
        "micro_batches": ((4, 4), (12, 12)),
        "shares": (0.4, 0.6),
        "solo_speeds": (10.0, 30.0),
        "speeds": {PLANNED: 38.0, EVEN: 20.0, "ddp": 18.0},
        "missing": {"fsdp2": "did not fit"},
        "rounds": 5,
    }
    return CaseResult(**{**values, **changes})


CARDS = tuple(
    Card(name=name, memory_gib=23.6, compute_capability="8.6", links=("PCIe 4 x8 (of x16)",))
    for name in ("NVIDIA GeForce RTX 3090", "NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 3090")
)
ROW = PairRow(
    cards=CARDS,
    peer_to_peer=False,
    hosts=1,
    emulated="",
    versions={"poplar": "0.1.0", "torch": "2.13.0+cu130", "driver": "580.65.06"},
    cases=(case(), case(training="LoRA", speeds={}, stage=None, micro_batches=())),
)


def test_headline_has_the_part_of_the_sum_first():
    assert str(ROW).splitlines()[-1] == (
        "2 x GeForce RTX 3090 + GeForce RTX 4090: 95 % of the sum of solo speeds, 1.90x an equal "
        "split (median of 1 cases)"
    )
    assert replace(ROW, cases=ROW.cases[1:]).headline.endswith("RTX 4090: no plan fits")


def test_table_says_why_an_engine_has_no_figure():
    header, full, lora = ROW.table()
    assert header[4:6] == ("of the sum of solo speeds", "over an equal split")
    assert full == (
        *("1.1B", "full", "2", "8 : 24", "95 %", "1.90x", "50 %", "45 %", "did not fit"),
    )
    assert lora == ("1.1B", "LoRA", *("–",) * 6, "did not fit")


def test_row_is_read_back_and_public(tmp_path):
    ROW.to_json(tmp_path / "row.json")
    assert PairRow.from_json(tmp_path / "row.json") == ROW
    check_is_public(ROW.to_dict())


def test_private_text_is_found():
    for changed in (
        replace(ROW, emulated="/home/someone"),
        replace(ROW, versions={"commit": "fix-of-someone"}),
        replace(ROW, cases=(case(missing={"ddp": "failed: at 10.0.0.7"}),)),
        replace(ROW, cards=(replace(CARDS[0], links=("GPU-8f6e",)),)),
    ):
        with pytest.raises(AssertionError):
            check_is_public(changed.to_dict())


def test_saved_rows_are_public_and_the_page_is_made_of_them():
    for path in pairs.ROWS.glob("*.json"):
        check_is_public(PairRow.from_json(path).to_dict())
    page = Path(__file__).parents[2] / "docs" / "pairs.md"
    assert page.read_text("utf-8") == "\n".join(pairs.page(pairs.read())).rstrip() + "\n"


@pytest.mark.parametrize(
    ("access", "expected"),
    [
        (({"b": True}, {"a": True}), True),
        (({"b": True}, {"a": False}), False),
        (({}, {}), None),  # on hosts that do not see each other's cards
        (({"b": True}, {}), None),
    ],
)
def test_peer_to_peer_is_between_all_cards(access, expected):
    ranks = [
        SimpleNamespace(device=SimpleNamespace(uuid=uuid), peer_access=own)
        for uuid, own in zip("ab", access, strict=True)
    ]
    assert peer_to_peer(ranks) is expected


def test_page_and_picture_of_cards(tmp_path):
    text = "\n".join(pairs.page([ROW]))
    assert "No row of GPUs" not in text
    assert "95 % of the sum of solo speeds, 1.90x an equal split (median of 1 cases).\n" in text
    assert "peer-to-peer access: no; poplar 0.1.0, torch 2.13.0+cu130" in text
    pairs.draw([ROW], tmp_path / "pairs.svg")
    assert "GeForce RTX 4090" in (tmp_path / "pairs.svg").read_text()


@pytest.mark.parametrize(("gib", "names"), [(5, "75M 160M"), (16, "160M 370M"), (79, "1.1B")])
def test_sizes_fit_the_smallest_card(gib, names):
    sizes = chosen_sizes("full", gib << 30)
    assert " ".join(size.name for size in sizes)[-len(names) :] == names
    assert all(16.0 * size.numel < 0.6 * (gib << 30) for size in sizes)
    for size in sizes:
        model = Llama(size, torch.device("meta"), torch.float32)
        assert sum(parameter.numel() for parameter in model.parameters()) == size.numel
    larger = chosen_sizes("LoRA", gib << 30)
    assert SIZES.index(larger[-1]) > SIZES.index(sizes[-1])


def test_card_that_holds_no_size_is_named():
    with pytest.raises(ValueError, match=r"smallest card has 1\.0 GiB free, .* needs 1\.8 GiB"):
        chosen_sizes("full", 1 << 30)


def test_command_without_a_gpu_says_so():
    result = CliRunner().invoke(app, ["pair", "--device", "cuda"])
    assert result.exit_code == 1
    assert "torch finds no CUDA device" in result.output
